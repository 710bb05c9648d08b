"""Datasets of other formats as COCO files: YOLO, Pascal VOC, LabelMe and CVAT, recognised by their files.

No library for these formats keeps all that training needs, hence a function for each: supervision turns polygons into
bitmaps and has no CVAT, globox and labelformat have no polygons of LabelMe and CVAT and leave Pascal VOC's boxes a
pixel off, and datumaro needs OpenCV below 5.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

import yaml

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from backbones.errors import GENERATOR, check_replaceable
from projects_vil.config import first_of
from projects_vil.data.detection_utils import IMAGE_SUFFIXES, UnreadableImage, read_size
from projects_vil.utils import read_json

VAL_SHARE = 0.2
# The key, in "info" of a COCO file that is written here, of the dataset that it was made of.
SOURCE = "source"
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
# Beside labels, the names of the classes, which labelImg writes.
_YOLO_TEXTS = ("classes.txt",)
# Of one file per image.
_FOLDERS_ONLY = ("LabelMe", "Pascal VOC")
_UNANNOTATED = "images without an annotation file"
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
class _Photo:
    """An image of a dataset in another format.

    Attributes:
        size: height and width, None if unknown.
        objects: as in a COCO file, without ids and area, and with ``label``, the name of the class.
    """

    file: Path
    split: str | None
    size: tuple[int, int] | None
    objects: list[dict[str, Any]]


# Split -> content of a COCO file, the file or None, image folder.
_Parts = dict[str, tuple[dict[str, Any], Path | None, Path]]
# Images, classes in the order of the format if it has one, and how many of what were left out.
_Read = tuple[list[_Photo], list[str] | None, Counter]


def read_dataset(
    source: str | Path, folder: str | Path, *, val: float | None = None, contents: dict[str, Any] | None = None
) -> Dataset:
    """Find out the format of a dataset and return it as COCO files.

    COCO files with a validation split are used as they are; anything else is written into ``folder``, always the same
    for the same files. Images stay where they are.

    Args:
        source: a COCO file, a ``data.yaml`` of YOLO, an XML file of CVAT, or a folder with any of the five formats.
        folder: for the files that are written; it is made where needed.
        val: share of the training images that are validated on where the dataset has no validation split: those with
            the lowest hashes of their file names, whatever their order. None is 0.2, and 0 leaves such a dataset whole.
        contents: is given those of each split's file, so that a caller need not read it again.

    Raises:
        ConfigError: for files of no or of several formats, files that cannot be read as what they are, and a ``val``
            that is no share or not needed.
    """
    if val is not None and not 0 <= val < 1:
        raise ConfigError(f"val={val}: give the share of images to validate on, such as {VAL_SHARE}")
    source, notes = Path(source), []
    name, files, root = detect_format(source)
    parts = _find_coco(files, root) if name == "COCO" else _to_coco(source, _READERS[name](files, root), notes)
    if len(parts) == 1:
        parts = {"train": next(iter(parts.values()))}
    if "train" not in parts:
        raise ConfigError(f"{source} has {' and '.join(parts)}, and no training images")
    if "val" not in parts and val != 0:
        content, _, images = parts["train"]
        halves = _divide(source, content, VAL_SHARE if val is None else val)
        parts |= {split: (half, None, images) for split, half in zip(("train", "val"), halves, strict=True)}
        notes.insert(0, "the validation images chosen by a hash of the file names")
    elif val:
        raise ConfigError(f"val={val}: {source} has a validation split of {len(parts['val'][0]['images'])} images")
    splits, sizes, masks = {}, {}, []
    written = {split: Path(folder) / f"{split}.json" for split, (_, path, _) in parts.items() if path is None}
    read = set(map(os.path.realpath, files))
    for path in written.values():
        check_replaceable(path, advice="Choose another output directory.")
        if os.path.realpath(path) in read:
            raise ConfigError(
                f"'{path}' is part of the dataset and would be replaced. Choose another output directory."
            )
    # check_replaceable reads only the beginning of a file. The source is for error messages.
    info = {"description": GENERATOR, SOURCE: os.path.abspath(source)}
    for split in [split for split in ("train", "val", "test") if split in parts]:
        content, path, images = parts[split]
        if path is None:
            path = written[split]
            content = {"info": info, **{key: value for key, value in content.items() if key != "info"}}
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as partial:
                partial.write_text(json.dumps(content), encoding="utf-8")
        if contents is not None:
            contents[split] = content
        splits[split], sizes[split] = (path, images), len(content["images"])
        objects = [entry for entry in content.get("annotations", ()) if isinstance(entry, dict)]
        masks += [bool(entry.get("segmentation")) for entry in objects if not entry.get("iscrowd")]
    categories = [entry for entry in parts["train"][0]["categories"] if isinstance(entry, dict)]
    names = {entry["id"]: str(entry.get("name")) for entry in categories if type(entry.get("id")) is int}
    # As detectron2 orders them.
    classes = tuple(names[number] for number in sorted(names))
    return Dataset(source, name, splits, sizes, classes, bool(masks) and all(masks), tuple(notes))


def detect_format(source: Path) -> tuple[str, list[Path], Path]:
    """Return the format of a dataset, its annotation files, and the folder that has it, without reading the files.

    Raises:
        ConfigError: for a path that does not exist, and files of no or of several formats.
    """
    if not source.exists():
        raise ConfigError(f"there is no file or folder {source}")
    root = source.parent if source.is_file() or source.name == "Annotations" else source
    found = defaultdict(list)
    for path in [source] if source.is_file() else _walk(root):
        found[_sniff(path)].append(path)
    unknown = found.pop(None, [])
    if not found:
        formats = "*.json of COCO or LabelMe, data.yaml of YOLO, *.xml of Pascal VOC or CVAT"
        raise ConfigError(f"{source} has no annotations of a known format: {formats}")
    if len(found) > 1:
        each = " and ".join(f"{name} ({files[0].relative_to(root)})" for name, files in found.items())
        raise ConfigError(f"{source} has files of {each}: give the file or the folder of one")
    name, files = found.popitem()
    if source.is_file() and name in _FOLDERS_ONLY:
        raise ConfigError(f"{source} is the {name} file of one image: give the folder")
    if name == "YOLO":
        # Its other YAML files are settings of programs.
        return name, files, root
    stems = {path.stem for path in unknown if path.suffix.lower() in IMAGE_SUFFIXES} if name in _FOLDERS_ONLY else ()
    suffixes = {path.suffix.lower() for path in files}
    unknown = [path for path in unknown if path.suffix.lower() in suffixes]
    damaged = [path for path in unknown if path.stem in stems or not path.stat().st_size]
    if damaged:
        number = f"{len(damaged)} annotation files are" if len(damaged) > 1 else "An annotation file is"
        raise ConfigError(
            f"{number} empty or not in the format {name}: {first_of(list(map(str, damaged)), 5)}. Repair or remove "
            f"{'them' if len(damaged) > 1 else 'it'}."
        )
    return name, files, root


def read_coco(path: str | Path) -> dict[str, Any]:
    """Read a COCO file; COCO's test images have no list of annotations.

    Raises:
        ConfigError: for a file that is missing, is not JSON, or has no lists of images, annotations and categories.
    """
    try:
        dataset = read_json(path, what="annotation file")
    except ConfigError as error:
        raise ConfigError(_other_format(path) or str(error)) from error
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
        name = _sniff(Path(path)) if Path(path).is_file() else detect_format(Path(path))[0]
    except ConfigError:
        return ""
    if name == "COCO":
        return f"{path} is a folder: name the annotation file in it" if Path(path).is_dir() else ""
    return name and f"{path} is {name}, not a COCO file: `vil train` and `vil check` read it as it is"


# -- files -----------------------------------------------------------------------------------------


def _walk(root: Path) -> list[Path]:
    """Return all files in a folder but hidden ones and those of runs, sorted; links are followed, each once."""
    files, seen = [], set()
    for parent, folders, names in os.walk(root, followlinks=True):
        is_run = "log.txt" in names and ("config.yaml" in names or "data" in folders)
        if is_run or os.path.realpath(parent) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(parent))
        folders[:] = [name for name in folders if not name.startswith((".", "__MACOSX"))]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _sniff(path: Path) -> str | None:
    """Return the format of an annotation file by its beginning and its end, or else by all of it, or None."""
    signs = _SIGNS.get(path.suffix.lower(), ())
    if not signs or not path.is_file():
        return None

    def sign_in(content: bytes) -> str | None:
        # UTF-16 has a zero next to each letter.
        content = content.replace(b"\0", b"")
        return next((name for name, sign in signs if re.search(sign, content)), None)

    with path.open("rb") as file:
        content = file.read(_SNIFFED_BYTES)
        file.seek(max(path.stat().st_size - _SNIFFED_BYTES, 0))
        content += b"\n" + file.read()
    return sign_in(content) or sign_in(path.read_bytes())


class _Images:
    """Finds the image that an annotation file in the folder ``root`` names."""

    def __init__(self, root: Path) -> None:
        self.by_name, self.by_stem = defaultdict(list), defaultdict(list)
        for path in _walk(root):
            if path.suffix.lower() in IMAGE_SUFFIXES:
                self.by_name[path.name].append(path)
                self.by_stem[path.stem].append(path)
        self.annotation_of: dict[Path, tuple[Path, str]] = {}

    def find(self, annotation: Path, name: str) -> Path:
        """Return the image; where it should be if it is missing.

        It often is elsewhere or has another name, because files are moved and renamed: then it is one of that name, or
        of the annotation file's, with most of the path in common, at its end or else at its beginning.

        Raises:
            ConfigError: if it could be one of several images, or is the image of another annotation.
        """
        named = Path(os.path.normpath(annotation.parent / name.replace("\\", "/")))
        parts = tuple("JPEGImages" if part == "Annotations" else part for part in named.with_suffix("").parts)

        def in_common(path: Path) -> tuple[int, int]:
            own = path.with_suffix("").parts
            pairs = (own[::-1], parts[::-1]), (own, parts)
            return tuple(len(os.path.commonprefix(pair)) for pair in pairs)

        found = [named] if named.is_file() else self.by_name.get(named.name) or self.by_stem.get(annotation.stem)
        if not found:
            return Path(*parts).with_name(named.name)
        best = max(map(in_common, found))
        found = [path for path in found if in_common(path) == best]
        if len(set(map(os.path.realpath, found))) > 1:
            raise ConfigError(
                f"The image {name!r} of {annotation} matches both {found[0]} and {found[1]}. Rename or remove all "
                "but one."
            )
        other, where = self.annotation_of.setdefault(found[0], (annotation, name))
        if (other, where) != (annotation, name):
            raise ConfigError(
                f"The image {found[0]} has two annotations: {where!r} in {other} and {name!r} in {annotation}. "
                "Add the missing image, or remove one annotation."
            )
        return found[0]

    def without(self, annotations: list[Path]) -> int:
        """Return the number of images for which no annotation file was found, nor one with their stem."""
        stems = {path.stem for path in annotations} | {path.stem for path in self.annotation_of}
        return sum(len(paths) for stem, paths in self.by_stem.items() if stem not in stems)


def _split_of(folder: Path, stem: str = "") -> str | None:
    """Return the split that a file name has as a word, or else a folder as its name: instances_val2017, valid/."""
    words = [*re.split("[^a-z]+", stem.lower()), *(part.lower() for part in reversed(folder.parts))]
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def _number(text: Any, where: str) -> float:
    try:
        number = float(text)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{where}: {text!r} is not a number")
    return number


def _xml(path: Path) -> ElementTree.Element:
    # Nothing is read from elsewhere, and expat limits what entities expand to.
    try:
        return ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise ConfigError(f"{path} is not XML: {error}") from error


# -- COCO ------------------------------------------------------------------------------------------


def _find_coco(files: list[Path], root: Path) -> _Parts:
    """Return the COCO files of a folder by the splits in their names, with the folders in which their images are."""
    # Not captions, keypoints and panoptic segments of the same images.
    files = [path for path in files if path.stem.startswith("instances")] or files
    parts = {}
    for path in files:
        split = (len(files) > 1 and _split_of(path.parent.relative_to(root), path.stem)) or "train"
        if split in parts:
            raise ConfigError(f"{root} has several COCO files for {split}: {parts[split][1]} and {path}")
        content = read_coco(path)
        names = [str(entry.get("file_name")) for entry in content["images"][:5] if isinstance(entry, dict)]
        bases = [base / images for base in (path.parent, path.parent.parent) for images in ("", "images")]
        folders = [base / name for base in bases for name in ("", path.stem.removeprefix("instances_"), split)]
        found = [folder for folder in folders if any((folder / name).is_file() for name in names)]
        if not found:
            places = "its folder, the one above, images/ and those of its name"
            raise ConfigError(f"the images of {path} are not found: {', '.join(names[:1])} is not in {places}")
        parts[split] = content, path, found[0]
    return parts


def _divide(source: Path, content: dict[str, Any], share: float) -> list[dict[str, Any]]:
    """Return a COCO file's content in two, of which the second has this share of the images."""

    def text(entry: Any, key: str) -> str:
        return str(entry.get(key)) if isinstance(entry, dict) else ""

    def order(image: Any) -> tuple[str, str]:
        name = text(image, "file_name")
        return hashlib.sha256(PurePosixPath(name).name.encode()).hexdigest(), name

    images, objects = content["images"], content.get("annotations", [])
    if len(images) < 2:
        raise ConfigError(f"{source} has one image: training and validation need one each")
    number = min(max(round(share * len(images)), 1), len(images) - 1)
    chosen = {text(image, "id") for image in sorted(images, key=order)[:number]}
    return [
        content
        | {"images": [image for image in images if (text(image, "id") in chosen) is is_val]}
        | {"annotations": [entry for entry in objects if (text(entry, "image_id") in chosen) is is_val]}
        for is_val in (False, True)
    ]


# -- the other formats -----------------------------------------------------------------------------


def _to_coco(source: Path, read: _Read, notes: list[str]) -> _Parts:
    photos, classes, left_out = read
    notes += [f"{what}: {count:,} left out" for what, count in sorted(left_out.items()) if count]
    objects = [one for photo in photos for one in photo.objects]
    classes = classes or sorted({one["label"] for one in objects})
    if not classes:
        raise ConfigError(f"{source} has no object in {len(photos)} images{''.join(f'; {note}' for note in notes)}")
    polygons = sum(bool(one.get("segmentation")) for one in objects)
    if 0 < polygons < len(objects):
        notes.append(f"{polygons:,} of {len(objects):,} objects have polygons, which are read as boxes")
    ids = {label: index for index, label in enumerate(classes, start=1)}
    categories = [{"id": index, "name": label} for label, index in ids.items()]
    files = {photo.file: Path(os.path.abspath(photo.file)) for photo in photos}
    root, parts = Path(os.path.commonpath([file.parent for file in files.values()])), {}
    for number, photo in enumerate(sorted(photos, key=lambda photo: files[photo.file]), start=1):
        empty = {"images": [], "annotations": [], "categories": categories}
        content, _, _ = parts.setdefault(photo.split or "train", (empty, None, root))
        image = {"id": number, "file_name": files[photo.file].relative_to(root).as_posix()}
        content["images"].append(image | dict(zip(("height", "width"), photo.size or (), strict=False)))
        for one in photo.objects:
            if not one["label"]:
                raise ConfigError(f"{source}: an object in {photo.file} has no class")
            entry = {"id": len(content["annotations"]) + 1, "image_id": number, "category_id": ids[one["label"]]}
            entry |= {"bbox": one["bbox"], "area": one["bbox"][2] * one["bbox"][3], "iscrowd": one["iscrowd"]}
            if polygons == len(objects):
                entry |= {"area": sum(map(_area, one["segmentation"])), "segmentation": one["segmentation"]}
            content["annotations"].append(entry)
    return parts


def _area(polygon: list[float]) -> float:
    xs, ys = polygon[::2], polygon[1::2]
    return abs(sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs)))) / 2


def _box(label: str, left: float, top: float, right: float, bottom: float, iscrowd: int = 0) -> dict[str, Any]:
    return {"label": label, "bbox": [left, top, round(right - left, 4), round(bottom - top, 4)], "iscrowd": iscrowd}


def _outlined(label: str, polygons: list[list[float]]) -> dict[str, Any]:
    xs, ys = [x for points in polygons for x in points[::2]], [y for points in polygons for y in points[1::2]]
    return _box(label, min(xs), min(ys), max(xs), max(ys)) | {"segmentation": polygons}


def _drawn(shapes: list[tuple[str, str, Any, list[float]]], left_out: Counter) -> list[dict[str, Any]]:
    """Return the objects of an image from its shapes: kind, label, group or None, and ``[x0, y0, x1, y1, ...]``.

    Polygons of one label and group are the parts of one object.
    """
    objects, groups = [], defaultdict(list)
    for index, (kind, label, group, points) in enumerate(shapes):
        if kind == "rectangle" and len(points) in (4, 8):
            # Two corners, or all.
            objects.append(_outlined(label, [points]) | {"segmentation": None})
        elif kind == "polygon" and len(points) >= 6 and not len(points) % 2:
            groups[label, f"shape {index}" if group is None else group].append(points)
        else:
            left_out[f"{kind} of {len(points) // 2} points" if kind in ("rectangle", "polygon") else kind] += 1
    return objects + [_outlined(label, polygons) for (label, _), polygons in groups.items()]


def _read_voc(files: list[Path], root: Path) -> _Read:
    photos, left_out, images = [], Counter(), _Images(root)
    lists = [path for path in _walk(root) if path.parts[-3:-1] == ("ImageSets", "Main")]
    stems, split_of = {path.stem for path in files}, {}
    # trainval is both of the others, or stands for the one that is missing.
    for name in ("trainval", "train", "val", "test"):
        if name != "trainval" or not {"train", "val"} <= {path.stem for path in lists}:
            text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in lists if path.stem == name)
            lines = [line.strip() for line in text.split("\n") if line.strip()]
            split_of |= {line if line in stems else line.split()[0]: _SPLITS[name] for line in lines}
    missing = split_of.keys() - stems
    # Those of a test are often kept secret.
    left_out["images of the test without annotations"] += sum(split_of[name] == "test" for name in missing)
    if missing := [name for name in missing if split_of[name] != "test"]:
        raise ConfigError(f"{root} has no {min(missing)}.xml, which a list in ImageSets/Main names")
    for path in files:
        if split_of and path.stem not in split_of:
            left_out["annotation files that no list in ImageSets/Main names"] += 1
            continue
        annotation, objects = _xml(path), []
        for entry in annotation.findall("object"):
            label = (entry.findtext("name") or "").strip()
            sides = [(side, entry.findtext(f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax")]
            left, top, right, bottom = (_number(text, f"{path}: {side} of {label!r}") for side, text in sides)
            # Pixels are counted from 1, and the last one belongs to the box. Programs that count from 0 write 0.
            is_difficult = (entry.findtext("difficult") or "").strip() == "1"
            objects.append(_box(label, max(left - 1, 0), max(top - 1, 0), right, bottom, int(is_difficult)))
        sides = [(side, annotation.findtext(f"size/{side}") or 0) for side in ("height", "width")]
        size = tuple(int(_number(text, f"{path}: {side}")) for side, text in sides)
        # The name in the file is often that of before a move.
        name = (annotation.findtext("filename") or "").strip() or f"{path.stem}.jpg"
        file = images.find(path, f"{path.stem}{Path(name).suffix}" if path.stem in images.by_stem else name)
        split = split_of.get(path.stem) or _split_of(path.relative_to(root).parent)
        photos.append(_Photo(file, split, size if min(size) > 0 else None, objects))
    left_out[_UNANNOTATED] += images.without(files)
    return photos, None, left_out


def _read_labelme(files: list[Path], root: Path) -> _Read:
    photos, left_out, images = [], Counter(), _Images(root)
    for path in files:
        try:
            content, shapes = read_json(path), []
            for shape in content["shapes"]:
                label, kind = str(shape["label"]), shape.get("shape_type") or "polygon"
                # LabelMe's converters leave this label out.
                kind = label if label == "__ignore__" else kind
                points = [_number(number, f"{path}: {label}") for point in shape["points"] for number in point]
                shapes.append((kind, label, shape.get("group_id"), points))
            size, file = (content["imageHeight"], content["imageWidth"]), images.find(path, content["imagePath"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} is not as LabelMe writes it: {type(error).__name__} {error}") from error
        photos.append(_Photo(file, _split_of(path.relative_to(root).parent), size, _drawn(shapes, left_out)))
    left_out[_UNANNOTATED] += images.without(files)
    return photos, None, left_out


def _read_cvat(files: list[Path], root: Path) -> _Read:
    if len(files) > 1:
        raise ConfigError(f"{root} has several CVAT files, {files[0].name} and {files[1].name}: give one")
    path, photos, left_out, images = files[0], [], Counter(), _Images(root)
    content = _xml(path)
    if content.find("track") is not None:
        raise ConfigError(f"{path} has tracks of a video: export it from CVAT as 'CVAT for images 1.1'")
    classes = list(dict.fromkeys(label.findtext("name") for label in content.iterfind("meta//labels/label")))
    for image in content.iter("image"):
        name, subset, shapes = image.get("name") or "", image.get("subset") or "", []
        for shape in image:
            where, label = f"{path}: {shape.tag} in {name}", shape.get("label")
            corners = [shape.get(side) for side in ("xtl", "ytl", "xbr", "ybr")] if shape.tag == "box" else []
            points = re.split("[;,]", shape.get("points") or "") if shape.tag == "polygon" else corners
            kind = {"box": "rectangle"}.get(shape.tag, shape.tag)
            if _number(shape.get("rotation") or 0, where):
                kind = f"rotated {kind}"
            if label not in classes and points:
                raise ConfigError(f"{where}: the label {label!r} is not among those of the file")
            # Group 0 is none.
            group = shape.get("group_id") if shape.get("group_id") != "0" else None
            shapes.append((kind, label, group, [_number(point, where) for point in points]))
        size = tuple(int(_number(image.get(side), f"{path}: {side} of {name}")) for side in ("height", "width"))
        file = images.find(path, f"{subset}/{name}" if subset else name)
        photos.append(_Photo(file, _split_of(Path(subset)), size, _drawn(shapes, left_out)))
    return photos, classes, left_out


def _read_yolo(files: list[Path], root: Path) -> _Read:
    if len(files) > 1:
        raise ConfigError(f"{root} has several files of YOLO, {files[0].name} and {files[1].name}: give one")
    path = files[0]
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    names = data.get("names") if isinstance(data, dict) else None
    if isinstance(names, dict) and names.keys() == set(range(len(names))):
        names = [names[index] for index in range(len(names))]
    if not isinstance(names, list) or not names or not data.get("nc", len(names)) == len(names) == len(set(names)):
        raise ConfigError(f"{path}: names has to list the nc classes, or have 0, 1, ... with a name each")
    names, found = list(map(str, names)), []
    # A dataset that was moved has the path of another machine.
    given = path.parent / str(data.get("path") or "")
    for split in ("train", "val", "test"):
        found += [(split, file) for file in _yolo_images(path, given if given.is_dir() else path.parent, data, split)]
    labels = [_yolo_label(file) for _, file in found]
    if not any(label.is_file() for label in labels):
        raise ConfigError(
            f"{path}: none of its {len(found)} images has a label file{f', as {labels[0]}' if found else ''}"
        )
    with ThreadPool(_NUM_THREADS) as pool:
        sizes = pool.map(_size_or_none, [file for _, file in found])
    photos = []
    for (split, file), label, size in zip(found, labels, sizes, strict=True):
        # The check finds images that cannot be read.
        lines = label.read_text(encoding="utf-8", errors="replace").split("\n") if size and label.is_file() else []
        rows = [(line.split(), f"{label}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
        has_points = data.get("kpt_shape") is not None
        objects = [_yolo_object(row[:5] if has_points else row, names, size, where) for row, where in rows]
        photos.append(_Photo(file, split, size, objects))
    folders = {label.parent for (_, file), label in zip(found, labels, strict=True) if label.parent != file.parent}
    texts = {Path(folder, name) for folder in folders if folder.is_dir() for name in os.listdir(folder)}
    unused = [path for path in texts - set(labels) if path.suffix == ".txt" and path.name not in _YOLO_TEXTS]
    return photos, names, Counter({"label files without an image": len(unused)})


def _yolo_images(path: Path, root: Path, data: dict[str, Any], split: str) -> list[Path]:
    """Return the images of a split: of folders, of files, or of lists of files."""
    images, entries = [], data.get(split) or []
    for entry in entries if isinstance(entries, list) else [entries]:
        # Roboflow writes ../train/images for a folder beside data.yaml, and names a test split that is not there.
        places = [root / str(entry), root / str(entry).removeprefix("../")]
        place = next((place for place in places if place.exists()), None)
        if place is None and split != "test":
            raise ConfigError(f"{path} names {entry} for {split}, and there is no {places[0]}")
        if place is None or place.suffix == ".txt":
            lines = place.read_text(encoding="utf-8").split("\n") if place else []
            lines = [line.strip() for line in lines if line.strip()]
            images += [(place.parent if line.startswith("./") else root) / line for line in lines]
        else:
            images += [file for file in _walk(place) if file.suffix.lower() in IMAGE_SUFFIXES]
    return images


def _yolo_label(image: Path) -> Path:
    """Return the label file of an image: in labels/ instead of the last images/ of its path, or beside it."""
    folder = re.sub("^(.*/|)images(?=/|$)", r"\1labels", image.parent.as_posix())
    places = [Path(folder, f"{image.stem}.txt"), image.with_suffix(".txt")]
    return places[0] if places[0].is_file() or not places[1].is_file() else places[1]


def _yolo_object(row: list[str], names: list[str], size: tuple[int, int], where: str) -> dict[str, Any]:
    height, width = size
    index, *values = (_number(word, where) for word in row)
    if index not in range(len(names)):
        raise ConfigError(f"{where}: class {row[0]}, and data.yaml has {len(names)} names, from 0")
    label = names[int(index)]
    if len(values) == 4:
        x, y, w, h = values
        left, top = round((x - w / 2) * width, 2), round((y - h / 2) * height, 2)
        return _box(label, left, top, left + round(w * width, 2), top + round(h * height, 2))
    if len(values) < 6 or len(values) % 2:
        raise ConfigError(f"{where}: {len(row)} numbers are neither a class and a box nor a class and a polygon")
    return _outlined(label, [[round(value * size[1 - i % 2], 2) for i, value in enumerate(values)]])


def _size_or_none(path: Path) -> tuple[int, int] | None:
    try:
        return read_size(path)
    except UnreadableImage:
        return None


_READERS = {"YOLO": _read_yolo, "Pascal VOC": _read_voc, "LabelMe": _read_labelme, "CVAT": _read_cvat}
