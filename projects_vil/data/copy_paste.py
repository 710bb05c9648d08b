"""Objects of another training image pasted into one (Simple Copy-Paste: Ghiasi et al. 2021, section 3)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from detectron2.structures import BitMasks, Instances
from torch import Tensor

from projects_vil.data.detection_utils import boxes_of_masks

# Each object is pasted or not, so that a subset is drawn at random, as in the paper.
SHARE_PASTED = 0.5
# What is left of an object below is an object if it has so many pixels: 8 x 8 are two by two cells of the finest map.
MIN_VISIBLE_PIXELS = 64


def paste(image: Tensor, masks: Tensor, other_image: Tensor, other_masks: Tensor) -> tuple[Tensor, Tensor]:
    """An image with objects of another over it, and what is still seen of its own.

    Args:
        image: (3, H, W).
        masks: of its objects (N, H, W) bool.
        other_image: (3, H, W).
        other_masks: of the objects that are pasted (M, H, W) bool.

    Returns:
        (3, H, W) and (N, H, W).
    """
    is_covered = other_masks.any(dim=0)
    return torch.where(is_covered, other_image, image), masks & ~is_covered


def paste_sample(sample: dict[str, Any], other: dict[str, Any], is_chosen: np.ndarray) -> dict[str, Any]:
    """A mapped record with objects of another one.

    Boxes are those of what is left of the masks. An object that is covered goes where less than ``MIN_VISIBLE_PIXELS``
    are left of it. Crowds are no objects of a mapped record: they are covered as any background is, and never pasted.

    Args:
        sample: with ``image`` (3, H, W) and ``instances``, whose masks are bitmaps; it stays as it is.
        other: likewise, of the same size.
        is_chosen: which objects of ``other`` are pasted: (number of its objects,) bool.

    Returns:
        the record of ``sample``, with ``pasted_from``, the file of ``other``, where anything was pasted.
    """
    if not is_chosen.any():
        return sample
    own, pasted = _with_masks(sample["instances"]), other["instances"][torch.from_numpy(is_chosen)]
    before = own.gt_masks.tensor.flatten(1).sum(dim=1)
    image, own.gt_masks.tensor = paste(sample["image"], own.gt_masks.tensor, other["image"], pasted.gt_masks.tensor)
    after = own.gt_masks.tensor.flatten(1).sum(dim=1)
    own.gt_boxes = boxes_of_masks(own.gt_masks, own.gt_boxes)
    instances = Instances.cat([own[(after == before) | (after >= MIN_VISIBLE_PIXELS)], pasted])
    return sample | {"image": image, "instances": instances, "pasted_from": other["file_name"]}


class CopyPaste:
    """A mapper whose samples get objects of another record, mapped in the same way, with a probability.

    All is drawn from NumPy's generator, which the loader seeds for each image, so that a batch depends on neither
    worker processes nor what came before.

    Args:
        mapper: from a record to a sample with ``image``, all of one size, and ``instances``.
        records: those that objects are taken from, the record itself among them.
        probability: 0 to 1.
    """

    def __init__(
        self,
        mapper: Callable[[dict[str, Any]], dict[str, Any]],
        records: Sequence[dict[str, Any]],
        *,
        probability: float,
    ) -> None:
        self.mapper = mapper
        self.records = records
        self.probability = probability

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        sample = self.mapper(record)
        if np.random.uniform() >= self.probability:
            return sample
        other = self.mapper(self.records[np.random.randint(len(self.records))])
        return paste_sample(sample, other, np.random.uniform(size=len(other["instances"])) < SHARE_PASTED)


def _with_masks(instances: Instances) -> Instances:
    """A copy, with masks where there is no object too."""
    masks = instances.gt_masks.tensor if instances.has("gt_masks") else torch.zeros(0, *instances.image_size)
    return Instances(
        instances.image_size,
        gt_boxes=instances.gt_boxes,
        gt_classes=instances.gt_classes,
        gt_masks=BitMasks(masks),
    )
