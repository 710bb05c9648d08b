"""Evaluators, the file of results, and what its figures mean."""

from projects_vil.evaluation.build import build_evaluator, coco_evaluator
from projects_vil.evaluation.coco import COCO_APIS, check_coco_api
from projects_vil.evaluation.explaining import explain_results
from projects_vil.evaluation.losses import LOSS_TASK, validation_loss
from projects_vil.evaluation.metrics import check_metric, parts_of_metric
from projects_vil.evaluation.results import (
    EVALUATED_FILE,
    PER_CLASS,
    RESULTS_FILE,
    read_results,
    results_as_files,
    write_results,
)

__all__ = [
    "COCO_APIS",
    "EVALUATED_FILE",
    "LOSS_TASK",
    "PER_CLASS",
    "RESULTS_FILE",
    "build_evaluator",
    "check_coco_api",
    "check_metric",
    "coco_evaluator",
    "explain_results",
    "parts_of_metric",
    "read_results",
    "results_as_files",
    "validation_loss",
    "write_results",
]
