"""Seconds by turns in one process, so that a busy machine disturbs all alike; memory in a process for each."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from projects_vil.analysis.benchmark.cases import Case
from projects_vil.utils import peak_in_new_process


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Of one case.

    Attributes:
        case: what was measured.
        seconds: median, with its quartiles ``low`` and ``high``.
        ratio: median of the ratios to the reference's runs that stood beside it, with quartiles.
        memory: bytes at the peak of one call above what there was before it; None where it was not measured.
    """

    case: Case
    seconds: float
    low: float
    high: float
    ratio: float
    ratio_low: float
    ratio_high: float
    memory: int | None

    @property
    def images_per_second(self) -> float:
        return self.case.batch_size / self.seconds


def measure(cases: Sequence[Case], *, reference: int = 0, runs: int = 5, memory: bool = True) -> list[Measurement]:
    """Time cases of one size by turns, after one run of each that does not count.

    Args:
        cases: on one device.
        reference: index of the one that ratios are to.
        runs: how often each is timed.
        memory: whether memory is measured too: on a GPU by its own counter, else in a new process for each.

    Raises:
        InputError: as :meth:`Case.build`.
    """
    device = cases[0].device
    steps = [case.build() for case in cases]
    peaks = [_warmed_up(step, device) for step in steps]
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(runs):
        for step, own in zip(steps, times, strict=True):
            own.append(seconds_of(step, device))
    del steps
    if not memory:
        peaks = [None] * len(cases)
    elif not device.startswith("cuda"):
        peaks = [peak_in_new_process(case.build, what=case.name, instead="--no-memory") for case in cases]
    found = []
    for case, own, peak in zip(cases, times, peaks, strict=True):
        low, seconds, high = _quartiles(own)
        ratios = _quartiles([mine / theirs for mine, theirs in zip(own, times[reference], strict=True)])
        found.append(Measurement(case, seconds, low, high, ratios[1], ratios[0], ratios[2], peak))
    return found


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    return tuple(statistics.quantiles(values, n=4)) if len(values) > 1 else (values[0],) * 3


def seconds_of(step: Callable[[], object], device: str) -> float:
    """Of one call, to the end of what it started on ``device``."""
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _warmed_up(step: Callable[[], None], device: str) -> int | None:
    """Bytes of a GPU at the peak of a second call above what there was before it."""
    step()
    if not device.startswith("cuda"):
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
