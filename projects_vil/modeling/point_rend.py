"""PointRend's mask head where detectron2's would end with a traceback: without objects, or by its keys."""

from detectron2.config import CfgNode
from detectron2.modeling import ROI_MASK_HEAD_REGISTRY
from detectron2.projects.point_rend import PointRendMaskHead
from detectron2.structures import Instances
from torch import Tensor

from backbones import InputError
from projects_vil.config import is_point_rend


@ROI_MASK_HEAD_REGISTRY.register()
class AnyBatchPointRendMaskHead(PointRendMaskHead):
    """detectron2's, of the same weights, that also trains on batches without any object: its losses are 0 then.

    A cut can leave such a batch of any dataset, and ``TEST.LOSS`` takes images one by one.
    """

    def _sample_train_points(self, coarse_mask: Tensor, instances: list[Instances]) -> tuple[Tensor, Tensor]:
        """(R, C, S, S) logits of R objects -> points (R, P, 2) in their boxes, and labels (R, P) of these."""
        if any(len(of_image) for of_image in instances):
            return super()._sample_train_points(coarse_mask, instances)
        number = self.mask_point_train_num_points
        return coarse_mask.new_zeros(0, number, 2), coarse_mask.new_zeros(0, number)


def check_point_rend(cfg: CfgNode) -> None:
    """Whether the keys of PointRend's ``MODEL.ROI_MASK_HEAD`` go together; other heads are let be.

    Raises:
        InputError: for another number of classes than the boxes', masks as polygons, wider layers than the maps, a head
            without points, or no points.
    """
    model, head = cfg.MODEL, cfg.MODEL.ROI_MASK_HEAD
    if not is_point_rend(cfg):
        return
    for key, is_right, needed in (
        ("ROI_MASK_HEAD.POINT_HEAD_ON", head.POINT_HEAD_ON, "True"),
        ("ROI_MASK_HEAD.POOLER_TYPE", head.POOLER_TYPE == "", "''"),
        ("ROI_MASK_HEAD.OUTPUT_SIDE_RESOLUTION", head.OUTPUT_SIDE_RESOLUTION > 0, "7"),
        ("POINT_HEAD.TRAIN_NUM_POINTS", model.POINT_HEAD.TRAIN_NUM_POINTS > 0, "196"),
    ):
        if not is_right:
            raise InputError(f"MODEL.{key} is nothing that PointRendMaskHead can use: add MODEL.{key} {needed}")
    if model.POINT_HEAD.NUM_CLASSES != model.ROI_HEADS.NUM_CLASSES:
        raise InputError(
            f"MODEL.POINT_HEAD.NUM_CLASSES is {model.POINT_HEAD.NUM_CLASSES}, and MODEL.ROI_HEADS.NUM_CLASSES "
            f"{model.ROI_HEADS.NUM_CLASSES}: add MODEL.POINT_HEAD.NUM_CLASSES {model.ROI_HEADS.NUM_CLASSES}"
        )
    # The other recipes of augmentation always make bitmaps.
    if cfg.INPUT.MASK_FORMAT != "bitmask" and cfg.INPUT.AUGMENTATION == "default":
        raise InputError("PointRendMaskHead learns masks from bitmaps: add INPUT.MASK_FORMAT bitmask")
    channels = model.FPN.OUT_CHANNELS * len(head.IN_FEATURES)
    if head.CONV_DIM > channels:
        raise InputError(
            f"MODEL.ROI_MASK_HEAD.CONV_DIM is {head.CONV_DIM}, more than the {channels} channels of the maps that "
            f"PointRendMaskHead takes: add MODEL.ROI_MASK_HEAD.CONV_DIM {channels}"
        )
