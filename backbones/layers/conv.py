"""The types of BatchNorm that a model can be built with, and convolutions of CvT."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from backbones.layers.tracing import at_least_float32, contiguous_for_export

# "frozen": statistics and weights are never trained; "sync": statistics over all processes.
BATCH_NORMS = {"batch": nn.BatchNorm2d, "frozen": FrozenBatchNorm2d, "sync": nn.SyncBatchNorm}


class SeparableProjection(nn.Module):
    """CvT's projection (section 3.2): a 3 x 3 convolution of each channel, BatchNorm, a linear layer over channels."""

    def __init__(self, dim: int, out_dim: int, *, norm: str = "batch") -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        self.norm = BATCH_NORMS[norm](dim)
        self.pointwise = nn.Linear(dim, out_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, H, W, dim) -> (B, H, W, out_dim)."""
        features = self.norm(self.depthwise(contiguous_for_export(tokens.permute(0, 3, 1, 2))))
        return self.pointwise(features.permute(0, 2, 3, 1))


class StandardisedProjection(nn.Module):
    """As :class:`SeparableProjection`, with standardised spatial weights instead of BatchNorm, and no bias.

    Made for scores that a softmax over the tokens follows: a bias would add the same to all and change nothing.
    """

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        self.depthwise = StandardisedConv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        self.pointwise = nn.Linear(dim, out_dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, H, W, dim) -> (B, H, W, out_dim)."""
        return self.pointwise(self.depthwise(contiguous_for_export(tokens.permute(0, 3, 1, 2))).permute(0, 2, 3, 1))


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1 each (Qiao et al. 2019, arXiv:1903.10520, equation 4)."""

    def forward(self, features: Tensor) -> Tensor:
        return F.conv2d(features, self.standardised(), self.bias, self.stride, self.padding, self.dilation, self.groups)

    def standardised(self) -> Tensor:
        """The weight that convolves, (out, in / groups, height, width); computed in float32 or better."""
        weight = at_least_float32(self.weight)
        variance, mean = torch.var_mean(weight, dim=(1, 2, 3), keepdim=True, correction=0)
        return ((weight - mean) * torch.rsqrt(variance + 1e-5)).to(self.weight.dtype)
