"""The training loop of the models on sequences, and the time and memory of a training step."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from backbones.errors import ConfigError

# A forward and backward pass. On a GPU it may return before it is finished.
Step = Callable[[], None]


class Learner:
    """A model in training.

    Attributes:
        seconds: Total time of its steps.
        losses: Losses of the steps since the last call of :meth:`take_mean_loss`.
    """

    def __init__(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.name, self.model, self.optimizer = name, model, optimizer
        self.seconds = 0.0
        self.losses: list[float] = []

    def step(self, losses: Iterable[Tensor]) -> None:
        """Take an optimizer step on the sum of ``losses``; each is computed after the backward pass of the last one."""
        start, total = time.perf_counter(), 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for loss in losses:
            loss.backward()
            total += loss.item()
        if not math.isfinite(total):
            raise ConfigError(f"The loss of {self.name} is {total}. Lower the learning rate or lengthen the warm-up.")
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
    """Train all learners on the same data, from step ``first`` to ``steps``.

    Args:
        compute_losses: Yields the losses of the micro-batches of a learner and a step, one after the other.
        evaluate: Called with the number of finished steps, every ``eval_every`` steps and at the end.
        first: 0, or the number of finished steps of a resumed training.
    """
    for step in range(first, steps):
        for learner in learners:
            learner.step(compute_losses(learner, step))
        if (step + 1) % eval_every == 0 or step + 1 == steps:
            evaluate(step + 1)


@dataclass(frozen=True)
class StepCase:
    """A training step to measure.

    Attributes:
        name: Name in errors.
        build_step: Builds a step for a sequence length. For None it builds a small step, which runs first as a warm-up.
            It is pickled.
    """

    name: str
    device: str
    length: int
    build_step: Callable[[int | None], Step]

    def build(self) -> Step:
        """Build the step, after the warm-up."""
        self.build_step(None)()
        return self.build_step(self.length)


def measure_lengths(
    builders: dict[str, Callable[[int | None], Step]],
    lengths: Sequence[int],
    *,
    device: str,
    runs: int,
    memory: bool = True,
) -> list[dict[str, Any]]:
    """Measure a training step of each model at each length, as in LS figure 3.

    Args:
        builders: Model -> ``build_step`` of a :class:`StepCase`.

    Returns:
        For each length and model: ``length``, ``model``, ``seconds`` (median of interleaved runs) and ``memory`` (peak
        bytes above the memory before the step). Values are None if the GPU runs out of memory or nothing was measured.
    """
    rows = []
    for length in lengths:
        cases = [StepCase(f"{name} at length {length}", device, length, build) for name, build in builders.items()]
        figures = _measure_cases(cases, runs=runs, memory=memory)
        rows += [{"length": length, "model": name} | costs for name, costs in zip(builders, figures, strict=True)]
    return rows


def _measure_cases(cases: Sequence[StepCase], *, runs: int, memory: bool) -> list[dict[str, float | None]]:
    from projects_vil.analysis.benchmark import measure_steps

    measured = None
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        measured = measure_steps(cases, runs=runs, memory=memory)
    if measured is not None:
        return [{"seconds": statistics.median(times), "memory": peak} for times, peak in zip(*measured, strict=True)]
    if len(cases) == 1:
        return [{"seconds": None, "memory": None}]
    return [row for case in cases for row in _measure_cases([case], runs=runs, memory=memory)]


def format_costs(rows: Sequence[dict[str, Any]], titles: dict[str, str]) -> str:
    """Format the rows of :func:`measure_lengths` as a table.

    They also have ``parameters``, and optionally ``multiply_adds`` and ``as_published``.

    Args:
        titles: Model -> its name in the table.
    """
    table = []
    for row in rows:
        cells = {"length": row["length"], "model": titles[row["model"]], "parameters": f"{row['parameters']:,}"}
        if "multiply_adds" in row:
            cells["1e9 mult-adds"] = f"{row['multiply_adds'] / 1e9:.3f}"
            cells["as published"] = f"{row['as_published'] / 1e9:.3f}"
        cells["seconds"] = "out of memory" if row["seconds"] is None else f"{row['seconds']:.3f}"
        table.append(cells | {"MB": "-" if row["memory"] is None else f"{row['memory'] / 1e6:.0f}"})
    return tabulate(table, headers="keys", tablefmt="github", disable_numparse=True)
