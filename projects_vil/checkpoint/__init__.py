"""Checkpoints: reading, converting, and what they say of themselves."""

from projects_vil.checkpoint.conversion import convert_file
from projects_vil.checkpoint.detection_checkpoint import Checkpointer, check_weights, check_weights_file
from projects_vil.checkpoint.provenance import PROVENANCE_KEY, Provenance, coco_categories, versions
from projects_vil.checkpoint.slimming import slim_checkpoint
from projects_vil.checkpoint.trained import build_detector, load_detector

__all__ = [
    "PROVENANCE_KEY",
    "Checkpointer",
    "Provenance",
    "build_detector",
    "check_weights",
    "check_weights_file",
    "coco_categories",
    "convert_file",
    "load_detector",
    "slim_checkpoint",
    "versions",
]
