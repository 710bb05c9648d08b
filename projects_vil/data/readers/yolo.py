"""Read YOLO datasets: a data.yaml file of Ultralytics or Roboflow, an obj.data file of Darknet, or classes.txt."""

import os
import re
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml

from backbones import ConfigError
from projects_vil.data.detection_utils import IMAGE_SUFFIXES, read_sizes
from projects_vil.data.readers.index import FileIndex, Request, content_hash, split_of, walk
from projects_vil.data.readers.shapes import Annotations, Record, box_object, number, polygon_object

# Files with one class name per line: labelImg, Darknet and CVAT, Roboflow
CLASS_FILES = ("classes.txt", "obj.names", "_darknet.labels")
_SPLIT_KEYS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
# The visibilities of the points of a pose
_VISIBLE = re.compile(r"[012](\.0*)?( [012](\.0*)?)*")
_LISTS = ("train.txt", "val.txt", "valid.txt", "test.txt")


def read_yolo(files: list[str], index: FileIndex, folder: Path) -> Annotations:
    """Read a dataset in YOLO's format, which has one text file per image."""
    path, found = _only_file(files, index), Annotations()
    root, data = _settings(path, index)
    found.classes = names = _names(path, data)
    images: dict[tuple[str, str], None] = {}
    for split, keys in _SPLIT_KEYS.items():
        entries = next((data[key] for key in keys if data.get(key)), [])
        for entry in entries if isinstance(entries, list) else [entries]:
            own = _images(path, root, str(entry), split, index, found)
            if not own and split != "test":
                raise ConfigError(f"'{path}' has {entry!r} for {split}, which has no images. Add images or correct it.")
            is_list = os.path.basename(path) in CLASS_FILES
            images |= dict.fromkeys(((is_list and index.split_of(image)) or split, image) for image in own)
    files_of = {image: [*dict.fromkeys(filter(None, map(index.find, _label_paths(image))))] for _, image in images}
    labels = {image: next(iter(files), None) for image, files in files_of.items()}
    _check_ties(labels)
    if background := list(labels.values()).count(None):
        found.notes.append(f"{background:,} of {len(labels):,} images have no label file, so they are background")
    if background == len(labels):
        example = f", such as '{_label_paths(next(iter(labels)))[0]}'" if images else ""
        raise ConfigError(f"None of the {len(images)} images of '{path}' has a label file. Add label files{example}.")
    sizes = {image: size for image, (size, _) in zip(labels, read_sizes(labels), strict=True)}
    # The dataset check reports unreadable images.
    rows = {image: _rows(label) if label and sizes[image] else [] for image, label in labels.items()}
    has_points = data.get("kpt_shape") is not None or _are_poses([row for own in rows.values() for row, _ in own])
    for split, image in images:
        own = [(row[:5] if has_points else row, location) for row, location in rows[image]]
        objects = [_object(row, names, sizes[image], location) for row, location in own]
        found.records.append(Record(image, split, sizes[image], objects))
    found.unused["other label files of an image"] += [file for files in files_of.values() for file in files[1:]]
    used = {file for files in files_of.values() for file in files}
    folders = set(map(os.path.dirname, used))
    for file in index.files:
        is_label = os.path.dirname(file) in folders or {"labels", "labeltxt"} & {*index.folders_of(file)}
        if is_label and file.lower().endswith(".txt") and os.path.basename(file) not in (*CLASS_FILES, *_LISTS):
            found.unused["label files without an image"] += [] if file in used else [file]
    return found


def settings_of(path: str) -> dict[str, Any] | None:
    """Return the content of a YAML file, or None if it is not the YAML file of a YOLO dataset."""
    try:
        # All values are text, because YAML has other ideas of names such as "on" and "007".
        data = yaml.load(Path(path).read_text(encoding="utf-8-sig"), yaml.BaseLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        if re.search(rb"(?m)^names\s*:", Path(path).read_bytes()):
            raise ConfigError(f"'{path}' is not YAML: {' '.join(str(error).split())}. Repair it.") from error
        return None
    # The arguments of a training run have "val", but neither "train" nor "names".
    return data if isinstance(data, dict) and ("train" in data or {"names", "val"} <= data.keys()) else None


def _only_file(files: list[str], index: FileIndex) -> str:
    # labelImg writes classes.txt into each folder.
    is_list = os.path.basename(files[0]) in CLASS_FILES
    if len({(is_list or os.path.dirname(file), Path(file).read_bytes()) for file in files}) > 1:
        names = [os.path.relpath(file, index.root) for file in files[:2]]
        raise ConfigError(f"'{index.root}' has several YOLO files, '{names[0]}' and '{names[1]}'. Give one file.")
    return files[0]


def _settings(path: str, index: FileIndex) -> tuple[str, dict[str, Any]]:
    """Return the root of the paths in a settings file, and the settings."""
    folder = os.path.dirname(path)
    if os.path.basename(path) in CLASS_FILES:
        return index.root, {"names": _lines(path), "train": "."}
    if path.endswith(".data"):
        data: dict[str, Any] = dict(re.split(r"\s*=\s*", line, maxsplit=1) for line in _lines(path) if "=" in line)
        names = _existing(data.get("names", ""), [folder, index.root])
        if names is None:
            raise ConfigError(f"'{path}' has the names file {data.get('names')!r}, which does not exist. Correct it.")
        return folder, data | {"names": _lines(names)}
    data = settings_of(path) or {}
    # The path may be outdated if the dataset was moved from another computer.
    given = os.path.join(folder, str(data.get("path") or "").replace("\\", "/"))
    return given if os.path.isdir(given) else folder, data


def _names(path: str, data: dict[str, Any]) -> list[str]:
    names = data.get("names")
    if isinstance(names, dict):
        names = [names.get(str(index)) for index in range(len(names))]
    is_list = isinstance(names, list) and names and None not in names
    if not is_list or str(data.get("nc", len(names))) != str(len(names)) or len(names) != len(set(map(str, names))):
        raise ConfigError(f"'{path}' has invalid 'names'. List nc different names, or map 0, 1, ... to names.")
    return [str(name).strip() for name in names]


def _images(path: str, root: str, entry: str, split: str, index: FileIndex, found: Annotations) -> list[str]:
    """Return the images of an entry of a split: a folder, an image, or a text file with a list of images."""
    bases = list(dict.fromkeys((root, os.path.dirname(path), index.root)))
    place = _existing(entry, bases) or index.find(os.path.join(root, entry))
    if place is None:
        # Roboflow may name a test split that does not exist.
        if split == "test":
            return []
        raise ConfigError(f"'{path}' has {entry!r} for {split}, which does not exist below '{root}'. Correct it.")
    if PureWindowsPath(entry).anchor and not os.path.exists(entry):
        found.notes.append(f"{split} is '{os.path.relpath(place, index.root)}', because {entry!r} does not exist")
    if os.path.isdir(place):
        return [file for file in walk(os.path.normpath(place)) if file.lower().endswith(IMAGE_SUFFIXES)]
    if place.lower().endswith(IMAGE_SUFFIXES):
        return [place]
    images = []
    for line in _lines(place):
        folder = os.path.dirname(place) if line.startswith("./") else root
        file = index.find(os.path.normpath(os.path.join(folder, line.replace("\\", "/"))))
        if file is None or os.path.isdir(file):
            (file,) = index.find_images([Request(place, (line,), split=split)])
        images += [] if file is None else [file]
        found.unused["missing images that a list names"] += [line] if file is None else []
    return images


def _existing(entry: str, bases: list[str]) -> str | None:
    """Return the path of an entry of a settings file, or None if it does not exist.

    If the entry is an absolute path of another computer, its longest end that exists below one of ``bases`` is used.
    Roboflow writes ../train/images for a folder next to data.yaml, and Darknet data/train.txt for a file next to its
    obj.data.
    """
    # Windows paths have both kinds of slashes.
    path = PureWindowsPath(entry)
    parts = path.relative_to(path.anchor).parts
    ends = [parts[start:] for start in range(len(parts)) if path.anchor or {*parts[:start]} <= {"..", "data"}]
    # The end must have the folder of the split, if there is one.
    names = [path.as_posix(), *(os.path.join(*end) for end in ends if split_of(end) == split_of(parts))]
    paths = [os.path.join(base, name) for name in names for base in bases]
    return next((os.path.normpath(path) for path in paths if os.path.exists(path)), None)


def _lines(path: str) -> list[str]:
    text = Path(path).read_text(encoding="utf-8-sig", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _label_paths(image: str) -> list[str]:
    """Return the paths that the label file of an image may have: below labels/ instead of images/, or next to it."""
    stem = os.path.splitext(image)[0]
    paths = [re.sub(r"(?i)(.*/)(jpeg)?images/", rf"\1{folder}/", stem) for folder in ("labels", "labelTxt")]
    return [f"{path}.txt" for path in dict.fromkeys((*paths, stem))]


def _rows(label: str) -> list[tuple[list[str], str]]:
    text = Path(label).read_text(encoding="utf-8-sig", errors="replace")
    lines = [(line.split(), f"{label}, line {line_number}") for line_number, line in enumerate(text.splitlines(), 1)]
    # Files of DOTA begin with the source and the resolution of the image.
    return [(row, location) for row, location in lines if row and not row[0].startswith(("imagesource:", "gsd:"))]


def _are_poses(rows: list[list[str]]) -> bool:
    """Return whether all rows are a class, a box, and points with a visibility of 0, 1 or 2."""
    rows = [row for row in rows if len(row) != 5]
    return bool(rows) and all(
        len(row) > 5 and len(row) == len(rows[0]) and not (len(row) - 5) % 3 and _VISIBLE.fullmatch(" ".join(row[7::3]))
        for row in rows
    )


def _object(row: list[str], names: list[str], size: tuple[int, int], location: str) -> dict[str, Any]:
    height, width = size
    if len(row) >= 9 and row[8] in names:
        # DOTA: four corners in pixels, the class and the difficulty
        return box_object(row[8], [number(word, location) for word in row[:8]])
    index, *values = (number(word, location) for word in row)
    if index not in range(len(names)):
        raise ConfigError(f"{location}: class {row[0]} does not exist. Use 0 to {len(names) - 1}, as in data.yaml.")
    label = names[int(index)]
    if len(values) == 4:
        x, y, w, h = values
        left, top = round((x - w / 2) * width, 2), round((y - h / 2) * height, 2)
        return box_object(label, [left, top, left + round(w * width, 2), top + round(h * height, 2)])
    if len(values) < 6 or len(values) % 2:
        raise ConfigError(f"{location}: {len(row)} numbers are not an object. Write a class with a box or a polygon.")
    return polygon_object(label, [[round(value * size[1 - i % 2], 2) for i, value in enumerate(values)]])


def _check_ties(labels: dict[str, str | None]) -> None:
    """Raise a ConfigError if two different images, such as a.jpg and a.png, have the same label file."""
    images: dict[str, str] = {}
    for image, label in labels.items():
        other = images.setdefault(label, image) if label else image
        if other != image and content_hash(other) != content_hash(image):
            raise ConfigError(f"Label file '{label}' fits both '{other}' and '{image}'. Rename or remove one image.")
