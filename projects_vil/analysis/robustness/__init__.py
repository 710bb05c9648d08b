"""Classifiers on the sets that ask more than ImageNet's validation images do."""

from projects_vil.analysis.robustness.evaluate import evaluate_robustness
from projects_vil.analysis.robustness.sets import ROBUSTNESS_SETS
from projects_vil.analysis.robustness.table import format_robustness, robustness_as_json

__all__ = ["ROBUSTNESS_SETS", "evaluate_robustness", "format_robustness", "robustness_as_json"]
