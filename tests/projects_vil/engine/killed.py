"""Runs that are killed, in processes of their own; importing this imports what they need."""

import io
import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from detectron2.engine import HookBase
from detectron2.utils import comm

from backbones import checkpoint_files as files
from projects_vil.data import register_datasets, seed_all
from projects_vil.engine import Trainer
from tests.projects_vil.engine.gloo import in_processes
from tests.projects_vil.helpers import PATIENCE, small_config


@dataclass(frozen=True)
class Moment:
    """When a run is killed: in an iteration, after a share of its time, or in a save of one from it on.

    Attributes:
        iteration: the first that it may be.
        share: of the time of the iteration before; of a fifth of a second before the first.
        save: ``"half"`` for a save that has written half of its file, ``"unnamed"`` for one whose file has no name yet.
        rank: of the process that kills all.
    """

    iteration: int
    share: float
    save: str = ""
    rank: int = 0


def moments(number: int, iterations: int, *, processes: int, seed: str) -> list[Moment]:
    """Return moments in the order of a run, one of each type of save among them."""
    generator = random.Random(seed)
    found = [
        Moment(iteration, generator.random(), rank=generator.randrange(processes))
        # Early enough that none of them comes when the run is over.
        for iteration in sorted(generator.choices(range(iterations - 6), k=number))
    ]
    for index, save in ((number // 3, "half"), (2 * number // 3, "unnamed")):
        found[index] = Moment(found[index].iteration, 0.0, save)
    return found


def run_until(
    moment: Moment | None, processes: int, datasets_root: Path, detector: str, output: Path, overrides: list[str]
) -> None:
    """What a process does that is to be killed, or, without a moment, to end by itself; all of it is one group."""
    os.setsid()
    os.environ["DETECTRON2_DATASETS"] = str(datasets_root)
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    args = moment, detector, output, overrides
    if processes == 1:
        _train(*args)
    else:
        in_processes(processes, _train, *args, store=output.with_name(f"{output.name}_{os.getpid()}.store"))


def _train(moment: Moment | None, detector: str, output: Path, overrides: list[str]) -> None:
    cfg = small_config(detector, *overrides, "OUTPUT_DIR", str(output))
    register_datasets(cfg)
    output.mkdir(exist_ok=True)
    seed_all(cfg.SEED % 2**32)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=True)
    if moment is not None and comm.get_rank() == moment.rank:
        trainer.register_hooks([KillInSave(moment) if moment.save else Kill(moment)])
    trainer.train()


def kill_all() -> None:
    os.killpg(0, signal.SIGKILL)


class Kill(HookBase):
    """The power cut, at its moment."""

    def __init__(self, moment: Moment) -> None:
        self.moment, self.begun, self.is_set = moment, 0.0, False

    def before_step(self) -> None:
        now = time.monotonic()
        seconds, self.begun = now - self.begun if self.begun else 0.2, now
        if self.trainer.iter >= self.moment.iteration and not self.is_set:
            self.is_set = True
            timer = threading.Timer(self.moment.share * seconds, kill_all)
            timer.daemon = True
            timer.start()


class KillInSave(HookBase):
    """The power cut, in the middle of the next save."""

    def __init__(self, moment: Moment) -> None:
        self.moment = moment

    def before_step(self) -> None:
        if self.trainer.iter < self.moment.iteration:
            return
        own = torch.save

        def save_half(contents, file) -> None:
            # An evaluation saves its predictions too, and processes what they send each other.
            if not str(getattr(file, "name", "")).endswith(".partial"):
                own(contents, file)
                return
            whole = io.BytesIO()
            own(contents, whole)
            file.write(whole.getvalue()[: whole.tell() // 2])
            file.flush()
            kill_all()
            time.sleep(PATIENCE)

        def replace(source, target) -> None:
            kill_all()
            time.sleep(PATIENCE)

        if self.moment.save == "half":
            torch.save = save_half
        else:
            files.os.replace = replace
