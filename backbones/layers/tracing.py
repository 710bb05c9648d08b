"""Helpers for ``torch.jit.trace``, ``torch.export`` and autocast. They keep traces correct for other image sizes."""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

# Whether torch.export traces this run. Before torch 2.7 the result is always False.
is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


def is_tracing() -> bool:
    """Return whether this run is traced by ``torch.jit.trace`` or ``torch.export``."""
    return torch.jit.is_tracing() or is_exporting()


def is_captured() -> bool:
    """Return whether ``torch.jit.trace``, ``torch.export`` or ``torch.compile`` captures a graph of this run."""
    return torch.jit.is_tracing() or torch.compiler.is_compiling()  # The latter is True in torch.export too.


def static_size(size: int) -> int:
    """Return a size that does not depend on the image (channels, heads, global tokens) as an integer.

    In a trace every size is a tensor. The trace keeps the value of this one, without a warning.
    """
    if not torch.jit.is_tracing():
        return size
    with no_trace_warnings():
        return int(size)


@contextlib.contextmanager
def no_trace_warnings() -> Iterator[None]:
    """Silence the warnings about values that a trace keeps. Use it for values that do not depend on the input."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        yield


def padding_to_multiple(size: int, multiple: int) -> int:
    """Return the padding from ``size`` to the next multiple.

    The formula lets ``torch.export`` simplify the padded size to a multiple, and its quotient to one division.
    """
    return (size + multiple - 1) // multiple * multiple - size


def padding_to(size: int, least: int) -> int:
    """Return the padding from ``size`` to ``least``, or 0 if it is larger. In a trace the result is a tensor."""
    padding = least - size
    return padding.clamp(min=0) if isinstance(padding, torch.Tensor) else torch.sym_max(0, padding)


def contiguous_for_export(x: Tensor) -> Tensor:
    """Return ``x``, or a contiguous copy in ``torch.export`` and ``torch.compile``.

    To reshape a tensor with other strides, PyTorch compares strides. The graph would then be valid only for sizes with
    the same result.
    """
    return x.clone(memory_format=torch.contiguous_format) if torch.compiler.is_compiling() else x


def take_first(x: Tensor, dim: int, size: int) -> Tensor:
    """Return the first ``size`` positions of ``x`` along ``dim``. The axis has at least ``size`` positions.

    In ``torch.export`` the result is a copy. A slice would have the smaller of both sizes, which the graph cannot
    simplify to ``size``.
    """
    if is_exporting():
        return x.index_select(dim, torch.arange(size, device=x.device))
    if not is_captured() and x.shape[dim] == size:
        # The gradient of a view would be a copy.
        return x
    return x.narrow(dim, 0, size)


def autocast_off(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context without autocast, on any device."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def at_least_float32(x: Tensor) -> Tensor:
    """Return half-precision tensors in float32, and others unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on ``device``, or None if autocast is off."""
    is_on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else None


def in_autocast_dtype(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the tensors in the dtype that autocast chooses for PyTorch's attention. float64 is kept."""
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None:
        return tensors
    return tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)
