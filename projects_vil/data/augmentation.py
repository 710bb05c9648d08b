"""Augmentation of training images: ``INPUT.AUGMENTATION``, large-scale jitter, and Simple Copy-Paste."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from detectron2.data.detection_utils import build_augmentation
from detectron2.projects.point_rend import ColorAugSSDTransform
from detectron2.structures import BitMasks, Instances

from backbones import ConfigError
from backbones.errors import check_choice
from projects_vil.config import is_segmentor
from projects_vil.data.detection_utils import boxes_of_masks

AUGMENTATIONS = ("default", "lsj", "lsj_copy_paste")
# Each object is pasted with this probability, so that a random subset is, as in the paper.
PASTE_PROBABILITY = 0.5
# A covered object is kept if this many pixels stay visible: 8 x 8 are two by two cells of the finest feature map.
MIN_VISIBLE_PIXELS = 64


class ResizeScale(T.ResizeScale):
    """detectron2's, but at least one pixel of each side stays of a narrow image at a small scale."""

    def get_transform(self, image: np.ndarray) -> T.ResizeTransform:
        resize = super().get_transform(image)
        return T.ResizeTransform(resize.h, resize.w, max(resize.new_h, 1), max(resize.new_w, 1), self.interp)


def large_scale_jitter(cfg: CfgNode) -> list[T.Augmentation | T.Transform]:
    """Build random scaling, cropping or padding to a square of ``INPUT.LSJ.SIZE``, and ``INPUT.RANDOM_FLIP``.

    As in ``configs/new_baselines`` of detectron2: the padding, on the right and at the bottom, has level 128, and the
    colors of ``lsj_copy_paste`` do not change it.
    """
    size = (cfg.INPUT.LSJ.SIZE, cfg.INPUT.LSJ.SIZE)
    _, *flip = build_augmentation(cfg, is_train=True)
    crop, pad = T.FixedSizeCrop(size, pad=False), T.FixedSizeCrop(size)
    return [ResizeScale(*cfg.INPUT.LSJ.SCALE, *size), crop, *color_augmentations(cfg), pad, *flip]


def color_augmentations(cfg: CfgNode) -> list[T.Transform]:
    """Return detectron2's SSD color augmentation if the config has photometric distortion, or else an empty list.

    It has the ranges of mmsegmentation's ``PhotoMetricDistortion``, which LIT's official segmentation uses.
    """
    if not cfg.INPUT.PHOTOMETRIC_DISTORTION and cfg.INPUT.AUGMENTATION != "lsj_copy_paste":
        return []
    check_choice("INPUT.FORMAT", cfg.INPUT.FORMAT, ("RGB", "BGR"))
    return [ColorAugSSDTransform(img_format=cfg.INPUT.FORMAT)]


def uses_copy_paste(cfg: CfgNode) -> bool:
    return cfg.INPUT.AUGMENTATION == "lsj_copy_paste" and cfg.INPUT.COPY_PASTE.PROBABILITY > 0


def check_augmentation(cfg: CfgNode) -> None:
    """Check that ``INPUT.AUGMENTATION`` suits the model and the other keys.

    Raises:
        ConfigError: for an unknown name, jitter of label images or with ``INPUT.CROP``, and copy-paste without masks,
            with keypoints or stuff, or from a subset.
    """
    name, model = cfg.INPUT.AUGMENTATION, cfg.MODEL
    check_choice("INPUT.AUGMENTATION", name, AUGMENTATIONS)
    if name != "default" and is_segmentor(cfg):
        raise ConfigError(f"INPUT.AUGMENTATION is {name}: a SemanticSegmentor needs default, and INPUT.CROP for crops")
    if name != "default" and cfg.INPUT.CROP.ENABLED:
        raise ConfigError(f"INPUT.AUGMENTATION {name} crops images itself: add INPUT.CROP.ENABLED False")
    if not uses_copy_paste(cfg):
        return
    if model.META_ARCHITECTURE != "GeneralizedRCNN" or not model.MASK_ON or model.KEYPOINT_ON:
        reason = "needs a GeneralizedRCNN with MODEL.MASK_ON True and MODEL.KEYPOINT_ON False, or no pasting of objects"
    elif cfg.DATALOADER.SAMPLER_TRAIN == "RandomSubsetTrainingSampler":
        reason = "pastes objects of all images, and DATALOADER.SAMPLER_TRAIN trains on some of them"
    else:
        return
    raise ConfigError(f"INPUT.AUGMENTATION lsj_copy_paste {reason}: add INPUT.COPY_PASTE.PROBABILITY 0.0")


def paste(sample: dict[str, Any], other: dict[str, Any], is_chosen: np.ndarray) -> dict[str, Any]:
    """Paste objects of a mapped record into another one (Simple Copy-Paste: Ghiasi et al. 2021, section 3).

    Boxes become those of what stays visible of the masks. A covered object is removed if fewer than
    ``MIN_VISIBLE_PIXELS`` of it are visible. Crowds are not among the instances of a mapped record: they are covered as
    background is, and never pasted.

    Args:
        sample: with ``image`` (3, H, W) and ``instances``, whose masks are bitmaps; it is not modified.
        other: likewise, of the same size.
        is_chosen: which objects of ``other`` are pasted: (number of its objects,) bool.

    Returns:
        The record of ``sample``, with ``pasted_from``, the file of ``other``, if anything was pasted.
    """
    if not is_chosen.any():
        return sample
    own, pasted = _with_masks(sample["instances"]), other["instances"][torch.from_numpy(is_chosen)]
    is_covered = pasted.gt_masks.tensor.any(dim=0)
    image = torch.where(is_covered, other["image"], sample["image"])
    before = own.gt_masks.tensor.flatten(1).sum(dim=1)
    own.gt_masks.tensor = own.gt_masks.tensor & ~is_covered
    after = own.gt_masks.tensor.flatten(1).sum(dim=1)
    own.gt_boxes = boxes_of_masks(own.gt_masks, own.gt_boxes)
    instances = Instances.cat([own[(after == before) | (after >= MIN_VISIBLE_PIXELS)], pasted])
    return sample | {"image": image, "instances": instances, "pasted_from": other["file_name"]}


def _with_masks(instances: Instances) -> Instances:
    """Return a copy with masks, also if there are no objects."""
    masks = instances.gt_masks.tensor if instances.has("gt_masks") else torch.zeros(0, *instances.image_size)
    boxes, classes = instances.gt_boxes, instances.gt_classes
    return Instances(instances.image_size, gt_boxes=boxes, gt_classes=classes, gt_masks=BitMasks(masks))


@dataclasses.dataclass
class CopyPaste:
    """A mapper that pastes objects of another record, mapped in the same way, with a probability.

    All random numbers come from NumPy's generator, which the loader seeds for each image, so that a batch depends
    neither on worker processes nor on what came before.

    Args:
        mapper: from a record to a sample with ``image``, all of one size, and ``instances``.
        records: from which objects are pasted, the record itself among them.
        probability: 0 to 1.
    """

    mapper: Callable[[dict[str, Any]], dict[str, Any]]
    records: Sequence[dict[str, Any]]
    probability: float

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        sample = self.mapper(record)
        if np.random.uniform() >= self.probability:
            return sample
        other = self.mapper(self.records[np.random.randint(len(self.records))])
        return paste(sample, other, np.random.uniform(size=len(other["instances"])) < PASTE_PROBABILITY)
