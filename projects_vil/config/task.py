"""What a config is for: boxes or labels, and of how many classes."""

from detectron2.config import CfgNode


def number_of_classes(cfg: CfgNode) -> tuple[str, int]:
    """The key that holds it, and the number."""
    if is_segmentor(cfg):
        return "MODEL.SEM_SEG_HEAD.NUM_CLASSES", cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES
    if cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        return "MODEL.RETINANET.NUM_CLASSES", cfg.MODEL.RETINANET.NUM_CLASSES
    return "MODEL.ROI_HEADS.NUM_CLASSES", cfg.MODEL.ROI_HEADS.NUM_CLASSES


def detector_name(cfg: CfgNode) -> str:
    """What the papers call it, "Cascade Mask R-CNN" for one; the meta-architecture where no paper names it."""
    if cfg.MODEL.META_ARCHITECTURE != "GeneralizedRCNN":
        return cfg.MODEL.META_ARCHITECTURE
    is_cascade, has_masks = cfg.MODEL.ROI_HEADS.NAME == "CascadeROIHeads", cfg.MODEL.MASK_ON
    if is_point_rend(cfg):
        return "PointRend"
    if not (is_cascade or has_masks):
        return "Faster R-CNN"
    return f"{'Cascade ' if is_cascade else ''}{'Mask ' if has_masks else ''}R-CNN"


def is_segmentor(cfg: CfgNode) -> bool:
    """Whether a config is for semantic segmentation."""
    return cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor"


def is_panoptic(cfg: CfgNode) -> bool:
    """Whether a config is for boxes and masks of things, and labels of stuff."""
    return cfg.MODEL.META_ARCHITECTURE == "PanopticFPN"


def is_point_rend(cfg: CfgNode) -> bool:
    """Whether masks are those of PointRend's head: detectron2's, or this project's."""
    return cfg.MODEL.MASK_ON and cfg.MODEL.ROI_MASK_HEAD.NAME in ("PointRendMaskHead", "AnyBatchPointRendMaskHead")


DETECTORS = ("RetinaNet", "GeneralizedRCNN")
