"""Configs of small detectors, and functions that run the tools in separate processes."""

import contextlib
import functools
import io
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar
from unittest import mock

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.structures import Instances
from detectron2.utils.logger import _LOG_COUNTER, setup_logger

from backbones import ConfigError
from projects_vil import load_config
from projects_vil.config import merge_overrides
from projects_vil.data.records import SHARED
from research.export_table import untrained_detector as untrained_detector
from tests.projects_vil import forked

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]

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
CONFIGS = {name: ROOT / f"configs/demo/{name}_vil_shapes.yaml" for name in SMALL}
# A batch is the whole dataset, so an iteration does not depend on the order of the images.
EXACT_TRAINING = [
    *("SOLVER.IMS_PER_BATCH", "16", "INPUT.RANDOM_FLIP", "none", "DATALOADER.ASPECT_RATIO_GROUPING", "False"),
    *("SOLVER.WARMUP_ITERS", "0", "SOLVER.MAX_ITER", "4", "SOLVER.CHECKPOINT_PERIOD", "2"),
]


@functools.cache
def _loaded(detector: str) -> CfgNode:
    return load_config(CONFIGS[detector], SMALL[detector])


def small_config(detector: str = "retinanet", *overrides: str) -> CfgNode:
    return merge_overrides(_loaded(detector), overrides)


class Result(NamedTuple):
    """Exit status and output of a program. The status is a text if the program ended by ``sys.exit(text)``."""

    returncode: int | str
    stdout: str
    stderr: str


def run_tool(name: str | Path, *args, datasets_root: Path | None = None, root: Path | None = None) -> Result:
    """Run ``python tools/NAME ARGS`` in this process, which has imported the libraries.

    Args:
        name: Path of the tool from ``tools/``.
        args: Arguments of the tool.
        datasets_root: Value of ``DETECTRON2_DATASETS``.
        root: Working directory.
    """
    setup_logger.cache_clear()
    status, out, err = 0, io.StringIO(), io.StringIO()
    known = [(catalog, set(catalog.list())) for catalog in (DatasetCatalog, MetadataCatalog)]
    # A new process has read no datasets, and logged no message once.
    new = [mock.patch.dict(state, clear=True) for state in (SHARED, _LOG_COUNTER)]
    with pytest.MonkeyPatch.context() as patch, loggers_and_signals_as_before(), new[0], new[1]:
        patch.setattr(sys, "argv", [str(name), *map(str, args)])
        if datasets_root is not None:
            patch.setenv("DETECTRON2_DATASETS", str(datasets_root))
        if root is not None:
            patch.chdir(root)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_path(str(ROOT / "tools" / name), run_name="__main__")
            except SystemExit as end:
                status = end.code
    for catalog, names in known:
        for registered in set(catalog.list()) - names:
            catalog.remove(registered)
    return Result(status or 0, out.getvalue(), err.getvalue())


vil = functools.partial(run_tool, "../vil/__main__.py")


def error_of(name: str | Path, *args) -> str:
    """Return the error line of a tool that runs in this process."""
    return error_line(run_tool(name, *args))


@contextlib.contextmanager
def loggers_and_signals_as_before() -> Iterator[None]:
    """Restore loggers and signal handlers, because a run in this process changes them."""
    loggers = [logging.getLogger(name) for name in ("projects_vil", "backbones", "detectron2", "fvcore")]
    states = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, states, strict=True):
            logger.handlers[:] = handlers
            logger.setLevel(level)
            logger.propagate = propagate
        for number, handler in signals.items():
            signal.signal(number, handler)


def run_python(*command, datasets_root: Path | None = None, root: Path = ROOT) -> subprocess.CompletedProcess:
    """Run ``python COMMAND`` in a new interpreter, as outside of the tests."""
    words, env = [sys.executable, *map(str, command)], _environment(datasets_root)
    return subprocess.run(words, cwd=root, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)


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


def contents_of(folder: Path) -> dict[str, bytes | str]:
    """Return the content of each file below a folder by its relative path, and ``"not a file"`` for other paths."""
    plain = {path: path.is_file() and not path.is_symlink() for path in folder.rglob("*")}
    return {str(path.relative_to(folder)): path.read_bytes() if plain[path] else "not a file" for path in sorted(plain)}


def error_line(result: Result) -> str:
    """Return the error line of a tool. Warnings of libraries may precede it."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], result.stderr
    return lines[-1]


def wait_for(condition: Callable[[], T]) -> T:
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
