"""Seconds and memory of a step of training, for both experiments, and their tables."""

import functools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

from projects_vil.utils import peak_in_new_process

# A forward and backward pass; on a GPU it may return before it is done.
Step = Callable[[], None]
Key = TypeVar("Key", bound=Hashable)


def seconds_by_turns(steps: Mapping[Key, Step], runs: int, device: str) -> dict[Key, float]:
    """The median seconds of each step, all of which take turns ``runs`` times."""
    times: dict[Key, list[float]] = {key: [] for key in steps}
    for _ in range(runs):
        for key, step in steps.items():
            began = time.perf_counter()
            step()
            _wait_for(device)
            times[key].append(time.perf_counter() - began)
    return {key: statistics.median(own) for key, own in times.items()}


def peak_memory(build: Callable[[], Step], *, warm_up: Callable[[], Step], device: str, what: str) -> int | None:
    """Bytes at the peak of a step above what there was before it, when its model was made.

    By the GPU's own counter; on a CPU in a new process, and None where the system does not tell.

    Args:
        build: makes the step; on a CPU it is pickled.
        warm_up: makes a small step that runs first: what a first call loads and keeps is no part of a cost.
        what: is measured, with the arguments that it comes from, for an error.

    Raises:
        InputError: as ``build``, and where the process is ended, as for want of memory.
    """
    if device.startswith("cuda"):
        warm_up()()
        step = build()
        _wait_for(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        _wait_for(device)
        return torch.cuda.max_memory_allocated(device) - before
    return peak_in_new_process(functools.partial(_warmed_up, build, warm_up), what=what, instead="take less")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _wait_for(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _warmed_up(build: Callable[[], Step], warm_up: Callable[[], Step]) -> Step:
    warm_up()()
    return build()
