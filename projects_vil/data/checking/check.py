"""A COCO file against what training and evaluation need."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from projects_vil.data.checking.annotations import Annotations
from projects_vil.data.checking.findings import Findings, shown
from projects_vil.data.checking.images import Images, whole


@dataclass(frozen=True)
class Checked:
    """A COCO file, and what was found in it.

    Attributes:
        dataset: what the file holds, as it is.
        categories: id -> its first entry.
    """

    dataset: dict[str, Any]
    findings: Findings
    images: Images
    annotations: Annotations
    categories: dict[int, Any]


def check_dataset(
    dataset: dict[str, Any],
    annotations: str | Path,
    image_root: str | Path,
    *,
    masks: bool | None = None,
    headers: bool = True,
    pixels: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Checked:
    """Look for all faults in a COCO file and its images.

    Args:
        dataset: what the file holds (:func:`~projects_vil.data.datasets.coco.read_coco`).
        annotations, image_root: the file and the folder of its images.
        masks: whether segmentations are looked at; None where any object has one.
        headers: whether every image file is opened.
        pixels: whether every image file is read as a whole.
        progress: called with the number of image files that are done.
    """
    findings = Findings(annotations, image_root, masks=masks is not False)
    entries = dataset.get("annotations", [])
    findings.numbers = {name: len(dataset.get(name, ())) for name in ("images", "annotations", "categories")}
    images = Images(dataset["images"], findings)
    images.check()
    images.check_files(headers=headers, pixels=pixels, progress=progress)
    categories = _check_categories(dataset["categories"], findings)
    objects = Annotations(entries, images, categories, findings)
    if masks is None:
        masks = any(isinstance(entry, dict) and entry.get("segmentation") for entry in entries)
    objects.check(masks=masks)
    _check_empty(dataset, images, objects, categories)
    return Checked(dataset, findings, images, objects, categories)


def _check_categories(entries: list[Any], findings: Findings) -> dict[int, Any]:
    categories: dict[int, Any] = {}
    names: Counter[str] = Counter()
    for index, entry in enumerate(entries):
        number = whole(entry.get("id")) if isinstance(entry, dict) else None

        def describe(entry=entry) -> dict[str, Any]:
            if not isinstance(entry, dict):
                return {"value": shown(entry)}
            return {"category": entry.get("id"), "value": f"name {shown(entry.get('name'))}"}

        if number is None or not isinstance(entry.get("name"), str):
            findings.add("category_form", index, describe)
            continue
        if number in categories:
            findings.add("category_id_twice", index, describe)
            continue
        categories[number] = entry
        names[entry["name"]] += 1
        if names[entry["name"]] > 1:
            findings.add("category_name_twice", index, describe)
        if type(entry["id"]) is not int:
            findings.add("category_text", index, describe)
    return categories


def _check_empty(dataset: dict[str, Any], images: Images, objects: Annotations, categories: dict[int, Any]) -> None:
    used = set(objects.image_of.tolist())
    for index in images.usable:
        if index not in used:
            images.add("image_empty", index)
    present = {whole(entry.get("category_id")) for entry in objects.entries if isinstance(entry, dict)}
    for index, entry in enumerate(dataset["categories"]):
        number = whole(entry.get("id")) if isinstance(entry, dict) else None
        if categories.get(number) is entry and number not in present:
            name = {"category": number, "value": shown(entry["name"])}
            objects.findings.add("category_empty", index, lambda name=name: name)
