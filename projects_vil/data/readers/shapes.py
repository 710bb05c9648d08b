"""Convert the shapes of annotation tools to objects of COCO files."""

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cv2
import numpy as np
from pycocotools import mask as mask_util

from backbones import ConfigError

# The shape type, the label, the group, and the values of the shape. The label and the group may be None.
Shape = tuple[str, Any, Any, list]
# The points of a square and of a circle around the origin, as complex numbers. Four points of the circle are on axes.
CORNERS, CIRCLE = np.array([-1 - 1j, 1 - 1j, 1 + 1j, -1 + 1j]), np.exp(2j * np.pi * np.arange(48) / 48)


@dataclass
class Annotations:
    """What a reader finds in a dataset besides its images.

    Attributes:
        classes: The class names, if the format defines their order.
        read: The other files that are read: files of one image, lists and class names.
        unused: The annotation files that are not used, by reason.
        noted: The files of each choice and each skipped entry, by description.
        notes: Messages about choices.
        errors: The first error of each file that cannot be read.
    """

    classes: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    unused: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    noted: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    notes: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def attempt(self, path: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a function. If it fails, add the error to ``errors``, so that other files are read."""
        try:
            return function(*args)
        except ConfigError as error:
            self.errors.setdefault(path, str(error))

    def objects_of(self, shapes: list[Shape], path: str) -> list[dict[str, Any]]:
        """Return the shapes of an image as objects, and count the shapes that are skipped.

        Args:
            shapes: The shapes. The values are points ``x0, y0, x1, y1, ...`` in pixels. An ellipse has the
                arguments of :func:`placed` instead. A mask has its pixels (H, W), its left side and its top.
                Polygons with the same label and group are parts of one object. A box in their group with the same
                sides (to 2 pixels) is not another object.
            path: The annotation file.
        """
        objects, groups = [], defaultdict(list)
        for index, (shape_type, label, group, values) in enumerate(shapes):
            label = "" if label is None else str(label).strip()
            num_points, key = len(values) // 2, (label, f"shape {index}" if group in (None, "", "0") else group)
            if shape_type == "mask" and values and isinstance(values[0], np.ndarray) and values[0].any():
                rle = mask_util.encode(np.asfortranarray(values[0], np.uint8))
                objects.append((None, {"label": label, "mask": (rle, *values[1:]), "iscrowd": 0}))
            elif shape_type in ("rectangle", "box", "rotation", "oriented_rectangle") and num_points in (2, 4):
                objects.append((key, box_object(label, values)))
            elif shape_type == "ellipse" and len(values) in (4, 5):
                objects.append((None, polygon_object(label, [placed(CIRCLE, *values)])))
            elif shape_type in ("polygon", "quadrilateral") and num_points >= 3 and not len(values) % 2:
                groups[key].append(values)
            else:
                has_points = shape_type in ("rectangle", "polygon", "circle")
                self.noted[f"skipped {shape_type}{f' of {num_points} points' * has_points}"].append(path)
        parts = {key: polygon_object(key[0], polygons) for key, polygons in groups.items()}
        # Some programs write the polygons and the box of an object in one group.
        others = [a for key, a in objects if key not in parts or not np.allclose(a["bbox"], parts[key]["bbox"], atol=2)]
        return others + [*parts.values()]


def number(text: Any, location: str) -> float:
    """Return a finite number.

    Raises:
        ConfigError: If ``text`` is not a finite number. The message begins with ``location``.
    """
    # A decimal comma, but not the comma of thousands
    is_decimal = isinstance(text, str) and re.fullmatch(r"\s*[1-9]\d{0,2},\d{3}\s*", text) is None
    with contextlib.suppress(TypeError, ValueError):
        if math.isfinite(value := float(text.replace(",", ".") if is_decimal else text)):
            return value
    raise ConfigError(f"{location}: {text!r} is not a number. Correct the value.")


def numbers(get: Callable[[str], Any], location: str, *keys: str) -> list[float]:
    """Return the finite numbers that ``get`` returns for the keys."""
    return [number(get(key), f"{location}: {key}") for key in keys]


def box_object(label: str, points: list[float]) -> dict[str, Any]:
    """Return an object with the box around points ``[x0, y0, x1, y1, ...]`` in pixels, such as two or four corners."""
    left, top, right, bottom = min(points[::2]), min(points[1::2]), max(points[::2]), max(points[1::2])
    width, height = round(right - left, 4), round(bottom - top, 4)
    return {"label": label, "bbox": [left, top, width, height], "area": width * height, "iscrowd": 0}


def polygon_object(label: str, polygons: list[list[float]]) -> dict[str, Any]:
    """Return an object with polygons ``[x0, y0, x1, y1, ...]`` in pixels."""
    box = box_object(label, [number for points in polygons for number in points])
    area = sum(cv2.contourArea(np.float32(points).reshape(-1, 2)) for points in polygons)
    # The area of a line is 0, which the dataset check reports.
    return box | {"area": max(area, 0.002 * box["area"]), "segmentation": polygons}


def degrees_of(value: Any) -> float:
    """Return an attribute ``rotation`` of CVAT as a number, or 0 for other values, which users may have defined."""
    return float(value) if re.fullmatch(r"-?\d+(\.\d+)?", str(value)) else 0


def rotated_box(left: float, top: float, right: float, bottom: float, degrees: float) -> list[float]:
    """Return the corners of a box in pixels after a rotation around its center, clockwise."""
    return placed(CORNERS, (left + right) / 2, (top + bottom) / 2, (right - left) / 2, (bottom - top) / 2, degrees)


def placed(shape: np.ndarray, x: float, y: float, radius_x: float, radius_y: float, degrees: float = 0) -> list[float]:
    """Return the points of ``CORNERS`` or ``CIRCLE`` in pixels: scaled, rotated clockwise, and moved to (x, y)."""
    points = (radius_x * shape.real + 1j * radius_y * shape.imag) * np.exp(1j * math.radians(degrees)) + complex(x, y)
    # Rounding removes the error of the sine of 90 degrees.
    return points.view(float).round(6).tolist()
