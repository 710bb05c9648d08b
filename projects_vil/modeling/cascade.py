"""The heads of Cascade R-CNN."""

from detectron2.config import CfgNode

from backbones import InputError

_KEY = "MODEL.ROI_BOX_CASCADE_HEAD"


def check_cascade(cfg: CfgNode) -> None:
    """Whether the keys of ``MODEL.ROI_HEADS.NAME CascadeROIHeads`` go together; other heads are let be.

    Raises:
        InputError: for overlaps that are none, or not as many as weights, another first one than the proposals are
            matched by, or boxes of classes.
    """
    model, heads = cfg.MODEL, cfg.MODEL.ROI_BOX_CASCADE_HEAD
    if model.ROI_HEADS.NAME != "CascadeROIHeads":
        return
    overlaps, first = list(heads.IOUS), model.ROI_HEADS.IOU_THRESHOLDS[0]
    if not overlaps or not all(isinstance(overlap, float) and 0 < overlap < 1 for overlap in overlaps):
        raise InputError(f"{_KEY}.IOUS is {heads.IOUS}: it has an overlap above 0 and below 1 for each head")
    if len(heads.BBOX_REG_WEIGHTS) != len(overlaps):
        raise InputError(
            f"{_KEY}.IOUS has {len(overlaps)} heads, and {_KEY}.BBOX_REG_WEIGHTS {len(heads.BBOX_REG_WEIGHTS)}: "
            "both have an entry for each head"
        )
    if overlaps[0] != first:
        raise InputError(
            f"{_KEY}.IOUS begins with {overlaps[0]}, and MODEL.ROI_HEADS.IOU_THRESHOLDS is {first}: the first head "
            "takes the proposals as these are matched, so make them one"
        )
    if not model.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG:
        raise InputError("CascadeROIHeads move boxes of no class: add MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG True")
