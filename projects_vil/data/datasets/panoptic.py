"""COCO files with label images of stuff beside them, as Panoptic FPN learns from: "separated" in detectron2."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json

from backbones import InputError
from projects_vil.data.datasets.ade20k import IGNORED_LABEL

EVALUATOR = "coco_panoptic_seg"


def register_panoptic(name: str, annotations: Path, images: Path, labels: Path, classes: Sequence[str]) -> None:
    """Register a dataset as detectron2's ``register_coco_panoptic_separated`` does, without panoptic images.

    Args:
        name: in the catalogs.
        annotations: a COCO file with the things.
        images: their folder.
        labels: folder of the label images, one PNG of the same stem for each image: 0 is all things, stuff from 1, and
            255 is ignored.
        classes: of the labels, "things" first.
    """
    DatasetCatalog.register(name, lambda: add_stuff(name, load_coco_json(str(annotations), str(images), name)))
    MetadataCatalog.get(name).set(
        evaluator_type=EVALUATOR,
        json_file=str(annotations),
        image_root=str(images),
        sem_seg_root=str(labels),
        stuff_classes=list(classes),
        stuff_dataset_id_to_contiguous_id={index: index for index in range(len(classes))},
        ignore_label=IGNORED_LABEL,
    )


def add_stuff(name: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of a registered COCO file with ``sem_seg_file_name``, and ``num_labels`` that may be in it.

    Raises:
        InputError: for a dataset without label images of stuff, or an image without one.
    """
    metadata = MetadataCatalog.get(name)
    root = metadata.get("sem_seg_root")
    if metadata.get("evaluator_type") != EVALUATOR or root is None:
        raise InputError(
            f"{name}: no label images of stuff for a PanopticFPN; it takes a dataset such as "
            "coco_2017_train_panoptic_separated"
        )
    present = set(os.listdir(root))
    files = [f"{Path(record['file_name']).stem}.png" for record in records]
    missing = [file for file in files if file not in present]
    if missing:
        first = Path(root, missing[0])
        raise InputError(f"{len(missing)} of the {len(files)} images of {name} have no labels, the first is {first}")
    facts = {"num_labels": len(metadata.stuff_classes)}
    return [
        record | {"sem_seg_file_name": str(Path(root, file))} | facts
        for record, file in zip(records, files, strict=True)
    ]
