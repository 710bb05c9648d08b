"""Register datasets in detectron2's catalogs, and match the classes of datasets and models.

A dataset is a COCO file, a folder of label images in ADE20K's dataset format, or both.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import mmap
import multiprocessing
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json
from detectron2.data.datasets.builtin_meta import ADE20K_SEM_SEG_CATEGORIES

from backbones import ConfigError
from backbones.errors import check_file, closest, first_of
from projects_vil.config import head_of, is_panoptic, is_segmentor
from projects_vil.data.image_files import IGNORED_LABEL, is_image, read_labels
from projects_vil.data.readers.index import read_names
from projects_vil.files import read_json

# The classes of the synthetic datasets, which examples/make_shapes_dataset.py writes.
SHAPES_CLASSES = ("circle", "square", "triangle")
SHAPES_SEM_SEG_CLASSES = ("background", *SHAPES_CLASSES)
# The colors in visualizations match the images: red circles, green squares and blue triangles.
SHAPES_COLORS = [(255, 80, 80), (80, 255, 80), (90, 150, 255)]
BACKGROUND_COLOR = (90, 90, 90)
PANOPTIC_EVALUATOR = "coco_panoptic_seg"
# The registered built-in datasets, and the value of datasets_root() for them.
_built_in: set[str] = set()
_built_in_root: Path | None = None
# Metadata keys with files and folders, and their descriptions.
_FILES = {"json_file": "annotation file", "image_root": "image folder", "sem_seg_root": "label folder"}


def datasets_root() -> Path:
    """Return the root folder of detectron2's datasets: ``DETECTRON2_DATASETS``, or ``datasets`` if it is not set."""
    return Path(os.path.expanduser(os.getenv("DETECTRON2_DATASETS", "datasets")))


def register_built_in_datasets() -> None:
    """Register the built-in datasets. This happens at import, as for detectron2's own datasets.

    They are the synthetic ``shapes``, ``shapes_sem_seg`` and ``shapes_panoptic``, and ``ade20k``, the published
    ``ADEChallengeData2016``. Their names end with ``_train`` or ``_val``. If you have registered your own dataset under
    one of these names, it is kept.
    """
    global _built_in_root
    _built_in_root = root = datasets_root()
    for name in _built_in & set(DatasetCatalog.list()):
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)
    _built_in.clear()
    names = ("shapes", "shapes_panoptic", "shapes_sem_seg", "ade20k")
    _built_in.update({f"{name}_{split}" for name in names for split in ("train", "val")} - {*DatasetCatalog.list()})
    for split, folder in (("train", "training"), ("val", "validation")):
        for name, labels in (("shapes", None), ("shapes_panoptic", root / f"shapes_panoptic/stuff_{split}")):
            annotations = root / name / f"annotations/instances_{split}.json"
            if f"{name}_{split}" in _built_in:
                _register_coco(f"{name}_{split}", annotations, root / name / split, labels=labels)
                MetadataCatalog.get(f"{name}_{split}").thing_colors = SHAPES_COLORS
        for name, parent, classes in (
            ("shapes_sem_seg", root / "shapes_sem_seg", SHAPES_SEM_SEG_CLASSES),
            ("ade20k", root / "ADEChallengeData2016", ADE20K_SEM_SEG_CATEGORIES),
        ):
            images, labels = parent / "images" / folder, parent / "annotations" / folder
            if f"{name}_{split}" in _built_in:
                _register_ade20k(f"{name}_{split}", images, labels, classes)
        if f"shapes_sem_seg_{split}" in _built_in:
            MetadataCatalog.get(f"shapes_sem_seg_{split}").stuff_colors = [BACKGROUND_COLOR, *SHAPES_COLORS]


def register_datasets(cfg: CfgNode) -> None:
    """Register the datasets of ``DATASETS.COCO`` and ``DATASETS.ADE20K``.

    If a name is registered again with the same files, nothing changes. If ``DETECTRON2_DATASETS`` has changed, the
    built-in datasets are registered again.

    Raises:
        ConfigError: If an entry is invalid, if class names cannot be read, or if a name is registered for other files.
    """
    if datasets_root() != _built_in_root:
        register_built_in_datasets()
    for entry in cfg.DATASETS.COCO:
        match entry:
            case [str(name), str(annotations), str(images)] if all(entry):
                _register_coco(name, Path(annotations), Path(images))
            case _:
                hint = " Is a comma missing?" if isinstance(entry, (list, tuple)) and len(entry) < 3 else ""
                raise ConfigError(f"DATASETS.COCO has {entry!r}. Use [name, annotation file, image folder].{hint}")
    for entry in cfg.DATASETS.ADE20K:
        match entry:
            case [str(name), str(images), str(labels)] if all(entry):
                classes: Sequence[str] = ADE20K_SEM_SEG_CATEGORIES
            case [str(name), str(images), str(labels), str(file)] if all(entry):
                classes = read_classes(file)
            case _:
                entries = "[name, image folder, label folder], or add the path of a file with one class name per line"
                raise ConfigError(f"DATASETS.ADE20K has {entry!r}. Use {entries}.")
        _register_ade20k(name, Path(images), Path(labels), classes)


def _register_coco(name: str, annotations: Path, images: Path, *, labels: Path | None = None) -> None:
    """Register a COCO file, with or without label images of stuff (``register_coco_panoptic_separated``).

    Args:
        name: The name of the dataset.
        annotations: The COCO file.
        images: The image folder.
        labels: A folder with a PNG file for each image, with the same stem. 0 is any thing, 1 is stuff, 255 is ignored.
    """
    metadata = {"json_file": str(annotations), "image_root": str(images), "evaluator_type": "coco"}
    if labels is not None:
        metadata |= {"evaluator_type": PANOPTIC_EVALUATOR, "sem_seg_root": str(labels)}
        metadata |= _stuff(("things", "background"), first=0)

    def load() -> list[dict[str, Any]]:
        records = load_coco_json(str(annotations), str(images), name)
        return records if labels is None else add_stuff(name, records)

    _register(name, load, metadata)


def _register_ade20k(name: str, images: Path, labels: Path, classes: Sequence[str]) -> None:
    """Register an image folder and a folder of label images. 0 is ignored, and the first class is 1.

    A label image is a PNG file with the stem of its image.
    """
    metadata = {"evaluator_type": "sem_seg", "image_root": str(images), "sem_seg_root": str(labels), "first_label": 1}
    metadata |= _stuff(classes, first=1)

    def load() -> list[dict[str, Any]]:
        files = sorted(filter(is_image, os.listdir(images)))
        if not files:
            raise ConfigError(f"The image folder '{images}' of {name!r} has no images. Correct the path.")
        records = [{"file_name": str(Path(images, file)), "first_label": 1} for file in files]
        return _with_label_files(name, records, labels)

    _register(name, load, metadata)


def _stuff(classes: Sequence[str], *, first: int) -> dict[str, Any]:
    ids = {index + first: index for index in range(len(classes))}
    return {"stuff_classes": list(classes), "stuff_dataset_id_to_contiguous_id": ids, "ignore_label": IGNORED_LABEL}


def _register(name: str, load: Callable[[], list[dict[str, Any]]], metadata: dict[str, Any]) -> None:
    """Register ``name`` unless it has the same metadata already."""
    if name in DatasetCatalog.list():
        known = MetadataCatalog.get(name)
        if metadata.items() <= known.as_dict().items():
            return
        files = known.get("json_file") or known.get("sem_seg_root")
        raise ConfigError(f"The dataset name {name!r} is already registered for '{files}'. Use another name.")
    DatasetCatalog.register(name, load)
    MetadataCatalog.get(name).set(**metadata)


def add_stuff(name: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of a registered COCO file with ``sem_seg_file_name``.

    Raises:
        ConfigError: If the dataset has no label images of stuff, or if an image has no label image.
    """
    metadata = MetadataCatalog.get(name)
    if metadata.get("evaluator_type") != PANOPTIC_EVALUATOR or metadata.get("sem_seg_root") is None:
        raise ConfigError(f"{name!r} has no labels of stuff. Use a dataset such as coco_2017_train_panoptic_separated.")
    return _with_label_files(name, records, metadata.sem_seg_root)


def _with_label_files(name: str, records: list[dict[str, Any]], folder: str | Path) -> list[dict[str, Any]]:
    present = set(os.listdir(folder))
    files = [f"{Path(record['file_name']).stem}.png" for record in records]
    if missing := [file for file in files if file not in present]:
        first = Path(folder, missing[0])
        raise ConfigError(f"{len(missing)} images of {name!r} have no label image. Add the files, such as '{first}'.")
    return [r | {"sem_seg_file_name": str(Path(folder, file))} for r, file in zip(records, files, strict=True)]


def read_classes(path: str | Path) -> list[str]:
    """Read class names from a text file with one name per line, in the order of the labels.

    Raises:
        ConfigError: If there is no such file, or if it does not have 1 to 254 different names in UTF-8.
    """
    check_file(path, "list of class names")
    names = [*filter(None, read_names(str(path)))]
    if not 1 <= len({*names}) == len(names) < IGNORED_LABEL or any("\ufffd" in name for name in names):
        raise ConfigError(f"'{path}' must have 1 to {IGNORED_LABEL - 1} different class names in UTF-8, one per line.")
    return names


def check_files(name: str) -> None:
    """Check that a dataset is registered and that its annotation file and folders exist.

    Raises:
        ConfigError: If the dataset is not registered, or if a file or folder is missing.
    """
    if name not in DatasetCatalog.list():
        near = closest(name, DatasetCatalog.list()) or "."
        hint = ""
        if multiprocessing.parent_process() is not None:
            hint = " The processes of --num-gpus do not import your script. If it registers the dataset, use torchrun."
        raise ConfigError(f"Unknown dataset {name!r}{near} Add it to DATASETS.COCO or DATASETS.ADE20K.{hint}")
    metadata = MetadataCatalog.get(name)
    if metadata.get("evaluator_type") == PANOPTIC_EVALUATOR and not metadata.get("sem_seg_root"):
        raise ConfigError(f"{name!r} has things and stuff in one label image. Use '{name}_separated'.")
    for key, description in _FILES.items():
        if (path := metadata.get(key)) is None:
            continue
        # If json_file is a folder, read_coco raises a better error later.
        if not (os.path.exists(path) if key == "json_file" else os.path.isdir(path)):
            advice = f"set DETECTRON2_DATASETS (now '{datasets_root()}') to the folder with the datasets"
            text = f"The {description} '{path}' of {name!r} does not exist. Correct the path, {advice}"
            raise ConfigError(f"{text}, or give another dataset.")
        if key == "json_file" and not os.path.isdir(path):
            check_file(path, f"{description} of {name}")


def read_categories(annotations: str | None) -> dict[int, str] | None:
    """Return the names of the categories of a COCO file by id, sorted by id as in detectron2.

    Returns:
        The categories, or None if there is no valid file.
    """
    path = Path(annotations or "")
    # Opening a pipe may block forever.
    return _read_categories(path, path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else None


@functools.lru_cache(maxsize=16)
def _read_categories(path: Path, size: int, time: int) -> dict[int, str] | None:
    """Read the categories without parsing the whole file. This takes about one second for COCO's 450 MB file."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                (match,) = re.finditer(rb'"categories"\s*:\s*(?=\[)', content)
                text = content[match.end() : match.end() + 2**20].decode(errors="ignore")
            entries = json.JSONDecoder().raw_decode(text)[0]
        except ValueError:
            entries = read_json(path)["categories"]
        categories = {int(entry["id"]): str(entry["name"]) for entry in entries}
        return dict(sorted(categories.items())) if len(categories) == len(entries) else None
    return None


def categories_of(name: str, *, stuff: bool = False) -> Mapping[int, str]:
    """Return the classes of a dataset by id, in the order of the model. Without known classes it is empty.

    Args:
        name: Name of a dataset in detectron2's catalog.
        stuff: Use detectron2's stuff classes instead of its thing classes.
    """
    metadata, group = MetadataCatalog.get(name), "stuff" if stuff else "thing"
    known, index_of = metadata.get(f"{group}_classes"), metadata.get(f"{group}_dataset_id_to_contiguous_id")
    # detectron2 sets both when it loads a COCO file, not when it registers one.
    if known and index_of:
        return {category_id: known[index] for category_id, index in sorted(index_of.items(), key=lambda i: i[1])}
    categories = None if stuff else read_categories(metadata.get("json_file"))
    return categories or dict(enumerate(known or (), start=0 if stuff else 1))


@dataclasses.dataclass(frozen=True)
class Categories:
    """The classes of a model, in the order of its outputs.

    Attributes:
        ids: ``category_id`` of each class in COCO files.
        names: Class names, in the same order.
        colors: RGB in 0..255 of each class in drawings, or None.
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]
    colors: Sequence[Sequence[int]] | None = dataclasses.field(default=None, compare=False)

    def to_coco(self) -> list[dict]:
        """Return the list of categories of a COCO file."""
        return [{"id": number, "name": name} for number, name in zip(self.ids, self.names, strict=True)]


def known_categories(
    names: Sequence[str] | None, ids: Sequence[int] | None, *, number: int, datasets: Sequence[str] = ()
) -> Categories:
    """Return the categories of a checkpoint or an exported file.

    Names and ids are from its metadata. Colors, and missing ids, are from a dataset with the same class names. Without
    metadata all are from the first dataset with the same number of classes. If there is none, ids count from 1 and
    names are ``class 1``, ``class 2``, and so on.

    Args:
        names: Class names in the metadata, or None.
        ids: Category ids in the metadata, or None.
        number: Number of classes.
        datasets: Names of datasets to search; unknown names are skipped. If there are class names, COCO is searched
            last.
    """
    # detectron2 has the categories of coco_2017_val built in.
    for dataset in datasets if names is None else (*datasets, "coco_2017_val"):
        classes = categories_of(dataset) if dataset in MetadataCatalog.list() else {}
        found = tuple(classes.values())
        if found and len(found) == number and names in (None, found):
            return Categories(tuple(ids or classes), found, MetadataCatalog.get(dataset).get("thing_colors"))
    counted = tuple(range(1, number + 1))
    return Categories(tuple(ids or counted), tuple(names or (f"class {category_id}" for category_id in counted)))


def model_classes(cfg: CfgNode) -> tuple[str | None, Mapping[int, str]]:
    """Return the name of the reference dataset, and the model's classes by id, in the order of its outputs.

    The reference dataset is the first dataset of ``DATASETS.TRAIN`` and ``DATASETS.TEST``, in this order, that has the
    model's number of classes. Without such a dataset, the name is None and there are no classes.
    """
    number = cfg.MODEL[head_of(cfg)].NUM_CLASSES
    for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST):
        categories = categories_of(name, stuff=is_segmentor(cfg)) if name in MetadataCatalog.list() else {}
        if categories and len(categories) == number:
            return name, categories
    return None, {}


def class_order(cfg: CfgNode, name: str) -> list[int] | None:
    """Match the classes of a dataset to the classes of the model by name.

    A test dataset may lack classes of the model. Label images must have the same classes as the model, in the same
    order.

    Returns:
        The index in the model of each class of the dataset. None if both have the same classes in the same order, or if
        the class names are unknown.

    Raises:
        ConfigError: If the model lacks a class of the dataset, or if a training dataset has too few classes.
    """
    stuff, key = MetadataCatalog.get(name).get("stuff_classes", ()), "MODEL.SEM_SEG_HEAD.NUM_CLASSES"
    if is_panoptic(cfg) and len(stuff) not in (0, cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES):
        number = cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES
        raise ConfigError(f"{key} is {number}, but {name!r} has {len(stuff)} stuff classes. Set {key} {len(stuff)}.")
    classes = list(categories_of(name, stuff=is_segmentor(cfg)).values())
    if not classes:
        return None
    reference, categories = model_classes(cfg)
    ours = list(categories.values())
    head = head_of(cfg)
    key, number = f"MODEL.{head}.NUM_CLASSES", cfg.MODEL[head].NUM_CLASSES
    if len(classes) != number and (reference is None or name in cfg.DATASETS.TRAIN or is_segmentor(cfg)):
        raise ConfigError(f"{key} is {number}, but {name!r} has {len(classes)} classes. Set {key} {len(classes)}.")
    if reference is None:
        reference, ours = name, classes
    theirs = MetadataCatalog.get(reference).get("stuff_classes", ())
    if (is_panoptic(cfg) and stuff and theirs and stuff != theirs) or (is_segmentor(cfg) and classes != ours):
        raise ConfigError(f"The label images of {name!r} and {reference!r} have different classes. Use the same list.")
    if classes == ours:
        return None
    matched = match_classes(classes, ours)
    if unknown := [label for index, label in enumerate(classes) if index not in matched]:
        text = f"{name!r} has classes that do not exist in {reference!r}, whose classes the model uses"
        labels = first_of([repr(label) for label in unknown], 5)
        raise ConfigError(f"{text}: {labels}{closest(unknown[0], ours) or '.'} Rename or remove them.")
    return [matched[index] for index in range(len(classes))]


def match_classes(ours: Sequence[str], theirs: Sequence[str]) -> dict[int, int]:
    """Return a dict from indices in ``ours`` to indices of the same name in ``theirs``. Repeated names do not match."""
    return {index: theirs.index(name) for index, name in enumerate(ours) if ours.count(name) == theirs.count(name) == 1}


def match_all_classes(ours: Sequence[str], theirs: Sequence[str], *, differ: str) -> list[int]:
    """Return the index in ``theirs`` of each class in ``ours``.

    Classes are matched by name. If some names do not match, all classes are matched by index, with a warning.

    Args:
        ours: Class names.
        theirs: Other class names.
        differ: The beginning of messages, which describes both lists.

    Raises:
        ConfigError: If the numbers of classes differ. If some names have another index and others do not match, because
            a match by index would confuse classes.
    """
    matched = match_classes(ours, theirs)
    if len(ours) != len(theirs):
        raise ConfigError(f"{differ}. Use the same classes in both.")
    if len(matched) == len(ours):
        return [matched[index] for index in range(len(ours))]
    if any(index != other for index, other in matched.items()):
        unmatched = next(name for index, name in enumerate(ours) if index not in matched)
        raise ConfigError(f"{differ}. Class {unmatched!r} matches no name, and others are in another order. Rename it.")
    logging.getLogger(__name__).warning("%s. Some names differ, so the classes are matched by index.", differ)
    return list(range(len(ours)))


def label_reader(dataset_name: str) -> Callable[..., np.ndarray]:
    """Return a function that reads the label images of a dataset, for detectron2's ``SemSegEvaluator``.

    The function has the arguments ``(path, dtype)`` and returns labels (H, W). See :func:`read_labels`.
    """
    metadata = MetadataCatalog.get(dataset_name)
    options = {"first_label": metadata.get("first_label", 0), "num_classes": len(metadata.stuff_classes)}
    return lambda path, dtype=np.uint8: read_labels(path, **options).astype(dtype)


def describe_classes(classes: Sequence[str]) -> str:
    """Return text with the number of classes and the first names."""
    return f"{len(classes)} classes, {first_of(classes, 5)}"


register_built_in_datasets()
