"""Read JSON files of the VGG Image Annotator (VIA)."""

import math
from pathlib import Path
from typing import Any

from backbones import ConfigError
from projects_vil.data.readers.index import FileIndex, Request
from projects_vil.data.readers.shapes import Annotations, Shape, number, numbers, objects_of
from projects_vil.utils import read_json

# The region attribute with the class, in order of preference
_CLASS_KEYS = ("class", "label", "name", "category", "type", "object")
_NO_CLASS = "object"


def read_via(files: list[str], index: FileIndex, folder: Path) -> Annotations:
    """Read VIA's exported annotations or projects. The class of a region is one of its attributes."""
    found = Annotations()
    pairs = [(path, entry) for path in files for entry in images_of(read_json(path)) or ()]
    keys = {key for _, entry in pairs for region in _regions(entry) for key in region.get("region_attributes") or {}}
    key = next((key for name in _CLASS_KEYS for key in sorted(keys) if key.lower() == name), None)
    if key is None and len(keys) > 1:
        raise ConfigError(
            f"'{files[0]}' has the region attributes {sorted(keys)}. Rename the attribute of the class to 'class'."
        )
    key = key or next(iter(keys), None)
    if key is None:
        found.notes.append(f"regions have no attributes, so the class is {_NO_CLASS!r}")
    requests = [Request(path, (entry["filename"],), content=entry) for path, entry in pairs]
    for record, (path, *_, entry) in found.with_images(requests, index):
        shapes, location = [], f"{path}: {entry['filename']}"
        for region in _regions(entry):
            label = ((region.get("region_attributes") or {}).get(key) or "") if key else _NO_CLASS
            if isinstance(label, dict):
                # A checkbox has a dict from the value to whether it is checked.
                label, *more = [*(name for name, is_checked in label.items() if is_checked), ""]
                if len(more) > 1:
                    raise ConfigError(f"{location} has a region of the classes {label!r} and {more[0]!r}. Choose one.")
            if str(label).strip():
                shapes.append(_shape(str(label).strip(), region.get("shape_attributes") or {}, location))
            else:
                found.skipped["regions without a class"].append(path)
        record.objects = objects_of(shapes, path, found.skipped)
    return found


def images_of(content: Any) -> list[dict[str, Any]] | None:
    """Return the entries of the images in the content of a JSON file, or None if it is not VIA's format."""
    if isinstance(content, dict) and isinstance(content.get("_via_img_metadata"), dict):
        content = content["_via_img_metadata"]
    entries = list(content.values()) if isinstance(content, dict) else []
    is_via = entries and all(isinstance(e, dict) and isinstance(e.get("filename"), str) for e in entries)
    return entries if is_via and all("regions" in entry for entry in entries) else None


def _regions(image: dict[str, Any]) -> list[dict[str, Any]]:
    regions = image["regions"] or []
    regions = list(regions.values()) if isinstance(regions, dict) else regions
    if not all(isinstance(r, dict) and isinstance(r.get("region_attributes") or {}, dict) for r in regions):
        raise ConfigError(f"The regions of {image['filename']!r} are not in VIA's format. Export them again.")
    return regions


def _shape(label: str, shape: dict[str, Any], location: str) -> Shape:
    name, points = str(shape.get("name")), []
    match name:
        case "rect":
            left, top, width, height = numbers(shape.get, location, "x", "y", "width", "height")
            name, points = "rectangle", [left, top, left + width, top + height]
        case "circle":
            x, y, radius = numbers(shape.get, location, "cx", "cy", "r")
            points = [x, y, x + radius, y]
        case "ellipse":
            points = numbers(shape.get, location, "cx", "cy", "rx", "ry")
            # The angle is in radians.
            points.append(math.degrees(number(shape.get("theta", 0), location)))
        case "polygon":
            pairs = zip(shape.get("all_points_x", ()), shape.get("all_points_y", ()), strict=False)
            points = [number(value, f"{location}: polygon") for pair in pairs for value in pair]
    return name, label, None, points
