"""Seconds and memory of a training step against the length of a part (Figure 3)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from projects_vil.sequence.char_lm.models.build import create_model
from projects_vil.sequence.char_lm.models.presets import ModelSize
from projects_vil.sequence.costs import Step, peak_memory, seconds_by_turns

# As many ids as enwik8 has bytes, and the one for others; the cost hardly depends on it.
VOCABULARY_OF_MEASURING = 206


@dataclass(frozen=True)
class Cost:
    """Of a step on one part, forward, backward and optimizer, with a memory as long as the part.

    Attributes:
        seconds: median.
        memory: bytes at the peak of the first step above what the model takes, the optimizer's state with it; None
            where it is not told.
        is_out: whether the GPU's memory did not suffice; the others are None then.
    """

    kind: str
    length: int
    seconds: float | None
    memory: int | None
    is_out: bool = False


def measure_steps(
    kinds: Sequence[str],
    size: ModelSize,
    lengths: Sequence[int],
    *,
    batch_size: int = 1,
    runs: int = 5,
    device: str = "cpu",
    with_memory: bool = True,
    told: Callable[[Cost], None] | None = None,
) -> list[Cost]:
    """Seconds by turns in one process; memory by the GPU's own counter, or else in a process for each.

    Args:
        kinds: of model.
        lengths: bytes of a part, and of the memory.
        runs: how often a step is timed, after one that does not count.
        with_memory: whether memory is measured on a CPU too, which takes seconds for each.
        told: is told each cost as it comes.

    Raises:
        InputError: for sizes that cannot be, and where a process that measures is ended, as for want of memory.
    """
    for kind in kinds:
        with torch.device("meta"):
            for length in lengths:
                create_model(kind, size, vocab_size=VOCABULARY_OF_MEASURING, memory_length=length)
    costs = []
    for length in lengths:
        steps: dict[str, Step] = {}
        peaks: dict[str, int | None] = {}
        for kind in kinds:
            try:
                # On a CPU first, while this process is small.
                if device != "cpu" or with_memory:
                    peaks[kind] = _peak(kind, size, length, batch_size, device)
                steps[kind] = _step_of(kind, size, length, batch_size, device)
                steps[kind]()
            except torch.cuda.OutOfMemoryError:
                steps.pop(kind, None)
                torch.cuda.empty_cache()
        times = seconds_by_turns(steps, runs, device)
        for kind in kinds:
            is_out = kind not in steps
            cost = Cost(kind, length, times.get(kind), None if is_out else peaks.get(kind), is_out)
            costs.append(cost)
            if told is not None:
                told(cost)
    return costs


def _step_of(kind: str, size: ModelSize, length: int, batch_size: int, device: str) -> Step:
    torch.manual_seed(0)
    vocab_size = VOCABULARY_OF_MEASURING
    model = create_model(kind, size, vocab_size=vocab_size, memory_length=length).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(vocab_size, (batch_size, length + 1), device=device)
    memory = tuple(torch.randn(batch_size, length, size.dim, device=device) for _ in range(size.depth))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        log_probabilities, _ = model(ids[:, :-1], memory)
        F.nll_loss(log_probabilities.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def _peak(kind: str, size: ModelSize, length: int, batch_size: int, device: str) -> int | None:
    small = replace(size, dim=16 * size.num_heads, hidden_dim=16, depth=1)
    short = -(-size.window_size // size.segment_length) * size.segment_length
    return peak_memory(
        partial(_step_of, kind, size, length, batch_size, device),
        warm_up=partial(_step_of, kind, small, short, 1, device),
        device=device,
        what=f"{kind}, --lengths {length}",
    )
