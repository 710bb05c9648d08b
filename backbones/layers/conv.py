"""The available types of BatchNorm, and the convolutional projections of CvT."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from backbones.errors import check_choice
from backbones.layers.tracing import at_least_float32, contiguous_for_export, in_autocast_dtype, static_size

# "FrozenBN" never trains statistics and weights. "SyncBN" computes statistics over all processes.
BATCH_NORMS = {"BN": nn.BatchNorm2d, "FrozenBN": FrozenBatchNorm2d, "SyncBN": nn.SyncBatchNorm}


def batch_norm(name: str, channels: int) -> nn.Module:
    """Return a norm of ``BATCH_NORMS``. An unknown name raises a :class:`ConfigError`."""
    check_choice("norm", name, BATCH_NORMS)
    return BATCH_NORMS[name](channels)


class SeparableProjection(nn.Module):
    """CvT's projection (section 3.2): a depth-wise 3 x 3 convolution, BatchNorm, and a linear layer over channels.

    Several projections of the same tokens are computed together. Each layer has their weights one after the other.

    Args:
        dim: Channels of a token.
        out_dim: Channels of a projected token.
        number: Number of projections.
        norm: A key of ``BATCH_NORMS``.
    """

    def __init__(self, dim: int, out_dim: int, *, number: int, norm: str = "BN") -> None:
        super().__init__()
        self.number = number
        self.depthwise = nn.Conv2d(number * dim, number * dim, 3, padding=1, groups=number * dim, bias=False)
        self.norm = batch_norm(norm, number * dim)
        self.pointwise = nn.Linear(dim, number * out_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the projections (number, B, H * W, out_dim) of tokens (B, H, W, dim)."""
        image, dim = contiguous_for_export(tokens.permute(0, 3, 1, 2)), static_size(tokens.shape[3])
        # Equal to the layer on ``number`` copies of the image, without the copies
        weights = in_autocast_dtype(self.depthwise.weight)[0].chunk(self.number)
        features = torch.cat([F.conv2d(image, weight, padding=1, groups=dim) for weight in weights], dim=1)
        # Without the explicit size, OpenVINO 2026.4 returns uninitialized memory.
        features = features.flatten(2).unflatten(2, tokens.shape[1:3])
        # (number, B * H * W, dim)
        features = contiguous_for_export(self.norm(features).permute(0, 2, 3, 1)).flatten(0, 2)
        features = features.unflatten(1, (self.number, dim)).transpose(0, 1)
        weight, bias = (x.unflatten(0, (self.number, -1)) for x in (self.pointwise.weight, self.pointwise.bias))
        projected = torch.baddbmm(bias[:, None], features, weight.transpose(1, 2))
        return projected.unflatten(1, (tokens.shape[0], tokens.shape[1] * tokens.shape[2]))


class StandardizedProjection(nn.Module):
    """A :class:`SeparableProjection` with standardized spatial weights instead of BatchNorm, and without bias.

    It computes scores for a softmax over the tokens, where a bias would have no effect.

    Args:
        dim: Channels of a token.
        out_dim: Channels of a projected token.
    """

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        self.depthwise = StandardizedConv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        self.pointwise = nn.Linear(dim, out_dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the projection (B, H, W, out_dim) of tokens (B, H, W, dim)."""
        return self.pointwise(self.depthwise(contiguous_for_export(tokens.permute(0, 3, 1, 2))).permute(0, 2, 3, 1))


class StandardizedConv2d(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1 (Qiao et al. 2019, arXiv:1903.10520, equation 4)."""

    def forward(self, features: Tensor) -> Tensor:
        return F.conv2d(features, self.standardized(), self.bias, self.stride, self.padding, self.dilation, self.groups)

    def standardized(self) -> Tensor:
        """Return the standardized weight (out, in / groups, height, width), computed in float32 or better."""
        filters = at_least_float32(self.weight).flatten(1)
        filters = F.layer_norm(filters, (static_size(filters.shape[1]),), eps=1e-5)
        return filters.to(self.weight.dtype).view_as(self.weight)
