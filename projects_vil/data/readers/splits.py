"""Compare the splits of a dataset."""

import functools
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from projects_vil.config import first_of
from projects_vil.data.readers.index import content_hash


def compare_splits(splits: Mapping[str, tuple[dict[str, Any], Path]]) -> Iterator[str]:
    """Yield a note about images that are in several splits, and a note about classes that only one split has.

    Args:
        splits: A dict from the split to the content of its COCO file and its image folder.
    """
    # The split and path of files with the same size, a file of each split with the same content, and used classes.
    by_size: dict[int, list[tuple[str, str]]] = defaultdict(list)
    by_content: dict[str, dict[str, str]] = defaultdict(dict)
    by_class: dict[str, set[str]] = defaultdict(set)
    digest = functools.cache(content_hash)
    for split, (content, folder) in splits.items() if len(splits) > 1 else ():
        images, objects, categories = (
            [entry for entry in content.get(key, ()) if isinstance(entry, dict)]
            for key in ("images", "annotations", "categories")
        )
        for path in (os.path.join(folder, str(image.get("file_name"))) for image in images):
            if os.path.isfile(path):
                by_size[os.path.getsize(path)].append((split, path))
        used = {str(entry.get("category_id")) for entry in objects}
        for category in categories:
            if str(category.get("id")) in used:
                by_class[str(category.get("name"))].add(split)
    for files in by_size.values():
        for split, path in files if len(dict(files)) > 1 else ():
            by_content[digest(path)][split] = path
    if shared := [files for files in by_content.values() if len(files) > 1]:
        first = [f"'{path}' in {split}" for split, path in shared[0].items()]
        yield f"images in several splits: {len(shared):,}, such as {' and '.join(first)}"
    alone = [f"{name!r} ({min(own)})" for name, own in by_class.items() if len(own) == 1]
    if alone and len(set().union(*by_class.values())) > 1:
        yield f"only one split has objects of {first_of(alone, 5)}"
