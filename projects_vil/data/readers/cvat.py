"""Read files in the format 'CVAT for images 1.1'."""

from collections.abc import Iterator
from xml.etree import ElementTree

import numpy as np

from backbones import ConfigError
from projects_vil.data.readers.index import FileIndex, Record, size_of, split_of, split_of_file
from projects_vil.data.readers.shapes import Annotations, Shape, number, numbers, rotated_box
from projects_vil.data.readers.voc import parse_xml


def read(files: list[str], index: FileIndex, found: Annotations) -> Iterator[Record]:
    """Yield the images in the XML files of one or more CVAT tasks or projects."""
    for path in files:
        content = parse_xml(path, found)
        if content.find("track") is not None:
            raise ConfigError(f"'{path}' has tracks of a video. Export it from CVAT as 'CVAT for images 1.1'.")
        # The points of a skeleton are labels with a parent.
        labels = [label for label in content.iterfind("meta//labels/label") if not label.findtext("parent")]
        own = {label.findtext("name", "").strip(): label.findtext("type") for label in labels}
        found.classes += [label for label, label_type in own.items() if label_type not in ("skeleton", "tag")]
        for image in content.iter("image"):
            name, subset = image.get("name", ""), image.get("subset", "")
            size = numbers({"height": 0, "width": 0, **image.attrib}.get, f"{path}: {name}", "height", "width")
            shapes = [_shape(shape, own, f"{path}: {name}: {shape.tag}") for shape in image]
            name, split = f"{subset}/{name}" if subset else name, split_of([subset]) or split_of_file(path, files)
            yield Record(path, (name,), size_of(*map(int, size)), split=split, objects=found.objects_of(shapes, path))


def _shape(shape: ElementTree.Element, labels: dict[str, str | None], location: str) -> Shape:
    label, values = shape.get("label", "").strip(), []
    if labels and label not in labels and shape.tag != "tag":
        raise ConfigError(f"{location} has the unknown label {label!r}. Add it to the labels of the file.")
    degrees = number(shape.get("rotation") or 0, location)
    if shape.tag == "box":
        values = rotated_box(*numbers(shape.get, location, "xtl", "ytl", "xbr", "ybr"), degrees)
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
