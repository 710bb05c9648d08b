"""Evaluators, and the file of results."""

from projects_vil.evaluation.build import build_evaluator, coco_evaluator
from projects_vil.evaluation.coco import check_coco_api
from projects_vil.evaluation.losses import LOSS_TASK, validation_loss
from projects_vil.evaluation.results import write_results

__all__ = [
    "LOSS_TASK",
    "build_evaluator",
    "check_coco_api",
    "coco_evaluator",
    "validation_loss",
    "write_results",
]
