"""What a step of training costs against the length of the sequences (the idea of figure 3, for the encoder)."""

import dataclasses
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from backbones.errors import InputError
from projects_vil.sequence.lra.model import SequenceClassifier, create_lra_classifier
from projects_vil.sequence.lra.settings import Settings
from projects_vil.utils import forget_peak, memory_of


@dataclasses.dataclass(frozen=True)
class LengthCost:
    """Of one model at one length.

    Attributes:
        model: ``"ls"`` or ``"full"``.
        length: tokens of a sequence, and rows of the table of positions.
        parameters: number of them.
        multiply_adds: of the forward pass of one sequence, products of matrices alone.
        seconds: median of a forward and backward pass.
        memory: bytes at the peak of such a pass above what there was before; None where it was not measured.
    """

    model: str
    length: int
    parameters: int
    multiply_adds: int
    seconds: float
    memory: int | None


@dataclasses.dataclass(frozen=True)
class _Case:
    settings: Settings
    model: str
    length: int
    batch_size: int
    device: str

    def create(self) -> SequenceClassifier:
        torch.manual_seed(0)
        return create_lra_classifier(self.settings.with_sizes(max_length=self.length), model=self.model)

    def build(self) -> Callable[[], None]:
        """A forward and backward pass."""
        model = self.create().to(self.device)
        ids = torch.randint(1, 16, (self.batch_size, self.length), device=self.device)
        documents = ((ids, None),) * self.settings.data.num_documents
        labels = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)

        def step() -> None:
            model.zero_grad()
            F.cross_entropy(model(documents), labels).backward()
            if self.device.startswith("cuda"):
                torch.cuda.synchronize(self.device)

        return step


def measure_lengths(
    settings: Settings,
    lengths: Sequence[int],
    *,
    models: Sequence[str],
    batch_size: int = 1,
    device: str = "cpu",
    runs: int = 3,
    memory: bool = True,
) -> list[LengthCost]:
    """The cost of each model at each length, of sequences without padding.

    Seconds are taken by turns among the models, after a pass that does not count; memory in a new process for each on
    a CPU, where the system tells it, and by the GPU's own counter else.

    Raises:
        InputError: for a length, a batch or a number of runs below 1.
    """
    for option, value in (("--runs", runs), ("--batch-size", batch_size), *(("--lengths", n) for n in lengths)):
        if value < 1:
            raise InputError(f"{option} {value}: it is 1 or more")
    costs = []
    for length in lengths:
        cases = [_Case(settings, model, length, batch_size, device) for model in models]
        steps = [case.build() for case in cases]
        for step in steps:
            step()
        times = [[_seconds_of(step) for step in steps] for _ in range(runs)]
        del steps
        for number, case in enumerate(cases):
            seconds = statistics.median(row[number] for row in times)
            costs.append(LengthCost(case.model, length, *_count(case), seconds, _peak(case) if memory else None))
    return costs


def format_costs(costs: Sequence[LengthCost]) -> str:
    """A table, with a line for each model at each length."""
    rows = [("length", "model", "params M", "1e9 mult-adds", "seconds", "MB")]
    rows += [
        (
            str(cost.length),
            cost.model,
            f"{cost.parameters / 1e6:.3f}",
            f"{cost.multiply_adds / 1e9:.3f}",
            f"{cost.seconds:.3f}",
            "-" if cost.memory is None else f"{cost.memory / 1e6:.0f}",
        )
        for cost in costs
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _seconds_of(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _count(case: _Case) -> tuple[int, int]:
    """Parameters and multiply-adds, without memory for either."""
    with torch.device("meta"):
        model = case.create().eval().requires_grad_(False)
        ids = torch.empty(1, case.length, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(((ids, None),) * case.settings.data.num_documents)
    # The counter takes a product and a sum for two operations.
    return sum(parameter.numel() for parameter in model.parameters()), counter.get_total_flops() // 2


def _peak(case: _Case) -> int | None:
    if case.device.startswith("cuda"):
        step = case.build()
        before = torch.cuda.memory_allocated(case.device)
        torch.cuda.reset_peak_memory_stats(case.device)
        step()
        return torch.cuda.max_memory_allocated(case.device) - before
    if memory_of(peak=True) is None:
        return None
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(case, torch.get_num_threads(), writer))
    process.start()
    writer.close()
    try:
        return reader.recv()
    except EOFError as error:
        raise InputError(
            f"{case.model} at --lengths {case.length}: the process that measured its memory has ended: take less"
        ) from error
    finally:
        process.join()


def _send_peak(case: _Case, threads: int, writer: Connection) -> None:
    torch.set_num_threads(threads)
    # What a first call loads and keeps is no part of the cost of a length.
    dataclasses.replace(case, length=16).build()()
    step = case.build()
    forget_peak()
    before = memory_of()
    step()
    writer.send(memory_of(peak=True) - before)
