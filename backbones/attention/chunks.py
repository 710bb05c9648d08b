"""Cutting a feature map into chunks, and masking of keys, for all kernels over chunks.

A mask for every pair would be larger than all keys. Keys have extra mask channels instead, whose product with those of
the query lowers the score of a key that must not be seen by a penalty. float16 can represent both factors: with heads
of up to 1024 channels the penalty is larger than the largest float16.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.layers.tracing import (
    autocast_dtype,
    contiguous_for_export,
    is_exporting,
    is_tracing,
    padding_to_multiple,
    static_size,
    take_first,
)

MODES = ("zero_pad", "exact", "cyclic")
_PENALTY = 1e9
_QUERY_MASK, _KEY_MASK_FLOAT16 = 256.0, -32768.0


class WindowInputs(NamedTuple):
    """The tensors of attention to windows; also their gradients, or whether they need one.

    Attributes:
        query, key, value: (B, M, H, W, D).
        global_key, global_value: (B, M, G, D), keys that all tokens see, or None.
        local_bias: (M or 1, w * w, S), positions in a chunk by positions in its window, row by row, or None.
        global_bias: (M, G) or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    global_key: Tensor | None = None
    global_value: Tensor | None = None
    local_bias: Tensor | None = None
    global_bias: Tensor | None = None


def wants_alignment(device: torch.device) -> bool:
    """Return whether PyTorch's kernel wants channels, and rows of a bias, in multiples of 8: that for GPUs does."""
    return device.type == "cuda"


def mask_channels(channels: int, device: torch.device) -> int:
    """How many mask channels hidden keys have: one; on a GPU, where the fast kernels want it, up to a multiple of 8."""
    return 8 - channels % 8 if wants_alignment(device) else 1


def value_channels(channels: int, extra: int, device: torch.device) -> int:
    """How many channels of zeros values have: as many as keys have mask channels; on a GPU up to a multiple of 8."""
    return -channels % 8 if wants_alignment(device) else extra


def aligned_bias(parts: list[Tensor]) -> Tensor:
    """Parts of a bias for different keys, (M, L, S of all); on a GPU filled up to a multiple of 8.

    PyTorch's kernel for GPUs would copy a bias whose rows are not aligned.
    """
    padding = -sum(part.shape[2] for part in parts) % 8 if wants_alignment(parts[0].device) else 0
    if padding:
        parts = [*parts, parts[0].new_zeros(1, 1, 1).expand(*parts[0].shape[:2], padding)]
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def both_biases(inputs: WindowInputs, chunk_size: int) -> tuple[Tensor, Tensor]:
    """The local bias, (M or 1, w * w, 9 * w * w), and the global one, (M or 1, G): zeros where there is none."""
    local, to_global, positions = inputs.local_bias, inputs.global_bias, chunk_size**2
    if local is None:
        local = inputs.query.new_zeros(1, positions, 9 * positions)
    if to_global is None:
        to_global = local.new_zeros(1, 0 if inputs.global_key is None else static_size(inputs.global_key.shape[2]))
    return local, to_global


def mask_queries(query: Tensor, extra: int) -> Tensor:
    """(..., D) -> (..., D + extra), to be taken with the keys of :func:`mask_keys`."""
    return F.pad(query, (0, extra), value=_QUERY_MASK)


def mask_keys(key: Tensor, hidden: Tensor, extra: int) -> Tensor:
    """Keys with ``extra`` channels more, negative where a position is hidden, and 0 elsewhere.

    Args:
        key: (B, M, H, W, D).
        hidden: (H, W), not 0 for a position that must not be seen.

    Returns:
        (B, M, H, W, D + extra)
    """
    mask = (hidden * _key_mask(key, extra)).to(key.dtype)[:, :, None]
    return torch.cat([key, mask.expand(*key.shape[:2], -1, -1, extra)], dim=-1)


def _key_mask(key: Tensor, extra: int) -> float:
    half, scale = (autocast_dtype(key.device) or key.dtype) == torch.float16, static_size(key.shape[-1]) ** -0.5
    return _KEY_MASK_FLOAT16 if half else -_PENALTY / (_QUERY_MASK * scale * extra)


def pad_keys_values(key: Tensor, value: Tensor, pad: tuple[int, int, int, int], extra: int) -> Tensor:
    """Keys with a border that no query sees, as :func:`mask_keys`, and values with the same border.

    Args:
        key, value: (B, M, H, W, D).
        pad: columns on the left and on the right, rows above and below.

    Returns:
        (2 * B, M, H + rows, W + columns, D + extra); of values the last channels are of no use.
    """
    hidden = is_padding(key, key.shape[2:4], pad)
    if is_tracing() or torch.compiler.is_compiling():
        return mask_keys(F.pad(torch.cat([key, value]), (0, 0, *pad)), hidden, extra)
    return _PaddedKeysValues.apply(pad, extra, hidden, key, value)


class _PaddedKeysValues(torch.autograd.Function):
    """One copy of each, and gradients that are views."""

    @staticmethod
    def forward(ctx, pad: tuple[int, int, int, int], extra: int, hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
        (batch, heads, height, width, channels), (left, _, top, _) = key.shape, pad
        ctx.inner = ..., slice(top, top + height), slice(left, left + width), slice(channels)
        padded = key.new_zeros(2 * batch, heads, *hidden.shape, channels + extra)
        for part, x in zip(padded.chunk(2), (key, value), strict=True):
            part[ctx.inner] = x
        marks = padded[:batch, ..., channels:]
        torch.mul(hidden[:, :, None].expand_as(marks), _key_mask(key, extra), out=marks)
        return padded

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(part[ctx.inner] for part in grad.chunk(2))


def with_halo(key: Tensor, value: Tensor, chunk_size: int, *, is_cyclic: bool, extra: int) -> tuple[Tensor, Tensor]:
    """Pad keys and values to whole chunks, add a chunk at each border, and mask what must not be seen.

    Returns:
        (B, M, (rows + 2) * w, (cols + 2) * w, D + extra); the channels of values are those of :func:`value_channels`.
    """
    more = value_channels(static_size(value.shape[4]), extra, value.device)
    height, width = key.shape[2:4]
    pad_height, pad_width = padding_to_multiple(height, chunk_size), padding_to_multiple(width, chunk_size)
    if is_cyclic:
        whole = (0, 0, 0, pad_width, 0, pad_height)
        rows, hidden_rows = wrap(height, height + pad_height, chunk_size, key.device)
        cols, hidden_cols = wrap(width, width + pad_width, chunk_size, key.device)
        hidden = hidden_rows[:, None] | hidden_cols[None, :]
        key, value = (F.pad(x, whole).index_select(2, rows).index_select(3, cols) for x in (key, value))
        value = F.pad(value, (0, more)) if more else value
    else:
        halo = (chunk_size, chunk_size + pad_width, chunk_size, chunk_size + pad_height)
        hidden = is_padding(key, (height, width), halo)
        key, value = F.pad(key, (0, 0, *halo)), F.pad(value, (0, more, *halo))
    return mask_keys(key, hidden, extra), value


def is_plain(x: Tensor) -> bool:
    """Return whether this run is no trace of ``x``, and what is made from it may be kept for the next call."""
    # Not of fake tensors either: a run that is only counted or compiled has them.
    return type(x) is Tensor and not is_tracing() and not torch.compiler.is_compiling()


def is_padding(x: Tensor, shape: tuple[int, ...], pad: tuple[int, ...]) -> Tensor:
    """Return 1 for each position that is padding in a map of ``shape`` padded by ``pad`` (as ``F.pad``), or else 0.

    The result has the type and device of ``x``; TensorRT pads no booleans. It is kept for the next call.
    """
    make = _is_padding if is_plain(x) else _is_padding.__wrapped__
    return make(tuple(shape), pad, x.dtype, x.device)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _is_padding(shape: tuple[int, ...], pad: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return F.pad(torch.zeros((), dtype=dtype, device=device).expand(shape), pad, value=1.0)


def wrap(size: int, padded: int, chunk_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The source of each position along an axis with its cyclic halo, and whether the position must not be seen."""
    position = torch.arange(-chunk_size, padded + chunk_size, device=device)
    # The padded size as a tensor: it is compared, and in an exported model it follows the image.
    whole = position[-1:] + 1 - chunk_size
    source = position % whole
    # With fewer than three chunks the chunk behind the border is a neighbour already.
    return source, (source >= size) | ((position != source) & (whole < 3 * chunk_size))


def to_chunks(x: Tensor, chunk_size: int) -> Tensor:
    """(B, M, H, W, D) -> (B * rows * M, cols, w * w, D), padded with zeros to whole chunks."""
    height, width = x.shape[2:4]
    x = F.pad(x, (0, 0, 0, padding_to_multiple(width, chunk_size), 0, padding_to_multiple(height, chunk_size)))
    # (B, M, rows, w, cols, w, D)
    x = x.unflatten(3, (-1, chunk_size)).unflatten(2, (-1, chunk_size))
    return contiguous_for_export(x.permute(0, 2, 1, 4, 3, 5, 6)).flatten(4, 5).flatten(0, 2)


def from_chunks(x: Tensor, chunk_size: int, *, batch: int, heads: int, height: int, width: int) -> Tensor:
    """(B * rows * M, cols, w * w, D) -> (B, M, H, W, D), without the padding; it lies in memory as (B, H, W, M, D)."""
    rows = (height + chunk_size - 1) // chunk_size
    # (B, rows, M, cols, w, w, D) -> (B, rows * w, cols * w, M, D)
    x = x.unflatten(2, (chunk_size, chunk_size)).unflatten(0, (batch, rows, heads))
    x = contiguous_for_export(x.permute(0, 1, 4, 3, 5, 2, 6)).flatten(3, 4).flatten(1, 2)
    return take_first(take_first(x, 1, height), 2, width).permute(0, 3, 1, 2, 4)


_COPIES: contextvars.ContextVar[bool] = contextvars.ContextVar("copies_windows", default=False)


@contextlib.contextmanager
def copied_windows() -> Iterator[None]:
    """Inside this context, traces copy windows, for runtimes without overlapping views: see :func:`copies_windows`."""
    token = _COPIES.set(True)
    try:
        yield
    finally:
        _COPIES.reset(token)


def copies_windows() -> bool:
    """Whether windows are copies, taken by their index, as in a run of ``torch.export``; else they are views."""
    # Checked only under torch.jit.trace: torch.compile of older versions cannot trace it.
    return is_exporting() or (torch.jit.is_tracing() and _COPIES.get())


def windows(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Windows of ``size`` along ``dim``, moving by ``step``: a view.

    ``dim``, counted from the front, becomes the number of windows, and the positions of a window are the next axis. The
    backward pass is a few additions of whole blocks, where that of ``unfold`` goes position by position. Where
    :func:`copies_windows` they are a copy, since ``unfold`` would become transposes of single numbers there.
    """
    if copies_windows():
        number = (x.shape[dim] - size) // step + 1
        index = torch.arange(number, device=x.device)[:, None] * step + torch.arange(size, device=x.device)
        return x.index_select(dim, index.flatten()).unflatten(dim, (number, size))
    if torch.is_grad_enabled() and x.requires_grad and not torch.jit.is_tracing():
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
