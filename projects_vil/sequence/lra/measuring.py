"""What a step of training costs against the length of the sequences (the idea of figure 3, for the encoder)."""

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from backbones.utils.errors import InputError
from projects_vil.sequence.costs import Step, aligned, peak_memory, seconds_by_turns
from projects_vil.sequence.lra.model import SequenceClassifier, create_lra_classifier
from projects_vil.sequence.lra.settings import Settings


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

    def build(self) -> Step:
        """A forward and backward pass."""
        model = self.create().to(self.device)
        ids = torch.randint(1, 16, (self.batch_size, self.length), device=self.device)
        documents = ((ids, None),) * self.settings.data.num_documents
        labels = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)

        def step() -> None:
            model.zero_grad()
            F.cross_entropy(model(documents), labels).backward()

        return step

    def build_small(self) -> Step:
        """The same of sequences of a few tokens."""
        return dataclasses.replace(self, length=16).build()

    def peak(self) -> int | None:
        """Bytes at the peak of a pass."""
        what = f"--model {self.model} --lengths {self.length}"
        return peak_memory(self.build, warm_up=self.build_small, device=self.device, what=what)


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
        counts = [_count(case) for case in cases]
        steps = {case: case.build() for case in cases}
        for step in steps.values():
            step()
        seconds = seconds_by_turns(steps, runs, device)
        del steps
        for case, count in zip(cases, counts, strict=True):
            costs.append(LengthCost(case.model, length, *count, seconds[case], case.peak() if memory else None))
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
    return aligned(rows)


def _count(case: _Case) -> tuple[int, int]:
    """Parameters and multiply-adds, without memory for either."""
    with torch.device("meta"):
        model = case.create().eval().requires_grad_(False)
        ids = torch.empty(1, case.length, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(((ids, None),) * case.settings.data.num_documents)
    # The counter takes a product and a sum for two operations.
    return sum(parameter.numel() for parameter in model.parameters()), counter.get_total_flops() // 2
