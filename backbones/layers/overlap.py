"""Overlapping windows without copies, and with a fast backward pass."""

import torch
from torch import Tensor


def threes(x: Tensor, dim: int, size: int) -> Tensor:
    """Windows of three neighbouring pieces of ``size`` along ``dim``, moving by one piece: a view.

    The same as ``x.unfold(dim, 3 * size, size)``: ``dim`` becomes the number of windows, and the places of a window
    are a new last axis. The backward pass is three additions of whole blocks, where that of ``unfold`` goes place by
    place.
    """
    if torch.is_grad_enabled() and x.requires_grad and not torch.jit.is_tracing():
        return _Threes.apply(x, dim, size)
    return x.unfold(dim, 3 * size, size)


class _Threes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, size: int) -> Tensor:
        ctx.shape, ctx.dim, ctx.size = x.shape, dim, size
        return x.unfold(dim, 3 * size, size)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        # (..., pieces, size, ...), as x with dim in two
        total = grad.new_zeros(ctx.shape).unflatten(ctx.dim, (-1, ctx.size))
        windows = grad.shape[ctx.dim]
        # (..., windows, 3, size, ...)
        pieces = grad.unflatten(-1, (3, ctx.size)).movedim((-2, -1), (ctx.dim + 1, ctx.dim + 2))
        for step in range(3):
            total.narrow(ctx.dim, step, windows).add_(pieces.select(ctx.dim + 1, step))
        return total.flatten(ctx.dim, ctx.dim + 1), None, None
