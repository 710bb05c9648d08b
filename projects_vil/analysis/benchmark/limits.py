"""How far a step is from what its device can do: the work of its operators, beside rates measured on large ones."""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from projects_vil.analysis.benchmark.cases import DTYPES, Case
from projects_vil.analysis.benchmark.measuring import seconds_of

BOUNDS = ("arithmetic", "memory", "overhead")
KINDS = ("attention", "products", "convolutions", "norms", "copies", "other")
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "baddbmm_"}
_COPIES = {
    *("_to_copy", "as_strided_scatter", "cat", "clone", "constant_pad_nd", "copy_", "fill_", "flip", "index"),
    *("index_put", "index_put_", "index_select", "new_zeros", "repeat", "roll", "select_backward", "slice_backward"),
    *("stack", "zero_", "zeros", "zeros_like"),
}
# Those that write their first tensor and do not read it; all that make one like it are of them too.
_WRITES = {"copy_", "zero_", "fill_"}
# Those that touch as much of a table as the indices name.
_PICKS, _PUTS = {"index", "index_select", "gather", "embedding"}, {"index_put_", "_index_put_impl_"}
_PRODUCT_SIDE, _COPY_NUMBERS = 2048, 2**26


@dataclasses.dataclass(frozen=True)
class Rates:
    """Of a device: floating-point operations and bytes a second in large operators, and seconds of the smallest one."""

    flops: float
    bytes: float
    call: float


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one case.

    Attributes:
        case: what was run.
        seconds: by kind of operator, what its operators took, each alone.
        shortest: by what holds an operator up, what those operators would take at the device's rates: ``"arithmetic"``,
            ``"memory"``, where each moves once what it has to of its tensors, or ``"overhead"`` of calling it.
        operators: number of those that compute or copy; views are none.
    """

    case: Case
    seconds: dict[str, float]
    shortest: dict[str, float]
    operators: int

    @property
    def limit(self) -> float:
        return sum(self.shortest.values())


def measure_rates(device: str, dtype: str) -> Rates:
    """By the fastest of 20 products of 2048 x 2048 numbers of ``dtype``, copies of 256 MB, and sums of one number."""
    a, b = torch.rand(2, _PRODUCT_SIDE, _PRODUCT_SIDE, device=device, dtype=DTYPES[dtype])
    source = torch.rand(_COPY_NUMBERS, device=device)
    target = torch.empty_like(source).zero_()
    product = _shortest(lambda: a @ b, device)
    copy = _shortest(lambda: target.copy_(source), device)
    one = torch.zeros(1, device=device)
    call = _shortest(lambda: one.add_(one), device)
    return Rates(flops=2 * _PRODUCT_SIDE**3 / product, bytes=2 * source.numel() * source.itemsize / copy, call=call)


def find_limits(case: Case, rates: Rates) -> Limits:
    """The work of one step of ``case``, of a second call.

    Kernels that PyTorch does not dispatch, as Triton's, are not seen.

    Raises:
        InputError: as :meth:`Case.build`.
    """
    step = case.build()
    step()
    with Work(case.device, rates) as work:
        step()
    return Limits(case, work.seconds, work.shortest, work.operators)


class Work(TorchDispatchMode):
    """Times each operator, and adds up what it would take at the device's rates."""

    def __init__(self, device: str, rates: Rates) -> None:
        super().__init__()
        self.device, self.rates = device, rates
        self.seconds, self.shortest = dict.fromkeys(KINDS, 0.0), dict.fromkeys(BOUNDS, 0.0)
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = None

        def call() -> None:
            nonlocal output
            output = func(*args, **kwargs)

        seconds = seconds_of(call, self.device)
        given, made = _tensors((args, kwargs)), _tensors(output)
        if _computes_nothing(func, given, made):
            return output
        self.operators += 1
        self.seconds[kind_of(func.overloadpacket.__name__)] += seconds
        arithmetic = _flops(func.overloadpacket, args, kwargs, output) / self.rates.flops
        memory = _moved(func.overloadpacket.__name__, args, kwargs, output) / self.rates.bytes
        longest, bound = max(zip((arithmetic, memory, self.rates.call), BOUNDS, strict=True))
        self.shortest[bound] += longest
        return output


def kind_of(name: str) -> str:
    """Of ``KINDS``, for the name of an operator."""
    if "attention" in name:
        return "attention"
    if name in _PRODUCTS:
        return "products"
    if "conv" in name:
        return "convolutions"
    if "norm" in name:
        return "norms"
    return "copies" if name in _COPIES else "other"


def _computes_nothing(func: torch._ops.OpOverload, given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether it looks at tensors otherwise, makes room for one, or has to do with none."""
    if func._schema.is_mutable:
        return not given
    known = {x.untyped_storage().data_ptr() for x in given}
    is_view = bool(made) and all(x.untyped_storage().data_ptr() in known for x in made)
    return is_view or not made or func.overloadpacket.__name__.startswith(("empty", "new_empty"))


def _flops(packet: Callable, args: tuple, kwargs: dict, output: object) -> int:
    """Two for each multiplication with its addition; 0 for what PyTorch does not count."""
    if packet is torch.ops.aten.baddbmm_:
        packet = torch.ops.aten.baddbmm
    count = flop_registry.get(packet)
    return count(*args, **kwargs, out_val=output) if count else 0


def _tensors(values: object) -> list[Tensor]:
    """Each once, by the memory it is of."""
    found = {(x.data_ptr(), x.shape): x for x in tree_leaves(values) if isinstance(x, Tensor)}
    return list(found.values())


def _moved(name: str, args: tuple, kwargs: dict, output: object) -> int:
    """The bytes that an operator has to read and to write."""
    others, made = _tensors((args[1:], kwargs)), _tensors(output)
    if name in _WRITES or name.startswith("new_") or name.endswith("_like"):
        return sum(map(_bytes, [*others, *made]))
    if name in _PICKS:
        return min(_bytes(args[0]), sum(map(_bytes, made))) + sum(map(_bytes, [*others, *made]))
    if name in _PUTS:
        adds = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        return sum(map(_bytes, others)) + (2 if adds else 1) * min(_bytes(args[0]), _bytes(args[2]))
    return sum(map(_bytes, [*_tensors((args, kwargs)), *made]))


def _bytes(x: Tensor) -> int:
    """Of the memory that the numbers of ``x`` lie in: expanded axes and views that overlap have less than numbers."""
    if not x.numel():
        return 0
    axes = [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
    reach = 1 + sum((size - 1) * stride for size, stride in axes)
    return min(math.prod(size for size, _ in axes), reach) * x.itemsize


def _shortest(step: Callable[[], object], device: str, runs: int = 20) -> float:
    return min(seconds_of(step, device) for _ in range(runs))
