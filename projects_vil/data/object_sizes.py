"""Choose the image size and the anchors of a detector from the objects of a dataset."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from detectron2.config import CfgNode

# The share of the objects that the chosen size and anchors match, at this IoU.
TARGET_SHARE = 0.98
MATCH_IOU = 0.5
# The longer side of an image is at most this multiple of the image size.
LONGER_SIDE = 5 / 3
# Factors of the sizes of the config's anchors.
_FACTORS = [2 ** (step / 4) for step in range(-8, 5)]
# In larger datasets, the choice is made on this number of objects.
_MOST_OBJECTS = 10_000


@dataclasses.dataclass(frozen=True)
class SizeChoice:
    """An image size with its anchors.

    Attributes:
        size: Shorter side of the images in pixels.
        share: Share of the objects that an anchor matches, from 0 to 1.
        sides: The 10th, 50th and 90th percentile of the side of an object, sqrt(area), in pixels of this size.
        number: Number of objects.
        anchors: Config keys of fitted anchors; empty for the anchors of the config.
    """

    size: int
    share: float
    sides: tuple[float, float, float]
    number: int
    anchors: Mapping[str, Any]

    def line(self) -> str:
        """Return the choice as a line of text."""
        small, median, large = self.sides
        anchors = "fitted anchors match" if self.anchors else "the anchors of the config match"
        return (
            f"objects: {self.number:,}, with a side of {small:.0f} to {large:.0f} pixels (median {median:.0f}) at "
            f"image size {self.size}; {anchors} {self.share:.1%} of them (IoU {MATCH_IOU})"
            + (". A larger --image-size matches more, and needs more --epochs" if self.share < TARGET_SHARE else "")
        )


def objects_of(content: Mapping[str, Any]) -> np.ndarray:
    """Return left, top, width and height of each object, and height and width of its image, as (N, 6) float.

    Crowds and entries that are not valid COCO are left out.

    Args:
        content: The content of a COCO file.
    """
    images, rows = [image for image in content["images"] if isinstance(image, dict)], []
    images = {image["id"]: image for image in images if isinstance(image.get("id"), int | str)}
    for entry in content.get("annotations", ()):
        # The dataset check reports invalid entries.
        with contextlib.suppress(KeyError, TypeError, ValueError):
            left, top, width, height = map(float, entry["bbox"])
            image = images[entry["image_id"]]
            if not entry.get("iscrowd"):
                rows.append((left, top, width, height, float(image["height"]), float(image["width"])))
    objects = np.array(rows, dtype=float).reshape(-1, 6)
    return objects[np.isfinite(objects).all(axis=1) & (objects[:, 2:] > 0).all(axis=1)]


def choose_size(cfg: CfgNode, objects: np.ndarray, *, sizes: Iterable[int], fit: bool = True) -> SizeChoice:
    """Return the first image size at which the anchors match ``TARGET_SHARE`` of the objects, or else the last one.

    Args:
        cfg: The config of a detector with anchors.
        objects: The result of :func:`objects_of`, at least one.
        sizes: The sizes to choose from, the smallest first.
        fit: Whether to fit the anchors to the objects instead of using the anchors of the config. Fitted anchors have
            the aspect ratios of the objects, and the sizes of the config times a factor.
    """
    generator, number = cfg.MODEL.ANCHOR_GENERATOR, len(objects)
    objects = objects[:: math.ceil(number / _MOST_OBJECTS)]
    height, width = objects[:, 4], objects[:, 5]
    for size in sizes:
        scale = np.minimum(size / np.minimum(height, width), LONGER_SIDE * size / np.maximum(height, width))
        if cfg.TEST.TILE_SIZE:
            # Tiles are cut from images in their original size.
            scale = np.ones_like(height)
        boxes, anchors = objects[:, :4] * scale[:, None], {}
        ious, ladder = _best_ious(cfg, boxes, generator.SIZES, generator.ASPECT_RATIOS[0]), generator.SIZES
        if fit:
            quantiles = (np.arange(len(generator.ASPECT_RATIOS[0])) + 0.5) / len(generator.ASPECT_RATIOS[0])
            ratios = np.quantile(boxes[:, 3] / boxes[:, 2], quantiles).clip(0.05, 20).round(2).tolist()
            ladders = [
                [[round(factor * side, 1) for side in level] for level in generator.SIZES] for factor in _FACTORS
            ]
            fits = [(_best_ious(cfg, boxes, ladder, ratios), ladder) for ladder in ladders]
            ious, ladder = max(fits, key=lambda one: (round(np.mean(one[0] >= MATCH_IOU), 2), one[0].mean()))
            anchors = {"MODEL.ANCHOR_GENERATOR.SIZES": ladder, "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS": [ratios]}
        share, sides = float(np.mean(ious >= MATCH_IOU)), np.sqrt(boxes[:, 2] * boxes[:, 3])
        choice = SizeChoice(size, share, tuple(np.percentile(sides, (10, 50, 90)).tolist()), number, anchors)
        if share >= TARGET_SHARE:
            break
    return choice


def _best_ious(cfg: CfgNode, boxes: np.ndarray, ladder: list[list[float]], ratios: list[float]) -> np.ndarray:
    """Return the IoU of each box with the best anchor at the positions of the feature maps, (N,)."""
    heads = cfg.MODEL.RETINANET if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else cfg.MODEL.RPN
    strides = [2 ** int(name.removeprefix("p")) for name in heads.IN_FEATURES]
    rows = [
        (stride, side / ratio**0.5, side * ratio**0.5)
        for stride, sides in zip(strides, ladder, strict=True)
        for side in sides
        for ratio in ratios
    ]
    stride, *anchors = np.array(rows).T
    overlap, areas = 1.0, boxes[:, 2:].prod(axis=1)[:, None] + anchors[0] * anchors[1]
    for axis, anchor in enumerate(anchors):
        length = boxes[:, 2 + axis, None]
        center = boxes[:, axis, None] + length / 2 - cfg.MODEL.ANCHOR_GENERATOR.OFFSET * stride
        # The distance to the center of the closest anchor
        distance = np.abs((center + stride / 2) % stride - stride / 2)
        overlap = overlap * np.clip((length + anchor) / 2 - distance, 0, np.minimum(length, anchor))
    return (overlap / (areas - overlap)).max(axis=1)
