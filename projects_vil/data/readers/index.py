"""List the files of a dataset, and find the image that an annotation names."""

import functools
import json
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from backbones import ConfigError
from projects_vil.data.image_files import is_image, size_or_none
from projects_vil.files import content_hash, walk

SPLITS = {"train": "train", "training": "train", "trainval": "train", "val": "val", "valid": "val"}
SPLITS |= {"validation": "val", "validate": "val", "test": "test", "testing": "test"}
# Words beside the split in folder names, such as "train_images"
_NEUTRAL = {"annotations", "data", "images", "image", "imgs", "img", "jpg", "json", "labels", "obj", "set", "xml", ""}
# Folders of annotations with the images in another folder next to them
ANNOTATION_FOLDERS = {"annotations", "annotation", "annots", "ann", "labels", "label", "labeltxt", "json", "xml"}
# Label Studio adds eight hexadecimal digits to the names of uploaded files.
_UPLOAD_PREFIX = re.compile(r"(?<![^/\\])[0-9a-f]{8}-(?=[^/\\]*$)")


def read_lines(path: str) -> list[str]:
    """Return the lines of a text file in UTF-8, or in UTF-16 with a byte order mark, without surrounding spaces."""
    # Opening a pipe would block.
    content = Path(path).read_bytes() if os.path.isfile(path) else b""
    return [line.strip() for line in content.decode(json.detect_encoding(content), "replace").splitlines()]


def read_names(path: str) -> list[str]:
    """Return the class names of a text file with one name per line, perhaps after an id, as in ``0: cat`` or ``0 cat``.

    The lines have ids if all numbers and all names are different, and one number is 0. It may be 1 if no number is
    followed by a space only, because ``1 euro`` and ``2 pound`` are names.
    """
    every = "\n".join(read_lines(path)).strip().split("\n")
    lines = [*filter(None, every)]
    matches = [re.fullmatch(r"(\d{1,5})\s*([:,]|[.)-]?\s)\s*(.+)", line) for line in lines]
    names = {int(match[1]): match[3] for match in matches if match}
    has_ids = 0 in names or (1 in names and all(match and match[2].strip() for match in matches))
    has_ids &= len(names) == len({*names.values()}) == len(lines)
    # Without ids, an empty line is a class without a name, unless every second line is empty.
    lines = every if any(every[1::2]) else lines
    return [names.get(index, "") for index in range(max(names) + 1)] if has_ids else lines


def stem_of(path: str) -> str:
    """Return a file name without its suffixes of images and annotations: ``a`` for ``a.jpg.xml``."""
    stem, suffix = os.path.splitext(os.path.basename(path))
    return stem_of(stem) if is_image(path) or suffix.lower() in (".txt", ".xml", ".json", ".yaml") else stem + suffix


def normalized(name: str) -> str:
    """Return a path in lower case and NFC, with ``/`` as separator and ``.jpg`` for ``.jpeg``."""
    return unicodedata.normalize("NFC", name).casefold().replace("\\", "/").replace(".jpeg", ".jpg")


@functools.lru_cache
def parts_of(path: str) -> tuple[str, ...]:
    """Return the folders and the file name of a path of any operating system, normalized."""
    return tuple(part for part in normalized(path.strip()).split("/") if part not in ("", ".", ".."))


def split_of(parts: Iterable[str], stem: str = "") -> str | None:
    """Return the split in the words of a file stem or of folder names, such as ``valid`` or ``train2017``, or None."""
    words = [word for word in re.split("[^a-z]+", stem.lower()) if word in SPLITS][-1:]
    for part in reversed(tuple(parts)):
        found = set(re.split("[^a-z]+", part.lower())) - _NEUTRAL
        words += found if len(found) == 1 and found <= SPLITS.keys() else ()
    return SPLITS[words[0]] if words else None


def split_of_file(path: str, files: list[str]) -> str | None:
    """Return the split in the name of one of several annotation files, or None."""
    return split_of((), Path(path).stem) if len(files) > 1 else None


@dataclass
class Record:
    """An image of a dataset: how its annotation names it, and its objects.

    Attributes:
        annotation: The annotation file.
        names: Written paths of the image, on this or another computer. The first one that exists is used. A name that
            ends with a period stands for an image with any suffix.
        size: The height and width in pixels, or None if they are unknown.
        is_only: Whether the annotation file has no other image.
        split: The split of the annotation. By default, the folders of the annotation file and of the image decide. An
            image in the folder of another split is not used, unless ``is_only`` is true.
        hint: A path of the image that is often outdated, or an empty text. It decides only what nothing else decides.
        objects: COCO annotations without ids, and with ``label``, the class name. Instead of a box, an object may have
            ``mask``: RLE, and its left and top position in the image.
        file: The image file, or None if it is missing.
    """

    annotation: str
    names: tuple[str, ...]
    size: tuple[int, int] | None = None
    is_only: bool = False
    split: str | None = None
    hint: str = ""
    objects: list[dict[str, Any]] = field(default_factory=list)
    file: str | None = None

    def __str__(self) -> str:
        return f"'{self.annotation}'" if self.is_only else f"{self.names[0]!r} of '{self.annotation}'"


class FileIndex:
    """The files of a dataset.

    Args:
        root: The folder of the dataset.
        images: A folder with all images, if they are not below ``root``.

    Attributes:
        root: The folder of the dataset.
        image_root: The folder ``images``, or ``root``.
        is_given: Whether ``images`` is given.
        files: All files below ``root``, sorted.
        images: The keys are the image files below ``images``, or else below ``root``, sorted.
        all_files: All files below ``root`` and ``images``, sorted.
    """

    def __init__(self, root: Path, images: str | Path | None = None) -> None:
        self.root, self.image_root = os.path.abspath(root), os.path.abspath(images or root)
        self.is_given, self.files = images is not None, list(walk(self.root))
        below = self.files if images is None else list(walk(self.image_root))
        self.images = dict.fromkeys(filter(is_image, below))
        self.all_files = self.files if images is None else sorted({*self.files, *below})
        # Label Studio writes percent codes into the names of label files. Windows hides the suffix of a.txt.txt.
        self._by_path = {normalized(re.sub(r"(?i)(\.\w+)\1$", r"\1", unquote(path))): path for path in self.files}
        self._by_path |= {normalized(path): path for path in (*self.files, *set(map(os.path.dirname, self.files)))}
        folders = [self.folders_of(os.path.join(path, "")) for path in set(map(os.path.dirname, self.images))]
        # The folders that have images in them or in their subfolders. The cache does not refer to the index, which
        # would then stay in memory.
        self._image_folders = {folder[:length] for folder in folders for length in range(1, len(folder) + 1)}
        self._image_folder_names = {folder[-1] for folder in self._image_folders}
        self._split_of = functools.cache(functools.partial(_split_of_folder, self._image_folders))

    @functools.cached_property
    def by_name(self) -> dict[str, list[str]]:
        """The images by file name, such as ``a.jpg``, and by stem with a period, such as ``a.``."""
        groups, others = defaultdict(list), defaultdict(list)
        for path in self.images:
            name = normalized(os.path.basename(path))
            groups[name].append(path)
            groups[f"{os.path.splitext(name)[0]}."].append(path)
            others[f"{stem_of(name)}."].append(path)
        # The image a.jpg.png has the stem "a" only if no other image has it.
        return defaultdict(list, others | groups)

    def find(self, *paths: str) -> str | None:
        """Return the first file or folder with one of these paths, up to case and Unicode form, or None."""
        found = (p if os.path.exists(p) else self._by_path.get(normalized(p), "") for p in map(os.path.normpath, paths))
        # Opening a pipe would block.
        return next((path for path in found if os.path.isfile(path) or os.path.isdir(path)), None)

    def folders_of(self, path: str) -> tuple[str, ...]:
        """Return the names of the folders between the root and a file, or nothing for a file that is elsewhere."""
        root = next((root for root in (self.root, self.image_root) if path.startswith(root + os.sep)), path)
        return parts_of(os.path.dirname(path.removeprefix(root)))

    def split_of(self, *paths: str) -> str | None:
        """Return the split that the folders of the first of these files name, or None."""
        return next(filter(None, (self._split_of(self.folders_of(path)) for path in paths)), None)

    def find_images(self, records: Iterable[Record]) -> None:
        """Set the image file of each record whose image exists.

        A path from the annotation file, or from the given image folder, has priority. Otherwise, the file name is
        searched: as it is written, then with percent codes decoded, then without the prefix of Label Studio. Of several
        images with this name, the folders decide, in this order: the longest common end with the written path, and with
        the folder of the annotation file; the number of common folders, and the longest common beginning, with the
        folder of the annotation file; the path from the root; a folder named images. Then equal upper and lower case
        decide, then the size and the content, and last the hint.

        An image is not used in these cases:

        * It is in the folder of another split, or in a folder that the file names for other images.
        * The written folder, or a folder of the annotation file, has other images.
        * It has another suffix, and its folder has copies of used images, such as masks.

        If an image fits several records, it belongs to the one that fits best, and the others have none. Records of
        equal annotation files may have the same image.

        Raises:
            ConfigError: If several images fit a record equally well, or several records an image.
        """
        records, written = list(records), defaultdict(set)
        for record in records:
            written[record.annotation].update(parts[-2] for parts in map(parts_of, record.names) if len(parts) > 1)
        matches = [(*self._matches(record, written[record.annotation]), record) for record in records]
        # Images of the same names in other folders, such as masks, do not replace a missing image.
        exact = [path for rank, paths, _ in matches if any(rank[:2]) for path in paths]
        stems = {stem_of(normalized(path)) for path in exact}
        others = {os.path.dirname(path) for stem in stems for path in self.by_name[f"{stem}."]}
        others -= {*map(os.path.dirname, exact)}
        owners: dict[str, tuple[tuple, Record]] = {}
        hash_of = functools.cache(content_hash)
        for rank, paths, record in sorted(matches, key=lambda match: match[0], reverse=True):
            paths = [path for path in paths if any(rank[:2]) or os.path.dirname(path) not in others]
            # Images that fit another record better are left out.
            paths = [path for path in paths if path not in owners or owners[path][0] <= rank]
            paths = self._without_copies(paths, record) if len(paths) > 1 else paths
            if len(paths) > 1:
                raise ConfigError(f"{record} matches both '{paths[0]}' and '{paths[1]}'. Rename one, or use --images.")
            if not paths:
                continue
            _, owner = owners.setdefault(paths[0], (rank, record))
            ties = (owner, record) if owner is not record else ()
            # Copies of an annotation file are no tie.
            keys = {(one.split, self.split_of(one.annotation), hash_of(one.annotation)) for one in ties}
            if ties and (len(keys) > 1 or owner.annotation == record.annotation):
                raise ConfigError(f"The image '{paths[0]}' has two annotations: {owner} and {record}. Remove one.")
            record.file = paths[0]

    def _matches(self, record: Record, written: Set[str]) -> tuple[tuple, list[str]]:
        """Return how well the best images fit a record, and these images. ``written``: folders in the file."""
        base = self.image_root if self.is_given else os.path.dirname(record.annotation)
        # Label Studio writes ?d=PATH, and URLs may end with a query.
        decoded = [(name, unquote(name.rpartition("?d=")[2].partition("?")[0])) for name in record.names]
        names = [form for name, other in decoded for form in (name, other, _UPLOAD_PREFIX.sub("", other))]
        # Frames of videos have no suffix in CVAT.
        for name in names if record.is_only else (*names, f"{record.names[0].strip()}."):
            direct = os.path.normpath(os.path.join(base, name.strip().replace("\\", "/")))
            is_allowed = not self.is_given or direct.startswith(base + os.sep)
            if is_allowed and os.path.isfile(direct) and (is_image(direct) or size_or_none(direct)):
                return (True,), [direct]
            if parts_of(name) and (ranked := self._ranked(record, name, written)):
                return ranked
        return (), []

    def _ranked(self, record: Record, name: str, written: Set[str]) -> tuple[tuple, list[str]] | None:
        parts, folders, ranked = parts_of(name), self.folders_of(record.annotation), defaultdict(list)
        split = split_of(parts[:-1]) or (not record.is_only and record.split) or self._split_of(folders)
        own_folders = {*folders} & self._image_folder_names - ANNOTATION_FOLDERS
        for path in self.by_name.get(parts[-1], ()):
            own = self.folders_of(path)
            at_end, end = _num_common(own[::-1], parts[-2::-1]), _num_common(own[::-1], folders[::-1])
            at_start, num_shared = _num_common(own, folders), len({*own} & {*folders})
            # Equal folders named "images" in two places are no reason to take an image of the other place.
            is_named = own[at_start] in parts[:-1] if len(own) > at_start else at_end
            # The written folder exists elsewhere, or other records name the folder of this image.
            is_other = len(parts) > 1 and (parts[-2] in self._image_folder_names or not written.isdisjoint(own[-1:]))
            is_other_split = split and self._split_of(own) not in (split, None)
            if is_other_split or (own_folders - {*own} and not is_named) or (is_other and not at_end):
                continue
            is_image_folder = own[-1:] in (("images",), ("jpegimages",))
            is_exact = own == folders or not parts[-1].endswith(".")
            has_case = os.path.basename(path).startswith(re.split(r"[\\/]", name)[-1])
            rank = (False, is_exact, at_end, end, num_shared, at_start, own == parts[:-1], is_image_folder, has_case)
            ranked[rank].append(path)
        return max(ranked.items(), default=None)

    def _without_copies(self, paths: list[str], record: Record) -> list[str]:
        """Return the images that fit a record best by their size, their content and the hint."""
        paths = [path for path in paths if record.size and size_or_none(path) == record.size] or paths
        # One of several equal images, unless they are in several splits
        if len({self.split_of(path) for path in paths} - {None}) < 2 and len(set(map(content_hash, paths))) == 1:
            return sorted(paths, key=lambda path: self.split_of(path) is None)[:1]
        common = [_num_common(self.folders_of(path)[::-1], parts_of(record.hint)[-2::-1]) for path in paths]
        return [path for path, number in zip(paths, common, strict=True) if number == max(common)]


def _split_of_folder(image_folders: Set[tuple[str, ...]], folders: tuple[str, ...]) -> str | None:
    """Return the split of a folder. In names such as WIDER_train next to WIDER_val, a word is the split.

    The names dev and eval, which may also be parts of paths, are splits only next to another split.
    """
    for length in range(len(folders), 0, -1) if split_of(folders) is None else ():
        *parents, name = folders[:length]
        for word, split in (SPLITS | {"dev": "val", "eval": "val"}).items():
            siblings = {name.replace(word, other) for other in SPLITS if SPLITS[other] != split} - {name}
            if any((*parents, sibling) in image_folders for sibling in siblings):
                return split
    return split_of(folders)


def _num_common(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    return len(os.path.commonprefix([a, b]))


def size_of(height: Any, width: Any) -> tuple[int, int] | None:
    """Return the height and width that an annotation file names, or None if they are not valid."""
    return (height, width) if all(isinstance(side, int) and side > 0 for side in (height, width)) else None
