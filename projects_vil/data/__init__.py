"""Registered datasets, dataset checks and fixes, reading of image files, and data loaders."""

from projects_vil.data.augmentation import AUGMENTATIONS
from projects_vil.data.build import (
    build_test_loader,
    build_train_loader,
    derived_seed,
    make_test_loader,
    make_train_loader,
    seed_all,
)
from projects_vil.data.catalog import (
    categories_of,
    check_files,
    class_names,
    class_order,
    describe_classes,
    match_all_classes,
    match_classes,
    read_categories,
    register_datasets,
)
from projects_vil.data.check import check_dataset, write_cleaned, write_fixed
from projects_vil.data.coco_checks import CocoFile
from projects_vil.data.dataset_mapper import Mapper
from projects_vil.data.detection_utils import (
    IGNORED_LABEL,
    IMAGE_SUFFIXES,
    UNSUPPORTED_SUFFIXES,
    label_reader,
    read_for_testing,
    read_image,
    read_size,
    size_for_testing,
    upright_pixels,
)
from projects_vil.data.readers import SOURCE, Dataset, read_dataset
from projects_vil.data.records import (
    CHECK_MODES,
    SharedRecords,
    fixed_coco,
    ground_truth,
    in_order,
    is_coco,
    load_dataset,
    read_datasets,
    read_records,
)
from projects_vil.data.writers import check_output, convert_dataset, write_detections
