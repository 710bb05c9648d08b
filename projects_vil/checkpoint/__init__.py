"""Checkpoints: reading, writing, converting, and their metadata."""

from projects_vil.checkpoint.checkpointer import (
    BEST_CHECKPOINT,
    PUBLISHED_WEIGHTS,
    Checkpointer,
    check_weights,
    checkpoints_of,
    find_model,
    load_detector,
    remove_old,
    remove_run,
    weights_of,
)
from projects_vil.checkpoint.metadata import METADATA_KEY, CheckpointMetadata, fingerprint, versions
from projects_vil.checkpoint.pretrained import convert_file, convert_official, is_classifier, named_variant
from projects_vil.checkpoint.zoo import find_weights, is_zoo_name, read_zoo, zoo_entry
