"""COCO files: read once, checked and fixed, as one dict of annotations for training, evaluation and the report."""

import contextlib
import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detectron2.data import MetadataCatalog
from detectron2.evaluation import coco_evaluation
from detectron2.structures import BoxMode
from detectron2.utils.logger import log_first_n
from pycocotools.coco import COCO

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from projects_vil.data.coco_checks import CocoFile
from projects_vil.data.formats import read_coco
from projects_vil.data.segmentation import rle_of
from projects_vil.data.shared_records import KEPT
from projects_vil.utils import paused_garbage_collection

CHECK_MODES = ("error", "warn", "off")


def is_coco(name: str) -> bool:
    """Whether a registered dataset is a COCO file with boxes and masks, perhaps with label images of stuff."""
    metadata = MetadataCatalog.get(name)
    types = ("coco", "coco_panoptic_seg") if metadata.get("sem_seg_root") else ("coco",)
    return metadata.get("evaluator_type") in types and bool(metadata.get("json_file"))


@paused_garbage_collection()
def fixed_coco(name: str, *, check: str, masks: bool, areas: bool = True) -> dict[str, Any]:
    """Read a registered COCO file as training, evaluation and everything after them see it.

    This is the one set of fixed annotations: detectron2's records, the ground truth of the evaluation, the drawings and
    the report all come from it. A process logs each finding once.

    Args:
        name: a dataset for which :func:`is_coco` holds.
        check: as ``DATASETS.CHECK``: ``"error"`` raises for errors, ``"warn"`` leaves them out, ``"off"`` returns what
            the file holds.
        masks: whether segmentations are checked.
        areas: whether missing areas are computed, which only evaluation needs.

    Raises:
        ConfigError: where :func:`read_coco` would, and for errors that the check finds.
    """
    if (known := KEPT.get(fixed_key(name, check=check, masks=masks))) is not None:
        return known[0]
    metadata = MetadataCatalog.get(name)
    if check == "off":
        return read_coco(metadata.json_file)
    file = CocoFile(metadata.json_file, metadata.image_root, masks=None if masks else False)
    if file.findings("error") and (check == "error" or file.unfixable() is not None):
        raise file.error()
    for finding in file.findings():
        level = logging.INFO if finding.severity == "note" else logging.WARNING
        log_first_n(level, f"{file.path}: {file.describe(finding)}", name=__name__, key="message")
    return file.fixed(areas=areas)[0]


def fixed_key(name: str, *, check: str, masks: bool) -> tuple:
    """Return what :func:`fixed_coco` depends on."""
    return "fixed", name, check, masks, state_of_files(name)


def state_of_files(name: str) -> tuple:
    """Return the files of a registered dataset, and size and time of the annotation file."""
    metadata = MetadataCatalog.get(name)
    path = metadata.get("json_file")
    found = os.stat(path) if path and os.path.exists(path) else None
    return path, metadata.get("image_root"), found and (found.st_size, found.st_mtime_ns)


def load_coco(name: str, *, check: str, masks: bool) -> list[dict[str, Any]]:
    """Return :func:`fixed_coco` as detectron2's records, those of ``load_coco_json`` for a file without findings.

    Sets the names and ids of the classes in detectron2's metadata, as that does. ``masks`` also decides whether
    segmentations are among the records.
    """
    dataset = fixed_coco(name, check=check, masks=masks, areas=False)
    class_of = _set_classes(name, dataset)
    objects_of, annotations = defaultdict(list), dataset.get("annotations", [])[::-1]
    dataset["annotations"] = []
    while annotations:
        # Only one of both is in memory.
        annotation = annotations.pop()
        objects_of[annotation["image_id"]].append(_object(annotation, class_of, masks=masks))
    root, images = MetadataCatalog.get(name).image_root, sorted(dataset["images"], key=lambda image: image["id"])
    log_first_n(logging.INFO, f"{name}: {len(images)} images", name=__name__, key="message")
    return [
        {
            "file_name": os.path.join(root, image["file_name"]),
            "height": image["height"],
            "width": image["width"],
            "image_id": image["id"],
            "annotations": objects_of[image["id"]],
        }
        for image in images
    ]


def _object(annotation: dict[str, Any], class_of: dict[int, int], *, masks: bool) -> dict[str, Any]:
    record = {key: annotation[key] for key in ("iscrowd", "bbox", "keypoints", "category_id") if key in annotation}
    segmentation = annotation.get("segmentation")
    if masks and segmentation:
        is_rle = isinstance(segmentation, dict)
        record["segmentation"] = rle_of(segmentation, *segmentation["size"]) if is_rle else segmentation
    if record.get("keypoints"):
        # COCO's keypoints are indices of pixels, detectron2's are coordinates of their centres.
        record["keypoints"] = [n if index % 3 == 2 else n + 0.5 for index, n in enumerate(record["keypoints"])]
    else:
        record.pop("keypoints", None)
    return record | {"bbox_mode": BoxMode.XYWH_ABS, "category_id": class_of[annotation["category_id"]]}


def _set_classes(name: str, dataset: dict[str, Any]) -> dict[int, int]:
    """Set the classes of a dataset in detectron2's metadata, in the order of their ids; return id -> class."""
    categories = sorted(dataset["categories"], key=lambda category: category["id"])
    metadata = MetadataCatalog.get(name)
    metadata.thing_classes = [category["name"] for category in categories]
    metadata.thing_dataset_id_to_contiguous_id = {category["id"]: i for i, category in enumerate(categories)}
    return metadata.thing_dataset_id_to_contiguous_id


@contextlib.contextmanager
def evaluation_dataset(name: str, *, check: str, masks: bool) -> Iterator[str]:
    """Yield the name of a dataset, for which detectron2's evaluator is given :func:`fixed_coco`'s annotations.

    It does so inside the context only; it would read the file otherwise.
    """
    if check == "off" or not is_coco(name):
        yield name
        return
    dataset = fixed_coco(name, check=check, masks=masks)
    _set_classes(name, dataset)

    def read(path: str) -> COCO:
        coco = COCO()
        coco.dataset = dataset
        coco.createIndex()
        return coco

    # detectron2 has no argument for it.
    before, coco_evaluation.COCO = coco_evaluation.COCO, read
    try:
        yield name
    finally:
        coco_evaluation.COCO = before


def write_cleaned(file: CocoFile, output: str | Path) -> str:
    """Write a fixed copy of a COCO file, and return what was left out and changed, in words.

    Raises:
        ConfigError: if the copy would replace a file, something cannot be fixed, or no image is left.
    """
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists: name a new file")
    if file.unfixable() is not None:
        raise file.error()
    dataset, counts = file.fixed()
    for what in ("images", "annotations", "categories"):
        if file.dataset.get(what) and not dataset.get(what):
            first = next(iter(file.findings("error")), None)
            reason = "" if first is None else f" ({file.describe(first)})"
            raise ConfigError(f"{file.path}: none of the {what} would be left in a copy{reason}. Repair the file.")
    with atomic_write(output) as partial:
        # Much faster than json.dump, which writes number by number.
        partial.write_text(json.dumps(dataset), encoding="utf-8")
    images, annotations = (len(dataset.get(name, ())) for name in ("images", "annotations"))
    return (
        f"{images:,} images, {annotations:,} annotations; left out {counts['images']:,} images and "
        f"{counts['annotations']:,} annotations, changed {counts['changed']:,}"
    )


def write_subset(source: str | Path, output: str | Path, *, num_images: int) -> int:
    """Write the annotations of a few images, spread evenly over those that have any, in the file's order.

    Args:
        source: a COCO annotation file.
        output: the file to write; its categories, licenses and info are those of ``source``.
        num_images: 1 or more; all images with annotations where there are fewer.

    Returns:
        The number of images written.

    Raises:
        ConfigError: if ``source`` is not a COCO annotation file or has no annotations, or ``output`` exists.
    """
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists: name a new file")
    dataset = read_coco(source)
    try:
        annotated = {annotation["image_id"] for annotation in dataset.get("annotations", ())}
        images = [image for image in dataset["images"] if image["id"] in annotated]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{source} is not a COCO annotation file: {type(error).__name__} {error}") from error
    if not images:
        raise ConfigError(f"{source} has no image with an annotation")
    count = min(num_images, len(images))
    kept = [images[index * len(images) // count] for index in range(count)]
    ids = {image["id"] for image in kept}
    annotations = [annotation for annotation in dataset["annotations"] if annotation["image_id"] in ids]
    with atomic_write(output) as partial:
        partial.write_text(json.dumps(dataset | {"images": kept, "annotations": annotations}))
    return count
