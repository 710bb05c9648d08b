"""Convert the shapes of annotation tools to objects of COCO files."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as mask_util

from backbones import ConfigError
from projects_vil.data.readers.index import FileIndex, Request
from projects_vil.data.segmentation import rectangle

# Points of the polygon of an ellipse. Four of them are the ends of its axes.
_NUM_ELLIPSE_POINTS = 48
# The shape type, the label, the group or None, and the points [x0, y0, x1, y1, ...]
Shape = tuple[str, str, Any, list[float]]


@dataclass
class Record:
    """An image of a dataset that is not in COCO format.

    Attributes:
        file: The image file.
        split: The split, or None if it is unknown.
        size: The height and width in pixels, or None if they are unknown.
        objects: COCO annotations without ids and area, and with ``label``, the class name.
    """

    file: str
    split: str | None
    size: tuple[int, int] | None
    objects: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Annotations:
    """The content of a dataset that is not in COCO format.

    Attributes:
        records: The images with their objects.
        classes: The class names, if the format defines their order.
        skipped: The annotation file of each skipped entry, by description.
        unused: The annotation files that are not used, by reason.
        notes: Messages about choices.
    """

    records: list[Record] = field(default_factory=list)
    classes: list[str] | None = None
    skipped: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    unused: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    notes: list[str] = field(default_factory=list)

    def with_images(
        self, requests: list[Request], index: FileIndex, write: Callable[[str], str | None] = lambda path: None
    ) -> Iterator[tuple[Record, Request]]:
        """Yield the annotations whose image exists, each with a new record without objects, and count the others.

        Args:
            requests: The annotations.
            index: The files of the dataset.
            write: Writes the image inside an annotation file, and returns its path, or None if there is no image.
        """
        for request, image in zip(requests, index.find_images(requests), strict=True):
            if image := image or write(request.annotation):
                split = request.split or index.split_of(request.annotation, image)
                self.records.append(Record(image, split, request.size))
                yield self.records[-1], request
            elif Path(request.annotation).stem in request.stems:
                self.unused["annotation files without an image of their own"].append(request.annotation)
            else:
                self.unused["missing images that an annotation file names"].append(request.names[0])


def number(text: Any, location: str) -> float:
    """Return a finite number.

    Raises:
        ConfigError: If ``text`` is not a finite number. The message begins with ``location``.
    """
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{location}: {text!r} is not a number. Correct the value.")
    return value


def numbers(get: Callable[[str], Any], location: str, *keys: str) -> list[float]:
    """Return the finite numbers that ``get`` returns for the keys."""
    return [number(get(key), f"{location}: {key}") for key in keys]


def box_object(label: str, points: list[float]) -> dict[str, Any]:
    """Return an object with the box around points ``[x0, y0, x1, y1, ...]`` in pixels, such as two or four corners."""
    left, top, right, bottom = min(points[::2]), min(points[1::2]), max(points[::2]), max(points[1::2])
    return {"label": label, "bbox": [left, top, round(right - left, 4), round(bottom - top, 4)], "iscrowd": 0}


def polygon_object(label: str, polygons: list[list[float]]) -> dict[str, Any]:
    """Return an object with polygons ``[x0, y0, x1, y1, ...]`` in pixels."""
    return box_object(label, [number for points in polygons for number in points]) | {"segmentation": polygons}


def mask_object(label: str, mask: np.ndarray, left: int, top: int, size: tuple[int, int]) -> dict[str, Any] | None:
    """Return the object of a mask (H, W) at a position in an image, or None if no pixel is in the image."""
    full = np.zeros(size, np.uint8, order="F")
    part = full[max(top, 0) : top + mask.shape[0], max(left, 0) : left + mask.shape[1]]
    part[:] = mask[max(-top, 0) :, max(-left, 0) :][: part.shape[0], : part.shape[1]]
    if not full.any():
        return None
    rle = mask_util.encode(full)
    x, y, w, h = mask_util.toBbox(rle).tolist()
    rle["counts"] = rle["counts"].decode()
    return box_object(label, [x, y, x + w, y + h]) | {"segmentation": rle}


def ellipse(x: float, y: float, radius_x: float, radius_y: float, degrees: float = 0) -> list[float]:
    """Return an ellipse as a polygon, rotated clockwise about its center."""
    angles = (2 * math.pi * index / _NUM_ELLIPSE_POINTS for index in range(_NUM_ELLIPSE_POINTS))
    points = [number for t in angles for number in (x + radius_x * math.cos(t), y + radius_y * math.sin(t))]
    return rotated(points, x, y, degrees)


def rotated(points: list[float], x: float, y: float, degrees: float) -> list[float]:
    """Return points ``[x0, y0, x1, y1, ...]``, rotated clockwise in the image about the center (x, y)."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    pairs = [(px - x, py - y) for px, py in zip(points[::2], points[1::2], strict=True)]
    # Rounding removes the error of the sine of 90 degrees.
    return [round(n, 6) for px, py in pairs for n in (x + px * cos - py * sin, y + px * sin + py * cos)]


def rotated_box(x: float, y: float, width: float, height: float, degrees: float) -> list[float]:
    """Return the corners of a rectangle, rotated clockwise about its center (x, y)."""
    return rotated(rectangle([x - width / 2, y - height / 2, width, height])[0], x, y, degrees)


def objects_of(shapes: list[Shape], path: str, skipped: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Return the shapes of an image as objects.

    Args:
        shapes: The shapes. Polygons with the same label and group are parts of one object. The numbers of an ellipse
            are the arguments of :func:`ellipse`.
        path: The annotation file.
        skipped: Receives ``path`` for each skipped shape, by description.
    """
    objects, groups = [], defaultdict(list)
    for index, (shape_type, label, group, points) in enumerate(shapes):
        num_points = len(points) // 2
        if shape_type in ("rectangle", "rotation", "oriented_rectangle") and num_points in (2, 4):
            objects.append(box_object(label, points))
        elif shape_type == "circle" and num_points == 2:
            (x, y), radius = points[:2], math.dist(points[:2], points[2:])
            objects.append(polygon_object(label, [ellipse(x, y, radius, radius)]))
        elif shape_type == "ellipse" and len(points) == 5:
            objects.append(polygon_object(label, [ellipse(*points)]))
        elif shape_type == "polygon" and num_points >= 3 and not len(points) % 2:
            groups[label, f"shape {index}" if group is None else group].append(points)
        else:
            has_points = shape_type in ("rectangle", "polygon", "circle")
            skipped[f"{shape_type} of {num_points} points" if has_points else shape_type].append(path)
    return objects + [polygon_object(label, polygons) for (label, _), polygons in groups.items()]


def area(segmentation: Any) -> float:
    """Return the area of polygons or of a mask in pixels."""
    if isinstance(segmentation, dict):
        return float(mask_util.area(segmentation))
    pairs = [(polygon[::2], polygon[1::2]) for polygon in segmentation]
    return sum(abs(sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs)))) / 2 for xs, ys in pairs)
