"""Helpers that keep models correct for other image sizes under ``torch.jit.trace`` and ``torch.export``."""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor


def is_exporting() -> bool:
    """Return whether ``torch.export`` traces this run; always False before torch 2.7, which has no such query."""
    return hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()


def is_tracing() -> bool:
    """Return whether this run is traced by ``torch.jit.trace`` or ``torch.export``."""
    return torch.jit.is_tracing() or is_exporting()


def static_size(size: int) -> int:
    """A size that does not depend on the image (channels, heads, global tokens) as a plain integer.

    In a trace every size is a tensor; for these it is meant that the trace keeps the value, so its warning is not
    raised.
    """
    if not torch.jit.is_tracing():
        return size
    with no_trace_warnings():
        return int(size)


@contextlib.contextmanager
def no_trace_warnings() -> Iterator[None]:
    """Silence the warnings about values that a trace keeps, for those that are the same in every trace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        yield


def padding_to_multiple(size: int, multiple: int) -> int:
    """Return the padding from ``size`` to the next multiple.

    It is written so that ``torch.export`` finds for the sum of both a multiple, and for its quotient a single division.
    """
    return (size + multiple - 1) // multiple * multiple - size


def padding_to(size: int, least: int) -> int:
    """Return the padding from ``size`` to ``least``, 0 where it is larger; in a trace a tensor."""
    padding = least - size
    return padding.clamp(min=0) if isinstance(padding, torch.Tensor) else torch.sym_max(0, padding)


def contiguous_for_export(x: Tensor) -> Tensor:
    """``x``; in a run of ``torch.export`` or ``torch.compile`` a copy that lies in memory as a new tensor does.

    To reshape a tensor that lies otherwise, PyTorch compares strides, and the graph would be one for sizes with the
    same result.
    """
    is_graph = is_exporting() or torch.compiler.is_compiling()
    return x.clone(memory_format=torch.contiguous_format) if is_graph else x


def take_first(x: Tensor, dim: int, size: int) -> Tensor:
    """The first ``size`` positions of ``x`` along ``dim``, which has as many or more; no view in ``torch.export``.

    A slice would have the smaller of both sizes, which is not known to be equal to ``size`` later on.
    """
    if is_exporting():
        return x.index_select(dim, torch.arange(size, device=x.device))
    if not torch.jit.is_tracing() and not torch.compiler.is_compiling() and x.shape[dim] == size:
        # The gradient of a view would be copied.
        return x
    return x.narrow(dim, 0, size)


def autocast_off(device: torch.device) -> contextlib.AbstractContextManager:
    """A region where autocast does not choose the types, also on devices that have none."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def at_least_float32(x: Tensor) -> Tensor:
    """Half-precision tensors as float32, others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the type that autocast chooses for products on ``device``, or None where it is off."""
    is_on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else None


def in_autocast_dtype(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the tensors in the type that autocast chooses for PyTorch's attention; float64 is kept."""
    dtype = autocast_dtype(tensors[0].device)
    return tuple(x if x is None or dtype is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)
