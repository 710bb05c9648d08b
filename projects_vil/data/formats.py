"""Datasets of other formats as COCO files: YOLO, Pascal VOC, LabelMe and CVAT, recognised by their files.

None of the libraries that read these formats keeps all that training needs: globox and labelformat have no polygons of
LabelMe and CVAT, supervision turns polygons into bitmaps and boxes into float32, and datumaro, which reads LabelMe's
XML of before 2016, does not go with OpenCV 5. Hence the readers here, a function each.
"""

import gc
import hashlib
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

import yaml

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from projects_vil.data.detection_utils import IMAGE_SUFFIXES, UnreadableImage, read_size

VAL_SHARE = 0.2
_SPLITS = {"train": "train", "training": "train", "trainval": "train", "val": "val", "valid": "val"}
_SPLITS |= {"validation": "val", "test": "test", "testing": "test"}
# What the beginning or the end of a file of each format has.
_SIGNS = {
    ".json": (("LabelMe", rb'"shapes"\s*:'), ("COCO", rb'"(images|annotations|categories)"\s*:')),
    ".xml": (("CVAT", rb"<annotations[\s>]"), ("Pascal VOC", rb"<annotation[\s>]")),
    ".yaml": (("YOLO", rb"(?m)^(names|train|val)\s*:"),),
}
_SIGNS[".yml"] = _SIGNS[".yaml"]
_SNIFFED_BYTES = 4096
# Of one file per image.
_FOLDERS_ONLY = ("LabelMe", "Pascal VOC")
_NUM_THREADS = 16


@dataclass(frozen=True)
class Dataset:
    """A dataset as COCO files.

    Attributes:
        source: as given.
        format: ``"COCO"``, ``"YOLO"``, ``"Pascal VOC"``, ``"LabelMe"`` or ``"CVAT"``.
        splits: ``"train"`` and where there are such, ``"val"`` and ``"test"`` -> annotation file and image folder.
        sizes: split -> number of images.
        classes: names in the order of the category ids, which is that of a detector's classes.
        has_masks: whether every object but crowds has a mask.
        notes: what was decided or left out, in words.
    """

    source: Path
    format: str
    splits: dict[str, tuple[Path, Path]]
    sizes: dict[str, int]
    classes: tuple[str, ...]
    has_masks: bool
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """Return for instance ``mine is Pascal VOC: 364 images, 3 classes, boxes; train 291, val 73``."""
        classes = f"{len(self.classes)} class{'es' * (len(self.classes) != 1)}"
        what = f"{sum(self.sizes.values()):,} images, {classes}, boxes{' and masks' * self.has_masks}"
        sizes = ", ".join(f"{split} {size:,}" for split, size in self.sizes.items())
        return "; ".join([f"{self.source} is {self.format}: {what}", sizes, *self.notes])


@dataclass
class _Object:
    """``label`` is a class name, ``box`` is [left, top, width, height] in pixels."""

    label: str
    box: list[float]
    polygons: list[list[float]] = field(default_factory=list)
    iscrowd: int = 0


@dataclass
class _Photo:
    file: Path
    split: str | None
    size: tuple[int, int] | None  # height, width
    objects: list[_Object]


@dataclass
class _Read:
    """What a reader returns; ``classes`` is None where the format has no order of its own."""

    photos: list[_Photo]
    classes: list[str] | None = None
    left_out: Counter = field(default_factory=Counter)


def read_dataset(source: str | Path, folder: str | Path, *, val: float | None = None) -> Dataset:
    """Find out the format of a dataset and return it as COCO files.

    COCO files with a validation split are used as they are; anything else is written into ``folder``, always the same
    for the same files. Images stay where they are.

    Args:
        source: a COCO file, a ``data.yaml`` of YOLO, an XML file of CVAT, or a folder with any of the five formats.
        folder: for the files that are written; it is made where needed.
        val: share of the training images that are validated on where the dataset has no validation split: those with
            the lowest hashes of their file names, whatever their order. None is 0.2, and 0 leaves such a dataset whole.

    Raises:
        ConfigError: for files of no or of several formats, files that cannot be read as what they are, and a ``val``
            that is no share or not needed.
    """
    if val is not None and not 0 <= val < 1:
        raise ConfigError(f"val={val}: give the share of images to validate on, such as {VAL_SHARE}")
    source = Path(source)
    name, files, root = recognise(source)
    notes: list[str] = []
    if name == "COCO":
        parts = _find_coco(files, root, is_file=source.is_file())
    else:
        read = _READERS[name](files, _Files(root))
        parts = _to_coco(source, read, notes)
    if "train" not in parts and len(parts) == 1:
        parts = {"train": next(iter(parts.values()))}
    if "train" not in parts:
        raise ConfigError(f"{source} has {' and '.join(parts)}, and no training images")
    contents = {split: content for split, (content, _, _) in parts.items()}
    if "val" in parts and val:
        raise ConfigError(f"val={val}: {source} has a validation split of {len(contents['val']['images'])} images")
    is_divided = "val" not in parts and val != 0
    if is_divided:
        contents["train"], contents["val"] = _divide(source, contents["train"], VAL_SHARE if val is None else val)
        notes.insert(0, "the validation images chosen by a hash of the file names")
    splits = {}
    for split in [split for split in ("train", "val", "test") if split in contents]:
        _, path, images = parts.get(split) or parts["train"]
        if path is None or (is_divided and split != "test"):
            path = Path(folder) / f"{split}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as partial:
                partial.write_text(json.dumps(contents[split]), encoding="utf-8")
        splits[split] = path, images
    objects = [entry for content in contents.values() for entry in content.get("annotations", ())]
    objects = [entry for entry in objects if isinstance(entry, dict) and not entry.get("iscrowd")]
    has_masks = bool(objects) and all(entry.get("segmentation") for entry in objects)
    sizes = {split: len(contents[split]["images"]) for split in splits}
    return Dataset(source, name, splits, sizes, _class_names(contents["train"]), has_masks, tuple(notes))


def recognise(source: str | Path) -> tuple[str, list[Path], Path]:
    """Return the format of a dataset, its annotation files, and the folder that has it, without reading the files.

    Raises:
        ConfigError: for a path that does not exist, and files of no or of several formats.
    """
    source = Path(source)
    if not source.exists():
        raise ConfigError(f"there is no file or folder {source}")
    if source.is_file():
        name = _sniff(source)
        if name in _FOLDERS_ONLY:
            raise ConfigError(f"{source} is the {name} file of one image: give the folder")
        if name is None:
            raise ConfigError(f"{source} is not a dataset: neither {', '.join(_READERS)} nor COCO")
        return name, [source], source.parent
    root = source.parent if source.name == "Annotations" else source
    found = defaultdict(list)
    for path in _walk(root):
        if path.suffix.lower() in _SIGNS and (name := _sniff(path)) is not None:
            found[name].append(path)
    if len(found) == 1:
        name, files = found.popitem()
        return name, files, root
    if found:
        each = " and ".join(f"{name} ({files[0].relative_to(root)})" for name, files in found.items())
        raise ConfigError(f"{source} has files of {each}: give the file or the folder of one")
    formats = "*.json of COCO or LabelMe, data.yaml of YOLO, *.xml of Pascal VOC or CVAT"
    raise ConfigError(f"{source} has no annotations of a known format: {formats}")


def read_coco(path: str | Path) -> dict[str, Any]:
    """Read a COCO file; COCO's test images have no list of annotations.

    Raises:
        ConfigError: for a file that is missing, is not JSON, or has no lists of images, annotations and categories.
    """
    # Garbage collection takes half of the time while millions of objects are made.
    gc.disable()
    try:
        dataset = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(_other_format(path) or f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(_other_format(path) or f"{path} is not JSON: {error}") from error
    finally:
        gc.enable()
    content = dataset if isinstance(dataset, dict) else {}
    # Without the list of annotations nothing can be evaluated, with an empty one everything is nan: it stays absent.
    lists = content.get("images"), content.get("categories"), content.get("annotations", [])
    if not all(isinstance(entries, list) for entries in lists) or not lists[0] or not lists[1]:
        lacks = "it lacks a list of images, annotations or categories"
        raise ConfigError(_other_format(path) or f"{path} is not a COCO annotation file: {lacks}")
    return dataset


def _other_format(path: str | Path) -> str:
    """Return what a path is that was taken for a COCO file, and the way in; empty where that is not known."""
    try:
        name = _sniff(Path(path)) if Path(path).is_file() else recognise(path)[0]
    except ConfigError:
        return ""
    if name == "COCO":
        return f"{path} is a folder: name the annotation file in it" if Path(path).is_dir() else ""
    return name and f"{path} is {name}, not a COCO file: `vil train` and `vil check` read it as it is"


# -- files -----------------------------------------------------------------------------------------


def _walk(root: Path) -> list[Path]:
    """Return all files in a folder but hidden ones, sorted; folders that are links are followed, each once."""
    files, seen = [], set()
    for parent, folders, names in os.walk(root, followlinks=True):
        is_new = os.path.realpath(parent) not in seen
        seen.add(os.path.realpath(parent))
        folders[:] = [name for name in folders if is_new and not name.startswith((".", "__MACOSX"))]
        files += [Path(parent, name) for name in names if is_new and not name.startswith(".")]
    return sorted(files)


def _sniff(path: Path) -> str | None:
    """Return the format of an annotation file by its beginning and its end, or None."""
    signs = _SIGNS.get(path.suffix.lower())
    if signs is None:
        return None
    with path.open("rb") as file:
        content = file.read(_SNIFFED_BYTES)
        file.seek(max(path.stat().st_size - _SNIFFED_BYTES, 0))
        content += b"\n" + file.read()
    return next((name for name, sign in signs if re.search(sign, content)), None)


class _Files:
    """The images of a folder by name, and the lists of its splits."""

    def __init__(self, root: Path) -> None:
        self.root, self.lists = root, {}
        self.by_name, self.by_stem = defaultdict(list), defaultdict(list)
        for path in _walk(root):
            if path.suffix.lower() in IMAGE_SUFFIXES:
                self.by_name[path.name].append(path)
                self.by_stem[path.stem].append(path)
            elif path.parts[-3:-1] == ("ImageSets", "Main") and path.suffix == ".txt" and path.stem in _SPLITS:
                names = {line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.split()}
                self.lists[path.stem] = self.lists.get(path.stem, set()) | names
        if self.lists.keys() > {"trainval", "val"} or self.lists.keys() > {"trainval", "train"}:
            del self.lists["trainval"]

    def image(self, annotation: Path, name: str) -> Path:
        """Return the image that an annotation file names: the one nearest to it, or where it should be if missing.

        Programs write other names when files are moved or renamed: then the image with the stem of the file is taken.
        """
        name = name.replace("\\", "/")
        expected = Path(os.path.normpath(annotation.parent / name))
        if expected.is_file():
            return expected
        found = self.by_name.get(PurePosixPath(name).name) or self.by_stem.get(annotation.stem) or [expected]
        ends_alike = lambda path: path.as_posix().endswith(f"/{name}")  # noqa: E731
        return max(found, key=lambda path: (ends_alike(path), len(os.path.commonpath([path, annotation]))))


def _split_of(path: Path) -> str | None:
    """Return the split that the last part of a relative path names: annotations/instances_val2017.json, valid/a.xml."""
    words = (word for part in reversed(path.parts) for word in re.split("[^a-z]+", part.lower()))
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def _number(text: Any, where: str) -> float:
    try:
        number = float(text)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(text, bool) or not math.isfinite(number):
        raise ConfigError(f"{where}: {text!r} is not a number")
    return number


def _xml(path: Path) -> ElementTree.Element:
    # No external entities, and expat limits what internal ones expand to.
    try:
        return ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        raise ConfigError(f"{path} is not XML: {error}") from error


# -- COCO ------------------------------------------------------------------------------------------

# Split -> content, annotation file, image folder.
_Parts = dict[str, tuple[dict[str, Any], Path | None, Path]]


def _find_coco(files: list[Path], root: Path, *, is_file: bool) -> _Parts:
    """Return the COCO files of a folder by the splits in their names, with the folders in which their images are."""
    # Not captions, keypoints and panoptic segments of the same images.
    files = [path for path in files if path.stem.startswith("instances")] or files
    paths: dict[str | None, Path] = {}
    for path in files:
        split = None if is_file else _split_of(path.relative_to(root).with_suffix(""))
        if split in paths:
            raise ConfigError(f"{root} has several COCO files for {split or 'all images'}: {paths[split]} and {path}")
        paths[split] = path
    if None in paths and len(paths) > 1:
        raise ConfigError(f"{paths[None]} is for no split, unlike {next(p for s, p in paths.items() if s)}: name one")
    parts = {}
    for split, path in paths.items():
        content = read_coco(path)
        parts[split or "train"] = content, path, _image_folder(path, content, split or "")
    return parts


def _image_folder(path: Path, content: dict[str, Any], split: str) -> Path:
    names = [str(entry.get("file_name")) for entry in content["images"][:5] if isinstance(entry, dict)]
    folders = dict.fromkeys(["", path.stem.removeprefix("instances_"), split])
    candidates = [
        base / images / folder
        for base in (path.parent, path.parent.parent)
        for images in ("", "images")
        for folder in folders
    ]
    found = [folder for folder in candidates if any((folder / name).is_file() for name in names)]
    if not found:
        raise ConfigError(
            f"the images of {path} are not found: there is no {names[0]} in its folder, the one above, or images/"
        )
    return found[0]


def _divide(source: Path, content: dict[str, Any], share: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a COCO file's content in two, of which the second has this share of the images."""

    def order(image: Any) -> tuple[str, str]:
        name = _text(image, "file_name")
        return hashlib.sha256(PurePosixPath(name).name.encode()).hexdigest(), name

    images = sorted(content["images"], key=order)
    if len(images) < 2:
        raise ConfigError(f"{source} has one image: training and validation need one each")
    chosen = {_text(image, "id") for image in images[: min(max(round(share * len(images)), 1), len(images) - 1)]}
    halves = []
    for is_val in (False, True):
        half = {"images": [image for image in content["images"] if (_text(image, "id") in chosen) == is_val]}
        entries = content.get("annotations", ())
        half["annotations"] = [entry for entry in entries if (_text(entry, "image_id") in chosen) == is_val]
        halves.append(content | half)
    return halves[0], halves[1]


def _text(entry: Any, key: str) -> str:
    return str(entry.get(key)) if isinstance(entry, dict) else ""


def _class_names(content: dict[str, Any]) -> tuple[str, ...]:
    """Return the names by category id, as detectron2 orders them."""
    entries = [entry for entry in content["categories"] if isinstance(entry, dict) and "id" in entry]
    return tuple(_text(entry, "name") for entry in sorted(entries, key=lambda entry: int(entry["id"])))


def _to_coco(source: Path, read: _Read, notes: list[str]) -> _Parts:
    if not read.photos:
        raise ConfigError(f"{source} has no images")
    objects = [one for photo in read.photos for one in photo.objects]
    classes = sorted({one.label for one in objects}) if read.classes is None else read.classes
    if not classes:
        raise ConfigError(f"{source} has no object in {len(read.photos)} images")
    notes += [f"{count:,} {what} left out" for what, count in sorted(read.left_out.items())]
    number = sum(bool(one.polygons) for one in objects)
    has_masks = number == len(objects)
    if number and not has_masks:
        notes.append(f"polygons of {number:,} of {len(objects):,} objects read as boxes, since the others have none")
    ids = {label: index for index, label in enumerate(classes, start=1)}
    root = Path(os.path.commonpath([photo.file.absolute().parent for photo in read.photos]))
    parts = {}
    for number, photo in enumerate(sorted(read.photos, key=lambda photo: photo.file), start=1):
        content, _, _ = parts.setdefault(
            photo.split or "train",
            (
                {"images": [], "annotations": [], "categories": [{"id": i, "name": name} for name, i in ids.items()]},
                None,
                root,
            ),
        )
        size = {} if photo.size is None else dict(zip(("height", "width"), photo.size, strict=True))
        name = photo.file.absolute().relative_to(root).as_posix()
        content["images"].append({"id": number, "file_name": name, **size})
        for one in photo.objects:
            entry = {"id": len(content["annotations"]) + 1, "image_id": number, "category_id": ids[one.label]}
            entry |= {"bbox": one.box, "area": one.box[2] * one.box[3], "iscrowd": one.iscrowd}
            if has_masks:
                entry |= {"area": sum(map(_area, one.polygons)), "segmentation": one.polygons}
            content["annotations"].append(entry)
    return parts


def _area(polygon: list[float]) -> float:
    xs, ys = polygon[::2], polygon[1::2]
    pairs = zip(xs, ys, xs[1:] + xs[:1], ys[1:] + ys[:1], strict=True)
    return abs(sum(x * next_y - next_x * y for x, y, next_x, next_y in pairs)) / 2


# -- the other formats -----------------------------------------------------------------------------


def _around(label: str, polygons: list[list[float]]) -> _Object:
    """Return the object with these outlines."""
    xs, ys = [x for points in polygons for x in points[::2]], [y for points in polygons for y in points[1::2]]
    return _Object(label, _from_corners(min(xs), min(ys), max(xs), max(ys)), polygons)


def _from_corners(left: float, top: float, right: float, bottom: float) -> list[float]:
    return [left, top, round(right - left, 4), round(bottom - top, 4)]


def _read_voc(files: list[Path], images: _Files) -> _Read:
    read, split_of = _Read([]), {name: _SPLITS[split] for split, names in images.lists.items() for name in names}
    missing = split_of.keys() - {path.stem for path in files}
    if missing:
        raise ConfigError(f"ImageSets/Main of {images.root} names {min(missing)}, and there is no {min(missing)}.xml")
    for path in files:
        if split_of and path.stem not in split_of:
            read.left_out["annotation files that no list in ImageSets/Main names"] += 1
            continue
        entry, objects = _xml(path), []
        for item in entry.findall("object"):
            label = (item.findtext("name") or "").strip()
            if not label:
                raise ConfigError(f"{path}: an object has no name")
            sides = ("xmin", "ymin", "xmax", "ymax")
            left, top, right, bottom = (_number(item.findtext(f"bndbox/{s}"), f"{path}: {s} of {label}") for s in sides)
            # Pixels are counted from 1, and the last one belongs to the box. Programs that count from 0 write 0.
            box = _from_corners(max(left - 1, 0), max(top - 1, 0), right, bottom)
            objects.append(_Object(label, box, iscrowd=int((item.findtext("difficult") or "").strip() == "1")))
        size = [int(_number(entry.findtext(f"size/{s}") or 0, f"{path}: {s}")) for s in ("height", "width")]
        file = images.image(path, (entry.findtext("filename") or "").strip() or f"{path.stem}.jpg")
        split = split_of.get(path.stem) or _split_of(path.relative_to(images.root).parent)
        read.photos.append(_Photo(file, split, tuple(size) if min(size) > 0 else None, objects))
    return read


def _read_labelme(files: list[Path], images: _Files) -> _Read:
    read = _Read([])
    for path in files:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            size, name, shapes = (
                (content["imageHeight"], content["imageWidth"]),
                content["imagePath"],
                content["shapes"],
            )
            parts = []
            for index, shape in enumerate(shapes):
                where = f"{path}: shape {index}"
                points = [_number(number, where) for point in shape["points"] for number in point]
                parts.append((shape.get("shape_type") or "polygon", str(shape["label"]), shape.get("group_id"), points))
            file = images.image(path, name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} is not as LabelMe writes it: {type(error).__name__} {error}") from error
        split = _split_of(path.relative_to(images.root).parent)
        read.photos.append(_Photo(file, split, size, _objects(parts, read.left_out)))
    return read


def _read_cvat(files: list[Path], images: _Files) -> _Read:
    if len(files) > 1:
        raise ConfigError(f"{images.root} has several CVAT files: {files[0]} and {files[1]}: give one")
    path, read = files[0], _Read([])
    root = _xml(path)
    read.classes = list(
        dict.fromkeys(label.text.strip() for label in root.iterfind("meta//labels/label/name") if label.text)
    )
    if root.find("track") is not None:
        raise ConfigError(f"{path} has tracks of a video: export it from CVAT as 'CVAT for images 1.1'")
    for entry in root.iter("image"):
        name, parts = entry.get("name") or "", []
        for shape in entry:
            where = f"{path}: {shape.tag} in {name}"
            points = [shape.get(side) for side in ("xtl", "ytl", "xbr", "ybr")]
            if shape.tag != "box":
                points = re.split("[;,]", shape.get("points") or "")
            turned = shape.tag == "box" and _number(shape.get("rotation") or 0, where)
            kind = "rotated box" if turned else {"box": "rectangle"}.get(shape.tag, shape.tag)
            if kind in ("rectangle", "polygon"):
                points = [_number(point, where) for point in points]
            group = int(_number(shape.get("group_id") or 0, where)) or None
            parts.append((kind, shape.get("label") or "", group, points))
            if kind in ("rectangle", "polygon") and read.classes and parts[-1][1] not in read.classes:
                raise ConfigError(f"{where}: label {parts[-1][1]!r} is not among those of the file")
        size = tuple(int(_number(entry.get(side), f"{path}: {side} of {name}")) for side in ("height", "width"))
        split = _split_of(Path(entry.get("subset") or ""))
        read.photos.append(_Photo(images.image(path, name), split, size, _objects(parts, read.left_out)))
    read.classes = read.classes or None
    return read


def _objects(parts: Iterable[tuple[str, str, Any, Sequence[float]]], left_out: Counter) -> list[_Object]:
    """Return the objects of an image from its shapes: kind, label, group or None, and ``[x0, y0, x1, y1, ...]``.

    Polygons of one label and group are the parts of one object.
    """
    objects, groups = [], defaultdict(list)
    for index, (kind, label, group, points) in enumerate(parts):
        if kind == "rectangle" and len(points) == 4:
            xs, ys = sorted(points[::2]), sorted(points[1::2])
            objects.append(_Object(label, _from_corners(xs[0], ys[0], xs[1], ys[1])))
        elif kind == "polygon" and len(points) >= 6 and len(points) % 2 == 0:
            groups[label, index if group is None else f"group {group}"].append(list(points))
        else:
            left_out["shapes that are neither rectangles nor polygons"] += 1
    return objects + [_around(label, polygons) for (label, _), polygons in groups.items()]


def _read_yolo(files: list[Path], images: _Files) -> _Read:
    if len(files) > 1:
        raise ConfigError(f"{images.root} has several files of YOLO: {files[0]} and {files[1]}: give one")
    path = files[0]
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    names = data.get("names")
    if isinstance(names, dict) and sorted(names, key=str) == sorted(range(len(names)), key=str):
        names = [names[index] for index in range(len(names))]
    if not isinstance(names, list) or not names:
        raise ConfigError(f"{path}: names has to be the list of the classes, or 0, 1, ... with a name each")
    if data.get("nc", len(names)) != len(names):
        raise ConfigError(f"{path}: nc is {data['nc']}, and there are {len(names)} names")
    names = [str(name) for name in names]
    # A dataset that was moved has the path of another machine.
    given = path.parent / str(data.get("path") or "")
    root = given if given.is_dir() else path.parent
    found = [(split, file) for split in ("train", "val", "test") for file in _yolo_images(path, root, data.get(split))]
    pose = data.get("kpt_shape") is not None
    labels = [_yolo_label(file) for _, file in found]
    if not any(label.is_file() for label in labels):
        raise ConfigError(f"{path}: none of {len(found)} images has a label file, such as {next(iter(labels), 'none')}")
    with ThreadPool(_NUM_THREADS) as pool:
        sizes = pool.map(_size_or_none, [file for _, file in found])
    photos = []
    for (split, file), label, size in zip(found, labels, sizes, strict=True):
        objects = []
        # A file that cannot be read is a finding of the check.
        for number, line in enumerate(label.read_text().splitlines() if size and label.is_file() else (), start=1):
            if line.strip():
                objects.append(_yolo_object(line.split(), names, size, f"{label}, line {number}", pose=pose))
        photos.append(_Photo(file, split, size, objects))
    return _Read(photos, names)


def _yolo_images(path: Path, root: Path, entries: Any) -> list[Path]:
    """Return the images of a split: of folders, of files, or of lists of files."""
    images = []
    for entry in entries if isinstance(entries, list) else [entries] if entries else []:
        # Roboflow writes ../train/images for a folder beside data.yaml.
        places = [root / str(entry), root / str(entry).removeprefix("../")]
        place = next((place for place in places if place.exists()), None)
        if place is None:
            raise ConfigError(f"{path} names {entry}, and there is no {places[0]}")
        if place.is_dir():
            images += [file for file in _walk(place) if file.suffix.lower() in IMAGE_SUFFIXES]
        elif place.suffix == ".txt":
            lines = place.read_text(encoding="utf-8").split("\n")
            images += [
                (place.parent if line.startswith("./") else root) / line.strip() for line in lines if line.strip()
            ]
        else:
            images.append(place)
    return images


def _yolo_label(image: Path) -> Path:
    """Return the label file of an image: in labels/ instead of the last images/ of its path, or beside it."""
    parts = list(image.parts[:-1])
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return Path(*parts, f"{image.stem}.txt")


def _yolo_object(words: list[str], names: list[str], size: tuple[int, int], where: str, *, pose: bool) -> _Object:
    values, (height, width) = [_number(word, where) for word in words], size
    if not values[0].is_integer() or not 0 <= values[0] < len(names):
        raise ConfigError(f"{where}: class {words[0]}, and data.yaml has {len(names)} names, from 0")
    label, values = names[int(values[0])], values[1:5] if pose else values[1:]
    if len(values) == 4:
        x, y, w, h = values
        left, top = round((x - w / 2) * width, 2), round((y - h / 2) * height, 2)
        return _Object(label, [left, top, round(w * width, 2), round(h * height, 2)])
    if len(values) < 6 or len(values) % 2:
        raise ConfigError(f"{where}: {len(words)} numbers are neither a class and a box nor a class and a polygon")
    return _around(label, [[round(value * (height if i % 2 else width), 2) for i, value in enumerate(values)]])


def _size_or_none(path: Path) -> tuple[int, int] | None:
    try:
        return read_size(path)
    except UnreadableImage:
        return None


_READERS = {"YOLO": _read_yolo, "Pascal VOC": _read_voc, "LabelMe": _read_labelme, "CVAT": _read_cvat}
