"""What a resumed run needs beyond weights and optimizer to go on as if it had never stopped."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from detectron2.engine import HookBase
from detectron2.utils import comm
from detectron2.utils.events import EventStorage, JSONWriter
from torch import nn

from backbones.utils.files import written_whole
from projects_vil.data import derived_seed, seed_all
from projects_vil.progress import SMOOTHING_WINDOW, scalars_after

# Metrics that no run repeats.
TIMES = ("time", "data_time", "rank_data_time", "eta_seconds")


class SeedSteps(HookBase):
    """Seed every iteration by the run's seed, its number and the process: what comes before it changes nothing.

    So stochastic depth, the sampling of proposals and whatever else a model draws need no state in a checkpoint.
    """

    def before_step(self) -> None:
        seed_all(derived_seed("iteration", self.trainer.seed, self.trainer.iter, comm.get_rank()))


class MetricsFile(JSONWriter):
    """detectron2's ``metrics.json``, with no iteration twice after a resume, and later ones after earlier ones.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), SMOOTHING_WINDOW)
        self.path = path

    def start(self, first_iteration: int) -> None:
        """Take the lines of an iteration and of later ones, and a last one that was cut off, out of the file.

        Raises:
            InputError: where it cannot be written.
        """
        self.close()
        lines = self.path.read_text().splitlines()
        kept = [line for line in lines if _iteration(line) < first_iteration]
        if len(kept) < len(lines):
            with written_whole(self.path) as partial:
                partial.write_text("".join(f"{line}\n" for line in kept))
        super().__init__(str(self.path), SMOOTHING_WINDOW)
        self._last_write = max(map(_iteration, kept), default=-1)

    def write(self) -> None:
        for iteration, values in scalars_after(self._last_write):
            line = json.dumps(values | {"iteration": iteration}, sort_keys=True)
            self._file_handle.write(f"{line}\n")
            self._last_write = iteration
        self._file_handle.flush()
        os.fsync(self._file_handle.fileno())


class KeepMetrics(HookBase):
    """Keep the last values of each metric in the checkpoint, since ``metrics.json`` has medians of them."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {}

    def before_train(self) -> None:
        for name, (values, smoothed) in self._saved.items():
            for value, iteration in values:
                self.trainer.storage.put_scalar(name, value, smoothing_hint=smoothed, cur_iter=int(iteration))

    def state_dict(self) -> dict[str, Any]:
        storage: EventStorage = self.trainer.storage
        hints = storage.smoothing_hints()
        return {
            name: [[list(pair) for pair in history.values()[-SMOOTHING_WINDOW:]], hints[name]]
            for name, history in storage.histories().items()
            if name not in TIMES
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict


class ConfiguredRates:
    """Learning rates, weight decays and momentum of a config, for a run that is resumed with others than it began with.

    A checkpoint's optimizer and schedule bring their own along.

    Args:
        optimizer, scheduler: as the config makes them, before anything is loaded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._rates = list(scheduler.base_lrs)
        self._others = self._of_groups()

    def restore(self) -> None:
        """After loading: let the config's count, and say so where they are others."""
        saved = list(self.scheduler.base_lrs), self._of_groups()
        if saved == (self._rates, self._others):
            return
        self.scheduler.base_lrs = self._rates
        rates = zip(self.optimizer.param_groups, self._rates, self.scheduler.get_lr(), self._others, strict=True)
        for group, initial, now, others in rates:
            group.update(others, initial_lr=initial, lr=now)
        logging.getLogger(__name__).warning(
            "the resumed run began with other learning rates, weight decays or momentum (largest rate %g, now %g): "
            "those of the config count",
            max(saved[0]),
            max(self._rates),
        )

    def _of_groups(self) -> list[dict[str, Any]]:
        names = ("weight_decay", "momentum", "nesterov", "betas", "eps")
        return [
            {name: tuple(value) if isinstance(value := group[name], list) else value for name in names if name in group}
            for group in self.optimizer.param_groups
        ]


def _iteration(line: str) -> float:
    try:
        return json.loads(line)["iteration"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def loss_normalizers(model: nn.Module) -> list[float | None]:
    """Of each process: RetinaNet's running mean of positive anchors, which is no buffer. All processes call this."""
    return comm.all_gather(getattr(model, "loss_normalizer", None))


def restore_loss_normalizer(model: nn.Module, saved: list[float | None]) -> None:
    """Give a process its own of :func:`loss_normalizers`, or their mean where their number is another."""
    known = [value for value in saved if value is not None]
    if known:
        rank, same = comm.get_rank(), len(saved) == comm.get_world_size()
        model.loss_normalizer = known[rank] if same and len(known) == len(saved) else sum(known) / len(known)
