"""Checkpoints: reading, converting, and what they say of themselves."""

from projects_vil.checkpoint.categories import Categories, checked_ids, dataset_categories, known_categories
from projects_vil.checkpoint.class_rows import match_classes
from projects_vil.checkpoint.detection_checkpoint import Checkpointer, check_weights, check_weights_file
from projects_vil.checkpoint.fingerprint import fingerprint
from projects_vil.checkpoint.origins.classifier import LoadedClassifier, load_classifier
from projects_vil.checkpoint.origins.conversion import convert_file
from projects_vil.checkpoint.provenance import PROVENANCE_KEY, Provenance, versions
from projects_vil.checkpoint.slimming import slim_checkpoint
from projects_vil.checkpoint.storage import (
    LAST_CHECKPOINT,
    checkpoints_of,
    find_checkpoint,
    optimizer_groups,
    remove_old,
    remove_partial,
    remove_run,
)
from projects_vil.checkpoint.trained import build_detector, load_detector

__all__ = [
    "LAST_CHECKPOINT",
    "PROVENANCE_KEY",
    "Categories",
    "Checkpointer",
    "LoadedClassifier",
    "Provenance",
    "build_detector",
    "check_weights",
    "check_weights_file",
    "checked_ids",
    "checkpoints_of",
    "convert_file",
    "dataset_categories",
    "find_checkpoint",
    "fingerprint",
    "known_categories",
    "load_classifier",
    "load_detector",
    "match_classes",
    "optimizer_groups",
    "remove_old",
    "remove_partial",
    "remove_run",
    "slim_checkpoint",
    "versions",
]
