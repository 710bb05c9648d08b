"""Registered datasets, dataset checks and fixes, reading of image files, and data loaders."""

from projects_vil.data.augmentation import AUGMENTATIONS, check_augmentation
from projects_vil.data.build import (
    build_test_loader,
    build_train_loader,
    class_names,
    class_order,
    in_order,
    load_dataset,
    make_train_loader,
    read_datasets,
    read_records,
)
from projects_vil.data.catalog import (
    check_files,
    describe_classes,
    match_all_classes,
    match_classes,
    read_categories,
    register_datasets,
)
from projects_vil.data.check import check_dataset, removed_on_error, write_fixed
from projects_vil.data.coco import CHECK_MODES, fixed_coco, ground_truth, is_coco, write_cleaned
from projects_vil.data.coco_checks import CocoFile
from projects_vil.data.dataset_mapper import Mapper, check_crop
from projects_vil.data.detection_utils import (
    IGNORED_LABEL,
    IMAGE_SUFFIXES,
    UNSUPPORTED_SUFFIXES,
    UnreadableImage,
    label_reader,
    read_for_testing,
    read_image,
    read_size,
    size_for_testing,
    upright_pixels,
)
from projects_vil.data.readers import SOURCE, Dataset, read_dataset
from projects_vil.data.samplers import EvaluationLoader, derived_seed, seed_all
from projects_vil.data.writers import check_output, convert_dataset, write_detections
