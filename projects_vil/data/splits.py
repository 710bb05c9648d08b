"""Divide the content of a COCO file into splits, and compare the splits of a dataset."""

import hashlib
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from backbones.errors import first_of
from backbones.files import atomic_write
from projects_vil.files import SharedRecords, content_hash, like

# The content of a COCO file, its path or None if it must be written, and the image folder
Part = tuple[dict[str, Any], Path | None, Path]
Parts = dict[str, Part]


def entries_of(content: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """Yield the valid entries of a list of a COCO file: dicts, and for images those with a file name."""
    for entry in content.get(key) or ():
        if isinstance(entry, dict) and (key != "images" or isinstance(entry.get("file_name"), str)):
            yield entry


def file_name_of(image: Any) -> str | None:
    """Return the file name of an image, which LVIS has only in a URL, or None if it has none."""
    name = image.get("file_name") or image.get("coco_url") if isinstance(image, dict) else None
    return name if isinstance(name, str) else None


def images_of(content: dict[str, Any], root: Path) -> list[tuple[dict[str, Any], str]]:
    """Return the images of a COCO file with their absolute paths."""
    images = entries_of(content, "images")
    return [(image, os.path.normpath(os.path.join(root, image["file_name"]))) for image in images]


def with_file_names(content: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of a COCO file with new file names. Images whose name is not in ``names`` keep it."""

    def renamed(image: Any) -> Any:
        name = file_name_of(image)
        return image | {"file_name": names.get(name, name)} if name else image

    return content | {"images": like(content["images"], map(renamed, content["images"]))}


def without_masks(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a COCO file without segmentations."""
    annotations = content.get("annotations", [])
    boxes = ({key: one[key] for key in one if key != "segmentation"} for one in annotations)
    return content | {"annotations": like(annotations, boxes)}


def divide(content: dict[str, Any], splits: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the content of a COCO file by split. The keys of ``splits`` are image ids as text."""
    parts, first = {split: dict(content) for split in splits.values()}, next(iter(splits.values()))
    for key, id_key in (("images", "id"), ("annotations", "image_id")):
        entries, owners = content.get(key, []), []
        for entry in entries:
            owners.append(splits.get(str(entry.get(id_key)), first) if isinstance(entry, dict) else first)
        for split, part in parts.items():
            part[key] = like(entries, itertools.compress(entries, map(split.__eq__, owners)))
    return parts


def save_coco(path: str | Path, content: dict[str, Any]) -> None:
    """Write a COCO file, atomically. Long lists are written one entry at a time."""
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8") as file:
        for number, (key, value) in enumerate(content.items()):
            file.write(f"{', ' if number else '{'}{json.dumps(key)}: ")
            if isinstance(value, SharedRecords):
                file.write("[")
                file.writelines(f"{', ' * (index > 0)}{json.dumps(entry)}" for index, entry in enumerate(value))
                file.write("]")
            else:
                # Much faster than json.dump, which writes each number separately.
                file.write(json.dumps(value))
        file.write("}")


def find_copies(parts: Parts) -> dict[str, str]:
    """Return the first equal file of each image file that has a copy.

    If there is a validation split, only copies in different splits are found.
    """
    files = []
    for split, (content, _, root) in parts.items():
        for _, path in images_of(content, root):
            if os.path.isfile(path) and os.access(path, os.R_OK):
                files.append((split if "val" in parts else path, path))
    groups = [files]
    # Empty files are no copies. Most files of the same size differ in their last bytes.
    for key in (os.path.getsize, _last_bytes, content_hash):
        found = defaultdict(list)
        for number, group in enumerate(groups):
            for owner, path in group:
                found[number, key(path)].append((owner, path))
        groups = [group for (_, value), group in found.items() if value and len(dict(group)) > 1]
    return {path: group[0][1] for group in groups for _, path in group}


def _last_bytes(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        file.seek(max(os.path.getsize(path) - 256, 0))
        return file.read()


def split_by_hash(
    content: dict[str, Any], root: Path, fraction: float | None, original_of: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Split the content of a COCO file into train and val, which has the given fraction of the images.

    Images with equal files are in the same split. If all images are equal, there is only ``"train"``.

    Args:
        content: The content of the file.
        root: The image folder.
        fraction: The fraction of the images in val. None is 0.2.
        original_of: The result of :func:`find_copies`.
    """
    names = {str(image.get("id")): original_of.get(path, path) for image, path in images_of(content, root)}
    keys = {key: hashlib.sha256(os.path.basename(name).encode()).hexdigest() + name for key, name in names.items()}
    different = sorted({*keys.values()})
    fraction = 0.2 if fraction is None else fraction
    last = different[min(max(round(fraction * len(different)), 1), len(different) - 1) - 1]
    parts = divide(content, {number: "val" if key <= last else "train" for number, key in keys.items()})
    return parts if len(parts) > 1 else {"train": content}


def compare_splits(parts: Parts, original_of: Mapping[str, str]) -> Iterator[str]:
    """Yield a note about equal images, and a note about classes that only one split has.

    Equal images are noted if they are in several splits, or if there is only one split.

    Args:
        parts: The splits.
        original_of: The result of :func:`find_copies`.
    """
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    by_class: dict[str, set[str]] = defaultdict(set)
    for split, (content, _, root) in parts.items():
        for _, path in images_of(content, root):
            groups[original_of.get(path, path)][split if len(parts) > 1 else path] = path
        names = {str(entry.get("id")): str(entry.get("name")) for entry in entries_of(content, "categories")}
        # A set would have another order in each process.
        for number in dict.fromkeys(str(entry.get("category_id")) for entry in entries_of(content, "annotations")):
            by_class[names.get(number, "")].add(split)
    equal = [group for group in groups.values() if len(group) > 1]
    if equal and len(parts) > 1:
        first = [f"'{path}' in {split}" for split, path in equal[0].items()]
        yield f"images in several splits, whose AP is too high: {len(equal):,}, such as {' and '.join(first)}"
    elif equal:
        one, other, *_ = equal[0]
        yield f"images that are copies of another: {sum(map(len, equal)) - len(equal):,}, such as '{other}' of '{one}'"
    alone = [f"{name!r} ({min(own)})" for name, own in by_class.items() if name and len(own) == 1]
    if alone and len(set().union(*by_class.values())) > 1:
        yield f"only one split has objects of {first_of(alone, 5)}"
