"""Read LabelMe, CVAT and VIA files, which have a list of shapes per image. Convert shapes to objects of COCO files."""

import base64
import contextlib
import io
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any
from xml.etree import ElementTree

import cv2
import numpy as np
from PIL import Image
from pycocotools import mask as mask_util

from backbones import ConfigError
from backbones.errors import explained_errors
from projects_vil.data.readers.index import FileIndex, Record, normalized, size_of, split_of, split_of_file, stem_of
from projects_vil.files import read_json

# The shape type, the label, the group, and the values of the shape. The label and the group may be None.
Shape = tuple[str, Any, Any, list]
# The points of a square and of a circle around the origin, as complex numbers. Four points of the circle are on axes.
CORNERS, CIRCLE = np.array([-1 - 1j, 1 - 1j, 1 + 1j, -1 + 1j]), np.exp(2j * np.pi * np.arange(48) / 48)
# VIA's region attribute with the class, in order of preference, and the values of its shapes
_CLASS_KEYS = ("class", "label", "name", "category", "type", "object")
_VALUES = {"rect": ("x", "y", "width", "height"), "circle": ("cx", "cy", "r", "r"), "ellipse": ("cx", "cy", "rx", "ry")}


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


def placed(shape: np.ndarray, x: float, y: float, radius_x: float, radius_y: float, degrees: float = 0) -> list[float]:
    """Return the points of ``CORNERS`` or ``CIRCLE`` in pixels: scaled, rotated clockwise, and moved to (x, y)."""
    points = (radius_x * shape.real + 1j * radius_y * shape.imag) * np.exp(1j * math.radians(degrees)) + complex(x, y)
    # Rounding removes the error of the sine of 90 degrees.
    return points.view(float).round(6).tolist()


# -- LabelMe ---------------------------------------------------------------------------------------


def read_labelme(files: list[str], index: FileIndex, found: Annotations) -> list[Record]:
    """Return the images of LabelMe's JSON files, one per image. X-AnyLabeling and AnyLabeling write the same format."""
    return [found.attempt(path, _labelme_record, path, index, found) for path in files]


def _labelme_record(path: str, index: FileIndex, found: Annotations) -> Record:
    content, stem = read_json(path), stem_of(path)
    name = str(content.get("imagePath") or f"{stem}.jpg")
    # This class of paths has both kinds of slashes. The path is outdated if the files were renamed.
    written = normalized(PureWindowsPath(name).name)
    other = str(Path(path).with_name(stem + PureWindowsPath(name).suffix))
    if stem_of(written) != normalized(stem) and written in index.by_name and other in index.images:
        raise ConfigError(f"'{path}' has imagePath '{name}', but there is also the image '{other}'. Correct one.")
    with explained_errors(path, "is not a valid LabelMe file", "Repair or remove it."):
        shapes = [_labelme_shape(shape, path) for shape in content["shapes"]]
    size = size_of(content.get("imageHeight"), content.get("imageWidth"))
    names = (name, str(PureWindowsPath(name).parent / f"{stem}."))
    return Record(path, names, size, True, objects=found.objects_of(shapes, path))


def _labelme_shape(shape: dict, path: str) -> Shape:
    label, shape_type = shape["label"], shape.get("shape_type") or "polygon"
    values = [number(value, f"{path}: {label}") for point in shape["points"] for value in point[:2]]
    if shape_type == "mask" and shape.get("mask") and len(values) == 4:
        with Image.open(io.BytesIO(base64.b64decode(shape["mask"]))) as image:
            values = [np.asarray(image.convert("L")) > 0, *(round(min(values[axis::2])) for axis in (0, 1))]
    if shape_type == "circle" and len(values) == 4:
        shape_type, values = "ellipse", [*values[:2], *[math.dist(values[:2], values[2:])] * 2]
    # LabelMe's converters skip this label.
    return label if label == "__ignore__" else shape_type, label, shape.get("group_id"), values


def write_image(path: str, index: FileIndex, folder: str) -> str | None:
    """Write the image that is inside a JSON file, and return its path, or None if there is no valid image."""
    try:
        # Other programs write a data URL, or several lines.
        image = base64.b64decode("".join(read_json(path).get("imageData").rpartition(",")[2].split()), validate=True)
        suffix = (Image.open(io.BytesIO(image)).format or "").lower()
    except (ConfigError, ValueError, AttributeError, OSError):
        return None
    output = Path(folder, Path(path).relative_to(index.root).with_suffix(f".{suffix}"))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(image)
    return str(output)


# -- CVAT ------------------------------------------------------------------------------------------


def read_cvat(files: list[str], index: FileIndex, found: Annotations) -> Iterator[Record]:
    """Yield the images in the XML files of one or more CVAT tasks or projects ('CVAT for images 1.1')."""
    for path in files:
        content = read_xml(path, found)
        if content.find("track") is not None:
            raise ConfigError(f"'{path}' has tracks of a video. Export it from CVAT as 'CVAT for images 1.1'.")
        # The points of a skeleton are labels with a parent.
        labels = [label for label in content.iterfind("meta//labels/label") if not label.findtext("parent")]
        own = {label.findtext("name", "").strip(): label.findtext("type") for label in labels}
        found.classes += [label for label, label_type in own.items() if label_type not in ("skeleton", "tag")]
        for image in content.iter("image"):
            name, subset = image.get("name", ""), image.get("subset", "")
            size = tuple(map(int, numbers(image.get, f"{path}: {name}", "height", "width")))
            shapes = [_cvat_shape(shape, own, f"{path}: {name}: {shape.tag}") for shape in image]
            name, split = f"{subset}/{name}" if subset else name, split_of([subset]) or split_of_file(path, files)
            yield Record(path, (name,), size, split=split, objects=found.objects_of(shapes, path))


def _cvat_shape(shape: ElementTree.Element, labels: dict[str, str | None], location: str) -> Shape:
    label, values = shape.get("label", "").strip(), []
    if labels and label not in labels and shape.tag != "tag":
        raise ConfigError(f"{location} has the unknown label {label!r}. Add it to the labels of the file.")
    degrees = number(shape.get("rotation") or 0, location)
    if shape.tag == "box":
        left, top, right, bottom = numbers(shape.get, location, "xtl", "ytl", "xbr", "ybr")
        center = (left + right) / 2, (top + bottom) / 2
        values = placed(CORNERS, *center, (right - left) / 2, (bottom - top) / 2, degrees)
    elif shape.tag == "polygon":
        values = [number(value, location) for value in shape.get("points", "").replace(";", ",").split(",") if value]
    elif shape.tag == "ellipse":
        values = [*numbers(shape.get, location, "cx", "cy", "rx", "ry"), degrees]
    elif shape.tag == "mask":
        left, top, width, height = map(int, numbers(shape.get, location, "left", "top", "width", "height"))
        runs = [int(number(run, location)) for run in shape.get("rle", "").split(",") if run.strip()]
        if sum(runs) != width * height:
            raise ConfigError(f"{location} has an rle of {sum(runs)} pixels for {width} x {height}. Export it again.")
        # Run lengths in the order of rows. The first run is background.
        values = [np.repeat(np.arange(len(runs)) % 2, runs).reshape(height, width), left, top]
    return shape.tag, label, shape.get("group_id"), values


def read_xml(path: str, found: Annotations) -> ElementTree.Element:
    """Return the root of an XML file in the declared encoding, or in UTF-8 if only UTF-8 fits or gives a shorter text.

    A file in an unknown encoding is read as UTF-8.

    Raises:
        ConfigError: If the file is not XML.
    """
    content, roots, reason = Path(path).read_bytes(), {}, None
    match = re.match(rb"\s*<\?xml[^>]*encoding=[\"']([\w.-]+)[\"']", content)
    # The parser is safe: it loads no external files, and expat limits the expansion of entities. It supports no
    # encodings with several bytes per character, such as GB2312. Files that declare GB2312 often have more characters.
    declared = match and re.sub("(?i)gb(2312|k)", "gb18030", match[1].decode()).lower()
    for encoding in dict.fromkeys((declared, "utf-8")) if declared else (None,):
        try:
            text = content.decode(encoding) if encoding else content
            roots.setdefault(text, (encoding, ElementTree.fromstring(text)))
        except (ElementTree.ParseError, ValueError, LookupError) as error:
            reason = reason or error
    if not roots:
        raise ConfigError(f"'{path}' is not XML: {reason}. Repair or remove it.") from reason
    # A character of Chinese text has two bytes in GB 18030 and three in UTF-8.
    encoding, root = roots[min(roots, key=len)]
    for element in root.iter():
        # Without the namespace
        element.tag = element.tag.rpartition("}")[2]
    if len(roots) > 1 or encoding != declared:
        found.noted[f"XML files of an uncertain encoding ({match[1].decode()}), read as {encoding}"].append(path)
    return root


# -- VIA -------------------------------------------------------------------------------------------


def read_via(files: list[str], index: FileIndex, found: Annotations) -> Iterator[Record]:
    """Yield the images of VIA's exported annotations or projects. The class of a region is one of its attributes."""
    images = [(path, *_via_regions(path, *item)) for path in files for item in via_images(read_json(path)).items()]
    keys = {key for _, _, regions in images for _, attributes in regions for key in attributes}
    named = [key for name in _CLASS_KEYS for key in sorted(keys) if key.lower() == name]
    if not named and len(keys) > 1:
        raise ConfigError(f"'{files[0]}' has the attributes {sorted(keys)}. Rename the class attribute to 'class'.")
    key, default = next(iter((*named, *keys)), None), "" if keys else "object"
    found.notes += ["regions have no attributes, so the class is 'object'"] if not keys else []
    for path, name, regions in images:
        shapes = [_via_shape(shape, attributes.get(key, default), f"{path}: {name}") for shape, attributes in regions]
        yield Record(path, (name,), split=split_of_file(path, files), objects=found.objects_of(shapes, path))


def via_images(content: dict) -> dict:
    """Return the entries of the images of a VIA file by their keys, or an empty dict for another format."""
    images = content.get("_via_img_metadata", content)
    entries = [entry for entry in images.values() if isinstance(entry, dict)] if isinstance(images, dict) else []
    return images if any({"filename", "regions"} <= entry.keys() for entry in entries) else {}


def _via_regions(path: str, key: str, entry: dict) -> tuple[str, list[list[dict]]]:
    """Return the name of an image, and the shape and the attributes of each region."""
    with explained_errors(path, f"has the invalid entry {key!r}", "Correct its filename and regions."):
        regions = entry["regions"] or []
        regions = map(dict, regions.values() if isinstance(regions, dict) else regions)
        parts = [[dict(r.get(f"{part}_attributes") or {}) for part in ("shape", "region")] for r in regions]
        return str(entry["filename"]), parts


def _via_shape(shape: dict, label: object, location: str) -> Shape:
    name = str(shape.get("name"))
    if isinstance(label, dict):
        # A checkbox has a dict from the value to whether it is checked.
        label, *more = [*(value for value, is_checked in label.items() if is_checked), ""]
        if len(more) > 1:
            raise ConfigError(f"{location} has a region of the classes {label!r} and {more[0]!r}. Choose one.")
    values = numbers(shape.get, location, *_VALUES.get(name, ()))
    if name == "rect":
        left, top, width, height = values
        name, values = "rectangle", [left, top, left + width, top + height]
    elif name in ("circle", "ellipse"):
        name, values = "ellipse", [*values, math.degrees(number(shape.get("theta", 0), location))]
    elif name == "polygon":
        pairs = zip(shape.get("all_points_x") or (), shape.get("all_points_y") or (), strict=False)
        values = [number(value, f"{location}: polygon") for pair in pairs for value in pair]
    return name, label, None, values
