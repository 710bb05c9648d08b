"""Read COCO files, check and fix them, and return the same annotations to training, evaluation and the report."""

import json
import logging
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from detectron2.data import MetadataCatalog
from detectron2.structures import BoxMode
from detectron2.utils.logger import log_first_n
from pycocotools.coco import COCO

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from backbones.errors import counted
from projects_vil.data.coco_checks import CocoFile
from projects_vil.data.readers import read_coco
from projects_vil.data.segmentation import count_masks, rle_of
from projects_vil.data.shared_records import SHARED
from projects_vil.utils import paused_garbage_collection

CHECK_MODES = ("error", "warn", "off")


def is_coco(name: str) -> bool:
    """Return whether a registered dataset is a COCO file of instances, with or without label images of stuff."""
    metadata = MetadataCatalog.get(name)
    types = ("coco", "coco_panoptic_seg") if metadata.get("sem_seg_root") else ("coco",)
    return metadata.get("evaluator_type") in types and bool(metadata.get("json_file"))


@paused_garbage_collection()
def fixed_coco(name: str, *, check: str, masks: bool, areas: bool = True) -> dict[str, Any]:
    """Read, check and fix a registered COCO file.

    detectron2's records, the ground truth of the evaluation, the visualization and the report all use the returned
    annotations. Each process logs each finding once.

    Args:
        name: The name of a dataset for which :func:`is_coco` is true.
        check: The value of ``DATASETS.CHECK``. ``"error"`` raises if the check finds errors. ``"warn"`` removes the
            entries with errors. ``"off"`` returns the content of the file without a check.
        masks: Whether to check segmentations.
        areas: Whether to compute missing areas. Only evaluation needs them.

    Returns:
        The content of a COCO file.

    Raises:
        ConfigError: If the check finds errors, and under the conditions of :func:`read_coco`.
    """
    if (known := SHARED.get(fixed_key(name, check=check, masks=masks))) is not None:
        return known[0]
    metadata = MetadataCatalog.get(name)
    if check == "off":
        return read_coco(metadata.json_file)
    file = CocoFile(metadata.json_file, metadata.image_root, masks=masks)
    if not (findings := file.findings()):
        return file.dataset
    if file.findings("error") and (check == "error" or file.unfixable() is not None):
        raise file.error()
    for finding in findings:
        level = logging.INFO if finding.severity == "note" else logging.WARNING
        log_first_n(level, f"{file.path}: {file.describe(finding)}", name=__name__, key="message")
    return file.fixed(areas=areas)[0]


def fixed_key(name: str, *, check: str, masks: bool) -> tuple:
    """Return the cache key of :func:`fixed_coco`: everything that its result depends on."""
    return "fixed", name, check, masks, state_of_files(name)


def state_of_files(name: str) -> tuple:
    """Return the annotation file and the image folder of a dataset, and the size and time of the annotation file."""
    metadata = MetadataCatalog.get(name)
    path = metadata.get("json_file")
    stat = os.stat(path) if path and os.path.exists(path) else None
    return path, metadata.get("image_root"), stat and (stat.st_size, stat.st_mtime_ns)


def load_coco(name: str, *, check: str, masks: bool) -> list[dict[str, Any]]:
    """Return the annotations of :func:`fixed_coco` as detectron2's records.

    For a file without findings the records are equal to the result of detectron2's ``load_coco_json``. Like
    ``load_coco_json``, this function sets the names and ids of the classes in detectron2's metadata.

    Args:
        name: The name of a dataset for which :func:`is_coco` is true.
        check: The value of ``DATASETS.CHECK``.
        masks: Whether to check segmentations and include them in the records.
    """
    dataset = fixed_coco(name, check=check, masks=masks, areas=False)
    class_of = _set_classes(name, dataset)
    objects_of, annotations = defaultdict(list), dataset.get("annotations", [])[::-1]
    dataset["annotations"] = []
    while annotations:
        # The annotation is removed from the list, so that it is not in memory together with its copy.
        annotation = annotations.pop()
        objects_of[annotation["image_id"]].append(_object(annotation, class_of, masks=masks))
    root, images = MetadataCatalog.get(name).image_root, sorted(dataset["images"], key=lambda image: image["id"])
    log_first_n(logging.INFO, f"{name}: {counted(len(images), 'image')}", name=__name__, key="message")
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
        # COCO's keypoints are pixel indices. detectron2's keypoints are coordinates of pixel centers.
        record["keypoints"] = [n if index % 3 == 2 else n + 0.5 for index, n in enumerate(record["keypoints"])]
    else:
        record.pop("keypoints", None)
    return record | {"bbox_mode": BoxMode.XYWH_ABS, "category_id": class_of[annotation["category_id"]]}


def _set_classes(name: str, dataset: dict[str, Any]) -> dict[int, int]:
    """Set the classes of a dataset in detectron2's metadata, ordered by id, and return a dict from id to class."""
    categories = sorted(dataset["categories"], key=lambda category: category["id"])
    metadata = MetadataCatalog.get(name)
    metadata.thing_classes = [category["name"] for category in categories]
    metadata.thing_dataset_id_to_contiguous_id = {category["id"]: i for i, category in enumerate(categories)}
    return metadata.thing_dataset_id_to_contiguous_id


def ground_truth(name: str, *, check: str, masks: bool) -> COCO | None:
    """Return the annotations of :func:`fixed_coco` for an evaluation, or None if the annotation file is used as it is.

    Args:
        name: A registered dataset.
        check: The value of ``DATASETS.CHECK``.
        masks: Whether the detector has masks.

    Raises:
        ConfigError: If the check rejects the annotations.
    """
    if check == "off" or not is_coco(name):
        return None
    coco = COCO()
    coco.dataset = fixed_coco(name, check=check, masks=masks)
    _set_classes(name, coco.dataset)
    coco.createIndex()
    return coco


def write_cleaned(file: CocoFile, output: str | Path) -> str:
    """Write a fixed copy of a COCO file, and return a summary of the removed and changed entries.

    Args:
        file: The file and its findings.
        output: A new file.

    Raises:
        ConfigError: If ``output`` exists, if an error cannot be fixed, or if no image, annotation or category is left.
    """
    if os.path.lexists(output):
        raise ConfigError(f"'{output}' already exists. Name a new file.")
    if file.unfixable() is not None:
        raise file.error()
    dataset, counts = file.fixed()
    for what in ("images", "annotations", "categories"):
        if file.dataset.get(what) and not dataset.get(what):
            first = next(iter(file.findings("error")), None)
            reason = "" if first is None else f" ({file.describe(first)})"
            raise ConfigError(f"A fixed copy of '{file.path}' would have none of the {what}{reason}. Repair the file.")
    num_masks = 0 if file.masks else count_masks(dataset.get("annotations", ()))[0]
    for entry in dataset["annotations"] if num_masks else ():
        entry.pop("segmentation", None)
    with atomic_write(output) as partial:
        # json.dumps is much faster than json.dump, which writes each number separately.
        partial.write_text(json.dumps(dataset), encoding="utf-8")
    kept = {name: len(dataset.get(f"{name}s", ())) for name in ("image", "annotation")}
    left, removed = (
        ", ".join(counted(number, name) for name, number in numbers.items())
        for numbers in (kept, {name: counts[f"{name}s"] for name in kept})
    )
    return f"{left}; removed {removed}; changed {counts['changed']:,}" + (
        f", left out {num_masks:,} masks" if num_masks else ""
    )
