"""Killed twenty times, at any moment and while it saves, a run ends as one that was not disturbed, to the bit."""

import multiprocessing
import signal

import pytest

from tests.projects_vil import forked
from tests.projects_vil.engine import killed
from tests.projects_vil.engine.test_resuming import assert_same_file, metrics
from tests.projects_vil.helpers import PATIENCE

KILLS, ITERATIONS = 20, 24
RUN = [
    *("SEED", "5", "SOLVER.MAX_ITER", str(ITERATIONS), "SOLVER.CHECKPOINT_PERIOD", "3", "TEST.EVAL_PERIOD", "8"),
    *("SOLVER.IMS_PER_BATCH", "2", "INPUT.MIN_SIZE_TRAIN", "(48, 64)", "TEST.BEST_METRIC", "bbox/AP"),
    *("SOLVER.BASE_LR", "1e-3", "SOLVER.WARMUP_ITERS", "4", "MODEL.EMA.ENABLED", "True"),
    *("MODEL.TRANSFORMER.DROP_PATH", "0.2"),
]


def exit_code(moment, *args) -> int:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([forked.__name__, killed.__name__])
    process = context.Process(target=killed.run_until, args=(moment, *args))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_twenty_kills(detector, workers, processes, shapes, tmp_path):
    overrides = [*RUN, "DATALOADER.NUM_WORKERS", str(workers)]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert exit_code(None, processes, shapes.parent, detector, whole, overrides) == 0
    for moment in killed.moments(KILLS, ITERATIONS, processes=processes, seed=f"{detector} {processes} {workers}"):
        assert exit_code(moment, processes, shapes.parent, detector, cut, overrides) == -signal.SIGKILL, moment
    assert exit_code(None, processes, shapes.parent, detector, cut, overrides) == 0
    names = {path.name for path in whole.glob("*.pth")}
    assert names == {path.name for path in cut.glob("*.pth")} and len(names) >= 9
    for name in names:
        assert_same_file(whole / name, cut / name)
    assert metrics(whole) == metrics(cut)
    assert (whole / "evaluation.json").read_text() == (cut / "evaluation.json").read_text()
    assert not list(cut.glob(".*.partial"))
