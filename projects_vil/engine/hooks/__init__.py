"""What is done between iterations."""

from projects_vil.engine.hooks.averaging import AverageWeights, average_of, start_average
from projects_vil.engine.hooks.judging import KeepBest, StopEarly, StoppedEarly
from projects_vil.engine.hooks.model import LRScheduler, RandomShift, RedrawFeatures
from projects_vil.engine.hooks.saving import SaveCheckpoints, SaveEvaluated, WriteMetrics

__all__ = [
    "AverageWeights",
    "KeepBest",
    "LRScheduler",
    "RandomShift",
    "RedrawFeatures",
    "SaveCheckpoints",
    "SaveEvaluated",
    "StopEarly",
    "StoppedEarly",
    "WriteMetrics",
    "average_of",
    "start_average",
]
