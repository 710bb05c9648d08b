"""The kinds of BatchNorm that a model can be built with."""

from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from backbones.utils.errors import check_choice

# "frozen": statistics and weights are never trained; "sync": statistics over all processes.
BATCH_NORMS = {"batch": nn.BatchNorm2d, "frozen": FrozenBatchNorm2d, "sync": nn.SyncBatchNorm}


def batch_norm(channels: int, kind: str) -> nn.Module:
    """A norm of maps (B, C, H, W), one of ``BATCH_NORMS``."""
    check_choice("batch norm", kind, BATCH_NORMS)
    return BATCH_NORMS[kind](channels)
