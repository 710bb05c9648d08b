"""Time and memory of models beside each other."""

from projects_vil.analysis.benchmark.cases import DTYPES, WHATS, Case
from projects_vil.analysis.benchmark.limits import find_limits, measure_rates
from projects_vil.analysis.benchmark.measuring import measure
from projects_vil.analysis.benchmark.showing import as_json_of, draw_measurements, format_limits, format_measurements

__all__ = [
    "DTYPES",
    "WHATS",
    "Case",
    "as_json_of",
    "draw_measurements",
    "find_limits",
    "format_limits",
    "format_measurements",
    "measure",
    "measure_rates",
]
