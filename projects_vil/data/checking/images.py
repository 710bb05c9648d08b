"""Images of a COCO file: their ids, their sizes and their files."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from projects_vil.data.checking.findings import Findings, shown
from projects_vil.data.checking.headers import sizes_of_files


def whole(value: object) -> int | None:
    """The whole number that an id is or says, or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        if isinstance(value, float):
            return int(value) if value.is_integer() else None
        return int(value) if isinstance(value, str) else None
    except ValueError:
        return None


class Images:
    """The list of images.

    Args:
        entries: of the file.
        findings: take what is wrong.

    Attributes:
        heights, widths: of each image in pixels, 0 where they are not known.
        index_by_id: id -> the first image that has it.
        index_by_number: the same, for ids that are or say a whole number.
    """

    def __init__(self, entries: list[Any], findings: Findings) -> None:
        self.entries, self.findings = entries, findings
        self.heights, self.widths = np.zeros(len(entries), np.int64), np.zeros(len(entries), np.int64)
        self.index_by_id: dict[Any, int] = {}
        self.index_by_number: dict[int | None, int] = {}
        # Those with an id and a file name.
        self.usable: list[int] = []

    def size(self, index: int) -> tuple[int, int]:
        """Height and width, 0 where they are not known; an index of -1 stands for no image."""
        return (int(self.heights[index]), int(self.widths[index])) if index >= 0 else (0, 0)

    def add(self, kind: str, index: int, value: object = None) -> None:
        self.findings.add(kind, index, lambda: self._example(index, value))

    def _example(self, index: int, value: object) -> dict[str, Any]:
        entry = self.entries[index]
        if not isinstance(entry, dict):
            return {"value": shown(entry)}
        example = {"image": entry.get("id"), "file": entry.get("file_name"), "value": value}
        return {what: known for what, known in example.items() if known is not None}

    def check(self) -> None:
        """Look at the entries, not at the files; where a size is missing, at the file's header."""
        files: Counter[str] = Counter()
        for index, entry in enumerate(self.entries):
            if not _has_id_and_name(entry):
                self.add("image_form", index)
                continue
            self.usable.append(index)
            if self.index_by_id.setdefault(entry["id"], index) != index:
                self.add("image_id_twice", index)
            if whole(entry["id"]) is not None:
                self.index_by_number.setdefault(whole(entry["id"]), index)
            files[entry["file_name"]] += 1
            if files[entry["file_name"]] > 1:
                self.add("file_twice", index)
            sides = entry.get("height"), entry.get("width")
            if all(type(side) is int and 0 < side < 2**31 for side in sides):
                self.heights[index], self.widths[index] = sides
            else:
                self.add("image_size_missing", index)
        texts = [index for index in self.usable if isinstance(self.entries[index]["id"], str)]
        if len(texts) < len(self.usable):
            for index in texts:
                self.add("image_ids_mixed", index)

    def check_files(self, *, headers: bool, pixels: bool, progress: Callable[[int], None] | None = None) -> None:
        """Look for the files, and into them.

        Args:
            headers: whether to open each.
            pixels: whether to read all of each.
            progress: called with the number of files that are done.
        """
        missing = set(missing_files([self.path(index) for index in self.usable]))
        for index in self.usable:
            if self.path(index) in missing:
                self.add("file_missing", index)
        unsized = set(self.findings.places.get("image_size_missing", ()))
        there = [index for index in self.usable if self.path(index) not in missing]
        opened = there if headers or pixels else [index for index in there if index in unsized]
        done = 0
        for index, size in zip(opened, sizes_of_files([self.path(i) for i in opened], pixels=pixels), strict=True):
            done += 1
            if progress is not None:
                progress(done)
            if isinstance(size, str):
                self.add("file_unreadable", index, size)
            elif index in unsized:
                self.heights[index], self.widths[index] = size
            elif size != self.size(index):
                (height, width), (high, wide) = size, self.size(index)
                self.add("file_size", index, f"{width} x {height} in the file, {wide} x {high} in the annotations")

    def path(self, index: int) -> str:
        return os.path.join(self.findings.image_root, self.entries[index]["file_name"])


def _has_id_and_name(entry: Any) -> bool:
    if not isinstance(entry, dict) or isinstance(entry.get("id"), bool):
        return False
    return isinstance(entry.get("id"), (int, str, float)) and bool(
        entry.get("file_name") and isinstance(entry["file_name"], str)
    )


def missing_files(paths: Iterable[str]) -> Iterator[str]:
    """Those of the paths that name no file, by a look into each folder, not at each file."""
    folders: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        folder, _, name = path.rpartition(os.sep)
        if folder not in folders:
            folders[folder] = set(os.listdir(folder)) if os.path.isdir(folder) else set()
        if name not in folders[folder]:
            yield path
