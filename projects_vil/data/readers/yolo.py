"""Read YOLO datasets: a data.yaml file of Ultralytics or Roboflow, an obj.data file of Darknet, or classes.txt."""

import json
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml

from backbones import ConfigError
from backbones.errors import counted
from projects_vil.data.image_files import is_image, read_sizes
from projects_vil.data.readers.index import SPLITS, FileIndex, Record, read_lines, read_names, split_of, stem_of
from projects_vil.data.readers.shapes import Annotations, box_object, number, polygon_object
from projects_vil.files import content_hash, walk

# Files with one class name per line: of labelImg, Darknet and CVAT, Roboflow. Other names are used without these files.
_CLASS_FILES = r"classes(\.txt)+|obj\.names|_darknet\.labels", r"(predefined_classes|labels|names)(\.txt)+|.+\.names"
# Parts of a written path that the path of an existing folder need not have
_OPTIONAL = {"\\", "..", "data", "datasets"}
# A list of the images of a split. The images of trainval.txt are in other lists too.
_LIST = re.compile(rf".*/({'|'.join(SPLITS.keys() - {'trainval'})})\.txt", re.I)
_LARGE = "label files with values larger than 1, which are not fractions of the image"
_NUMBER = re.compile(r"[-+]?(\d+\.?|\d*[.,]\d+)([eE][-+]?\d+)?")
_MARKUP = re.compile(r'[{[]["{[]|[{[]$|<[?\w]')
# Numbers, and what some programs write instead of a number
_VALUE = re.compile(rf"{_NUMBER.pattern}|[-+]?(nan|inf)|", re.I)


def read(files: list[str], index: FileIndex, found: Annotations) -> Iterator[Record]:
    """Yield the images of a dataset in YOLO's format, which has one text file per image."""
    if len(files) > 1 and class_files(files) != files:
        raise ConfigError(f"'{index.root}' has several YOLO files, '{files[0]}' and '{files[1]}'. Give one file.")
    # labelImg writes classes.txt into each folder, with the classes that it knows until then.
    path = max(files, key=lambda file: len(read_lines(file)))
    data = settings_of(path) or {}
    found.classes = names = _names(path, data.get("names"), data.get("nc"), index, found) if data else []
    beside = [file for file in index.files if os.path.dirname(file) == os.path.dirname(path)]
    for other in class_files(files) or class_files(beside, _CLASS_FILES[:1]):
        for position, (name, one) in enumerate(zip(names, read_names(other), strict=False)):
            if name and one and _comparable(name) != _comparable(one):
                text = f"Class {position} is {name!r} in '{path}' and {one!r} in '{other}'"
                raise ConfigError(f"{text}. Correct or remove one of the files.")
        found.read.append(other)
    splits = _splits(path, data, index, found)
    labels = _labels(splits, index)
    sizes = {image: size for image, (size, _) in zip(labels, read_sizes(labels), strict=True)}
    # The dataset check reports unreadable images.
    rows = {image: [*_rows(label)] if label and sizes[image] else [] for image, label in labels.items()}
    for image, own in rows.items():
        # A text file without labels is, for example, a caption. JSON and XML are errors.
        if own and not _MARKUP.match(own[0][0][0]) and not any(_is_label(row, names) for row, _ in own):
            labels[image], rows[image] = None, []
    end = 5 if data.get("kpt_shape") or _are_poses([row for own in rows.values() for row, _ in own]) else None
    unknown: dict[str, list[str]] = defaultdict(list)
    for image, split in [(image, split) for split, own in splits.items() for image in own if image in labels]:
        label, size = labels[image] or image, sizes[image]
        objects = (_object(row[:end], names, size, line, unknown) for row, line in rows[image])
        own = found.attempt(label, list, objects) or []
        if any(max(one["bbox"][2:]) > 2 * max(size) for one in own):
            found.noted[_LARGE].append(label)
        yield Record(label, (), size, split=split, objects=own, file=image)
    if not found.errors and 2 * len(found.noted[_LARGE]) >= (sum(map(bool, rows.values())) or 1):
        first = found.noted[_LARGE][0]
        raise ConfigError(f"{first} and other {_LARGE}. Divide pixels by the size of the image. Remove track ids.")
    if unknown and not found.errors:
        every = ", ".join(f"{label} ({counted(len(lines), 'object')})" for label, lines in sorted(unknown.items()))
        advice = f"Add names to '{path}'" if data else f"Write '{index.root}/classes.txt' with one name per line"
        if {*unknown} == {str(len(names))} and all(row[0] != "0" for own in rows.values() for row, _ in own):
            advice = f"If they start at 1, write each name on a line with its id, such as '1: {names[0]}'"
        raise ConfigError(f"{next(iter(unknown.values()))[0]}: no name for class {every}. Ids start at 0. {advice}.")
    _count_labels(labels, index, found)


def _splits(path: str, data: dict[str, Any], index: FileIndex, found: Annotations) -> dict[str | None, dict]:
    """Return the images of each split. The folders of the images of None decide their split."""
    # The path may be outdated if the dataset was moved from another computer.
    folder, written = os.path.dirname(path), str(data.get("path", ""))
    bases = [_existing(written, [folder, index.root], index) or folder, folder, index.root]
    if not os.path.exists(os.path.join(folder, written)):
        found.notes.append(f"path is '{bases[0]}', because {written!r} does not exist")
    images: dict[str | None, dict[str, None]] = defaultdict(dict)
    splits: dict[str | None, Any] = {split: data[key] for key, split in reversed(SPLITS.items()) if data.get(key)}
    # With only class names, lists of images decide, or else the folders of the images.
    splits = splits or _lists(index, bases[0] if written else index.root)
    # Some files repeat an outdated path of the dataset.
    are_path = all(PureWindowsPath(str(entry)) == PureWindowsPath(written) for entry in splits.values())
    for split, entries in reversed(splits.items()):
        for entry in map(str, entries if isinstance(entries, list) else [entries]):
            place = _existing(entry, bases, index) or (bases[0] if are_path else None)
            own = _images(place or os.path.join(index.root, entry), split, index, found)
            # Roboflow may name a test split that does not exist.
            if not own and split not in ("test", None):
                where = f"has no images in '{index.image_root}'" if place or index.is_given else "does not exist"
                near = (f" Did you mean '{Path(f).parent}'?" for f in index.images if index.split_of(f) == split)
                text = f"'{path}' has {entry!r} for {split}, which {where}.{next(near, '')}"
                advice = ", or delete the line, so that a part of the training images is used" * (split == "val")
                raise ConfigError(f"{text} Correct it, or add images{advice}.")
            if own and place and {*PureWindowsPath(entry).parts} - {*Path(place).parts} - _OPTIONAL:
                found.notes.append(f"{split} is '{place}', because {entry!r} does not exist")
            # Without a list of training images, they are the images that no list names.
            listed = set().union(*images.values()) if split is None else ()
            images[split] |= dict.fromkeys(image for image in own if image not in listed)
    # Ultralytics needs a validation split, so datasets without one name the training images again.
    if images["train"] and images["train"].keys() == images["val"].keys():
        del images["val"]
        found.notes.append("val has the same images as train, so it is not used")
    return images


def _labels(splits: dict[str | None, dict], index: FileIndex) -> dict[str, str | None]:
    """Return the images, and the label file of each image or None."""
    labels = {image: index.find(*_label_paths(image)) for own in splits.values() for image in own}
    if not any(labels.values()):
        # The labels are in folders of other names.
        texts = [f for f in index.files if f.lower().endswith(".txt") and (label_files([f]) or not any(_rows(f)))]
        records = [Record(file, (f"{stem_of(file)}.",), is_only=True) for file in texts]
        index.find_images(records)
        labels |= {record.file: record.annotation for record in records if record.file in labels}
    owners: dict[str, str] = {}
    for image, label in [(image, label) for image, label in labels.items() if label]:
        if (other := owners.setdefault(label, image)) != image and content_hash(other) != content_hash(image):
            raise ConfigError(f"Label file '{label}' fits both '{other}' and '{image}'. Rename or remove one image.")
    # Without settings, a folder without labels has copies or masks if all its images have the names of labeled images.
    stems = {stem_of(image) for image in owners.values() if None in splits}
    others = {os.path.dirname(image) for image, label in labels.items() if label or stem_of(image) not in stems}
    return {image: label for image, label in labels.items() if os.path.dirname(image) in others}


def _count_labels(labels: dict[str, str | None], index: FileIndex, found: Annotations) -> None:
    """Count the images without a label file, and the other label files."""
    used, without = {*filter(None, labels.values())}, [image for image, label in labels.items() if label is None]
    found.read += used
    if without:
        found.notes.append(f"images without a label file, which have no objects: {len(without):,} of {len(labels):,}")
    texts = [file for file in index.files if file.lower().endswith(".txt") and file not in used]
    # An image without objects has an empty file.
    folders = {*map(os.path.dirname, used)}
    empty = [file for file in texts if os.path.dirname(file) in folders and not any(_rows(file))]
    known = {label for image in index.images if texts for label in _label_paths(image)}
    image_of = {stem_of(image): image for image in without}
    labeled = {stem_of(image) for image, label in labels.items() if label}
    for file in sorted({*empty, *label_files(texts)}):
        image = image_of.get(stem_of(file))
        other = "split" if len({index.split_of(file), index.split_of(image or file), None}) > 2 else "folder"
        reason = f"in another {other} than the image" if image else "whose image is missing"
        # A folder without used labels may have older labels, or the detections of a model.
        is_other = file in known or (stem_of(file) in labeled and os.path.dirname(file) not in folders)
        found.unused[f"label files {'that are not used' if is_other else reason}"].append(file)


def _lists(index: FileIndex, root: str) -> dict[str | None, list[str]]:
    """Return the lists of images by split. Without a list of training images, None has the other images in ``root``."""
    splits: dict[str | None, list[str]] = defaultdict(list)
    for match in filter(None, map(_LIST.fullmatch, index.files)):
        names = [PureWindowsPath(line.casefold()).name for line in read_lines(match[0])]
        if any(is_image(name) or f"{name}." in index.by_name for name in names):
            splits[SPLITS[match[1].lower()]].append(match[0])
    # Folders of splits come before lists without one of training images.
    has_folders = any(map(index.split_of, index.images))
    return splits if "train" in splits else {None: [root]} if has_folders else {None: [root], **splits}


def settings_of(path: str) -> dict[str, Any] | None:
    """Return the settings of a YOLO dataset from a YAML file or Darknet's .data file, or None for another file.

    A file with class names has only the setting ``names``.
    """
    if class_files([path]):
        return {"names": path}
    if path.endswith(".data"):
        settings = (map(str.strip, line.split("=", 1)) for line in read_lines(path) if "=" in line)
        return {"names": "obj.names"} | dict(settings)
    content = Path(path).read_bytes()
    try:
        # All values are text, because YAML has other ideas of names such as "on" and "007".
        data = yaml.load(text := content.decode(json.detect_encoding(content)), yaml.BaseLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        if re.search(rb"(?m)^names\s*:", content.replace(b"\0", b"")):
            raise ConfigError(f"'{path}' is not YAML: {' '.join(str(error).split())}. Repair it.") from error
        return None
    data = {k: v for k, v in (data if isinstance(data, dict) else {}).items() if str(v).lower() not in ("null", "~")}
    # The arguments of a training run have "val", but neither "train" nor "names".
    is_yolo = "names" in data and (stem_of(path).lower() == "data" or not data.keys().isdisjoint(("nc", "val")))
    if not is_yolo and not isinstance(data.get("train"), str | list):
        return None
    if repeated := re.search(r"(?ms)^([a-z]\w*)[ \t]*:.*^\1[ \t]*:", text):
        raise ConfigError(f"'{path}' has the key {repeated[1]!r} twice. Remove one of them.")
    return data


def class_files(files: list[str], names: Iterable[str] = _CLASS_FILES) -> list[str]:
    """Return the files with one class name per line. A file with one of their names may have the labels of an image."""
    kinds = ([path for path in files if re.fullmatch(name, os.path.basename(path), re.I)] for name in names)
    return next(filter(None, ([path for path in kind if not label_files([path])] for kind in kinds)), [])


def _comparable(name: str) -> str:
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFC", name)).casefold()


def label_files(files: list[str]) -> list[str]:
    """Return the text files whose first row is a label of YOLO, which begins with a class index, or of DOTA."""
    firsts = [(path, next(_rows(path), ([], ""))[0]) for path in files if path.lower().endswith(".txt")]
    rows = [(path, row) for path, row in firsts if all(map(_NUMBER.fullmatch, row[:5]))]
    return [path for path, row in rows if len(row) in (9, 10) or (row[4:] and re.fullmatch(r"-?\d+(\.0*)?", row[0]))]


def _names(path: str, names: Any, count: Any, index: FileIndex, found: Annotations) -> list[str]:
    """Return the class names from the setting ``names``: a list, a dict from id to name, a file, or one name."""
    if isinstance(names, str) and (file := _existing(names, [os.path.dirname(path), index.root], index)):
        found.read.append(file)
        # A class may have the name of a folder.
        names = read_names(file) or names
    elif isinstance(names, str) and Path(names).suffix:
        raise ConfigError(f"'{path}' needs '{names}', which does not exist. Add it, with one class name per line.")
    written = str(names)[:80]
    if isinstance(names, dict) and all(re.fullmatch("[0-9]{1,5}", key) for key in names):
        names = [names.get(str(number), "") for number in range(max(map(int, names), default=-1) + 1)]
    # Other texts are names without a space after their numbers, or a missing file.
    names = [names] if isinstance(names, str) and re.fullmatch(r"\w[\w -]*", names) else names
    names = [name.strip() for name in names] if isinstance(names, list) and {*map(type, names)} == {str} else []
    different = {*filter(None, names)}
    is_unique = 0 < len(different) == len(names) - names.count("")
    if not is_unique or str(count or len(names)) not in (str(len(names)), str(len(different))):
        wrong = counted(len(different), "different name") + (f", but nc is {count}" if count else "")
        advice = "Write one name per class, as in [cat, dog] without quotes, or '0: cat' lines with ids below 100,000."
        raise ConfigError(f"'{path}' has {wrong}: names is {written!r}. {advice}")
    if garbled := [name for name in names if "\ufffd" in name]:
        raise ConfigError(f"The class names of '{path}', such as {garbled[0]!r}, are not UTF-8. Save them as UTF-8.")
    return names


def _images(place: str, split: str | None, index: FileIndex, found: Annotations) -> list[str]:
    """Return the images of a split from a folder, an image, or a text file with a list of images.

    A given folder of images replaces the folders of the settings. Its own folders then decide the split. If they have
    none, the names of the images or label files in ``place`` decide.
    """
    if index.is_given and not os.path.isfile(place):
        if split is None or any(map(index.split_of, index.images)):
            return [image for image in index.images if split is None or (index.split_of(image) or "train") == split]
        folders = [place, *map(os.path.dirname, _label_paths(os.path.join(place, "any")))]
        stems = {stem_of(file) for folder in folders for file in walk(folder)}
        return [image for image in index.images if stem_of(image) in stems or (not stems and split == "train")]
    if not os.path.isfile(place) or is_image(place):
        return [place] if os.path.isfile(place) else [*filter(is_image, walk(place))]
    found.read.append(place)
    # An empty line is normalized to a period.
    lines = {*map(os.path.normpath, read_lines(place))} - {"."}
    # A list may name an image by a relative and by an absolute path.
    names = {index.find(os.path.join(os.path.dirname(place), line)) or line for line in lines}
    records = [Record(place, (name,), split=split) for name in sorted(names)]
    index.find_images(records)
    found.unused["missing images that a list names"] += [record.names[0] for record in records if not record.file]
    return [record.file for record in records if record.file]


def _existing(entry: str, bases: list[str], index: FileIndex) -> str | None:
    """Return the path of an entry of a settings file, or None if it does not exist.

    If the entry is a path of another computer, its longest end that exists below one of ``bases`` is used. The end of a
    relative path must have the folder of a split, or everything except ``_OPTIONAL``: Roboflow writes ../train/images
    for a folder next to data.yaml, and Darknet data/train.txt for a file next to its obj.data.
    """
    # Windows paths have both kinds of slashes.
    path = PureWindowsPath(entry)
    parts = path.parts[bool(path.anchor) :]
    ends = [parts[i:] for i in range(len(parts)) if path.anchor or split_of(parts) or {*parts[:i]} <= _OPTIONAL]
    # The end must have the folder of the split, if there is one.
    names = (os.path.join(*end) for end in ends if split_of(end) == split_of(parts))
    return index.find(*(os.path.join(base, name) for name in (path.as_posix(), *names) for base in bases))


def _label_paths(image: str) -> list[str]:
    """Return the paths that the label file of an image may have: below labels/ instead of images/, or next to it."""
    # Some programs keep the suffix of the image: a.jpg.txt
    bases = os.path.splitext(image)[0], image
    paths = [re.sub("(?i)(.*/)(jpeg)?images/", rf"\1{to}/", base) for base in bases for to in ("labels", "labelTxt")]
    return [f"{path}.txt" for path in dict.fromkeys((*paths, *bases))]


def _rows(label: str) -> Iterator[tuple[list[str], str]]:
    """Yield the words of each line, and its location. Some programs write commas or semicolons between the words."""
    for i, line in enumerate(read_lines(label), start=1):
        separator = r"\s*;\s*" if ";" in line else r",?\s+" if re.search(r"\s", line) else ","
        # Files of DOTA begin with the source and the resolution of the image.
        if line and not re.match("'?(imagesource|gsd)'?:", line):
            # Some programs write a decimal comma.
            yield [re.sub(r"^([-+]?\d*),(\d)", r"\1.\2", w) for w in re.split(separator, line)], f"{label}, line {i}"


def _is_label(row: list[str], names: list[str]) -> bool:
    """Return whether a row is a label, perhaps with faults, and not a text such as ``2 cats on a mat``."""
    are_values = [_VALUE.fullmatch(word) is not None for word in row]
    has_class = are_values[0] or row[0] in names
    return row[0] in map(str, range(len(names))) or sum(are_values) > 2 or (has_class and are_values[1:2] == [True])


def _are_poses(rows: list[list[str]]) -> bool:
    """Return whether all rows are a class, a box, and points with a visibility of 0, 1 or 2."""
    lengths, visible = {len(row) for row in rows} - {5}, {word for row in rows for word in row[7::3]}
    return len(lengths) == 1 and max(lengths) % 3 == 2 and all(re.fullmatch(r"[012](\.0*)?", word) for word in visible)


def _object(row: list[str], names: list[str], size: tuple[int, int], location: str, unknown: dict) -> dict[str, Any]:
    """Return the object of a row. If its class is not in ``names``, add the location to ``unknown``."""
    # DOTA has four corners in pixels, the class and perhaps the difficulty.
    if len(row) in (9, 10) and (not _NUMBER.fullmatch(row[8]) or (len(row) == 10 and row[8] in names)):
        if names and row[8] not in names:
            unknown[repr(row[8])].append(location)
        return box_object(row[8], [number(word, location) for word in row[:8]])
    if row[0] in names and not _NUMBER.fullmatch(row[0]):
        row = [str(names.index(row[0])), *row[1:]]
    index, *values = (number(word, location) for word in row)
    label = names[int(index)] if index in range(len(names)) else ""
    if not label:
        unknown[row[0]].append(location)
    pixels = [value * size[1 - axis % 2] for axis, value in enumerate(values)]
    if len(pixels) == 4:
        x, y, width, height = pixels
        left, top = round(x - width / 2, 2), round(y - height / 2, 2)
        return box_object(label, [left, top, left + round(width, 2), top + round(height, 2)])
    if len(values) < 6 or len(values) % 2:
        advice = "If the last column has confidences, remove it." if len(values) == 5 else "Correct the line."
        raise ConfigError(f"{location}: {len(row)} numbers are not a class and a box or polygon. {advice}")
    return polygon_object(label, [[round(pixel, 2) for pixel in pixels]])
