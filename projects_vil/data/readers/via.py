"""Read JSON files of the VGG Image Annotator (VIA)."""

import math
from typing import Any

from backbones import ConfigError
from projects_vil.data.readers.index import FileIndex, Record, split_of_file
from projects_vil.data.readers.shapes import Annotations, Shape, number, numbers
from projects_vil.utils import read_json

# The region attribute with the class, in order of preference
_CLASS_KEYS = ("class", "label", "name", "category", "type", "object")
_VALUES = {"rect": ("x", "y", "width", "height"), "circle": ("cx", "cy", "r", "r"), "ellipse": ("cx", "cy", "rx", "ry")}


def read(files: list[str], index: FileIndex) -> Annotations:
    """Read VIA's exported annotations or projects. The class of a region is one of its attributes."""
    found = Annotations()
    pairs = [(path, entry) for path in files for entry in images_of(read_json(path)) or ()]
    keys = {key for _, entry in pairs for region in _regions(entry) for key in region.get("region_attributes") or {}}
    named = [key for name in _CLASS_KEYS for key in sorted(keys) if key.lower() == name]
    if not named and len(keys) > 1:
        raise ConfigError(f"'{files[0]}' has the attributes {sorted(keys)}. Rename the one of the class to 'class'.")
    key = next(iter((*named, *keys)), None)
    found.notes += ["regions have no attributes, so the class is 'object'"] if key is None else []
    for path, entry in pairs:
        shapes, location = [], f"{path}: {entry['filename']}"
        for region in _regions(entry):
            label = (region.get("region_attributes") or {}).get(key) if key else "object"
            if isinstance(label, dict):
                # A checkbox has a dict from the value to whether it is checked.
                label, *more = [*(name for name, is_checked in label.items() if is_checked), ""]
                if len(more) > 1:
                    raise ConfigError(f"{location} has a region of the classes {label!r} and {more[0]!r}. Choose one.")
            shapes.append(_shape(str(label or "").strip(), region.get("shape_attributes") or {}, location))
        split, objects = split_of_file(path, files), found.objects_of(shapes, path)
        found.records.append(Record(path, (entry["filename"],), split=split, objects=objects))
    return found


def images_of(content: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the entries of the images in the content of a JSON file, or None if it is not VIA's format."""
    metadata = content.get("_via_img_metadata")
    entries = list((metadata if isinstance(metadata, dict) else content).values())
    return entries if entries and all(map(_is_image, entries)) else None


def _is_image(entry: Any) -> bool:
    is_entry = isinstance(entry, dict) and isinstance(entry.get("filename"), str) and "regions" in entry
    return is_entry and isinstance(entry["regions"] or [], dict | list)


def _regions(image: dict[str, Any]) -> list[dict[str, Any]]:
    regions = list(found.values() if isinstance(found := image["regions"] or [], dict) else found)
    if not all(isinstance(r, dict) and isinstance(r.get("region_attributes") or {}, dict) for r in regions):
        raise ConfigError(f"The regions of {image['filename']!r} are not in VIA's format. Export them again.")
    return regions


def _shape(label: str, shape: dict[str, Any], location: str) -> Shape:
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
