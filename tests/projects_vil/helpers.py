"""Small detectors, and the tools as processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from detectron2.config import CfgNode

from projects_vil import load_config
from projects_vil.export.table import lively_detector as lively_detector

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {name: ROOT / f"configs/demo/{name}_vil_shapes.yaml" for name in ("retinanet", "mask_rcnn", "semantic_fpn")}

# Narrow enough for a second on one core; the low thresholds give an untrained detector detections too.
_SMALL = ["MODEL.FPN.OUT_CHANNELS", "32", "INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", "64"]
_SMALL += ["DATALOADER.NUM_WORKERS", "0"]
SMALL = {
    "retinanet": [*_SMALL, "MODEL.RETINANET.NUM_CONVS", "1", "MODEL.RETINANET.SCORE_THRESH_TEST", "0.001"],
    "mask_rcnn": [
        *_SMALL,
        *("MODEL.ROI_BOX_HEAD.FC_DIM", "64", "MODEL.ROI_MASK_HEAD.CONV_DIM", "16"),
        *("MODEL.RPN.PRE_NMS_TOPK_TEST", "100", "MODEL.RPN.POST_NMS_TOPK_TEST", "20"),
        *("MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.001"),
    ],
    "semantic_fpn": [
        *("MODEL.FPN.OUT_CHANNELS", "32", "MODEL.SEM_SEG_HEAD.CONVS_DIM", "32", "INPUT.MIN_SIZE_TRAIN", "(48, 96)"),
        *("INPUT.MIN_SIZE_TEST", "64", "INPUT.CROP.SIZE", "[64, 64]", "DATALOADER.NUM_WORKERS", "0"),
    ],
}
# A batch is the whole dataset, so that an iteration does not depend on the order that images come in.
EXACT_TRAINING = [
    *("SOLVER.IMS_PER_BATCH", "16", "INPUT.RANDOM_FLIP", "none", "DATALOADER.ASPECT_RATIO_GROUPING", "False"),
    *("SOLVER.WARMUP_ITERS", "0", "SOLVER.MAX_ITER", "4", "SOLVER.CHECKPOINT_PERIOD", "2"),
]


def small_config(detector: str = "retinanet", *overrides: str) -> CfgNode:
    return load_config(CONFIGS[detector], [*SMALL[detector], *overrides])


def run_tool(name: str, *args, datasets_root: Path | None = None) -> subprocess.CompletedProcess:
    """``python tools/NAME ARGS`` from the repository's root."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if datasets_root is not None:
        env["DETECTRON2_DATASETS"] = str(datasets_root)
    command = [sys.executable, ROOT / "tools" / name, *args]
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def error_line(result: subprocess.CompletedProcess) -> str:
    """The one line by which a tool says what is wrong; libraries may have put warnings before it."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], result.stderr
    return lines[-1]
