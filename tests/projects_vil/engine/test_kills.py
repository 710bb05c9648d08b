"""A run that is killed ten times, at any moment and while it saves, equals an uninterrupted run, bit by bit."""

import os
import random
import signal
import time

import pytest

from tests.projects_vil.engine.test_launch import LAUNCH, Run
from tests.projects_vil.engine.test_resuming import assert_same_run
from tests.projects_vil.helpers import PATIENCE, wait_for

KEYS = [
    *("SOLVER.MAX_ITER", "60", "SOLVER.CHECKPOINT_PERIOD", "3", "SOLVER.CHECKPOINT_MAX_TO_KEEP", "2"),
    *("TEST.EVAL_PERIOD", "20", "SOLVER.WARMUP_ITERS", "4", "MODEL.EMA.ENABLED", "True"),
    *("MODEL.TRANSFORMER.DROP_PATH", "0.2"),
]


@pytest.mark.slow
@pytest.mark.parametrize("detector, options", [("retinanet", LAUNCH), ("mask_rcnn", ["DATALOADER.NUM_WORKERS", "2"])])
def test_a_run_that_is_killed_ten_times(detector, options, datasets_root, tmp_path):
    def start(name: str, output: str) -> Run:
        words = ["--resume", *KEYS, *options, "OUTPUT_DIR", tmp_path / output]
        return Run(tmp_path / name, datasets_root, *words, detector=detector)

    def last_checkpoint() -> str:
        return path.read_text() if (path := tmp_path / "cut/last_checkpoint").exists() else ""

    generator = random.Random(detector)
    for number in range(10):
        run, before = start(str(number), "cut"), last_checkpoint()
        if number % 3 == 2:
            wait_for(lambda: any(tmp_path.glob("cut/.model_*.partial")))
        else:
            wait_for(lambda before=before: last_checkpoint() != before)
            time.sleep(generator.uniform(0, 0.2))
        os.killpg(run.process.pid, signal.SIGKILL)
        assert run.end()[0] == -signal.SIGKILL
    for output in ("cut", "whole"):
        status, log = start(f"{output} to the end", output).end(PATIENCE)
        assert status == 0, log
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert not list(tmp_path.glob("cut/.*.partial"))
