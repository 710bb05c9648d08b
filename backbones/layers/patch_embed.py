"""Patch embedding (ViL section 3.1): a strided convolution and a LayerNorm."""

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.tracing import is_tracing, padding_to_multiple


def pad_to_multiple(features: Tensor, multiple: int) -> Tensor:
    """Pad (B, C, H, W) with zeros at the bottom and on the right, so that ``multiple`` divides both sides."""
    pad_height, pad_width = (padding_to_multiple(size, multiple) for size in features.shape[2:])
    if not is_tracing() and not pad_height and not pad_width:
        return features
    return F.pad(features, (0, pad_width, 0, pad_height))


class PatchEmbed(nn.Module):
    """Embed the patches of a feature map: a convolution with stride ``patch_size``, then a LayerNorm.

    If the height or width is not a multiple of ``patch_size``, the feature map is padded with zeros at the bottom and
    on the right.

    Args:
        in_channels: Channels of the feature map.
        dim: Channels of a token.
        patch_size: Side of a patch.
        norm_eps: Epsilon of the norm.
        kernel_size: Side of overlapping patches (CvT section 3.1). None for ``patch_size``.
    """

    def __init__(
        self, in_channels: int, dim: int, *, patch_size: int, norm_eps: float = 1e-6, kernel_size: int | None = None
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        kernel_size = kernel_size or patch_size
        # 2 for 7 x 7 with stride 4, 1 for 3 x 3 with stride 2
        padding = -(-(kernel_size - patch_size) // 2)
        self.proj = nn.Conv2d(in_channels, dim, kernel_size, patch_size, padding)
        self.norm = nn.LayerNorm(dim, eps=norm_eps)

    def forward(self, features: Tensor) -> Tensor:
        """Return tokens (B, ceil(H / patch), ceil(W / patch), dim) from (B, C, H, W)."""
        features = self.proj(pad_to_multiple(features, self.patch_size))
        return self.norm(features.permute(0, 2, 3, 1))
