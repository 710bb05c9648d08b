"""Datasets by name, and loaders that say clearly what is wrong with a file."""

import copy
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
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
from detectron2.data import transforms as T
from detectron2.data.datasets import register_coco_instances
from detectron2.data.detection_utils import SizeMismatchError, check_image_size, transform_proposals

from backbones import InputError
from backbones.errors import closest
from projects_vil.data.datasets.ade20k import ADE20K_CLASSES, SemSegMapper, is_segmentor, read_classes, register_ade20k
from projects_vil.data.datasets.ade20k import IGNORED as IGNORED_LABEL
from projects_vil.data.datasets.shapes import SEM_SEG_CLASS_NAMES
from projects_vil.data.detection_utils import UnreadableImage, read_image

# In drawings: circles red, squares green, triangles blue, as they are in the images.
SHAPES_COLORS = [(255, 80, 80), (80, 255, 80), (90, 150, 255)]
BACKGROUND_COLOR = (90, 90, 90)
# Registered without a key in the config, below datasets_root().
_OWN_NAMES = {f"{name}_{split}" for name in ("shapes", "shapes_sem_seg", "ade20k") for split in ("train", "val")}


def datasets_root() -> Path:
    """Where detectron2 looks for datasets: ``DETECTRON2_DATASETS``, or ``datasets``."""
    return Path(os.path.expanduser(os.getenv("DETECTRON2_DATASETS", "datasets")))


def register_datasets(cfg: CfgNode) -> None:
    """Register this project's datasets and those of ``DATASETS.COCO`` and ``DATASETS.ADE20K`` in detectron2's catalogs.

    Its own, with ``_train`` and ``_val`` at the end, are ``shapes`` and ``shapes_sem_seg``, which are drawn, and
    ``ade20k``, ``ADEChallengeData2016`` as published. Registering a name again with the same files does nothing.

    Raises:
        InputError: for an entry of the wrong form, names of classes that cannot be read, or a name that stands for
            other files.
    """
    root = datasets_root()
    for split, folder in (("train", "training"), ("val", "validation")):
        _register_coco(
            f"shapes_{split}", root / f"shapes/annotations/instances_{split}.json", root / "shapes" / split
        )
        MetadataCatalog.get(f"shapes_{split}").thing_colors = SHAPES_COLORS
        for name, parent, classes in (
            ("shapes_sem_seg", root / "shapes_sem_seg", SEM_SEG_CLASS_NAMES),
            ("ade20k", root / "ADEChallengeData2016", ADE20K_CLASSES),
        ):
            _register_ade20k(f"{name}_{split}", parent / "images" / folder, parent / "annotations" / folder, classes)
        MetadataCatalog.get(f"shapes_sem_seg_{split}").stuff_colors = [BACKGROUND_COLOR, *SHAPES_COLORS]
    for entry in cfg.DATASETS.COCO:
        if not _is_list_of_strings(entry, lengths=(3,)):
            raise InputError(f"DATASETS.COCO has {entry!r}: an entry is [name, annotation file, image folder]")
        _register_coco(entry[0], Path(entry[1]), Path(entry[2]))
    for entry in cfg.DATASETS.ADE20K:
        if not _is_list_of_strings(entry, lengths=(3, 4)):
            raise InputError(
                f"DATASETS.ADE20K has {entry!r}: an entry is [name, image folder, label folder], or these and a file "
                "with a class name a line"
            )
        classes = read_classes(entry[3]) if len(entry) == 4 else ADE20K_CLASSES
        _register_ade20k(entry[0], Path(entry[1]), Path(entry[2]), classes)


def load_dataset(cfg: CfgNode, names: Iterable[str], *, train: bool) -> list[dict[str, Any]]:
    """The records of some datasets in detectron2's format; for training without images that have no annotation.

    Raises:
        InputError: for an unknown name, a missing file or folder, an annotation file that is not COCO JSON, images
            that are not there, boxes where the model learns from label images or the other way round, a number of
            classes that is not the config's, or nothing to train on.
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
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(f"{_annotations(names)} is not JSON: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{_annotations(names)} is not a COCO annotation file: {type(error).__name__} {error}"
        ) from error
    except AssertionError as error:
        if any(MetadataCatalog.get(name).get("sem_seg_root") for name in names):
            raise InputError(f"{_annotations(names)}: {error}") from error
        if "No valid data" not in str(error):
            raise InputError(f"{_annotations(names)} is not a COCO annotation file: {error}") from error
        records = []
    if not records:
        raise InputError(f"{_annotations(names)} has no image {'with an annotation' if train else ''} to work on")
    _check_task(cfg, names, records)
    _check_annotations(cfg, names, records, train=train)
    _check_images(names, records)
    for name in names:
        _check_classes(cfg, name, names[0])
    return records


def build_train_loader(cfg: CfgNode) -> torch.utils.data.DataLoader:
    """detectron2's training loader over ``DATASETS.TRAIN``."""
    records = load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)
    return build_detection_train_loader(cfg, mapper=build_mapper(cfg, is_train=True), dataset=records)


def build_test_loader(cfg: CfgNode, dataset_name: str) -> torch.utils.data.DataLoader:
    """detectron2's test loader over one dataset, an image a batch."""
    records = load_dataset(cfg, [dataset_name], train=False)
    return build_detection_test_loader(
        dataset=records, mapper=build_mapper(cfg, is_train=False), num_workers=cfg.DATALOADER.NUM_WORKERS
    )


def build_mapper(cfg: CfgNode, *, is_train: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The mapper of a detector, or of a SemanticSegmentor."""
    return SemSegMapper(cfg, is_train=is_train) if is_segmentor(cfg) else Mapper(cfg, is_train=is_train)


class Mapper(DatasetMapper):
    """detectron2's mapper, with images read by :func:`~projects_vil.data.detection_utils.read_image`.

    An image that cannot be read, or is of another size than its record says, is an :class:`InputError` that names it.
    """

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any]:
        record = copy.deepcopy(dataset_dict)
        labels = record.pop("sem_seg_file_name", None)
        try:
            image = read_image(record["file_name"], self.image_format)
            check_image_size(record, image)
            inputs = T.AugInput(image, sem_seg=read_image(labels, "L")[..., 0] if labels else None)
        except UnreadableImage as error:
            raise InputError(f"{error}; mend it or take it out of the annotation file") from error
        except SizeMismatchError as error:
            raise InputError(f"{' '.join(str(error).split())} ({record['file_name']})") from error
        transforms = self.augmentations(inputs)
        height, width = inputs.image.shape[:2]
        record["image"] = torch.from_numpy(np.ascontiguousarray(inputs.image.transpose(2, 0, 1)))
        if inputs.sem_seg is not None:
            record["sem_seg"] = torch.from_numpy(inputs.sem_seg.astype(np.int64))
        if self.proposal_topk is not None:
            transform_proposals(record, (height, width), transforms, proposal_topk=self.proposal_topk)
        if not self.is_train:
            record.pop("annotations", None)
        elif "annotations" in record:
            self._transform_annotations(record, transforms, (height, width))
        return record


def _register_coco(name: str, annotations: Path, images: Path) -> None:
    def register() -> None:
        register_coco_instances(name, {}, str(annotations), str(images))

    _register("DATASETS.COCO", name, register, json_file=str(annotations), image_root=str(images))


def _register_ade20k(name: str, images: Path, labels: Path, classes: Iterable[str]) -> None:
    def register() -> None:
        register_ade20k(name, images, labels, classes)

    classes = list(classes)
    paths = {"sem_seg_root": str(labels), "image_root": str(images)}
    _register("DATASETS.ADE20K", name, register, **paths, stuff_classes=classes)


def _register(key: str, name: str, register: Callable[[], None], **facts: Any) -> None:
    """Call ``register`` unless ``name`` is known with these facts in its metadata."""
    if name in DatasetCatalog.list():
        known = MetadataCatalog.get(name)
        if all(known.get(fact) == value for fact, value in facts.items()):
            return
        if name not in _OWN_NAMES:
            files = known.get("json_file") or known.get("sem_seg_root")
            raise InputError(f"{key}: the name {name} stands for {files} already")
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)
    register()


def read_for_testing(cfg: CfgNode, path: str | Path, *, image_format: str) -> tuple[np.ndarray, tuple[int, int]]:
    """An image file (H, W, 3) uint8, resized as for testing, and its height and width before.

    Raises:
        InputError: for a file that cannot be read.
    """
    original = read_image(path, image_format)
    height, width = original.shape[:2]
    resize = T.ResizeTransform(height, width, *size_for_testing(cfg, height, width))
    return np.ascontiguousarray(resize.apply_image(original)), (height, width)


def size_for_testing(cfg: CfgNode, height: int, width: int) -> tuple[int, int]:
    """Height and width that an image has after ``INPUT.MIN_SIZE_TEST`` and ``INPUT.MAX_SIZE_TEST``."""
    short = cfg.INPUT.MIN_SIZE_TEST
    if not short:
        return height, width
    return T.ResizeShortestEdge.get_output_shape(height, width, short, cfg.INPUT.MAX_SIZE_TEST)


def _is_list_of_strings(entry: object, *, lengths: tuple[int, ...]) -> bool:
    return isinstance(entry, (list, tuple)) and len(entry) in lengths and all(p and isinstance(p, str) for p in entry)


def number_of_classes(cfg: CfgNode) -> tuple[str, int]:
    """The key that holds it, and the number."""
    if is_segmentor(cfg):
        return "MODEL.SEM_SEG_HEAD.NUM_CLASSES", cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES
    if cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        return "MODEL.RETINANET.NUM_CLASSES", cfg.MODEL.RETINANET.NUM_CLASSES
    return "MODEL.ROI_HEADS.NUM_CLASSES", cfg.MODEL.ROI_HEADS.NUM_CLASSES


def check_files(name: str) -> None:
    """Whether a dataset is registered and its annotation file and image folder exist.

    Raises:
        InputError: where not.
    """
    if name not in DatasetCatalog.list():
        raise InputError(
            f"unknown dataset {name!r}{closest(name, DatasetCatalog.list())}; DATASETS.COCO or DATASETS.ADE20K "
            "registers your own"
        )
    metadata = MetadataCatalog.get(name)
    for kind, path, exists in (
        ("annotation file", metadata.get("json_file"), os.path.isfile),
        ("image folder", metadata.get("image_root"), os.path.isdir),
        ("label folder", metadata.get("sem_seg_root"), os.path.isdir),
    ):
        if path is not None and not exists(path):
            raise InputError(
                f"the {kind} of {name} is missing: {path}; DETECTRON2_DATASETS is {datasets_root()}, the folder that "
                "holds coco/ and the like"
            )


def _check_task(cfg: CfgNode, names: list[str], records: list[dict[str, Any]]) -> None:
    if not is_segmentor(cfg):
        if any("annotations" not in record and "sem_seg_file_name" in record for record in records):
            raise InputError(
                f"{', '.join(names)}: label images, and no boxes for a {cfg.MODEL.META_ARCHITECTURE}; it takes a "
                "dataset of DATASETS.COCO"
            )
        return
    if not all("sem_seg_file_name" in record for record in records):
        raise InputError(
            f"{', '.join(names)}: no label images for a SemanticSegmentor; it takes a dataset of DATASETS.ADE20K"
        )
    if cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE != IGNORED_LABEL:
        raise InputError(
            f"MODEL.SEM_SEG_HEAD.IGNORE_VALUE is {cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE}: it is {IGNORED_LABEL}"
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
    kind = "stuff_classes" if is_segmentor(cfg) else "thing_classes"
    classes = MetadataCatalog.get(name).get(kind)
    if classes is None:
        return
    key, number = number_of_classes(cfg)
    if len(classes) != number:
        raise InputError(f"{key} is {number}, and {name} has {len(classes)} classes; set it to {len(classes)}")
    if classes != MetadataCatalog.get(first).get(kind):
        raise InputError(f"{first} and {name} have other classes, or the same in another order: they cannot be mixed")


def _annotations(names: Iterable[str]) -> str:
    return ", ".join(MetadataCatalog.get(name).get("json_file") or name for name in names)
