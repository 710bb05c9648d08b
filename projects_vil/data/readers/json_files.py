"""Read JSON files: of LabelMe, of X-AnyLabeling and AnyLabeling, and of the VGG Image Annotator (VIA)."""

import base64
import io
import math
import os
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
from PIL import Image

from backbones import ConfigError
from projects_vil.data.readers.index import FileIndex, Record, normalized, size_of, split_of_file
from projects_vil.data.readers.shapes import Annotations, Shape, number, numbers
from projects_vil.utils import read_json

# The region attribute with the class, in order of preference
_CLASS_KEYS = ("class", "label", "name", "category", "type", "object")
_VALUES = {"rect": ("x", "y", "width", "height"), "circle": ("cx", "cy", "r", "r"), "ellipse": ("cx", "cy", "rx", "ry")}


def read_labelme(files: list[str], index: FileIndex, found: Annotations) -> Iterator[Record]:
    """Yield the images of a dataset in LabelMe's format, which has one JSON file per image."""
    for path in files:
        content, stem = read_json(path), Path(path).stem
        name = str(content.get("imagePath") or f"{stem}.jpg")
        # This class of paths has both kinds of slashes. The path is outdated if the files were renamed.
        written = normalized(PureWindowsPath(name).name)
        is_other = written in index.by_name and os.path.splitext(written)[0] != normalized(stem)
        other = os.path.join(os.path.dirname(path), stem + PureWindowsPath(name).suffix)
        if is_other and other in index.images:
            raise ConfigError(f"'{path}' has imagePath '{name}', but there is also the image '{other}'. Correct one.")
        try:
            shapes = [_labelme_shape(shape, path) for shape in content["shapes"]]
        except (KeyError, TypeError, AttributeError, OSError, base64.binascii.Error) as error:
            raise ConfigError(f"'{path}' is not a valid LabelMe file: {error!r}. Repair or remove it.") from error
        size = size_of(content.get("imageHeight"), content.get("imageWidth"))
        names = (name, str(PureWindowsPath(name).parent / f"{stem}."))
        yield Record(path, names, size, True, objects=found.objects_of(shapes, path))


def _labelme_shape(shape: dict[str, Any], path: str) -> Shape:
    label, shape_type = str(shape["label"] or "").strip(), shape.get("shape_type") or "polygon"
    values = [number(value, f"{path}: {label}") for point in shape["points"] for value in point[:2]]
    if shape_type == "mask" and shape.get("mask") and len(values) == 4:
        with Image.open(io.BytesIO(base64.b64decode(shape["mask"].encode()))) as image:
            values = [np.asarray(image.convert("L")) > 0, *(round(min(values[axis::2])) for axis in (0, 1))]
    # LabelMe's converters skip this label.
    return label if label == "__ignore__" else shape_type, label, shape.get("group_id"), values


def write_image(path: str, index: FileIndex, folder: str) -> str | None:
    """Write the image that is inside a JSON file, and return its path, or None if there is no valid image."""
    try:
        image = base64.b64decode(read_json(path).get("imageData"), validate=True)
        suffix = (Image.open(io.BytesIO(image)).format or "").lower()
    except (ConfigError, ValueError, TypeError, OSError):
        return None
    output = Path(folder, f"{os.path.splitext(os.path.relpath(path, index.root))[0]}.{suffix}")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(image)
    return str(output)


def read_via(files: list[str], index: FileIndex, found: Annotations) -> Iterator[Record]:
    """Yield the images of VIA's exported annotations or projects. The class of a region is one of its attributes."""
    images = [(path, *image) for path in files for image in via_images(read_json(path)) or ()]
    keys = {key for _, _, regions in images for _, attributes in regions for key in attributes}
    named = [key for name in _CLASS_KEYS for key in sorted(keys) if key.lower() == name]
    if not named and len(keys) > 1:
        raise ConfigError(f"'{files[0]}' has the attributes {sorted(keys)}. Rename the one of the class to 'class'.")
    key = next(iter((*named, *keys)), None)
    found.notes += ["regions have no attributes, so the class is 'object'"] if key is None else []
    for path, name, regions in images:
        shapes, location = [], f"{path}: {name}"
        for shape, attributes in regions:
            label = attributes.get(key) if key else "object"
            if isinstance(label, dict):
                # A checkbox has a dict from the value to whether it is checked.
                label, *more = [*(name for name, is_checked in label.items() if is_checked), ""]
                if len(more) > 1:
                    raise ConfigError(f"{location} has a region of the classes {label!r} and {more[0]!r}. Choose one.")
            shapes.append(_via_shape(str(label or "").strip(), shape, location))
        yield Record(path, (name,), split=split_of_file(path, files), objects=found.objects_of(shapes, path))


def via_images(content: Any) -> list[tuple[str, list[tuple[dict, dict]]]] | None:
    """Return the name of each image, and the shape and the attributes of each region, or None for another format."""
    images = []
    try:
        for entry in content.get("_via_img_metadata", content).values():
            regions = entry["regions"] or []
            regions = list(regions.values()) if isinstance(regions, dict) else regions
            parts = [[dict(r.get(f"{part}_attributes") or {}) for part in ("shape", "region")] for r in regions]
            images.append((str(entry["filename"]), parts))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return images or None


def _via_shape(label: str, shape: dict[str, Any], location: str) -> Shape:
    name = str(shape.get("name"))
    values = numbers(shape.get, location, *_VALUES.get(name, ()))
    if name == "rect":
        left, top, width, height = values
        values = [left, top, left + width, top + height]
    elif name == "ellipse":
        values.append(math.degrees(number(shape.get("theta", 0), location)))
    elif name == "polygon":
        pairs = zip(shape.get("all_points_x", ()), shape.get("all_points_y", ()), strict=False)
        values = [number(value, f"{location}: polygon") for pair in pairs for value in pair]
    return {"rect": "rectangle", "circle": "ellipse"}.get(name, name), label, None, values
