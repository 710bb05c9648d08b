"""Training runs that kill their own process group. They are forked from a process that has imported this module."""

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import torch
from detectron2.engine import HookBase
from detectron2.utils import comm

from backbones import checkpoint_files
from projects_vil.data import register_datasets, seed_all
from projects_vil.engine import Trainer
from tests.projects_vil.engine.gloo import in_processes
from tests.projects_vil.helpers import small_config

IN_SAVE = -1.0


def run_until(
    kill: tuple[int, float] | None, processes: int, datasets: Path, detector: str, output: Path, overrides: list[str]
) -> None:
    """Train in a process group, and kill it.

    Args:
        kill: an iteration, and seconds after its start or ``IN_SAVE`` for the next checkpoint, before it is renamed.
            None lets the run finish.
    """
    os.setsid()
    os.environ["DETECTRON2_DATASETS"] = str(datasets)
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    if processes == 1:
        _train(kill, detector, output, overrides)
    else:
        store = output.with_name(f"{output.name}_{os.getpid()}.store")
        in_processes(processes, _train, kill, detector, output, overrides, store=store)


def _train(kill: tuple[int, float] | None, detector: str, output: Path, overrides: list[str]) -> None:
    cfg = small_config(detector, *overrides, "OUTPUT_DIR", str(output))
    register_datasets(cfg)
    output.mkdir(exist_ok=True)
    seed_all(cfg.SEED % 2**32)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=True)
    if kill is not None and comm.is_main_process():
        trainer.register_hooks([Kill(*kill)])
    trainer.train()


def kill_all(*_: object) -> None:
    os.killpg(0, signal.SIGKILL)


class Kill(HookBase):
    """Kill the process group in an iteration, or in the first checkpoint after its start."""

    def __init__(self, iteration: int, seconds: float) -> None:
        self.iteration, self.seconds, self.is_set = iteration, seconds, False

    def before_step(self) -> None:
        if self.trainer.iter < self.iteration or self.is_set:
            return
        self.is_set = True
        if self.seconds == IN_SAVE:
            checkpoint_files.os.replace = kill_all
        else:
            timer = threading.Timer(self.seconds, kill_all)
            timer.daemon = True
            timer.start()
