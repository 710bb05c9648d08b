"""Corruptions of a COCO file or its images, each with the check that finds it."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def second(of: str, *removed: str, **changes: Any) -> Callable[[dict, Path], None]:
    """Change the second entry of a list, and remove keys of it."""

    def change(content: dict, images: Path) -> None:
        content[of][1].update(changes)
        for key in removed:
            del content[of][1][key]

    return change


def annotation(*removed: str, **changes: Any) -> Callable[[dict, Path], None]:
    return second("annotations", *removed, **changes)


def again(of: str, **changes: Any) -> Callable[[dict, Path], None]:
    """Append the second entry again, changed."""
    return lambda content, images: content[of].append({**content[of][1], **changes})


def polygon(polygon: Any, *, keep: bool = False) -> Callable[[dict, Path], None]:
    """Give the second object this polygon, after its own with ``keep``."""

    def change(content: dict, images: Path) -> None:
        own = content["annotations"][1]["segmentation"]
        content["annotations"][1]["segmentation"] = [*(own if keep else []), polygon]

    return change


def rle(counts: Any = None, *, size: Any = None, crowd: int = 0) -> Callable[[dict, Path], None]:
    """Give the second object RLE; ``counts`` may be a function of the number of its image's pixels."""

    def change(content: dict, images: Path) -> None:
        of = next(image for image in content["images"] if image["id"] == content["annotations"][1]["image_id"])
        runs = counts(of["height"] * of["width"]) if callable(counts) else counts
        segmentation = {"counts": runs, "size": size or [of["height"], of["width"]]}
        content["annotations"][1].update(segmentation=segmentation, iscrowd=crowd)

    return change


def file(change: Callable[[Path], object]) -> Callable[[dict, Path], None]:
    """Change the file of the second image."""
    return lambda content, images: change(images / content["images"][1]["file_name"])


def text_id_of_an_image(content: dict, images: Path) -> None:
    number = content["images"][1]["id"]
    content["images"][1]["id"] = "second"
    for entry in content["annotations"]:
        if entry["image_id"] == number:
            entry["image_id"] = "second"


CORRUPTIONS: dict[str, tuple[str, Callable[[dict, Path], None]]] = {
    # boxes
    "box of NaN": ("box_form", annotation(bbox=[math.nan, 2.0, 5.0, 5.0])),
    "box of infinity": ("box_form", annotation(bbox=[1.0, 2.0, math.inf, 5.0])),
    "box of negative width": ("box_form", annotation(bbox=[20.0, 2.0, -5.0, 5.0])),
    "box null": ("box_form", annotation(bbox=None)),
    "box of text": ("box_form", annotation(bbox=["1", 2, 3, 4])),
    "box of three": ("box_form", annotation(bbox=[1, 2, 3])),
    "box of 1e30": ("box_outside", annotation(bbox=[1.0, 2.0, 1e30, 5.0])),
    "box of 10 to the 400th": ("box_form", annotation(bbox=[1.0, 2.0, 10**400, 5.0])),
    "box outside": ("box_outside", annotation(bbox=[-30.0, 2.0, 10.0, 10.0])),
    "box without area": ("box_empty", annotation(bbox=[5.0, 5.0, 0.0, 8.0])),
    "box beyond the edge": ("box_beyond", annotation(bbox=[-4.0, 2.0, 20.0, 20.0])),
    "box missing": ("box_of_mask", annotation("bbox")),
    "box and mask missing": ("box_missing", annotation("bbox", "segmentation")),
    # masks
    "polygon of NaN": ("mask_form", polygon([math.nan, 1.0, 9.0, 9.0, 3.0, 4.0])),
    "polygon of text": ("mask_form", polygon(["1", "1", "9", "9", "3", "4"])),
    "polygon not in a list": ("mask_form", annotation(segmentation=[1.0, 1.0, 9.0, 9.0, 3.0, 4.0])),
    "segmentation of text": ("mask_form", annotation(segmentation="circle")),
    "polygon of 1e12": ("polygon_far", polygon([1e12, 1.0, 9.0, 9.0, 3.0, 4.0])),
    "polygon of an odd number": ("mask_empty", polygon([1.0, 1.0, 9.0, 9.0, 3.0, 4.0, 5.0])),
    "polygon outside": ("mask_empty", polygon([-9.0, 1.0, -3.0, 1.0, -3.0, 7.0])),
    "polygon of two points among others": ("polygon_empty", polygon([1.0, 1.0, 9.0, 9.0], keep=True)),
    "polygon outside among others": ("polygon_empty", polygon([-9.0, 1.0, -3.0, 1.0, -3.0, 7.0], keep=True)),
    "segmentation missing": ("mask_missing", annotation("segmentation")),
    "RLE of another size": ("rle_form", rle(lambda pixels: [pixels], size=[7, 9])),
    "RLE of too few pixels": ("rle_form", rle(lambda pixels: [pixels - 1])),
    "RLE of negative runs": ("rle_form", rle(lambda pixels: [pixels + 1, -1])),
    "RLE of other characters": ("rle_form", rle("ä!")),
    "RLE that breaks off": ("rle_form", rle("ooo")),
    "RLE without counts": ("rle_form", rle(None)),
    "RLE without size": ("mask_form", annotation(segmentation={"counts": [3]})),
    "RLE of an object": ("rle_object", rle(lambda pixels: [100, 60, pixels - 160])),
    # what goes with them
    "annotation that is a number": ("annotation_form", lambda c, i: c["annotations"].append(17)),
    "annotation id twice": ("annotation_id_twice", annotation(id=1)),
    "annotation twice": ("annotation_id_twice", again("annotations")),
    "annotation id missing": ("annotation_id_unusable", annotation("id")),
    "annotation id as text": ("annotation_id_unusable", annotation(id="obj9")),
    "annotation id 0": ("annotation_id_unusable", annotation(id=0)),
    "iscrowd missing": ("iscrowd_missing", annotation("iscrowd")),
    "iscrowd as text": ("iscrowd_value", annotation(iscrowd="0")),
    "ignored object": ("ignored", annotation(ignore=1)),
    "area missing": ("area_missing", annotation("area")),
    "area of NaN": ("area_missing", annotation(area=math.nan)),
    "area of 1e30": ("area_missing", annotation(area=1e30)),
    "image unknown": ("image_unknown", annotation(image_id=10**9)),
    "image_id as a list": ("image_unknown", annotation(image_id=[1])),
    "image_id as text": ("image_id_text", lambda c, i: c["annotations"][1].update(image_id=str(c["images"][0]["id"]))),
    "category unknown": ("category_unknown", annotation(category_id=999)),
    "category_id as text": ("category_id_text", annotation(category_id="2")),
    # categories
    "category id twice": ("category_id_twice", second("categories", id=1)),
    "category id as text": ("category_text", second("categories", id="2")),
    "category without a name": ("category_form", second("categories", "name")),
    "category name twice": ("category_name_twice", second("categories", name="circle")),
    "category without an object": ("category_empty", lambda c, i: c["categories"].append({"id": 9, "name": "star"})),
    # images
    "image id twice": ("image_id_twice", lambda c, i: c["images"][1].update(id=c["images"][2]["id"])),
    "image id as text": ("image_ids_mixed", text_id_of_an_image),
    "image twice": ("image_id_twice", again("images")),
    "image that is text": ("image_form", lambda c, i: c["images"].append("a.jpg")),
    "file name missing": ("image_form", second("images", "file_name")),
    "file twice": ("file_twice", again("images", id=777)),
    "size missing": ("image_size_missing", second("images", "height")),
    "size of another image": ("file_size", second("images", height=7)),
    "image without an object": ("image_empty", lambda c, i: c.update(annotations=[
        a for a in c["annotations"] if a["image_id"] != c["images"][1]["id"]])),
    "file missing": ("file_missing", file(Path.unlink)),
    "file empty": ("file_unreadable", file(lambda path: path.write_bytes(b""))),
    "file that is a pipe": ("file_unreadable", file(lambda path: [path.unlink(), os.mkfifo(path)])),
    "file that is a folder": ("file_unreadable", file(lambda path: [path.unlink(), path.mkdir()])),
}  # fmt: skip


def corrupt(folder: Path, name: str) -> str:
    """Corrupt ``annotations.json`` or ``images/`` of a folder; return the name of the check that finds it."""
    check, change = CORRUPTIONS[name]
    content = json.loads((folder / "annotations.json").read_text())
    change(content, folder / "images")
    (folder / "annotations.json").write_text(json.dumps(content))
    return check
