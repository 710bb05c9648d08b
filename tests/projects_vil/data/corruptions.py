"""Corruptions of a COCO file or its images, each with the name of the check that finds it."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.projects_vil.data.custom_dataset import truncate


def second(of: str, *removed: str, **changes: Any) -> Callable[[dict, Path], None]:
    """Return a function that changes and removes keys of the second entry of a list."""

    def change(content: dict, images: Path) -> None:
        content[of][1].update(changes)
        for key in removed:
            del content[of][1][key]

    return change


def annotation(*removed: str, **changes: Any) -> Callable[[dict, Path], None]:
    return second("annotations", *removed, **changes)


def again(of: str, **changes: Any) -> Callable[[dict, Path], None]:
    """Return a function that appends a changed copy of the second entry."""
    return lambda content, images: content[of].append({**content[of][1], **changes})


def polygon(polygon: Any, *, keep: bool = False) -> Callable[[dict, Path], None]:
    """Return a function that replaces the polygons of the second object, or adds one with ``keep``."""

    def change(content: dict, images: Path) -> None:
        own = content["annotations"][1]["segmentation"]
        content["annotations"][1]["segmentation"] = [*(own if keep else []), polygon]

    return change


def rle(counts: Any = None, *, size: Any = None, crowd: int = 0) -> Callable[[dict, Path], None]:
    """Return a function that gives the second object RLE. ``counts`` may be a function of the number of pixels."""

    def change(content: dict, images: Path) -> None:
        of = next(image for image in content["images"] if image["id"] == content["annotations"][1]["image_id"])
        runs = counts(of["height"] * of["width"]) if callable(counts) else counts
        segmentation = {"counts": runs, "size": size or [of["height"], of["width"]]}
        content["annotations"][1].update(segmentation=segmentation, iscrowd=crowd)

    return change


def file(change: Callable[[Path], object]) -> Callable[[dict, Path], None]:
    """Return a function that changes the file of the second image."""
    return lambda content, images: change(images / content["images"][1]["file_name"])


def text_id_of_an_image(content: dict, images: Path) -> None:
    number = content["images"][1]["id"]
    content["images"][1]["id"] = "second"
    for entry in content["annotations"]:
        if entry["image_id"] == number:
            entry["image_id"] = "second"


def boxes_of_other_images(content: dict, images: Path) -> None:
    """Write boxes that could be [left, top, right, bottom], but are far from the masks."""
    sizes = {image["id"]: (image["width"], image["height"]) for image in content["images"]}
    for entry in content["annotations"]:
        width, height = sizes[entry["image_id"]]
        entry["bbox"] = [0.9 * width, 0.9 * height, 0.95 * width, 0.95 * height]


CORRUPTIONS: dict[str, tuple[str, Callable[[dict, Path], None]]] = {
    # boxes
    "box of NaN": ("invalid_bbox", annotation(bbox=[1.0, math.nan, 5.0, 5.0])),
    "box of infinity": ("invalid_bbox", annotation(bbox=[1.0, 2.0, math.inf, 5.0])),
    "box of negative width": ("swapped_bbox_corners", annotation(bbox=[20.0, 2.0, -5.0, 5.0])),
    "box null": ("invalid_bbox", annotation(bbox=None)),
    "box of text": ("bbox_as_text", annotation(bbox=["1", 2, 3, "4e0"])),
    "box of words": ("invalid_bbox", annotation(bbox=["left", 2, 3, 4])),
    "box of three": ("invalid_bbox", annotation(bbox=[1, 2, 3])),
    "box of 1e30": ("bbox_outside_image", annotation(bbox=[1.0, 2.0, 1e30, 5.0])),
    "box of 10 to the 400th": ("invalid_bbox", annotation(bbox=[1.0, 2.0, 10**400, 5.0])),
    "box outside": ("bbox_outside_image", annotation(bbox=[-30.0, 2.0, 10.0, 10.0])),
    "box without area": ("zero_area_bbox", annotation(bbox=[5.0, 5.0, 0.0, 8.0])),
    "box beyond the edge": ("bbox_exceeds_image", annotation(bbox=[-4.0, 2.0, 20.0, 20.0])),
    "box of another object": ("bbox_misfits_mask", annotation(bbox=[1.0, 1.0, 6.0, 6.0])),
    "boxes of other images": ("bbox_misfits_mask", boxes_of_other_images),
    "box missing": ("missing_bbox", annotation("bbox")),
    "box and mask missing": ("missing_bbox_and_mask", annotation("bbox", "segmentation")),
    # masks
    "polygon of NaN": ("invalid_segmentation", polygon([math.nan, 1.0, 9.0, 9.0, 3.0, 4.0])),
    "polygon not in a list": ("flat_segmentation", annotation(segmentation=[1.0, 1.0, 9.0, 9.0, 3.0, 4.0])),
    "segmentation of text": ("invalid_segmentation", annotation(segmentation="circle")),
    "polygon of 1e12": ("polygon_far_outside_image", polygon([1e12, 1.0, 9.0, 9.0, 3.0, 4.0])),
    "polygon of an odd number": ("empty_mask", polygon([1.0, 1.0, 9.0, 9.0, 3.0, 4.0, 5.0])),
    "polygon outside": ("empty_mask", polygon([-9.0, 1.0, -3.0, 1.0, -3.0, 7.0])),
    "polygon of two points among others": ("empty_polygon", polygon([1.0, 1.0, 9.0, 9.0], keep=True)),
    "polygon outside among others": ("empty_polygon", polygon([-9.0, 1.0, -3.0, 1.0, -3.0, 7.0], keep=True)),
    "segmentation missing": ("missing_segmentation", annotation("segmentation")),
    "RLE of another size": ("invalid_rle", rle(lambda pixels: [pixels], size=[7, 9])),
    "RLE of too few pixels": ("invalid_rle", rle(lambda pixels: [pixels - 1])),
    "RLE that breaks off": ("invalid_rle", rle("ooo")),
    "RLE without counts": ("invalid_rle", rle(None)),
    "RLE of an object": ("rle_without_iscrowd", rle(lambda pixels: [100, 60, pixels - 160])),
    # other annotation keys
    "annotation that is a number": ("invalid_annotation_entry", lambda c, i: c["annotations"].append(17)),
    "annotation id twice": ("duplicate_annotation_id", annotation(id=1)),
    "annotation twice": ("duplicate_annotation_id", again("annotations")),
    "object twice": ("duplicate_object", again("annotations", id=10**6)),
    "annotation id missing": ("invalid_annotation_id", annotation("id")),
    "iscrowd missing": ("missing_iscrowd", annotation("iscrowd")),
    "iscrowd as text": ("missing_iscrowd", annotation(iscrowd="0")),
    "iscrowd of 2": ("invalid_iscrowd", annotation(iscrowd=2)),
    "ignored object": ("ignore_flag", annotation(ignore=1)),
    "area missing": ("missing_or_invalid_area", annotation("area")),
    "area of another object": ("missing_or_invalid_area", annotation(area=2000)),
    "area larger than the image": ("missing_or_invalid_area", annotation("bbox", area=1e9)),
    "area of 0": ("missing_or_invalid_area", annotation(area=0)),
    "image unknown": ("unknown_image_id", annotation(image_id=10**9)),
    "image_id as a list": ("unknown_image_id", annotation(image_id=[1])),
    "image_id as text": ("image_id_type_mismatch", lambda c, i: c["annotations"][1].update(
        image_id=str(c["images"][0]["id"]))),
    "category unknown": ("unknown_category_id", annotation(category_id=999)),
    "category_id as text": ("category_id_type_mismatch", annotation(category_id="2")),
    # categories
    "category id twice": ("duplicate_category_id", second("categories", id=1)),
    "category id as text": ("category_id_not_integer", second("categories", id="2")),
    "category name that is a number": ("category_name_not_text", second("categories", name=7)),
    "category without a name": ("invalid_category_entry", second("categories", "name")),
    "category name twice": ("duplicate_category_name", second("categories", name="circle")),
    "category name in the plural": ("duplicate_category_name", second("categories", name="Circles ")),
    "category name with a typing mistake": ("duplicate_category_name", lambda c, i: [
        c["categories"].append({"id": 9, "name": "circl"}),
        *(entry.update(category_id=9 if number == 1 else 1) for number, entry in enumerate(c["annotations"]))]),
    "category without an object": ("category_without_objects", again("categories", id=9, name="star")),
    # images
    "image id twice": ("duplicate_image_id", lambda c, i: c["images"][1].update(id=c["images"][2]["id"])),
    "image id as text": ("mixed_image_id_types", text_id_of_an_image),
    "image twice": ("duplicate_image_id", again("images")),
    "image that is text": ("invalid_image_entry", lambda c, i: c["images"].append("a.jpg")),
    "file name missing": ("invalid_image_entry", second("images", "file_name")),
    "file twice": ("duplicate_file_name", again("images", id=777)),
    "size missing": ("missing_image_size", second("images", "height")),
    "size of another image": ("image_size_mismatch", second("images", height=7)),
    "image without an object": ("image_without_objects", lambda c, i: c.update(annotations=[
        a for a in c["annotations"] if a["image_id"] != c["images"][1]["id"]])),
    "file missing": ("missing_image_file", file(Path.unlink)),
    "file cut off": ("damaged_image_file", file(truncate)),
    "file empty": ("unreadable_image_file", file(lambda path: path.write_bytes(b""))),
    "file that is a pipe": ("unreadable_image_file", file(lambda path: [path.unlink(), os.mkfifo(path)])),
}  # fmt: skip


def corrupt(folder: Path, name: str) -> str:
    """Corrupt ``annotations.json`` or ``images/`` of a folder, and return the name of the check that finds it."""
    check, change = CORRUPTIONS[name]
    content = json.loads((folder / "annotations.json").read_text())
    change(content, folder / "images")
    (folder / "annotations.json").write_text(json.dumps(content))
    return check
