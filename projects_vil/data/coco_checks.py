"""Checks of a COCO file and its images, as one table: the name of a check, its severity, what finds it, what fixes it.

A new check is a row of ``CHECKS`` and a ``yield`` in one of the ``find_...`` functions, which look at millions of
objects and therefore share their loops.
"""

import functools
import itertools
import math
import os
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pycocotools import mask as mask_util

from backbones import ConfigError
from projects_vil.data.detection_utils import UnreadableImage, read_image, read_size
from projects_vil.data.formats import SOURCE, read_coco
from projects_vil.data.segmentation import FAR, box_of, check_segmentation, rle_of
from projects_vil.utils import paused_garbage_collection

NUM_EXAMPLES = 5
_NUMBERS = {int, float}
# Boxes are taken for [left, top, right, bottom] if there are this many, and this share reaches beyond its image.
_MIN_BOXES, _BEYOND_SHARE = 20, 0.2
# Files opened at once: a disk in a network is slow to answer, not slow to read.
_NUM_THREADS, _FILES_PER_TASK = 16, 64
_EXAMPLE_KEYS = {
    "annotations": {"annotation": "id", "image": "image_id"},
    "images": {"image": "id", "file": "file_name"},
    "categories": {"category": "id", "name": "name"},
}

Findings = Iterator[tuple[str, int, Any]]


class CocoFile:
    """A COCO file and the findings of its checks.

    Args:
        path, image_root: the annotation file and the folder of its images.
        masks: whether segmentations are checked; None if any object has one.
        headers: whether every image file is opened.
        pixels: whether every image file is decoded.
        progress: called with the number of image files read so far.
        num_examples: how many examples of a finding are kept.
        dataset: the contents of the file, if they are known.

    Raises:
        ConfigError: where :func:`read_coco` does.

    Attributes:
        dataset: the contents of the file.
        found: name of a check -> indices in the list that it is about.
        examples: name of a check -> ids, file names and values of the first findings.
        heights, widths: sizes of the images in pixels, 0 if unknown.
        image_of: index of each annotation's image, -1 if unknown.
    """

    @paused_garbage_collection()
    def __init__(
        self,
        path: str | Path,
        image_root: str | Path,
        *,
        masks: bool | None = None,
        headers: bool = True,
        pixels: bool = False,
        progress: Callable[[int], None] | None = None,
        num_examples: float = NUM_EXAMPLES,
        dataset: dict[str, Any] | None = None,
    ) -> None:
        self.path, self.image_root = str(path), str(image_root)
        self.dataset = read_coco(path) if dataset is None else dataset
        self.images, self.categories = self.dataset["images"], self.dataset["categories"]
        self.annotations = self.dataset.get("annotations", [])
        if masks is None:
            masks = any(isinstance(entry, dict) and entry.get("segmentation") for entry in self.annotations)
        self.masks = masks
        self.headers, self.pixels, self.progress = headers, pixels, progress
        self.heights, self.widths = np.zeros((2, len(self.images)), np.int64)
        self.image_of = np.full(len(self.annotations), -1)
        # Indices of the first valid entries by their ids.
        self.image_by_id: dict[Any, int] = {}
        self.image_by_number: dict[int, int] = {}
        self.category_by_id: dict[int, int] = {}
        self.annotation_by_id: dict[int, int] = {}
        self.found: dict[str, list[int]] = defaultdict(list)
        self.examples: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for find in _FINDERS:
            for name, index, value in find(self):
                self.found[name].append(index)
                if len(self.examples[name]) < num_examples:
                    self.examples[name].append(self._example(CHECKS[name].key, index, value))

    def findings(self, *severities: str) -> list["Check"]:
        """Return the checks that found something, by severity and in the order of the table."""
        checks = [check for check in CHECKS.values() if self.found.get(check.name)]
        return [check for severity in severities or SEVERITIES for check in checks if check.severity == severity]

    def unfixable(self) -> "Check | None":
        return next((check for check in self.findings("error") if check.fix is None), None)

    def size_of_image(self, annotation: int) -> tuple[int, int]:
        """Return height and width of an annotation's image, 0 if unknown."""
        image = self.image_of[annotation]
        return (int(self.heights[image]), int(self.widths[image])) if image >= 0 else (0, 0)

    def mask(self, index: int, entry: dict[str, Any]) -> Any:
        """Return what is usable of the segmentation of an annotation ``entry``, None for nothing."""
        (height, width), segmentation = self.size_of_image(index), entry.get("segmentation")
        return check_segmentation(segmentation, height, width)[1] if segmentation and height else None

    def _example(self, key: str, index: int, value: Any) -> dict[str, Any]:
        entry = self.dataset[key][index]
        if not isinstance(entry, dict):
            return {"value": _shortened(entry)}
        example = {name: entry.get(field) for name, field in _EXAMPLE_KEYS[key].items()}
        if key == "annotations" and self.image_of[index] >= 0:
            example["file"] = self.images[self.image_of[index]]["file_name"]
        example["value"] = value if value is None or isinstance(value, str) else _shortened(value)
        return {key: item for key, item in example.items() if item is not None}

    def describe(self, check: "Check") -> str:
        """Return a finding in one line: what, how often, the first example and what the fix does."""
        return f"{self._counted(check)}: {check.effect}"

    def _counted(self, check: "Check") -> str:
        first = _example_text(self.examples[check.name][0])
        return f"{check.what} ({len(self.found[check.name]):,}; first: {first})"

    def lines(self) -> list[str]:
        """Return all findings, for a console."""
        sizes = (len(self.images), len(self.annotations), len(self.categories))
        lines = ["{}: {:,} images, {:,} annotations, {:,} categories".format(self.path, *sizes)]
        for check in self.findings():
            count = len(self.found[check.name])
            lines.append(f"{check.severity}: {check.name}: {check.what}: {count:,}")
            lines += [f"    {_example_text(example)}" for example in self.examples[check.name][:NUM_EXAMPLES]]
            if count > NUM_EXAMPLES:
                lines.append(f"    and {count - NUM_EXAMPLES:,} more: --json FILE lists all")
            lines.append(f"    {'effect' if check.severity == 'note' else 'fix'}: {check.effect}")
        return lines

    def error(self) -> ConfigError:
        """Return an error with the first finding and the ways out."""
        if (check := self.unfixable()) is not None:
            off = "if this is a false alarm, DATASETS.CHECK off trains on them as they are"
            return ConfigError(f"{self.path} has {self.describe(check)}; {off}")
        errors = self.findings("error")
        more = f" and {len(errors) - 1} more type{'s' * (len(errors) > 2)} of errors" if len(errors) > 1 else ""
        info = self.dataset.get("info")
        source = info.get(SOURCE) if isinstance(info, dict) else None
        data = [self.path, self.image_root] if source is None else [str(source)]
        command = shlex.join([*data, *([] if self.masks else ["--boxes"])])
        return ConfigError(
            f"{data[0]} has {self._counted(errors[0])}{more}: `vil check {command}` lists all, and "
            "with --fix OUT writes a copy without them; DATASETS.CHECK warn goes on without them"
        )

    def to_json(self) -> dict[str, Any]:
        fields = ("name", "severity", "what", "effect")
        return {
            "annotations": self.path,
            "image_root": self.image_root,
            "numbers": {key: len(self.dataset.get(key, ())) for key in ("images", "annotations", "categories")},
            "passed": not self.findings("error"),
            "found": [
                {field: getattr(check, field) for field in fields}
                | {"count": len(self.found[check.name]), "examples": self.examples[check.name]}
                for check in self.findings()
            ],
        }

    def fixed(self, *, areas: bool = True) -> tuple[dict[str, Any], dict[str, int]]:
        """Return the dataset with its findings fixed; entries without findings are those of the file.

        Args:
            areas: whether missing areas are computed, which only evaluation needs.

        Returns:
            The dataset, and the numbers of ``images`` and ``annotations`` left out, and of annotations ``changed``.
        """
        self.new_ids = itertools.count(max(self.annotation_by_id, default=0) + 1)
        dataset, left_out, changed = dict(self.dataset), {}, {}
        for key in ("categories", "images", "annotations"):
            entries = self.dataset.get(key, [])
            left_out[key], changed[key] = set(), {}
            if key == "annotations":
                left_out[key] = set(np.flatnonzero(np.isin(self.image_of, list(left_out["images"]))).tolist())
            for check in CHECKS.values():
                if check.key != key or check.fix is None or (check.name == "missing_or_invalid_area" and not areas):
                    continue
                for index in self.found.get(check.name, ()):
                    if index in left_out[key]:
                        continue
                    entry = check.fix(self, index, changed[key].get(index, entries[index]))
                    if entry is None:
                        left_out[key].add(index)
                    else:
                        changed[key][index] = entry
            if key in dataset:
                dataset[key] = [changed[key].get(i, e) for i, e in enumerate(entries) if i not in left_out[key]]
        counts = {key: len(left_out[key]) for key in ("images", "annotations")}
        return dataset, counts | {"changed": len(changed["annotations"].keys() - left_out["annotations"])}


# -- find: what is wrong, as (name of a check, index, value) ---------------------------------------


def find_in_categories(file: CocoFile) -> Findings:
    names = set()
    for index, entry in enumerate(file.categories):
        number = as_int(entry.get("id")) if isinstance(entry, dict) else None
        if number is None or not isinstance(entry.get("name"), str):
            yield "invalid_category_entry", index, None
        elif number in file.category_by_id:
            yield "duplicate_category_id", index, None
        else:
            file.category_by_id[number] = index
            if entry["name"] in names:
                yield "duplicate_category_name", index, None
            names.add(entry["name"])
            if type(entry["id"]) is not int:
                yield "category_id_not_integer", index, None


def find_in_images(file: CocoFile) -> Findings:
    names, indices_of_id = set(), defaultdict(list)
    for index, entry in enumerate(file.images):
        has_id = isinstance(entry, dict) and type(entry.get("id")) in (int, float, str)
        if not has_id or not isinstance(entry.get("file_name"), str) or not entry["file_name"]:
            yield "invalid_image_entry", index, None
            continue
        indices_of_id[entry["id"]].append(index)
        file.image_by_id.setdefault(entry["id"], index)
        if (number := as_int(entry["id"])) is not None:
            file.image_by_number.setdefault(number, index)
        if entry["file_name"] in names:
            yield "duplicate_file_name", index, None
        names.add(entry["file_name"])
        sides = entry.get("height"), entry.get("width")
        if all(type(side) is int and 0 < side < 2**31 for side in sides):
            file.heights[index], file.widths[index] = sides
        else:
            yield "missing_image_size", index, None
    for indices in indices_of_id.values():
        if len(indices) > 1:
            are_equal = all(file.images[index] == file.images[indices[0]] for index in indices)
            # One of equal entries stays; if they differ, it is unknown whose objects are whose.
            yield from (("duplicate_image_id", index, None) for index in indices[1 if are_equal else 0 :])
    if len({isinstance(number, str) for number in file.image_by_id}) == 2:
        yield from (("mixed_image_id_types", index, None) for indices in indices_of_id.values() for index in indices)


def find_in_files(file: CocoFile) -> Findings:
    unusable, unsized = set(file.found["invalid_image_entry"]), set(file.found["missing_image_size"])
    paths = {
        index: os.path.join(file.image_root, entry["file_name"])
        for index, entry in enumerate(file.images)
        if index not in unusable
    }
    missing, opened = set(missing_files(paths.values())), {}
    for index, path in paths.items():
        if path in missing:
            yield "missing_image_file", index, None
        elif file.headers or file.pixels or index in unsized:
            opened[index] = path
    with ThreadPool((os.cpu_count() or 1) if file.pixels else _NUM_THREADS) as pool:
        read = functools.partial(_size_or_reason, pixels=file.pixels)
        sizes = pool.imap(read, opened.values(), chunksize=_FILES_PER_TASK)
        for count, (index, size) in enumerate(zip(opened, sizes, strict=True), start=1):
            if file.progress is not None:
                file.progress(count)
            expected = int(file.heights[index]), int(file.widths[index])
            if isinstance(size, str):
                yield "unreadable_image_file", index, size
            elif index in unsized:
                file.heights[index], file.widths[index] = size
            elif size != expected:
                value = f"(height, width) is {size} in the file, {expected} in the annotations"
                yield "image_size_mismatch", index, value


def _size_or_reason(path: str, *, pixels: bool) -> tuple[int, int] | str:
    try:
        return read_image(path).shape[:2] if pixels else read_size(path)
    except UnreadableImage as error:
        return error.reason


def missing_files(paths: Iterable[str]) -> Iterator[str]:
    """Yield the paths that do not exist, by listing each folder once instead of looking for each file."""
    folders: dict[str, set[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition(os.sep)
        if folder not in folders:
            folders[folder] = set(os.listdir(folder)) if os.path.isdir(folder) else set()
        if name not in folders[folder]:
            yield path


def find_in_annotations(file: CocoFile) -> Findings:
    are_mixed = bool(file.found["mixed_image_id_types"])
    # The last one is for an unknown image, whose index is -1.
    largest_areas = [*(2 * np.maximum(file.heights * file.widths, 1)).tolist(), math.inf]
    for index, entry in enumerate(file.annotations):
        if not isinstance(entry, dict):
            yield "invalid_annotation_entry", index, None
            continue
        name = entry.get("image_id")
        image = file.image_by_id.get(name, -1) if isinstance(name, (int, str, float)) else -1
        if image < 0:
            image = file.image_by_number.get(as_int(name), -1)
        file.image_of[index] = image
        if image < 0:
            yield "unknown_image_id", index, None
        elif are_mixed or file.images[image]["id"] != name:
            yield "image_id_type_mismatch", index, None
        category = entry.get("category_id")
        if type(category) is not int or category not in file.category_by_id:
            name = "category_id_type_mismatch" if as_int(category) in file.category_by_id else "unknown_category_id"
            yield name, index, f"category_id {_shortened(category)}"
        number = entry.get("id")
        if type(number) is not int or number <= 0:
            yield "invalid_annotation_id", index, None
        elif file.annotation_by_id.setdefault(number, index) != index:
            yield "duplicate_annotation_id", index, None
        crowd = entry.get("iscrowd")
        if crowd is None:
            yield "missing_iscrowd", index, None
        elif type(crowd) not in (int, bool, float) or crowd not in (0, 1):
            yield "invalid_iscrowd", index, f"iscrowd {_shortened(crowd)}"
        if entry.get("ignore") and not crowd:
            yield "ignore_flag", index, None
        area, box = entry.get("area"), entry.get("bbox")
        largest, is_empty = largest_areas[image], False
        if type(box) is list and len(box) == 4 and set(map(type, box)) <= _NUMBERS:
            is_empty = not (box[2] > 0 and box[3] > 0)
            if not entry.get("segmentation"):
                # With some room for boxes and areas that are rounded.
                largest = min(largest, 2 * (box[2] + 1) * (box[3] + 1))
        if type(area) not in _NUMBERS or not 0 <= area <= largest or (area == 0 and not is_empty):
            yield "missing_or_invalid_area", index, None if area is None else f"area {_shortened(area)}"


def find_in_masks(file: CocoFile) -> Findings:
    for index, entry in enumerate(file.annotations if file.masks else ()):
        if not isinstance(entry, dict):
            continue
        segmentation = entry.get("segmentation")
        if not segmentation:
            yield "missing_segmentation", index, None
            continue
        height, width = file.size_of_image(index)
        if height:
            for problem in check_segmentation(segmentation, height, width)[0]:
                yield problem, index, segmentation
            if isinstance(segmentation, dict) and not entry.get("iscrowd"):
                yield "rle_without_iscrowd", index, None


def find_in_boxes(file: CocoFile) -> Findings:
    indices, rows = [], []
    for index, entry in enumerate(file.annotations):
        if not isinstance(entry, dict):
            continue
        box = entry.get("bbox")
        if type(box) is list and len(box) == 4 and set(map(type, box)) <= _NUMBERS:
            indices.append(index)
            rows.append(box)
        elif "bbox" in entry:
            yield "invalid_bbox", index, box
        else:
            yield "missing_bbox_and_mask" if box_of_mask(file, index, entry) is None else "missing_bbox", index, None
    if not rows:
        return
    try:
        boxes = np.array(rows, np.float64)
    except OverflowError:
        boxes = np.array([[x if abs(x) < sys.float_info.max else math.inf for x in box] for box in rows], np.float64)
    for name, where in _box_problems(file, np.array(indices), boxes):
        yield from ((name, indices[row], rows[row]) for row in np.flatnonzero(where).tolist())


def _box_problems(file: CocoFile, indices: np.ndarray, boxes: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name of a check and which boxes (N, 4) it is about: (N,) bool."""
    images = file.image_of[indices]
    heights, widths = np.append(file.heights, 0)[images], np.append(file.widths, 0)[images]
    has_size, finite = (heights > 0) & (widths > 0), np.isfinite(boxes).all(1)
    left, top, wide, high = np.where(finite[:, None], boxes, 0).T
    right, bottom, far = left + wide, top + high, FAR * np.maximum(heights, widths)
    sound = finite & (wide >= 0) & (high >= 0)
    yield "invalid_bbox", ~sound
    is_far = (np.minimum(left, top) < -far) | (right > widths + far) | (bottom > heights + far)
    is_far &= sound & has_size
    empty = sound & ~is_far & ((wide == 0) | (high == 0))
    yield "zero_area_bbox", empty
    sound &= has_size & ~is_far & ~empty
    outside = sound & ((right <= 0) | (bottom <= 0) | (left >= widths) | (top >= heights))
    yield "bbox_outside_image", outside | is_far
    beyond = sound & ((left < -1) | (top < -1) | (right > widths + 1) | (bottom > heights + 1))
    yield "bbox_exceeds_image", beyond & ~outside
    number = int(sound.sum())
    if not number:
        return
    as_corners = (wide > left) & (high > top) & (wide <= widths + 1) & (high <= heights + 1) & (left >= -1)
    if number >= _MIN_BOXES and beyond.sum() >= _BEYOND_SHARE * number and as_corners[sound].mean() > 0.99:
        yield "boxes_in_xyxy_format", beyond
    if max(right[sound].max(), bottom[sound].max()) <= 1 and min(widths[sound].min(), heights[sound].min()) > 10:
        yield "boxes_in_normalized_coordinates", sound


def find_without_objects(file: CocoFile) -> Findings:
    used = {*file.image_of.tolist(), *file.found["invalid_image_entry"]}
    yield from (("image_without_objects", index, None) for index in range(len(file.images)) if index not in used)
    used = {as_int(entry.get("category_id")) for entry in file.annotations if isinstance(entry, dict)}
    yield from (("category_without_objects", index, None) for n, index in file.category_by_id.items() if n not in used)


# -- fix: the entry instead of one with a finding, or None to leave it out -------------------------

Fix = Callable[[CocoFile, int, Any], Any]


def leave_out(file: CocoFile, index: int, entry: Any) -> None:
    return None


def set_values(**values: Any) -> Fix:
    return lambda file, index, entry: entry | values


def to_int(key: str) -> Fix:
    return lambda file, index, entry: entry | {key: as_int(entry[key])}


def set_file_size(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"height": int(file.heights[index]), "width": int(file.widths[index])}


def renumber_id(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"id": index + 1}


def set_image_id(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    image = int(file.image_of[index])
    return entry | {"image_id": image + 1 if file.found["mixed_image_id_types"] else file.images[image]["id"]}


def usable_mask(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any] | None:
    mask = file.mask(index, entry)
    return None if mask is None else entry | {"segmentation": mask}


def box_of_mask(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any] | None:
    mask = file.mask(index, entry)
    box = None if mask is None else box_of(mask, *file.size_of_image(index))
    return None if box is None else entry | {"bbox": box}


def new_id(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"id": next(file.new_ids)}


def new_id_unless_equal(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any] | None:
    same_id = file.annotations[file.annotation_by_id[entry["id"]]]
    return None if file.annotations[index] == same_id else new_id(file, index, entry)


def area_of_mask_or_box(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    mask = file.mask(index, entry)
    area = 0 if mask is None else float(mask_util.area(rle_of(mask, *file.size_of_image(index))))
    # A mask may be too thin for a whole pixel.
    return entry | {"area": area or float(entry["bbox"][2]) * float(entry["bbox"][3])}


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """A row of the table.

    Attributes:
        severity: an ``"error"`` stops a run unless ``DATASETS.CHECK`` is ``"warn"``; ``"fixed"`` can be read in one way
            only, and always is; a ``"note"`` does no harm.
        what: what is found, in the plural.
        fix: None where there is none.
        effect: what the fix does, or what a note means.
        key: the list of the COCO file that it is about.
    """

    name: str
    severity: Literal["error", "fixed", "note"]
    what: str
    fix: Fix | None
    effect: str
    key: Literal["categories", "images", "annotations"]


SEVERITIES = ("error", "fixed", "note")
_OUT, _WITH_OBJECTS = "left out", "left out, with their objects"
_BOX, _MASK = "the box of the mask if there is one, else left out", "left out if no other polygon is usable"
_INT = "read as an integer"

# Per list: name, severity, what is found, fix, and its effect. Fixes are done in this order: new ids and areas come
# last, for the annotations that stay.
# fmt: off
CHECKS = {row[0]: Check(*row, key=key) for key, rows in {
    "categories": (
        ("invalid_category_entry", "error", "categories without an id and a name", leave_out, _WITH_OBJECTS),
        ("duplicate_category_id", "error", "categories with the id of another", leave_out, "the first one stays"),
        ("category_id_not_integer", "fixed", "categories whose id is text or has a decimal point", to_int("id"), _INT),
        ("duplicate_category_name", "note", "categories with the name of another", None, "different classes"),
        ("category_without_objects", "note", "categories without objects", None,
         "not learned if these are the training images; no AP if they are for evaluation"),
    ),
    "images": (
        ("invalid_image_entry", "error", "images without an id and a file_name", leave_out, _WITH_OBJECTS),
        ("duplicate_image_id", "error", "images whose id is not unique", leave_out,
         "of equal entries one stays; others are left out with their objects, which could be of either"),
        ("mixed_image_id_types", "error", "images with ids of which some are text and others numbers", renumber_id,
         "new ids, the positions in the file"),
        ("missing_image_size", "fixed", "images without height and width", set_file_size, "read from the file"),
        ("duplicate_file_name", "note", "images with the file of another", None, "trained on as two images"),
        ("missing_image_file", "error", "images whose file is missing", leave_out, _WITH_OBJECTS),
        ("unreadable_image_file", "error", "images whose file cannot be read", leave_out, _WITH_OBJECTS),
        ("image_size_mismatch", "error", "images whose size differs from the annotation", leave_out, _WITH_OBJECTS),
        ("image_without_objects", "note", "images without objects", None,
         "left out of training unless DATALOADER.FILTER_EMPTY_ANNOTATIONS is False; evaluated"),
    ),
    "annotations": (
        ("invalid_annotation_entry", "error", "annotations that are not JSON objects", leave_out, _OUT),
        ("unknown_image_id", "error", "annotations of an image_id that no image has", leave_out, _OUT),
        ("image_id_type_mismatch", "fixed", "annotations whose image_id is written in another way than the image's id",
         set_image_id, "the image's id"),
        ("unknown_category_id", "error", "annotations with an unknown category_id", leave_out, _OUT),
        ("category_id_type_mismatch", "fixed", "annotations whose category_id is text or has a decimal point",
         to_int("category_id"), _INT),
        ("missing_iscrowd", "fixed", "annotations without iscrowd", set_values(iscrowd=0), "0"),
        ("invalid_iscrowd", "error", "annotations whose iscrowd is neither 0 nor 1", leave_out, _OUT),
        ("missing_segmentation", "error", "annotations without the segmentation that others have", leave_out, _OUT),
        ("invalid_segmentation", "error", "segmentations that are neither polygons of finite numbers nor RLE",
         usable_mask, _MASK),
        ("empty_mask", "error", "masks without a polygon of three points in the image", usable_mask, _OUT),
        ("polygon_far_outside_image", "error", "masks with a polygon more than ten image sides beyond the image",
         usable_mask, _MASK),
        ("empty_polygon", "fixed", "masks with a polygon of fewer than three points or outside the image among others",
         usable_mask, "the other polygons stay"),
        ("invalid_rle", "error", "RLE whose size or counts are not those of the image", usable_mask, _OUT),
        ("rle_without_iscrowd", "note", "RLE instead of polygons of objects that are not crowds", None,
         "read as bitmaps, as are the polygons of their images"),
        ("boxes_in_xyxy_format", "error", "boxes that fit their images only as [left, top, right, bottom]", None,
         "always stops: convert them to [left, top, width, height]"),
        ("boxes_in_normalized_coordinates", "error", "boxes that are fractions of the image, not pixels", None,
         "always stops: multiply them by width and height"),
        ("missing_bbox_and_mask", "error", "annotations without a bbox and without a usable mask", leave_out, _OUT),
        ("missing_bbox", "fixed", "annotations without a bbox, with a mask", box_of_mask, "the box of the mask"),
        ("invalid_bbox", "error", "boxes that are not finite [left, top, width >= 0, height >= 0]", box_of_mask, _BOX),
        ("bbox_outside_image", "error", "boxes outside the image, or more than ten image sides beyond it",
         box_of_mask, _BOX),
        ("zero_area_bbox", "note", "boxes without area", None, "not trained on; in evaluation nothing matches them"),
        ("bbox_exceeds_image", "note", "boxes more than a pixel beyond the image", None,
         "clipped in training, evaluated as they are"),
        ("ignore_flag", "error", "annotations with ignore, which detectron2 does not know",
         set_values(iscrowd=1, ignore=0), "taken for a crowd (iscrowd 1): not trained on, not counted"),
        ("invalid_annotation_id", "fixed", "annotations without an id above 0, which COCO's evaluation needs", new_id,
         "a new id"),
        ("duplicate_annotation_id", "error", "annotations whose id is not unique", new_id_unless_equal,
         "an equal annotation is left out, another one gets a new id"),
        ("missing_or_invalid_area", "fixed", "annotations whose area is missing, not positive or too large",
         area_of_mask_or_box, "the area of the mask, or of the box"),
    ),
}.items() for row in rows}
# fmt: on
_FINDERS = (
    *(find_in_categories, find_in_images, find_in_files, find_in_annotations, find_in_masks, find_in_boxes),
    find_without_objects,
)


def as_int(value: object) -> int | None:
    """Return the whole number that an id is, or that its text stands for, or None."""
    if isinstance(value, bool):
        return None
    try:
        if isinstance(value, float):
            return int(value) if value.is_integer() else None
        return int(value) if isinstance(value, (int, str)) else None
    except ValueError:
        return None


def _shortened(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:40]} ... {text[-20:]}"


def _example_text(example: dict[str, Any]) -> str:
    """Return for instance ``annotation 17, image 3, file a.jpg, [nan, 1, 2, 3]``."""
    return ", ".join(str(item) if key == "value" else f"{key} {_shortened(item)}" for key, item in example.items())
