"""Attention by blocks of scores: exact outputs and gradients, and never more than one block of scores in memory.

The forward pass keeps the log-sum-exp of each query's scores; the backward pass computes the scores again, block by
block, as FlashAttention does. :class:`ChunkPairs` and :class:`WholeMap` say which queries and keys form a block.

Shapes: B images, M heads, H x W tokens, D channels a head, S keys that all tokens see, chunks of w x w = P tokens.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from backbones.attention.chunks import mask_channels, mask_queries, missing, with_halo, wrap
from backbones.layers.tracing import at_least_float32, autocast_off, is_tracing

# Scores in a block: on a CPU they stay in the cache, on other devices they keep the device busy.
BLOCK_SCORES = {"cpu": 2**20, "other": 2**25}
# Lower exponents are raised to this one: the weight is negligible, and denormal numbers slow exponentials tenfold.
LEAST_EXPONENT = -60.0
# Returns outputs and log-sum-exps. It is private: where a version of torch lacks or changes it, it is not called.
_CPU_KERNEL = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def needs_blocks(*tensors: Tensor | None, biases: tuple[Tensor | None, ...] = ()) -> bool:
    """Return whether gradients are needed for which PyTorch's kernels would keep all scores.

    These are gradients of a bias, and on a CPU all gradients. Traced and compiled runs, and empty tensors, are left to
    PyTorch.

    Args:
        tensors: queries, keys and values.
        biases: added to scores.
    """
    if not torch.is_grad_enabled() or is_tracing() or torch.compiler.is_compiling():
        return False
    learned = any(bias is not None and bias.requires_grad for bias in biases)
    if tensors[0].device.type != "cpu" and not learned:
        return False
    given = [x for x in (*tensors, *biases) if x is not None]
    return any(x.requires_grad for x in given) and all(x.numel() for x in given)


def in_autocast_dtype(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the tensors in the type that autocast chooses for PyTorch's attention; float64 is kept."""
    device_type = tensors[0].device.type
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def attention_with_logsumexp(
    query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention outside of autograd.

    Args:
        query: (N, M, L, E). key, value: (N, M, K, E).
        bias: broadcast to (N, M, L, K), four axes, or None.
        scale: of the products.

    Returns:
        The output (N, M, L, E), and the log-sum-exp of each query's scores, (N, M, L, 1), in float32 or better; None
        where this version of torch or this device does not return it.
    """
    if query.device.type == "cpu" and _CPU_KERNEL is not None:
        # The kernel takes the channels of a token to be neighbours in memory, and does not check it.
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        try:
            output, sums = _CPU_KERNEL(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            # The other way takes more memory.
            if "allocate memory" in str(error):
                raise
        else:
            return output, sums[..., None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale), None


def _split(sizes: tuple[int, ...], scores: int, device: torch.device) -> Iterator[tuple[slice, ...]]:
    """Cut axes of ``sizes`` into blocks of at most ``BLOCK_SCORES``, the last axis first, into parts of equal size.

    Args:
        scores: of one index of all axes; a block has one index at least.
    """
    limit, axes = BLOCK_SCORES.get(device.type, BLOCK_SCORES["other"]) // scores, []
    for size in reversed(sizes):
        parts = -(-size // max(1, limit))  # none for an empty axis
        edges = [size * part // max(1, parts) for part in range(parts + 1)]
        axes.append([slice(first, last) for first, last in itertools.pairwise(edges)])
        limit = limit // size if parts == 1 else 1
    return itertools.product(*reversed(axes))


# A bias of part of a block's scores: its queries and keys, and a view that broadcasts to (M, queries, keys).
BiasPart = tuple[slice, slice, Tensor]


@dataclasses.dataclass(frozen=True)
class ChunkPairs:
    """Chunks of w x w queries; each sees the keys of its own chunk, of one neighbour, and the S shared keys.

    Attributes:
        height, width: of the map.
        window_size: w.
        shift: the step, in chunks, down and to the right, to the neighbour.
        is_cyclic: whether the map continues at its opposite border.
    """

    height: int
    width: int
    window_size: int
    shift: tuple[int, int]
    is_cyclic: bool

    def _boxes(self) -> list[tuple[slice, slice]]:
        """Rows and columns of both chunks in the 3w x 3w tokens round a chunk."""
        size = self.window_size
        return [tuple(slice((1 + s) * size, (2 + s) * size) for s in step) for step in ((0, 0), self.shift)]

    def join_biases(self, query: Tensor, local: Tensor | None, shared: Tensor | None, num_shared: int) -> Tensor:
        """Join biases (M, P, 9 * P), row by row, and (M, S) to those of the keys of a block, (M or 1, P, 2 * P + S)."""
        positions = self.window_size**2
        local = query.new_zeros(1, positions, 9 * positions) if local is None else local
        window = local.unflatten(2, (3 * self.window_size, -1))
        parts = [window[:, :, rows, cols].flatten(2) for rows, cols in self._boxes()]
        shared = local.new_zeros(1, num_shared) if shared is None else shared
        parts.append(shared[:, None].expand(-1, positions, -1))
        heads = max(part.shape[0] for part in parts)
        return torch.cat([part.expand(heads, -1, -1) for part in parts], dim=2)

    def mask_channels(self, query: Tensor) -> int:
        return mask_channels(query.shape[-1], query.device)

    def num_heads(self, query: Tensor, block: tuple[slice, ...]) -> int:
        return query.shape[1]

    def num_queries(self, block: tuple[slice, ...]) -> int:
        return self.window_size**2

    def blocks(self, query: Tensor, key: Tensor, shared_key: Tensor | None) -> Iterator[tuple[slice, ...]]:
        """Images, rows of chunks, columns of chunks."""
        keys = 2 * self.window_size**2 + (0 if shared_key is None else shared_key.shape[2])
        rows, cols = (-(-size // self.window_size) for size in (self.height, self.width))
        scores = query.shape[1] * self.window_size**2 * keys
        return _split((query.shape[0], rows, cols), scores, query.device)

    def pad_queries(self, x: Tensor) -> Tensor:
        """(B, M, H, W, E), padded with zeros to whole chunks."""
        below, right = missing(self.height, self.window_size), missing(self.width, self.window_size)
        return F.pad(x, (0, 0, 0, right, 0, below)) if below or right else x

    def unpad_queries(self, x: Tensor) -> Tensor:
        return x[:, :, : self.height, : self.width]

    def pad_keys(self, key: Tensor, value: Tensor, *, extra: int, scale: float) -> Tensor:
        """Keys and values with one more chunk at each border, side by side in the channels: see :func:`.with_halo`."""
        sizes = {"side": self.window_size, "is_cyclic": self.is_cyclic, "extra": extra, "scale": scale}
        return torch.cat(with_halo(key, value, self.window_size, **sizes), dim=-1)

    def unpad_keys(self, x: Tensor) -> Tensor:
        """Sum the gradient of padded keys or values to that of the map, (B, M, H, W, D)."""
        if not self.is_cyclic:
            size = self.window_size
            return x[:, :, size : size + self.height, size : size + self.width]
        for dim, size in ((2, self.height), (3, self.width)):
            padded = size + missing(size, self.window_size)
            source, _ = wrap(size, padded, self.window_size, x.device)
            shape = (*x.shape[:dim], padded, *x.shape[dim + 1 :])
            x = x.new_zeros(shape).index_add_(dim, source, x).narrow(dim, 0, size)
        return x

    def query_view(self, x: Tensor, block: tuple[slice, ...]) -> Tensor:
        """A view of padded queries, (images, rows, cols, M, w, w, E)."""
        return self._view(x, block, slice(0, self.window_size), slice(0, self.window_size))

    def _view(self, x: Tensor, block: tuple[slice, ...], rows: slice, cols: slice) -> Tensor:
        """Rows and columns of the windows of a block, (images, rows, cols, M, window rows, window columns, E)."""
        images, *chunks = block
        x, step = x[images], self.window_size
        for dim, chunk, part in zip((2, 3), chunks, (rows, cols), strict=True):
            length = part.stop - part.start
            x = x.narrow(dim, chunk.start * step + part.start, (chunk.stop - chunk.start - 1) * step + length)
            x = x.unfold(dim, length, step)
        return x.permute(0, 2, 3, 1, 5, 6, 4)

    def keys(self, x: Tensor, shared: Tensor | None, block: tuple[slice, ...]) -> Tensor:
        """Copy the keys of a block from padded ones and from shared ones, (B, M, S, E): (chunks * M, K, E)."""
        views = [self._view(x, block, rows, cols) for rows, cols in self._boxes()]
        sizes = [view.shape[4] * view.shape[5] for view in views] + [0 if shared is None else shared.shape[2]]
        keys = x.new_empty(*views[0].shape[:4], sum(sizes), x.shape[4])
        *parts, rest = keys.split(sizes, dim=4)
        for part, view in zip(parts, views, strict=True):
            part.unflatten(4, view.shape[4:6]).copy_(view)
        if shared is not None:
            rest.copy_(shared[block[0], None, None])
        return keys.flatten(0, 3)

    def add_keys(self, total: Tensor, shared_total: Tensor | None, grad: Tensor, block: tuple[slice, ...]) -> None:
        """Add the gradient of :meth:`keys`, (chunks * M, K, D), to that of padded and of shared keys."""
        images, rows, cols = (part.stop - part.start for part in block)
        grad, positions = grad.unflatten(0, (images, rows, cols, -1)), self.window_size**2
        for index, box in enumerate(self._boxes()):
            view = self._view(total, block, *box)
            view += grad[..., index * positions : (index + 1) * positions, :].unflatten(4, view.shape[4:6])
        if shared_total is not None:
            shared_total[block[0]] += grad[..., 2 * positions :, :].sum((1, 2))

    def bias_parts(self, biases: tuple[Tensor | None], block: tuple[slice, ...]) -> Iterator[BiasPart]:
        """One part, of all queries and keys: (M or 1, P, K)."""
        yield slice(None), slice(None), biases[0]


@dataclasses.dataclass(frozen=True)
class WholeMap:
    """Queries (B, M, L, D), each of which sees all keys, (B, M, K, D).

    Attributes:
        size: height H and width W of the map whose tokens are the queries, and the last keys, for a bias that depends
            on the offset of rows, and on both columns; None for a bias of each pair.
    """

    size: tuple[int, int] | None = None

    def mask_channels(self, query: Tensor) -> int:
        return 0

    def num_heads(self, query: Tensor, block: tuple[slice, ...]) -> int:
        return block[1].stop - block[1].start

    def num_queries(self, block: tuple[slice, ...]) -> int:
        return block[2].stop - block[2].start

    def blocks(self, query: Tensor, key: Tensor, shared_key: None) -> Iterator[tuple[slice, ...]]:
        """Images, heads, queries."""
        step = 1 if self.size is None else self.size[1]
        batch, heads, queries = query.shape[:3]
        for images, some_heads, rows in _split((batch, heads, queries // step), step * key.shape[2], query.device):
            yield images, some_heads, slice(rows.start * step, rows.stop * step)

    def pad_queries(self, x: Tensor) -> Tensor:
        return x

    unpad_queries = unpad_keys = pad_queries

    def pad_keys(self, key: Tensor, value: Tensor, *, extra: int, scale: float) -> Tensor:
        return torch.cat([key, value], dim=-1)

    def query_view(self, x: Tensor, block: tuple[slice, ...]) -> Tensor:
        return x[block]

    def keys(self, x: Tensor, shared: None, block: tuple[slice, ...]) -> Tensor:
        return x[block[:2]].flatten(0, 1)

    def add_keys(self, total: Tensor, shared_total: None, grad: Tensor, block: tuple[slice, ...]) -> None:
        total = total[block[:2]]
        total += grad.view(total.shape)

    def bias_parts(self, biases: tuple[Tensor | None, ...], block: tuple[slice, ...]) -> Iterator[BiasPart]:
        """For a map (M, W, 2 * H - 1, W) and (M, G) or None, otherwise what broadcasts to (M, L, K)."""
        _, heads, queries = block
        if self.size is None:
            (bias,) = biases
            bias = bias[heads] if bias.shape[0] > 1 else bias
            yield slice(None), slice(None), bias[:, queries] if bias.shape[1] > 1 else bias
            return
        (by_col, to_global), (height, width) = biases, self.size
        num_global = 0 if to_global is None else to_global.shape[1]
        for first in range(queries.start, queries.stop, width):
            start = height - 1 - first // width
            rows = by_col[heads, :, start : start + height]
            yield slice(first - queries.start, first - queries.start + width), slice(num_global, None), rows.flatten(2)
        if to_global is not None:
            yield slice(None), slice(0, num_global), to_global[heads, None]


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layout: ChunkPairs | WholeMap, *tensors: Tensor | None) -> Tensor:
        ctx.layout = layout
        with autocast_off(tensors[0].device):
            output, sums = _forward(layout, *tensors)
        ctx.save_for_backward(*tensors, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, output, sums = ctx.saved_tensors
        with autocast_off(grad.device):
            grads = _backward(ctx.layout, grad, output, sums, *tensors)
        return None, *(
            x.to(tensor.dtype) if needed and x is not None else None
            for x, tensor, needed in zip(grads, tensors, ctx.needs_input_grad[1:], strict=True)
        )


def _forward(
    layout: ChunkPairs | WholeMap,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared_key: Tensor | None,
    shared_value: Tensor | None,
    *biases: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output, as ``query``, and the log-sum-exps, as padded queries, or None."""
    channels, extra = query.shape[-1], layout.mask_channels(query)
    total, scale = channels + extra, channels**-0.5
    queries = layout.pad_queries(mask_queries(query, extra))
    keys = layout.pad_keys(key, value, extra=extra, scale=scale)
    shared = _join_shared(shared_key, shared_value, extra)
    output, sums = _empty_like(queries, channels, query.dtype), None
    for block in layout.blocks(query, key, shared_key):
        view = layout.query_view(queries, block)
        q = view.reshape(-1, layout.num_queries(block), total)
        k = layout.keys(keys, shared, block)
        parts = list(layout.bias_parts(biases, block))
        bias = parts[0][2] if parts else None
        if len(parts) > 1:
            bias = q.new_empty(layout.num_heads(query, block), q.shape[1], k.shape[1])
            for rows, cols, part in parts:
                bias[:, rows, cols] = part
        q, k = (x.unflatten(0, (-1, layout.num_heads(query, block))) for x in (q, k))
        out, sum_ = attention_with_logsumexp(
            q, k[..., :total], k[..., total:], bias=None if bias is None else bias[None], scale=scale
        )
        target = layout.query_view(output, block)
        target.copy_(out[..., :channels].reshape(target.shape))
        if sum_ is not None:
            sums = _empty_like(queries, 1, sum_.dtype) if sums is None else sums
            target = layout.query_view(sums, block)
            target.copy_(sum_.reshape(target.shape))
    return layout.unpad_queries(output), sums


def _backward(
    layout: ChunkPairs | WholeMap,
    grad: Tensor,
    output: Tensor,
    sums: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared_key: Tensor | None,
    shared_value: Tensor | None,
    *biases: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the last arguments, in float32 or better."""
    channels, extra = query.shape[-1], layout.mask_channels(query)
    total, scale = channels + extra, channels**-0.5
    grad, output, query, key, value = map(at_least_float32, (grad, output, query, key, value))
    # Everything that a query has, next to each other: (..., D + extra), (..., D) and (..., 1)
    delta = (grad * output).sum(-1, keepdim=True)
    queries = layout.pad_queries(torch.cat([mask_queries(query, extra), grad, -delta], dim=-1))
    keys = layout.pad_keys(key, value, extra=extra, scale=scale)
    shared = _join_shared(shared_key, shared_value, extra)
    biases = [None if x is None else at_least_float32(x) for x in biases]

    query_grad = _empty_like(queries, channels, queries.dtype)
    key_grad, value_grad = (_empty_like(keys, channels, keys.dtype).zero_() for _ in range(2))
    shared_grads = [None if x is None else torch.zeros_like(x, dtype=keys.dtype) for x in (shared_key, shared_value)]
    bias_grads = [None if x is None else torch.zeros_like(x) for x in biases]
    buffers: dict[str, Tensor] = {}
    for block in layout.blocks(query, key, shared_key):
        heads = layout.num_heads(query, block)
        part = layout.query_view(queries, block).reshape(-1, layout.num_queries(block), queries.shape[-1])
        q, g, negative_delta = part.split([total, channels, 1], dim=-1)
        kv = layout.keys(keys, shared, block)
        k, v = kv[..., :total], kv[..., total : total + channels]

        scores = _buffer(buffers, "scores", q, len(q), q.shape[1], k.shape[1])
        by_head = scores.unflatten(0, (-1, heads))
        block_sums = None
        if sums is not None:
            block_sums = layout.query_view(sums, block).reshape(-1, heads, q.shape[1], 1)
        parts = list(layout.bias_parts(biases, block))
        for rows, cols, bias in parts:
            if block_sums is None:
                by_head[:, :, rows, cols] = bias
            else:
                torch.sub(bias, block_sums[:, :, rows], out=by_head[:, :, rows, cols])
        scores.baddbmm_(q, k.mT, alpha=scale)
        if sums is None:
            scores -= scores.logsumexp(dim=2, keepdim=True)
        weights = scores.clamp_(min=LEAST_EXPONENT).exp_()
        key_sums = _buffer(buffers, "keys", q, len(q), k.shape[1], channels)
        layout.add_keys(value_grad, shared_grads[1], torch.bmm(weights.mT, g, out=key_sums), block)
        # From here on the gradient of the scores
        products = _buffer(buffers, "products", q, *scores.shape).copy_(negative_delta)
        products.baddbmm_(g, v.mT).mul_(weights)
        torch.bmm(products.mT, q[..., :channels], out=key_sums)
        layout.add_keys(key_grad, shared_grads[0], key_sums, block)
        target = layout.query_view(query_grad, block)
        target.copy_(torch.bmm(products, k[..., :channels]).view(target.shape))
        products = products.unflatten(0, (-1, heads))
        for (rows, cols, _), (_, _, bias_grad) in zip(parts, layout.bias_parts(bias_grads, block), strict=True):
            bias_grad += products[:, :, rows, cols].sum_to_size(bias_grad.shape)
    for x in (query_grad, key_grad, shared_grads[0]):
        if x is not None:
            x *= scale
    key_grad, value_grad = (layout.unpad_keys(x) for x in (key_grad, value_grad))
    return layout.unpad_queries(query_grad), key_grad, value_grad, *shared_grads, *bias_grads


def _buffer(buffers: dict[str, Tensor], name: str, like: Tensor, *shape: int) -> Tensor:
    """A tensor that all blocks use in turn: allocating one for each would take as long as some of the products."""
    size = math.prod(shape)
    if name not in buffers or buffers[name].numel() < size:
        buffers[name] = like.new_empty(size)
    return buffers[name][:size].view(shape)


def _join_shared(key: Tensor | None, value: Tensor | None, extra: int) -> Tensor | None:
    """Shared keys and values in the channels of padded ones; none is masked."""
    if key is None:
        return None
    return torch.cat([F.pad(x, (0, extra)) for x in (key, value)], dim=-1)


def _empty_like(x: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """(B, M, ..., channels), which lies in memory as (B, ..., M, channels)."""
    shape = (x.shape[0], *x.shape[2:-1], x.shape[1], channels)
    return x.new_empty(shape, dtype=dtype).movedim(-2, 1)


@torch.compiler.disable
def shifted_chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window_size: int,
    shift: tuple[int, int],
    is_cyclic: bool,
    global_key: Tensor | None,
    global_value: Tensor | None,
    local_bias: Tensor | None,
    global_bias: Tensor | None,
) -> Tensor:
    """Attention to a token's own chunk, its neighbour at ``shift`` and the global tokens, by blocks.

    Arguments as for :func:`backbones.attention.sliding_chunk.sliding_chunk_attention`.
    """
    layout = ChunkPairs(*query.shape[2:4], window_size, shift, is_cyclic)
    bias = layout.join_biases(query, local_bias, global_bias, 0 if global_key is None else global_key.shape[2])
    return _BlockedAttention.apply(layout, *in_autocast_dtype(query, key, value, global_key, global_value, bias))


def dense_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Attention to all keys by blocks: (B, M, L, D), (B, M, K, D) twice, and what broadcasts to (M, L, K)."""
    bias = bias.expand(-1, -1, key.shape[2])
    return _BlockedAttention.apply(WholeMap(), *in_autocast_dtype(query, key, value, None, None, bias))


def map_attention(query: Tensor, key: Tensor, value: Tensor, by_row: Tensor, to_global: Tensor | None) -> Tensor:
    """Attention of the tokens of a map to the global tokens and to the whole map, by blocks.

    Args:
        query: (B, M, H, W, D). key, value: (B, M, G + H * W, D).
        by_row: (M, 2 * H - 1, W, W), bias by offset of rows (query minus key, from 1 - H), column of the query, and
            column of the key.
        to_global: (M, G), or None for no global token.

    Returns:
        (B, M, H * W, D)
    """
    # (M, W, 2 * H - 1, W): for a query's column, rows of keys in their order
    by_col = by_row.flip(1).transpose(1, 2).contiguous()
    tensors = in_autocast_dtype(query.flatten(2, 3), key, value, None, None, by_col, to_global)
    return _BlockedAttention.apply(WholeMap(tuple(query.shape[2:4])), *tensors)
