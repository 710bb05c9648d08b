"""Convert the shapes of annotation tools to objects of COCO files."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pycocotools import mask as mask_util

from backbones import ConfigError

# Points of the polygon of an ellipse. Four of them are the ends of its axes.
_NUM_ELLIPSE_POINTS = 48


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
    objects: list[dict[str, Any]]


@dataclass
class Annotations:
    """The content of a dataset that is not in COCO format.

    Attributes:
        records: The images with their objects.
        classes: The class names, if the format defines their order.
        counts: The number of skipped or changed entries, by description.
        unused: The annotation files that are not used, by reason.
        notes: Messages about choices.
    """

    records: list[Record] = field(default_factory=list)
    classes: list[str] | None = None
    counts: Counter = field(default_factory=Counter)
    unused: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    notes: list[str] = field(default_factory=list)


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


def box_object(label: str, left: float, top: float, right: float, bottom: float, iscrowd: int = 0) -> dict[str, Any]:
    """Return an object with a box, whose corners may be swapped."""
    (left, right), (top, bottom) = sorted((left, right)), sorted((top, bottom))
    box = [left, top, round(right - left, 4), round(bottom - top, 4)]
    return {"label": label, "bbox": box, "iscrowd": iscrowd}


def polygon_object(label: str, polygons: list[list[float]]) -> dict[str, Any]:
    """Return an object with polygons ``[x0, y0, x1, y1, ...]`` in pixels."""
    xs, ys = [x for points in polygons for x in points[::2]], [y for points in polygons for y in points[1::2]]
    return box_object(label, min(xs), min(ys), max(xs), max(ys)) | {"segmentation": polygons}


def mask_objects(
    label: str, mask: np.ndarray, left: int, top: int, size: tuple[int, int], counts: Counter
) -> list[dict[str, Any]]:
    """Return a list with the object of a mask (H, W) at a position in an image. An empty mask is only counted."""
    full = np.zeros(size, np.uint8, order="F")
    part = full[max(top, 0) : top + mask.shape[0], max(left, 0) : left + mask.shape[1]]
    part[:] = mask[max(-top, 0) :, max(-left, 0) :][: part.shape[0], : part.shape[1]]
    if not full.any():
        counts["masks without pixels"] += 1
        return []
    rle = mask_util.encode(full)
    x, y, w, h = mask_util.toBbox(rle).tolist()
    rle["counts"] = rle["counts"].decode()
    return [box_object(label, x, y, x + w, y + h) | {"segmentation": rle}]


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


def rotated_box(label: str, corners: list[float]) -> dict[str, Any]:
    """Return an object with the box around a rotated box of four corners."""
    return box_object(label, min(corners[::2]), min(corners[1::2]), max(corners[::2]), max(corners[1::2]))


def objects_of(shapes: list[tuple[str, str, Any, list[float]]], counts: Counter) -> list[dict[str, Any]]:
    """Return the shapes of an image as objects.

    Args:
        shapes: Tuples with the shape type, the label, the group or None, and the points ``[x0, y0, x1, y1, ...]``.
            Polygons with the same label and group are parts of one object. The numbers of an ellipse are the arguments
            of :func:`ellipse`.
        counts: Counts the skipped shapes.
    """
    objects, groups = [], defaultdict(list)
    for index, (shape_type, label, group, points) in enumerate(shapes):
        num_points = len(points) // 2
        if shape_type == "rectangle" and num_points in (2, 4):
            # A rectangle has two or four corners.
            objects.append(rotated_box(label, points) if num_points == 4 else box_object(label, *points))
        elif shape_type in ("rotation", "oriented_rectangle") and num_points == 4:
            objects.append(rotated_box(label, points))
        elif shape_type == "circle" and num_points == 2:
            (x, y), radius = points[:2], math.dist(points[:2], points[2:])
            objects.append(polygon_object(label, [ellipse(x, y, radius, radius)]))
        elif shape_type == "ellipse" and len(points) == 5:
            objects.append(polygon_object(label, [ellipse(*points)]))
        elif shape_type == "polygon" and num_points >= 3 and not len(points) % 2:
            groups[label, f"shape {index}" if group is None else group].append(points)
        else:
            has_points = shape_type in ("rectangle", "polygon", "circle")
            counts[f"{shape_type} of {num_points} points" if has_points else shape_type] += 1
    return objects + [polygon_object(label, polygons) for (label, _), polygons in groups.items()]


def area(segmentation: Any) -> float:
    """Return the area of polygons or of a mask in pixels."""
    if isinstance(segmentation, dict):
        return float(mask_util.area(segmentation))
    return sum(map(_polygon_area, segmentation))


def _polygon_area(polygon: list[float]) -> float:
    xs, ys = polygon[::2], polygon[1::2]
    return abs(sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs)))) / 2
