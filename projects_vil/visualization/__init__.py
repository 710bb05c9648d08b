"""Draw datasets, predictions, attention maps and sampling positions."""

from projects_vil.visualization.drawing import Canvas, draw_instances, write_image
from projects_vil.visualization.inspection import draw_attention, draw_offsets
from projects_vil.visualization.predictions import draw_evaluation, draw_results, draw_samples, predictions_file
