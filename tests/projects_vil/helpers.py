"""Configs of small detectors, and functions that run the tools in separate processes."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.structures import Instances

from backbones import ConfigError
from projects_vil import load_config
from research.export_table import untrained_detector as untrained_detector
from tests.projects_vil import forked

Result = TypeVar("Result")

ROOT = Path(__file__).resolve().parents[2]
_DEMOS = ("retinanet", "mask_rcnn", "cascade_mask_rcnn", "semantic_fpn")
CONFIGS = {name: ROOT / f"configs/demo/{name}_vil_shapes.yaml" for name in _DEMOS}

# Seconds until a test treats a process as hanging. Machines may be busy.
PATIENCE = 600

# An image takes less than a second on one core. With low thresholds, an untrained detector has detections.
_SMALL = ["MODEL.FPN.OUT_CHANNELS", "32", "INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", "64"]
_SMALL += ["DATALOADER.NUM_WORKERS", "0", "TEST.NUM_VISUALIZED_IMAGES", "0"]
_SMALL_RCNN = [
    *_SMALL,
    *("MODEL.ROI_BOX_HEAD.FC_DIM", "64", "MODEL.ROI_MASK_HEAD.CONV_DIM", "16"),
    *("MODEL.RPN.PRE_NMS_TOPK_TEST", "100", "MODEL.RPN.POST_NMS_TOPK_TEST", "20"),
    *("MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.001"),
]
SMALL = {
    "retinanet": [*_SMALL, "MODEL.RETINANET.NUM_CONVS", "1", "MODEL.RETINANET.SCORE_THRESH_TEST", "0.001"],
    "mask_rcnn": _SMALL_RCNN,
    "cascade_mask_rcnn": _SMALL_RCNN,
    "semantic_fpn": [
        *("MODEL.FPN.OUT_CHANNELS", "32", "MODEL.SEM_SEG_HEAD.CONVS_DIM", "32", "INPUT.MIN_SIZE_TRAIN", "(48, 96)"),
        *("INPUT.MIN_SIZE_TEST", "64", "INPUT.CROP.SIZE", "[64, 64]", "DATALOADER.NUM_WORKERS", "0"),
        *("TEST.NUM_VISUALIZED_IMAGES", "0"),
    ],
}
# A batch is the whole dataset, so an iteration does not depend on the order of the images.
EXACT_TRAINING = [
    *("SOLVER.IMS_PER_BATCH", "16", "INPUT.RANDOM_FLIP", "none", "DATALOADER.ASPECT_RATIO_GROUPING", "False"),
    *("SOLVER.WARMUP_ITERS", "0", "SOLVER.MAX_ITER", "4", "SOLVER.CHECKPOINT_PERIOD", "2"),
]


def small_config(detector: str = "retinanet", *overrides: str) -> CfgNode:
    return load_config(CONFIGS[detector], [*SMALL[detector], *overrides])


def run_tool(
    name: str, *args, datasets_root: Path | None = None, root: Path = ROOT, launcher: list[str] | None = None
) -> subprocess.CompletedProcess:
    """Run ``python tools/NAME ARGS`` in ``root`` in a separate process.

    The process is forked from a process that has imported detectron2, which saves most of the time.

    Args:
        name: File name of the tool.
        args: Arguments of the tool.
        datasets_root: Value of ``DETECTRON2_DATASETS``.
        root: Working directory.
        launcher: Start a new interpreter instead, with these arguments before the tool.
    """
    command = [ROOT / "tools" / name, *args]
    if launcher is not None:
        command, env = [sys.executable, *launcher, *command], _environment(datasets_root)
        return subprocess.run(
            list(map(str, command)), cwd=root, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    with tempfile.TemporaryDirectory() as folder:
        process = start_tool(name, *args, folder=folder, datasets_root=datasets_root, root=root)
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, PATIENCE)
        written = [(Path(folder) / stream).read_text() for stream in ("stdout", "stderr")]
        return subprocess.CompletedProcess(command, process.exitcode, *written)


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Return the context for processes that have imported the libraries of the tools."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([forked.__name__])
    return context


def start_tool(
    name: str, *args, folder: str | Path, datasets_root: Path | None = None, root: Path = ROOT, **options
) -> multiprocessing.process.BaseProcess:
    """Start a tool in a forked process in ``root``. It writes ``stdout`` and ``stderr`` to files in ``folder``.

    The other options are explained at :func:`.forked.run`.
    """
    words = (ROOT / "tools" / name, [str(argument) for argument in args], _environment(datasets_root), root)
    process = forkserver().Process(target=forked.run, args=(*words, Path(folder)), kwargs=options)
    process.start()
    return process


def _environment(datasets_root: Path | None) -> dict[str, str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return env if datasets_root is None else env | {"DETECTRON2_DATASETS": str(datasets_root)}


def assert_same_detections(ours: Instances, theirs: Instances) -> None:
    """Check that detections are equal up to rounding in float32. Detections with nearly equal scores may be swapped.

    Rounding moves boxes by less than 1e-3 pixels and changes few mask pixels. A real difference, such as another scale
    or feature level, moves boxes by at least 0.1 pixels.
    """
    assert ours.image_size == theirs.image_size and len(ours) == len(theirs) > 0
    mine, other = (
        torch.column_stack([x.pred_boxes.tensor / 0.05, x.scores / 1e-3, x.pred_classes * 1e6]).double()
        for x in (ours, theirs)
    )
    distance, nearest = (mine[:, None] - other).abs().amax(2).min(1)
    assert distance.max() <= 1 and len(nearest.unique()) == len(other), distance
    assert ours.has("pred_masks") == theirs.has("pred_masks")
    if ours.has("pred_masks"):
        masks, others = ours.pred_masks.float(), theirs.pred_masks[nearest].float()
        assert (masks - others).abs().sum() <= 0.01 * (masks + others).sum()


def message(call: Callable, *args, **kwargs) -> str:
    """Return the message of the ConfigError that a call raises, and check that it has one line."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def error_line(result: subprocess.CompletedProcess) -> str:
    """Return the error line of a tool. Warnings of libraries may precede it."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], result.stderr
    return lines[-1]


def wait_for(condition: Callable[[], Result]) -> Result:
    """Return the result of a condition as soon as it is true."""
    deadline = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return result


def last_child(pid: int) -> int:
    """Return the newest child process of a process."""
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout.split()
    return int(children[-1])
