"""The backward pass of full attention with a learned bias, by blocks that fit the cache.

Scores are made again for some queries and heads at a time, from the queries, keys and values that were given, and the
log-sum-exps of the forward pass; never are all of them in memory, and of a bias that depends on offsets alone never are
all of its places.

Shapes: B images, M heads, L queries, S keys, D channels a head; H x W tokens of a map, and G global tokens.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from backbones.attention.kernels.flash import BLOCK_SCORES, LEAST_EXPONENT, attention_and_sums, in_autocast_type
from backbones.execution.precision import at_least_float32, autocast_off


class FullBias:
    """A bias for each pair, broadcast to (M, L, S)."""

    step, images_together = 1, True

    def __init__(self, bias: Tensor, keys: int) -> None:
        self.bias = at_least_float32(bias).expand(-1, -1, keys)
        self.grad = torch.zeros_like(bias, dtype=self.bias.dtype)

    def _part(self, x: Tensor, heads: slice, queries: slice) -> Tensor:
        return x[heads if x.shape[0] > 1 else slice(None), queries if x.shape[1] > 1 else slice(None)]

    def start(self, scores: Tensor, sums: Tensor | None, heads: slice, queries: slice) -> None:
        """Set the scores of a block, (images * heads, queries, S), to the bias less ``sums``, of one key."""
        bias, number = self._part(self.bias, heads, queries), heads.stop - heads.start
        scores = scores.unflatten(0, (-1, number))
        scores.copy_(bias) if sums is None else torch.sub(bias, sums.unflatten(0, (-1, number)), out=scores)

    def add(self, score_grads: Tensor, heads: slice, queries: slice) -> None:
        """Add the gradient of a block's scores (images * heads, queries, S) to that of the bias."""
        total = self._part(self.grad, heads, queries)
        total.add_(score_grads.unflatten(0, (-1, heads.stop - heads.start)).sum_to_size(total.shape))

    def gradients(self) -> tuple[Tensor, ...]:
        return (self.grad,)


class _RowBias:
    """A bias that depends on the offset of rows, and on both columns: see :func:`map_attention`."""

    images_together = False

    def __init__(self, by_row: Tensor, to_global: Tensor | None) -> None:
        self.height, self.step = (by_row.shape[1] + 1) // 2, by_row.shape[2]
        self.num_global = 0 if to_global is None else to_global.shape[1]
        # (M, W, 2 * H - 1, W): for a query's column, the rows of keys in the order in which they pass it by
        self.by_col = at_least_float32(by_row).flip(1).transpose(1, 2).contiguous()
        self.grad = torch.zeros_like(self.by_col)
        self.to_global, self.to_global_grad = None, None
        if to_global is not None:
            self.to_global = at_least_float32(to_global)
            self.to_global_grad = torch.zeros_like(self.to_global)

    def _rows(self, x: Tensor, scores: Tensor, heads: slice, queries: slice) -> Iterator[tuple[Tensor, slice]]:
        """For each row of queries in a block: its part of ``x``, which lies as the bias does, and its queries."""
        for row in range(queries.start // self.step, queries.stop // self.step):
            first = row * self.step - queries.start
            start = self.height - 1 - row
            yield x[heads, :, start : start + self.height], slice(first, first + self.step)

    def start(self, scores: Tensor, sums: Tensor | None, heads: slice, queries: slice) -> None:
        """As :meth:`FullBias.start`."""
        for bias, places in self._rows(self.by_col, scores, heads, queries):
            local = scores[:, places, self.num_global :].unflatten(2, (self.height, -1))
            if sums is None:
                local.copy_(bias)
            else:
                torch.sub(bias, sums[:, places, :, None], out=local)
        if self.to_global is not None:
            to_global = self.to_global[heads, None]
            scores[:, :, : self.num_global] = to_global if sums is None else to_global - sums

    def add(self, score_grads: Tensor, heads: slice, queries: slice) -> None:
        """As :meth:`FullBias.add`."""
        for total, places in self._rows(self.grad, score_grads, heads, queries):
            total.add_(score_grads[:, places, self.num_global :].unflatten(2, (self.height, -1)))
        if self.to_global is not None:
            self.to_global_grad[heads].add_(score_grads[:, :, : self.num_global].sum(1))

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        return self.grad.transpose(1, 2).flip(1), self.to_global_grad


def dense_gradients(
    grad: Tensor, output: Tensor, sums: Tensor | None, query: Tensor, key: Tensor, value: Tensor, bias
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value, in float32 or better; that of ``bias`` grows in it.

    Args:
        grad, output, query: (B, M, L, D). key, value: (B, M, S, D).
        sums: log-sum-exps, (B, M, L), or None.
        bias: has ``start`` and ``add``, as :class:`FullBias`, ``step``, how many queries belong together, and
            ``images_together``, whether a block may be of several images.
    """
    gradients = [x.new_empty(x.shape, dtype=at_least_float32(x[:0]).dtype) for x in (query, key, value)]
    tensors = (grad, output, query, key, value)
    together = (
        max(1, _block_scores(query) // (query.shape[1] * query.shape[2] * key.shape[2])) if bias.images_together else 1
    )
    for first in range(0, query.shape[0], together):
        images = slice(first, first + together)
        image_sums = None if sums is None else sums[images, ..., None]
        parts = (at_least_float32(x[images]) for x in tensors)
        _of_images(*parts, image_sums, bias, *(x[images] for x in gradients))
    return tuple(gradients)


def _of_images(
    grad: Tensor,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sums: Tensor | None,
    bias,
    query_grad: Tensor,
    key_grad: Tensor,
    value_grad: Tensor,
) -> None:
    """:func:`dense_gradients` of one image, or of several that are one block; the last three are written."""
    scale = query.shape[3] ** -0.5
    delta = (grad * output).sum(dim=3, keepdim=True)
    # The last channel takes delta off the products.
    query, grad = (query * scale).contiguous(), torch.cat([grad, -delta], dim=3)
    key = key.contiguous()
    key_columns = key.transpose(2, 3).contiguous()
    value_columns = F.pad(value.transpose(2, 3), (0, 0, 0, 1), value=1.0)
    blocks = list(_blocks(query, key, bias.step))
    # Room that all blocks use in turn: new memory for each would take as long as some of the products.
    most = max((heads.stop - heads.start) * (queries.stop - queries.start) for heads, queries in blocks)
    room = query.new_empty(2, query.shape[0] * most * key.shape[2])
    for heads, queries in blocks:
        # Views, as a part is of one image or has all heads and queries: (images * heads, ...)
        of_queries, of_heads = (slice(None), heads, queries), (slice(None), heads)
        query_part, grad_part = (x[of_queries].flatten(0, 1) for x in (query, grad))
        key_part, key_columns_part, value_columns_part = (
            x[of_heads].flatten(0, 1) for x in (key, key_columns, value_columns)
        )
        key_grad_part, value_grad_part = (x[of_heads].flatten(0, 1) for x in (key_grad, value_grad))
        shape = (*query_part.shape[:2], key.shape[2])
        scores, products = (x[: math.prod(shape)].view(shape) for x in room)
        bias.start(scores, None if sums is None else sums[of_queries].flatten(0, 1), heads, queries)
        scores.baddbmm_(query_part, key_columns_part)
        if sums is None:
            scores.sub_(scores.logsumexp(dim=2, keepdim=True))
        weights = scores.clamp_(min=LEAST_EXPONENT).exp_()
        # The first queries of some heads find what was in memory before.
        others = int(queries.start > 0)
        value_grad_part.baddbmm_(weights.transpose(1, 2), grad_part[..., :-1], beta=others)
        torch.bmm(grad_part, value_columns_part, out=products).mul_(weights)
        bias.add(products, heads, queries)
        key_grad_part.baddbmm_(products.transpose(1, 2), query_part, beta=others)
        query_grad[of_queries] = torch.bmm(products, key_part).mul_(scale).view(query_grad[of_queries].shape)


def _blocks(query: Tensor, key: Tensor, step: int) -> Iterator[tuple[slice, slice]]:
    """Ranges of heads, and of queries in whole steps, as equal as may be; for several images they are all."""
    images, heads, number = query.shape[0], query.shape[1], query.shape[2] // step
    in_block = max(1, _block_scores(query) // (images * step * key.shape[2]))
    head_parts = -(-heads // min(in_block, heads))
    row_parts = -(-number // max(1, in_block * head_parts // heads))
    for part in range(head_parts):
        some_heads = slice(heads * part // head_parts, heads * (part + 1) // head_parts)
        for row in range(row_parts):
            yield some_heads, slice(number * row // row_parts * step, number * (row + 1) // row_parts * step)


def _block_scores(x: Tensor) -> int:
    return BLOCK_SCORES.get(x.device.type, BLOCK_SCORES["other"])


class _DenseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        with autocast_off(query.device):
            output, sums = attention_and_sums(query, key, value, bias=bias[None], scale=query.shape[3] ** -0.5)
        ctx.save_for_backward(query, key, value, bias, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, bias, output, sums = ctx.saved_tensors
        with autocast_off(grad.device):
            full = FullBias(bias, key.shape[2])
            gradients = dense_gradients(grad, output, sums, query, key, value, full)
        tensors = (query, key, value, bias)
        return tuple(x.to(t.dtype) for x, t in zip((*gradients, *full.gradients()), tensors, strict=True))


def dense_attention_by_blocks(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """:func:`backbones.attention.dense.dense_attention` with a bias that broadcasts to (M, L, S), three axes."""
    return _DenseAttention.apply(*in_autocast_type(query, key, value, bias))


class _MapAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, attend: Callable, query: Tensor, key: Tensor, value: Tensor, by_row: Tensor, to_global: Tensor | None
    ) -> Tensor:
        with autocast_off(query.device):
            output, sums = attend(query, key, value, by_row, to_global)
        ctx.save_for_backward(query, key, value, by_row, to_global, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, by_row, to_global, output, sums = ctx.saved_tensors
        with autocast_off(grad.device):
            bias = _RowBias(by_row, to_global)
            query_grad, *gradients = dense_gradients(grad, output, sums, query.flatten(2, 3), key, value, bias)
        gradients = (query_grad.view(query.shape), *gradients, *bias.gradients())
        tensors = (query, key, value, by_row, to_global)
        return None, *(None if t is None else x.to(t.dtype) for x, t in zip(gradients, tensors, strict=True))


def map_attention_by_blocks(
    attend: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    by_row: Tensor,
    to_global: Tensor | None,
) -> Tensor:
    """Attention of the tokens of a map to global tokens and all of the map, (B, M, H * W, D), trained by blocks.

    Args:
        attend: from the tensors below to the output and its log-sum-exps (B, M, H * W), or None.
        query: (B, M, H, W, D). key, value: (B, M, G + H * W, D).
        by_row: (M, 2 * H - 1, W, W), bias by offset of rows (query less key, from 1 - H), query's and key's column.
        to_global: (M, G), or None for no global token.
    """
    return _MapAttention.apply(attend, *in_autocast_type(query, key, value, by_row, to_global))
