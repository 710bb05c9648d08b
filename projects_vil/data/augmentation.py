"""Augmentation of training images: ``INPUT.AUGMENTATION``, large-scale jitter (LSJ) and Simple Copy-Paste."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from detectron2.data.detection_utils import build_augmentation
from detectron2.projects.point_rend import ColorAugSSDTransform
from detectron2.structures import BitMasks, Boxes, Instances

from projects_vil.data.image_files import DAMAGED

AUGMENTATIONS = ("default", "lsj", "lsj_copy_paste")
# Probability that an object is pasted. The paper pastes a random subset of the objects.
PASTE_PROBABILITY = 0.5
# A covered object is kept if at least this many pixels stay visible. 8 x 8 pixels are 2 x 2 cells of the finest level.
MIN_VISIBLE_PIXELS = 64


class ResizeBatch(T.ResizeShortestEdge):
    """detectron2's resize to one of several sizes, with the same size for all images of a batch.

    Images of different sizes are padded to the largest, and the model computes the padding too. With one size, only
    images of different aspect ratios are padded. The iteration, an attribute of detectron2's ``AugInput``, selects the
    size, so that it is the same in all processes.
    """

    def get_transform(self, image: np.ndarray, iteration: int) -> T.ResizeTransform:
        size = self.short_edge_length[iteration % len(self.short_edge_length)]
        return T.ResizeShortestEdge(size, self.max_size, interp=self.interp).get_transform(image)


class ResizeScale(T.ResizeScale):
    """detectron2's ``ResizeScale``, except that each side of the output has at least one pixel."""

    def get_transform(self, image: np.ndarray) -> T.ResizeTransform:
        resize = super().get_transform(image)
        return T.ResizeTransform(resize.h, resize.w, max(resize.new_h, 1), max(resize.new_w, 1), self.interp)


def large_scale_jitter(cfg: CfgNode) -> list[T.Augmentation | T.Transform]:
    """Return large-scale jitter: a random scale, a crop or padding to ``INPUT.LSJ.SIZE``, and ``INPUT.RANDOM_FLIP``.

    The augmentation matches ``configs/new_baselines`` of detectron2. The image is padded on the right and at the bottom
    with the value 128. The color augmentation of ``lsj_copy_paste`` does not change the padding.
    """
    size = (cfg.INPUT.LSJ.SIZE, cfg.INPUT.LSJ.SIZE)
    _, *flip = build_augmentation(cfg, is_train=True)
    crop, pad = T.FixedSizeCrop(size, pad=False), T.FixedSizeCrop(size)
    has_colors = cfg.INPUT.PHOTOMETRIC_DISTORTION or cfg.INPUT.AUGMENTATION == "lsj_copy_paste"
    colors = [ColorAugSSDTransform(img_format=cfg.INPUT.FORMAT)] if has_colors else []
    return [ResizeScale(*cfg.INPUT.LSJ.SCALE, *size), crop, *colors, pad, *flip]


def boxes_of_masks(masks: BitMasks, boxes: Boxes) -> Boxes:
    """Return the boxes of the visible parts of cropped or covered objects.

    A mask has whole pixels, so each side of its box has an error of up to one pixel. This error is large for small
    objects. A side of the original box is therefore kept if it differs from the mask by at most one pixel.

    Args:
        masks: The visible masks, N x (H, W).
        boxes: The original boxes (N, 4), clipped to the image.
    """
    visible = masks.get_bounding_boxes().tensor
    return Boxes(torch.where((visible - boxes.tensor).abs() <= 1, boxes.tensor, visible))


def paste(sample: dict[str, Any], other: dict[str, Any], is_chosen: np.ndarray) -> dict[str, Any]:
    """Paste objects of one sample into another sample (Simple Copy-Paste, Ghiasi et al. 2021, section 3).

    The box of a covered object becomes the box of its visible mask. The object is removed if it is covered and fewer
    than ``MIN_VISIBLE_PIXELS`` stay visible. Crowds are not instances of a sample. They are never pasted, and pasted
    objects cover them like background.

    Args:
        sample: A sample with ``image`` (3, H, W) and ``instances`` with bitmap masks. It is not modified.
        other: A sample of the same size.
        is_chosen: The objects of ``other`` to paste, as (number of objects,) bool.

    Returns:
        ``sample`` with the pasted objects. If an object was pasted, ``pasted_from`` is the file name of ``other``.
    """
    if not is_chosen.any():
        return sample
    own, pasted = sample["instances"], other["instances"][torch.from_numpy(is_chosen)]
    masks = own.gt_masks.tensor if own.has("gt_masks") else torch.zeros(0, *own.image_size)
    # This copy always has masks. detectron2 omits them if there are no objects.
    own = Instances(own.image_size, gt_boxes=own.gt_boxes, gt_classes=own.gt_classes, gt_masks=BitMasks(masks))
    is_covered = pasted.gt_masks.tensor.any(dim=0)
    image = torch.where(is_covered, other["image"], sample["image"])
    before = own.gt_masks.tensor.flatten(1).sum(dim=1)
    own.gt_masks.tensor = own.gt_masks.tensor & ~is_covered
    after = own.gt_masks.tensor.flatten(1).sum(dim=1)
    own.gt_boxes = boxes_of_masks(own.gt_masks, own.gt_boxes)
    instances = Instances.cat([own[(after == before) | (after >= MIN_VISIBLE_PIXELS)], pasted])
    return sample | {"image": image, "instances": instances, "pasted_from": other["file_name"]}


@dataclasses.dataclass
class CopyPaste:
    """A mapper that pastes objects of a second, random record into a sample with a given probability.

    All random numbers come from NumPy's generator. The loader seeds this generator for each image. A batch therefore
    depends neither on the worker processes nor on earlier batches.

    Args:
        mapper: Maps a record to a sample with ``image`` and ``instances``. All images have the same size.
        records: The records to choose the second record from. It may be the same record.
        probability: The probability of pasting, from 0 to 1.
    """

    mapper: Callable[[dict[str, Any]], dict[str, Any]]
    records: Sequence[dict[str, Any]]
    probability: float

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        sample = self.mapper(record)
        if np.random.uniform() >= self.probability:
            return sample
        other = self.mapper(self.records[np.random.randint(len(self.records))])
        if damaged := sample.get(DAMAGED, {}) | other.get(DAMAGED, {}):
            sample[DAMAGED] = damaged
        return paste(sample, other, np.random.uniform(size=len(other["instances"])) < PASTE_PROBABILITY)
