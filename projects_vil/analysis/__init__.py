"""Parameters, FLOPs and time of models, and classifiers on the sets of ImageNet."""

from projects_vil.analysis.benchmark import (
    DTYPES,
    WHATS,
    Case,
    as_json_of,
    draw_measurements,
    find_limits,
    format_limits,
    format_measurements,
    measure,
    measure_rates,
)
from projects_vil.analysis.coco_api import compare_coco_apis
from projects_vil.analysis.counting import count_variants, format_counts
from projects_vil.analysis.dataset_check import time_dataset_check
from projects_vil.analysis.detector import analyze, as_json, format_analyses
from projects_vil.analysis.robustness import ROBUSTNESS_SETS, evaluate_robustness, format_robustness, robustness_as_json

__all__ = [
    "DTYPES",
    "ROBUSTNESS_SETS",
    "WHATS",
    "Case",
    "analyze",
    "as_json",
    "as_json_of",
    "compare_coco_apis",
    "count_variants",
    "draw_measurements",
    "evaluate_robustness",
    "find_limits",
    "format_analyses",
    "format_counts",
    "format_limits",
    "format_measurements",
    "format_robustness",
    "measure",
    "measure_rates",
    "robustness_as_json",
    "time_dataset_check",
]
