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

# Patterns that decide the format of a file at its beginning or its end
_SIGNATURES = {
    ".json": (
        ("LabelMe", rb'"shapes"\s*:\s*\['),
        ("COCO", rb'"(images|annotations|categories)"\s*:\s*\['),
        ("VIA", rb'"_via_\w+"\s*:'),
    ),
    ".xml": (("CVAT", rb"<annotations[\s>]"), ("Pascal VOC", rb"<annotation[\s>]")),
}
_NUM_SIGNATURE_BYTES = 4096
_MOST_PARSED_BYTES = 32 * 2**20
# Formats with one annotation file per image
FILE_PER_IMAGE = ("LabelMe", "Pascal VOC")
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
    if root.name.lower() in ANNOTATION_FOLDERS:
        root = root.parent
    index, found = FileIndex(root, images), defaultdict(list)
    below = os.path.join(source, "")
    own = [str(source)] if source.is_file() else [f for f in index.files if f.startswith(below) and os.path.isfile(f)]
    for path in own:
        found[annotation_format(path)].append(path)
    unknown = found.pop(None, [])
    if not found:
        classes = [path for path in own if os.path.basename(path) in CLASS_FILES]
        darknet = [path for path in own if path.endswith(".data") and re.search(rb"(?m)^\s*names\s*=", _head(path))]
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
    if source.is_file() and name in FILE_PER_IMAGE:
        raise ConfigError(f"'{source}' is a {name} file of one image. Give the folder of the dataset.")
    others = [path for path in unknown if path.lower().endswith((".json", ".xml"))]
    if name != "YOLO":
        stems = {Path(path).stem for path in index.images} if name in FILE_PER_IMAGE else ()
        suffixes = {Path(path).suffix.lower() for path in files}
        damaged = [path for path in others if Path(path).suffix.lower() in suffixes]
        damaged = [path for path in damaged if Path(path).stem in stems or not os.path.getsize(path)]
        if damaged:
            first = first_of(damaged, 5)
            raise ConfigError(f"Files that are empty or not in the format {name}: {first}. Repair or remove them.")
    return name, files, index, others


def annotation_format(path: str) -> str | None:
    """Return the format of an annotation file, or None if it is unknown.

    The beginning and the end of a JSON file decide. If they do not, the whole file is read.
    """
    suffix = os.path.splitext(path)[1].lower()
    # Opening a pipe would block.
    if suffix not in (*_SIGNATURES, ".yaml", ".yml") or not os.path.isfile(path):
        return None
    if suffix not in _SIGNATURES:
        return "YOLO" if settings_of(path) is not None else None
    content = Path(path).read_bytes().replace(b"\0", b"") if suffix == ".xml" else _head(path)
    if suffix == ".json" and not content.lstrip(b"\xef\xbb\xbf\xff\xfe").lstrip().startswith(b"{"):
        # A list, such as the results of a detector
        return None
    found = next((name for name, pattern in _SIGNATURES[suffix] if re.search(pattern, content)), None)
    # Other files have one of COCO's lists, too.
    is_unsure = found is None or (found == "COCO" and os.path.getsize(path) < _MOST_PARSED_BYTES)
    return _json_format(path, damaged=found) if suffix == ".json" and is_unsure else found


def _head(path: str) -> bytes:
    """Return the first and the last bytes of a file, without the zero bytes of UTF-16."""
    with open(path, "rb") as file:
        head = file.read(_NUM_SIGNATURE_BYTES)
        file.seek(max(os.path.getsize(path) - _NUM_SIGNATURE_BYTES, 0))
        return (head + b"\n" + file.read()).replace(b"\0", b"")


def _json_format(path: str, damaged: str | None) -> str | None:
    try:
        content = read_json(path)
    except ConfigError:
        return damaged
    if not isinstance(content, dict):
        return None
    if isinstance(content.get("shapes"), list):
        return "LabelMe"
    if isinstance(content.get("images"), list) and isinstance(content.get("categories"), list):
        return "COCO"
    return "VIA" if images_of(content) is not None else None
