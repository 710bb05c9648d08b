"""Read Pascal VOC's XML files, and the XML files of LabelMe's web tool and of roLabelImg."""

import math
import os
import re
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from backbones import ConfigError
from projects_vil.data.readers.index import SPLITS, FileIndex, Record, read_lines, read_names, size_of, stem_of
from projects_vil.data.readers.shapes import Annotations, box_object, degrees_of, numbers, polygon_object, rotated_box

# Lists of images, lists of a class, and lists elsewhere. The first kind that exists is used.
_FOLDERS = ("/imagesets(?:/main)?/", "/imagesets(?:/main)?/[^/]+_", "/(?:splits?/)?")
_LISTS = [re.compile(rf"(.*?){folder}({'|'.join(SPLITS)})(?:_list)?\.txt", re.I) for folder in _FOLDERS]
_SIDES = ("bndbox/xmin", "bndbox/ymin", "bndbox/xmax", "bndbox/ymax")


def read(files: list[str], index: FileIndex, found: Annotations) -> list[Record]:
    """Return the images of a dataset in Pascal VOC's format, which has one XML file per image."""
    # The classes of PaddleDetection
    found.read += [path for path in index.files if path.endswith("/label_list.txt")][:1]
    found.classes += [name for path in found.read for name in read_names(path)]
    return [found.attempt(file, _record, file, split, found) for file, split in _read_lists(files, index, found)]


def _record(path: str, split: str | None, found: Annotations) -> Record:
    annotation, stem = parse_xml(path, found), Path(path).stem
    name = annotation.findtext("filename", "").strip()
    # The name in the file is often outdated, so an image with the stem of the annotation has priority. If it has
    # another suffix, it may be a mask.
    names = f"{stem}{Path(name).suffix or '.'}", name or f"{stem}.", f"{stem}.", f"{stem_of(path)}."
    hint = (annotation.findtext("path") or f"{annotation.findtext('folder', '')}/{name}").strip()
    entries = [entry for entry in annotation.iter("object") if entry.findtext("deleted", "").strip() != "1"]
    # Pixels are counted from 1, and the box includes the last pixel. Coordinates with a fraction count from 0. CVAT
    # writes a decimal point into all coordinates.
    sides = [(entry, side) for entry in entries for side in _SIDES if entry.findtext(side, "").strip()]
    has_fraction = any(numbers(entry.findtext, path, side)[0] % 1 for entry, side in sides)
    offset = 0 if has_fraction or all("." in entry.findtext(side) for entry, side in sides) else 1
    objects = [_object(entry, offset, path, found) for entry in entries]
    found.noted["skipped objects without a box or a polygon"] += [path] * objects.count(None)
    size = numbers(lambda side: annotation.findtext(side) or 0, path, "size/height", "size/width")
    return Record(path, names, size_of(*map(int, size)), True, split, hint, [*filter(None, objects)])


def _read_lists(files: list[str], index: FileIndex, found: Annotations) -> list[tuple[str, str | None]]:
    """Read the lists of the splits, and return the annotation files to read with their splits, or None."""
    splits, by_stem = defaultdict(dict), defaultdict(list)
    for stem, file in sorted({(stem, path) for path in files for stem in (Path(path).stem, stem_of(path))}):
        by_stem[stem].append(file)
    kinds = [[(one[0], one[1], one[2].lower()) for one in map(kind.fullmatch, index.files) if one] for kind in _LISTS]
    lists = next(filter(None, kinds), [])
    named = {path: [f for line in read_lines(path) for f in _files_of(line, root, by_stem)] for path, root, _ in lists}
    # Other text files are lists if most lines name annotation files, which are not in folders of splits.
    if lists is kinds[2]:
        known = set() if any(map(index.split_of, files)) else {*files}
        lists = [one for one in lists if 2 * sum(file in known for file in named[one[0]]) > len(named[one[0]])]
    found.read += [path for path, _, _ in lists]
    # trainval comes last. What it has besides train is val, and the other way round.
    for path, root, name in sorted(lists, key=lambda one: one[2] == "trainval"):
        listed, others = splits[root], {SPLITS[one[2]] for one in lists if one[1] == root and one[2] != "trainval"}
        split = "val" if name == "trainval" and "train" in others and "val" not in others else SPLITS[name]
        if split != "test" and named[path] and not {*named[path]} & {*files}:
            raise ConfigError(f"'{path}' names no annotation file below '{root}'. Correct or remove it.")
        for file in named[path]:
            other = listed.setdefault(file, split)
            if other != split and (name != "trainval" or other == "test"):
                raise ConfigError(f"'{root}' lists '{Path(file).stem}' for {other} and for {name}. Remove one.")
    by_file = {file: split for listed in splits.values() for file, split in listed.items()}
    found.noted["skipped images of lists without annotations"] += sorted(by_file.keys() - {*files})
    used = by_file.keys() & {*files}
    found.notes += [f"splits from lists such as '{lists[0][0]}'"] if used and not kinds[0] else []
    # Without a list of training images, they are the images that no list names.
    below = tuple(root + os.sep for root, listed in splits.items() if "train" in map(listed.get, used))
    unlisted = {file for file in files if file.startswith(below)} - used
    found.unused["annotation files that no list names"] += sorted(unlisted)
    return [(file, by_file.get(file)) for file in sorted({*files} - unlisted)]


def _files_of(line: str, root: str, by_stem: dict[str, list[str]]) -> list[str]:
    """Return the annotation files below ``root`` that a line of a list names, or otherwise the first word of the line.

    A line may have a path, a suffix, a tag such as -1, and a comment. In PaddleDetection, it has an image and its XML
    file.
    """
    before = line.partition("#")[0].strip()
    texts = line, *line.split()[:1], before, *before.split()[:1]
    for name in (name for text in texts for name in (text, os.path.splitext(text)[0])):
        *folders, stem = name.replace("\\", "/").split("/")
        if files := [file for file in by_stem.get(stem, ()) if file.startswith(root + os.sep)]:
            # The folders of an image and of its annotation often differ in a part.
            fits = [(Path(file).stem == stem, len({*folders} & {*file.split(os.sep)})) for file in files]
            return [file for file, fit in zip(files, fits, strict=True) if fit == max(fits)]
    return before.split()[:1]


def _object(entry: ElementTree.Element, offset: int, path: str, found: Annotations) -> dict | None:
    label, rotated, one = entry.findtext("name", "").strip(), entry.find("robndbox"), {}
    location = f"{path}: {label!r}"
    found.noted["objects with several boxes (only the first is used)"] += [path] * (len(entry.findall("bndbox")) > 1)
    if all(entry.findtext(side, "").strip() for side in _SIDES):
        left, top, right, bottom = numbers(entry.findtext, location, *_SIDES)
        found.noted["boxes with swapped corners"] += [path] * (left > right or top > bottom)
        (left, right), (top, bottom) = sorted((left, right)), sorted((top, bottom))
        # Some programs count from 0 and write 0.
        left, top = (max(side - offset, min(side, 0)) for side in (left, top))
        # CVAT writes the box before the rotation.
        values = {one.findtext("name"): one.findtext("value") for one in entry.iterfind("attributes/attribute")}
        one = box_object(label, rotated_box(left, top, right, bottom, degrees_of(values.get("rotation"))))
    elif rotated is not None:
        x, y, width, height, angle = numbers(rotated.findtext, location, "cx", "cy", "w", "h", "angle")
        sides = x - width / 2, y - height / 2, x + width / 2, y + height / 2
        one = box_object(label, rotated_box(*sides, math.degrees(angle)))
    # LabelMe's web tool writes points, and RectLabel and Roboflow write x1, y1, x2, ... beside a box.
    points = [value for point in entry.iter("pt") for value in numbers(point.findtext, location, "x", "y")]
    if points and entry.findtext("type", "").strip() == "bounding_box":
        one, points = box_object(label, points), []
    corners = {corner.tag: corner.text for corner in entry.iterfind("polygon/*") if (corner.text or "").strip()}
    keys = [f"{axis}{index}" for index in range(1, len(corners) // 2 + 1) for axis in "xy"]
    points += numbers(corners.get, location, *keys) if corners.keys() >= {*keys} else []
    if len(points) >= 6:
        one = polygon_object(label, [points]) | ({"bbox": one["bbox"]} if one else {})
    return one | {"iscrowd": int(entry.findtext("difficult", "").strip() == "1")} if one else None


def parse_xml(path: str, found: Annotations) -> ElementTree.Element:
    """Return the root of an XML file in the declared encoding, or in UTF-8 if only UTF-8 fits or gives a shorter text.

    A file in an unknown encoding is read as UTF-8.

    Raises:
        ConfigError: If the file is not XML.
    """
    content, roots, reason = Path(path).read_bytes(), {}, None
    match = re.match(rb"\s*<\?xml[^>]*encoding=[\"']([\w.-]+)[\"']", content)
    # The parser is safe: it loads no external files, and expat limits the expansion of entities. It supports no
    # encodings with several bytes per character, such as GB2312. Files that declare GB2312 often have more characters.
    declared = match and re.sub("(?i)gb(2312|k)", "gb18030", match[1].decode()).lower()
    for encoding in dict.fromkeys((declared, "utf-8")) if declared else (None,):
        try:
            text = content.decode(encoding) if encoding else content
            roots.setdefault(text, (encoding, ElementTree.fromstring(text)))
        except (ElementTree.ParseError, ValueError, LookupError) as error:
            reason = reason or error
    if not roots:
        raise ConfigError(f"'{path}' is not XML: {reason}. Repair or remove it.") from reason
    # A character of Chinese text has two bytes in GB 18030 and three in UTF-8.
    encoding, root = roots[min(roots, key=len)]
    for element in root.iter():
        # Without the namespace
        element.tag = element.tag.rpartition("}")[2]
    if len(roots) > 1 or encoding != declared:
        found.noted[f"XML files of an uncertain encoding ({match[1].decode()}), read as {encoding}"].append(path)
    return root
