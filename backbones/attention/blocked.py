"""Attention by blocks of scores: exact outputs and gradients, and never more than one block of scores in memory.

The forward pass keeps the log-sum-exp of each query's scores; the backward pass computes the scores again, block by
block, as FlashAttention does. Here is attention to all keys with a learned bias, and what :mod:`.windows` has in
common with it.

Shapes: B images, M heads, H x W tokens, D channels per head, L queries, K keys, G global tokens.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from backbones.attention.sdpa import pytorch_attention
from backbones.layers.tracing import (
    at_least_float32,
    autocast_dtype,
    autocast_off,
    in_autocast_dtype,
    is_tracing,
    padding_to_multiple,
)

# Scores in a block: on a CPU they stay in the cache, on other devices they take 512 MB in bfloat16.
BLOCK_SCORES = {"cpu": 2**20, "other": 2**28}
# Lower exponents are raised to this one: the weight is negligible, and denormal numbers slow exponentials tenfold.
LEAST_EXPONENT = -60.0
# Returns outputs and log-sum-exps. It is private: where a version of torch lacks or changes it, it is not called.
_CPU_KERNEL = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def needs_blocks(*tensors: Tensor | None, biases: tuple[Tensor | None, ...] = ()) -> bool:
    """Return whether gradients are needed on a CPU, where PyTorch's kernels would keep all scores.

    Traced and compiled runs, and empty tensors, are left to PyTorch.

    Args:
        tensors: queries, keys and values.
        biases: added to scores.
    """
    if not torch.is_grad_enabled() or is_tracing() or torch.compiler.is_compiling():
        return False
    if tensors[0].device.type != "cpu":
        return False
    given = [x for x in (*tensors, *biases) if x is not None]
    return any(x.requires_grad for x in given) and all(x.numel() for x in given)


def attention_with_logsumexp(
    query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention outside of autograd.

    Args:
        query: (N, M, L, E). key, value: (N, M, K, E).
        bias: broadcast to (N, M, L, K), four axes, or None.
        scale: factor of the products.

    Returns:
        The output (N, M, L, E), and the log-sum-exp of each query's scores, (N, M, L, 1), in float32 or better; None
        where this version of torch or this device does not return it.
    """
    if query.device.type == "cpu" and _CPU_KERNEL is not None:
        # The kernel takes the channels of a token to be neighbours in memory, and does not check it.
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        try:
            output, logsumexp = _CPU_KERNEL(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            # The other way takes more memory.
            if "allocate memory" in str(error):
                raise
        else:
            return output, logsumexp[..., None]
    return pytorch_attention(query, key, value, attn_mask=bias, scale=scale), None


def split(sizes: tuple[int, ...], scores: int, device: torch.device) -> Iterator[tuple[slice, ...]]:
    """Cut axes of ``sizes`` into blocks of at most ``BLOCK_SCORES``, the last axis first, into parts of equal size.

    Args:
        scores: number of scores of one index of all axes; a block has one index at least.
    """
    limit, axes = BLOCK_SCORES.get(device.type, BLOCK_SCORES["other"]) // scores, []
    for size in reversed(sizes):
        parts = -(-size // max(1, limit))
        edges = [size * part // parts for part in range(parts + 1)]
        axes.append([slice(first, last) for first, last in itertools.pairwise(edges)])
        limit = limit // size if parts == 1 else 1
    return itertools.product(*reversed(axes))


class RecomputedAttention(torch.autograd.Function):
    """Attention whose backward pass computes the scores again.

    ``apply`` gets two functions and the tensors. ``forward(*tensors)`` returns output and log-sum-exps, or None.
    ``backward(grad, output, logsumexp, needed, *tensors)`` returns the gradients of the tensors, where ``needed``
    indicates which of them are used.
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
        needed = ctx.needs_input_grad[2:]
        with autocast_off(grad.device):
            gradients = ctx.run_backward(grad, output, logsumexp, needed, *tensors)
        return (
            None,
            None,
            *(
                gradient.to(tensor.dtype) if is_needed else None
                for gradient, tensor, is_needed in zip(gradients, tensors, needed, strict=True)
            ),
        )


def dense_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Attention to all keys by blocks: (B, M, L, D), (B, M, K, D) twice, and what broadcasts to (M, L, K)."""
    tensors = in_autocast_dtype(query, key, value, bias.expand(-1, -1, key.shape[2]))
    return RecomputedAttention.apply(functools.partial(_forward, None), functools.partial(_backward, None), *tensors)


def map_attention(query: Tensor, key: Tensor, value: Tensor, offset_bias: Tensor, global_bias: Tensor | None) -> Tensor:
    """Attention of the tokens of a feature map to the global tokens and to the whole map, by blocks.

    Args:
        query: (B, M, H, W, D). key, value: (B, M, G + H * W, D).
        offset_bias: (M, 2 * H - 1, W, W), bias by offset of rows (query minus key, from 1 - H), column of the query,
            and column of the key.
        global_bias: (M, G), or None for no global token.

    Returns:
        (B, M, H * W, D)
    """
    size = tuple(query.shape[2:4])
    # (M, W, 2 * H - 1, W): for a query's column, rows of keys in their order
    bias_by_query_col = offset_bias.flip(1).transpose(1, 2).contiguous()
    tensors = in_autocast_dtype(query.flatten(2, 3), key, value, bias_by_query_col, global_bias)
    return RecomputedAttention.apply(functools.partial(_forward, size), functools.partial(_backward, size), *tensors)


def checkpointed_map_attention(
    query: Tensor, key: Tensor, value: Tensor, offset_bias: Tensor, global_bias: Tensor | None
) -> Tensor:
    """:func:`map_attention` by PyTorch's kernel in few calls, as a GPU wants it; a backward pass makes its bias again.

    Args:
        query: (B, M, H, W, D). key, value: (B, M, G + H * W, D).
        offset_bias: (M, 2 * H - 1, 2 * W - 1), bias by offset of rows and of columns, query minus key.
        global_bias: (M, G), or None for no global token.

    Returns:
        (B, M, H * W, D)
    """
    (batch, heads, height, width), num_keys = query.shape[:4], key.shape[2]
    # From the last token to the first: the bias is then a view of its table. An aligned one is not copied once more.
    fill = (0, 0, 0, padding_to_multiple(num_keys, 16))
    key, value = (F.pad(x.flip(2), fill) for x in (key, value))
    dtype, outputs = autocast_dtype(query.device) or query.dtype, []
    for some_heads, rows in split((heads, height), batch * width * num_keys, query.device):
        table = offset_bias[some_heads, rows.start : rows.stop + height - 1]
        inputs = query[:, some_heads, rows].flatten(2, 3), key[:, some_heads], value[:, some_heads], table
        to_global = None if global_bias is None else global_bias[some_heads]
        attend = functools.partial(_attend_with_table, height, width, dtype)
        output = checkpoint(attend, *inputs, to_global, use_reentrant=False, preserve_rng_state=False)
        if rows.start == 0:
            outputs.append([])
        outputs[-1].append(output)
    return torch.cat([torch.cat(parts, dim=2) for parts in outputs], dim=1)


def _attend_with_table(
    height: int,
    width: int,
    dtype: torch.dtype,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset_bias: Tensor,
    global_bias: Tensor | None,
) -> Tensor:
    """Attention of some rows of a map, (B, M, rows * W, D), whose keys are in reverse order and filled up."""
    # (M, rows, W, H, W); its gradient is summed in float32.
    bias = offset_bias.unfold(1, height, 1).unfold(2, width, 1).to(dtype, memory_format=torch.contiguous_format)
    parts = [bias.flatten(3).flatten(1, 2)]
    if global_bias is not None:
        parts.append(global_bias.flip(1).to(dtype)[:, None].expand(-1, query.shape[2], -1))
    hidden = key.shape[2] - sum(part.shape[2] for part in parts)
    if hidden:
        parts.append(bias.new_full((1, 1, 1), float("-inf")).expand(*parts[0].shape[:2], hidden))
    return pytorch_attention(query, key, value, attn_mask=torch.cat(parts, dim=2)[None])


def _blocks(query: Tensor, key: Tensor, size: tuple[int, int] | None) -> Iterator[tuple[slice, slice, slice]]:
    """Images, heads and queries of each block; the queries are whole rows of a feature map of ``size``."""
    step = 1 if size is None else size[1]
    batch, heads, queries = query.shape[:3]
    for images, some_heads, rows in split((batch, heads, queries // step), step * key.shape[2], query.device):
        yield images, some_heads, slice(rows.start * step, rows.stop * step)


def _bias_parts(
    size: tuple[int, int] | None, biases: tuple[Tensor | None, ...], heads: slice, queries: slice
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries and keys of a block, and a view of their bias that broadcasts to (M, queries, keys).

    Args:
        size: height and width of the map whose tokens are the queries and the last keys; None for a bias of each pair.
        biases: (M, W, 2 * H - 1, W) and (M, G) or None for a feature map, otherwise one that broadcasts to (M, L, K).
    """
    if size is None:
        bias = biases[0][heads] if biases[0].shape[0] > 1 else biases[0]
        yield slice(None), slice(None), bias[:, queries] if bias.shape[1] > 1 else bias
        return
    (bias_by_query_col, global_bias), (height, width) = biases, size
    num_global = 0 if global_bias is None else global_bias.shape[1]
    for first in range(queries.start, queries.stop, width):
        start = height - 1 - first // width
        rows = bias_by_query_col[heads, :, start : start + height]
        yield slice(first - queries.start, first - queries.start + width), slice(num_global, None), rows.flatten(2)
    if global_bias is not None:
        yield slice(None), slice(0, num_global), global_bias[heads, None]


def _forward(
    size: tuple[int, int] | None, query: Tensor, key: Tensor, value: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the output, which lies in memory as (B, L, M, D), and the log-sum-exps (B, M, L, 1) or None."""
    scale, logsumexp = query.shape[-1] ** -0.5, None
    output = query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
    for images, heads, queries in _blocks(query, key, size):
        q, k, v = query[images, heads, queries], key[images, heads], value[images, heads]
        parts = list(_bias_parts(size, biases, heads, queries))
        bias = parts[0][2]
        if len(parts) > 1:
            bias = q.new_empty(*q.shape[1:3], k.shape[2])
            for rows, cols, part in parts:
                bias[:, rows, cols] = part
        output[images, heads, queries], block_lse = attention_with_logsumexp(q, k, v, bias=bias[None], scale=scale)
        if block_lse is not None:
            logsumexp = block_lse.new_empty(*query.shape[:3], 1) if logsumexp is None else logsumexp
            logsumexp[images, heads, queries] = block_lse
    return output, logsumexp


def _backward(
    size: tuple[int, int] | None,
    grad: Tensor,
    output: Tensor,
    logsumexp: Tensor | None,
    needed: tuple[bool, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *biases: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and biases, in float32 or better."""
    scale = query.shape[-1] ** -0.5
    grad, output, query, key, value = (at_least_float32(x).contiguous() for x in (grad, output, query, key, value))
    biases = [None if x is None else at_least_float32(x) for x in biases]
    negative_delta = -(grad * output).sum(-1, keepdim=True)
    query_grad, key_grad, value_grad = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    bias_grads = [None if x is None else torch.zeros_like(x) for x in biases]
    # The same memory for all blocks: to allocate it for each would take as long as some of the products.
    buffers = None
    for images, heads, queries in _blocks(query, key, size):
        # (N, queries, D) and (N, K, D), N of images and heads
        q, g, delta = (x[images, heads, queries].flatten(0, 1) for x in (query, grad, negative_delta))
        k, v, k_grad, v_grad = (x[images, heads].flatten(0, 1) for x in (key, value, key_grad, value_grad))
        shape = (len(q), q.shape[1], k.shape[1])
        if buffers is None or buffers.shape[1] < math.prod(shape):
            buffers = query.new_empty(2, math.prod(shape))
        scores, products = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
        by_head = scores.unflatten(0, (-1, heads.stop - heads.start))
        parts = list(_bias_parts(size, biases, heads, queries))
        for rows, cols, bias in parts:
            if logsumexp is None:
                by_head[:, :, rows, cols] = bias
            else:
                torch.sub(bias, logsumexp[images, heads, queries][:, :, rows], out=by_head[:, :, rows, cols])
        scores.baddbmm_(q, k.mT, alpha=scale)
        if logsumexp is None:
            scores -= scores.logsumexp(dim=2, keepdim=True)
        weights = scores.clamp_(min=LEAST_EXPONENT).exp_()
        v_grad.baddbmm_(weights.mT, g)
        # From here on the gradient of the scores
        products.copy_(delta).baddbmm_(g, v.mT).mul_(weights)
        k_grad.baddbmm_(products.mT, q, alpha=scale)
        query_grad[images, heads, queries] = (
            torch.bmm(products, k).mul_(scale).view_as(query_grad[images, heads, queries])
        )
        products = products.view(by_head.shape)
        for (rows, cols, _), (_, _, total) in zip(parts, _bias_parts(size, bias_grads, heads, queries), strict=True):
            total += products[:, :, rows, cols].sum_to_size(total.shape)
    return query_grad, key_grad, value_grad, *bias_grads
