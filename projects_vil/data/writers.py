"""Write datasets and detections in COCO, YOLO, Pascal VOC, LabelMe and CVAT format, with copies of the images.

supervision writes YOLO, Pascal VOC and LabelMe, but not CVAT. It loses scores and crowds, converts polygons to bitmaps
and back, rounds the boxes of Pascal VOC to whole pixels, and rejects images with equal names in two folders.
"""

import itertools
import json
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from xml.sax.saxutils import escape, quoteattr

import cv2
import yaml
from pycocotools import mask as mask_util

from backbones import ConfigError
from backbones.errors import check_choice, counted
from projects_vil.data.check import check_dataset
from projects_vil.data.readers.index import normalized
from projects_vil.data.readers.shapes import polygon_object
from projects_vil.data.segmentation import rle_of
from projects_vil.data.splits import without_masks
from projects_vil.files import atomic_folder

# The polygon of a predicted mask is simplified by at most this many pixels.
_TOLERANCE = 1.0


class _Image(NamedTuple):
    """An image of a dataset, its path in the copy, its COCO entry, and its annotations with ``label``."""

    split: str
    path: PurePosixPath
    entry: dict[str, Any]
    objects: list[dict[str, Any]]


# A dict from the path of a file to its text
Files = dict[str, str]


def convert_dataset(
    data: str | Path, output: str | Path, output_format: str, *, images: str | Path | None = None
) -> list[str]:
    """Write a copy of a dataset in another format, with its images and splits, and return a summary as lines.

    Args:
        data: A dataset in any format that :func:`.read_dataset` reads.
        output: A new folder.
        output_format: ``"coco"``, ``"yolo"``, ``"voc"``, ``"labelme"`` or ``"cvat"``.
        images: The folder with the images, if it is not the folder of the dataset.

    Raises:
        ConfigError: If the dataset cannot be read or has errors, or if ``output`` exists.
    """
    check_output(output, output_format)
    if Path(output).resolve().is_relative_to(Path(data).resolve()):
        raise ConfigError(f"'{output}' is inside the dataset '{data}'. Choose a folder outside of it.")
    with tempfile.TemporaryDirectory() as extracted:
        dataset, files = check_dataset(data, images, fixed=extracted)
        parts = {}
        for split, file in files.items():
            if file.findings("error"):
                raise file.error()
            content = file.fixed()[0]
            parts[split] = content if file.masks else without_masks(content), Path(file.image_root)
        return [*dataset.line().splitlines(), *write_dataset(parts, output, output_format)]


def write_detections(
    detections: Iterable[tuple[dict[str, Any], list[dict[str, Any]]]],
    categories: list[dict[str, Any]],
    root: str | Path,
    output: str | Path,
    output_format: str,
) -> list[str]:
    """Write detections as a dataset that annotation tools open for correction, and return a summary as lines.

    Masks become polygons, which are simplified by at most a pixel.

    Args:
        detections: Pairs of a COCO image, whose file name is relative to ``root``, and its results in COCO's format.
        categories: The categories of the results.
        root: The image folder.
        output: A new folder.
        output_format: See :func:`convert_dataset`.
    """
    content: dict[str, Any] = {"images": [], "annotations": [], "categories": categories}
    for image, results in detections:
        content["images"].append(image)
        for one in results:
            polygons = _polygons(one.get("segmentation"), image, _TOLERANCE)
            size = polygon_object("", polygons)["area"] if polygons else one["bbox"][2] * one["bbox"][3]
            ids = {"id": len(content["annotations"]) + 1, "iscrowd": 0}
            content["annotations"].append(one | ids | {"area": size, "segmentation": polygons})
    return write_dataset({"train": (content, Path(root))}, output, output_format)


def check_output(output: str | Path, output_format: str) -> None:
    """Raise a :class:`ConfigError` if a path exists, or if a format is unknown."""
    check_choice("format", output_format, _FORMATS)
    if os.path.lexists(output):
        raise ConfigError(f"'{output}' already exists. Move it, or choose another output directory.")


def write_dataset(parts: dict[str, tuple[dict, Path]], output: str | Path, output_format: str) -> list[str]:
    """Write a dataset with copies of its images, and return a summary as lines.

    The images of a split are in one folder. If they come from several folders, ``day1/a.jpg`` becomes ``day1_a.jpg``.

    Args:
        parts: A dict from the split to a valid COCO content and its image folder. Annotations may have a ``score``.
        output: A new folder, which appears when all files are written.
        output_format: See :func:`convert_dataset`.

    Raises:
        ConfigError: If ``output`` exists.
        OSError: If an image cannot be copied.
    """
    check_output(output, output_format)
    categories = _shared_categories([content["categories"] for content, _ in parts.values()])
    ids = {category["name"]: category["id"] for category in categories}
    images, used, skipped = [], defaultdict(set), Counter()
    with atomic_folder(Path(output).parent) as unfinished:
        partial = unfinished / "dataset"
        for split, (content, root) in parts.items():
            folder, objects = _FORMATS[output_format][0].format(split=split), defaultdict(list)
            labels = {category["id"]: category["name"] for category in content["categories"]}
            for one in content.get("annotations", ()):
                label = labels[one["category_id"]]
                objects[one["image_id"]].append(one | {"label": label, "category_id": ids[label]})
            written = (PurePosixPath(entry["file_name"].replace("\\", "/")) for entry in content["images"])
            paths = [[part for part in path.parts if part not in ("/", "..")] for path in written]
            num_common = len(os.path.commonprefix([names[:-1] for names in paths]))
            for entry, names in zip(content["images"], paths, strict=True):
                path = PurePosixPath(folder, _new_name("_".join(names[num_common:]), used[folder]))
                images.append(_Image(split, path, entry, objects[entry["id"]]))
                (partial / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / entry["file_name"], partial / path)
        for name, text in _FORMATS[output_format][1](images, categories, skipped).items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_text(text, encoding="utf-8")
        partial.rename(output)
    lines = [f"left out, not supported by the format: {number:,} {what}" for what, number in (+skipped).items()]
    if len(categories) < max(len(content["categories"]) for content, _ in parts.values()):
        lines.append("categories with the same name are one class")
    return [f"wrote {output}: {counted(len(images), 'image')} in format {output_format}", *lines]


def _shared_categories(lists: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the categories of all splits, with new ids unless all splits have the same ids and unique names."""
    pairs = [sorted((category["id"], category["name"]) for category in categories) for categories in lists]
    names = dict.fromkeys(name for categories in pairs for _, name in categories)
    if any(other != pairs[0] for other in pairs) or len(names) < len(pairs[0]):
        return [{"id": number, "name": name} for number, name in enumerate(names, start=1)]
    return sorted(lists[0], key=lambda category: category["id"])


def _new_name(file_name: str, used: set[str]) -> str:
    """Return a file name whose stem is not in ``used``, and add its stem to ``used``."""
    # A comment in the lists of Pascal VOC starts with #.
    path = PurePosixPath(file_name.replace("#", "_"))
    stems = itertools.chain([path.stem], (f"{path.stem}_{number}" for number in itertools.count(2)))
    stem = next(stem for stem in stems if normalized(stem) not in used)
    used.add(normalized(stem))
    return stem + path.suffix


# -- shapes ----------------------------------------------------------------------------------------


def _shapes(image: _Image, skipped: Counter) -> list[tuple[dict[str, Any], list[list[float]]]]:
    """Return the objects of an image that are not crowds with their polygons, and count the crowds."""
    objects = [one for one in image.objects if not one["iscrowd"]]
    skipped["crowds"] += len(image.objects) - len(objects)
    return [(one, _polygons(one.get("segmentation"), image.entry)) for one in objects]


def _polygons(segmentation: Any, image: dict[str, Any], tolerance: float = 0) -> list[list[float]]:
    """Return a valid segmentation as polygons, which are simplified by at most ``tolerance`` pixels.

    Polygons of RLE follow the edges of the pixels. A hole is connected with its outline by a line without width.
    """
    if not isinstance(segmentation, dict):
        return segmentation or []
    rle = rle_of(segmentation, image["height"], image["width"])
    left, top, width, height = map(int, mask_util.toBbox(rle))
    part = mask_util.decode(rle)[top : top + height, left : left + width]
    # The contours of OpenCV lead through pixel centers. In an image of twice the size, rounding gives the edges.
    doubled, start = part.repeat(2, axis=0).repeat(2, axis=1), (2 * left, 2 * top)
    contours, hierarchy = cv2.findContours(doubled, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE, offset=start)
    outlines = defaultdict(list)
    for index, contour in enumerate(contours):
        points = cv2.approxPolyDP((contour + 1) // 2, tolerance, True).ravel().tolist()
        parent = int(hierarchy[0][index][3])
        if len(points) >= 6:
            outlines[index if parent < 0 else parent].append(points)
    return [_joined(parts) for parts in outlines.values()]


def _joined(polygons: list[list[float]]) -> list[float]:
    """Return polygons as one polygon, whose parts are connected by lines without width."""
    closed = [number for points in polygons for number in (*points, *points[:2] * (len(polygons) > 1))]
    return closed + [number for points in polygons[-2:0:-1] for number in points[:2]]


# -- formats ---------------------------------------------------------------------------------------


def _write_coco(images: list[_Image], categories: list[dict[str, Any]], skipped: Counter) -> Files:
    files = {}
    for split, own in itertools.groupby(images, key=lambda image: image.split):
        content: dict[str, Any] = {"images": [], "annotations": [], "categories": categories}
        for image in own:
            content["images"].append(image.entry | {"file_name": image.path.name})
            content["annotations"] += [{key: one[key] for key in one if key != "label"} for one in image.objects]
        files[f"annotations/instances_{split}.json"] = json.dumps(content)
    return files


def _write_yolo(images: list[_Image], categories: list[dict[str, Any]], skipped: Counter) -> Files:
    indices = {category["id"]: index for index, category in enumerate(categories)}
    # Other tools need both splits.
    settings: dict[str, Any] = dict.fromkeys(("train", "val"), "images/train")
    settings |= {image.split: f"images/{image.split}" for image in images}
    settings["names"] = dict(enumerate(category["name"] for category in categories))
    files = {"data.yaml": yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)}
    for image in images:
        rows, sides = [], (image.entry["width"], image.entry["height"])
        for one, polygons in _shapes(image, skipped):
            left, top, width, height = one["bbox"]
            numbers = _joined(polygons) if polygons else [left + width / 2, top + height / 2, width, height]
            normal = [f"{number / side:.9g}" for number, side in zip(numbers, itertools.cycle(sides), strict=False)]
            rows.append(" ".join([str(indices[one["category_id"]]), *normal]) + "\n")
        files[f"labels/{image.split}/{image.path.stem}.txt"] = "".join(rows)
    return files


def _write_voc(images: list[_Image], categories: list[dict[str, Any]], skipped: Counter) -> Files:
    files: Files = defaultdict(str)
    for image in images:
        text = f"<filename>{escape(image.path.name)}</filename>"
        text += _tags("size", width=image.entry["width"], height=image.entry["height"], depth=3)
        boxes = [[round(number, 4) for number in one["bbox"]] for one in image.objects]
        # Whole pixels are counted from 1, and the box includes the last pixel. Fractions are counted from 0.
        offset = int(all(number == int(number) for box in boxes for number in box))
        for one, (left, top, width, height) in zip(image.objects, boxes, strict=True):
            skipped["masks"] += bool(one.get("segmentation"))
            box = _tags("bndbox", xmin=left + offset, ymin=top + offset, xmax=left + width, ymax=top + height)
            name = f"<name>{escape(one['label'])}</name><difficult>{int(one['iscrowd'])}</difficult>"
            text += f"\n<object>{name}{box}</object>"
        files[f"Annotations/{image.path.stem}.xml"] = f"<annotation>{text}</annotation>\n"
        files[f"ImageSets/Main/{image.split}.txt"] += f"{image.path.stem}\n"
    return files


def _tags(name: str, **numbers: float) -> str:
    return f"<{name}>" + "".join(f"<{key}>{number:.10g}</{key}>" for key, number in numbers.items()) + f"</{name}>"


def _write_labelme(images: list[_Image], categories: list[dict[str, Any]], skipped: Counter) -> Files:
    files = {}
    for image in images:
        shapes = []
        for number, (one, polygons) in enumerate(_shapes(image, skipped), start=1):
            left, top, width, height = one["bbox"]
            shape = {"label": one["label"], "group_id": number if len(polygons) > 1 else None, "flags": {}}
            shape |= {"shape_type": "polygon" if polygons else "rectangle"}
            if "score" in one:
                # X-AnyLabeling shows the score, and LabelMe shows the description.
                shape |= {"score": one["score"], "description": f"score {one['score']:.3f}"}
            for points in polygons or [[left, top, left + width, top + height]]:
                shapes.append(shape | {"points": list(map(list, zip(points[::2], points[1::2], strict=True)))})
        content = {"version": "5.5.0", "flags": {}, "shapes": shapes, "imagePath": image.path.name, "imageData": None}
        content |= {"imageHeight": image.entry["height"], "imageWidth": image.entry["width"]}
        files[str(image.path.with_suffix(".json"))] = json.dumps(content, ensure_ascii=False, indent=2)
    return files


def _write_cvat(images: list[_Image], categories: list[dict[str, Any]], skipped: Counter) -> Files:
    score = "<attribute><name>score</name><mutable>False</mutable><input_type>text</input_type></attribute>"
    attributes = f"<attributes>{score}</attributes>"
    labels = "".join(f"<label><name>{escape(entry['name'])}</name>{attributes}</label>" for entry in categories)
    lines = [f"<annotations><version>1.1</version><meta><task><labels>{labels}</labels></task></meta>"]
    for index, image in enumerate(images):
        size = f'width="{image.entry["width"]}" height="{image.entry["height"]}"'
        lines.append(f'<image id="{index}" name={quoteattr(image.path.name)} subset="{image.split}" {size}>')
        for number, (one, polygons) in enumerate(_shapes(image, skipped), start=1):
            group = f' group_id="{number}"' if len(polygons) > 1 else ""
            common = f'label={quoteattr(one["label"])} source="file" occluded="0" z_order="0"{group}'
            score = f'<attribute name="score">{one["score"]:.4f}</attribute>' if "score" in one else ""
            for points in polygons:
                pairs = ";".join(f"{x:.10g},{y:.10g}" for x, y in zip(points[::2], points[1::2], strict=True))
                lines.append(f'<polygon points="{pairs}" {common}>{score}</polygon>')
            if not polygons:
                left, top, width, height = one["bbox"]
                sides = f'xtl="{left:.10g}" ytl="{top:.10g}" xbr="{left + width:.10g}" ybr="{top + height:.10g}"'
                lines.append(f"<box {sides} {common}>{score}</box>")
        lines.append("</image>")
    return {"annotations.xml": "\n".join([*lines, "</annotations>\n"])}


# The image folder and the writer of each format
_FORMATS = {
    "coco": ("images/{split}", _write_coco),
    "yolo": ("images/{split}", _write_yolo),
    "voc": ("JPEGImages", _write_voc),
    "labelme": ("{split}", _write_labelme),
    "cvat": ("images/{split}", _write_cvat),
}
