"""Drawings of results and of what happens inside a model."""

from projects_vil.visualization.attention_maps import draw_attention
from projects_vil.visualization.drawing import draw_instances, write_image
from projects_vil.visualization.evaluations import draw_evaluation
from projects_vil.visualization.results import draw_results, predictions_file, summarize_run
from projects_vil.visualization.samples import draw_samples
from projects_vil.visualization.sampling_maps import draw_offsets

__all__ = [
    "draw_attention",
    "draw_evaluation",
    "draw_instances",
    "draw_offsets",
    "draw_results",
    "draw_samples",
    "predictions_file",
    "summarize_run",
    "write_image",
]
