"""Detect the format of a dataset, convert it to COCO files, and account for all of its files.

There is one reader for each format because no library supports all formats without loss. supervision converts polygons
to bitmaps and does not read CVAT. globox and labelformat do not read polygons of LabelMe and CVAT, and the boxes of
Pascal VOC are off by one pixel. datumaro requires OpenCV below 5.
"""

import os
import re
import unicodedata
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backbones import ConfigError
from backbones.errors import GENERATOR, check_replaceable, counted, first_of, pip_install
from projects_vil.data.image_files import is_image, read_sizes
from projects_vil.data.readers import cvat, labelme, via, voc, yolo
from projects_vil.data.readers.coco import find_coco
from projects_vil.data.readers.index import ANNOTATION_FOLDERS, FileIndex, Record, split_of, stem_of
from projects_vil.data.readers.shapes import Annotations
from projects_vil.data.segmentation import count_masks, in_image
from projects_vil.data.splits import Parts, compare_splits, entries_of, find_copies, images_of, save_coco, split_by_hash
from projects_vil.files import paused_garbage_collection, read_json

# The key in "info" of a converted COCO file for the path of the original dataset.
SOURCE = "source"
_READERS = {"YOLO": yolo.read, "Pascal VOC": voc.read, "LabelMe": labelme.read, "CVAT": cvat.read, "VIA": via.read}
# Other formats by a regular expression for their file name in lower case, a line end and the beginning of the file
# fmt: off
_OTHER_FORMATS = {
    "CSV": r"\A.*\.[ct]sv|\.(?i:jpe?g|png)[ ,](\d+,){3}\d", "TFRecord": r"\A.*\.tfrecord", "Parquet": r"\A.*\.parquet",
    "JSON Lines": r"\A.*\.(jsonl|ndjson)", "Label Studio's JSON": '"[a-z]+labels"', "BDD100K": '"box2d"',
    "Supervisely": '"classTitle"', "VoTT": '"boundingBox"', "CreateML": r'"coordinates"\s*:\s*\{',
    "COCO's results of a detector": r'(?s)\A[^\n]*\n\[\s*\{\s*"(image|category)_id".*"score"', "VIA 3": r'"fid_list"',
    "KITTI": r"^[a-zA-Z]\w*( -?[\d.]+){14}", "WIDER FACE": r"\.jpg\s+\d+\s([\d.]+ ){4}", "Datumaro": r'"label_id"',
    "VisDrone, MOT or ICDAR": r"^\d+,(-?[\d.]+,){6,}", "JSON or XML in a text file": r"\A.*\.txt\n\s*[{\[<]",
    "Cityscapes": r'(?s)"imgHeight".*"polygon"', "an archive to unpack": r"\A.*\.(zip|tar|t?gz|bz2|xz|7z|rar)\n",
    "COCO without images or categories": r'(?s)"annotations".*"image_id"',
}
# fmt: on
_ADVICE = {"COCO without images or categories": "Add these lists.", "an archive to unpack": "Unpack it."}
_KNOWN = "*.json of COCO, LabelMe or VIA, data.yaml or classes.txt of YOLO, or *.xml of Pascal VOC or CVAT"


@dataclass(frozen=True)
class Dataset:
    """A dataset as COCO files.

    Attributes:
        source: The path of the original dataset.
        format: ``"COCO"``, ``"YOLO"``, ``"Pascal VOC"``, ``"LabelMe"``, ``"CVAT"`` or ``"VIA"``.
        splits: A dict from the split to its annotation file and image folder. It has ``"train"``, and ``"val"`` and
            ``"test"`` if the dataset has them.
        contents: A dict from the split to the content of its annotation file. Clear it to free its memory.
        classes: The class names in the order of the category ids. The classes of a detector have the same order.
        has_masks: Whether at least half of the objects that are not crowds have a mask.
        notes: Messages about choices, and about skipped entries and files.
        unused: A dict from a reason to the files of the dataset that are not used for it.
        copies: A dict from each image file that has an equal file to the first of these files.
    """

    source: Path
    format: str
    splits: dict[str, tuple[Path, Path]]
    contents: dict[str, dict[str, Any]] = field(repr=False)
    classes: tuple[str, ...]
    has_masks: bool
    notes: tuple[str, ...] = ()
    unused: dict[str, list[str]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of images by split."""
        return {split: len(content["images"]) for split, content in self.contents.items()}

    def line(self) -> str:
        """Return ``mine is Pascal VOC: 364 images, 3 classes, boxes; train 291, val 73``, and a line for each note."""
        used = sum(self.sizes.values())
        numbers = f"{counted(used, 'image')}, {counted(len(self.classes), 'class')}"
        sizes = ", ".join(f"{split} {size:,}" for split, size in self.sizes.items())
        first = f"{self.source} is {self.format}: {numbers}, boxes{' and masks' * self.has_masks}; {sizes}"
        # A missing image may be counted twice: in a list, and with its label file.
        missing = max([len(paths) for reason, paths in self.unused.items() if "missing" in reason], default=0)
        number = f"warning: {missing:,} of {missing + used:,} images are missing"
        advice = [f"{number}. Add them, or give their folder with --images"] * (missing > 0)
        if any(".hei" in reason for reason in self.unused):
            advice.append(f"warning: HEIC photos are not used. {pip_install('pillow-heif')}")
        return "\n    ".join([first, *self.notes, *_counts(self.unused), *advice])


def _counts(files: dict[str, list[str]]) -> list[str]:
    return [f"{reason}: {len(paths):,} (first: {paths[0]})" for reason, paths in files.items() if paths]


@paused_garbage_collection()
def read_dataset(
    source: str | Path,
    folder: str | Path,
    *,
    val: float | None = None,
    images: str | Path | None = None,
    extracted: str | Path | None = None,
) -> Dataset:
    """Detect the format of a dataset, and return it as COCO files.

    COCO files with a validation split are used without a copy if all images are found under their names. For other
    datasets, COCO files are written to ``folder``. The files are deterministic. Images are not copied.

    Args:
        source: A COCO or VIA file, a ``data.yaml`` file of YOLO, an XML file of CVAT, or a folder in a known format.
        folder: The folder for the written files. It is created if necessary.
        val: The fraction of the training images to use for validation if the dataset has no validation split. The
            images with the lowest hashes of their file names are used, independently of their order. None is 0.2, and 0
            makes no validation split.
        images: The folder with the images, if it is not the folder of the dataset.
        extracted: The folder for images that exist only in the annotation files. By default ``folder``/images.

    Returns:
        The dataset.

    Raises:
        ConfigError: If the format is unknown or ambiguous, if a file is invalid, or if ``val`` is out of range or the
            dataset already has a validation split.
    """
    if val is not None and not 0 <= val < 1:
        raise ConfigError(f"val_fraction is {val}. Give 0 or a fraction below 1.")
    if images is not None and not Path(images).is_dir():
        raise ConfigError(f"'{images}' (--images) is not a folder. Give the folder with the images.")
    source = Path(source)
    name, files, index = _detect_format(source, images)
    extracted = os.path.abspath(extracted or Path(folder, "images"))
    found = Annotations()
    records = [*_READERS[name](files, index, found)] if name in _READERS else None
    if found.errors:
        first, *others = found.errors
        more = f" More errors are in {first_of([repr(path) for path in others], 5)}." if others else ""
        raise ConfigError(f"{found.errors[first]}{more}")
    parts = find_coco(files, index, found) if records is None else _to_coco(source, records, found, index, extracted)
    found.unused["text files with labels of YOLO"] = yolo.label_files(index.files) if name != "YOLO" else []
    _count_unused(source, parts, index, {*files, *found.read}, found.unused)
    if len(parts) == 1:
        found.notes += [f"the only images, of {split}, are used as train" for split in parts if split != "train"]
        parts = {"train": next(iter(parts.values()))}
    if "train" not in parts:
        raise ConfigError(f"'{source}' has {' and '.join(parts)} images, but no training images. Add a training split.")
    content, _, root = parts["train"]
    counts = {split: count_masks(part.get("annotations") or ()) for split, (part, _, _) in parts.items()}
    number, total, crowds = map(sum, zip(*counts.values(), strict=True))
    if crowds:
        found.notes.append(f"crowds, which training and evaluation ignore: {crowds:,} of {crowds + total:,} objects")
    if counts["train"][1] == 0:
        text = f"The training images of '{source}' have no objects (crowds do not count). Annotate or correct them"
        # Evaluation and checks need no training images.
        if val != 0:
            raise ConfigError(f"{text}.")
        found.notes.insert(0, f"warning: {text}")
    if counts.get("val", (0, 1))[1] == 0:
        found.notes.insert(0, "warning: the validation images have no objects, so AP is undefined. Annotate them")
    copies = find_copies(parts)
    if "val" not in parts and val != 0:
        halves = split_by_hash(content, root, val, copies)
        if len(halves) < 2:
            raise ConfigError(f"'{source}' has only one image, or copies of one. Add another one for validation.")
        parts |= {split: (half, None, root) for split, half in halves.items()}
        found.notes.insert(0, "validation images chosen by a hash of their file names")
    elif val:
        raise ConfigError(f"'{source}' already has a validation split. Leave out val_fraction.")
    _write(source, Path(folder), parts, set(map(os.path.realpath, files)))
    # detectron2 sorts the classes by category id. The dataset check reads the text of an id as an integer.
    categories = [entry for entry in entries_of(content, "categories") if str(entry.get("id")).isdigit()]
    classes = tuple(str(entry.get("name")) for entry in sorted(categories, key=lambda entry: int(entry["id"])))
    unused = {reason: paths for reason, paths in found.unused.items() if paths}
    has_masks = 0 < 2 * number >= total
    if 0 < number < total:
        effect = "the others get the rectangle of their box as a mask" if has_masks else "all are read as boxes"
        found.notes.append(f"{number:,} of {total:,} objects have masks, so {effect}")
    found.notes += compare_splits(parts, copies)
    # Images inside annotation files may be in a temporary folder.
    notes = tuple(note.replace(extracted, index.root) for note in found.notes)
    splits = {split: parts[split][1:] for split in ("train", "val", "test") if split in parts}
    contents = {split: parts[split][0] for split in splits}
    return Dataset(source, name, splits, contents, classes, has_masks, notes, unused, copies)


def _write(source: Path, folder: Path, parts: Parts, read: set[str]) -> None:
    """Write the splits that have no file yet, and store the paths in ``parts``."""
    # "info" comes first because check_replaceable reads only the beginning of a file. Error messages name the source.
    info = {"info": {"description": GENERATOR, SOURCE: os.path.abspath(source)}}
    written = {split: folder / f"{split}.json" for split, (_, path, _) in parts.items() if path is None}
    for path in written.values():
        check_replaceable(path, advice="Choose another output directory.")
        if os.path.realpath(path) in read:
            raise ConfigError(f"'{path}' belongs to the dataset. Choose another output directory.")
    for split, path in written.items():
        parts[split] = info | parts[split][0] | info, path, parts[split][2]
        save_coco(path, parts[split][0])


def _count_unused(source: Path, parts: Parts, index: FileIndex, read: set[str], unused: dict[str, list[str]]) -> None:
    """Add the images of a dataset that no annotation names, and the other files that are neither read nor counted."""
    used = {path for content, _, root in parts.values() for _, path in images_of(content, root)}
    known = used.union(read, *unused.values())
    below = tuple(os.path.join(root, "") for _, _, root in parts.values()) if source.is_file() else ""
    others = [path for path in index.all_files if path not in known and path.startswith(below)]
    unused["images that the annotations do not name"] += filter(is_image, others)
    unsupported = [path for path in others if not is_image(path)]
    unused[f"files of an unsupported type, {_types(unsupported)}"] += unsupported


def _types(paths: list[str]) -> str:
    types = Counter(os.path.splitext(path)[1].lower() or "no suffix" for path in paths)
    return ", ".join(f"{suffix} ({number:,})" for suffix, number in types.most_common())


def _to_coco(source: Path, records: list[Record], found: Annotations, index: FileIndex, folder: str) -> Parts:
    """Find the images of a dataset, and return the content of its COCO files.

    Images that exist only in an annotation file are written to ``folder``.
    """
    index.find_images([record for record in records if record.file is None])
    for record in [record for record in records if record.is_only and record.file is None]:
        record.file = labelme.write_image(record.annotation, index, folder)
    missing = [record for record in records if record.file is None]
    found.unused["annotation files whose image is missing"] += [r.annotation for r in missing if r.is_only]
    found.unused["missing images that an annotation file names"] += [r.names[0] for r in missing if not r.is_only]
    used = {(record.file, record.split): record for record in reversed(records) if record.file}
    copies = {one.annotation: None for one in records if one.file and used[one.file, one.split] is not one}
    found.unused["copies of an annotation file"] += copies
    records = sorted(used.values(), key=lambda record: Path(record.file))
    unsized = [record for record in records if record.size is None]
    for record, (size, _) in zip(unsized, read_sizes([record.file for record in unsized]), strict=True):
        record.size = size
    for record in records:
        for one in record.objects:
            one["label"] = _class_name(one["label"])
        objects = [in_image(one, record.size) if "mask" in one else one for one in record.objects if one["label"]]
        found.noted["images whose objects need a class"] += [record.file] * (bool(record.objects) and not objects)
        found.noted["skipped objects without a class"] += [record.annotation] * (len(record.objects) - len(objects))
        found.noted["skipped masks without pixels in the image"] += [record.annotation] * objects.count(None)
        record.objects = [one for one in objects if one]
    found.notes += _counts(dict(sorted(found.noted.items())))
    if not any(record.objects for record in records):
        # Datasets in other formats may have a list of class names, as in YOLO.
        for path in index.files:
            if os.path.isfile(path) and not is_image(path) and (name := _other_format(path)):
                found.unused[f"files of {name}, which is not supported"].append(path)
        details = "; ".join([*found.notes, *_counts(found.unused)]) or "the annotations are empty"
        what = f"box or polygon in its {counted(len(records), 'image')}" if records else "image of its annotations"
        advice = "Annotate objects, move label files, unpack archives, or give the folder of the images with --images."
        raise ConfigError(f"'{source}' has no {what} ({details}). {advice}")
    names = filter(None, map(_class_name, found.classes))
    labels = *names, *sorted({one["label"] for record in records for one in record.objects})
    ids = {label: index for index, label in enumerate(dict.fromkeys(labels), start=1)}
    categories = [{"id": index, "name": label} for label, index in ids.items()]
    root, parts = Path(os.path.commonpath([os.path.dirname(record.file) for record in records])), {}
    for number, record in enumerate(records, start=1):
        split = record.split or index.split_of(record.annotation, record.file)
        empty: dict[str, Any] = {"images": [], "annotations": [], "categories": categories}
        content, _, _ = parts.setdefault(split or "train", (empty, None, root))
        image = {"id": number, "file_name": Path(record.file).relative_to(root).as_posix()}
        content["images"].append(image | dict(zip(("height", "width"), record.size or (), strict=False)))
        for one in record.objects:
            entry = {"id": len(content["annotations"]) + 1, "image_id": number, "category_id": ids[one.pop("label")]}
            content["annotations"].append(entry | one)
    return parts


def _class_name(text: str) -> str:
    """Return a class name in NFC and without invisible characters, because names that look equal are one class."""
    return unicodedata.normalize("NFC", re.sub("[\u200b\ufeff]", "", text)).strip()


def _detect_format(source: Path, images: str | Path | None) -> tuple[str, list[str], FileIndex]:
    """Detect the format of a dataset from the content of its files.

    Args:
        source: The file or folder of a dataset.
        images: A folder with its images, if it is not below the folder of the dataset.

    Returns:
        The format, the annotation files, and the index of all files.

    Raises:
        ConfigError: If the path does not exist, or if its format is unknown or ambiguous.
    """
    if not source.exists():
        raise ConfigError(f"There is no file or folder '{source}'. Check the path.")
    source = Path(os.path.abspath(source))
    root = source.parent if source.is_file() else source
    index, found = FileIndex(root, images), defaultdict(list)
    # Other images in a folder of annotations may be masks.
    if root.name.lower() in ANNOTATION_FOLDERS and not any("images" in index.folders_of(f) for f in index.images):
        index = FileIndex(root := root.parent, images)
    below = os.path.join(source, "")
    own = [str(source)] if source.is_file() else [f for f in index.files if f.startswith(below) and os.path.isfile(f)]
    for path in own:
        found[annotation_format(path)].append(path)
    others = [path for path in found.pop(None, []) if path.lower().endswith((".json", ".xml"))]
    if not found:
        darknet = [p for p in own if p.endswith(".data") and re.search(rb"(?m)^\s*train\s*=", Path(p).read_bytes())]
        if labels := darknet or yolo.class_files(own) or [p for p in yolo.label_files(own) if not _other_format(p)][:1]:
            found["YOLO"] = labels
    if not found:
        named = {name: path for path in reversed(own) if not is_image(path) and (name := _other_format(path))}
        if named:
            name, path = min(named.items(), key=lambda item: (item[0] in _ADVICE, item[1]))
            advice = _ADVICE.get(name, "Export or convert it to COCO, YOLO, Pascal VOC, LabelMe, CVAT or VIA.")
            text = f"'{source}' is in a format that is not supported: {name} (first file: '{path}')."
            raise ConfigError(f"{text} {advice}")
        # A file that is not JSON or XML at all has a better message.
        for path in others:
            read_json(path) if path.lower().endswith(".json") else voc.parse_xml(path, Annotations())
        none = "no files, apart from output directories of runs"
        files = f"files of type {_types(own)}, such as '{min(own, key=is_image)}'" if own else none
        raise ConfigError(f"'{source}' has no annotations of a known format. It has {files}. Use {_KNOWN}.")
    stems = {*map(stem_of, index.images)}
    folders = {os.path.dirname(path) for files in found.values() for path in files}
    beside = [p for p in own if "YOLO" not in found and os.path.dirname(p) in folders and stem_of(p) in stems]
    if labels := yolo.label_files(beside):
        found["YOLO"] = labels
    if len(found) > 1:
        each = " and ".join(f"{name} ({os.path.relpath(files[0], root)})" for name, files in found.items())
        advice = "Give the file or the folder of one format, or move the files of the others."
        raise ConfigError(f"'{source}' has several formats: {each}. {advice}")
    name, files = found.popitem()
    # These formats have one annotation file per image.
    is_single, suffix = name in ("LabelMe", "Pascal VOC"), Path(files[0]).suffix.lower()
    damaged = [path for path in others if (is_single and stem_of(path) in stems) or not os.path.getsize(path)]
    if damaged := [path for path in damaged if path.lower().endswith(suffix)]:
        for path in damaged if name == "LabelMe" else ():
            read_json(path)
        raise ConfigError(f"Files that are empty or not {name}: {first_of(damaged, 5)}. Repair or remove them.")
    return name, files, index


def _other_format(path: str) -> str | None:
    """Return the name of the format of a file in a format that is not supported, or None."""
    with open(path, "rb") as file:
        text = f"{os.path.basename(path).lower()}\n{file.read(1 << 16).decode(errors='replace')}"
    return next((name for name, pattern in _OTHER_FORMATS.items() if re.search(pattern, text, re.M)), None)


def annotation_format(path: str) -> str | None:
    """Return the format of an annotation file from its content, or None if it is unknown."""
    # Windows hides the last suffix of a.xml.txt.
    suffix = os.path.splitext(path.lower().removesuffix(".txt"))[1]
    # Opening a pipe would block.
    if suffix not in (".json", ".xml", ".yaml", ".yml") or not os.path.isfile(path):
        return None
    if suffix == ".xml":
        root = re.search(rb"<(?:\w+:)?annotation(s?)[\s/>]", Path(path).read_bytes().replace(b"\0", b""))
        return root and ("CVAT" if root[1] else "Pascal VOC")
    if suffix != ".json":
        return "YOLO" if yolo.settings_of(path) is not None else None
    with open(path, "rb") as file:
        # Without the zero bytes of UTF-16
        head = file.read(4096).replace(b"\0", b"")
    is_object = head.lstrip(b"\xef\xbb\xbf\xff\xfe").lstrip().startswith(b"{")
    name = "COCO" if is_object and re.search(rb'"(images|annotations|categories)"\s*:\s*\[', head) else None
    # Other files are lists, such as the results of a detector. A large file is not parsed twice.
    if not is_object or (name and os.path.getsize(path) > 32 * 2**20):
        return name
    try:
        content = read_json(path)
    except ConfigError:
        # The reader of the format reports the error.
        return name
    # Roboflow writes an empty file for an empty split, which is not used.
    if content.get("images") == [] and split_of((Path(path).parent.name,), Path(path).stem) in ("val", "test"):
        return None
    lists = {key for key, value in content.items() if isinstance(value, list)}
    if "shapes" in lists:
        return "LabelMe"
    return "COCO" if {"images", "categories"} <= lists else "VIA" if via.images_of(content) else None
