"""Evaluate detectors and predictions, compute validation losses, and write the results."""

from projects_vil.evaluation.evaluators import (
    CheckedEvaluator,
    COCOEvaluator,
    build_evaluator,
    check_metric,
    split_metric_name,
)
from projects_vil.evaluation.losses import LOSS_TASK, validation_loss
from projects_vil.evaluation.predictions import evaluate_predictions
from projects_vil.evaluation.results import EVALUATION_FILE, PER_CLASS, check_finite, explain_results, write_results
