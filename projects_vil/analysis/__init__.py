"""Parameters, FLOPs and time of models."""

from projects_vil.analysis.benchmark import BENCHMARK_TASKS, compare_detectors, resnet50_config
from projects_vil.analysis.coco_api import compare_coco_apis
from projects_vil.analysis.counting import count_variants, format_counts
from projects_vil.analysis.dataset_check import time_dataset_check
from projects_vil.analysis.detector import analyze, as_json, format_analyses

__all__ = [
    "BENCHMARK_TASKS",
    "analyze",
    "as_json",
    "compare_coco_apis",
    "compare_detectors",
    "count_variants",
    "format_analyses",
    "format_counts",
    "resnet50_config",
    "time_dataset_check",
]
