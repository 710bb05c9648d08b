"""Evaluators, and the file of results."""

from projects_vil.evaluation.build import build_evaluator, coco_evaluator
from projects_vil.evaluation.results import write_results

__all__ = [
    "build_evaluator",
    "coco_evaluator",
    "write_results",
]
