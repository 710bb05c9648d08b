"""The training loop of the models on sequences, and the time and memory of one of their steps."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backbones.errors import ConfigError

# A forward and backward pass; on a GPU it may return before it has ended.
Step = Callable[[], None]


class Learner:
    """A model in training.

    Attributes:
        seconds: spent on its steps.
        losses: of the steps since the last call of :meth:`take_mean_loss`.
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


@dataclass(frozen=True)
class StepCase:
    """A step to measure.

    Attributes:
        name: named in an error.
        small: builds a small step that runs first, so that what a first call loads does not count.
        large: builds the step; both functions are pickled.
    """

    name: str
    device: str
    small: Callable[[], Step]
    large: Callable[[], Step]

    def build(self) -> Step:
        """Build the step, after the small one has run."""
        self.small()()
        return self.large()


def measure_cases(cases: Sequence[StepCase], *, runs: int, memory: bool = True) -> list[dict[str, float | None]]:
    """Measure steps on one device.

    Returns:
        For each step ``seconds`` (median, the steps interleaved) and ``memory`` (bytes at the peak above those before
        it); None where a GPU's memory does not suffice, or nothing was measured.
    """
    from projects_vil.analysis.benchmark import measure

    measured = None
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        measured = measure(cases, runs=runs, memory=memory)
    if measured is not None:
        return [{"seconds": one.seconds, "memory": one.memory} for one in measured]
    if len(cases) == 1:
        return [{"seconds": None, "memory": None}]
    return [row for case in cases for row in measure_cases([case], runs=runs, memory=memory)]
