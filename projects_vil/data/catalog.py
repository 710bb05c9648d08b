"""Datasets by name, in detectron2's catalogs."""

import contextlib
import json
import mmap
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import (
    DatasetCatalog,
    MetadataCatalog,
)
from detectron2.data.datasets import register_coco_instances

from backbones import InputError
from backbones.utils.errors import closest
from projects_vil.data.datasets.ade20k import read_classes, register_ade20k
from projects_vil.data.datasets.builtin_meta import (
    ADE20K_CLASSES,
    BACKGROUND_COLOR,
    SHAPES_COLORS,
    SHAPES_SEM_SEG_CLASSES,
    SHAPES_STUFF_CLASSES,
)
from projects_vil.data.datasets.panoptic import EVALUATOR, register_panoptic

# Registered without a key in the config, below datasets_root().
_OWN_NAMES = {
    f"{name}_{split}"
    for name in ("shapes", "shapes_sem_seg", "shapes_panoptic", "ade20k")
    for split in ("train", "val")
}


def datasets_root() -> Path:
    """Where detectron2 looks for datasets: ``DETECTRON2_DATASETS``, or ``datasets``."""
    return Path(os.path.expanduser(os.getenv("DETECTRON2_DATASETS", "datasets")))


def register_datasets(cfg: CfgNode) -> None:
    """Register this project's datasets and those of ``DATASETS.COCO`` and ``DATASETS.ADE20K`` in detectron2's catalogs.

    Its own, with ``_train`` and ``_val`` at the end, are ``shapes``, ``shapes_sem_seg`` and ``shapes_panoptic``, which
    are drawn, and ``ade20k``, ``ADEChallengeData2016`` as published. Registering a name again with the same files does
    nothing.

    Raises:
        InputError: for an entry of the wrong form, names of classes that cannot be read, or a name that stands for
            other files.
    """
    root = datasets_root()
    for split, folder in (("train", "training"), ("val", "validation")):
        _register_coco(f"shapes_{split}", root / f"shapes/annotations/instances_{split}.json", root / "shapes" / split)
        _register_shapes_panoptic(root / "shapes_panoptic", split)
        for name in ("shapes", "shapes_panoptic"):
            MetadataCatalog.get(f"{name}_{split}").thing_colors = SHAPES_COLORS
        for name, parent, classes in (
            ("shapes_sem_seg", root / "shapes_sem_seg", SHAPES_SEM_SEG_CLASSES),
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


def _register_coco(name: str, annotations: Path, images: Path) -> None:
    def register() -> None:
        register_coco_instances(name, {}, str(annotations), str(images))

    _register("DATASETS.COCO", name, register, json_file=str(annotations), image_root=str(images))


def _register_shapes_panoptic(root: Path, split: str) -> None:
    name, annotations, labels = (
        f"shapes_panoptic_{split}",
        root / f"annotations/instances_{split}.json",
        f"stuff_{split}",
    )

    def register() -> None:
        register_panoptic(name, annotations, root / split, root / labels, SHAPES_STUFF_CLASSES)

    _register("DATASETS.COCO", name, register, json_file=str(annotations), sem_seg_root=str(root / labels))


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


def _is_list_of_strings(entry: object, *, lengths: tuple[int, ...]) -> bool:
    return isinstance(entry, (list, tuple)) and len(entry) in lengths and all(p and isinstance(p, str) for p in entry)


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
    if metadata.get("evaluator_type") == EVALUATOR and not metadata.get("sem_seg_root"):
        raise InputError(
            f"{name} has things and stuff in one image each, which nothing here reads: take {name}_separated"
        )
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


def read_class_names(annotations: str | None) -> list[str] | None:
    """Names of the categories of a COCO file by id, as detectron2 numbers them, without parsing the whole of it.

    COCO's own file of 450 MB takes a second. None where there is no such file or it does not tell, as where an id is
    there twice: whoever loads it says why.
    """
    try:
        categories = _read_categories(Path(annotations or ""))
        names = {int(category["id"]): str(category["name"]) for category in categories}
        return [names[number] for number in sorted(names)] if len(names) == len(categories) else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _read_categories(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        starts = [match.end() - 1 for match in re.finditer(rb'"categories"\s*:\s*\[', content)]
        if len(starts) == 1:
            with contextlib.suppress(ValueError):
                beginning = content[starts[0] : starts[0] + 2**20].decode(errors="ignore")
                return json.JSONDecoder().raw_decode(beginning)[0]
        return json.loads(content[:])["categories"]
