"""Test-time augmentation: merge the detections of several sizes of an image and of mirrored images."""

import contextlib
from typing import Any

import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import DatasetMapperTTA, GeneralizedRCNN, GeneralizedRCNNWithTTA
from detectron2.structures import Instances
from torch import nn

from backbones import ConfigError
from projects_vil.config import with_overrides
from projects_vil.modeling.backbone import max_input_side

# detectron2's TEST.AUG.MIN_SIZES are for a short side of 800 pixels.
_USUAL_SHORT_SIDE = 800
_USUAL_SIZES = tuple(get_cfg().TEST.AUG.MIN_SIZES)


def add_tta(cfg: CfgNode, model: nn.Module) -> GeneralizedRCNNWithTTA:
    """Wrap a detector with test-time augmentation; inputs and outputs are detectron2's.

    Images are resized to the short sides ``TEST.AUG.MIN_SIZES``. detectron2's default, 400 to 1200, is scaled to
    ``INPUT.MIN_SIZE_TEST``, so that it always covers 0.5 to 1.5 times that size. ``TEST.AUG.FLIP`` adds mirrored
    images. With absolute positions, no side is longer than ``MODEL.TRANSFORMER.MAX_IMG_SIZE``. Pass images in their
    original size.

    Args:
        cfg: Config of the detector.
        model: A GeneralizedRCNN or RetinaNet in eval mode.

    Raises:
        ConfigError: For a size above the limit of the model.
    """
    given, short, end = tuple(cfg.TEST.AUG.MIN_SIZES), cfg.INPUT.MIN_SIZE_TEST, max_input_side(model)
    sizes, longest = given, cfg.TEST.AUG.MAX_SIZE
    if short and given == _USUAL_SIZES:
        sizes = tuple(round(size * short / _USUAL_SHORT_SIDE) for size in given)
    if end is not None:
        if given != _USUAL_SIZES and max(given) > end:
            limit = f"{end} pixels (MODEL.TRANSFORMER.MAX_IMG_SIZE). Lower the sizes, or raise this limit"
            tables = "the position tables of this model are for at most"
            raise ConfigError(f"TEST.AUG.MIN_SIZES has {max(given)}, but {tables} {limit}.")
        # Limited sizes may be equal. dict.fromkeys removes duplicates.
        sizes, longest = tuple(dict.fromkeys(min(size, end) for size in sizes)), min(longest, end)
    mapper = DatasetMapperTTA(sizes, longest, cfg.TEST.AUG.FLIP)
    # A batch is an image and its mirror image: images of different sizes would be padded.
    batch_size = 2 if cfg.TEST.AUG.FLIP else 1
    if isinstance(model, GeneralizedRCNN):
        return GeneralizedRCNNWithTTA(cfg, model, mapper, batch_size)
    return RetinaNetWithTTA(cfg, model, mapper, batch_size)


class RetinaNetWithTTA(GeneralizedRCNNWithTTA):
    """detectron2's test-time augmentation for RetinaNet.

    Boxes of all augmented images are clipped, mapped back and merged by class-wise non-maximum suppression with
    ``MODEL.RETINANET.NMS_THRESH_TEST``. At most ``TEST.DETECTIONS_PER_IMAGE`` detections remain.

    Args:
        cfg: Config of the detector.
        model: A RetinaNet in eval mode.
        mapper: Creates the augmented images.
        batch_size: Augmented images per batch, in the order of the mapper.
    """

    def __init__(self, cfg: CfgNode, model: nn.Module, mapper: DatasetMapperTTA, batch_size: int) -> None:
        # The base class accepts only R-CNNs.
        nn.Module.__init__(self)
        self.model, self.tta_mapper, self.batch_size = model, mapper, batch_size
        # The base class reads these keys to merge detections.
        keys = {f"MODEL.ROI_HEADS.{key}": cfg.MODEL.RETINANET[key] for key in ("NUM_CLASSES", "NMS_THRESH_TEST")}
        self.cfg = with_overrides(cfg, keys | {"MODEL.MASK_ON": False})

    def _turn_off_roi_heads(self, attrs: list[str]) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    @torch.no_grad()
    def _batch_inference(self, batched_inputs: list[dict[str, Any]], detected_instances=None) -> list[Instances]:
        # Without the original height and width, because boxes must be in pixels of the augmented images.
        images = [{"image": inputs["image"]} for inputs in batched_inputs]
        batches = [images[start : start + self.batch_size] for start in range(0, len(images), self.batch_size)]
        return [output["instances"].to("cpu") for batch in batches for output in self.model(batch)]
