"""Attention for training on a CPU: the backward pass computes scores again, a block at a time.

PyTorch's CPU kernels keep all scores in memory if a bias needs a gradient, or compute them from copies of overlapping
windows. Here the forward pass keeps only the log-sum-exp of each query, as FlashAttention does. The backward pass
computes the scores of a few queries at a time, so that they stay in the cache. Other devices and the mode ``"cyclic"``
do not use this module.

Shapes: B images, M heads, H x W tokens, D channels per head, G global tokens, chunks of w x w = P positions. A block
has N matrices (images or chunks times heads) of P queries.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from backbones.attention.chunks import WindowInputs, split_blocks, to_chunks
from backbones.layers.tracing import at_least_float32, autocast_off, in_autocast_dtype, is_captured, padding_to_multiple

# Scores in a block. They fit in the cache.
BLOCK_SCORES = 2**20
# Smaller exponents are raised to this value. The weight is negligible, and denormal numbers slow exponentials tenfold.
_MIN_EXPONENT = -60.0
_MASK = -1e9


def is_needed(*tensors: Tensor | None) -> bool:
    """Return whether the tensors of attention to windows are on a CPU and at least one requires a gradient.

    The result is False in traced and compiled runs, which use PyTorch's attention.
    """
    if tensors[0].device.type != "cpu" or is_captured():
        return False
    given = [x for x in tensors if x is not None]
    return any(x.requires_grad for x in given) and all(x.numel() for x in given)


def window_attention(
    attend: Callable[..., Tensor],
    inputs: WindowInputs,
    *,
    chunk_size: int,
    side: int,
    shift: tuple[int, int] | None = None,
) -> Tensor:
    """Return ``attend(inputs)``, the attention of each chunk to its window, with gradients computed by blocks.

    Args:
        attend: Computes the output (B, M, H, W, D) from ``inputs`` and the function ``attention``, which it calls once
            for all chunks.
        inputs: The tensors. The local bias is for windows of ``chunk_size + 2 * side`` tokens per side.
        chunk_size: Side w of a chunk.
        side: Tokens of the window on each side of a chunk.
        shift: Step to the only neighboring chunk in the window, in chunks down and to the right. None for the whole
            window.
    """

    def forward(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        logsumexps = []

        def attention(query: Tensor, key: Tensor, value: Tensor, **options: Tensor | float | None) -> Tensor:
            output, logsumexp = _attention_with_logsumexp(query, key, value, **options)
            logsumexps.append(logsumexp)
            return output

        return attend(WindowInputs(*tensors), attention=attention), logsumexps[0]

    backward = functools.partial(_window_gradients, chunk_size, side, shift)
    return _RecomputedAttention.apply(forward, backward, *in_autocast_dtype(*inputs))


def map_attention(query: Tensor, key: Tensor, value: Tensor, offset_bias: Tensor, global_bias: Tensor | None) -> Tensor:
    """Return the attention of a feature map's tokens to the global tokens and to the whole feature map.

    The N x N bias is never in memory, neither in training nor in inference.

    Args:
        query: (B, M, H, W, D).
        key: (B, M, G + H * W, D).
        value: (B, M, G + H * W, D).
        offset_bias: (M, 2 * H - 1, W, W), the bias by row offset (query minus key, from 1 - H), column of the query
            and column of the key.
        global_bias: (M, G), or None without global tokens.

    Returns:
        (B, M, H * W, D)
    """
    size = tuple(query.shape[2:4])
    tensors = in_autocast_dtype(query.flatten(2, 3), key, value, offset_bias, global_bias)
    forward, backward = functools.partial(_map_forward, size), functools.partial(_map_gradients, size)
    return _RecomputedAttention.apply(forward, backward, *tensors)


class _RecomputedAttention(torch.autograd.Function):
    """Attention with its own backward pass.

    ``forward(*tensors)`` returns the output and the log-sum-exps. ``backward(grad, delta, logsumexp, needed,
    *tensors)`` returns a gradient for each tensor. All are in float32 or better. ``delta`` is the sum over channels of
    the output times its gradient. ``needed`` has one flag per tensor: whether its gradient is used.
    """

    @staticmethod
    def forward(ctx, forward: Callable, backward: Callable, *tensors: Tensor | None) -> Tensor:
        ctx.run_backward = backward
        with autocast_off(tensors[0].device):
            output, logsumexp = forward(*tensors)
        ctx.save_for_backward(*tensors, output, logsumexp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, output, logsumexp = ctx.saved_tensors
        needed, results = ctx.needs_input_grad[2:], [None, None]
        with autocast_off(grad.device):
            grad, output, *exact = (None if x is None else at_least_float32(x) for x in (grad, output, *tensors))
            gradients = ctx.run_backward(grad, (grad * output).sum(-1), logsumexp, needed, *exact)
        for gradient, tensor, is_used in zip(gradients, tensors, needed, strict=True):
            results.append(gradient.to(tensor.dtype) if is_used else None)
        return tuple(results)


def _attention_with_logsumexp(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output (N, M, L, E) of attention and the log-sum-exps (N, M, L), in float32 or better."""
    # The kernel of F.scaled_dot_product_attention, which does not return the log-sum-exps. The kernel assumes that the
    # channels of a token are contiguous, and does not check it.
    query, key, value = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)]
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, 0.0, False, attn_mask=attn_mask, scale=scale)


class _Keys(NamedTuple):
    """Keys of all queries of a block, and the tensors to which their gradients are added.

    Attributes:
        key: (N, K, D + 1). The last channel is 0, or a large negative number for a hidden key.
        value: (N, K, D + 1). The last channel is 1.
        key_grad: (N, K, D), or (M, K, D) for keys that all chunks share.
        value_grad: As ``key_grad``.
        biases: A list of slices of queries, their biases, and the gradients of the biases or None. Biases broadcast to
            (M, K, queries).
    """

    key: Tensor
    value: Tensor
    key_grad: Tensor
    value_grad: Tensor
    biases: list[tuple[slice, Tensor, Tensor | None]]


def _add_gradients(
    query: Tensor,
    grad: Tensor,
    delta: Tensor,
    logsumexp: Tensor,
    query_grad: Tensor,
    keys: list[_Keys],
    heads: int,
    buffer: Tensor,
) -> None:
    """Compute ``query_grad`` of a block, and add to the gradients in ``keys``.

    Scores are (N, K, P), keys first. Almost all matrix products then need no transposition in memory.

    Args:
        query: (N, P, D), scaled.
        grad: (N, P, D), the gradient of the output.
        delta: (N, P), the product of the output and its gradient.
        logsumexp: (N / M, M, P).
        query_grad: (N, P, D).
        keys: All keys of the queries.
        heads: Number M of heads.
        buffer: (2, N * P * K or more), with the K of all keys. All blocks use the same memory, because an allocation
            per block would take as long as some products.
    """
    # (N, D + 1, P): the last channel adds the mask of a key to its scores, and -delta to the products below.
    query_columns, grad_columns = F.pad(query.mT, (0, 0, 0, 1), value=1.0), torch.cat([grad.mT, -delta[:, None]], dim=1)
    sizes = [len(query) * key.key.shape[1] * query.shape[1] for key in keys]
    all_weights, all_products = buffer[0, : sum(sizes)], buffer[1, : sum(sizes)]
    # A view for each of the keys
    weights = [x.view(len(query), -1, query.shape[1]) for x in all_weights.split(sizes)]
    products = [x.view(len(query), -1, query.shape[1]) for x in all_products.split(sizes)]
    for part, group in zip(weights, keys, strict=True):
        for queries, bias, _ in group.biases:
            scores = part[..., queries].unflatten(0, (-1, heads))
            torch.sub(bias.expand_as(scores), logsumexp[:, :, None, queries], out=scores)
        part.baddbmm_(group.key, query_columns)
    all_weights.clamp_(min=_MIN_EXPONENT).exp_()
    for part, group in zip(products, keys, strict=True):
        torch.bmm(group.value, grad_columns, out=part)
    # The gradient of the scores
    all_products.mul_(all_weights)
    for index, (weight, product, group) in enumerate(zip(weights, products, keys, strict=True)):
        _add_products(group.value_grad, weight, grad)
        _add_products(group.key_grad, product, query)
        query_grad.baddbmm_(product.mT, group.key[..., :-1], beta=min(index, 1))
        for queries, _, bias_grad in group.biases:
            if bias_grad is not None:
                bias_grad += product[..., queries].unflatten(0, (-1, heads)).sum_to_size(bias_grad.shape)


def _add_products(total: Tensor, weights: Tensor, sources: Tensor) -> None:
    """Add ``weights`` (N, K, P) @ ``sources`` (N, P, D) to ``total``, which is (N, K, D) or (M, K, D)."""
    if len(total) < len(weights):
        total += (weights @ sources).unflatten(0, (-1, len(total))).sum(0)
    elif total.is_contiguous():
        total.baddbmm_(weights, sources)
    else:
        total += weights @ sources


class _Piece(NamedTuple):
    """A part of each window: the keys of at most w columns. It lies in one column of chunks.

    Attributes:
        rows, cols: The part of a window.
        bias: (M or 1, keys column by column, P).
        bias_grad: The gradient of the bias, or None.
    """

    rows: slice
    cols: slice
    bias: Tensor
    bias_grad: Tensor | None


def _window_gradients(
    chunk_size: int,
    side: int,
    shift: tuple[int, int] | None,
    grad: Tensor,
    delta: Tensor,
    logsumexp: Tensor,
    needed: tuple[bool, ...],
    *tensors: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the tensors of :func:`window_attention`.

    A block is some neighboring chunks of a row of chunks.
    """
    size, length = chunk_size, chunk_size + 2 * side
    query, key, value, global_key, global_value, local_bias, global_bias = tensors
    batch, heads, height, width, channels = query.shape
    rows, cols, scale = -(-height // size), -(-width // size), channels**-0.5
    # (B * rows * M, cols, P, ...) -> (B, rows, cols, M, P, ...)
    parts = *(to_chunks(x, size) for x in (query * scale, grad, delta[..., None])), logsumexp
    query, grad, delta, logsumexp = (x.unflatten(0, (batch, rows, heads)).transpose(2, 3) for x in parts)
    query_grad, delta = query.new_empty(query.shape), delta[..., 0]
    halo = _with_halo(key, value, size, side)
    halo_grad = halo.new_zeros(*halo.shape[:-1], channels)
    num_global, global_grads = 0, (None, None)
    if global_key is not None:
        num_global, global_grads = global_key.shape[2], (torch.zeros_like(global_key), torch.zeros_like(global_value))
        global_key, global_value = F.pad(global_key, (0, 1)), F.pad(global_value, (0, 1), value=1.0)
    no_bias = query.new_zeros(1, 1, 1)
    shared_bias = no_bias if global_bias is None else global_bias[:, :, None]
    shared_bias_grad = torch.zeros_like(shared_bias) if needed[6] else None
    if shift is None:
        piece_rows, corners = length, [(0, col) for col in range(0, length, size)]
    else:
        piece_rows, corners = size, [(size, size), ((1 + shift[0]) * size, (1 + shift[1]) * size)]
    pieces: list[_Piece] = []
    for row, col in corners:
        inside, bias = (..., slice(row, row + piece_rows), slice(col, min(col + size, length))), no_bias
        if local_bias is not None:
            bias = local_bias.unflatten(2, (length, length))[inside].permute(0, 3, 2, 1).flatten(1, 2)
        pieces.append(_Piece(*inside[1:], bias, torch.zeros_like(bias) if needed[5] else None))

    # Memory that all rows and blocks use in turn: the rows of halo that the pieces of a row of chunks lie in
    strip = (2, halo.shape[2], heads, size, piece_rows)
    strips = {row: (query.new_empty(*strip, channels + 1), query.new_empty(*strip, channels)) for row, _ in corners}
    num_keys = sum(piece.cols.stop - piece.cols.start for piece in pieces) * piece_rows + num_global
    blocks = [block for (block,) in split_blocks((cols,), heads * num_keys * size**2, BLOCK_SCORES)]
    buffer = query.new_empty(2, max(block.stop - block.start for block in blocks) * heads * num_keys * size**2)
    for image, row in itertools.product(range(batch), range(rows)):
        for first, (strip, strip_grad) in strips.items():
            strip.copy_(halo[:, image, ..., row * size + first : row * size + first + piece_rows, :])
            strip_grad.zero_()
        for chunks in blocks:
            keys = []
            for piece in pieces:
                groups = slice(chunks.start + piece.cols.start // size, chunks.stop + piece.cols.start // size)
                parts = [x[index, groups].flatten(0, 1) for x in strips[piece.rows.start] for index in range(2)]
                parts = [x[:, : piece.cols.stop - piece.cols.start].flatten(1, 2) for x in parts]
                keys.append(_Keys(*parts, [(slice(None), piece.bias, piece.bias_grad)]))
            if num_global:
                shared = (x[image].expand(chunks.stop - chunks.start, -1, -1, -1) for x in (global_key, global_value))
                biases = [(slice(None), shared_bias, shared_bias_grad)]
                keys.append(_Keys(*(x.flatten(0, 1) for x in shared), *(x[image] for x in global_grads), biases))
            block = [x[image, row, chunks].flatten(0, 1) for x in (query, grad, delta)]
            block_grad = query_grad[image, row, chunks].flatten(0, 1)
            _add_gradients(*block, logsumexp[image, row, chunks], block_grad, keys, heads, buffer)
        for first, (_, strip_grad) in strips.items():
            halo_grad[:, image, ..., row * size + first : row * size + first + piece_rows, :] += strip_grad

    local_bias_grad = None
    if needed[5]:
        local_bias_grad = query.new_zeros(len(local_bias), size**2, length, length)
        for piece in pieces:
            part = piece.bias_grad.unflatten(1, (-1, piece_rows)).permute(0, 3, 2, 1)
            local_bias_grad[:, :, piece.rows, piece.cols] = part
        local_bias_grad = local_bias_grad.flatten(2)
    # (B, rows, w, cols, w, M, D) -> (B, M, H, W, D), which lies in memory as (B, H, W, M, D)
    query_grad = query_grad.mul_(scale).unflatten(4, (size, size)).permute(0, 1, 4, 2, 5, 3, 6).flatten(3, 4)
    query_grad = query_grad.flatten(1, 2)[:, :height, :width].permute(0, 3, 1, 2, 4)
    global_bias_grad = None if shared_bias_grad is None else shared_bias_grad[..., 0]
    # (2, B, columns, M, rows, D) with the margins -> (B, M, H, W, D) each
    halo_grad = halo_grad.transpose(3, 4).flatten(2, 3)[:, :, side : side + width, :, side : side + height]
    key_grad, value_grad = halo_grad.permute(0, 1, 3, 4, 2, 5)
    return query_grad, key_grad, value_grad, *global_grads, local_bias_grad, global_bias_grad


def _with_halo(key: Tensor, value: Tensor, chunk_size: int, side: int) -> Tensor:
    """Return keys and values with the margins of the windows: (2, B, groups, M, w columns, rows * w + 2 * side, D + 1).

    A group is the columns of one chunk. The margins are more groups on both sides. The last group may be padded. The
    last channel of values is 1. The last channel of keys is 0 for a token and a large negative number elsewhere.
    """
    batch, heads, height, width, channels = key.shape
    whole_height, whole_width = (x + padding_to_multiple(x, chunk_size) for x in (height, width))
    columns = whole_width + 2 * side + padding_to_multiple(2 * side, chunk_size)
    halo = key.new_zeros(2, batch, columns, heads, whole_height + 2 * side, channels + 1)
    halo[1, ..., -1] = 1.0
    halo[0, ..., -1] = _MASK
    inside = halo[:, :, side : side + width, :, side : side + height]
    for target, x in zip(inside, (key, value), strict=True):
        target[..., :-1] = x.permute(0, 3, 1, 2, 4)
    inside[0, ..., -1] = 0.0
    return halo.unflatten(2, (-1, chunk_size)).transpose(3, 4)


def _map_forward(
    size: tuple[int, int], query: Tensor, key: Tensor, value: Tensor, offset_bias: Tensor, global_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output, which lies in memory as (B, H * W, M, D), and the log-sum-exps (B, M, H * W)."""
    height, width = size
    num_global, scale = key.shape[2] - height * width, query.shape[-1] ** -0.5
    # (M, W, 2 * H - 1, W): for the column of a query, the rows of keys in their order
    offset_bias = offset_bias.flip(1).transpose(1, 2).contiguous()
    output = query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
    logsumexp = at_least_float32(query.new_empty(query.shape[:3]))
    for images, heads, rows in split_blocks((*query.shape[:2], height), width * key.shape[2], BLOCK_SCORES):
        queries = slice(rows.start * width, rows.stop * width)
        q, k, v = query[images, heads, queries], key[images, heads], value[images, heads]
        bias = q.new_empty(q.shape[1], rows.stop - rows.start, width, k.shape[2])
        if num_global:
            bias[..., :num_global] = global_bias[heads, None, None]
        for row in range(rows.start, rows.stop):
            row_bias = offset_bias[heads, :, height - 1 - row : 2 * height - 1 - row]
            bias[:, row - rows.start, :, num_global:] = row_bias.flatten(2)
        bias = bias.flatten(1, 2)[None]
        block = _attention_with_logsumexp(q, k, v, attn_mask=bias, scale=scale)
        output[images, heads, queries], logsumexp[images, heads, queries] = block
    return output, logsumexp


def _map_gradients(
    size: tuple[int, int], grad: Tensor, delta: Tensor, logsumexp: Tensor, needed: object, *tensors: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the tensors of :func:`_map_forward`."""
    (height, width), (query, key, value, offset_bias, global_bias) = size, tensors
    grad = grad.contiguous()
    scale, num_global = query.shape[-1] ** -0.5, key.shape[2] - height * width
    # (M, 2 * H - 1, W, W): rows of keys in their order, columns of keys, columns of queries
    offset_bias = offset_bias.flip(1).mT.contiguous()
    offset_grad = torch.zeros_like(offset_bias)
    global_grad = None if global_bias is None else torch.zeros_like(global_bias)
    query_grad, key_grad, value_grad = query.new_empty(query.shape), key.new_zeros(key.shape), key.new_zeros(key.shape)
    query, key, value = (query * scale).contiguous(), F.pad(key, (0, 1)), F.pad(value, (0, 1), value=1.0)
    buffer = query.new_empty(2, 0)
    for images, heads, rows in split_blocks((*query.shape[:2], height), width * key.shape[2], BLOCK_SCORES):
        queries, biases = slice(rows.start * width, rows.stop * width), []
        for row in range(rows.start, rows.stop):
            index = heads, slice(height - 1 - row, 2 * height - 1 - row)
            columns = slice((row - rows.start) * width, (row - rows.start + 1) * width)
            biases.append((columns, offset_bias[index].flatten(1, 2), offset_grad[index].flatten(1, 2)))
        # Views (N, K, E)
        all_keys = [x[images, heads].flatten(0, 1) for x in (key, value, key_grad, value_grad)]
        keys = [_Keys(*(x[:, num_global:] for x in all_keys), biases)]
        if num_global:
            biases = [(slice(None), global_bias[heads, :, None], global_grad[heads, :, None])]
            keys.append(_Keys(*(x[:, :num_global] for x in all_keys), biases))
        block = [x[images, heads, queries].flatten(0, 1) for x in (query, grad, delta)]
        needed_size = len(block[0]) * block[0].shape[1] * key.shape[2]
        if buffer.shape[1] < needed_size:
            buffer = query.new_empty(2, needed_size)
        block_grad = query_grad[images, heads, queries].flatten(0, 1)
        lse, num_heads = logsumexp[images, heads, queries], heads.stop - heads.start
        _add_gradients(*block, lse, block_grad, keys, num_heads, buffer)
    return query_grad.mul_(scale), key_grad, value_grad, offset_grad.mT.flip(1), global_grad
