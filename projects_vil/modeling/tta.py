"""Test-time augmentation: a detector on several sizes of an image and their mirror images, with merged detections."""

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

# The short side, in pixels, for which detectron2's TEST.AUG.MIN_SIZES are meant.
_USUAL_SHORT_SIDE = 800
_USUAL_SIZES = tuple(get_cfg().TEST.AUG.MIN_SIZES)


def add_tta(cfg: CfgNode, model: nn.Module) -> GeneralizedRCNNWithTTA:
    """Wrap a detector with test-time augmentation; inputs and outputs are detectron2's.

    Images are resized to the short sides ``TEST.AUG.MIN_SIZES``; but where those are detectron2's own, 400 to 1200 for
    a detector that is tested at 800, they are scaled to ``INPUT.MIN_SIZE_TEST``, so that they always are 0.5 to 1.5 of
    it. ``TEST.AUG.FLIP`` adds the mirror images. The inputs' images are best those of the files, not yet resized. Where
    absolute positions end, no side is longer than ``MODEL.TRANSFORMER.MAX_IMG_SIZE``.

    Args:
        cfg: the detector's config.
        model: a GeneralizedRCNN or a RetinaNet in eval mode.

    Raises:
        ConfigError: if a size is less than a pixel, or is set to one that the model cannot take.
    """
    given, short, end = tuple(cfg.TEST.AUG.MIN_SIZES), cfg.INPUT.MIN_SIZE_TEST, max_input_side(model)
    sizes, longest = given, cfg.TEST.AUG.MAX_SIZE
    if short and given == _USUAL_SIZES:
        sizes = tuple(round(size * short / _USUAL_SHORT_SIDE) for size in given)
    if not sizes or min(sizes) < 1 or longest < 1:
        raise ConfigError(f"TEST.AUG.MIN_SIZES {list(sizes)} and MAX_SIZE {longest} must be 1 pixel or more")
    if end is not None:
        if given != _USUAL_SIZES and max(given) > end:
            raise ConfigError(
                f"TEST.AUG.MIN_SIZES has {max(given)}, and this model's position tables end at "
                f"MODEL.TRANSFORMER.MAX_IMG_SIZE {end}: lower the sizes, or raise the limit"
            )
        # Each once, in order.
        sizes, longest = tuple(dict.fromkeys(min(size, end) for size in sizes)), min(longest, end)
    mapper = DatasetMapperTTA(sizes, longest, cfg.TEST.AUG.FLIP)
    # An image and its mirror image make a batch; images of other sizes would pad each other.
    batch_size = 2 if cfg.TEST.AUG.FLIP else 1
    if isinstance(model, GeneralizedRCNN):
        return GeneralizedRCNNWithTTA(cfg, model, mapper, batch_size)
    return RetinaNetWithTTA(cfg, model, mapper, batch_size)


class RetinaNetWithTTA(GeneralizedRCNNWithTTA):
    """detectron2's class for a RetinaNet.

    Boxes of all augmented images, cut at the border, are mapped back, and go together through non-maximum suppression
    by class, with ``MODEL.RETINANET.NMS_THRESH_TEST``; ``TEST.DETECTIONS_PER_IMAGE`` of them stay.

    Args:
        cfg: the detector's config.
        model: a RetinaNet in eval mode.
        mapper: makes the augmented images.
        batch_size: augmented images per batch, in the mapper's order.
    """

    def __init__(self, cfg: CfgNode, model: nn.Module, mapper: DatasetMapperTTA, batch_size: int) -> None:
        # Not its base's, which refuses other models than R-CNNs.
        nn.Module.__init__(self)
        self.model, self.tta_mapper, self.batch_size = model, mapper, batch_size
        # The keys that merging the detections reads.
        keys = {f"MODEL.ROI_HEADS.{key}": cfg.MODEL.RETINANET[key] for key in ("NUM_CLASSES", "NMS_THRESH_TEST")}
        self.cfg = with_overrides(cfg, keys | {"MODEL.MASK_ON": False})

    def _turn_off_roi_heads(self, attrs: list[str]) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    @torch.no_grad()
    def _batch_inference(
        self, batched_inputs: list[dict[str, Any]], detected_instances: None = None
    ) -> list[Instances]:
        # Without the height and width of the file: boxes are for the augmented images.
        images = [{"image": inputs["image"]} for inputs in batched_inputs]
        batches = [images[start : start + self.batch_size] for start in range(0, len(images), self.batch_size)]
        return [output["instances"].to("cpu") for batch in batches for output in self.model(batch)]
