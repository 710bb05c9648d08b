"""The rows of a detector's predictors by class. Row layouts are detectron2's. K: classes, A: anchors per position."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_LAYOUTS = {
    "head.cls_score": "A x K",
    "roi_heads.box_predictor.cls_score": "K + 1",  # the last row is background
    "roi_heads.box_predictor.bbox_pred": "K x 4",
    "roi_heads.mask_head.predictor": "K",
    "sem_seg_head.predictor": "K",
}
# Cascade R-CNN numbers its box predictors.
_NUMBERED = re.compile(r"(?<=^roi_heads\.box_predictor\.)\d+\.")


def is_predictor(name: str) -> bool:
    """Return whether a parameter belongs to a layer that has rows for each class."""
    return _layer(name) in _LAYOUTS


def copy_classes(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], matched: Mapping[int, int], *, numbers: tuple[int, int]
) -> dict[str, Tensor]:
    """Copy our predictors, with the rows of matched classes and of the background from ``theirs``.

    Args:
        ours, theirs: State dicts. Ours may be on the meta device.
        matched: Our class index -> their class index.
        numbers: Our number of classes, and theirs.

    Returns:
        The predictors whose rows match the number of classes on both sides and have the same shape.
    """
    copied = {}
    for name in [name for name in theirs if name in ours and is_predictor(name)]:
        our_tensor, their_tensor = ours[name], theirs[name]
        our_rows, their_rows = _class_rows(name, our_tensor, numbers[0]), _class_rows(name, their_tensor, numbers[1])
        if our_rows is None or their_rows is None or our_rows.shape[1] != their_rows.shape[1]:
            continue
        if our_tensor.shape[1:] == their_tensor.shape[1:]:
            copied[name] = torch.zeros(our_tensor.shape) if our_tensor.is_meta else our_tensor.detach().clone()
            pairs = {**matched, numbers[0]: numbers[1]} if len(our_rows) > numbers[0] else matched
            for our_class, their_class in pairs.items():
                copied[name][our_rows[our_class]] = their_tensor[their_rows[their_class]].to(copied[name])
    return copied


def _class_rows(name: str, parameter: Tensor, num_classes: int) -> Tensor | None:
    """Return the indices of the rows of each class, (K, rows per class), or with background (K + 1, 1).

    Returns None if the parameter does not belong to a predictor or does not have rows for ``num_classes`` classes.
    """
    layout, rows = _LAYOUTS.get(_layer(name)), len(parameter) if parameter.ndim else 0
    indices = torch.arange(rows)
    if layout == "A x K" and rows and rows % num_classes == 0:
        return indices.view(-1, num_classes).T
    # A cascade regresses one box for all classes, which looks the same as one class.
    if layout == "K x 4" and rows == 4 * num_classes and not _NUMBERED.search(name):
        return indices.view(num_classes, 4)
    if (layout, rows) in (("K", num_classes), ("K + 1", num_classes + 1)):
        return indices.view(rows, 1)
    return None


def _layer(name: str) -> str:
    """Return the layer of a parameter's name."""
    return _NUMBERED.sub("", name).rpartition(".")[0]
