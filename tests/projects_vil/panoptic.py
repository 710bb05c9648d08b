"""A small Panoptic FPN on synthetic shapes."""

from detectron2.config import CfgNode

from projects_vil import load_config
from tests.projects_vil.helpers import ROOT, SMALL

CONFIG = ROOT / "configs/projects/panoptic_fpn_vil_tiny_rpb_1x.yaml"
TRAIN, VAL = "shapes_panoptic_train", "shapes_panoptic_val"
# A small detector for a config in ``configs/projects``.
SMALL_PROJECT = [
    *("MODEL.DEVICE", "cpu", "MODEL.TRANSFORMER.VARIANT", "vil_tiny_1_1_3_1_rpb", *SMALL["mask_rcnn"]),
    *("MODEL.RPN.PRE_NMS_TOPK_TRAIN", "100", "MODEL.RPN.POST_NMS_TOPK_TRAIN", "50", "SOLVER.STEPS", "()"),
    *("MODEL.ROI_HEADS.NUM_CLASSES", "3", "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "32"),
    *("SOLVER.IMS_PER_BATCH", "4", "SOLVER.WARMUP_ITERS", "0"),
]
SMALL_PANOPTIC = [
    *(*SMALL_PROJECT, "MODEL.SEM_SEG_HEAD.CONVS_DIM", "32", "MODEL.SEM_SEG_HEAD.NUM_CLASSES", "2"),
    *("DATASETS.TRAIN", f"('{TRAIN}',)", "DATASETS.TEST", f"('{VAL}',)"),
]


def panoptic_config(*overrides: str) -> CfgNode:
    return load_config(CONFIG, [*SMALL_PANOPTIC, *overrides])
