"""Corruptions of a COCO file or its images, each with the check that finds it."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image


def annotation(**changes: Any) -> Callable[[dict, Path], None]:
    """Change the second object of the file."""
    return lambda content, images: content["annotations"][1].update(changes)


def without(*keys: str, of: str = "annotations") -> Callable[[dict, Path], None]:
    return lambda content, images: [content[of][1].pop(key) for key in keys]


def image(**changes: Any) -> Callable[[dict, Path], None]:
    return lambda content, images: content["images"][1].update(changes)


def category(**changes: Any) -> Callable[[dict, Path], None]:
    return lambda content, images: content["categories"][1].update(changes)


def polygons(*polygons: Any, keep: bool = False) -> Callable[[dict, Path], None]:
    """Give the second object these polygons, after its own with ``keep``."""

    def change(content: dict, images: Path) -> None:
        own = content["annotations"][1]["segmentation"]
        content["annotations"][1]["segmentation"] = [*(own if keep else []), *polygons]

    return change


def corner(value: float) -> Callable[[dict, Path], None]:
    """Change the first coordinate of the second object's polygon."""

    def change(content: dict, images: Path) -> None:
        content["annotations"][1]["segmentation"][0][0] = value

    return change


def rle(counts: Any = None, *, size: Any = None, crowd: int = 0) -> Callable[[dict, Path], None]:
    """Give the second object RLE; ``counts`` may be a function of the number of its image's pixels."""

    def change(content: dict, images: Path) -> None:
        of = next(image for image in content["images"] if image["id"] == content["annotations"][1]["image_id"])
        own = [of["height"], of["width"]]
        runs = counts(own[0] * own[1]) if callable(counts) else counts
        content["annotations"][1].update(segmentation={"counts": runs, "size": size or own}, iscrowd=crowd)

    return change


def file(change: Callable[[Path], object]) -> Callable[[dict, Path], None]:
    """Change the file of the second image."""
    return lambda content, images: change(images / content["images"][1]["file_name"])


def replaced_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def resized(path: Path) -> None:
    with Image.open(path) as opened:
        size = opened.size
    Image.new("RGB", (size[0] + 3, size[1])).save(path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def twice(of: str, **changes: Any) -> Callable[[dict, Path], None]:
    """Append the second entry again, changed."""
    return lambda content, images: content[of].append({**content[of][1], **changes})


def id_of_another_image(content: dict, images: Path) -> None:
    content["images"][2]["id"] = content["images"][1]["id"]


def text_id_of_an_image(content: dict, images: Path) -> None:
    number = content["images"][1]["id"]
    content["images"][1]["id"] = "second"
    for entry in content["annotations"]:
        if entry["image_id"] == number:
            entry["image_id"] = "second"


def text_ids(content: dict, images: Path) -> None:
    for entry in content["annotations"]:
        entry["category_id"] = str(entry["category_id"])


NAN, INFINITE = math.nan, math.inf
CORRUPTIONS: dict[str, tuple[str, Callable[[dict, Path], None]]] = {
    # boxes
    "box of NaN": ("box_form", annotation(bbox=[NAN, 2.0, 5.0, 5.0])),
    "box of infinity": ("box_form", annotation(bbox=[1.0, 2.0, INFINITE, 5.0])),
    "box of 1e30": ("box_outside", annotation(bbox=[1.0, 2.0, 1e30, 5.0])),
    "box of negative width": ("box_form", annotation(bbox=[20.0, 2.0, -5.0, 5.0])),
    "box outside": ("box_outside", annotation(bbox=[-30.0, 2.0, 10.0, 10.0])),
    "box without area": ("box_empty", annotation(bbox=[5.0, 5.0, 0.0, 8.0])),
    "box beyond the edge": ("box_beyond", annotation(bbox=[-4.0, 2.0, 20.0, 20.0])),
    "box missing": ("box_of_mask", without("bbox")),
    "box and mask missing": ("box_missing", without("bbox", "segmentation")),
    "box null": ("box_form", annotation(bbox=None)),
    "box of text": ("box_form", annotation(bbox=["1", 2, 3, 4])),
    "box of three": ("box_form", annotation(bbox=[1, 2, 3])),
    "box empty": ("box_form", annotation(bbox=[])),
    # masks
    "polygon of NaN": ("mask_form", corner(NAN)),
    "polygon of infinity": ("mask_form", corner(-INFINITE)),
    "polygon of 1e12": ("polygon_far", corner(1e12)),
    "polygon of two points": ("mask_empty", polygons([1.0, 1.0, 9.0, 9.0])),
    "polygon of an odd number": ("mask_empty", polygons([1.0, 1.0, 9.0, 9.0, 3.0, 4.0, 5.0])),
    "polygon empty": ("mask_empty", polygons([])),
    "polygon of two points among others": ("polygon_empty", polygons([1.0, 1.0, 9.0, 9.0], keep=True)),
    "polygon outside": ("mask_empty", polygons([-9.0, 1.0, -3.0, 1.0, -3.0, 7.0])),
    "polygon outside among others": ("polygon_empty", polygons([-9.0, 1.0, -3.0, 1.0, -3.0, 7.0], keep=True)),
    "polygon of text": ("mask_form", polygons(["1", "1", "9", "9", "3", "4"])),
    "polygon not in a list": ("mask_form", annotation(segmentation=[1.0, 1.0, 9.0, 9.0, 3.0, 4.0])),
    "segmentation of text": ("mask_form", annotation(segmentation="circle")),
    "segmentation missing": ("mask_missing", without("segmentation")),
    "segmentation empty": ("mask_missing", annotation(segmentation=[])),
    "RLE of another size": ("rle_form", rle(lambda pixels: [pixels], size=[7, 9])),
    "RLE of too few pixels": ("rle_form", rle(lambda pixels: [pixels - 1])),
    "RLE of negative runs": ("rle_form", rle(lambda pixels: [pixels + 1, -1])),
    "RLE of fractions": ("rle_form", rle(lambda pixels: [pixels - 0.5, 0.5])),
    "RLE of other characters": ("rle_form", rle("ä!")),
    "RLE that breaks off": ("rle_form", rle("ooo")),
    "RLE without counts": ("rle_form", rle(None)),
    "RLE without size": ("mask_form", annotation(segmentation={"counts": [3]})),
    "RLE of an object": ("rle_object", rle(lambda pixels: [100, 60, pixels - 160])),
    # what goes with them
    "annotation that is a number": ("annotation_form", lambda c, i: c["annotations"].append(17)),
    "annotation id twice": ("annotation_id_twice", annotation(id=1)),
    "annotation twice": ("annotation_id_twice", twice("annotations")),
    "annotation id missing": ("annotation_id_unusable", without("id")),
    "annotation id as text": ("annotation_id_unusable", annotation(id="obj9")),
    "annotation id below 0": ("annotation_id_unusable", annotation(id=-7)),
    "annotation id 0": ("annotation_id_unusable", annotation(id=0)),
    "iscrowd missing": ("iscrowd_missing", without("iscrowd")),
    "iscrowd 2": ("iscrowd_value", annotation(iscrowd=2)),
    "iscrowd as text": ("iscrowd_value", annotation(iscrowd="0")),
    "ignored object": ("ignored", annotation(ignore=1)),
    "area missing": ("area_missing", without("area")),
    "area of NaN": ("area_missing", annotation(area=NAN)),
    "area of 1e30": ("area_missing", annotation(area=1e30)),
    "area negative": ("area_missing", annotation(area=-5.0)),
    "image unknown": ("image_unknown", annotation(image_id=12345)),
    "image_id missing": ("image_unknown", without("image_id")),
    "image_id as a list": ("image_unknown", annotation(image_id=[1])),
    "image_id as text": ("image_id_text", lambda c, i: c["annotations"][1].update(image_id=str(c["images"][0]["id"]))),
    "category unknown": ("category_unknown", annotation(category_id=17)),
    "category_id missing": ("category_unknown", without("category_id")),
    "category_id as text": ("category_id_text", text_ids),
    # categories
    "category id twice": ("category_id_twice", category(id=1)),
    "category id as text": ("category_text", category(id="2")),
    "category without a name": ("category_form", without("name", of="categories")),
    "category name twice": ("category_name_twice", category(name="circle")),
    "category without an object": ("category_empty", lambda c, i: c["categories"].append({"id": 9, "name": "star"})),
    # images
    "image id twice": ("image_id_twice", id_of_another_image),
    "image id as text": ("image_ids_mixed", text_id_of_an_image),
    "image twice": ("image_id_twice", twice("images")),
    "image id missing": ("image_form", without("id", of="images")),
    "image that is text": ("image_form", lambda c, i: c["images"].append("a.jpg")),
    "file name missing": ("image_form", without("file_name", of="images")),
    "file twice": ("file_twice", twice("images", id=777)),
    "size missing": ("image_size_missing", without("height", of="images")),
    "size of another image": ("file_size", image(height=7)),
    "image without an object": ("image_empty", lambda c, i: c.update(annotations=[
        a for a in c["annotations"] if a["image_id"] != c["images"][1]["id"]])),
    "file missing": ("file_missing", file(Path.unlink)),
    "file empty": ("file_unreadable", file(lambda path: path.write_bytes(b""))),
    "file of text": ("file_unreadable", file(lambda path: path.write_text("no image"))),
    "file that is a pipe": ("file_unreadable", file(replaced_by_pipe)),
    "file that is a folder": ("file_unreadable", file(lambda path: [path.unlink(), path.mkdir()])),
    "file of another size": ("file_size", file(resized)),
}  # fmt: skip


def corrupt(folder: Path, name: str) -> str:
    """Corrupt ``annotations.json`` or ``images/`` of a folder; return the name of the check that finds it."""
    check, change = CORRUPTIONS[name]
    content = json.loads((folder / "annotations.json").read_text())
    change(content, folder / "images")
    (folder / "annotations.json").write_text(json.dumps(content))
    return check


def add_invalid_objects(content: dict, number: int) -> None:
    """Add objects that a cleaned copy does not have."""
    bad = [NAN, 1.0, 5.0, 5.0], [1.0, 1.0, INFINITE, 5.0], [-90.0, 1.0, 5.0, 5.0], [5.0, 5.0, -4.0, 5.0]
    mask = [[NAN, 1.0, 5.0, 5.0, 1.0, 9.0]]
    for index, entry in enumerate(content["annotations"][:number]):
        changes = {"id": 10_000 + index, "bbox": bad[index % len(bad)], "segmentation": mask}
        content["annotations"].append(entry | changes)
