"""Datasets by name, how image files are read, and the loaders."""

from projects_vil.data.build import (
    TRAIN_SAMPLERS,
    build_mapper,
    build_test_loader,
    build_train_loader,
    check_datasets,
    class_names,
    load_dataset,
    read_ahead,
)
from projects_vil.data.catalog import check_files, datasets_root, register_datasets
from projects_vil.data.dataset_mapper import CROP_TYPES, Mapper, SemSegMapper, check_padding
from projects_vil.data.datasets.ade20k import IGNORED_LABEL, label_reader
from projects_vil.data.datasets.coco import CHECKS, check_coco, check_output, evaluated_as, is_coco, write_cleaned
from projects_vil.data.datasets.shapes import SHAPES_TASKS, describe_shapes, write_shapes_dataset
from projects_vil.data.datasets.subset import write_subset
from projects_vil.data.detection_utils import (
    IMAGE_SUFFIXES,
    UnreadableImage,
    read_for_testing,
    read_image,
    read_size,
    read_unturned,
    size_for_testing,
    upright_pixels,
    upright_size,
)
from projects_vil.data.recipes import check_augmentation
from projects_vil.data.samplers import EvaluationLoader, derived_seed, seed_all

__all__ = [
    "CHECKS",
    "CROP_TYPES",
    "IGNORED_LABEL",
    "IMAGE_SUFFIXES",
    "SHAPES_TASKS",
    "TRAIN_SAMPLERS",
    "EvaluationLoader",
    "Mapper",
    "SemSegMapper",
    "UnreadableImage",
    "build_mapper",
    "build_test_loader",
    "build_train_loader",
    "check_augmentation",
    "check_coco",
    "check_datasets",
    "check_files",
    "check_output",
    "check_padding",
    "class_names",
    "datasets_root",
    "derived_seed",
    "describe_shapes",
    "evaluated_as",
    "is_coco",
    "label_reader",
    "load_dataset",
    "read_ahead",
    "read_for_testing",
    "read_image",
    "read_size",
    "read_unturned",
    "register_datasets",
    "seed_all",
    "size_for_testing",
    "upright_pixels",
    "upright_size",
    "write_cleaned",
    "write_shapes_dataset",
    "write_subset",
]
