"""What is done between iterations."""

from projects_vil.engine.hooks.averaging import AverageWeights, average_of, start_average
from projects_vil.engine.hooks.judging import KeepBest, StopEarly, StoppedEarly
from projects_vil.engine.hooks.saving import SaveCheckpoints, SaveEvaluated, WriteMetrics
from projects_vil.engine.hooks.schedules import LRScheduler, RandomShift, RedrawFeatures

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
