"""Write a dataset for `vil` and for ultralytics: the same images, splits and classes as COCO and as YOLO files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from projects_vil.data import read_dataset

SPLITS = ("train", "val")


def prepare_dataset(source: Path, folder: Path, num_classes: int | None = None) -> None:
    """Write a dataset to ``folder/coco`` and ``folder/yolo``, with links to its images, unless it is there already.

    The file name of an image is its id, and the classes are numbered from 1. The YOLO files have no crowds.

    Args:
        source: A dataset in a format of ``vil train``. Without a validation split, a fifth of its images is used.
        folder: The folder for the files.
        num_classes: Keep this number of classes, the most frequent ones, and the images with objects of these classes.
            None keeps all classes and images.
    """
    if (folder / "yolo/data.yaml").exists():
        return
    dataset = read_dataset(source, folder / "source")
    contents = dataset.contents
    counts = Counter(entry["category_id"] for entry in contents["train"]["annotations"])
    kept = {category for category, _ in counts.most_common(num_classes)}
    names = {one["id"]: one["name"] for one in contents["train"]["categories"] if not num_classes or one["id"] in kept}
    for split in SPLITS:
        content, root = contents[split], Path(dataset.splits[split][1])
        content["annotations"] = [entry for entry in content["annotations"] if entry["category_id"] in names]
        if num_classes:
            used = {entry["image_id"] for entry in content["annotations"]}
            content["images"] = [image for image in content["images"] if image["id"] in used]
        _write_split(content, root, list(names), [*names.values()], folder, split)
    content = {"path": str(folder / "yolo"), **{split: f"images/{split}" for split in SPLITS}}
    (folder / "yolo/data.yaml").write_text(yaml.safe_dump(content | {"names": [*names.values()]}))


def _write_split(
    content: dict[str, Any], root: Path, categories: list[int], names: list[str], folder: Path, split: str
) -> None:
    """Write the COCO file of a split, and a link and a file of YOLO labels for each image."""
    photos, labels = (folder / "yolo" / kind / split for kind in ("images", "labels"))
    for path in (folder / "coco", photos, labels):
        path.mkdir(parents=True, exist_ok=True)
    images, objects = [], []
    for number, image in enumerate(content["images"], start=1):
        photo = photos / f"{number:06d}{Path(image['file_name']).suffix}"
        photo.symlink_to((root / image["file_name"]).resolve())
        images.append(image | {"id": number, "file_name": f"../yolo/images/{split}/{photo.name}"})
        scale, lines = np.tile([image["width"], image["height"]], 2), []
        for entry in content["annotations"]:
            if entry["image_id"] != image["id"]:
                continue
            index, (left, top, width, height) = categories.index(entry["category_id"]), entry["bbox"]
            objects.append(entry | {"id": len(objects) + 1, "image_id": number, "category_id": index + 1})
            if not entry.get("iscrowd"):
                start, end = np.clip(np.array([left, top, left + width, top + height]) / scale, 0, 1).reshape(2, 2)
                lines.append(" ".join(map(str, (index, *((start + end) / 2), *(end - start)))))
        (labels / f"{photo.stem}.txt").write_text("\n".join(lines))
    coco = {"images": images, "annotations": objects}
    coco["categories"] = [{"id": number, "name": name} for number, name in enumerate(names, start=1)]
    (folder / "coco" / f"{split}.json").write_text(json.dumps(coco))
