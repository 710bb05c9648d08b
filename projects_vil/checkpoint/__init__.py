"""Checkpoints: reading, writing, converting, and their metadata."""

from projects_vil.checkpoint.categories import Categories, checked_ids, dataset_categories, known_categories
from projects_vil.checkpoint.checkpointer import (
    Checkpointer,
    build_detector,
    check_weights,
    check_weights_file,
    describe_classes,
    load_detector,
    match_all_classes,
)
from projects_vil.checkpoint.metadata import METADATA_KEY, CheckpointMetadata, fingerprint, versions
from projects_vil.checkpoint.pretrained import convert_file, convert_official, is_classifier, named_variant
from projects_vil.checkpoint.storage import (
    LAST_CHECKPOINT,
    checkpoints_of,
    read_last_checkpoint,
    remove_old,
    remove_partial,
    remove_run,
    slim_checkpoint,
)

__all__ = [
    "LAST_CHECKPOINT",
    "METADATA_KEY",
    "Categories",
    "CheckpointMetadata",
    "Checkpointer",
    "build_detector",
    "check_weights",
    "check_weights_file",
    "checked_ids",
    "checkpoints_of",
    "convert_file",
    "convert_official",
    "dataset_categories",
    "describe_classes",
    "fingerprint",
    "is_classifier",
    "known_categories",
    "load_detector",
    "match_all_classes",
    "named_variant",
    "read_last_checkpoint",
    "remove_old",
    "remove_partial",
    "remove_run",
    "slim_checkpoint",
    "versions",
]
