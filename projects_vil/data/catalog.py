"""Datasets by name in detectron2's catalogs: COCO files, label images in ADE20K's layout, and both together."""

import contextlib
import json
import logging
import mmap
import multiprocessing
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json
from detectron2.data.datasets.builtin_meta import ADE20K_SEM_SEG_CATEGORIES

from backbones import ConfigError
from backbones.errors import check_file, closest
from projects_vil.config import first_of
from projects_vil.data.detection_utils import IGNORED_LABEL, IMAGE_SUFFIXES
from projects_vil.data.shapes import SHAPES_SEM_SEG_CLASSES
from projects_vil.utils import read_json

# In visualizations: circles red, squares green, triangles blue, as they are in the images.
SHAPES_COLORS = [(255, 80, 80), (80, 255, 80), (90, 150, 255)]
BACKGROUND_COLOR = (90, 90, 90)
PANOPTIC_EVALUATOR = "coco_panoptic_seg"
# Of a dataset's metadata.
_FILES = {"json_file": "annotation file", "image_root": "image folder", "sem_seg_root": "label folder"}


def datasets_root() -> Path:
    """Return the folder in which detectron2 looks for datasets: ``DETECTRON2_DATASETS``, or ``datasets``."""
    return Path(os.path.expanduser(os.getenv("DETECTRON2_DATASETS", "datasets")))


def register_datasets(cfg: CfgNode) -> None:
    """Register this project's datasets and those of ``DATASETS.COCO`` and ``DATASETS.ADE20K`` in detectron2's catalogs.

    Its own, with ``_train`` and ``_val`` at the end, are the synthetic ``shapes``, ``shapes_sem_seg`` and
    ``shapes_panoptic``, and ``ade20k``, ``ADEChallengeData2016`` as published. Registering a name again with the same
    files does nothing.

    Raises:
        ConfigError: for an entry of the wrong form, class names that cannot be read, or a name of other files.
    """
    root = datasets_root()
    for split, folder in (("train", "training"), ("val", "validation")):
        for name, labels in (("shapes", None), ("shapes_panoptic", root / f"shapes_panoptic/stuff_{split}")):
            annotations = root / name / f"annotations/instances_{split}.json"
            _register_coco(f"{name}_{split}", annotations, root / name / split, labels=labels, is_own=True)
            MetadataCatalog.get(f"{name}_{split}").thing_colors = SHAPES_COLORS
        for name, parent, classes in (
            ("shapes_sem_seg", root / "shapes_sem_seg", SHAPES_SEM_SEG_CLASSES),
            ("ade20k", root / "ADEChallengeData2016", ADE20K_SEM_SEG_CATEGORIES),
        ):
            images, labels = parent / "images" / folder, parent / "annotations" / folder
            _register_ade20k(f"{name}_{split}", images, labels, classes, is_own=True)
        MetadataCatalog.get(f"shapes_sem_seg_{split}").stuff_colors = [BACKGROUND_COLOR, *SHAPES_COLORS]
    for entry in cfg.DATASETS.COCO:
        if not _is_list_of_strings(entry, lengths=(3,)):
            hint = "; is a comma missing?" if isinstance(entry, (list, tuple)) and len(entry) < 3 else ""
            raise ConfigError(f"DATASETS.COCO has {entry!r}: an entry is [name, annotation file, image folder]{hint}")
        _register_coco(entry[0], Path(entry[1]), Path(entry[2]))
    for entry in cfg.DATASETS.ADE20K:
        if not _is_list_of_strings(entry, lengths=(3, 4)):
            form = "[name, image folder, label folder], or with a fourth, a file with one class name per line"
            raise ConfigError(f"DATASETS.ADE20K has {entry!r}: an entry is {form}")
        classes = read_classes(entry[3]) if len(entry) == 4 else ADE20K_SEM_SEG_CATEGORIES
        _register_ade20k(entry[0], Path(entry[1]), Path(entry[2]), classes)


def _is_list_of_strings(entry: object, *, lengths: tuple[int, ...]) -> bool:
    return isinstance(entry, (list, tuple)) and len(entry) in lengths and all(p and isinstance(p, str) for p in entry)


def _register_coco(
    name: str, annotations: Path, images: Path, *, labels: Path | None = None, is_own: bool = False
) -> None:
    """Register a COCO file, with label images as detectron2's ``register_coco_panoptic_separated`` has them.

    Args:
        labels: a folder with a PNG of the same stem for each image: 0 is all things, 1 is stuff, and 255 is ignored.
    """
    metadata = {"json_file": str(annotations), "image_root": str(images), "evaluator_type": "coco"}
    if labels is not None:
        metadata |= {"evaluator_type": PANOPTIC_EVALUATOR, "sem_seg_root": str(labels)}
        metadata |= _stuff(("things", "background"), first=0)

    def load() -> list[dict[str, Any]]:
        records = load_coco_json(str(annotations), str(images), name)
        return records if labels is None else add_stuff(name, records)

    _register(name, load, metadata, is_own=is_own)


def _register_ade20k(name: str, images: Path, labels: Path, classes: Sequence[str], *, is_own: bool = False) -> None:
    """Register a folder of images and one of label images, PNGs of the same stems: 0 is ignored, classes from 1."""
    metadata = {"evaluator_type": "sem_seg", "image_root": str(images), "sem_seg_root": str(labels), "first_label": 1}
    metadata |= _stuff(classes, first=1)
    _register(name, lambda: load_ade20k(name, images, labels), metadata, is_own=is_own)


def _stuff(classes: Sequence[str], *, first: int) -> dict[str, Any]:
    ids = {index + first: index for index in range(len(classes))}
    return {"stuff_classes": list(classes), "stuff_dataset_id_to_contiguous_id": ids, "ignore_label": IGNORED_LABEL}


def _register(name: str, load: Callable[[], list[dict[str, Any]]], metadata: dict[str, Any], *, is_own: bool) -> None:
    """Register ``name`` unless it is known with this metadata; own names follow the environment."""
    if name in DatasetCatalog.list():
        known = MetadataCatalog.get(name)
        if all(known.get(key) == value for key, value in metadata.items()):
            return
        if not is_own:
            files = known.get("json_file") or known.get("sem_seg_root")
            raise ConfigError(f"DATASETS: the name {name} is already registered for {files}")
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)
    DatasetCatalog.register(name, load)
    MetadataCatalog.get(name).set(**metadata)


def load_ade20k(name: str, images: Path, labels: Path) -> list[dict[str, Any]]:
    """Return detectron2's records of a dataset in ADE20K's layout, by file name.

    Raises:
        ConfigError: for a folder without images, or an image without labels.
    """
    files = sorted(file for file in os.listdir(images) if file.lower().endswith(IMAGE_SUFFIXES))
    if not files:
        raise ConfigError(f"the image folder of {name} has no {', '.join(IMAGE_SUFFIXES)}: {images}")
    records = [{"file_name": str(Path(images, file)), "first_label": 1} for file in files]
    return _with_label_files(name, records, labels)


def add_stuff(name: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records of a registered COCO file with ``sem_seg_file_name``.

    Raises:
        ConfigError: for a dataset without label images of stuff, or an image without one.
    """
    metadata = MetadataCatalog.get(name)
    if metadata.get("evaluator_type") != PANOPTIC_EVALUATOR or metadata.get("sem_seg_root") is None:
        example = "coco_2017_train_panoptic_separated"
        raise ConfigError(f"{name} has no label images of stuff, which a PanopticFPN needs: take one such as {example}")
    return _with_label_files(name, records, metadata.sem_seg_root)


def _with_label_files(name: str, records: list[dict[str, Any]], folder: str | Path) -> list[dict[str, Any]]:
    present = set(os.listdir(folder))
    files = [f"{Path(record['file_name']).stem}.png" for record in records]
    missing = [file for file in files if file not in present]
    if missing:
        first = Path(folder, missing[0])
        raise ConfigError(f"{len(missing)} of {len(files)} images of {name} have no label image, such as {first}")
    return [r | {"sem_seg_file_name": str(Path(folder, file))} for r, file in zip(records, files, strict=True)]


def read_classes(path: str | Path) -> list[str]:
    """Read class names from a text file, one per line, in the order of the labels.

    Raises:
        ConfigError: for a file that cannot be read, repeated names, or other than 1 to 254 names.
    """
    try:
        names = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the class names in {path}: {error}") from error
    repeated = [name for name in names if names.count(name) > 1]
    if repeated or not 1 <= len(names) < IGNORED_LABEL:
        twice = f", {repeated[0]} twice" if repeated else ""
        raise ConfigError(f"{path} has {len(names)} class names{twice}: give 1 to {IGNORED_LABEL - 1}, each once")
    return names


def check_files(name: str) -> None:
    """Check that a dataset is registered and that its annotation file and folders exist.

    Raises:
        ConfigError: if not.
    """
    if name not in DatasetCatalog.list():
        near = closest(name, DatasetCatalog.list())
        hint = ""
        if multiprocessing.parent_process() is not None:
            hint = ". Processes of --num-gpus do not import your script: if it registers the dataset, use torchrun"
        raise ConfigError(f"unknown dataset {name!r} (DATASETS.COCO or DATASETS.ADE20K registers your own){near}{hint}")
    metadata = MetadataCatalog.get(name)
    if metadata.get("evaluator_type") == PANOPTIC_EVALUATOR and not metadata.get("sem_seg_root"):
        raise ConfigError(f"{name} has things and stuff in one label image: use {name}_separated")
    for key, what in _FILES.items():
        path = metadata.get(key)
        # A folder instead of the annotation file is looked into when that is read.
        if path is not None and not (os.path.exists(path) if key == "json_file" else os.path.isdir(path)):
            root = f"DETECTRON2_DATASETS is {datasets_root()}, the folder that holds coco/ and the like"
            raise ConfigError(f"the {what} of {name} is missing: {path}; {root}")
        if key == "json_file" and path is not None and not os.path.isdir(path):
            check_file(path, f"{what} of {name}")


def read_categories(annotations: str | None) -> list[tuple[int, str]] | None:
    """Return id and name of each category of a COCO file by id, as detectron2 numbers them, without parsing all of it.

    This takes a second for COCO's own file of 450 MB. None for no file, and for one that loading it will refuse.
    """
    path = Path(annotations or "")
    if not path.is_file():
        # Opening a pipe may never end.
        return None
    try:
        entries = _read_category_list(path)
        categories = {int(entry["id"]): str(entry["name"]) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return sorted(categories.items()) if len(categories) == len(entries) else None


def _read_category_list(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        starts = [match.end() - 1 for match in re.finditer(rb'"categories"\s*:\s*\[', content)]
        if len(starts) == 1:
            with contextlib.suppress(ValueError):
                beginning = content[starts[0] : starts[0] + 2**20].decode(errors="ignore")
                return json.JSONDecoder().raw_decode(beginning)[0]
    return read_json(path)["categories"]


def match_classes(ours: Sequence[str], theirs: Sequence[str]) -> dict[int, int]:
    """Map indices in ``ours`` to indices in ``theirs`` of the same name; repeated names match nothing."""
    return {
        index: theirs.index(name)
        for index, name in enumerate(ours)
        if ours.count(name) == 1 and theirs.count(name) == 1
    }


def match_all_classes(ours: Sequence[str], theirs: Sequence[str], *, differ: str) -> list[int]:
    """Return the index in ``theirs`` of each class in ``ours``: by name, or else all by index, with a warning.

    Raises:
        ConfigError: beginning with ``differ``, if their numbers differ, or if some names are in another order and
            others match nothing: matching by index would confuse classes.
    """
    matched = match_classes(ours, theirs)
    if len(ours) != len(theirs):
        raise ConfigError(differ)
    if len(matched) == len(ours):
        return [matched[index] for index in range(len(ours))]
    if any(index != other for index, other in matched.items()):
        unmatched = next(name for index, name in enumerate(ours) if index not in matched)
        raise ConfigError(f"{differ}: some are in another order, and {unmatched} matches no name")
    logging.getLogger(__name__).warning("%s: names differ, so classes are matched by index", differ)
    return list(range(len(ours)))


def describe_classes(classes: Sequence[str]) -> str:
    """Return the number of classes and the first names."""
    return f"{len(classes)} classes, {first_of(classes, 5)}"
