"""Datasets by name, and loaders that say clearly what is wrong with a file."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import (
    DatasetCatalog,
    DatasetMapper,
    MetadataCatalog,
    build_detection_test_loader,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.data.datasets import register_coco_instances
from detectron2.data.detection_utils import SizeMismatchError

from backbones import InputError
from backbones.errors import closest

# In drawings: circles red, squares green, triangles blue, as they are in the images.
SHAPES_COLORS = [(255, 80, 80), (80, 255, 80), (90, 150, 255)]


def datasets_root() -> Path:
    """Where detectron2 looks for datasets: ``DETECTRON2_DATASETS``, or ``datasets``."""
    return Path(os.path.expanduser(os.getenv("DETECTRON2_DATASETS", "datasets")))


def register_datasets(cfg: CfgNode) -> None:
    """Register ``shapes_train`` and ``shapes_val``, and those of ``DATASETS.COCO``, in detectron2's catalogs.

    Registering a name again with the same files does nothing.

    Raises:
        InputError: for an entry of ``DATASETS.COCO`` that is no triple, or a name that stands for other files.
    """
    shapes = datasets_root() / "shapes"
    for split in ("train", "val"):
        name = f"shapes_{split}"
        _register(name, shapes / "annotations" / f"instances_{split}.json", shapes / split)
        MetadataCatalog.get(name).thing_colors = SHAPES_COLORS
    for entry in cfg.DATASETS.COCO:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3 or not all(p and isinstance(p, str) for p in entry):
            raise InputError(f"DATASETS.COCO has {entry!r}: an entry is [name, annotation file, image folder]")
        _register(entry[0], Path(entry[1]), Path(entry[2]))


def load_dataset(cfg: CfgNode, names: Iterable[str], *, train: bool) -> list[dict[str, Any]]:
    """The records of some datasets in detectron2's format; for training without images that have no annotation.

    Raises:
        InputError: for an unknown name, a missing file or folder, an annotation file that is not COCO JSON, images
            that are not there, a number of classes that is not the config's, or nothing to train on.
    """
    names = list(names)
    if not names:
        raise InputError(f"DATASETS.{'TRAIN' if train else 'TEST'} is empty: name a dataset")
    for name in names:
        check_files(name)
    try:
        records = get_detection_dataset_dicts(
            names, filter_empty=train and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS, check_consistency=False
        )
    except json.JSONDecodeError as error:
        raise InputError(f"{_annotations(names)} is not JSON: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{_annotations(names)} is not a COCO annotation file: {type(error).__name__} {error}"
        ) from error
    except AssertionError as error:
        if "No valid data" not in str(error):
            raise InputError(f"{_annotations(names)} is not a COCO annotation file: {error}") from error
        records = []
    if not records:
        raise InputError(f"{_annotations(names)} has no image {'with an annotation' if train else ''} to work on")
    _check_annotations(cfg, names, records, train=train)
    _check_images(names, records)
    for name in names:
        _check_classes(cfg, name, names[0])
    return records


def build_train_loader(cfg: CfgNode) -> torch.utils.data.DataLoader:
    """detectron2's training loader over ``DATASETS.TRAIN``."""
    records = load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)
    return build_detection_train_loader(cfg, mapper=Mapper(cfg, is_train=True), dataset=records)


def build_test_loader(cfg: CfgNode, dataset_name: str) -> torch.utils.data.DataLoader:
    """detectron2's test loader over one dataset, an image a batch."""
    records = load_dataset(cfg, [dataset_name], train=False)
    return build_detection_test_loader(
        dataset=records, mapper=Mapper(cfg, is_train=False), num_workers=cfg.DATALOADER.NUM_WORKERS
    )


class Mapper(DatasetMapper):
    """detectron2's mapper; an image that cannot be read is an :class:`InputError` that names the file."""

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any]:
        try:
            return super().__call__(dataset_dict)
        except (OSError, SyntaxError) as error:
            raise InputError(
                f"cannot read the image {dataset_dict['file_name']}: {' '.join(str(error).split())}; mend it or "
                "take it out of the annotation file"
            ) from error
        except SizeMismatchError as error:
            raise InputError(f"{' '.join(str(error).split())} ({dataset_dict['file_name']})") from error


def _register(name: str, annotations: Path, images: Path) -> None:
    known = MetadataCatalog.get(name) if name in DatasetCatalog.list() else None
    if known is None:
        register_coco_instances(name, {}, str(annotations), str(images))
    elif (known.get("json_file"), known.get("image_root")) != (str(annotations), str(images)):
        if name not in ("shapes_train", "shapes_val"):
            raise InputError(f"DATASETS.COCO: the name {name} stands for {known.get('json_file')} already")
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)
        register_coco_instances(name, {}, str(annotations), str(images))


def check_files(name: str) -> None:
    """Whether a dataset is registered and its annotation file and image folder exist.

    Raises:
        InputError: where not.
    """
    if name not in DatasetCatalog.list():
        raise InputError(
            f"unknown dataset {name!r}{closest(name, DatasetCatalog.list())}; DATASETS.COCO registers your own"
        )
    metadata = MetadataCatalog.get(name)
    for kind, path, exists in (
        ("annotation file", metadata.get("json_file"), os.path.isfile),
        ("image folder", metadata.get("image_root"), os.path.isdir),
    ):
        if path is not None and not exists(path):
            raise InputError(
                f"the {kind} of {name} is missing: {path}; DETECTRON2_DATASETS is {datasets_root()}, the folder that "
                "holds coco/ and the like"
            )


def _check_annotations(cfg: CfgNode, names: list[str], records: list[dict[str, Any]], *, train: bool) -> None:
    annotations = [annotation for record in records for annotation in record.get("annotations", ())]
    for annotation in annotations:
        box = annotation.get("bbox")
        if not isinstance(box, (list, tuple)) or len(box) != 4 or not all(isinstance(n, (int, float)) for n in box):
            raise InputError(f"{_annotations(names)} has the bbox {box!r}: it is [left, top, width, height]")
    if train and cfg.MODEL.MASK_ON and not any("segmentation" in annotation for annotation in annotations):
        raise InputError(f"{_annotations(names)} has no segmentation to learn masks from: set MODEL.MASK_ON False")


def _check_images(names: Iterable[str], records: list[dict[str, Any]]) -> None:
    present = {
        folder: set(os.listdir(folder))
        for folder in {os.path.dirname(record["file_name"]) for record in records}
        if os.path.isdir(folder)
    }
    missing = [
        record["file_name"]
        for record in records
        if os.path.basename(record["file_name"]) not in present.get(os.path.dirname(record["file_name"]), ())
    ]
    if missing:
        raise InputError(
            f"{len(missing)} of the {len(records)} images of {', '.join(names)} are missing, the first is {missing[0]}"
        )


def _check_classes(cfg: CfgNode, name: str, first: str) -> None:
    classes = MetadataCatalog.get(name).get("thing_classes")
    if classes is None:
        return
    if cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        key, number = "MODEL.RETINANET.NUM_CLASSES", cfg.MODEL.RETINANET.NUM_CLASSES
    else:
        key, number = "MODEL.ROI_HEADS.NUM_CLASSES", cfg.MODEL.ROI_HEADS.NUM_CLASSES
    if len(classes) != number:
        raise InputError(f"{key} is {number}, and {name} has {len(classes)} classes; set it to {len(classes)}")
    if classes != MetadataCatalog.get(first).get("thing_classes"):
        raise InputError(f"{first} and {name} have other classes, or the same in another order: they cannot be mixed")


def _annotations(names: Iterable[str]) -> str:
    return ", ".join(MetadataCatalog.get(name).get("json_file") or name for name in names)
