"""Make a validation split, and compare the splits of a dataset."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backbones import ConfigError
from projects_vil.config import first_of
from projects_vil.data.readers.coco import Parts, divide, entries_of, paths_of
from projects_vil.data.readers.index import content_hash

VAL_FRACTION = 0.2


def split_by_hash(source: Path, content: dict[str, Any], fraction: float) -> dict[str, dict[str, Any]]:
    """Split the content of a COCO file into train and val, which has the given fraction of the images."""

    def order(image: dict[str, Any]) -> str:
        return hashlib.sha256(os.path.basename(image["file_name"]).encode()).hexdigest() + image["file_name"]

    images = sorted(entries_of(content, "images"), key=order)
    if len(images) < 2:
        raise ConfigError(f"'{source}' has only one image. Add another, because training and validation need one each.")
    number = min(max(round(fraction * len(images)), 1), len(images) - 1)
    ids = [str(image.get("id")) for image in images]
    return divide(content, dict.fromkeys(ids[number:], "train") | dict.fromkeys(ids[:number], "val"))


def compare_splits(parts: Parts) -> Iterator[str]:
    """Yield a note about images that are in several splits, and a note about classes that only one split has."""
    # The split and path of files with the same size, a file of each split with the same content, and used classes.
    by_size: dict[int, list[tuple[str, str]]] = defaultdict(list)
    by_content: dict[str, dict[str, str]] = defaultdict(dict)
    by_class: dict[str, set[str]] = defaultdict(set)
    for split, (content, _, root) in parts.items() if len(parts) > 1 else ():
        for path in filter(os.path.isfile, paths_of(content, root)):
            by_size[os.path.getsize(path)].append((split, path))
        names = {str(entry.get("id")): str(entry.get("name")) for entry in entries_of(content, "categories")}
        for entry in entries_of(content, "annotations"):
            by_class[names.get(str(entry.get("category_id")), "")].add(split)
    for files in by_size.values():
        for split, path in files if len(dict(files)) > 1 else ():
            by_content[content_hash(path)][split] = path
    if shared := [files for files in by_content.values() if len(files) > 1]:
        first = [f"'{path}' in {split}" for split, path in shared[0].items()]
        yield f"images in several splits: {len(shared):,}, such as {' and '.join(first)}"
    alone = [f"{name!r} ({min(own)})" for name, own in by_class.items() if name and len(own) == 1]
    if alone and len(set().union(*by_class.values())) > 1:
        yield f"only one split has objects of {first_of(alone, 5)}"
