"""Read Pascal VOC's XML files, and the XML files of LabelMe's web tool and of roLabelImg."""

import math
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from backbones import ConfigError
from projects_vil.data.readers.index import SPLITS, FileIndex, Request, size_of
from projects_vil.data.readers.shapes import (
    Annotations,
    Record,
    box_object,
    number,
    polygon_object,
    rotated,
    rotated_box,
)
from projects_vil.data.segmentation import rectangle

_SIDES = ("xmin", "ymin", "xmax", "ymax")


def read_voc(files: list[str], index: FileIndex, folder: Path) -> Annotations:
    """Read a dataset in Pascal VOC's format, which has one XML file per image."""
    found, split_of, requests, annotations = Annotations(), _listed_splits(files, index), [], []
    for path in files:
        root = next((root for root in split_of if path.startswith(root + os.sep)), None)
        if root is not None and path not in split_of[root]:
            found.unused["annotation files that ImageSets/Main does not list"].append(path)
            continue
        annotation = parse_xml(path)
        annotations.append((annotation, None if root is None else split_of[root][path]))
        stem, name = Path(path).stem, (annotation.findtext("filename") or "").strip()
        # The name in the file is often outdated, so an image with the stem of the annotation has priority.
        names = (stem + (Path(name).suffix or ".jpg"), *([name] if name else []))
        hint = annotation.findtext("path") or f"{annotation.findtext('folder') or ''}/{name}"
        requests.append(Request(path, names, _size(annotation, path), (stem,), hint=hint.strip()))
    for image, request, (annotation, split) in zip(index.find_images(requests), requests, annotations, strict=True):
        path = request.annotation
        if image is None:
            found.unused["annotation files without an image of their own"].append(path)
            continue
        entries = [entry for entry in annotation.iter("object") if (entry.findtext("deleted") or "").strip() != "1"]
        # Pixels are counted from 1, and the box includes the last pixel. Coordinates with a fraction count from 0.
        texts = [entry.findtext(f"bndbox/{side}") or "" for entry in entries for side in _SIDES]
        offset = 0 if any(re.search(r"\.0*[1-9]", text) for text in texts) else 1
        objects = [_object(entry, offset, path) for entry in entries]
        found.counts["objects without a box or a polygon"] += objects.count(None)
        split = split or index.split_of(path, image)
        found.records.append(Record(image, split, request.size, [one for one in objects if one]))
    for root, splits in split_of.items():
        missing = splits.keys() - {*files}
        if wrong := [name for name in missing if splits[name] != "test"]:
            raise ConfigError(f"'{root}' has no {min(wrong)}.xml, which ImageSets/Main lists. Add the file.")
        # The annotations of test images are often not published.
        found.counts["test images without annotations"] += len(missing)
    return found


def _listed_splits(files: list[str], index: FileIndex) -> dict[str, dict[str, str]]:
    """Return the split of each listed annotation file, for each folder with lists in ImageSets/Main or ImageSets.

    A listed name without an annotation file has itself as the key.
    """
    lists: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for path in index.files:
        match = re.fullmatch(r"(.*)/imagesets(?:/main)?/([a-z]+)\.txt", Path(path).as_posix(), re.IGNORECASE)
        if match and match[2] in SPLITS:
            lines = Path(path).read_text(encoding="utf-8-sig", errors="replace").splitlines()
            own = lists[os.path.normpath(match[1])].setdefault(match[2], [])
            own += filter(None, (line.partition("#")[0].strip() for line in lines))
    split_of: dict[str, dict[str, str]] = {}
    for root, names in lists.items():
        by_stem = defaultdict(list)
        for file in files:
            if file.startswith(root + os.sep):
                by_stem[Path(file).stem].append(file)
        both = names.pop("trainval", [])
        split_of[root] = listed = {}
        for name, lines in names.items():
            for file in (file for line in lines for file in _files_of(line, by_stem)):
                if listed.setdefault(file, SPLITS[name]) != SPLITS[name]:
                    raise ConfigError(
                        f"'{root}' lists '{Path(file).stem}' for {listed[file]} and for {SPLITS[name]}. Remove one."
                    )
        # What trainval has besides train is val, and the other way round.
        rest = "val" if "train" in listed.values() and "val" not in listed.values() else "train"
        for file in (file for line in both for file in _files_of(line, by_stem)):
            if listed.setdefault(file, rest) == "test":
                raise ConfigError(f"'{root}' lists '{Path(file).stem}' for trainval and for test. Remove one.")
    return split_of


def _files_of(line: str, by_stem: dict[str, list[str]]) -> list[str]:
    """Return the files that a line of a list names, with or without a path, a suffix and a tag such as -1."""
    for word in (line, line.split()[0]):
        for name in (word, os.path.splitext(word)[0]):
            *folders, stem = name.replace("\\", "/").split("/")
            if files := by_stem.get(stem):
                ends = os.sep + os.sep.join([*folders, stem])
                return [file for file in files if os.path.splitext(file)[0].endswith(ends)] or files
    return [line.split()[0]]


def _size(annotation: ElementTree.Element, path: str) -> tuple[int, int] | None:
    texts = (
        annotation.findtext(f"size/{side}") or annotation.findtext(f"imagesize/{other}") or 0
        for side, other in (("height", "nrows"), ("width", "ncols"))
    )
    return size_of(*(int(number(text, f"{path}: size")) for text in texts))


def _object(entry: ElementTree.Element, offset: int, path: str) -> dict[str, Any] | None:
    label = (entry.findtext("name") or "").strip()
    is_difficult = int((entry.findtext("difficult") or "").strip() == "1")
    texts = [entry.findtext(f"bndbox/{side}") for side in _SIDES]
    if all(text and text.strip() for text in texts):
        sides = zip(_SIDES, texts, strict=True)
        left, top, right, bottom = (number(text, f"{path}: {side} of {label!r}") for side, text in sides)
        (left, right), (top, bottom) = sorted((left, right)), sorted((top, bottom))
        # Some programs count from 0 and write 0.
        return box_object(label, max(left - offset, 0), max(top - offset, 0), right, bottom, is_difficult)
    if (box := entry.find("robndbox")) is not None:
        values = [number(box.findtext(key), f"{path}: {key} of {label!r}") for key in ("cx", "cy", "w", "h", "angle")]
        x, y, w, h, angle = values
        corners = rotated(*rectangle([x - w / 2, y - h / 2, w, h]), x, y, math.degrees(angle))
        return rotated_box(label, corners) | {"iscrowd": is_difficult}
    points = [number(point.findtext(axis), f"{path}: {label}") for point in entry.iter("pt") for axis in ("x", "y")]
    return polygon_object(label, [points]) | {"iscrowd": is_difficult} if len(points) >= 6 else None


def parse_xml(path: str) -> ElementTree.Element:
    """Return the root of an XML file in any encoding that Python can decode.

    Raises:
        ConfigError: If the file is not XML.
    """
    content = Path(path).read_bytes()
    # This parser is safe: it loads no external files, and expat limits the expansion of entities.
    try:
        try:
            return ElementTree.fromstring(content)
        except (ValueError, LookupError):
            # The parser supports no encodings with several bytes per character, such as GB2312.
            declared = re.match(rb"\s*<\?xml[^>]*encoding=[\"']([\w.-]+)[\"']", content)
            if declared is None:
                raise
            return ElementTree.fromstring(content.decode(declared[1].decode()))
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise ConfigError(f"'{path}' is not XML: {error}. Repair or remove it.") from error
