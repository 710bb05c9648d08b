"""Parameters, FLOPs, time and memory of models."""

from projects_vil.analysis.benchmark import (
    DTYPES,
    MEASURED_PARTS,
    BenchmarkCase,
    format_measurements,
    growth,
    measure,
    measurements_as_dicts,
    plot_measurements,
)
from projects_vil.analysis.counting import as_dicts, count_detector, count_variants, format_detectors, format_variants
from projects_vil.analysis.data_benchmark import compare_coco_apis, time_dataset_check
from projects_vil.analysis.limits import find_limits, format_limits, measure_rates

__all__ = [
    "DTYPES",
    "MEASURED_PARTS",
    "BenchmarkCase",
    "as_dicts",
    "compare_coco_apis",
    "count_detector",
    "count_variants",
    "find_limits",
    "format_detectors",
    "format_limits",
    "format_measurements",
    "format_variants",
    "growth",
    "measure",
    "measure_rates",
    "measurements_as_dicts",
    "plot_measurements",
    "time_dataset_check",
]
