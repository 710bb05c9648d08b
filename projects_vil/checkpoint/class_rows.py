"""Predictors have rows for classes: which row is whose, and copies between classes of the same name.

Layouts are detectron2's. K: classes, A: anchors of a place.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

_ANCHORS, _CLASSES, _BOXES, _BACKGROUND = "A x K", "K", "K x 4", "K + 1"
_LAYOUTS = {
    "head.cls_score": _ANCHORS,
    "roi_heads.box_predictor.cls_score": _BACKGROUND,
    "roi_heads.box_predictor.bbox_pred": _BOXES,
    "roi_heads.mask_head.predictor": _CLASSES,
    "sem_seg_head.predictor": _CLASSES,
}
# Cascade R-CNN has several, which are numbered.
_NUMBERED = re.compile(r"(?<=^roi_heads\.box_predictor\.)\d+\.")


def is_predictor(name: str) -> bool:
    """Whether a parameter belongs to a layer whose size is the number of classes."""
    return _layer(name) in _LAYOUTS


def rows_of_classes(name: str, rows: int, num_classes: int) -> Tensor | None:
    """The rows of each class of a predictor's parameter, (K, rows of a class); the last is the background's, if any.

    None where the parameter is no predictor's, or does not distinguish ``num_classes`` classes.
    """
    layout = _LAYOUTS.get(_layer(name))
    places = torch.arange(rows)
    if layout == _ANCHORS and rows and rows % num_classes == 0:
        return places.view(-1, num_classes).T
    # The boxes of a cascade are those of no class, also where there is one class.
    if layout == _BOXES and rows == 4 * num_classes and not _NUMBERED.search(name):
        return places.view(num_classes, 4)
    if layout == _CLASSES and rows == num_classes or layout == _BACKGROUND and rows == num_classes + 1:
        return places.view(rows, 1)
    return None


def match_classes(ours: Sequence[str], theirs: Sequence[str]) -> dict[int, int]:
    """Index in ``ours`` -> index in ``theirs`` of the class of the same name; names that come twice match nothing."""
    places = {name: index for index, name in enumerate(theirs) if list(theirs).count(name) == 1}
    return {i: places[name] for i, name in enumerate(ours) if name in places and list(ours).count(name) == 1}


def copy_rows(
    name: str, ours: Tensor, theirs: Tensor, *, matched: dict[int, int], our_number: int, their_number: int
) -> Tensor | None:
    """``ours`` with the rows of ``theirs`` for ``matched`` classes, and for the background.

    None where one of the two has no rows for its number of classes, or their rows are of another shape.
    """
    our_rows = rows_of_classes(name, len(ours), our_number) if ours.ndim else None
    their_rows = rows_of_classes(name, len(theirs), their_number) if theirs.ndim else None
    if our_rows is None or their_rows is None:
        return None
    if our_rows.shape[1] != their_rows.shape[1] or ours.shape[1:] != theirs.shape[1:]:
        return None
    copied = ours.detach().clone()
    pairs = matched | ({our_number: their_number} if len(our_rows) > our_number else {})
    for our_class, their_class in pairs.items():
        copied[our_rows[our_class]] = theirs[their_rows[their_class]].to(copied)
    return copied


def _layer(name: str) -> str:
    """A layer by the name of its parameter."""
    return _NUMBERED.sub("", name).rpartition(".")[0]
