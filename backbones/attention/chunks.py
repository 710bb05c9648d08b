"""Cut a feature map into chunks and mask keys. Sliding chunks and long-short attention share these functions.

A mask for every pair of tokens would be larger than all keys. Instead, queries and keys have extra mask channels. Their
product lowers the score of a hidden key by a penalty. float16 can represent both factors. For heads of up to 1024
channels, the penalty is larger than the largest float16.

Shapes: B images, M heads, H x W tokens, D channels per head, chunks of w x w tokens.
"""

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.layers import tracing

MODES = ("zero_pad", "exact", "cyclic")
_PENALTY = 1e9
QUERY_MASK, _KEY_MASK_FLOAT16 = 256.0, -32768.0


class WindowInputs(NamedTuple):
    """The tensors of attention to windows. The same class is used for their gradients and for flags per tensor.

    For long-short attention, the global keys are the projected keys, followed by the keys of the global tokens. The
    global values have the same order.

    Attributes:
        query: (B, M, H, W, D).
        key: (B, M, H, W, D).
        value: (B, M, H, W, D).
        global_key: (B, M, G, D), keys that all tokens attend to, or None.
        global_value: (B, M, G, D), or None.
        local_bias: (M or 1, P, S), positions in a chunk by positions in its window, row by row, or None.
        global_bias: (M or 1, G), or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    global_key: Tensor | None = None
    global_value: Tensor | None = None
    local_bias: Tensor | None = None
    global_bias: Tensor | None = None


def attend_chunks(
    attention: Callable[..., Tensor], query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, chunk_size: int
) -> Tensor:
    """Return the attention of all chunks to their windows of S keys, computed in one call.

    Args:
        attention: A function with the arguments of ``F.scaled_dot_product_attention``.
        query: (B, M, H, W, D).
        keys: (B * rows * M, cols, S, D + E), with E channels that mask keys. See :func:`mask_keys`.
        values: (B * rows * M, cols, S, D + E). On a GPU they may have fewer channels. See :func:`extra_channels`.
        bias: (M or 1, w * w, S or more), or None.
        chunk_size: Side w of a chunk.

    Returns:
        (B, M, H, W, D)
    """
    (batch, heads, height, width), channels = query.shape[:4], tracing.static_size(query.shape[4])
    # (B * rows * M, cols, w * w, D + E)
    queries = to_chunks(F.pad(query, (0, tracing.static_size(keys.shape[3]) - channels), value=QUERY_MASK), chunk_size)
    if bias is not None:
        # Otherwise autocast would cast the copies below, and their rows would not stay aligned.
        (bias,) = tracing.in_autocast_dtype(bias)
        # (B * rows * M, 1, w * w, S)
        # OpenVINO does not fuse attention if the bias of one head is expanded.
        if not (torch.jit.is_tracing() and tracing.static_size(bias.shape[0]) == 1):
            bias = tracing.contiguous_for_export(bias.expand(queries.shape[0] // heads, heads, -1, -1)).flatten(0, 1)
        bias = bias[:, None]
        if tracing.is_exporting():
            # torch 2.14 exports a broadcast bias only for two or more columns of chunks.
            bias = bias.expand(-1, queries.shape[1], -1, -1)
        if needs_alignment(bias.device):
            # A view of aligned rows
            bias = bias[..., : keys.shape[2]]
    output = attention(queries, keys, values, attn_mask=bias, scale=channels**-0.5)[..., :channels]
    # (B, rows, M, cols, w, w, D) -> (B, rows * w, cols * w, M, D)
    rows = (height + chunk_size - 1) // chunk_size
    output = output.unflatten(2, (chunk_size, chunk_size)).unflatten(0, (batch, rows, heads))
    output = tracing.contiguous_for_export(output.permute(0, 1, 4, 3, 5, 2, 6)).flatten(3, 4).flatten(1, 2)
    return tracing.take_first(tracing.take_first(output, 1, height), 2, width).permute(0, 3, 1, 2, 4)


def needs_alignment(device: torch.device) -> bool:
    """Return whether PyTorch's kernel needs channels and rows of a bias in multiples of 8. The GPU kernel does."""
    return device.type == "cuda"


def extra_channels(channels: int, device: torch.device) -> tuple[int, int]:
    """Return the number of mask channels that keys get, and the number of zero channels that values get.

    Keys have one mask channel. The fast kernels for GPUs need multiples of 8 channels.
    """
    return (8 - channels % 8, -channels % 8) if needs_alignment(device) else (1, 1)


def aligned_bias(parts: list[Tensor]) -> Tensor:
    """Return the parts (M, L, S) of a bias for different keys as one tensor. On a GPU, pad S to a multiple of 8.

    PyTorch's kernel for GPUs would copy a bias whose rows are not aligned.
    """
    padding = -sum([part.shape[2] for part in parts]) % 8 if needs_alignment(parts[0].device) else 0
    if padding:
        parts = [*parts, parts[0].new_zeros(1, 1, 1).expand(*parts[0].shape[:2], padding)]
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def split_blocks(sizes: tuple[int, ...], scores: int, limit: int) -> Iterator[tuple[slice, ...]]:
    """Yield the blocks of axes of ``sizes``. A block has at most ``limit`` scores, or one index of each axis.

    The last axis is cut first, into parts of equal size.

    Args:
        sizes: Length of each axis.
        scores: Number of scores of one index of all axes.
        limit: Largest number of scores of a block.
    """
    limit, axes = limit // scores, []
    for size in reversed(sizes):
        parts = -(-size // max(1, limit))
        edges = [size * part // parts for part in range(parts + 1)]
        axes.append([slice(first, last) for first, last in itertools.pairwise(edges)])
        limit = limit // size if parts == 1 else 1
    return itertools.product(*reversed(axes))


def mask_keys(key: Tensor, hidden: Tensor, extra: int) -> Tensor:
    """Return keys with ``extra`` more channels, which are negative at hidden positions and 0 elsewhere.

    Args:
        key: (B, M, H, W, D).
        hidden: (H, W), not 0 at hidden positions.
        extra: Number of mask channels.

    Returns:
        (B, M, H, W, D + extra)
    """
    mask = (hidden * _key_mask(key, extra)).to(key.dtype)[:, :, None]
    return torch.cat([key, mask.expand(*key.shape[:2], -1, -1, extra)], dim=-1)


def _key_mask(key: Tensor, extra: int) -> float:
    half = (tracing.autocast_dtype(key.device) or key.dtype) == torch.float16
    scale = tracing.static_size(key.shape[-1]) ** -0.5
    return _KEY_MASK_FLOAT16 if half else -_PENALTY / (QUERY_MASK * scale * extra)


def pad_keys_values(key: Tensor, value: Tensor, pad: tuple[int, int, int, int], extra: int) -> Tensor:
    """Pad keys with a border that is hidden as in :func:`mask_keys`. Pad values with the same border.

    Args:
        key: (B, M, H, W, D).
        value: (B, M, H, W, D).
        pad: Columns on the left and on the right, rows above and below.
        extra: Number of mask channels.

    Returns:
        (2 * B, M, H + rows, W + columns, D + extra), keys first. The last channels of values are not used.
    """
    hidden = is_padding(key, key.shape[2:4], pad)
    if tracing.is_captured():
        return mask_keys(F.pad(torch.cat([key, value]), (0, 0, *pad)), hidden, extra)
    return _PaddedKeysValues.apply(pad, extra, hidden, key, value)


class _PaddedKeysValues(torch.autograd.Function):
    """Copy keys and values once. The gradients are views."""

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


def with_halo(key: Tensor, value: Tensor, chunk_size: int, *, is_cyclic: bool) -> tuple[Tensor, Tensor]:
    """Pad keys and values to whole chunks, add a chunk at each border, and mask the hidden keys.

    Args:
        key: (B, M, H, W, D).
        value: (B, M, H, W, D).
        chunk_size: Side w of a chunk.
        is_cyclic: Whether the border continues at the opposite border. See :func:`wrap`.

    Returns:
        Both as (B, M, (rows + 2) * w, (cols + 2) * w, D + extra), with the channels of :func:`extra_channels`.
    """
    (height, width), channels = key.shape[2:4], tracing.static_size(key.shape[4])
    extra, more = extra_channels(channels, key.device)
    pad_height = tracing.padding_to_multiple(height, chunk_size)
    pad_width = tracing.padding_to_multiple(width, chunk_size)
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
    """Return whether this run is neither traced nor compiled, so that results may be cached for the next call."""
    # Fake tensors must not be cached either.
    return type(x) is Tensor and not tracing.is_captured()


def is_padding(x: Tensor, shape: tuple[int, ...], pad: tuple[int, ...]) -> Tensor:
    """Return 1 for each padding position of a feature map of ``shape`` padded by ``pad`` (as ``F.pad``), 0 elsewhere.

    The result has the dtype and device of ``x``, because TensorRT cannot pad booleans. It is cached.
    """
    make = _is_padding if is_plain(x) else _is_padding.__wrapped__
    return make(tuple(shape), pad, x.dtype, x.device)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _is_padding(shape: tuple[int, ...], pad: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return F.pad(torch.zeros((), dtype=dtype, device=device).expand(shape), pad, value=1.0)


def wrap(size: int, padded: int, chunk_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the source of each position along an axis with its cyclic halo, and whether the position is hidden.

    Args:
        size: Tokens along the axis.
        padded: Tokens with the padding to whole chunks.
        chunk_size: Length of the halo on each side.
        device: Device of the result.

    Returns:
        Two tensors (padded + 2 * chunk_size,).
    """
    position = torch.arange(-chunk_size, padded + chunk_size, device=device)
    # As a tensor, the padded size depends on the image in exported models too.
    whole = position[-1:] + 1 - chunk_size
    source = position % whole
    # With fewer than three chunks, the chunk at the opposite border is already a neighbor.
    return source, (source >= size) | ((position != source) & (whole < 3 * chunk_size))


def to_chunks(x: Tensor, chunk_size: int) -> Tensor:
    """Cut (B, M, H, W, D) into chunks (B * rows * M, cols, w * w, D), padded with zeros to whole chunks."""
    height, width = x.shape[2:4]
    pad_height = tracing.padding_to_multiple(height, chunk_size)
    pad_width = tracing.padding_to_multiple(width, chunk_size)
    x = F.pad(x, (0, 0, 0, pad_width, 0, pad_height))
    # (B, M, rows, w, cols, w, D)
    x = x.unflatten(3, (-1, chunk_size)).unflatten(2, (-1, chunk_size))
    return tracing.contiguous_for_export(x.permute(0, 2, 1, 4, 3, 5, 6)).flatten(4, 5).flatten(0, 2)


_COPIES: contextvars.ContextVar[bool] = contextvars.ContextVar("copies_windows", default=False)


@contextlib.contextmanager
def copied_windows() -> Iterator[None]:
    """Make traces copy windows in this context, for runtimes without overlapping views. See :func:`copies_windows`."""
    token = _COPIES.set(True)
    try:
        yield
    finally:
        _COPIES.reset(token)


def copies_windows() -> bool:
    """Return whether windows are copies taken by index, as in ``torch.export``, instead of views."""
    # torch.compile of older versions cannot trace a context variable.
    return tracing.is_exporting() or (torch.jit.is_tracing() and _COPIES.get())


def windows(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Return a view with overlapping windows of ``size`` along ``dim``, one at each ``step``.

    ``dim``, counted from the front, becomes the number of windows. The positions in a window are the next axis. The
    backward pass adds whole blocks, while the backward pass of ``unfold`` adds position by position. The windows are a
    copy if :func:`copies_windows` is true, because exporters convert ``unfold`` to many small operations.
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
        # (..., number + pieces - 1, step, ...), the shape of x with dim split into two axes
        total = grad.new_zeros(*ctx.shape[:dim], number + pieces - 1, step, *ctx.shape[dim + 1 :])
        for piece in range(pieces):
            part = grad.narrow(dim + 1, piece * step, min(step, ctx.size - piece * step))
            total.narrow(dim, piece, number).narrow(dim + 1, 0, part.shape[dim + 1]).add_(part)
        total = total.flatten(dim, dim + 1)
        length = ctx.shape[dim]
        if total.shape[dim] < length:
            total = F.pad(total, [0, 0] * (total.ndim - 1 - dim) + [0, length - total.shape[dim]])
        return total.narrow(dim, 0, length), None, None, None
