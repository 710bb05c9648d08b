"""Read COCO files and find their images."""

import os
import re
from pathlib import Path
from typing import Any

from backbones import ConfigError
from projects_vil.data.readers.index import FileIndex, Request, size_of, split_of
from projects_vil.utils import read_json

# COCO's other annotation files of the same images
_OTHER_FILES = re.compile("^(captions|person_keypoints|panoptic|stuff|image_info)_")
# The content of a COCO file, its path or None if it must be written, and the image folder
Part = tuple[dict[str, Any], Path | None, Path]
Parts = dict[str, Part]


def read_coco(path: str | Path) -> dict[str, Any]:
    """Read a COCO file. The list of annotations may be absent, as in COCO's test images.

    Raises:
        ConfigError: If the file is missing, is not JSON, or lacks a list of images or categories.
    """
    dataset = read_json(path, what="annotation file")
    content = dataset if isinstance(dataset, dict) else {}
    # A missing list of annotations is not replaced by an empty list, because the evaluation would then give AP nan.
    lists = content.get("images"), content.get("categories"), content.get("annotations", [])
    if not all(isinstance(entries, list) for entries in lists) or not lists[0] or not lists[1]:
        raise ConfigError(
            f"'{path}' is not a COCO annotation file. Add the lists of images, annotations and categories, or convert "
            "another format with 'vil check DATA --fix OUT'."
        )
    return dataset


def find_coco(files: list[str], index: FileIndex) -> tuple[Parts, dict[str, list[str]]]:
    """Return the COCO files of a dataset by split with their image folders, and the files that are not used.

    A file whose images are in one folder is used as it is. Otherwise, the entries of the images are corrected.
    """
    parts: Parts = {}
    splits = {path: split_of(index.folders_of(path), Path(path).stem) or "train" for path in files}
    splits = splits if len(files) > 1 else {files[0]: "train"}
    main = [path for path in files if not _OTHER_FILES.match(os.path.basename(path))]
    others = [path for path in files if path not in main and splits[path] in {splits[other] for other in main}]
    used: dict[str, str] = {}
    for path in (path for path in files if path not in others):
        split = splits[path]
        if (other := used.setdefault(split, path)) != path:
            raise ConfigError(
                f"'{index.root}' has several COCO files for {split}: '{other}' and '{path}'. Give one of them, or name "
                "the files and folders after the splits train, val and test."
            )
        parts[split] = _with_images(path, read_coco(path), split if len(files) > 1 else None, index)
    return parts, {"captions, keypoints, panoptic and other COCO files": others} if others else {}


def _with_images(path: str, content: dict[str, Any], split: str | None, index: FileIndex) -> Part:
    """Return the content of a COCO file with valid file names, its path or None if they changed, and the folder."""
    entries = [e for e in content["images"] if isinstance(e, dict) and isinstance(e.get("file_name"), str)]
    entries = list({entry["file_name"]: entry for entry in entries}.values())
    names, split = [entry["file_name"] for entry in entries], split or split_of((), Path(path).stem)
    # Almost always, all images are in one folder.
    ends = [os.sep + os.path.normpath(name) for name in names]
    bases = [image.removesuffix(ends[0]) for image in index.images if image.endswith(ends[0])] if any(names[:1]) else []
    bases = [base for base in bases if all(base + end in index.image_set for end in ends)]
    splits = {index.split_of(os.path.join(base, "")) for base in bases}
    if len(bases) == 1 and (not split or splits <= {split, None}):
        return content, Path(path), Path(bases[0])
    requests = [
        Request(path, (entry["file_name"],), size_of(entry.get("height"), entry.get("width")), split=split)
        for entry in entries
    ]
    images = zip(names, index.find_images(requests), strict=True)
    found = {name: file for name, file in images if file is not None}
    if not found:
        raise ConfigError(
            f"Cannot find the images of '{path}', such as '{', '.join(names[:1])}'. Put them below '{index.root}', or "
            "give their folder with --images."
        )
    root = os.path.commonpath(map(os.path.dirname, found.values()))
    base = next(file.removesuffix(os.sep + os.path.normpath(name)) for name, file in found.items())
    # The root of the written paths, if the images have one
    root = base if root.startswith(base) else root
    images = [
        entry | {"file_name": os.path.relpath(found[entry["file_name"]], root)}
        if isinstance(entry, dict) and entry.get("file_name") in found
        else entry
        for entry in content["images"]
    ]
    return content | {"images": images}, Path(path) if images == content["images"] else None, Path(root)
