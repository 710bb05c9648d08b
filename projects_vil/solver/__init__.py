"""Optimizers and learning-rate schedules."""

from projects_vil.solver.build import OPTIMIZERS, build_optimizer, parameter_groups
from projects_vil.solver.clipping import clip_full_model
from projects_vil.solver.lr_scheduler import LR_SCHEDULERS, build_lr_scheduler, shown_group
from projects_vil.solver.schedule import count_training_images, is_by_epochs, scale_learning_rate, schedule_by_epochs

__all__ = [
    "LR_SCHEDULERS",
    "OPTIMIZERS",
    "build_lr_scheduler",
    "build_optimizer",
    "clip_full_model",
    "count_training_images",
    "is_by_epochs",
    "parameter_groups",
    "scale_learning_rate",
    "schedule_by_epochs",
    "shown_group",
]
