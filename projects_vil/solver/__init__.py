"""Optimizers and learning-rate schedules."""

from projects_vil.solver.build import build_optimizer, parameter_groups
from projects_vil.solver.lr_scheduler import build_lr_scheduler

__all__ = [
    "build_lr_scheduler",
    "build_optimizer",
    "parameter_groups",
]
