"""A run that is killed ten times, at any moment and while it saves, equals an uninterrupted run, bit by bit."""

import random
import signal

import pytest

from tests.projects_vil.engine import interruption
from tests.projects_vil.engine.test_resuming import assert_same_run
from tests.projects_vil.helpers import PATIENCE, forkserver

KILLS, ITERATIONS = 10, 24
RUN = [
    *("SEED", "5", "SOLVER.MAX_ITER", str(ITERATIONS), "SOLVER.CHECKPOINT_PERIOD", "3", "TEST.EVAL_PERIOD", "8"),
    *("SOLVER.IMS_PER_BATCH", "2", "INPUT.MIN_SIZE_TRAIN", "(48, 64)", "TEST.BEST_METRIC", "bbox/AP"),
    *("SOLVER.BASE_LR", "1e-3", "SOLVER.WARMUP_ITERS", "4", "MODEL.EMA.ENABLED", "True"),
    *("MODEL.TRANSFORMER.DROP_PATH", "0.2"),
]


def exit_code(kill, *args) -> int:
    process = forkserver().Process(target=interruption.run_until, args=(kill, *args))
    process.start()
    process.join(PATIENCE)
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("detector, workers, processes", [("retinanet", 0, 2), ("mask_rcnn", 2, 1)])
def test_ten_kills(detector, workers, processes, shapes, tmp_path):
    whole, cut, generator = tmp_path / "whole", tmp_path / "cut", random.Random(detector + str(workers))
    rest = [processes, shapes.parent, detector]
    overrides = [*RUN, "DATALOADER.NUM_WORKERS", str(workers)]
    assert exit_code(None, *rest, whole, overrides) == 0
    # Early enough that the run has not finished.
    for number, iteration in enumerate(sorted(generator.choices(range(ITERATIONS - 8), k=KILLS))):
        kill = iteration, interruption.IN_SAVE if number % 7 == 3 else generator.uniform(0, 0.2)
        assert exit_code(kill, *rest, cut, overrides) == -signal.SIGKILL, kill
    assert exit_code(None, *rest, cut, overrides) == 0
    assert_same_run(whole, cut)
    assert not list(cut.glob(".*.partial"))
