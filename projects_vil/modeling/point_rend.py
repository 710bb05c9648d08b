"""What PointRend's mask head needs, in which detectron2 would end with a traceback."""

from detectron2.config import CfgNode

from backbones import InputError


def check_point_rend(cfg: CfgNode) -> None:
    """Whether the keys of ``MODEL.ROI_MASK_HEAD.NAME PointRendMaskHead`` go together; other heads are let be.

    Raises:
        InputError: for another number of classes than the boxes', masks as polygons, wider layers than the maps, a head
            without points, or no points.
    """
    model, head = cfg.MODEL, cfg.MODEL.ROI_MASK_HEAD
    if not model.MASK_ON or head.NAME != "PointRendMaskHead":
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
    if cfg.INPUT.MASK_FORMAT != "bitmask":
        raise InputError("PointRendMaskHead learns masks from bitmaps: add INPUT.MASK_FORMAT bitmask")
    channels = model.FPN.OUT_CHANNELS * len(head.IN_FEATURES)
    if head.CONV_DIM > channels:
        raise InputError(
            f"MODEL.ROI_MASK_HEAD.CONV_DIM is {head.CONV_DIM}, more than the {channels} channels of the maps that "
            f"PointRendMaskHead takes: add MODEL.ROI_MASK_HEAD.CONV_DIM {channels}"
        )
