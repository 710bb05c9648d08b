"""Label images in the layout of ADE20K, read as they were published."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image

from backbones import InputError
from projects_vil.data.detection_utils import IMAGE_SUFFIXES

# The label of pixels that neither training nor evaluation looks at, once a label image has been read.
IGNORED_LABEL = 255


def register_ade20k(name: str, images: Path, labels: Path, classes: Sequence[str]) -> None:
    """Register a dataset in the layout of ADE20K in detectron2's catalogs; its files are looked at when it is loaded.

    Args:
        name: in the catalogs.
        images: folder of the images.
        labels: folder of the label images, one PNG of the same stem for each image: 0 is ignored, classes from 1.
        classes: their names, in the order of the labels.
    """
    DatasetCatalog.register(name, lambda: load_ade20k(name, images, labels))
    MetadataCatalog.get(name).set(
        evaluator_type="sem_seg",
        image_root=str(images),
        sem_seg_root=str(labels),
        stuff_classes=list(classes),
        stuff_dataset_id_to_contiguous_id={index + 1: index for index in range(len(classes))},
        ignore_label=IGNORED_LABEL,
        first_label=1,
    )


def load_ade20k(name: str, images: Path, labels: Path) -> list[dict[str, Any]]:
    """detectron2's records of :func:`register_ade20k`'s folders, by file name.

    Raises:
        InputError: for a folder without images, or an image without labels.
    """
    files = sorted(file for file in os.listdir(images) if file.lower().endswith(IMAGE_SUFFIXES))
    if not files:
        raise InputError(f"the image folder of {name} has no {', '.join(IMAGE_SUFFIXES)}: {images}")
    present = set(os.listdir(labels))
    label_files = [f"{os.path.splitext(file)[0]}.png" for file in files]
    missing = [file for file in label_files if file not in present]
    if missing:
        first = Path(labels, missing[0])
        raise InputError(f"{len(missing)} of the {len(files)} images of {name} have no labels, the first is {first}")
    return [
        {"file_name": str(Path(images, file)), "sem_seg_file_name": str(Path(labels, label)), "first_label": 1}
        for file, label in zip(files, label_files, strict=True)
    ]


def read_classes(path: str | Path) -> list[str]:
    """Names of classes from a text file, one a line, in the order of the labels.

    Raises:
        InputError: for a file that cannot be read, a name that comes twice, or other than 1 to 254 names.
    """
    try:
        names = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InputError(f"cannot read the names of classes in {path}: {reason}") from error
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{path} has the class {twice} twice")
    if not 1 <= len(names) < IGNORED_LABEL:
        raise InputError(f"{path} has {len(names)} names of classes, one a line: 1 to {IGNORED_LABEL - 1} are expected")
    return names


def read_labels(path: str | Path, *, first_label: int, num_classes: int) -> np.ndarray:
    """A label image (H, W) as uint8 classes, 0 to ``num_classes`` - 1, and :data:`IGNORED_LABEL`.

    Args:
        path: of one 8-bit channel, or a palette whose indices are the labels.
        first_label: the file's label of the first class: 1 as published by ADE20K, where 0 is ignored, or 0, where 255
            is ignored.
        num_classes: of the dataset, at most 254.

    Raises:
        InputError: for a file that cannot be read, is of another kind or has a label that is no class.
    """
    with open_labels(path) as image:
        try:
            labels = np.array(image)
        except (OSError, SyntaxError) as error:
            raise _unreadable("label image", path, error) from error
    # In 8 bits the ignored 0 becomes 255.
    labels = labels - np.uint8(first_label)
    wrong = labels[(labels >= num_classes) & (labels != IGNORED_LABEL)]
    if len(wrong):
        classes = f"{first_label} to {first_label + num_classes - 1}"
        ignored = 0 if first_label else IGNORED_LABEL
        label = int(wrong.max()) + first_label
        raise InputError(f"{path} has the label {label}: classes are {classes}, and {ignored} is ignored")
    return labels


def label_reader(dataset_name: str) -> Callable[..., np.ndarray]:
    """:func:`read_labels` for a dataset, as detectron2's SemSegEvaluator calls it: (path, dtype) -> (H, W)."""
    metadata = MetadataCatalog.get(dataset_name)
    read = functools.partial(
        read_labels, first_label=metadata.get("first_label", 0), num_classes=len(metadata.stuff_classes)
    )
    return lambda path, dtype=np.uint8: read(path).astype(dtype)


def open_labels(path: str | Path) -> Image.Image:
    """Opened, its pixels not yet read."""
    try:
        image = Image.open(path)
    except (OSError, SyntaxError) as error:
        raise _unreadable("label image", path, error) from error
    if image.mode not in ("L", "P"):
        image.close()
        raise InputError(f"the label image {path} is of PIL's mode {image.mode}: one channel of 8 bits is expected")
    return image


def _unreadable(kind: str, path: str | Path, error: Exception) -> InputError:
    reason = " ".join(str(error).split())
    return InputError(f"cannot read the {kind} {path}: {reason}; mend it, or take the image and its labels out")
