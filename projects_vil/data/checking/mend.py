"""A COCO file without what was found in it."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from pycocotools import mask as mask_util

from projects_vil.data.checking.check import Checked
from projects_vil.data.checking.images import whole
from projects_vil.data.checking.masks import as_rle, box_of, usable_segmentation

_IMAGES_LEFT_OUT = ("image_form", "file_missing", "file_unreadable", "file_size")
_LEFT_OUT = ("annotation_form", "image_unknown", "category_unknown", "iscrowd_value", "box_missing", "mask_missing")
_BOXES = ("box_form", "box_not_finite", "box_negative", "box_far", "box_outside")
_MASKS = ("mask_form", "mask_points", "mask_outside", "polygon_not_finite", "polygon_far", "rle_size", "rle_counts")


@dataclass(frozen=True)
class Mended:
    """A COCO file as it can only be meant, or cleaned.

    Attributes:
        dataset: what the file would hold; entries that did not change are those of the file.
        images, annotations: how many were left out.
        changed: how many annotations differ from the file's.
    """

    dataset: dict[str, Any]
    images: int
    annotations: int
    changed: int


def mend(checked: Checked, *, errors: bool, areas: bool = True) -> Mended:
    """What was found, mended.

    Args:
        errors: whether errors are taken out too, or only mended what is read as it can only be meant.
        areas: whether missing areas are computed, which only evaluation reads.
    """
    return _Mender(checked, errors=errors, areas=areas).mended()


class _Mender:
    def __init__(self, checked: Checked, *, errors: bool, areas: bool) -> None:
        self.checked, self.errors, self.areas = checked, errors, areas
        self.places = checked.findings.places
        self.entries = checked.annotations.entries
        self.image_of = checked.annotations.image_of
        self.changed: dict[int, dict[str, Any]] = {}
        self.left_out: set[int] = set()
        self.renumbers = errors and bool(self.places.get("image_ids_mixed"))

    def mended(self) -> Mended:
        dataset = self.checked.dataset
        images, images_left_out = self._images()
        self._objects(images_left_out)
        annotations = [
            self.changed.get(index, entry) for index, entry in enumerate(self.entries) if index not in self.left_out
        ]
        changed = len(self.changed.keys() - self.left_out)
        mended = dataset | {"images": images, "categories": self._categories()}
        if "annotations" in dataset:
            mended["annotations"] = annotations
        return Mended(mended, len(dataset["images"]) - len(images), len(self.left_out), changed)

    def _categories(self) -> list[Any]:
        entries = self.checked.dataset["categories"]
        text = set(self.places.get("category_text", ()))
        left_out = set(self._found("category_form", "category_id_twice")) if self.errors else set()
        return [
            entry | {"id": whole(entry["id"])} if index in text else entry
            for index, entry in enumerate(entries)
            if index not in left_out
        ]

    def _images(self) -> tuple[list[Any], set[int]]:
        """The images that stay, and the indices of those whose objects are left out with them."""
        entries, images = self.checked.dataset["images"], self.checked.images
        left_out = set(self._found(*_IMAGES_LEFT_OUT)) if self.errors else set()
        copies: set[int] = set()
        if self.errors and self.places.get("image_id_twice"):
            by_id = defaultdict(list)
            for index in images.usable:
                by_id[entries[index]["id"]].append(index)
            for same in (indices for indices in by_id.values() if len(indices) > 1):
                are_equal = all(entries[index] == entries[same[0]] for index in same)
                copies.update(same[1:]) if are_equal else left_out.update(same)
        unsized = set(self._found("image_size_missing"))
        kept = []
        for index, entry in enumerate(entries):
            if index in left_out or index in copies:
                continue
            if index in unsized:
                entry = entry | dict(zip(("height", "width"), images.size(index), strict=True))
            # By the place in the file: so the number does not depend on what is left out.
            kept.append(entry | {"id": index + 1} if self.renumbers else entry)
        return kept, left_out

    def _objects(self, images_left_out: set[int]) -> None:
        if images_left_out:
            self.left_out.update(i for i, place in enumerate(self.image_of.tolist()) if place in images_left_out)
        if self.errors:
            self.left_out.update(self._found(*_LEFT_OUT))
        for index in self._staying("image_id_text"):
            self._edit(index)["image_id"] = self.checked.images.entries[self.image_of[index]]["id"]
        if self.renumbers:
            for index, place in enumerate(self.image_of.tolist()):
                if place >= 0 and index not in self.left_out:
                    self._edit(index)["image_id"] = place + 1
        for index in self._staying("category_id_text"):
            self._edit(index)["category_id"] = whole(self.entries[index]["category_id"])
        for index in self._staying("iscrowd_missing"):
            self._edit(index)["iscrowd"] = 0
        for index in self._staying("polygon_points", "polygon_outside", *(_MASKS if self.errors else ())):
            self._mend_mask(index)
        for index in self._staying("box_of_mask", *(_BOXES if self.errors else ())):
            self._mend_box(index)
        if self.errors:
            for index in self._staying("ignored"):
                self._edit(index).update(iscrowd=1, ignore=0)
        self._mend_ids()
        for index in self._staying("area_missing") if self.areas else ():
            self._edit(index)["area"] = self._area(index)

    def _mend_mask(self, index: int) -> None:
        mask = self._mask(index)
        if mask is None:
            self.left_out.add(index)
        else:
            self._edit(index)["segmentation"] = mask

    def _mend_box(self, index: int) -> None:
        mask = self._mask(index)
        box = None if mask is None else box_of(mask, *self._size(index))
        if box is None:
            self.left_out.add(index)
        else:
            self._edit(index)["bbox"] = box

    def _mend_ids(self) -> None:
        kinds = ("annotation_id_unusable", *(("annotation_id_twice",) if self.errors else ()))
        indices = list(self._staying(*kinds))
        if not indices:
            return
        numbers = [n for entry in self.entries if isinstance(entry, dict) and type(n := entry.get("id")) is int]
        following = max([0, *numbers]) + 1
        twice = set(self.places.get("annotation_id_twice", ()))
        first = {}
        if twice:
            for index, entry in enumerate(self.entries):
                if isinstance(entry, dict) and index not in twice and type(entry.get("id")) is int:
                    first.setdefault(entry["id"], entry)
        for index in indices:
            if index in twice and self.entries[index] == first[self.entries[index]["id"]]:
                self.left_out.add(index)
                continue
            self._edit(index)["id"] = following
            following += 1

    def _area(self, index: int) -> float:
        mask = self._mask(index)
        if mask is not None:
            return float(mask_util.area(as_rle(mask, *self._size(index))))
        _, _, width, height = self._entry(index)["bbox"]
        return float(width) * float(height)

    def _mask(self, index: int) -> Any:
        height, width = self._size(index)
        return usable_segmentation(self._entry(index).get("segmentation"), height, width) if height else None

    def _size(self, index: int) -> tuple[int, int]:
        return self.checked.images.size(self.image_of[index])

    def _entry(self, index: int) -> dict[str, Any]:
        return self.changed.get(index, self.entries[index])

    def _edit(self, index: int) -> dict[str, Any]:
        """The annotation that takes the place of the file's."""
        return self.changed.setdefault(index, dict(self.entries[index]))

    def _found(self, *kinds: str) -> list[int]:
        return [index for kind in kinds for index in self.places.get(kind, ())]

    def _staying(self, *kinds: str) -> list[int]:
        return [index for index in dict.fromkeys(self._found(*kinds)) if index not in self.left_out]
