"""Overlapping windows: views with a fast backward pass, or copies for a runtime that has no such views."""

import contextlib
import contextvars
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.execution.tracing import is_exporting, is_tracing

_COPIES: contextvars.ContextVar[bool] = contextvars.ContextVar("copies_windows", default=False)


@contextlib.contextmanager
def copied_windows() -> Iterator[None]:
    """Within, ``torch.jit.trace`` records for a runtime that has no overlapping views: see :func:`copies_windows`."""
    token = _COPIES.set(True)
    try:
        yield
    finally:
        _COPIES.reset(token)


def copies_windows() -> bool:
    """Whether windows are copies, taken by their index, as in a run of ``torch.export``; else they are views."""
    # Asked while tracing alone: torch.compile of older versions cannot follow the question.
    return is_exporting() or (torch.jit.is_tracing() and _COPIES.get())


def threes(x: Tensor, dim: int, size: int) -> Tensor:
    """Windows of three neighbouring pieces of ``size`` along ``dim``, moving by one piece: see :func:`windows`."""
    return windows(x, dim, 3 * size, size)


def windows(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Windows of ``size`` along ``dim``, moving by ``step``: a view.

    ``dim``, counted from the front, becomes the number of windows, and the places of a window are the axis behind it.
    The backward pass is a few additions of whole blocks, where that of ``unfold`` goes place by place. Where
    :func:`copies_windows` they are a copy, since ``unfold`` would become transposes of single numbers there.
    """
    if copies_windows():
        number = (x.shape[dim] - size) // step + 1
        index = torch.arange(number, device=x.device)[:, None] * step + torch.arange(size, device=x.device)
        return x.index_select(dim, index.flatten()).unflatten(dim, (number, size))
    if torch.is_grad_enabled() and x.requires_grad and not is_tracing():
        return _Windows.apply(x, dim, size, step)
    return x.unfold(dim, size, step).movedim(-1, dim + 1)


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, size: int, step: int) -> Tensor:
        ctx.shape, ctx.dim, ctx.size, ctx.step = x.shape, dim, size, step
        return x.unfold(dim, size, step).movedim(-1, dim + 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        dim, step, number = ctx.dim, ctx.step, grad.shape[ctx.dim]
        pieces = -(-ctx.size // step)
        # (..., number + pieces - 1, step, ...), as x with dim in two
        total = grad.new_zeros(*ctx.shape[:dim], number + pieces - 1, step, *ctx.shape[dim + 1 :])
        for piece in range(pieces):
            part = grad.narrow(dim + 1, piece * step, min(step, ctx.size - piece * step))
            total.narrow(dim, piece, number).narrow(dim + 1, 0, part.shape[dim + 1]).add_(part)
        total = total.flatten(dim, dim + 1)
        length = ctx.shape[dim]
        if total.shape[dim] < length:
            total = F.pad(total, [0, 0] * (total.ndim - 1 - dim) + [0, length - total.shape[dim]])
        return total.narrow(dim, 0, length), None, None, None
