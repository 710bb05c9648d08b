"""Read files in the format 'CVAT for images 1.1'."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from backbones import ConfigError
from projects_vil.data.readers.index import FileIndex, Request, split_of
from projects_vil.data.readers.shapes import Annotations, mask_object, number, numbers, objects_of, rotated_box
from projects_vil.data.readers.voc import parse_xml


def read_cvat(files: list[str], index: FileIndex, folder: Path) -> Annotations:
    """Read the XML files of one or more CVAT tasks or projects."""
    found, classes, requests = Annotations(), {}, []
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
            height, width = map(int, numbers(image.get, f"{path}: {name}", "height", "width"))
            names = (f"{subset}/{name}" if subset else name,)
            split, content = split_of([subset]), (image, own)
            requests.append(Request(path, names, (height, width), (Path(name).name,), split, content=content))
    for record, request in found.with_images(requests, index):
        record.objects = _objects(*request.content, request, found)
    found.classes = list(classes)
    return found


def _objects(image: ElementTree.Element, labels: dict[str, Any], request: Request, found: Annotations) -> list:
    path, masks, shapes = request.annotation, [], []
    for shape in image:
        if shape.tag not in ("box", "polygon", "ellipse", "mask"):
            found.skipped[shape.tag] += [path] * (shape.tag != "tag")
            continue
        label, location = (shape.get("label") or "").strip(), f"{path}: {request.names[0]}: {shape.tag}"
        if label not in labels:
            raise ConfigError(f"{location} has the unknown label {label!r}. Add it to the labels of the file.")
        degrees = number(shape.get("rotation") or 0, location)
        if shape.tag == "mask":
            masks.append(mask_object(label, *_mask(shape, location), request.size))
        elif shape.tag == "ellipse":
            shapes.append(("ellipse", label, None, [*numbers(shape.get, location, "cx", "cy", "rx", "ry"), degrees]))
        elif shape.tag == "polygon":
            # Group 0 means no group.
            group = shape.get("group_id") if shape.get("group_id") != "0" else None
            points = [number(point, location) for point in re.split("[;,]", shape.get("points") or "") if point]
            shapes.append(("polygon", label, group, points))
        else:
            left, top, right, bottom = numbers(shape.get, location, "xtl", "ytl", "xbr", "ybr")
            x, y = (left + right) / 2, (top + bottom) / 2
            shapes.append(("rectangle", label, None, rotated_box(x, y, right - left, bottom - top, degrees)))
    found.skipped["masks without pixels"] += [path] * masks.count(None)
    return [*filter(None, masks), *objects_of(shapes, path, found.skipped)]


def _mask(shape: ElementTree.Element, location: str) -> tuple[np.ndarray, int, int]:
    """Return the pixels of a mask (H, W) and its left and top position."""
    left, top, width, height = map(int, numbers(shape.get, location, "left", "top", "width", "height"))
    runs = [int(number(run, location)) for run in (shape.get("rle") or "").split(",") if run.strip()]
    if sum(runs) != width * height:
        raise ConfigError(f"{location} has an rle of {sum(runs)} pixels for {width} x {height}. Export the file again.")
    # Run lengths in the order of rows. The first run is background.
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(height, width), left, top
