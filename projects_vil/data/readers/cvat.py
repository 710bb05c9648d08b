"""Read files in the format 'CVAT for images 1.1'."""

import itertools
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from backbones import ConfigError
from projects_vil.data.readers.index import FileIndex, Request, split_of
from projects_vil.data.readers.shapes import (
    Annotations,
    Record,
    mask_objects,
    number,
    objects_of,
    rotated,
)
from projects_vil.data.readers.voc import parse_xml
from projects_vil.data.segmentation import rectangle


def read_cvat(files: list[str], index: FileIndex, folder: Path) -> Annotations:
    """Read the XML files of one or more CVAT tasks or projects."""
    found, classes, images, requests = Annotations(), {}, [], []
    for path in files:
        content = parse_xml(path)
        if content.find("track") is not None:
            raise ConfigError(f"'{path}' has tracks of a video. Export it from CVAT as 'CVAT for images 1.1'.")
        # The points of a skeleton are labels with a parent.
        labels = [label for label in content.iterfind("meta//labels/label") if not label.findtext("parent")]
        own = {(label.findtext("name") or "").strip(): label.findtext("type") for label in labels}
        classes |= {label: None for label, label_type in own.items() if label_type != "skeleton"}
        for image in content.iter("image"):
            name, subset = image.get("name") or "", image.get("subset") or ""
            height, width = (int(number(image.get(side), f"{path}: {side} of {name}")) for side in ("height", "width"))
            names = (f"{subset}/{name}" if subset else name,)
            requests.append(Request(path, names, (height, width), (Path(name).name,), split_of([subset])))
            images.append((image, own))
    for (image, labels), request, file in zip(images, requests, index.find_images(requests), strict=True):
        path, name = request.annotation, request.names[0]
        if file is None:
            found.unused["missing images that an annotation file names"].append(name)
            continue
        objects = _objects(image, labels, request.size, f"{path}: {name}", found)
        found.records.append(Record(file, request.split or index.split_of(path, file), request.size, objects))
    found.classes = list(classes)
    return found


def _objects(
    image: ElementTree.Element, labels: dict[str, Any], size: tuple[int, int], location: str, found: Annotations
) -> list[dict[str, Any]]:
    shapes, objects = [], []
    for shape in image:
        if shape.tag in ("box", "polygon", "ellipse", "mask"):
            label = (shape.get("label") or "").strip()
            where = f"{location}: {shape.tag}"
            if label not in labels:
                raise ConfigError(f"{where} has the unknown label {label!r}. Add it to the labels of the file.")
            # Group 0 means no group.
            group = shape.get("group_id") if shape.get("group_id") != "0" else None
            if shape.tag == "mask":
                objects += mask_objects(label, *_mask(shape, where), size, found.counts)
            elif shape.tag == "ellipse":
                numbers = [number(shape.get(key) or 0, where) for key in ("cx", "cy", "rx", "ry", "rotation")]
                shapes.append(("ellipse", label, None, numbers))
            elif shape.tag == "polygon":
                points = [number(point, where) for point in re.split("[;,]", shape.get("points") or "") if point]
                shapes.append(("polygon", label, group, points))
            else:
                left, top, right, bottom = (number(shape.get(key), where) for key in ("xtl", "ytl", "xbr", "ybr"))
                degrees, center = number(shape.get("rotation") or 0, where), ((left + right) / 2, (top + bottom) / 2)
                corners = rotated(*rectangle([left, top, right - left, bottom - top]), *center, degrees)
                shapes.append(("rectangle", label, None, corners if degrees else [left, top, right, bottom]))
        elif shape.tag != "tag":
            found.counts[shape.tag] += 1
    return objects + objects_of(shapes, found.counts)


def _mask(shape: ElementTree.Element, location: str) -> tuple[np.ndarray, int, int]:
    """Return the pixels of a mask (H, W) and its left and top position."""
    left, top, width, height = (int(number(shape.get(key), location)) for key in ("left", "top", "width", "height"))
    runs = [int(number(run, location)) for run in (shape.get("rle") or "").split(",") if run.strip()]
    # Run lengths in the order of rows. The first run is background.
    values = np.fromiter(itertools.islice(itertools.cycle((False, True)), len(runs)), bool, len(runs))
    if sum(runs) != width * height:
        raise ConfigError(f"{location} has an rle of {sum(runs)} pixels for {width} x {height}. Export the file again.")
    return np.repeat(values, runs).reshape(height, width), left, top
