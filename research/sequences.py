"""The training loop of the models on sequences, and what one of their steps costs."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from backbones.errors import ConfigError
from projects_vil.utils import peak_in_new_process

# A forward and backward pass; on a GPU it may return before it has ended.
Step = Callable[[], None]
Key = TypeVar("Key", bound=Hashable)


class Learner:
    """A model in training.

    Attributes:
        seconds: spent on its steps.
        losses: of the steps since they were last taken.
    """

    def __init__(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.name, self.model, self.optimizer = name, model, optimizer
        self.seconds = 0.0
        self.losses: list[float] = []

    def step(self, losses: Iterable[Tensor]) -> None:
        """Take one optimizer step on the sum of ``losses``, each computed when the one before has its gradients."""
        start, total = time.perf_counter(), 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for loss in losses:
            loss.backward()
            total += loss.item()
        if not math.isfinite(total):
            raise ConfigError(f"{self.name}: the loss is {total}: lower the learning rate or lengthen the warm-up")
        self.optimizer.step()
        self.losses.append(total)
        self.seconds += time.perf_counter() - start

    def take_mean_loss(self) -> float:
        """Return the mean loss since the last call."""
        losses, self.losses = self.losses, []
        return sum(losses) / max(len(losses), 1)


def train(
    learners: Sequence[Learner],
    compute_losses: Callable[[Learner, int], Iterable[Tensor]],
    evaluate: Callable[[int], None],
    *,
    first: int = 0,
    steps: int,
    eval_every: int,
) -> None:
    """Train from step ``first`` (0 at the start of a training) to ``steps``, all learners on the same data.

    Args:
        compute_losses: learner, step -> the losses of its micro-batches, one after the other.
        evaluate: called with the number of finished steps, every ``eval_every`` of them and at the end.
    """
    for step in range(first, steps):
        for learner in learners:
            learner.step(compute_losses(learner, step))
        if (step + 1) % eval_every == 0 or step + 1 == steps:
            evaluate(step + 1)


def seconds_interleaved(steps: dict[Key, Step], runs: int, device: str) -> dict[Key, float]:
    """Return the median seconds of each step; every one of ``runs`` rounds times each of them once."""
    times: dict[Key, list[float]] = {key: [] for key in steps}
    for _ in range(runs):
        for key, step in steps.items():
            start = time.perf_counter()
            step()
            _synchronize(device)
            times[key].append(time.perf_counter() - start)
    return {key: statistics.median(values) for key, values in times.items()}


def peak_memory(build: Callable[[], Step], *, warm_up: Callable[[], Step], device: str, what: str) -> int | None:
    """Return the peak of a step in bytes above what was allocated before it, when its model was built.

    On a GPU its own counter; on a CPU in a new process, and None where the system does not report it.

    Args:
        build: builds the step; on a CPU it is pickled.
        warm_up: builds a small step that runs first, so that what a first call loads does not count.
        what: named in an error.
    """
    if device.startswith("cuda"):
        warm_up()()
        step = build()
        _synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        _synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return peak_in_new_process(functools.partial(_warmed_up, build, warm_up), what=what, instead="use smaller sizes")


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _warmed_up(build: Callable[[], Step], warm_up: Callable[[], Step]) -> Step:
    warm_up()()
    return build()
