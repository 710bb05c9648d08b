"""What a model must know of ``torch.jit.trace`` to stay right for images of other sizes."""

import warnings

import torch
from torch import Tensor


def is_exporting() -> bool:
    """Whether this run is recorded by ``torch.export``; before torch 2.7, which cannot tell, it is not."""
    return hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()


def is_tracing() -> bool:
    """Whether this run is recorded for images of other sizes: by ``torch.jit.trace`` or ``torch.export``."""
    return torch.jit.is_tracing() or is_exporting()


def static_size(size: int) -> int:
    """A size that does not depend on the image (channels, heads, global tokens) as a plain integer.

    In a trace every size is a tensor; for these it is meant that the trace keeps the value, so its warning is not
    raised.
    """
    if not torch.jit.is_tracing():
        return size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return int(size)


def missing(size: int, multiple: int) -> int:
    """What ``size`` lacks to be a multiple.

    So written that ``torch.export`` finds for the sum of both a multiple, and for its quotient a single division.
    """
    return (size + multiple - 1) // multiple * multiple - size


def missing_to(size: int, least: int) -> int:
    """What ``size`` lacks to be ``least``, 0 where it is larger; in a trace a tensor that follows the image."""
    missing = least - size
    return missing.clamp(min=0) if isinstance(missing, torch.Tensor) else torch.sym_max(0, missing)


def in_order(x: Tensor) -> Tensor:
    """``x``; in a run of ``torch.export`` a copy that lies in memory as a new tensor does.

    To reshape a tensor that lies otherwise, PyTorch compares strides, and the export would hold for those sizes alone
    where they compare so.
    """
    return x.clone(memory_format=torch.contiguous_format) if is_exporting() else x


def first(x: Tensor, dim: int, size: int) -> Tensor:
    """The first ``size`` places of ``x`` along ``dim``, which has as many or more; no view in ``torch.export``.

    A slice would have the smaller of both sizes, which nothing tells to be equal to ``size`` later on.
    """
    if is_exporting():
        return x.index_select(dim, torch.arange(size, device=x.device))
    return x.narrow(dim, 0, size)
