"""Read JSON files of the VGG Image Annotator (VIA)."""

import math
from collections.abc import Iterator

from backbones import ConfigError
from backbones.errors import explained_errors
from projects_vil.data.readers.index import FileIndex, Record, split_of_file
from projects_vil.data.readers.shapes import Annotations, Shape, number, numbers
from projects_vil.files import read_json

# The region attribute with the class, in order of preference
_CLASS_KEYS = ("class", "label", "name", "category", "type", "object")
_VALUES = {"rect": ("x", "y", "width", "height"), "circle": ("cx", "cy", "r", "r"), "ellipse": ("cx", "cy", "rx", "ry")}


def read(files: list[str], index: FileIndex, found: Annotations) -> Iterator[Record]:
    """Yield the images of VIA's exported annotations or projects. The class of a region is one of its attributes."""
    images = [(path, *_parsed(path, *item)) for path in files for item in images_of(read_json(path)).items()]
    keys = {key for _, _, regions in images for _, attributes in regions for key in attributes}
    named = [key for name in _CLASS_KEYS for key in sorted(keys) if key.lower() == name]
    if not named and len(keys) > 1:
        raise ConfigError(f"'{files[0]}' has the attributes {sorted(keys)}. Rename the class attribute to 'class'.")
    key, default = next(iter((*named, *keys)), None), "" if keys else "object"
    found.notes += ["regions have no attributes, so the class is 'object'"] if not keys else []
    for path, name, regions in images:
        shapes = [_shape(shape, attributes.get(key, default), f"{path}: {name}") for shape, attributes in regions]
        yield Record(path, (name,), split=split_of_file(path, files), objects=found.objects_of(shapes, path))


def images_of(content: dict) -> dict:
    """Return the entries of the images of a VIA file by their keys, or an empty dict for another format."""
    images = content.get("_via_img_metadata", content)
    entries = [entry for entry in images.values() if isinstance(entry, dict)] if isinstance(images, dict) else []
    return images if any({"filename", "regions"} <= entry.keys() for entry in entries) else {}


def _parsed(path: str, key: str, entry: dict) -> tuple[str, list[list[dict]]]:
    """Return the name of an image, and the shape and the attributes of each region."""
    with explained_errors(path, f"has the invalid entry {key!r}", "Correct its filename and regions."):
        regions = entry["regions"] or []
        regions = map(dict, regions.values() if isinstance(regions, dict) else regions)
        parts = [[dict(r.get(f"{part}_attributes") or {}) for part in ("shape", "region")] for r in regions]
        return str(entry["filename"]), parts


def _shape(shape: dict, label: object, location: str) -> Shape:
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
