"""What PointRend's mask head needs, in which detectron2 would end with a traceback."""

from detectron2.config import CfgNode

from backbones import InputError


def check_point_rend(cfg: CfgNode) -> None:
    """Whether the keys of ``MODEL.ROI_MASK_HEAD.NAME PointRendMaskHead`` go together; other heads are let be.

    Raises:
        InputError: for another number of classes than the boxes', masks as polygons, or wider layers than the maps.
    """
    model, head = cfg.MODEL, cfg.MODEL.ROI_MASK_HEAD
    if not model.MASK_ON or head.NAME != "PointRendMaskHead":
        return
    if head.POINT_HEAD_ON and model.POINT_HEAD.NUM_CLASSES != model.ROI_HEADS.NUM_CLASSES:
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
