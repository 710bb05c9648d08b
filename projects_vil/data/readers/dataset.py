"""Convert a dataset in any supported format to COCO files, and account for all of its files.

There is one reader for each format because no library supports all formats without loss. supervision converts polygons
to bitmaps and does not read CVAT. globox and labelformat do not read polygons of LabelMe and CVAT, and the boxes of
Pascal VOC are off by one pixel. datumaro requires OpenCV below 5.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from backbones.errors import GENERATOR, check_replaceable, counted
from projects_vil.data.detection_utils import read_sizes
from projects_vil.data.readers import cvat, labelme, via, voc, yolo
from projects_vil.data.readers.coco import Parts, entries_of, find_coco
from projects_vil.data.readers.detect import detect_format
from projects_vil.data.readers.index import FileIndex, split_of
from projects_vil.data.readers.shapes import Annotations, in_image
from projects_vil.data.readers.splits import compare_splits, paths_of, split_by_hash
from projects_vil.data.segmentation import count_masks
from projects_vil.utils import paused_garbage_collection

VAL_FRACTION = 0.2
# The key in "info" of a converted COCO file for the path of the original dataset.
SOURCE = "source"
_READERS = {"YOLO": yolo.read, "Pascal VOC": voc.read, "LabelMe": labelme.read, "CVAT": cvat.read, "VIA": via.read}


@dataclass(frozen=True)
class Dataset:
    """A dataset as COCO files.

    Attributes:
        source: The path of the original dataset.
        format: ``"COCO"``, ``"YOLO"``, ``"Pascal VOC"``, ``"LabelMe"``, ``"CVAT"`` or ``"VIA"``.
        splits: A dict from the split to its annotation file and image folder. It has ``"train"``, and ``"val"`` and
            ``"test"`` if the dataset has them.
        sizes: A dict from the split to the number of images.
        classes: The class names in the order of the category ids. The classes of a detector have the same order.
        has_masks: Whether at least half of the objects that are not crowds have a mask.
        notes: Messages about choices, and about skipped entries and files.
        unused: A dict from a reason to the files of the dataset that are not used for it.
    """

    source: Path
    format: str
    splits: dict[str, tuple[Path, Path]]
    sizes: dict[str, int]
    classes: tuple[str, ...]
    has_masks: bool
    notes: tuple[str, ...] = ()
    unused: dict[str, list[str]] = field(default_factory=dict)

    def line(self) -> str:
        """Return a summary, such as ``mine is Pascal VOC: 364 images, 3 classes, boxes; train 291, val 73``."""
        numbers = f"{counted(sum(self.sizes.values()), 'image')}, {counted(len(self.classes), 'class')}"
        what = f"{numbers}, boxes{' and masks' * self.has_masks}"
        sizes = ", ".join(f"{split} {size:,}" for split, size in self.sizes.items())
        unused = [f"{reason}: {len(files):,} (first: {files[0]})" for reason, files in self.unused.items()]
        return "; ".join([f"{self.source} is {self.format}: {what}", sizes, *self.notes, *unused])


@paused_garbage_collection()
def read_dataset(
    source: str | Path,
    folder: str | Path,
    *,
    val: float | None = None,
    images: str | Path | None = None,
    contents: dict[str, Any] | None = None,
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
        contents: A dict that receives the content of the COCO file of each split, so that the caller need not read it.
        extracted: The folder for images that exist only in the annotation files. By default ``folder``/images.

    Returns:
        The dataset.

    Raises:
        ConfigError: If the format is unknown or ambiguous, if a file is invalid, or if ``val`` is out of range or the
            dataset already has a validation split.
    """
    if val is not None and not 0 <= val < 1:
        raise ConfigError(f"val_fraction is {val}. Give a fraction between 0 and 1, such as {VAL_FRACTION}.")
    source = Path(source)
    name, files, index, others = detect_format(source, None if images is None else Path(images))
    if name == "COCO":
        (parts, unused), notes = find_coco(files, index), []
    else:
        found = _READERS[name](files, index)
        parts = _to_coco(source, found, index, os.path.abspath(extracted or Path(folder, "images")))
        unused, notes = found.unused, found.notes
    unused |= _unused_images(source, parts, index)
    unused["JSON or XML files that are not annotations"] = others
    parts = parts if len(parts) > 1 else {"train": next(iter(parts.values()))}
    if "train" not in parts:
        raise ConfigError(f"'{source}' has {' and '.join(parts)} images, but no training images. Add a training split.")
    content, _, root = parts["train"]
    if "val" not in parts and val != 0:
        halves = split_by_hash(source, content, VAL_FRACTION if val is None else val)
        parts |= {split: (half, None, root) for split, half in zip(("train", "val"), halves, strict=True)}
        notes.insert(0, "validation images chosen by a hash of their file names")
    elif val:
        number = len(parts["val"][0]["images"])
        raise ConfigError(f"'{source}' already has a validation split of {number} images. Leave out val_fraction.")
    splits = _write(source, Path(folder), parts, set(map(os.path.realpath, files)), contents)
    sizes = {split: len(parts[split][0]["images"]) for split in splits}
    # detectron2 sorts the classes by category id. The dataset check reads the text of an id as an integer.
    categories = [entry for entry in entries_of(content, "categories") if str(entry.get("id")).isdigit()]
    classes = tuple(str(entry.get("name")) for entry in sorted(categories, key=lambda entry: int(entry["id"])))
    unused = {reason: paths for reason, paths in unused.items() if paths}
    number, total = count_masks(entry for content, _, _ in parts.values() for entry in content.get("annotations", ()))
    has_masks = 0 < 2 * number >= total
    if 0 < number < total:
        effect = "the others get the rectangle of their box as a mask" if has_masks else "all are read as boxes"
        notes.append(f"{number:,} of {total:,} objects have masks, so {effect}")
    notes += compare_splits(parts)
    return Dataset(source, name, splits, sizes, classes, has_masks, tuple(notes), unused)


def _write(source: Path, folder: Path, parts: Parts, read: set[str], contents: dict | None) -> dict[str, tuple]:
    """Write the contents of the splits that have no file yet, and return the file and image folder of each split."""
    # "info" comes first because check_replaceable reads only the beginning of a file. Error messages name the source.
    info = {"info": {"description": GENERATOR, SOURCE: os.path.abspath(source)}}
    written = {split: folder / f"{split}.json" for split, (_, path, _) in parts.items() if path is None}
    for path in written.values():
        check_replaceable(path, advice="Choose another output directory.")
        if os.path.realpath(path) in read:
            raise ConfigError(f"'{path}' belongs to the dataset. Choose another output directory.")
    splits = {}
    for split in [split for split in ("train", "val", "test") if split in parts]:
        content, path, images = parts[split]
        if path is None:
            path, content = written[split], info | content | info
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as partial:
                partial.write_text(json.dumps(content), encoding="utf-8")
        if contents is not None:
            contents[split] = content
        splits[split] = path, images
    return splits


def _unused_images(source: Path, parts: Parts, index: FileIndex) -> dict[str, list[str]]:
    """Return the images of a dataset that no annotation names, and the files of unsupported types."""
    used = {path for content, _, root in parts.values() for path in paths_of(content, root)}
    below = tuple(str(root) for _, _, root in parts.values()) if source.is_file() else ""
    images = [path for path in index.images if path not in used and path.startswith(below)]
    unused = {"images that the annotations do not name": images}
    unsupported = [path for path in index.unsupported if path not in used]
    if types := Counter(os.path.splitext(path)[1].lower() for path in unsupported):
        text = ", ".join(f"{suffix or 'none'} ({number:,})" for suffix, number in types.most_common())
        unused[f"files of an unsupported type, {text}"] = unsupported
    return unused


def _to_coco(source: Path, found: Annotations, index: FileIndex, folder: str) -> Parts:
    """Find the images of a dataset, and return the content of its COCO files.

    Images that exist only in an annotation file are written to ``folder``.
    """
    # Of several files with the annotations of many images, each may be named after its split.
    annotations = {record.annotation for record in found.records if record.names and not record.stem}
    named = {path: split_of((), Path(path).stem) for path in annotations}
    if len({*named.values()}) > 1:
        for record in found.records:
            record.split = record.split or named.get(record.annotation)
    index.find_images([record for record in found.records if record.file is None])
    for record in found.records:
        record.file = record.file or found.write_image(record.annotation, index, folder)
        if record.file is None and record.stem:
            found.unused["annotation files whose image is missing"].append(record.annotation)
        elif record.file is None:
            found.unused["missing images that an annotation file names"].append(record.names[0])
    records = sorted((record for record in found.records if record.file), key=lambda record: Path(record.file))
    unsized = [record for record in records if record.size is None]
    for record, (size, _) in zip(unsized, read_sizes([record.file for record in unsized]), strict=True):
        record.size = size
    for record in records:
        objects = [in_image(one, record.size) if "mask" in one else one for one in record.objects if one["label"]]
        found.skipped["objects without a class"] += [record.annotation] * (len(record.objects) - len(objects))
        found.skipped["masks without pixels in the image"] += [record.annotation] * objects.count(None)
        record.objects = [one for one in objects if one]
    skipped = sorted(found.skipped.items())
    found.notes += [f"{reason}: {len(paths):,} skipped (first: {paths[0]})" for reason, paths in skipped if paths]
    classes = [name for name in found.classes or () if name]
    classes = classes or sorted({one["label"] for record in records for one in record.objects})
    if not any(record.objects for record in records):
        unused = [f"{reason}: {len(files)}" for reason, files in found.unused.items() if files]
        details = "; ".join([*found.notes, *unused]) or "the annotations are empty"
        missing = "no object in its images" if records else "no image of its annotations"
        raise ConfigError(f"'{source}' has {missing} ({details}). Add annotations or images.")
    ids = {label: index for index, label in enumerate(classes, start=1)}
    categories = [{"id": index, "name": label} for label, index in ids.items()]
    root, parts = Path(os.path.commonpath([os.path.dirname(record.file) for record in records])), {}
    for number, record in enumerate(records, start=1):
        split = found.listed.get(record.annotation) or record.split or index.split_of(record.annotation, record.file)
        empty: dict[str, Any] = {"images": [], "annotations": [], "categories": categories}
        content, _, _ = parts.setdefault(split or "train", (empty, None, root))
        image = {"id": number, "file_name": Path(record.file).relative_to(root).as_posix()}
        content["images"].append(image | dict(zip(("height", "width"), record.size or (), strict=False)))
        for one in record.objects:
            entry = {"id": len(content["annotations"]) + 1, "image_id": number, "category_id": ids[one.pop("label")]}
            content["annotations"].append(entry | one)
    return parts
