"""Read LabelMe's JSON files. X-AnyLabeling and AnyLabeling write the same format."""

import base64
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from projects_vil.data.detection_utils import UnreadableImage, read_size
from projects_vil.data.readers.index import FileIndex, Request, normalized, parts_of, size_of
from projects_vil.data.readers.shapes import Annotations, mask_object, number, objects_of
from projects_vil.utils import read_json


def read_labelme(files: list[str], index: FileIndex, folder: Path) -> Annotations:
    """Read a dataset in LabelMe's format, which has one JSON file per image.

    Images that exist only inside a JSON file are written to ``folder``.
    """
    found, requests = Annotations(), []
    for path in files:
        content = read_json(path)
        name, stem = str(content.get("imagePath") or ""), Path(path).stem
        size = size_of(content.get("imageHeight"), content.get("imageWidth"))
        requests.append(Request(path, (name or f"{stem}.jpg",), size, (stem,), content=content.get("shapes")))
        other = os.path.join(os.path.dirname(path), stem + Path(name).suffix)
        if parts_of(name) and Path(parts_of(name)[-1]).stem != normalized(stem) and other in index.image_set:
            raise ConfigError(f"'{path}' has imagePath {name!r}, but there is also the image '{other}'. Correct one.")
    for record, request in found.with_images(requests, index, lambda path: _write_image(path, index, folder)):
        path = request.annotation
        try:
            record.objects = _objects(request.content, record.size or read_size(record.file), path, found)
        except UnreadableImage:
            continue  # The dataset check reports the image.
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            reason = f"{type(error).__name__} {error}"
            raise ConfigError(f"'{path}' is not a valid LabelMe file: {reason}. Repair or remove it.") from error
    return found


def _objects(shapes: list[dict[str, Any]], size: tuple[int, int], path: str, found: Annotations) -> list:
    others, masks = [], []
    for shape in shapes:
        label, shape_type = str(shape["label"] or "").strip(), shape.get("shape_type") or "polygon"
        # LabelMe's converters skip this label.
        shape_type = label if label == "__ignore__" else shape_type
        points = [number(value, f"{path}: {label}") for point in shape["points"] for value in point[:2]]
        if shape_type == "mask" and shape.get("mask"):
            with Image.open(io.BytesIO(base64.b64decode(shape["mask"]))) as image:
                mask = np.asarray(image.convert("L")) > 0
            left, top = (round(min(points[axis::2])) for axis in (0, 1))
            masks.append(mask_object(label, mask, left, top, size))
        else:
            others.append((shape_type, label, shape.get("group_id"), points))
    found.skipped["masks without pixels"] += [path] * masks.count(None)
    return [*filter(None, masks), *objects_of(others, path, found.skipped)]


def _write_image(path: str, index: FileIndex, folder: Path) -> str | None:
    """Write the image that is inside a JSON file, and return its path, or None if there is none."""
    content = read_json(path).get("imageData")
    if not content:
        return None
    try:
        image = base64.b64decode(content, validate=True)
        suffix = (Image.open(io.BytesIO(image)).format or "").lower()
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"The imageData of '{path}' is not an image. Add the image file.") from error
    output = folder / os.path.relpath(os.path.splitext(path)[0], index.root)
    output = output.with_name(f"{output.name}.{suffix}")
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output) as partial:
        partial.write_bytes(image)
    return str(output)
