"""Read LabelMe's JSON files. X-AnyLabeling and AnyLabeling write the same format."""

import base64
import io
import math
from pathlib import Path, PureWindowsPath

import numpy as np
from PIL import Image

from backbones import ConfigError
from backbones.errors import explained_errors
from projects_vil.data.readers.index import FileIndex, Record, normalized, size_of, stem_of
from projects_vil.data.readers.shapes import Annotations, Shape, number
from projects_vil.files import read_json


def read(files: list[str], index: FileIndex, found: Annotations) -> list[Record]:
    """Return the images of a dataset in LabelMe's format, which has one JSON file per image."""
    return [found.attempt(path, _record, path, index, found) for path in files]


def _record(path: str, index: FileIndex, found: Annotations) -> Record:
    content, stem = read_json(path), stem_of(path)
    name = str(content.get("imagePath") or f"{stem}.jpg")
    # This class of paths has both kinds of slashes. The path is outdated if the files were renamed.
    written = normalized(PureWindowsPath(name).name)
    other = str(Path(path).with_name(stem + PureWindowsPath(name).suffix))
    if stem_of(written) != normalized(stem) and written in index.by_name and other in index.images:
        raise ConfigError(f"'{path}' has imagePath '{name}', but there is also the image '{other}'. Correct one.")
    with explained_errors(path, "is not a valid LabelMe file", "Repair or remove it."):
        shapes = [_shape(shape, path) for shape in content["shapes"]]
    size = size_of(content.get("imageHeight"), content.get("imageWidth"))
    names = (name, *[Path(other).name] * (other in index.images), str(PureWindowsPath(name).parent / f"{stem}."))
    return Record(path, names, size, True, objects=found.objects_of(shapes, path))


def _shape(shape: dict, path: str) -> Shape:
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
