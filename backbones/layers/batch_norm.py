"""The types of BatchNorm that a model can be built with."""

from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from backbones.errors import check_choice

# "frozen": statistics and weights are never trained; "sync": statistics over all processes.
BATCH_NORMS = {"batch": nn.BatchNorm2d, "frozen": FrozenBatchNorm2d, "sync": nn.SyncBatchNorm}


def batch_norm(channels: int, norm: str) -> nn.Module:
    """Build a norm of feature maps (B, C, H, W) of the type ``norm``, a key of ``BATCH_NORMS``."""
    check_choice("batch norm", norm, BATCH_NORMS)
    return BATCH_NORMS[norm](channels)
