"""Seconds and memory of a training step against the length of a part (Figure 3)."""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F

from backbones.errors import InputError
from projects_vil.sequence.char_lm.models import create_model
from projects_vil.sequence.char_lm.presets import ModelSize
from projects_vil.utils import memory_of

# As many ids as enwik8 has bytes, and the one for others; the cost hardly depends on it.
VOCABULARY_OF_MEASURING = 206


@dataclass(frozen=True)
class Cost:
    """Of a step on one part, forward, backward and optimizer, with a memory as long as the part.

    Attributes:
        seconds: median.
        memory: bytes at the peak of the first step above what the model takes; None where it is not told.
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
    costs = []
    for length in lengths:
        steps: dict[str, Callable[[], None] | None] = {}
        peaks: dict[str, int | None] = {}
        for kind in kinds:
            if device == "cpu" and with_memory:
                # First, while this process is small.
                peaks[kind] = _peak_in_process(kind, size, length, batch_size)
        for kind in kinds:
            try:
                steps[kind] = _step_of(kind, size, length, batch_size, device)
                peaks.setdefault(kind, _peak_on_gpu(steps[kind], device) if device != "cpu" else None)
                steps[kind]()
            except torch.cuda.OutOfMemoryError:
                steps[kind] = None
                torch.cuda.empty_cache()
        times = _times_by_turns({kind: step for kind, step in steps.items() if step is not None}, runs, device)
        for kind, step in steps.items():
            is_out = step is None
            cost = Cost(kind, length, None if is_out else times[kind], None if is_out else peaks[kind], is_out)
            costs.append(cost)
            if told is not None:
                told(cost)
    return costs


def _times_by_turns(steps: dict[str, Callable[[], None]], runs: int, device: str) -> dict[str, float]:
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(runs):
        for kind, step in steps.items():
            began = time.perf_counter()
            step()
            if device != "cpu":
                torch.cuda.synchronize(device)
            times[kind].append(time.perf_counter() - began)
    return {kind: statistics.median(own) for kind, own in times.items()}


def _step_of(kind: str, size: ModelSize, length: int, batch_size: int, device: str) -> Callable[[], None]:
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


def _peak_on_gpu(step: Callable[[], None], device: str) -> int:
    step()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_in_process(kind: str, size: ModelSize, length: int, batch_size: int) -> int | None:
    if memory_of(peak=True) is None:
        return None
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    arguments = (kind, size, length, batch_size, torch.get_num_threads(), writer)
    process = context.Process(target=_send_peak, args=arguments)
    process.start()
    writer.close()
    try:
        return reader.recv()
    except EOFError as error:
        raise InputError(
            f"{kind}, length {length}: the process that measured the memory has ended: take smaller --lengths"
        ) from error
    finally:
        process.join()


def _send_peak(kind: str, size: ModelSize, length: int, batch_size: int, num_threads: int, writer: Connection) -> None:
    torch.set_num_threads(num_threads)
    step = _step_of(kind, size, length, batch_size, "cpu")
    before = memory_of()
    step()
    peak = memory_of(peak=True)
    writer.send(None if before is None or peak is None else peak - before)
