"""Check and fix COCO files and their images.

``CHECKS`` is the table of all checks. To add a check, add a row to ``CHECKS`` and a ``yield`` to a ``find_...``
function. Several checks share one loop because a file may have millions of objects.
"""

import contextlib
import difflib
import itertools
import math
import os
import re
import shlex
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pycocotools import mask as mask_util

from backbones import ConfigError
from backbones.errors import counted
from projects_vil.data.image_files import missing_files, read_sizes
from projects_vil.data.readers import SOURCE, as_box, read_coco
from projects_vil.data.segmentation import FAR, box_of, check_segmentation, count_masks, has_mask, rectangle, rle_of
from projects_vil.files import like, paused_garbage_collection

NUM_EXAMPLES = 5
# The classes with the most objects and with the fewest objects, this number of each, are listed.
_NUM_CLASSES = 10
# The product of larger numbers could overflow.
_LARGEST = 1e100
_NO_BOX = [math.nan] * 4
# A class may be a typing mistake if it has at most this fraction of the objects of a class with a similar name.
_RARE, _SIMILAR = 0.05, 0.87
# The images of a file with at most this many images are always decoded.
_NUM_DECODED = 2000
_EXAMPLE_KEYS = {
    "annotations": {"annotation": "id", "image": "image_id"},
    "images": {"image": "id", "file": "file_name"},
    "categories": {"category": "id", "name": "name"},
}

Findings = Iterator[tuple[str, int, Any]]


class CocoFile:
    """A COCO file and the findings of its checks.

    Args:
        path: The annotation file.
        image_root: The image folder.
        masks: Whether to check segmentations, if there are any. None checks them if at least half of the objects have
            one.
        pixels: Whether to decode every image file, even if the file has more than 2,000 images.
        progress: A function that is called with the number of image files read so far.
        num_examples: The maximum number of examples per finding.
        dataset: The content of the file, if it has been read already.

    Raises:
        ConfigError: Under the conditions of :func:`read_coco`.

    Attributes:
        dataset: The content of the file.
        found: A dict from the name of a check to indices in the list of the check.
        examples: A dict from the name of a check to the ids, file names and values of its first findings.
        sizes: The height and width of each image in pixels, and (0, 0) if they are unknown. The last element is
            for annotations of an unknown image, whose index is -1.
        image_of: The index of the image of each annotation, or -1 if it is unknown.
        category_of: The index of the category of each annotation, or -1 if it is unknown.
        num_objects: The number of objects of each category, by its index.
        mask_points: A point (x, y) of the mask of each annotation, or NaN if there is no valid mask.
    """

    @paused_garbage_collection()
    def __init__(
        self,
        path: str | Path,
        image_root: str | Path,
        *,
        masks: bool | None = None,
        pixels: bool = False,
        progress: Callable[[int], None] | None = None,
        num_examples: float = NUM_EXAMPLES,
        dataset: dict[str, Any] | None = None,
    ) -> None:
        self.path, self.image_root = str(path), str(image_root)
        self.dataset = read_coco(path) if dataset is None else dataset
        self.images, self.categories = self.dataset["images"], self.dataset["categories"]
        self.annotations = self.dataset.get("annotations", [])
        number, total, _ = (0, 0, 0) if masks is False else count_masks(self.annotations)
        self.masks = number > 0 and (2 * number >= total if masks is None else masks)
        self.pixels, self.progress = pixels, progress
        self.sizes = [(0, 0)] * (len(self.images) + 1)
        self.image_of, self.category_of = np.full((2, len(self.annotations)), -1, np.int32)
        # The index of the first valid entry with each id. Images are also found by the integer value of their id.
        self.image_by_id: dict[Any, int] = {}
        self.image_by_number: dict[int, int] = {}
        self.category_by_id: dict[int, int] = {}
        self.num_objects: Counter[int] = Counter()
        self.mask_points = np.full((len(self.annotations), 2), math.nan, np.float32)
        # The valid ids of annotations in ascending order, and the index of the first annotation with each id
        self.annotation_ids, self.first_with_id = np.zeros((2, 0), int)
        self.found: dict[str, list[int]] = defaultdict(list)
        self.examples: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for find in _FINDERS:
            for name, index, value in find(self):
                self.found[name].append(index)
                if len(self.examples[name]) < num_examples:
                    self.examples[name].append(self._example(CHECKS[name].key, index, value))

    def findings(self, *severities: str) -> list["Check"]:
        """Return the checks with findings, sorted by severity and by their order in ``CHECKS``."""
        severities = severities or SEVERITIES
        found = [check for check in CHECKS.values() if check.severity in severities and self.found.get(check.name)]
        return sorted(found, key=lambda check: severities.index(check.severity))

    def unfixable(self) -> "Check | None":
        """Return the first error that has no fix, or None."""
        return next((check for check in self.findings("error") if check.fix is None), None)

    def mask(self, index: int, entry: dict[str, Any]) -> Any:
        """Return the valid part of the segmentation of an annotation, or None if there is none."""
        (height, width), segmentation = self.sizes[self.image_of[index]], entry.get("segmentation")
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
        """Return a finding as one line: description, count and first example."""
        return f"{check.what} ({len(self.found[check.name]):,}; first: {_example_text(self.examples[check.name][0])})"

    def lines(self) -> list[str]:
        """Return all findings as lines of text."""
        sizes = f"{counted(len(self.images), 'image')}, {counted(len(self.annotations), 'annotation')}"
        objects = [f"{self.categories[index]['name']} {number:,}" for index, number in self.num_objects.most_common()]
        if len(objects) > 2 * _NUM_CLASSES:
            objects[_NUM_CLASSES:-_NUM_CLASSES] = ["..."]
        lines = [f"{self.path}: {sizes}, {counted(len(self.categories), 'category')}"]
        lines.append(f"objects per class: {', '.join(objects)}")
        for check in self.findings():
            count = len(self.found[check.name])
            lines.append(f"{check.severity.replace('fixed', 'note')}: {check.name}: {check.what}: {count:,}")
            lines += [f"    {_example_text(example)}" for example in self.examples[check.name][:NUM_EXAMPLES]]
            if count > NUM_EXAMPLES:
                lines.append(f"    and {count - NUM_EXAMPLES:,} more, which --json FILE lists")
            lines.append(f"    {'fix' if check.severity == 'error' else 'effect'}: {check.effect}")
        return lines

    def error(self, source: str | None = None) -> ConfigError:
        """Return a :class:`ConfigError` with the first error and advice.

        Args:
            source: The dataset of the file. By default the one that is written in the file, or the file.
        """
        info = self.dataset.get("info")
        source = info.get(SOURCE, source) if isinstance(info, dict) else source
        data = [self.path, "--images", self.image_root] if source is None else [str(source)]
        if (check := self.unfixable()) is not None:
            text = f"'{data[0]}' has {self.describe(check)}. There is no automatic fix, so {check.effect}."
            return ConfigError(f"{text} If this is a false alarm, train with DATASETS.CHECK off.")
        errors = self.findings("error")
        more = f" and {len(errors) - 1} more type{'s' * (len(errors) > 2)} of errors" if len(errors) > 1 else ""
        command = shlex.join([*data, *([] if self.masks else ["--boxes"])])
        text = f"'{data[0]}' has {self.describe(errors[0])}{more}. Run 'vil check {command}' to list all errors"
        advice = "add --fix OUT for a fixed copy. Or train with DATASETS.CHECK warn, which fixes only the run."
        return ConfigError(f"{text}, and {advice}")

    def to_json(self) -> dict[str, Any]:
        """Return all findings as a dict that can be written to a JSON file."""
        found = []
        for check in self.findings():
            fields = {field: getattr(check, field) for field in ("name", "severity", "what", "effect")}
            found.append(fields | {"count": len(self.found[check.name]), "examples": self.examples[check.name]})
        numbers = {key: len(self.dataset.get(key, ())) for key in ("images", "annotations", "categories")}
        files = {"annotations": self.path, "image_root": self.image_root}
        return files | {"numbers": numbers, "passed": not self.findings("error"), "found": found}

    def fixed(self, *, areas: bool = True) -> tuple[dict[str, Any], dict[str, int]]:
        """Return a copy of the dataset with all fixes. Entries without findings are unchanged.

        Args:
            areas: Whether to compute missing areas. Only evaluation needs them.

        Returns:
            The dataset, and a dict with the numbers of removed ``images`` and ``annotations`` and of ``changed``
            annotations.
        """
        self.new_ids = itertools.count(int(self.annotation_ids.max(initial=0)) + 1)
        dataset, changed = dict(self.dataset), defaultdict(dict)
        for key in ("categories", "images", "annotations"):
            # The changed entries by index, and None for removed entries
            entries, new = self.dataset.get(key, []), changed[key]
            if key == "annotations":
                removed = [index for index, image in changed["images"].items() if image is None]
                new.update(dict.fromkeys(np.flatnonzero(np.isin(self.image_of, removed)).tolist()))
            fixes = [check for check in CHECKS.values() if check.key == key and check.fix is not None]
            for check in [check for check in fixes if areas or check.name != "missing_or_invalid_area"]:
                for index in self.found.get(check.name, ()):
                    entry = new.get(index, entries[index])
                    new[index] = None if entry is None else check.fix(self, index, entry)
            if key in dataset:
                kept = (new.get(index, entry) for index, entry in enumerate(entries))
                dataset[key] = like(entries, (entry for entry in kept if entry is not None))
        counts = {key: [*changed[key].values()].count(None) for key in ("images", "annotations")}
        return dataset, counts | {"changed": len(changed["annotations"]) - counts["annotations"]}


def as_int(value: object) -> int | None:
    """Return an id as an integer, or None if it is not a whole number or the text of one."""
    with contextlib.suppress(ValueError, OverflowError):
        if type(value) is str or (type(value) in (int, float) and int(value) == value):
            return int(value)
    return None


# -- find: yield findings as (name of a check, index, value) ---------------------------------------


def find_in_categories(file: CocoFile) -> Findings:
    for index, entry in enumerate(file.categories):
        number = as_int(entry.get("id")) if isinstance(entry, dict) else None
        if number is None or not (isinstance(entry.get("name"), str) or as_int(entry.get("name")) is not None):
            yield "invalid_category_entry", index, None
        elif number in file.category_by_id:
            yield "duplicate_category_id", index, None
        else:
            file.category_by_id[number] = index
            if not isinstance(entry["name"], str):
                yield "category_name_not_text", index, None
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
            file.sizes[index] = sides
        else:
            yield "missing_image_size", index, None
    for indices in indices_of_id.values():
        are_equal = all(file.images[index] == file.images[indices[0]] for index in indices)
        # One of several equal entries is kept. If entries differ, their annotations cannot be assigned to an image.
        yield from (("duplicate_image_id", index, None) for index in indices[1 if are_equal else 0 :])
    if len({isinstance(number, str) for number in file.image_by_id}) == 2:
        yield from (("mixed_image_id_types", index, None) for indices in indices_of_id.values() for index in indices)


def find_in_files(file: CocoFile) -> Findings:
    wrong, unsized = set(file.found["invalid_image_entry"]), set(file.found["missing_image_size"])
    paths = {i: os.path.join(file.image_root, one["file_name"]) for i, one in enumerate(file.images) if i not in wrong}
    missing = set(missing_files(paths.values()))
    yield from (("missing_image_file", index, None) for index, path in paths.items() if path in missing)
    opened = {index: path for index, path in paths.items() if path not in missing}
    sizes = read_sizes(opened.values(), pixels=file.pixels or len(opened) <= _NUM_DECODED)
    for count, (index, (size, damage)) in enumerate(zip(opened, sizes, strict=True), start=1):
        if file.progress is not None:
            file.progress(count)
        if damage is not None:
            yield "unreadable_image_file" if size is None else "damaged_image_file", index, damage
        if size is not None and index in unsized:
            file.sizes[index] = size
        elif size not in (None, written := file.sizes[index]):
            how = "swapped" if size == written[::-1] else "{:.3g} and {:.3g} times".format(*np.divide(size, written))
            yield "image_size_mismatch", index, f"(height, width) is {size} in the file, {written} annotated: {how}"
            # Errors of its boxes and masks would be consequences.
            file.sizes[index] = (0, 0)


def find_in_annotations(file: CocoFile) -> Findings:
    ids = np.zeros(len(file.annotations), int)
    by_name = {repr(str(file.categories[index]["name"])): index for index in file.category_by_id.values()}
    # A name of two categories is ambiguous.
    by_name = by_name if len(by_name) == len(file.category_by_id) else {}
    for index, entry in enumerate(file.annotations):
        if not isinstance(entry, dict):
            yield "invalid_annotation_entry", index, None
            continue
        name = entry.get("image_id")
        exact = file.image_by_id.get(name) if isinstance(name, (int, str, float)) else None
        file.image_of[index] = image = file.image_by_number.get(as_int(name), -1) if exact is None else exact
        if exact is None or file.found["mixed_image_id_types"]:
            yield "unknown_image_id" if image < 0 else "image_id_type_mismatch", index, None
        category = entry.get("category_id")
        file.category_of[index] = position = file.category_by_id.get(as_int(category), by_name.get(repr(category), -1))
        if position < 0 or type(category) is not int:
            name = "unknown_category_id" if position < 0 else "category_id_type_mismatch"
            yield name, index, f"category_id {_shortened(category)}"
        number = entry.get("id")
        if type(number) is not int or not 0 < number < 2**63:
            yield "invalid_annotation_id", index, None
        else:
            ids[index] = number
        crowd = entry.get("iscrowd")
        if crowd in (None, "0", "1"):
            yield "missing_iscrowd", index, None
        elif crowd not in (0, 1):
            yield "invalid_iscrowd", index, f"iscrowd {_shortened(crowd)}"
        if entry.get("ignore") and crowd not in (1, "1"):
            yield "ignore_flag", index, None
        segmentation, (height, width) = entry.get("segmentation"), file.sizes[image]
        if file.masks and not has_mask(segmentation):
            yield "missing_segmentation", index, None
        elif file.masks and height:
            problems, mask = check_segmentation(segmentation, height, width)
            yield from ((problem, index, segmentation) for problem in problems)
            if isinstance(segmentation, dict) and not crowd:
                yield "rle_without_iscrowd", index, None
            if mask is not None:
                first = mask[0] if isinstance(mask, list) else box_of(mask, height, width) or _NO_BOX
                file.mask_points[index] = first[:2]
    file.num_objects.update(dict.fromkeys(file.category_by_id.values(), 0))
    file.num_objects.update(file.category_of[file.category_of >= 0].tolist())
    file.annotation_ids, file.first_with_id = np.unique(ids, return_index=True)
    ids[file.first_with_id] = 0
    yield from (("duplicate_annotation_id", index, None) for index in np.flatnonzero(ids).tolist())


def misfits_box(area: Any, width: Any, height: Any) -> Any:
    """Return whether an area is impossible in a box. The limits allow for rounded values and thin objects."""
    box_area = width * height
    return (box_area > 0) & ((area < 1e-3 * box_area) | (area > 2 * (width + 1) * (height + 1)))


def find_in_boxes(file: CocoFile) -> Findings:
    indices, boxes, areas = array("q"), array("d"), array("d")
    for index, entry in enumerate(file.annotations):
        if not isinstance(entry, dict):
            continue
        box, area = entry.get("bbox"), entry.get("area")
        indices.append(index)
        areas.append(area if type(area) in (int, float) and abs(area) < _LARGEST else math.nan)
        types = set(map(type, box)) if type(box) is list else {None}
        if str in types or isinstance(box, str | dict):
            with contextlib.suppress(TypeError, ValueError, KeyError, OverflowError):
                box, types = as_box(box), {float}
                yield "bbox_as_text", index, entry["bbox"]
        # The maximum does not find NaN, but the sum does.
        is_box = types <= {int, float} and len(box) == 4 and max(map(abs, box)) < _LARGEST and sum(box) == sum(box)
        boxes.extend(box if is_box else _NO_BOX)
        if not is_box and "bbox" in entry:
            yield "invalid_bbox", index, box
        elif not is_box and file.image_of[index] not in file.found["image_size_mismatch"]:
            yield "missing_bbox_and_mask" if box_of_mask(file, index, entry) is None else "missing_bbox", index, None
    indices, boxes, areas = np.asarray(indices), np.asarray(boxes).reshape(-1, 4), np.asarray(areas)
    for name, where in _box_problems(file, indices, boxes):
        yield from ((name, index, file.annotations[index]["bbox"]) for index in indices[where].tolist())
    # Images of unknown size have no limit.
    most = 2 * np.prod(np.where(file.sizes, file.sizes, math.inf), axis=1)[file.image_of[indices]]
    is_valid = (areas >= 0) & (areas <= np.fmax(most, boxes[:, 2:].prod(1))) & ~misfits_box(areas, *abs(boxes[:, 2:].T))
    for index in indices[~is_valid].tolist():
        yield "missing_or_invalid_area", index, f"area {_shortened(file.annotations[index].get('area'))}"
    keys = file.image_of[indices], file.category_of[indices], *boxes.T
    order = np.lexsort(keys)
    are_equal = np.all([key[order[1:]] == key[order[:-1]] for key in keys], axis=0)
    for first, second in zip(indices[order[:-1][are_equal]], indices[order[1:][are_equal]], strict=True):
        if file.annotations[first].get("segmentation") == file.annotations[second].get("segmentation"):
            yield "duplicate_object", int(second), f"equal to annotation {file.annotations[first].get('id')}"


def _box_problems(file: CocoFile, indices: np.ndarray, boxes: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name of a check and the boxes with this problem as (N,) bool, for boxes (N, 4)."""
    # Sides are below 2**31.
    heights, widths = np.array(file.sizes, np.int32)[file.image_of[indices]].T
    left, top, wide, high = boxes.T
    # Comparisons with NaN are false.
    has_size = (heights > 0) & (widths > 0) & (left == left)
    swapped = (wide < 0) | (high < 0)
    yield "swapped_bbox_corners", swapped
    # Copies of the boxes would determine the peak of the memory.
    if swapped.any():
        left, top, wide, high = np.minimum(left, left + wide), np.minimum(top, top + high), abs(wide), abs(high)
    right, bottom, far = left + wide, top + high, FAR * np.maximum(heights, widths, dtype=np.float32)
    is_far = has_size & ((np.minimum(left, top) < -far) | (right > widths + far) | (bottom > heights + far))
    empty = ~is_far & ((wide == 0) | (high == 0))
    yield "zero_area_bbox", empty
    valid = has_size & ~is_far & ~empty
    outside = valid & ((right <= 0) | (bottom <= 0) | (left >= widths) | (top >= heights))
    yield "bbox_outside_image", outside | is_far
    beyond = valid & ((left < -1) | (top < -1) | (right > widths + 1) | (bottom > heights + 1))
    yield "bbox_exceeds_image", beyond & ~outside
    x, y = file.mask_points[indices].T
    is_beside = (abs(2 * x - left - right) > 2 * wide + 2) | (abs(2 * y - top - bottom) > 2 * high + 2)
    yield "bbox_misfits_mask", valid & is_beside
    is_many = valid.sum() >= 20
    # With 20 boxes or more, a fifth must exceed the image. With fewer, half must exceed it by a quarter of a side,
    # because boxes of objects at the border may exceed it too.
    far_beyond = (left < -widths / 4) | (top < -heights / 4) | (right > 1.25 * widths) | (bottom > 1.25 * heights)
    is_wrong = beyond[valid].mean() >= 0.2 if is_many else valid.sum() > 1 and far_beyond[valid].mean() >= 0.5
    # If labels of YOLO have corners, the reader takes the first corner for the center.
    for x1, y1 in ((left, top), (left + wide / 2, top + high / 2)):
        as_corners = (wide > x1) & (high > y1) & (wide <= widths + 1) & (high <= heights + 1) & (x1 >= -1)
        as_corners &= ~((x < x1 - 1) | (x > wide + 1) | (y < y1 - 1) | (y > high + 1))
        if is_wrong and as_corners[valid].mean() > 0.99:
            yield "boxes_in_xyxy_format", beyond
            break
    else:
        # Boxes with a mask are compared with the mask.
        if valid.sum() >= 10 and (beyond & np.isnan(x))[valid].mean() >= 0.5:
            yield "boxes_in_unknown_format", beyond
    # Percent are spread over the first 100 pixels of larger images.
    limit = 100 if is_many and min(np.ptp(right[valid]), np.ptp(bottom[valid])) > 50 else 1
    if ((right <= limit) & (bottom <= limit) & (np.minimum(heights, widths) > max(2 * limit, 10)))[valid].all():
        yield "boxes_in_normalized_coordinates", valid


def find_without_objects(file: CocoFile) -> Findings:
    used = {*np.unique(file.image_of).tolist(), *file.found["invalid_image_entry"]}
    yield from (("image_without_objects", index, None) for index in range(len(file.images)) if index not in used)
    by_end: dict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
    for index, number in file.num_objects.most_common():
        name = str(file.categories[index]["name"])
        if not number:
            groups = [file.categories[other].get("supercategory") for other in file.num_objects if other != index]
            yield "category_without_objects", index, "the supercategory of other categories" if name in groups else None
        key = re.sub(r"[\s_-]|s$", "", name.casefold().strip()) or name
        # Only names with equal digits and an equal beginning or end are compared, because there may be 10,000 classes.
        ends = [(*re.findall(r"\d", key), end) for end in (key[:3], key[-3:])]
        near = by_end[ends[0]] | by_end[ends[1]]
        # A rare class whose name differs in one letter is often a typing mistake.
        frequent = [other for other, first in near.items() if 0 < number <= _RARE * file.num_objects[first]]
        for other in [key] if key in near else difflib.get_close_matches(key, frequent, 1, _SIMILAR):
            text = f"{counted(number, 'object')}, similar to {file.categories[near[other]]['name']!r}"
            yield "duplicate_category_name", index, f"{text} with {counted(file.num_objects[near[other]], 'object')}"
        for end in ends:
            by_end[end].setdefault(key, index)


# -- fix: return the fixed entry, or None to remove it ---------------------------------------------

Fix = Callable[[CocoFile, int, Any], Any]


def remove(file: CocoFile, index: int, entry: Any) -> None:
    return None


def convert(key: str, to: Callable[[Any], Any]) -> Fix:
    return lambda file, index, entry: entry | {key: to(entry.get(key))}


def set_file_size(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    return entry | dict(zip(("height", "width"), file.sizes[index], strict=True))


def set_image_id(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    image = int(file.image_of[index])
    return entry | {"image_id": image + 1 if file.found["mixed_image_id_types"] else file.images[image]["id"]}


def valid_mask(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"segmentation": file.mask(index, entry) or rectangle(entry["bbox"])}


def ordered_corners(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    left, top, width, height = entry["bbox"]
    return entry | {"bbox": [min(left, left + width), min(top, top + height), abs(width), abs(height)]}


def box_of_mask(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any] | None:
    mask = file.mask(index, entry)
    box = None if mask is None else box_of(mask, *file.sizes[file.image_of[index]])
    return None if box is None else entry | {"bbox": box}


def new_id(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"id": next(file.new_ids)}


def new_id_unless_equal(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any] | None:
    first = file.first_with_id[np.searchsorted(file.annotation_ids, entry["id"])]
    return None if file.annotations[index] == file.annotations[first] else new_id(file, index, entry)


def area_of_mask_or_box(file: CocoFile, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    mask = file.mask(index, entry)
    area = 0 if mask is None else float(mask_util.area(rle_of(mask, *file.sizes[file.image_of[index]])))
    width, height = entry["bbox"][2:]
    # The area of a very thin mask may be 0 pixels.
    return entry | {"area": area if area and not misfits_box(area, width, height) else float(width) * float(height)}


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """A check of COCO files, which is a row of ``CHECKS``.

    Attributes:
        name: The name of the check.
        severity: ``"error"`` stops a run unless ``DATASETS.CHECK`` is ``"warn"``. ``"fixed"`` has only one possible
            meaning, so the value is always fixed. ``"note"`` is harmless, with a fix or without.
        what: A description of the findings, in the plural.
        fix: The function that fixes a finding, or None.
        effect: The effect of the fix, or the meaning of a note.
        key: The list of the COCO file that is checked.
    """

    name: str
    severity: Literal["error", "fixed", "note"]
    what: str
    fix: Fix | None
    effect: str
    key: Literal["categories", "images", "annotations"]


SEVERITIES = ("error", "fixed", "note")
_OUT, _WITH_OBJECTS = "removed", "removed, with their objects"
_BOX, _MASK = "replaced by the box of the mask, or else removed", "replaced by the valid polygons, or the box"
_INT, _ID = "read as an integer", "read as the id of the category"

# The checks of each list: name, severity, description, fix, and effect. Fixes run in this order. New ids and areas come
# last because they apply to the remaining annotations.
# fmt: off
CHECKS = {row[0]: Check(*row, key=key) for key, rows in {
    "categories": (
        ("invalid_category_entry", "error", "categories without an id and a name", remove, _WITH_OBJECTS),
        ("duplicate_category_id", "error", "categories with a repeated id", remove, "the first one is kept"),
        ("category_id_not_integer", "fixed", "categories whose id is not an integer", convert("id", as_int), _INT),
        ("category_name_not_text", "fixed", "categories whose name is a number", convert("name", str), "read as text"),
        ("duplicate_category_name", "note", "categories with the same or a similar name", None,
         "different classes; if it is a typing mistake, correct the name in the annotations"),
        ("category_without_objects", "note", "categories without objects", None, "no AP or no training for them"),
    ),
    "images": (
        ("invalid_image_entry", "error", "images without an id and a file_name", remove, _WITH_OBJECTS),
        ("duplicate_image_id", "error", "images whose id is not unique", remove,
         "one of equal entries is kept, and different entries are removed with their objects"),
        ("mixed_image_id_types", "error", "images in a file with both text ids and number ids",
         lambda file, index, entry: entry | {"id": index + 1}, "the new id is the position in the file"),
        ("missing_image_size", "fixed", "images without height and width", set_file_size, "read from the file"),
        ("duplicate_file_name", "note", "images with a repeated file_name", None, "used as two images"),
        ("missing_image_file", "error", "images whose file is missing", remove, _WITH_OBJECTS),
        ("unreadable_image_file", "error", "images whose file cannot be read", remove, _WITH_OBJECTS),
        ("damaged_image_file", "note", "images whose file is damaged", None, "the decoded part is used"),
        ("image_size_mismatch", "error", "images whose size, after EXIF rotation, differs from the annotation", remove,
         f"{_WITH_OBJECTS}; to keep them, use the annotated images, or correct the size if the boxes fit the file"),
        ("image_without_objects", "note", "images without objects", None,
         "used in evaluation, and in training only if DATALOADER.FILTER_EMPTY_ANNOTATIONS is False"),
    ),
    "annotations": (
        ("invalid_annotation_entry", "error", "annotations that are not JSON objects", remove, _OUT),
        ("unknown_image_id", "error", "annotations with an unknown image_id", remove, _OUT),
        ("image_id_type_mismatch", "fixed", "annotations whose image_id has another type than the id of the image",
         set_image_id, "read as the id of the image"),
        ("unknown_category_id", "error", "annotations with an unknown category_id", remove, _OUT),
        ("category_id_type_mismatch", "fixed", "annotations whose category_id is text or has a decimal point",
         lambda file, index, one: one | {"category_id": as_int(file.categories[file.category_of[index]]["id"])}, _ID),
        ("missing_iscrowd", "fixed", "annotations whose iscrowd is missing or text",
         convert("iscrowd", lambda crowd: int(crowd or 0)), "read as an integer, or as 0"),
        ("invalid_iscrowd", "error", "annotations whose iscrowd is neither 0 nor 1", remove, _OUT),
        ("boxes_in_xyxy_format", "error", "boxes that fit their images only as [left, top, right, bottom]", None,
         "convert them to [left, top, width, height], or in YOLO to the center and the size"),
        ("boxes_in_unknown_format", "error", "boxes that exceed their images, half of all boxes or more", None,
         "correct the format: left, top, width and height in pixels, or in YOLO the center and the size as fractions"),
        ("boxes_in_normalized_coordinates", "error", "boxes that are fractions or percent of the image", None,
         "multiply them by the width and height of the image to get pixels"),
        ("missing_bbox_and_mask", "error", "annotations without a bbox and without a valid mask", remove, _OUT),
        ("bbox_as_text", "fixed", "boxes as text or as a dict", convert("bbox", as_box), "read as four numbers"),
        ("missing_bbox", "fixed", "annotations without a bbox but with a mask", box_of_mask, "read as the mask's box"),
        ("invalid_bbox", "error", "boxes that are not four finite numbers", box_of_mask, _BOX),
        ("swapped_bbox_corners", "fixed", "boxes with a negative width or height", ordered_corners, "read as positive"),
        ("bbox_outside_image", "error", "boxes outside the image, or far beyond its edge", box_of_mask, _BOX),
        ("bbox_misfits_mask", "note", "boxes that do not fit their mask", None,
         "both are used, so correct the box or the mask"),
        ("zero_area_bbox", "note", "boxes without area", None, "skipped in training, never matched in evaluation"),
        ("bbox_exceeds_image", "note", "boxes more than a pixel beyond the image", None, "clipped in training only"),
        ("duplicate_object", "note", "objects with the same box, category and mask", None, "used separately"),
        ("missing_segmentation", "fixed", "objects without a mask in a file with masks", valid_mask, "read as the box"),
        ("flat_segmentation", "fixed", "segmentations that are one list of numbers, or RLE in a list", valid_mask,
         "read as one polygon, or as RLE"),
        ("invalid_segmentation", "error", "segmentations that are neither valid polygons nor RLE", valid_mask, _MASK),
        ("empty_mask", "error", "masks without a polygon of three points in the image", valid_mask, _MASK),
        ("polygon_far_outside_image", "error", "masks with a polygon far outside the image", valid_mask, _MASK),
        ("empty_polygon", "fixed", "masks with empty and valid polygons", valid_mask, "only the valid ones are read"),
        ("invalid_rle", "error", "RLE whose size or counts do not match the image", valid_mask, _MASK),
        ("rle_without_iscrowd", "note", "RLE masks of objects that are not crowds", None, "read as bitmaps"),
        ("ignore_flag", "error", "annotations with ignore, which detectron2 does not support",
         lambda file, index, entry: entry | {"iscrowd": 1, "ignore": 0},
         "changed to a crowd (iscrowd 1): ignored in training and evaluation"),
        ("invalid_annotation_id", "note", "annotations without an id above 0", new_id, "read with a new id"),
        ("duplicate_annotation_id", "error", "annotations whose id is not unique", new_id_unless_equal,
         "an equal annotation is removed, and a different one gets a new id"),
        ("missing_or_invalid_area", "fixed", "annotations whose area is missing or does not fit the box",
         area_of_mask_or_box, "read as the area of the mask, or of the box without a mask"),
    ),
}.items() for row in rows}
# fmt: on
_FINDERS = (find_in_categories, find_in_images, find_in_files, find_in_annotations, find_in_boxes, find_without_objects)


def _shortened(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:40]} ... {text[-20:]}"


def _example_text(example: dict[str, Any]) -> str:
    """Return an example as text, such as ``annotation 17, image 3, file a.jpg, [nan, 1, 2, 3]``."""
    return ", ".join(str(item) if key == "value" else f"{key} {_shortened(item)}" for key, item in example.items())
