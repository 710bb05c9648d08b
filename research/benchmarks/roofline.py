"""A roofline model: a lower bound of the time of a step.

The time of an operator is the longest of three: its arithmetic at the peak rate of the device, its memory traffic at
the peak rate, and the overhead of a call. Kernels that bypass PyTorch's dispatcher are not counted.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from projects_vil.analysis import counting  # noqa: F401  registers formulas of operators
from projects_vil.analysis.benchmark import seconds_of

BOUNDS = ("arithmetic", "memory", "overhead")
OPERATOR_TYPES = ("attention", "matmul", "convolution", "norm", "copy", "other")
# Operators that write their first tensor without reading it, like new_* and *_like.
_WRITES = {"copy_", "zero_", "fill_"}
# Operators that read or write as many rows of a tensor as there are indices.
_GATHERS, _SCATTERS = {"index", "index_select", "gather", "embedding"}, {"index_put_", "_index_put_impl_"}
_COPIED_NUMBERS = 2**26
_COPIES = {
    *("_to_copy", "as_strided_scatter", "cat", "clone", "constant_pad_nd", "copy_", "fill_", "flip", "index"),
    *("index_put", "index_put_", "index_select", "new_zeros", "repeat", "roll", "select_backward", "slice_backward"),
    *("stack", "zero_", "zeros", "zeros_like"),
}


@dataclasses.dataclass(frozen=True)
class DeviceRates:
    """The highest measured rates of a device.

    Attributes:
        flops: Floating-point operations per second of a large matrix product.
        bytes: Bytes per second of a large copy, reads and writes.
        call: Seconds of the smallest operator.
    """

    flops: float
    bytes: float
    call: float


def measure_rates(device: str, dtype: str) -> DeviceRates:
    """Measure matrix products (2048 x 2048, on a GPU 8192 x 8192), copies of 256 MB, and one-element sums.

    On a CPU the result is the fastest of 20 calls. On a GPU it is the fastest of 5 means of 20 calls, because a
    synchronization takes as long as a small product.
    """
    side, rounds, calls = (8192, 5, 20) if device.startswith("cuda") else (2048, 20, 1)
    a, b = torch.rand(2, side, side, device=device).to(getattr(torch, dtype))
    source = torch.rand(_COPIED_NUMBERS, device=device)
    target, one = torch.empty_like(source).zero_(), torch.zeros(1, device=device)
    steps = (lambda: a @ b, lambda: target.copy_(source), lambda: one.add_(one))
    product, copy, call = (min(seconds_of(step, calls=calls) for _ in range(rounds)) for step in steps)
    moved = 2 * source.numel() * source.itemsize
    return DeviceRates(flops=2 * side**3 / product, bytes=moved / copy, call=call)


def lower_bound(step: Callable[[], object], rates: DeviceRates) -> dict[str, Any]:
    """Count and time the operators of a step, in its second call.

    Returns:
        ``limit``: the seconds of the lower bound, by what limits each operator (``BOUNDS``).
        ``seconds_by_type``: the measured seconds by operator type; each operator is timed alone.
        ``operators``: the number of operators that compute or copy. Views are left out.
    """
    step()
    with _OperatorCounter(rates) as counter:
        step()
    return {"limit": counter.limit, "seconds_by_type": counter.seconds, "operators": counter.operators}


class _OperatorCounter(TorchDispatchMode):
    def __init__(self, rates: DeviceRates) -> None:
        super().__init__()
        self.rates = rates
        self.seconds, self.limit = dict.fromkeys(OPERATOR_TYPES, 0.0), dict.fromkeys(BOUNDS, 0.0)
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, outputs = kwargs or {}, []
        seconds = seconds_of(lambda: outputs.append(func(*args, **kwargs)))
        output, name = outputs[0], func.overloadpacket.__name__
        inputs, results = _tensors((args, kwargs)), _tensors(output)
        storages = {x.untyped_storage().data_ptr() for x in inputs}
        is_view = all(x.untyped_storage().data_ptr() in storages for x in results)
        is_view = not inputs if func._schema.is_mutable else is_view
        if is_view or name.startswith(("empty", "new_empty")):
            return output
        formula = flop_registry.get(func.overloadpacket)
        flops = formula(*args, **kwargs, out_val=output) if formula is not None else 0
        moved = _bytes_moved(name, args, kwargs, output)
        times = flops / self.rates.flops, moved / self.rates.bytes, self.rates.call
        longest, bound = max(zip(times, BOUNDS, strict=True))
        self.limit[bound] += longest
        self.seconds[operator_type(name)] += seconds
        self.operators += 1
        return output


def operator_type(name: str) -> str:
    """Return the type of a PyTorch operator, one of ``OPERATOR_TYPES``."""
    if name in ("mm", "addmm", "bmm", "baddbmm", "baddbmm_"):
        return "matmul"
    for part, label in (("attention", "attention"), ("conv", "convolution"), ("norm", "norm")):
        if part in name:
            return label
    return "copy" if name in _COPIES else "other"


def _tensors(values: object) -> list[Tensor]:
    """Return the distinct tensors in ``values``, by memory and shape."""
    tensors = {(x.data_ptr(), x.shape): x for x in tree_leaves(values) if isinstance(x, Tensor)}
    return list(tensors.values())


def _bytes_moved(name: str, args: tuple, kwargs: dict, output: object) -> int:
    others, results = _tensors((args[1:], kwargs)), _tensors(output)
    if name in _WRITES or name.startswith("new_") or name.endswith("_like"):
        return sum(map(_num_bytes, [*others, *results]))
    if name in _GATHERS:
        return min(_num_bytes(args[0]), sum(map(_num_bytes, results))) + sum(map(_num_bytes, [*others, *results]))
    if name in _SCATTERS:
        accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        return sum(map(_num_bytes, others)) + (1 + accumulates) * min(_num_bytes(args[0]), _num_bytes(args[2]))
    return sum(map(_num_bytes, [*_tensors((args, kwargs)), *results]))


def _num_bytes(x: Tensor) -> int:
    """Return the bytes of memory behind a tensor. Expanded axes and overlapping views share memory."""
    if not x.numel():
        return 0
    axes = [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
    reach = 1 + sum((size - 1) * stride for size, stride in axes)
    return min(math.prod(size for size, _ in axes), reach) * x.itemsize


def format_bounds(rows: Sequence[dict[str, Any]], rates: DeviceRates) -> str:
    """Format the rates of the device and a table of the bounds.

    Args:
        rows: Results of :func:`projects_vil.analysis.measure`, each updated with the result of :func:`lower_bound`.
    """
    headers = ["model", "size", "seconds", "bound", "x bound", *BOUNDS, *OPERATOR_TYPES, "operators"]
    cells = []
    for row in rows:
        limit = sum(row["limit"].values())
        shares = [value / limit for value in row["limit"].values()]
        shares += [value / sum(row["seconds_by_type"].values()) for value in row["seconds_by_type"].values()]
        numbers = f"{row['seconds']:.3f}", f"{limit:.3f}", f"{row['seconds'] / limit:.2f}"
        percentages = [f"{share:.0%}" for share in shares]
        cells.append([row["model"], "{} x {}".format(*row["size"]), *numbers, *percentages, row["operators"]])
    table = tabulate(cells, headers, tablefmt="github", disable_numparse=True)
    return (
        f"Matrix products {rates.flops / 1e9:.0f} GFLOP/s, copies {rates.bytes / 1e9:.1f} GB/s, smallest operator "
        f"{rates.call * 1e6:.1f} us.\n\n{table}"
    )
