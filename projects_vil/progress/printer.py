"""The line that a run logs every 20 iterations."""

import resource
import sys

import torch
from detectron2.utils.events import CommonMetricPrinter, EventStorage, get_event_storage


class ProgressPrinter(CommonMetricPrinter):
    """detectron2's line, with images a second, the share of time that goes into waiting for data, and memory on a CPU.

    Its names are detectron2's where it has them (``eta``, ``iter``, ``time``, ``data_time``, ``max_mem``), so that what
    reads such logs reads these.

    Args:
        max_iter: of the run.
        batch_size: images of an iteration, of all processes together.
    """

    def __init__(self, max_iter: int, *, batch_size: int) -> None:
        super().__init__(max_iter)
        self.batch_size = batch_size
        self._told: int | None = None

    def write(self) -> None:
        storage = get_event_storage()
        # An iteration is told once: detectron2's guess of the time left divides by those since the last line.
        if storage.iter in (self._max_iter, self._told):
            return
        self._told = storage.iter
        eta, names = self._get_eta(storage), storage.histories()
        parts = [f"eta: {eta}"] if eta else []
        parts.append(f"iter: {storage.iter}")
        smoothed = storage.smoothing_hints()
        for name in (name for name in names if "loss" in name or "[metric]" in name):
            # Those of an evaluation are not.
            value = self._median(storage, name) if smoothed[name] else names[name].latest()
            parts.append(f"{name}: {value:.4g}")
        if "gradient_norm" in names:
            parts.append(f"gradient_norm: {self._median(storage, 'gradient_norm'):.4g}")
        if "lr" in names:
            parts.append(f"lr: {names['lr'].latest():.5g}")
        if "time" in names:
            seconds = self._mean(storage, "time")
            parts += [f"time: {seconds:.4f}", f"images/s: {self.batch_size / max(seconds, 1e-9):.3g}"]
            if "data_time" in names:
                # The wait for the batch is a part of neither the first iteration's time nor of a longer one.
                waiting = self._mean(storage, "data_time")
                share = min(waiting / max(seconds, 1e-9), 1)
                parts.append(f"data_time: {waiting:.4f} ({share:.0%} waiting)")
        self.logger.info(" %s", "  ".join([*parts, *describe_memory()]))

    def _median(self, storage: EventStorage, name: str) -> float:
        return storage.history(name).median(storage.count_samples(name, self._window_size))

    def _mean(self, storage: EventStorage, name: str) -> float:
        return storage.history(name).avg(storage.count_samples(name, self._window_size))


def describe_memory() -> list[str]:
    """The most that this process has had so far, on the GPU where it uses one, and in all of its own memory."""
    unit = 1 if sys.platform == "darwin" else 2**10
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    parts = [f"max_rss: {own / 2**20:.0f}M"]
    if torch.cuda.is_initialized():
        parts.insert(0, f"max_mem: {torch.cuda.max_memory_allocated() / 2**20:.0f}M")
    return parts
