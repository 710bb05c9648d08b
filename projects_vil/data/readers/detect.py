"""Detect the format of a dataset."""

import os
import re
from collections import defaultdict
from pathlib import Path

from backbones import ConfigError
from projects_vil.config import first_of
from projects_vil.data.readers.index import ANNOTATION_FOLDERS, FileIndex
from projects_vil.data.readers.via import images_of
from projects_vil.data.readers.yolo import CLASS_FILES, settings_of
from projects_vil.utils import read_json

# The root elements of XML files
_ROOTS = {"CVAT": rb"<annotations[\s>]", "Pascal VOC": rb"<annotation[\s>]"}
# A list of COCO files, which decides the format of a large file
_COCO_LIST = rb'"(images|annotations|categories)"\s*:\s*\['
_MOST_PARSED_BYTES, _NUM_READ_BYTES = 32 * 2**20, 4096
_KNOWN = "*.json files of COCO, LabelMe or VIA, data.yaml of YOLO, or *.xml files of Pascal VOC or CVAT"


def detect_format(source: Path, images: Path | None = None) -> tuple[str, list[str], FileIndex, list[str]]:
    """Detect the format of a dataset from the content of its files.

    Args:
        source: The file or folder of a dataset.
        images: A folder with its images, if it is not below the folder of the dataset.

    Returns:
        The format, the annotation files, the index of all files, and the JSON and XML files that are not annotations.

    Raises:
        ConfigError: If the path does not exist, or if its format is unknown or ambiguous.
    """
    if not source.exists():
        raise ConfigError(f"There is no file or folder '{source}'. Check the path.")
    source = Path(os.path.abspath(source))
    root = source.parent if source.is_file() else source
    root = root.parent if root.name.lower() in ANNOTATION_FOLDERS else root
    index, found = FileIndex(root, images), defaultdict(list)
    below = os.path.join(source, "")
    own = [str(source)] if source.is_file() else [f for f in index.files if f.startswith(below) and os.path.isfile(f)]
    for path in own:
        found[annotation_format(path)].append(path)
    unknown = found.pop(None, [])
    if not found:
        classes = [path for path in own if os.path.basename(path) in CLASS_FILES]
        darknet = [path for path in own if path.endswith(".data") and b"names" in Path(path).read_bytes()]
        if darknet or classes:
            found["YOLO"] = darknet or classes
    if not found:
        # A file that is no JSON at all has a better message.
        for path in [path for path in unknown if path.lower().endswith(".json")][:1]:
            read_json(path)
        raise ConfigError(f"'{source}' has no annotations of a known format. Use {_KNOWN}.")
    if len(found) > 1:
        each = " and ".join(f"{name} ({os.path.relpath(files[0], root)})" for name, files in found.items())
        raise ConfigError(f"'{source}' has several formats: {each}. Give the file or the folder of one format.")
    name, files = found.popitem()
    others = [path for path in unknown if path.lower().endswith((".json", ".xml"))]
    # These formats have one annotation file per image.
    stems = {Path(path).stem for path in index.images if name in ("LabelMe", "Pascal VOC")}
    damaged = [path for path in others if path.lower().endswith(Path(files[0]).suffix.lower())]
    if damaged := [path for path in damaged if Path(path).stem in stems or not os.path.getsize(path)]:
        paths = first_of(damaged, 5)
        raise ConfigError(f"Files that are empty or not in the format {name}: {paths}. Repair or remove them.")
    return name, files, index, others


def annotation_format(path: str) -> str | None:
    """Return the format of an annotation file from its content, or None if it is unknown."""
    suffix = os.path.splitext(path)[1].lower()
    # Opening a pipe would block.
    if suffix not in (".json", ".xml", ".yaml", ".yml") or not os.path.isfile(path):
        return None
    if suffix == ".xml":
        content = Path(path).read_bytes().replace(b"\0", b"")
        return next((name for name, root in _ROOTS.items() if re.search(root, content)), None)
    if suffix != ".json":
        return "YOLO" if settings_of(path) is not None else None
    with open(path, "rb") as file:
        # Without the zero bytes of UTF-16
        head = file.read(_NUM_READ_BYTES).replace(b"\0", b"")
    # Other files are lists, such as the results of a detector.
    if not head.lstrip(b"\xef\xbb\xbf\xff\xfe").lstrip().startswith(b"{"):
        return None
    name = "COCO" if re.search(_COCO_LIST, head) else None
    if name and os.path.getsize(path) > _MOST_PARSED_BYTES:
        return name
    try:
        content = read_json(path)
    except ConfigError:
        # The reader of the format reports the error.
        return name
    if isinstance(content.get("shapes"), list):
        return "LabelMe"
    if isinstance(content.get("images"), list) and isinstance(content.get("categories"), list):
        return "COCO"
    return "VIA" if images_of(content) is not None else None
