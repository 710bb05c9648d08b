"""Choose the image size and the anchors of a detector from the objects of a dataset."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from detectron2.config import CfgNode

# The share of the objects that the chosen size and anchors match, at this IoU.
TARGET_SHARE = 0.98
MATCH_IOU = 0.5
# The longer side of an image is at most this multiple of the image size.
LONGER_SIDE = 5 / 3
# Factors of the sizes of the config's anchors.
_FACTORS = 2.0 ** np.arange(-2, 1.25, 0.25)


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
        )


def objects_of(content: Mapping[str, Any]) -> np.ndarray:
    """Return left, top, width and height of each object, and height and width of its image, as (N, 6) float.

    Crowds and entries that are not valid COCO are left out.

    Args:
        content: The content of a COCO file.
    """
    sizes = {
        image.get("id"): (image.get("height"), image.get("width"))
        for image in content.get("images", ())
        if isinstance(image, dict)
    }
    rows = []
    for entry in content.get("annotations", ()):
        if not isinstance(entry, dict) or entry.get("iscrowd"):
            continue
        try:
            rows.append(np.array([*entry["bbox"], *sizes[entry["image_id"]]], dtype=float))
        except (KeyError, TypeError, ValueError):
            # The dataset check reports it.
            continue
    objects = np.stack([row for row in rows if len(row) == 6]) if rows else np.zeros((0, 6))
    return objects[np.isfinite(objects).all(axis=1) & (objects[:, 2:] > 0).all(axis=1)]


def choose_size(cfg: CfgNode, objects: np.ndarray, *, sizes: Iterable[int], fit: bool = True) -> SizeChoice:
    """Return the first image size at which the anchors match ``TARGET_SHARE`` of the objects, or else the last one.

    Args:
        cfg: The config of a detector with anchors.
        objects: The result of :func:`objects_of`, at least one.
        sizes: The sizes to choose from, the smallest first.
        fit: Whether to fit the anchors to the objects instead of using the anchors of the config.
    """
    generator = cfg.MODEL.ANCHOR_GENERATOR
    for size in sizes:
        boxes, ladder, ratios = _scale(objects, size), generator.SIZES, generator.ASPECT_RATIOS[0]
        ious, anchors = _best_ious(cfg, boxes, ladder, ratios), {}
        if fit:
            ratios = _ratios(boxes, len(ratios))
            fits = [(_best_ious(cfg, boxes, one, ratios), one) for one in _ladders(ladder)]
            ious, ladder = max(fits, key=lambda one: (round(_share(one[0]), 2), one[0].mean()))
            anchors = {"MODEL.ANCHOR_GENERATOR.SIZES": ladder, "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS": [ratios]}
        sides = tuple(np.percentile(np.sqrt(boxes[:, 2] * boxes[:, 3]), (10, 50, 90)).tolist())
        choice = SizeChoice(size, _share(ious), sides, len(objects), anchors)
        if choice.share >= TARGET_SHARE:
            break
    return choice


def _share(ious: np.ndarray) -> float:
    return float((ious >= MATCH_IOU).mean())


def _scale(objects: np.ndarray, size: int) -> np.ndarray:
    """Return left, top, width and height of the objects in the resized images, (N, 4)."""
    height, width = objects[:, 4], objects[:, 5]
    scale = np.minimum(size / np.minimum(height, width), LONGER_SIDE * size / np.maximum(height, width))
    return objects[:, :4] * scale[:, None]


def _ladders(sizes: Sequence[Sequence[float]]) -> list[list[list[float]]]:
    return [[[round(float(factor * side), 1) for side in level] for level in sizes] for factor in _FACTORS]


def _ratios(boxes: np.ndarray, number: int) -> list[float]:
    """Return ``number`` aspect ratios, height / width: the middle of each of as many groups of equal size."""
    quantiles = (np.arange(number) + 0.5) / number
    return [round(float(ratio), 2) for ratio in np.quantile(boxes[:, 3] / boxes[:, 2], quantiles)]


def _best_ious(
    cfg: CfgNode, boxes: np.ndarray, ladder: Sequence[Sequence[float]], ratios: Sequence[float]
) -> np.ndarray:
    """Return the IoU of each box with the best anchor at the positions of the feature maps, (N,)."""
    width, height = boxes[:, 2], boxes[:, 3]
    center_x, center_y = boxes[:, 0] + width / 2, boxes[:, 1] + height / 2
    offset, best = cfg.MODEL.ANCHOR_GENERATOR.OFFSET, np.zeros(len(boxes))
    for stride, sides in zip(_strides(cfg, len(ladder)), ladder, strict=True):
        # Distance to the center of the closest anchor.
        distances = [
            np.abs((center - offset * stride + stride / 2) % stride - stride / 2) for center in (center_x, center_y)
        ]
        for side in sides:
            for ratio in ratios:
                anchor_width, anchor_height = side / ratio**0.5, side * ratio**0.5
                overlap = _overlap(width, anchor_width, distances[0]) * _overlap(height, anchor_height, distances[1])
                best = np.maximum(best, overlap / (width * height + anchor_width * anchor_height - overlap))
    return best


def _overlap(length: np.ndarray, other: float, distance: np.ndarray) -> np.ndarray:
    """Return the overlap of two intervals whose centers have a distance."""
    return np.clip((length + other) / 2 - distance, 0, np.minimum(length, other))


def _strides(cfg: CfgNode, levels: int) -> list[int]:
    """Return the strides of the feature maps with anchors, of RetinaNet (P3 and up) or of an RPN (P2 and up)."""
    heads = cfg.MODEL.RETINANET if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else cfg.MODEL.RPN
    return [2 ** int(name.removeprefix("p")) for name in heads.IN_FEATURES][:levels]
