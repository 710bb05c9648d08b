"""Token merging (LIT section 3.3): 2 x 2 tokens become one, sampled at learned offsets or on the regular grid.

Shapes: B images, C input and D output channels, H x W input and ceil(H / 2) x ceil(W / 2) output tokens. An odd height
or width is padded with zeros at the bottom or on the right.
"""

import contextlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.models.swin_transformer import PatchMerging
from torch import Tensor, nn
from torchvision.ops import DeformConv2d, deform_conv2d

from backbones.errors import ConfigError
from backbones.layers import tracing
from backbones.layers.block import pad_to_multiple
from backbones.layers.conv import batch_norm


class DeformableTokenMerging(DeformConv2d):
    """A deformable convolution of 2 x 2 tokens with stride 2, BatchNorm and GELU (equations 7 and 8).

    The offsets start at zero (section 4.1), so that a new module is a plain convolution. Sampling positions and
    products are computed in float32 or better, regardless of autocast. To load a trace of the module, import
    torchvision first.

    Args:
        in_channels: Channels C of an input token.
        dim: Channels D of an output token.
        norm: A key of ``BATCH_NORMS``.
    """

    def __init__(self, in_channels: int, dim: int, *, norm: str = "BN") -> None:
        super().__init__(in_channels, dim, kernel_size=2, stride=2)
        self.offset = nn.Conv2d(in_channels, 8, kernel_size=2, stride=2)
        nn.init.zeros_(self.offset.weight)
        nn.init.zeros_(self.offset.bias)
        self.norm = batch_norm(norm, dim)

    def forward(self, features: Tensor) -> Tensor:
        """Return the merged tokens (B, ceil(H / 2), ceil(W / 2), D) of a feature map (B, C, H, W)."""
        return F.gelu(self.norm(self._merge(features))).permute(0, 2, 3, 1)

    def offsets(self, features: Tensor) -> Tensor:
        """Return the offset of each sampling position from the regular grid, in input tokens.

        Args:
            features: (B, C, H, W).

        Returns:
            (B, ceil(H / 2), ceil(W / 2), 2, 2, 2): merged token, row and column of its 2 x 2 tokens, (y, x).
        """
        with tracing.autocast_off(features.device):
            offsets = self._offset(tracing.at_least_float32(pad_to_multiple(features, 2)))
            return offsets.permute(0, 2, 3, 1).unflatten(3, (2, 2, 2))

    def _merge(self, features: Tensor) -> Tensor:
        # torchvision's operator checks the channels.
        without_warnings = tracing.no_trace_warnings if tracing.is_tracing() else contextlib.nullcontext
        with tracing.autocast_off(features.device), without_warnings():
            padded = tracing.at_least_float32(pad_to_multiple(features, 2))
            weight, bias = self.weight.to(padded.dtype), self.bias.to(padded.dtype)
            # torchvision's operator is five times slower on a CPU, and many runtimes do not have it.
            is_sampling = tracing.is_exporting() or (features.device.type == "cpu" and not tracing.is_tracing())
            convolve = deformable_by_sampling if is_sampling else deform_conv2d
            return convolve(padded, self._offset(padded), weight, bias, stride=2).to(features.dtype)

    def _offset(self, padded: Tensor) -> Tensor:
        weight, bias = self.offset.weight.to(padded.dtype), self.offset.bias.to(padded.dtype)
        return F.conv2d(padded, weight, bias, stride=2)


def deformable_by_sampling(features: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, *, stride: int) -> Tensor:
    """Return ``torchvision.ops.deform_conv2d`` for a kernel as large as its stride, with widely supported operators.

    The feature map is sampled once per token, and a plain convolution follows. Sampling is not differentiable at whole
    numbers. There the gradient is the derivative of one side, which depends on rounding.

    Args:
        features: (B, C, H, W).
        offset: (B, 2 * S * S, H / S, W / S) for a stride of S: (y, x) for each position of the kernel.
        weight: (D, C, S, S).
        bias: (D,).
        stride: Stride S. It divides H and W.

    Returns:
        (B, D, H / S, W / S)
    """
    batch, _, height, width = features.shape
    # (B, H, W, 2): each position of the feature map belongs to one merged token.
    offset = tracing.contiguous_for_export(offset.unflatten(1, (stride, stride, 2)).permute(0, 4, 1, 5, 2, 3))
    offset = offset.reshape(batch, height, width, 2)
    rows = torch.arange(height, device=features.device, dtype=features.dtype)
    cols = torch.arange(width, device=features.device, dtype=features.dtype)
    # From -1 at the center of the first token to 1 at the center of the last one
    y = (rows[:, None] + offset[..., 0]) * (2 / (height - 1)) - 1
    x = (cols + offset[..., 1]) * (2 / (width - 1)) - 1
    sampled = F.grid_sample(features, torch.stack([x, y], dim=-1), padding_mode="zeros", align_corners=True)
    return F.conv2d(sampled, weight, bias, stride=stride)


class LinearTokenMerging(PatchMerging):
    """The uniform merging of Swin, for LIT-S* in Table 3: a LayerNorm of 2 x 2 tokens, then a linear layer."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the merged tokens (B, ceil(H / 2), ceil(W / 2), D) of a feature map (B, C, H, W)."""
        return super().forward(features.permute(0, 2, 3, 1))


def sampled_positions(offsets: Sequence[Tensor], row: int, col: int) -> Tensor:
    """Return the positions that a merged token is sampled from, through n merging modules (LIT Figure 2).

    A position between tokens continues at the nearest token. A position outside the feature map continues at the token
    at its edge.

    Args:
        offsets: The offsets (H, W, 2, 2, 2) of each module for one image, first module first. See
            :meth:`DeformableTokenMerging.offsets`.
        row: Row of an output token of the last module.
        col: Column of this token.

    Returns:
        (4^n, 2): (y, x) in input tokens of the first module. Whole numbers are centers of tokens. For patches of P
        pixels, the center is at pixel (y + 0.5) * P - 0.5.

    Raises:
        ConfigError: If the last feature map has no such token.
    """
    height, width = offsets[-1].shape[:2]
    if not (0 <= row < height and 0 <= col < width):
        advice = f"Use a row of at most {height - 1} and a column of at most {width - 1}."
        raise ConfigError(f"Token ({row}, {col}) is outside the feature map of {height} x {width} tokens. {advice}")
    positions = offsets[-1].new_tensor([[row, col]])
    for offset in reversed(offsets):
        height, width = offset.shape[:2]
        tokens = positions.round().long()
        rows, cols = tokens[:, 0].clamp(0, height - 1), tokens[:, 1].clamp(0, width - 1)
        steps = torch.arange(2, device=offset.device)
        grid = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), dim=-1)
        regular = 2 * torch.stack([rows, cols], dim=-1)[:, None, None] + grid
        positions = (regular + offset[rows, cols]).flatten(0, 2)
    return positions
