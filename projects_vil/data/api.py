"""The public names of the package, which are imported at their first use."""

from projects_vil.data.augmentation import AUGMENTATIONS
from projects_vil.data.build import build_test_loader, build_train_loader, derived_seed, make_train_loader, seed_all
from projects_vil.data.catalog import Categories, check_files, class_order, label_reader, register_datasets
from projects_vil.data.check import check_dataset, write_cleaned, write_fixed
from projects_vil.data.coco_checks import CocoFile
from projects_vil.data.dataset_mapper import Mapper, size_for_testing, to_input
from projects_vil.data.image_files import IGNORED_LABEL, IMAGE_SUFFIXES, read_image
from projects_vil.data.readers import read_dataset
from projects_vil.data.records import CHECK_MODES, SharedRecords, in_order, load_dataset, read_datasets, read_records
from projects_vil.data.writers import convert_dataset
