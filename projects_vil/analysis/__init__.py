"""Parameters, FLOPs, time and memory of models."""

from projects_vil.analysis.benchmark import BenchmarkCase, format_measurements, growth, measure, plot_measurements
from projects_vil.analysis.counting import count_detector, count_variants, format_detectors, format_variants
from projects_vil.analysis.data_benchmark import compare_coco_apis, time_dataset_check
from projects_vil.analysis.limits import format_limits, measure_rates, roofline
from projects_vil.analysis.predict_benchmark import format_predictions, measure_predictions
