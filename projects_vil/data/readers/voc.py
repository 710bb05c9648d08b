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
from projects_vil.data.readers.shapes import Annotations, box_object, numbers, polygon_object, rotated_box

_SIDES = ("xmin", "ymin", "xmax", "ymax")


def read_voc(files: list[str], index: FileIndex, folder: Path) -> Annotations:
    """Read a dataset in Pascal VOC's format, which has one XML file per image."""
    found, split_of, requests = Annotations(), _listed_splits(files, index), []
    for path in files:
        root = next((root for root in split_of if path.startswith(root + os.sep)), None)
        if root is not None and path not in split_of[root]:
            found.unused["annotation files that ImageSets/Main does not list"].append(path)
            continue
        annotation = parse_xml(path)
        stem, name = Path(path).stem, (annotation.findtext("filename") or "").strip()
        # The name in the file is often outdated, so an image with the stem of the annotation has priority.
        names = (stem + (Path(name).suffix or ".jpg"), *([name] if name else []))
        hint = annotation.findtext("path") or f"{annotation.findtext('folder') or ''}/{name}"
        content = annotation, None if root is None else split_of[root][path]
        requests.append(Request(path, names, _size(annotation, path), (stem,), hint=hint.strip(), content=content))
    for record, request in found.with_images(requests, index):
        path, (annotation, split) = request.annotation, request.content
        record.split = split or record.split
        entries = [entry for entry in annotation.iter("object") if (entry.findtext("deleted") or "").strip() != "1"]
        # Pixels are counted from 1, and the box includes the last pixel. Coordinates with a fraction count from 0.
        texts = [entry.findtext(f"bndbox/{side}") or "" for entry in entries for side in _SIDES]
        offset = 0 if any(re.search(r"\.0*[1-9]", text) for text in texts) else 1
        objects = [_object(entry, offset, path) for entry in entries]
        found.skipped["objects without a box or a polygon"] += [path] * objects.count(None)
        record.objects = [one for one in objects if one]
    for root, splits in split_of.items():
        missing = splits.keys() - {*files}
        if wrong := [name for name in missing if splits[name] != "test"]:
            raise ConfigError(f"'{root}' has no {min(wrong)}.xml, which ImageSets/Main lists. Add the file.")
        # The annotations of test images are often not published.
        found.skipped["test images without annotations"] += sorted(missing)
    return found


def _listed_splits(files: list[str], index: FileIndex) -> dict[str, dict[str, str]]:
    """Return the split of each listed annotation file, for each folder with lists in ImageSets/Main or ImageSets.

    A listed name without an annotation file has itself as the key.
    """
    lists: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in index.files:
        match = re.fullmatch(r"(.*)/imagesets(?:/main)?/([a-z]+)\.txt", path, re.IGNORECASE)
        if match and match[2] in SPLITS:
            lines = Path(path).read_text(encoding="utf-8-sig", errors="replace").splitlines()
            lists[match[1]][match[2]] += filter(None, (line.partition("#")[0].strip() for line in lines))
    split_of: dict[str, dict[str, str]] = defaultdict(dict)
    for root, names in lists.items():
        by_stem, listed = defaultdict(list), split_of[root]
        for file in files:
            if file.startswith(root + os.sep):
                by_stem[Path(file).stem].append(file)
        # trainval comes last. What it has besides train is val, and the other way round.
        for name in sorted(names, key=lambda name: name == "trainval"):
            is_rest = name == "trainval" and "train" in listed.values() and "val" not in listed.values()
            split = "val" if is_rest else SPLITS[name]
            for file in (file for line in names[name] for file in _files_of(line, by_stem)):
                other = listed.setdefault(file, split)
                if other != split and (name != "trainval" or other == "test"):
                    raise ConfigError(f"'{root}' lists '{Path(file).stem}' for {other} and for {name}. Remove one.")
    return split_of


def _files_of(line: str, by_stem: dict[str, list[str]]) -> list[str]:
    """Return the files that a line of a list names, with or without a path, a suffix and a tag such as -1."""
    word = line.split()[0]
    for name in (line, os.path.splitext(line)[0], word, os.path.splitext(word)[0]):
        *folders, stem = name.replace("\\", "/").split("/")
        if files := by_stem.get(stem):
            ends = os.sep + os.sep.join([*folders, stem])
            return [file for file in files if os.path.splitext(file)[0].endswith(ends)] or files
    return [word]


def _size(annotation: ElementTree.Element, path: str) -> tuple[int, int] | None:
    tags = {"height": ("size/height", "imagesize/nrows"), "width": ("size/width", "imagesize/ncols")}
    texts = {side: next(filter(None, map(annotation.findtext, names)), 0) for side, names in tags.items()}
    return size_of(*map(int, numbers(texts.get, path, *tags)))


def _object(entry: ElementTree.Element, offset: int, path: str) -> dict[str, Any] | None:
    label = (entry.findtext("name") or "").strip()
    location, found = f"{path}: {label!r}", None
    if all((entry.findtext(f"bndbox/{side}") or "").strip() for side in _SIDES):
        left, top, right, bottom = numbers(lambda side: entry.findtext(f"bndbox/{side}"), location, *_SIDES)
        (left, right), (top, bottom) = sorted((left, right)), sorted((top, bottom))
        # Some programs count from 0 and write 0.
        found = box_object(label, [max(left - offset, 0), max(top - offset, 0), right, bottom])
    elif (box := entry.find("robndbox")) is not None:
        *sides, angle = numbers(box.findtext, location, "cx", "cy", "w", "h", "angle")
        found = box_object(label, rotated_box(*sides, math.degrees(angle)))
    else:
        points = [value for point in entry.iter("pt") for value in numbers(point.findtext, location, "x", "y")]
        found = polygon_object(label, [points]) if len(points) >= 6 else None
    return found and found | {"iscrowd": int((entry.findtext("difficult") or "").strip() == "1")}


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
