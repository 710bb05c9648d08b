"""The types of BatchNorm that a model can be built with."""

from torch import nn
from torchvision.ops import FrozenBatchNorm2d

# "frozen": statistics and weights are never trained; "sync": statistics over all processes.
BATCH_NORMS = {"batch": nn.BatchNorm2d, "frozen": FrozenBatchNorm2d, "sync": nn.SyncBatchNorm}
