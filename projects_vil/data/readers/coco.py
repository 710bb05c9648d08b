"""Read COCO files, find their images, and divide them into splits."""

import contextlib
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from backbones import ConfigError
from projects_vil.data.readers.index import FileIndex, Record, normalized, size_of, split_of
from projects_vil.data.readers.shapes import Annotations, box_object, degrees_of, rotated_box
from projects_vil.data.splits import Part, Parts, divide, entries_of, file_name_of, images_of, with_file_names
from projects_vil.files import SharedRecords, content_hash, like, read_json

# COCO's other annotation files of the same images
_OTHER_FILES = re.compile("(captions|labels|person_keypoints|panoptic|stuff|image_info)_")


def read_coco(path: str | Path) -> dict[str, Any]:
    """Read a COCO file. The list of annotations may be absent, as in COCO's test images.

    Raises:
        ConfigError: If the file is missing, is not JSON, or lacks a list of images or categories.
    """
    dataset = read_json(path, what="annotation file", lists=["images", "annotations"])
    content = dataset if isinstance(dataset, dict) else {}
    # A missing list of annotations is not replaced by an empty list, because the evaluation would then give AP nan.
    lists = content.get("images"), content.get("categories"), content.get("annotations", [])
    if not all(isinstance(entries, list | SharedRecords) for entries in lists) or not lists[0] or not lists[1]:
        advice = "Add the lists of images, annotations and categories, or convert it with 'vil check DATA --fix OUT'."
        raise ConfigError(f"'{path}' is not a COCO annotation file. {advice}")
    return dataset


def as_box(value: Any) -> list[float]:
    """Return a box as a list of numbers, which may be text, as in ``"[1, 2, 3, 4]"``, or a dict with x, y, w and h.

    Raises:
        TypeError, ValueError, KeyError, OverflowError: If it is something else.
    """
    if isinstance(value, dict) and len(value) == 4:
        value = [value[key] if key in value else value[key[0]] for key in ("x", "y", "width", "height")]
    return [*map(float, re.findall(r"[^\s,;()[\]]+", value) if isinstance(value, str) else value)]


def find_coco(files: list[str], index: FileIndex, found: Annotations) -> Parts:
    """Return the COCO files of a dataset by split with their image folders.

    A file whose images have the written names in one folder is used as it is. Otherwise, the names are replaced.
    """
    by_split, parts = defaultdict(list), {}
    for path in files:
        by_split[split_of(index.folders_of(path), Path(path).stem) or "train"].append(path)
    for split, own in by_split.items():
        main = [path for path in own if not _OTHER_FILES.match(os.path.basename(path))] or own
        if len(main) > 1 and split == "train" and "val" in by_split:
            # A file of train comes before a file of train and val, which has the same images.
            first = [path for path in main if re.search("train(?!val)", normalized(os.path.basename(path)))]
            used = [*first, *by_split["val"], *by_split.get("test", ())]
            main = first if first and _names(main) <= _names(used) else main
        # Some datasets have copies of the files in another folder.
        folders = {os.path.join(os.path.dirname(path), "") for path in main if len(main) > 1}
        if folders and sum(any(image.startswith(folder) for image in index.images) for folder in folders) < 2:
            main = sorted({content_hash(path): path for path in reversed(main)}.values())
        found.unused["copies, captions, keypoints, panoptic and other COCO files"] += [p for p in own if p not in main]
        if len(main) > 1:
            both = f"'{main[0]}' and '{main[1]}'. Give one file or folder, or name them after train, val and test."
            raise ConfigError(f"'{index.root}' has several COCO files for {split}: {both}")
        # A single file without the name of a split may have images of several splits.
        named = split if len(by_split) > 1 else split_of(index.folders_of(main[0]), Path(main[0]).stem)
        content, _, root = parts[split] = _with_images(main[0], named, index, found)
        pairs = images_of(content, root) if named is None else []
        splits = {str(image.get("id")): index.split_of(path) or "train" for image, path in pairs}
        if len({*splits.values()}) > 1 and "train" in splits.values():
            found.notes.append("the folders of the images decide their splits")
            parts = {split: (part, None, root) for split, part in divide(content, splits).items()}
    return parts


def _names(paths: list[str]) -> set[str]:
    """Return the file names of the images of COCO files."""
    return {file_name_of(entry) or "" for path in paths for entry in read_coco(path)["images"]}


def _with_images(path: str, split: str | None, index: FileIndex, found: Annotations) -> Part:
    """Return the content of a COCO file with valid file names, its path or None if it changed, and the image folder."""
    content = read_coco(path)
    annotations, first = content.get("annotations", []), next(entries_of(content, "annotations"), {})
    if "segments_info" in first:
        raise ConfigError(f"'{path}' has panoptic segments without boxes. Use the COCO file with the instances.")
    # CVAT writes the attributes of every annotation.
    rotated = sum(_rotated(one) is not one for one in annotations) if "attributes" in first else 0
    if rotated:
        found.notes.append(f"boxes with the attribute rotation of CVAT: {rotated:,}")
        content["annotations"] = like(annotations, map(_rotated, annotations))
    entries = {file_name_of(entry): entry for entry in content["images"] if file_name_of(entry)}
    # Almost always, all images are in one folder.
    ends = [os.sep + os.path.normpath(name) for name in entries]
    bases = [image.removesuffix(ends[0]) for image in index.images if ends and image.endswith(ends[0])]
    bases = [base for base in bases if split is None or index.split_of(base + os.sep) in (split, None)]
    bases = [base for base in bases if all(base + end in index.images for end in ends)]
    if len(bases) == 1:
        return content, None if rotated else Path(path), Path(bases[0])
    sizes = {name: size_of(entry.get("height"), entry.get("width")) for name, entry in entries.items()}
    records = [Record(path, (name,), size, split=split) for name, size in sizes.items()]
    index.find_images(records)
    names = {one.names[0]: os.path.relpath(one.file, index.image_root) for one in records if one.file}
    if not names:
        where = f"such as '{next(iter(entries), 'those without file_name')}', below '{index.image_root}'"
        raise ConfigError(f"Cannot find the images of '{path}', {where}. Use --images DIR, or unpack archives.")
    return with_file_names(content, names), None, Path(index.image_root)


def _rotated(one: Any) -> Any:
    """Return an annotation with the box around a box that CVAT rotated, and other annotations unchanged."""
    # The dataset check reports invalid values.
    with contextlib.suppress(AttributeError, KeyError, OverflowError, TypeError, ValueError):
        if not one.get("segmentation") and (degrees := degrees_of(one["attributes"]["rotation"])):
            left, top, width, height = as_box(one["bbox"])
            box = box_object("", rotated_box(left, top, left + width, top + height, degrees))
            # A copy is not rotated again.
            return one | {"bbox": box["bbox"], "area": box["area"], "attributes": one["attributes"] | {"rotation": 0}}
    return one
