"""A PointRend mask head for batches without objects, and checks of the keys of PointRend and Cascade R-CNN."""

from detectron2.config import CfgNode
from detectron2.modeling import ROI_MASK_HEAD_REGISTRY
from detectron2.projects.point_rend import PointRendMaskHead
from detectron2.structures import Instances
from torch import Tensor

from backbones import ConfigError
from projects_vil.config import is_point_rend


@ROI_MASK_HEAD_REGISTRY.register()
class AnyBatchPointRendMaskHead(PointRendMaskHead):
    """detectron2's head, which fails for batches without objects, with a loss of 0 for them.

    Such batches occur after cropping, and with ``TEST.VALIDATION_LOSS``, which evaluates single images.
    """

    def _sample_train_points(self, coarse_mask: Tensor, instances: list[Instances]) -> tuple[Tensor, Tensor]:
        """(R, C, S, S) logits of R objects -> points (R, P, 2) in their boxes, and labels (R, P)."""
        if any(len(of_image) for of_image in instances):
            return super()._sample_train_points(coarse_mask, instances)
        number = self.mask_point_train_num_points
        return coarse_mask.new_zeros(0, number, 2), coarse_mask.new_zeros(0, number)


def check_roi_heads(cfg: CfgNode) -> None:
    """Check keys of PointRend and Cascade R-CNN that detectron2 does not check.

    Raises:
        ConfigError: for a value that PointRend's mask head cannot use, or an IoU threshold that is not between 0 and 1.
    """
    model, head = cfg.MODEL, cfg.MODEL.ROI_MASK_HEAD
    if is_point_rend(cfg):
        channels = model.FPN.OUT_CHANNELS * len(head.IN_FEATURES)
        # All augmentations except the default produce bitmaps.
        has_bitmaps = cfg.INPUT.MASK_FORMAT == "bitmask" or cfg.INPUT.AUGMENTATION != "default"
        for key, is_valid, valid in (
            ("MODEL.ROI_MASK_HEAD.POINT_HEAD_ON", head.POINT_HEAD_ON, True),
            ("MODEL.ROI_MASK_HEAD.POOLER_TYPE", head.POOLER_TYPE == "", "''"),
            ("MODEL.ROI_MASK_HEAD.OUTPUT_SIDE_RESOLUTION", head.OUTPUT_SIDE_RESOLUTION > 0, 7),
            ("MODEL.POINT_HEAD.TRAIN_NUM_POINTS", model.POINT_HEAD.TRAIN_NUM_POINTS > 0, 196),
            ("MODEL.ROI_MASK_HEAD.CONV_DIM", head.CONV_DIM <= channels, channels),
            ("INPUT.MASK_FORMAT", has_bitmaps, "bitmask"),
        ):
            if not is_valid:
                raise ConfigError(f"{key} has a value that PointRendMaskHead cannot use. Set {key} {valid}.")
    thresholds = model.ROI_BOX_CASCADE_HEAD.IOUS
    are_valid = thresholds and all(isinstance(value, float) and 0 < value < 1 for value in thresholds)
    if model.ROI_HEADS.NAME == "CascadeROIHeads" and not are_valid:
        raise ConfigError(
            f"MODEL.ROI_BOX_CASCADE_HEAD.IOUS is {thresholds}. Each head needs a threshold above 0 and below 1."
        )
