"""Sizes of the objects in a dataset, and the image size and anchors that match them."""

import contextlib
import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from projects_vil.data.readers import as_box

# The image sizes to choose from in pixels, by device. On a CPU, larger images reach a lower AP in the same time,
# because the run has fewer iterations.
IMAGE_SIZES = {"cpu": range(192, 257, 32), "cuda": range(512, 801, 32)}
# The share of the objects that the anchors match at the chosen size, at this IoU. Elongated objects, which match at no
# size, are left out.
TARGET_SHARE = 0.98
MATCH_IOU = 0.5
# The largest factor between the aspect ratios of two boxes with an IoU of MATCH_IOU
_MOST_ELONGATED = ((1 / MATCH_IOU + 1) / 2) ** 2
# A size below 256 pixels is chosen only if half of the objects have a side of at least 50 pixels.
SMALL_SIZE, SMALL_SIDE = 256, 50
# The longer side of an image is at most this multiple of the image size.
LONGER_SIDE = 5 / 3
# Factors of the sizes of fitted anchors
_FACTORS = [2 ** (step / 4) for step in range(-8, 5)]
# In larger datasets, the choice is made on this number of objects.
_MOST_OBJECTS = 10_000


class Anchors(NamedTuple):
    """The anchors of a detector.

    Attributes:
        sizes: The sides in pixels of the square anchors of each feature level.
        ratios: The aspect ratios, height / width.
        strides: The strides in pixels of the feature levels.
        offset: The offset of the first anchor, as a fraction of the stride.
    """

    sizes: list[list[float]]
    ratios: list[float]
    strides: list[int]
    offset: float = 0.0


# The anchors of configs/base/retinanet.yaml
_LEVELS = [[round(side * 2 ** (step / 3), 4) for step in range(3)] for side in (32, 64, 128, 256, 512)]
RETINANET = Anchors(_LEVELS, ratios=[0.5, 1.0, 2.0], strides=[8, 16, 32, 64, 128])


def objects_of(content: Mapping[str, Any]) -> np.ndarray:
    """Return left, top, width and height of each object, and height and width of its image, as (N, 6) float.

    Crowds and entries that are not valid COCO are left out.

    Args:
        content: The content of a COCO file.
    """
    rows, images = array("d"), {}
    for image in content.get("images", ()):
        if isinstance(image, dict) and isinstance(image.get("id"), int | str):
            # The dataset check reads an id as text too.
            images[str(image["id"])] = image
    for entry in content.get("annotations", ()):
        # The dataset check reports invalid entries.
        with contextlib.suppress(KeyError, TypeError, ValueError):
            left, top, width, height = as_box(entry["bbox"])
            image = images[str(entry["image_id"])]
            if not entry.get("iscrowd"):
                rows.extend((left, top, width, height, float(image["height"]), float(image["width"])))
    objects = np.asarray(rows).reshape(-1, 6)
    return objects[np.isfinite(objects).all(axis=1) & (objects[:, 2:] > 0).all(axis=1)]


def choose_size(
    anchors: Anchors, objects: np.ndarray, *, sizes: Iterable[int], fit: bool, tiled: bool = False
) -> tuple[int, Anchors, str]:
    """Return the first image size at which the anchors match ``TARGET_SHARE`` of the objects, or else the last one.

    Objects that are too elongated for the anchors are left out of this share. Sizes below ``SMALL_SIZE`` are skipped if
    the median side of the objects would be below ``SMALL_SIDE``.

    Args:
        anchors: The anchors of the detector.
        objects: The result of :func:`objects_of`, at least one.
        sizes: The sizes to choose from, the smallest first.
        fit: Whether to fit the anchors to the objects. Fitted anchors have the aspect ratios of the objects, and the
            sizes of ``anchors`` times a factor.
        tiled: Whether the images of the model are tiles, which are cut from images in their original size.

    Returns:
        The shorter side of the images in pixels, the anchors, and a line of text about both.
    """
    number = len(objects)
    objects = objects[:: math.ceil(number / _MOST_OBJECTS)]
    height, width = objects[:, 4], objects[:, 5]
    for size in sizes:
        scale = np.minimum(size / np.minimum(height, width), LONGER_SIDE * size / np.maximum(height, width))
        boxes, candidates = objects[:, :4] * (1 if tiled else scale[:, None]), [anchors]
        if fit:
            quantiles = (np.arange(len(anchors.ratios)) + 0.5) / len(anchors.ratios)
            ratios = np.quantile(boxes[:, 3] / boxes[:, 2], quantiles).clip(0.05, 20).round(2).tolist()
            scaled = ([[round(factor * side, 1) for side in level] for level in anchors.sizes] for factor in _FACTORS)
            candidates = [anchors._replace(sizes=levels, ratios=ratios) for levels in scaled]
        pairs = [(_best_ious(one, boxes), one) for one in candidates]
        ious, chosen = max(pairs, key=lambda pair: (round(np.mean(pair[0] >= MATCH_IOU), 2), pair[0].mean()))
        share = np.mean(ious >= MATCH_IOU)
        factors = np.log(boxes[:, 3, None] / boxes[:, 2, None] / chosen.ratios)
        target = TARGET_SHARE * np.mean(abs(factors).min(axis=1) <= math.log(_MOST_ELONGATED))
        small, median, large = np.percentile(np.sqrt(boxes[:, 2] * boxes[:, 3]), (10, 50, 90))
        if share >= target and (size >= SMALL_SIZE or median >= SMALL_SIDE):
            break
    sides = " to ".join(dict.fromkeys((f"{small:.0f}", f"{large:.0f}")))
    matching = "fitted anchors match" if fit else "the model's anchors match"
    advice = ". A larger --image-size matches more, and needs more --epochs" if share < target else ""
    text = f"objects in the training images: {number:,}; 80% of them have a side of {sides} pixels "
    text += f"(median {median:.0f}) at image size {size}; {matching} {share:.1%} of all (IoU {MATCH_IOU}){advice}"
    return size, chosen, text


def _best_ious(anchors: Anchors, boxes: np.ndarray) -> np.ndarray:
    """Return the IoU of each box with the best anchor at the positions of the feature maps, (N,)."""
    rows = [
        (stride, side / ratio**0.5, side * ratio**0.5)
        for stride, sides in zip(anchors.strides, anchors.sizes, strict=True)
        for side in sides
        for ratio in anchors.ratios
    ]
    stride, *lengths = np.array(rows).T
    overlap, areas = 1.0, boxes[:, 2:].prod(axis=1)[:, None] + lengths[0] * lengths[1]
    for axis, anchor in enumerate(lengths):
        length = boxes[:, 2 + axis, None]
        center = boxes[:, axis, None] + length / 2 - anchors.offset * stride
        # The distance to the center of the closest anchor
        distance = np.abs((center + stride / 2) % stride - stride / 2)
        overlap = overlap * np.clip((length + anchor) / 2 - distance, 0, np.minimum(length, anchor))
    return (overlap / (areas - overlap)).max(axis=1)
