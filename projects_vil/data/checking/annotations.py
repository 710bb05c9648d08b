"""Objects of a COCO file: ids, boxes and what goes with them, in columns where there are many."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from projects_vil.data.checking.findings import Findings, shown
from projects_vil.data.checking.images import Images, whole
from projects_vil.data.checking.masks import FAR, box_of, segmentation_faults, usable_segmentation

_NUMBERS = {int, float}
# Of the boxes, that must reach beyond their images before they may be corners, and how many must be there.
_BEYOND_SHARE, _FEWEST_BOXES = 0.2, 20
_ABSENT = object()


class Annotations:
    """The list of annotations, beside the images and categories that they name.

    Args:
        entries: of the file.
        images: of the file.
        categories: id -> its entry.
        findings: take what is wrong.
    """

    def __init__(self, entries: list[Any], images: Images, categories: dict[int, Any], findings: Findings) -> None:
        self.entries, self.images, self.categories, self.findings = entries, images, categories, findings
        self.image_of = np.full(len(entries), -1)

    def add(self, kind: str, index: int, value: object = None) -> None:
        self.findings.add(kind, index, lambda: self._example(index, value))

    def _example(self, index: int, value: object) -> dict[str, Any]:
        entry = self.entries[index]
        if not isinstance(entry, dict):
            return {"value": shown(entry)}
        image = self.images.entries[self.image_of[index]] if self.image_of[index] >= 0 else {}
        example = {"annotation": entry.get("id"), "image": entry.get("image_id"), "file": image.get("file_name")}
        example = {what: known for what, known in example.items() if known is not None}
        return example if value is None else example | {"value": value if isinstance(value, str) else shown(value)}

    def check(self, *, masks: bool) -> None:
        """Look for all faults; those of segmentations only with ``masks``."""
        entries = self.entries
        objects = [index for index, entry in enumerate(entries) if isinstance(entry, dict)]
        if len(objects) < len(entries):
            for index in sorted(set(range(len(entries))) - set(objects)):
                self.add("annotation_form", index)
        self._check_images(objects)
        self._check_categories(objects)
        self._check_ids(objects)
        self._check_flags(objects)
        self._check_boxes(objects)
        if masks:
            self._check_masks(objects)

    def _check_images(self, objects: Sequence[int]) -> None:
        known, image_of = self.images.index_by_id, self.image_of.tolist()
        for index in objects:
            name = self.entries[index].get("image_id")
            place = known.get(name, -1) if isinstance(name, (int, str, float)) else -1
            if place < 0:
                place = self.images.index_by_number.get(whole(name), -1)
                if place < 0:
                    self.add("image_unknown", index)
                    continue
                self.image_of[index] = place
                self.add("image_id_text", index)
            image_of[index] = place
        self.image_of[:] = image_of

    def _check_categories(self, objects: Sequence[int]) -> None:
        for index in objects:
            name = self.entries[index].get("category_id")
            if type(name) is int and name in self.categories:
                continue
            is_known = whole(name) in self.categories
            self.add("category_id_text" if is_known else "category_unknown", index, f"category_id {shown(name)}")

    def _check_ids(self, objects: Sequence[int]) -> None:
        seen: set[int] = set()
        for index in objects:
            name = self.entries[index].get("id")
            if type(name) is not int or name <= 0:
                self.add("annotation_id_unusable", index)
            elif name in seen:
                self.add("annotation_id_twice", index)
            else:
                seen.add(name)

    def _check_flags(self, objects: Sequence[int]) -> None:
        # Of no image, whose index is -1, the last.
        largest = [*(2 * np.maximum(self.images.heights * self.images.widths, 1)).tolist(), math.inf]
        places = self.image_of.tolist()
        for index in objects:
            entry = self.entries[index]
            crowd = entry.get("iscrowd")
            if crowd is None:
                self.add("iscrowd_missing", index)
            elif type(crowd) not in (int, bool, float) or crowd not in (0, 1):
                self.add("iscrowd_value", index, f"iscrowd {shown(crowd)}")
            if entry.get("ignore") and not crowd:
                self.add("ignored", index)
            area = entry.get("area")
            if type(area) not in _NUMBERS:
                self.add("area_missing", index, None if area is None else f"area {shown(area)}")
            elif not 0 <= area <= largest[places[index]]:
                self.add("area_missing", index, f"area {shown(area)}")

    def _check_boxes(self, objects: Sequence[int]) -> None:
        boxes = np.full((len(self.entries), 4), np.nan)
        is_box = np.zeros(len(self.entries), bool)
        rows = []
        for index in objects:
            box = self.entries[index].get("bbox", _ABSENT)
            if type(box) is list and len(box) == 4 and set(map(type, box)) <= _NUMBERS:
                is_box[index] = True
                rows.append(box)
            elif box is _ABSENT:
                self.add("box_missing" if self._box_of_mask(index) is None else "box_of_mask", index)
            else:
                self.add("box_form", index, box)
        if not rows:
            return
        boxes[is_box] = _as_floats(rows)
        self._check_geometry(boxes, is_box)

    def _box_of_mask(self, index: int) -> list[float] | None:
        height, width = self.images.size(self.image_of[index])
        mask = usable_segmentation(self.entries[index].get("segmentation"), height, width) if height else None
        return None if mask is None else box_of(mask, height, width)

    def _check_geometry(self, boxes: np.ndarray, is_box: np.ndarray) -> None:
        has_size = is_box & (self.image_of >= 0)
        heights = np.where(has_size, self.images.heights[self.image_of], 0)
        widths = np.where(has_size, self.images.widths[self.image_of], 0)
        has_size &= (heights > 0) & (widths > 0)
        finite = np.isfinite(boxes).all(1)
        left, top, wide, high = np.where(finite[:, None], boxes, 0).T
        right, bottom, far = left + wide, top + high, FAR * np.maximum(heights, widths)
        found = {"box_not_finite": is_box & ~finite, "box_negative": finite & ((wide < 0) | (high < 0))}
        found["box_far"] = (
            finite
            & has_size
            & ~found["box_negative"]
            & ((np.minimum(left, top) < -far) | (right > widths + far) | (bottom > heights + far))
        )
        sound = finite & ~found["box_negative"] & ~found["box_far"]
        found["box_empty"] = sound & ((wide == 0) | (high == 0))
        sound &= has_size & ~found["box_empty"]
        found["box_outside"] = sound & ((right <= 0) | (bottom <= 0) | (left >= widths) | (top >= heights))
        beyond = sound & ((left < -1) | (top < -1) | (right > widths + 1) | (bottom > heights + 1))
        found["box_beyond"] = beyond & ~found["box_outside"]
        for kind, where in found.items():
            for index in np.flatnonzero(where).tolist():
                self.add(kind, index, self.entries[index]["bbox"])
        number = int(sound.sum())
        if not number:
            return
        are_corners = (wide > left) & (high > top) & (wide <= widths + 1) & (high <= heights + 1) & (left >= -1)
        if number >= _FEWEST_BOXES and beyond.sum() >= _BEYOND_SHARE * number and are_corners[sound].mean() > 0.99:
            first = int(np.flatnonzero(beyond)[0])
            self.add("boxes_as_corners", first, self.entries[first]["bbox"])
        if max(right[sound].max(), bottom[sound].max()) <= 1 and min(widths[sound].min(), heights[sound].min()) > 10:
            first = int(np.flatnonzero(sound)[0])
            self.add("boxes_as_fractions", first, self.entries[first]["bbox"])

    def _check_masks(self, objects: Sequence[int]) -> None:
        sizes = list(zip(self.images.heights.tolist(), self.images.widths.tolist(), strict=True))
        for index, place in zip(objects, self.image_of[list(objects)].tolist(), strict=True):
            entry = self.entries[index]
            segmentation = entry.get("segmentation")
            if not segmentation:
                self.add("mask_missing", index)
                continue
            height, width = sizes[place] if place >= 0 else (0, 0)
            if not height:
                continue
            for kind in segmentation_faults(segmentation, height, width)[0]:
                self.add(kind, index, segmentation)
            if isinstance(segmentation, dict) and not entry.get("iscrowd"):
                self.add("rle_object", index)


def _as_floats(rows: list[list[float]]) -> np.ndarray:
    try:
        return np.array(rows, np.float64)
    except OverflowError:
        # Whole numbers of more digits than a float has.
        return np.array([[_as_float(number) for number in row] for row in rows])


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
