"""Detect the format of a dataset, and convert YOLO, Pascal VOC, LabelMe and CVAT datasets to COCO files.

There is one reader for each format because no library supports all formats without loss. supervision converts polygons
to bitmaps and does not read CVAT. globox and labelformat do not read polygons of LabelMe and CVAT, and the boxes of
Pascal VOC are off by one pixel. datumaro requires OpenCV below 5.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

import yaml

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from backbones.errors import GENERATOR, check_replaceable
from projects_vil.config import first_of
from projects_vil.data.detection_utils import IMAGE_SUFFIXES, read_sizes
from projects_vil.data.segmentation import count_masks
from projects_vil.data.splits import compare_splits
from projects_vil.utils import read_json

VAL_FRACTION = 0.2
# The key in "info" of a converted COCO file for the path of the original dataset.
SOURCE = "source"
_SPLITS = {"train": "train", "training": "train", "trainval": "train", "val": "val", "valid": "val"}
_SPLITS |= {"validation": "val", "test": "test", "testing": "test"}
# Patterns at the beginning or the end of the files of each format.
_SIGNATURES = {
    ".json": (("LabelMe", rb'"shapes"\s*:'), ("COCO", rb'"(images|annotations|categories)"\s*:')),
    ".xml": (("CVAT", rb"<annotations[\s>]"), ("Pascal VOC", rb"<annotation[\s>]")),
    ".yaml": (("YOLO", rb"(?m)^(names|train|val)\s*:"),),
}
_SIGNATURES[".yml"] = _SIGNATURES[".yaml"]
_NUM_SIGNATURE_BYTES = 4096
# labelImg writes the class names next to the label files.
_CLASS_NAMES_FILE = "classes.txt"
# Formats with one annotation file per image.
_FILE_PER_IMAGE = ("LabelMe", "Pascal VOC")
_UNANNOTATED = "images without an annotation file"


@dataclass(frozen=True)
class Dataset:
    """A dataset as COCO files.

    Attributes:
        source: The path of the original dataset.
        format: ``"COCO"``, ``"YOLO"``, ``"Pascal VOC"``, ``"LabelMe"`` or ``"CVAT"``.
        splits: A dict from the split to its annotation file and image folder. It has ``"train"``, and ``"val"`` and
            ``"test"`` if the dataset has them.
        sizes: A dict from the split to the number of images.
        classes: The class names in the order of the category ids. The classes of a detector have the same order.
        has_masks: Whether at least half of the objects that are not crowds have a mask.
        notes: Messages about choices and skipped entries.
    """

    source: Path
    format: str
    splits: dict[str, tuple[Path, Path]]
    sizes: dict[str, int]
    classes: tuple[str, ...]
    has_masks: bool
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """Return a summary, such as ``mine is Pascal VOC: 364 images, 3 classes, boxes; train 291, val 73``."""
        classes = f"{len(self.classes)} class{'es' * (len(self.classes) != 1)}"
        what = f"{sum(self.sizes.values()):,} images, {classes}, boxes{' and masks' * self.has_masks}"
        sizes = ", ".join(f"{split} {size:,}" for split, size in self.sizes.items())
        return "; ".join([f"{self.source} is {self.format}: {what}", sizes, *self.notes])


@dataclass
class _Record:
    """An image of a dataset that is not in COCO format.

    Attributes:
        file: The image file.
        split: The split, or None if it is unknown.
        size: The height and width in pixels, or None if they are unknown.
        objects: COCO annotations without ids and area, and with ``label``, the class name.
    """

    file: Path
    split: str | None
    size: tuple[int, int] | None
    objects: list[dict[str, Any]]


# The content of a COCO file, its path or None, and the image folder of each split.
_Parts = dict[str, tuple[dict[str, Any], Path | None, Path]]
# The records, the classes if the format defines their order, and the numbers of skipped entries.
_Read = tuple[list[_Record], list[str] | None, Counter]


def read_dataset(
    source: str | Path, folder: str | Path, *, val: float | None = None, contents: dict[str, Any] | None = None
) -> Dataset:
    """Detect the format of a dataset, and return it as COCO files.

    COCO files with a validation split are used without a copy. For other datasets, COCO files are written to
    ``folder``. The files are deterministic. Images are not copied.

    Args:
        source: A COCO file, a ``data.yaml`` file of YOLO, an XML file of CVAT, or a folder in one of the five formats.
        folder: The folder for the written files. It is created if necessary.
        val: The fraction of the training images to use for validation if the dataset has no validation split. The
            images with the lowest hashes of their file names are used, independently of their order. None is 0.2, and 0
            makes no validation split.
        contents: A dict that receives the content of the COCO file of each split, so that the caller need not read it.

    Returns:
        The dataset.

    Raises:
        ConfigError: If the format is unknown or ambiguous, if a file is invalid, or if ``val`` is out of range or the
            dataset already has a validation split.
    """
    if val is not None and not 0 <= val < 1:
        raise ConfigError(f"val_fraction is {val}. Give a fraction between 0 and 1, such as {VAL_FRACTION}.")
    source, notes = Path(source), []
    name, files, root = detect_format(source)
    parts = _find_coco(files, root) if name == "COCO" else _to_coco(source, _READERS[name](files, root), notes)
    if len(parts) == 1:
        parts = {"train": next(iter(parts.values()))}
    if "train" not in parts:
        raise ConfigError(f"'{source}' has {' and '.join(parts)} images, but no training images. Add a training split.")
    if "val" not in parts and val != 0:
        content, _, images = parts["train"]
        halves = _split_by_hash(source, content, VAL_FRACTION if val is None else val)
        parts |= {split: (half, None, images) for split, half in zip(("train", "val"), halves, strict=True)}
        notes.insert(0, "validation images chosen by a hash of their file names")
    elif val:
        number = len(parts["val"][0]["images"])
        raise ConfigError(f"'{source}' already has a validation split of {number} images. Leave out val_fraction.")
    splits, sizes, objects = {}, {}, []
    written = {split: Path(folder) / f"{split}.json" for split, (_, path, _) in parts.items() if path is None}
    read = set(map(os.path.realpath, files))
    for path in written.values():
        check_replaceable(path, advice="Choose another output directory.")
        if os.path.realpath(path) in read:
            raise ConfigError(f"'{path}' belongs to the dataset. Choose another output directory.")
    # "info" comes first because check_replaceable reads only the beginning of a file. Error messages name the source.
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
        objects += content.get("annotations", ())
    categories = [entry for entry in parts["train"][0]["categories"] if isinstance(entry, dict)]
    names = {entry["id"]: str(entry.get("name")) for entry in categories if type(entry.get("id")) is int}
    # detectron2 sorts the classes by category id.
    classes = tuple(names[number] for number in sorted(names))
    number, total = count_masks(objects)
    has_masks = 0 < 2 * number >= total
    if 0 < number < total:
        effect = "the others get the rectangle of their box as a mask" if has_masks else "all are read as boxes"
        notes.append(f"{number:,} of {total:,} objects have masks, so {effect}")
    notes += compare_splits({split: (content, images) for split, (content, _, images) in parts.items()})
    return Dataset(source, name, splits, sizes, classes, has_masks, tuple(notes))


def detect_format(source: Path) -> tuple[str, list[Path], Path]:
    """Detect the format of a dataset from the names and signatures of its files.

    Returns:
        The format, the annotation files, and the root folder of the dataset.

    Raises:
        ConfigError: If the path does not exist, or if its format is unknown or ambiguous.
    """
    if not source.exists():
        raise ConfigError(f"There is no file or folder '{source}'. Check the path.")
    root = source.parent if source.is_file() or source.name == "Annotations" else source
    found = defaultdict(list)
    for path in [source] if source.is_file() else _walk(root):
        found[_file_format(path)].append(path)
    unknown = found.pop(None, [])
    if not found:
        formats = "*.json files of COCO or LabelMe, data.yaml of YOLO, or *.xml files of Pascal VOC or CVAT"
        raise ConfigError(f"'{source}' has no annotations of a known format. Use {formats}.")
    if len(found) > 1:
        each = " and ".join(f"{name} ({files[0].relative_to(root)})" for name, files in found.items())
        raise ConfigError(f"'{source}' has several formats: {each}. Give the file or the folder of one format.")
    name, files = found.popitem()
    if source.is_file() and name in _FILE_PER_IMAGE:
        raise ConfigError(f"'{source}' is a {name} file of one image. Give the folder of the dataset.")
    if name == "YOLO":
        # Other YAML files are not annotations, so they are not reported as damaged.
        return name, files, root
    stems = {path.stem for path in unknown if path.suffix.lower() in IMAGE_SUFFIXES} if name in _FILE_PER_IMAGE else ()
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
    """Read a COCO file. The list of annotations may be absent, as in COCO's test images.

    Raises:
        ConfigError: If the file is missing, is not JSON, or lacks a list of images or categories.
    """
    try:
        dataset = read_json(path, what="annotation file")
    except ConfigError as error:
        raise ConfigError(_wrong_format(path) or str(error)) from error
    content = dataset if isinstance(dataset, dict) else {}
    # A missing list of annotations is not replaced by an empty list, because the evaluation would then give AP nan.
    lists = content.get("images"), content.get("categories"), content.get("annotations", [])
    if not all(isinstance(entries, list) for entries in lists) or not lists[0] or not lists[1]:
        raise ConfigError(
            _wrong_format(path)
            or f"'{path}' is not a COCO annotation file. Add the lists of images, annotations and categories."
        )
    return dataset


def _wrong_format(path: str | Path) -> str:
    """Return an error message for a path that is not a COCO file, or an empty string if its format is unknown."""
    try:
        name = _file_format(Path(path)) if Path(path).is_file() else detect_format(Path(path))[0]
    except ConfigError:
        return ""
    if name == "COCO":
        return f"'{path}' is a folder. Name the annotation file in it." if Path(path).is_dir() else ""
    return name and f"'{path}' is {name}, not a COCO file. Use 'vil train' or 'vil check', which read this format."


# -- files -----------------------------------------------------------------------------------------


def _walk(root: Path) -> list[Path]:
    """Return all files in a folder, sorted, except hidden files and files of training runs.

    Links are followed, and each folder is visited once.
    """
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


def _file_format(path: Path) -> str | None:
    """Return the format of an annotation file, or None if it is unknown.

    The beginning and the end of the file are searched first. If they have no signature, the whole file is searched.
    """
    signatures = _SIGNATURES.get(path.suffix.lower(), ())
    if not signatures or not path.is_file():
        return None

    with path.open("rb") as file:
        ends = file.read(_NUM_SIGNATURE_BYTES)
        file.seek(max(path.stat().st_size - _NUM_SIGNATURE_BYTES, 0))
        ends += b"\n" + file.read()
    for is_whole in (False, True):
        # UTF-16 has a zero byte next to each ASCII letter.
        content = (path.read_bytes() if is_whole else ends).replace(b"\0", b"")
        for name, pattern in signatures:
            if re.search(pattern, content):
                return name
    return None


class _ImageIndex:
    """An index of the images in the folder ``root``, which finds the image of an annotation file."""

    def __init__(self, root: Path) -> None:
        self.by_name, self.by_stem = defaultdict(list), defaultdict(list)
        for path in _walk(root):
            if path.suffix.lower() in IMAGE_SUFFIXES:
                self.by_name[path.name].append(path)
                self.by_stem[path.stem].append(path)
        self.annotation_of: dict[Path, tuple[Path, str]] = {}

    def find(self, annotation: Path, name: str) -> Path:
        """Return the path of the image of an annotation file.

        Files are often moved or renamed after annotation. If the image is not in its place, the search continues with
        images that have the same name, or the stem of the annotation file. The image whose path has most in common
        with the expected path is chosen: first at the end of the path, then at its beginning.

        Args:
            annotation: The annotation file.
            name: The image path in the annotation file.

        Returns:
            The path of the image. If the image is missing, its expected path.

        Raises:
            ConfigError: If several images match, or if the image already has another annotation.
        """
        named = Path(os.path.normpath(annotation.parent / name.replace("\\", "/")))
        found = [named] if named.is_file() else self.by_name.get(named.name) or self.by_stem.get(annotation.stem)
        if not found or len(found) > 1:
            parts = tuple("JPEGImages" if part == "Annotations" else part for part in named.with_suffix("").parts)
            if not found:
                return Path(*parts).with_name(named.name)
            in_common = defaultdict(list)
            for path in found:
                own = path.with_suffix("").parts
                at_end, at_start = os.path.commonprefix([own[::-1], parts[::-1]]), os.path.commonprefix([own, parts])
                in_common[len(at_end), len(at_start)].append(path)
            found = in_common[max(in_common)]
            if len(set(map(os.path.realpath, found))) > 1:
                raise ConfigError(
                    f"The image {name!r} of '{annotation}' matches both '{found[0]}' and '{found[1]}'. Rename or "
                    "remove all but one."
                )
        other, other_name = self.annotation_of.setdefault(found[0], (annotation, name))
        if (other, other_name) != (annotation, name):
            raise ConfigError(
                f"The image '{found[0]}' has two annotations: {other_name!r} in '{other}' and {name!r} in "
                f"'{annotation}'. Add the missing image, or remove one annotation."
            )
        return found[0]

    def num_unannotated(self, annotations: list[Path]) -> int:
        """Return the number of images without an annotation file."""
        stems = {path.stem for path in annotations} | {path.stem for path in self.annotation_of}
        return sum(len(paths) for stem, paths in self.by_stem.items() if stem not in stems)


def _split_of(folder: Path, stem: str = "") -> str | None:
    """Return the split from a word of a file name (instances_val2017) or from a folder name (valid/), or None."""
    words = [*re.split("[^a-z]+", stem.lower()), *(part.lower() for part in reversed(folder.parts))]
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def _number(text: Any, location: str) -> float:
    try:
        number = float(text)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{location}: {text!r} is not a number. Correct the value.")
    return number


def _xml(path: Path) -> ElementTree.Element:
    # This parser is safe: it loads no external files, and expat limits the expansion of entities.
    try:
        return ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise ConfigError(f"'{path}' is not XML: {error}. Repair or remove it.") from error


# -- COCO ------------------------------------------------------------------------------------------


def _find_coco(files: list[Path], root: Path) -> _Parts:
    """Return the COCO files of a folder by the splits in their names, with their image folders."""
    # COCO's other files have captions, keypoints and panoptic segments of the same images.
    files = [path for path in files if path.stem.startswith("instances")] or files
    parts = {}
    for path in files:
        split = (len(files) > 1 and _split_of(path.parent.relative_to(root), path.stem)) or "train"
        if split in parts:
            raise ConfigError(
                f"'{root}' has several COCO files for {split}: '{parts[split][1]}' and '{path}'. Remove one of them."
            )
        content = read_coco(path)
        names = [str(entry.get("file_name")) for entry in content["images"][:5] if isinstance(entry, dict)]
        bases = [base / images for base in (path.parent, path.parent.parent) for images in ("", "images")]
        folders = [base / name for base in bases for name in ("", path.stem.removeprefix("instances_"), split)]
        found = [folder for folder in folders if any((folder / name).is_file() for name in names)]
        if not found:
            raise ConfigError(
                f"Cannot find the images of '{path}', such as '{', '.join(names[:1])}'. Put them next to the file, or "
                "in a folder named images, like the split, or like the file."
            )
        parts[split] = content, path, found[0]
    return parts


def _split_by_hash(source: Path, content: dict[str, Any], fraction: float) -> list[dict[str, Any]]:
    """Split the content of a COCO file in two. The second part has the given fraction of the images."""

    def text(entry: Any, key: str) -> str:
        return str(entry.get(key)) if isinstance(entry, dict) else ""

    def order(image: Any) -> tuple[str, str]:
        name = text(image, "file_name")
        return hashlib.sha256(PurePosixPath(name).name.encode()).hexdigest(), name

    images, objects = content["images"], content.get("annotations", [])
    if len(images) < 2:
        raise ConfigError(f"'{source}' has only one image. Add another, because training and validation need one each.")
    number = min(max(round(fraction * len(images)), 1), len(images) - 1)
    chosen = {text(image, "id") for image in sorted(images, key=order)[:number]}
    return [
        content
        | {"images": [image for image in images if (text(image, "id") in chosen) is is_val]}
        | {"annotations": [entry for entry in objects if (text(entry, "image_id") in chosen) is is_val]}
        for is_val in (False, True)
    ]


# -- the other formats -----------------------------------------------------------------------------


def _to_coco(source: Path, read: _Read, notes: list[str]) -> _Parts:
    records, classes, skipped = read
    notes += [f"{reason}: {count:,} skipped" for reason, count in sorted(skipped.items()) if count]
    objects = [one for record in records for one in record.objects]
    classes = classes or sorted({one["label"] for one in objects})
    if not classes:
        details = f" ({'; '.join(notes)})" if notes else ""
        raise ConfigError(f"'{source}' has {len(records)} images, but no object{details}. Add annotations.")
    ids = {label: index for index, label in enumerate(classes, start=1)}
    categories = [{"id": index, "name": label} for label, index in ids.items()]
    files = {record.file: Path(os.path.abspath(record.file)) for record in records}
    root, parts = Path(os.path.commonpath([file.parent for file in files.values()])), {}
    for number, record in enumerate(sorted(records, key=lambda record: files[record.file]), start=1):
        empty = {"images": [], "annotations": [], "categories": categories}
        content, _, _ = parts.setdefault(record.split or "train", (empty, None, root))
        image = {"id": number, "file_name": files[record.file].relative_to(root).as_posix()}
        content["images"].append(image | dict(zip(("height", "width"), record.size or (), strict=False)))
        for one in record.objects:
            if not one["label"]:
                raise ConfigError(f"An object in '{record.file}' has no class. Add its class.")
            entry = {"id": len(content["annotations"]) + 1, "image_id": number, "category_id": ids[one["label"]]}
            entry |= {"bbox": one["bbox"], "area": one["bbox"][2] * one["bbox"][3], "iscrowd": one["iscrowd"]}
            if one.get("segmentation"):
                entry |= {"area": sum(map(_area, one["segmentation"])), "segmentation": one["segmentation"]}
            content["annotations"].append(entry)
    return parts


def _area(polygon: list[float]) -> float:
    xs, ys = polygon[::2], polygon[1::2]
    return abs(sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs)))) / 2


def _box_object(label: str, left: float, top: float, right: float, bottom: float, iscrowd: int = 0) -> dict[str, Any]:
    return {"label": label, "bbox": [left, top, round(right - left, 4), round(bottom - top, 4)], "iscrowd": iscrowd}


def _polygon_object(label: str, polygons: list[list[float]]) -> dict[str, Any]:
    xs, ys = [x for points in polygons for x in points[::2]], [y for points in polygons for y in points[1::2]]
    return _box_object(label, min(xs), min(ys), max(xs), max(ys)) | {"segmentation": polygons}


def _objects_of(shapes: list[tuple[str, str, Any, list[float]]], skipped: Counter) -> list[dict[str, Any]]:
    """Convert the shapes of an image to objects.

    Args:
        shapes: Tuples with the shape type, the label, the group or None, and the points ``[x0, y0, x1, y1, ...]``.
            Polygons with the same label and group are parts of one object.
        skipped: Counts the skipped shapes.
    """
    objects, groups = [], defaultdict(list)
    for index, (shape_type, label, group, points) in enumerate(shapes):
        if shape_type == "rectangle" and len(points) in (4, 8):
            # A rectangle has two or four corners.
            objects.append(_polygon_object(label, [points]) | {"segmentation": None})
        elif shape_type == "polygon" and len(points) >= 6 and not len(points) % 2:
            groups[label, f"shape {index}" if group is None else group].append(points)
        else:
            has_points = shape_type in ("rectangle", "polygon")
            skipped[f"{shape_type} of {len(points) // 2} points" if has_points else shape_type] += 1
    return objects + [_polygon_object(label, polygons) for (label, _), polygons in groups.items()]


def _read_voc(files: list[Path], root: Path) -> _Read:
    records, skipped, images = [], Counter(), _ImageIndex(root)
    lists = [path for path in _walk(root) if path.parts[-3:-1] == ("ImageSets", "Main")]
    stems, split_of = {path.stem for path in files}, {}
    # trainval is used only if train or val is missing.
    for name in ("trainval", "train", "val", "test"):
        if name != "trainval" or not {"train", "val"} <= {path.stem for path in lists}:
            text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in lists if path.stem == name)
            lines = [line.strip() for line in text.split("\n") if line.strip()]
            split_of |= {line if line in stems else line.split()[0]: _SPLITS[name] for line in lines}
    missing = split_of.keys() - stems
    # The annotations of test images are often not published.
    skipped["test images without annotations"] += sum(split_of[name] == "test" for name in missing)
    if missing := [name for name in missing if split_of[name] != "test"]:
        raise ConfigError(f"'{root}' has no {min(missing)}.xml, which ImageSets/Main lists. Add the file.")
    for path in files:
        if split_of and path.stem not in split_of:
            skipped["annotation files that ImageSets/Main does not list"] += 1
            continue
        annotation, objects = _xml(path), []
        for entry in annotation.findall("object"):
            label = (entry.findtext("name") or "").strip()
            sides = [(side, entry.findtext(f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax")]
            left, top, right, bottom = (_number(text, f"{path}: {side} of {label!r}") for side, text in sides)
            # Pixels are counted from 1, and the box includes the last pixel. Some programs count from 0 and write 0.
            is_difficult = (entry.findtext("difficult") or "").strip() == "1"
            objects.append(_box_object(label, max(left - 1, 0), max(top - 1, 0), right, bottom, int(is_difficult)))
        sides = [(side, annotation.findtext(f"size/{side}") or 0) for side in ("height", "width")]
        size = tuple(int(_number(text, f"{path}: {side}")) for side, text in sides)
        # The file name in the annotation is often outdated, so an image with the stem of the annotation has priority.
        name = (annotation.findtext("filename") or "").strip() or f"{path.stem}.jpg"
        file = images.find(path, f"{path.stem}{Path(name).suffix}" if path.stem in images.by_stem else name)
        split = split_of.get(path.stem) or _split_of(path.relative_to(root).parent)
        records.append(_Record(file, split, size if min(size) > 0 else None, objects))
    skipped[_UNANNOTATED] += images.num_unannotated(files)
    return records, None, skipped


def _read_labelme(files: list[Path], root: Path) -> _Read:
    records, skipped, images = [], Counter(), _ImageIndex(root)
    for path in files:
        try:
            content, shapes = read_json(path), []
            for shape in content["shapes"]:
                label, shape_type = str(shape["label"]), shape.get("shape_type") or "polygon"
                # LabelMe's converters skip this label.
                shape_type = label if label == "__ignore__" else shape_type
                points = [_number(number, f"{path}: {label}") for point in shape["points"] for number in point]
                shapes.append((shape_type, label, shape.get("group_id"), points))
            size, file = (content["imageHeight"], content["imageWidth"]), images.find(path, content["imagePath"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"'{path}' is not a valid LabelMe file: {type(error).__name__} {error}. Repair or remove it."
            ) from error
        records.append(_Record(file, _split_of(path.relative_to(root).parent), size, _objects_of(shapes, skipped)))
    skipped[_UNANNOTATED] += images.num_unannotated(files)
    return records, None, skipped


def _read_cvat(files: list[Path], root: Path) -> _Read:
    if len(files) > 1:
        raise ConfigError(f"'{root}' has several CVAT files, '{files[0].name}' and '{files[1].name}'. Give one file.")
    path, records, skipped, images = files[0], [], Counter(), _ImageIndex(root)
    content = _xml(path)
    if content.find("track") is not None:
        raise ConfigError(f"'{path}' has tracks of a video. Export it from CVAT as 'CVAT for images 1.1'.")
    classes = list(dict.fromkeys(label.findtext("name") for label in content.iterfind("meta//labels/label")))
    for image in content.iter("image"):
        name, subset, shapes = image.get("name") or "", image.get("subset") or "", []
        for shape in image:
            location, label = f"{path}: {shape.tag} in {name}", shape.get("label")
            corners = [shape.get(side) for side in ("xtl", "ytl", "xbr", "ybr")] if shape.tag == "box" else []
            points = re.split("[;,]", shape.get("points") or "") if shape.tag == "polygon" else corners
            shape_type = {"box": "rectangle"}.get(shape.tag, shape.tag)
            if _number(shape.get("rotation") or 0, location):
                shape_type = f"rotated {shape_type}"
            if label not in classes and points:
                raise ConfigError(f"{location} has the unknown label {label!r}. Add it to the labels of the file.")
            # Group 0 means no group.
            group = shape.get("group_id") if shape.get("group_id") != "0" else None
            shapes.append((shape_type, label, group, [_number(point, location) for point in points]))
        size = tuple(int(_number(image.get(side), f"{path}: {side} of {name}")) for side in ("height", "width"))
        file = images.find(path, f"{subset}/{name}" if subset else name)
        records.append(_Record(file, _split_of(Path(subset)), size, _objects_of(shapes, skipped)))
    return records, classes, skipped


def _read_yolo(files: list[Path], root: Path) -> _Read:
    if len(files) > 1:
        raise ConfigError(f"'{root}' has several YOLO files, '{files[0].name}' and '{files[1].name}'. Give one file.")
    path = files[0]
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' is not YAML: {' '.join(str(error).split())}. Repair it.") from error
    names = data.get("names") if isinstance(data, dict) else None
    if isinstance(names, dict) and names.keys() == set(range(len(names))):
        names = [names[index] for index in range(len(names))]
    if not isinstance(names, list) or not names or not data.get("nc", len(names)) == len(names) == len(set(names)):
        raise ConfigError(f"'{path}' has invalid 'names'. List nc different names, or map 0, 1, ... to names.")
    names, found = list(map(str, names)), []
    # The path may be outdated if the dataset was moved from another machine.
    given = path.parent / str(data.get("path") or "")
    for split in ("train", "val", "test"):
        found += [(split, file) for file in _yolo_images(path, given if given.is_dir() else path.parent, data, split)]
    labels = [_yolo_label(file) for _, file in found]
    if not any(label.is_file() for label in labels):
        raise ConfigError(
            f"None of the {len(found)} images of '{path}' has a label file. Add label files"
            f"{f', such as {str(labels[0])!r}' if found else ''}."
        )
    records, sizes = [], read_sizes([file for _, file in found])
    for (split, file), label, (size, _) in zip(found, labels, sizes, strict=True):
        # The dataset check reports unreadable images later.
        lines = label.read_text(encoding="utf-8", errors="replace").split("\n") if size and label.is_file() else []
        rows = [(line.split(), f"{label}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
        has_points = data.get("kpt_shape") is not None
        objects = [_yolo_object(row[:5] if has_points else row, names, size, location) for row, location in rows]
        records.append(_Record(file, split, size, objects))
    folders = {label.parent for (_, file), label in zip(found, labels, strict=True) if label.parent != file.parent}
    texts = {Path(folder, name) for folder in folders if folder.is_dir() for name in os.listdir(folder)}
    unused = [path for path in texts - set(labels) if path.suffix == ".txt" and path.name != _CLASS_NAMES_FILE]
    return records, names, Counter({"label files without an image": len(unused)})


def _yolo_images(path: Path, root: Path, data: dict[str, Any], split: str) -> list[Path]:
    """Return the images of a split, which ``data`` gives as folders, files or text files with lists of images."""
    images, entries = [], data.get(split) or []
    for entry in entries if isinstance(entries, list) else [entries]:
        # Roboflow writes ../train/images for a folder next to data.yaml, and may list a test split that does not exist.
        candidates = [root / str(entry), root / str(entry).removeprefix("../")]
        found = next((candidate for candidate in candidates if candidate.exists()), None)
        if found is None and split != "test":
            raise ConfigError(
                f"'{path}' has {str(entry)!r} for {split}, but '{candidates[0]}' does not exist. Correct it."
            )
        if found is None or found.suffix == ".txt":
            lines = found.read_text(encoding="utf-8").split("\n") if found else []
            lines = [line.strip() for line in lines if line.strip()]
            images += [(found.parent if line.startswith("./") else root) / line for line in lines]
        else:
            images += [file for file in _walk(found) if file.suffix.lower() in IMAGE_SUFFIXES]
    return images


def _yolo_label(image: Path) -> Path:
    """Return the label file of an image.

    The last images/ in its path is replaced by labels/. If only a label file next to the image exists, it is used.
    """
    folder = re.sub("^(.*/|)images(?=/|$)", r"\1labels", image.parent.as_posix())
    label, adjacent = Path(folder, f"{image.stem}.txt"), image.with_suffix(".txt")
    return label if label.is_file() or not adjacent.is_file() else adjacent


def _yolo_object(row: list[str], names: list[str], size: tuple[int, int], location: str) -> dict[str, Any]:
    height, width = size
    index, *values = (_number(word, location) for word in row)
    if index not in range(len(names)):
        raise ConfigError(f"{location}: class {row[0]} does not exist. Use 0 to {len(names) - 1}, as in data.yaml.")
    label = names[int(index)]
    if len(values) == 4:
        x, y, w, h = values
        left, top = round((x - w / 2) * width, 2), round((y - h / 2) * height, 2)
        return _box_object(label, left, top, left + round(w * width, 2), top + round(h * height, 2))
    if len(values) < 6 or len(values) % 2:
        raise ConfigError(f"{location}: {len(row)} numbers are not an object. Write a class with a box or a polygon.")
    return _polygon_object(label, [[round(value * size[1 - i % 2], 2) for i, value in enumerate(values)]])


_READERS = {"YOLO": _read_yolo, "Pascal VOC": _read_voc, "LabelMe": _read_labelme, "CVAT": _read_cvat}
