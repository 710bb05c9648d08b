"""Parameters, FLOPs, time and memory of models."""

from projects_vil.analysis.benchmark import BenchmarkCase, format_measurements, measure, tune_attention
from projects_vil.analysis.counting import count_detector, count_variants, format_detectors, format_variants
