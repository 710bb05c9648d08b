"""Attention of chunks to windows of a feature map, whose backward pass goes by blocks that fit the cache.

In it scores are computed again for a few chunks at a time, from the queries, keys and values that were given and the
log-sum-exps of the forward pass; never are all of them in memory. A learned bias is the same for all chunks, so that
its gradient is a sum that grows block by block.

Shapes: B images, M heads, H x W tokens, D channels per head, G keys that all tokens see, chunks of w x w = P positions.
A chunk with ``side`` tokens on each of its sides is L = w + 2 * side long. The keys that a chunk sees in it are taken
in pieces, each up to w columns of R rows, so that a piece of one chunk is a piece of its neighbours too.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.attention.blocked import (
    LEAST_EXPONENT,
    RecomputedAttention,
    attention_with_logsumexp,
    needs_blocks,
    split,
)
from backbones.attention.chunks import WindowInputs, from_chunks, mask_queries, to_chunks, wants_alignment, wrap
from backbones.attention.sdpa import pytorch_attention
from backbones.layers.tracing import (
    at_least_float32,
    contiguous_for_export,
    in_autocast_dtype,
    is_exporting,
    padding_to_multiple,
    static_size,
)

_MASK = -1e9


@dataclasses.dataclass(frozen=True)
class WindowLayout:
    """Which keys of the feature map a chunk sees.

    Attributes:
        chunk_size: w.
        side: tokens around a chunk that its window has too.
        is_cyclic: whether the map continues at its opposite border, where it has three chunks or more.
        shift: a step, in chunks, down and to the right: the chunk sees itself and only this neighbour, and ``side`` is
            w. None for the whole window.
    """

    chunk_size: int
    side: int
    is_cyclic: bool = False
    shift: tuple[int, int] | None = None

    @property
    def length(self) -> int:
        """Return L."""
        return self.chunk_size + 2 * self.side

    @property
    def piece_rows(self) -> int:
        """Return R."""
        return self.length if self.shift is None else self.chunk_size

    def pieces(self) -> list[tuple[int, int, int]]:
        """Return the first row, the first column and the number of columns of each piece of the L x L window."""
        size = self.chunk_size
        if self.shift is not None:
            return [((1 + row) * size, (1 + col) * size, size) for row, col in ((0, 0), self.shift)]
        return [(0, first, min(size, self.length - first)) for first in range(0, self.length, size)]


def window_attention(
    attend: Callable[..., tuple[Tensor, Tensor | None]], layout: WindowLayout, inputs: WindowInputs
) -> Tensor:
    """Attention of each chunk to its window, with gradients by blocks where PyTorch's would keep all scores.

    Args:
        attend: called with ``inputs`` and ``with_logsumexp``; returns what :func:`attend_chunks` returns.
        inputs: with a window of S = L * L positions.

    Returns:
        (B, M, H, W, D)
    """
    if not needs_blocks(*inputs[:5], biases=inputs[5:]):
        return attend(inputs, with_logsumexp=False)[0]

    def forward(*tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return attend(WindowInputs(*tensors), with_logsumexp=True)

    backward = functools.partial(_window_gradients, layout)
    return RecomputedAttention.apply(forward, backward, *in_autocast_dtype(*inputs))


def attend_chunks(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, *, chunk_size: int, with_logsumexp: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention of all chunks in one call.

    Args:
        query: (B, M, H, W, D).
        keys, values: (B * rows * M, cols, S, D + E), with E channels that mask keys: see :func:`.mask_keys`. On a GPU
            the values may have fewer, as :func:`.value_channels`.
        bias: (M or 1, w * w, S or more), or None.

    Returns:
        The output, (B, M, H, W, D), and, ``with_logsumexp``, the log-sum-exps by chunks, (B, rows, cols, M, w * w);
        None where this version of torch or this device does not return them.
    """
    (batch, heads, height, width), channels = query.shape[:4], static_size(query.shape[4])
    # (B * rows * M, cols, w * w, D + E)
    queries = to_chunks(mask_queries(query, static_size(keys.shape[3]) - channels), chunk_size)
    if bias is not None:
        # PyTorch would cast the copies below, and not keep their rows aligned.
        (bias,) = in_autocast_dtype(bias)
        # (B * rows * M, 1, w * w, S)
        # OpenVINO does not fuse attention whose bias of one head is expanded.
        if not (torch.jit.is_tracing() and static_size(bias.shape[0]) == 1):
            bias = contiguous_for_export(bias.expand(queries.shape[0] // heads, heads, -1, -1)).flatten(0, 1)
        bias = bias[:, None]
        if is_exporting():
            # torch 2.14 exports a broadcast bias for two columns of chunks or more only.
            bias = bias.expand(-1, queries.shape[1], -1, -1)
        if wants_alignment(bias.device):
            # A view of aligned rows
            bias = bias[..., : keys.shape[2]]
    scale, logsumexp = channels**-0.5, None
    if with_logsumexp:
        output, logsumexp = attention_with_logsumexp(queries, keys, values, bias=bias, scale=scale)
        # (B * rows * M, cols, w * w, 1) before
        logsumexp = None if logsumexp is None else logsumexp[..., 0].unflatten(0, (batch, -1, heads)).transpose(2, 3)
    else:
        output = pytorch_attention(queries, keys, values, attn_mask=bias, scale=scale)
    sizes = {"batch": batch, "heads": heads, "height": height, "width": width}
    return from_chunks(output[..., :channels], chunk_size, **sizes), logsumexp


def _window_gradients(
    layout: WindowLayout,
    grad: Tensor,
    output: Tensor,
    logsumexp: Tensor | None,
    needed: tuple[bool, ...],
    *tensors: Tensor | None,
) -> WindowInputs:
    run = _Gradients(layout, WindowInputs(*tensors), WindowInputs(*needed), grad, output, logsumexp)
    for image in range(run.batch):
        for row in range(run.rows):
            run.add_row(image, row)
    return run.result()


class _Gradients:
    """The gradients of one backward pass, to which each row of chunks of each image adds.

    Scores lie keys first, (chunks * M, keys, P), so that all products but one are of matrices as they lie.
    """

    def __init__(
        self,
        layout: WindowLayout,
        inputs: WindowInputs,
        needed: WindowInputs,
        grad: Tensor,
        output: Tensor,
        logsumexp: Tensor | None,
    ) -> None:
        self.layout, self.logsumexp = layout, logsumexp
        self.batch, self.heads, self.height, self.width, self.channels = inputs.query.shape
        self.scale = self.channels**-0.5
        self.rows, self.cols = (-(-size // layout.chunk_size) for size in (self.height, self.width))
        inputs = WindowInputs(*(None if x is None else at_least_float32(x) for x in inputs))
        grad, output = at_least_float32(grad), at_least_float32(output)
        # (B, rows, cols, M, P, D), and with one channel more (B, rows, cols, M, D + 1, P)
        self.query, self.grad = self._chunks(inputs.query) * self.scale, self._chunks(grad)
        self.query_columns = _as_columns(self.query, 1.0)
        self.grad_columns = _as_columns(self.grad, -self._chunks((grad * output).sum(dim=-1, keepdim=True))[..., 0])
        self.query_grad = torch.empty_like(self.query)
        # Keys and values: the last channel of keys masks hidden ones; that of values meets that of the gradient.
        self.halo = self._with_halo(inputs.key, inputs.value)
        self.halo_grad = self.halo.new_zeros(*self.halo.shape[:-1], self.channels)
        self.global_keys_values, self.global_grads = None, (None, None)
        if inputs.global_key is not None:
            self.global_keys_values = F.pad(inputs.global_key, (0, 1)), F.pad(inputs.global_value, (0, 1), value=1.0)
            self.global_grads = torch.zeros_like(inputs.global_key), torch.zeros_like(inputs.global_value)
        # For each piece, and for the global keys: broadcast to (M, keys, P)
        no_bias = self.query.new_zeros(1, 1, 1)
        self.biases = [no_bias] * len(layout.pieces())
        if inputs.local_bias is not None:
            window = inputs.local_bias.unflatten(2, (layout.length, -1))
            self.biases = [
                window[:, :, row : row + layout.piece_rows, col : col + columns].permute(0, 3, 2, 1).flatten(1, 2)
                for row, col, columns in layout.pieces()
            ]
        self.bias_grads = [torch.zeros_like(x) if needed.local_bias else None for x in self.biases]
        self.biases.append(no_bias if inputs.global_bias is None else inputs.global_bias[:, :, None])
        self.bias_grads.append(torch.zeros_like(self.biases[-1]) if needed.global_bias else None)
        # Memory that all rows and blocks use in turn: to allocate it for each would take as long as some products.
        groups, size, keys = self.halo.shape[2], layout.chunk_size, sum(x[2] for x in layout.pieces())
        strip = (2, groups, self.heads, size, layout.piece_rows)
        first_rows = {row for row, _, _ in layout.pieces()}
        self.strips = {row: self.query.new_empty(*strip, self.channels + 1) for row in first_rows}
        self.strip_grads = {row: self.query.new_empty(*strip, self.channels) for row in first_rows}
        keys = keys * layout.piece_rows + (0 if inputs.global_key is None else inputs.global_key.shape[2])
        self.blocks = [block for (block,) in split((self.cols,), self.heads * keys * size**2, self.query.device)]
        most = max(block.stop - block.start for block in self.blocks)
        self.buffer = self.query.new_empty(2, most * self.heads * keys * size**2)

    def result(self) -> WindowInputs:
        local_bias_grad = None
        if self.bias_grads[0] is not None:
            length, rows = self.layout.length, self.layout.piece_rows
            window = self.query.new_zeros(*self.bias_grads[0].shape[::2], length, length)
            for (row, col, columns), part in zip(self.layout.pieces(), self.bias_grads, strict=False):
                part = part.unflatten(1, (columns, -1)).permute(0, 3, 2, 1)
                window[:, :, row : row + rows, col : col + columns] = part
            local_bias_grad = window.flatten(2)
        global_bias_grad = None if self.bias_grads[-1] is None else self.bias_grads[-1][..., 0]
        query_grad = self._from_chunks(self.query_grad.mul_(self.scale))
        return WindowInputs(
            query_grad, *self._without_halo(self.halo_grad), *self.global_grads, local_bias_grad, global_bias_grad
        )

    def add_row(self, image: int, row: int) -> None:
        """Add the gradients of one row of chunks."""

        def rows_of_map(first: int) -> slice:
            first += row * self.layout.chunk_size
            return slice(first, first + self.layout.piece_rows)

        for first, strip in self.strips.items():
            strip.copy_(self.halo[:, image, :, :, :, rows_of_map(first)])
            self.strip_grads[first].zero_()
        for chunks in self.blocks:
            self._add_block(image, row, chunks)
        for first, strip in self.strip_grads.items():
            self.halo_grad[:, image, :, :, :, rows_of_map(first)] += strip

    def _add_block(self, image: int, row: int, chunks: slice) -> None:
        """Add the gradients of some neighbouring chunks of a row."""
        # (N, P, D) and (N, D + 1, P) with N = chunks * M
        query, query_columns, grad, grad_columns, query_grad = (
            x[image, row, chunks].flatten(0, 1)
            for x in (self.query, self.query_columns, self.grad, self.grad_columns, self.query_grad)
        )
        (keys, values), (key_grads, value_grads) = (
            [self._pieces(strips, index, chunks) for index in range(2)] for strips in (self.strips, self.strip_grads)
        )
        if self.global_keys_values is not None:
            for pieces, x in zip((keys, values), self.global_keys_values, strict=True):
                pieces.append(x[image].expand(chunks.stop - chunks.start, -1, -1, -1).flatten(0, 1))
        # All of them, and a view (N, keys, P) of each piece
        sizes = [len(query) * key.shape[1] * query.shape[1] for key in keys]
        all_weights, all_products = (x[: sum(sizes)] for x in self.buffer)
        weights, products = (
            [part.view(len(query), -1, query.shape[1]) for part in x.split(sizes)] for x in (all_weights, all_products)
        )

        for part, key, bias in zip(weights, keys, self.biases, strict=False):
            scores = part.unflatten(0, (-1, self.heads))
            if self.logsumexp is None:
                scores.copy_(bias)
            else:
                torch.sub(bias.expand_as(scores), self.logsumexp[image, row, chunks, :, None], out=scores)
            part.baddbmm_(key, query_columns)
        if self.logsumexp is None:
            logsumexp = torch.stack([part.logsumexp(dim=1) for part in weights]).logsumexp(dim=0)[:, None]
            for part in weights:
                part.sub_(logsumexp)
        all_weights.clamp_(min=LEAST_EXPONENT).exp_()
        for part, value in zip(products, values, strict=True):
            torch.bmm(value, grad_columns, out=part)
        self._add(value_grads, weights, grad, self.global_grads[1], image)
        # From here on the gradient of the scores
        all_products.mul_(all_weights)
        self._add(key_grads, products, query, self.global_grads[0], image)
        for part, total in zip(products, self.bias_grads, strict=False):
            if total is not None:
                total += part.unflatten(0, (-1, self.heads)).sum_to_size(total.shape)
        for index, (part, key) in enumerate(zip(products, keys, strict=True)):
            query_grad.baddbmm_(part.transpose(1, 2), key[..., :-1], beta=min(index, 1))

    def _pieces(self, strips: dict[int, Tensor], index: int, chunks: slice) -> list[Tensor]:
        """The pieces of some chunks, each (N, columns * R, E), views of a row's keys or values (groups, M, w, R, E)."""
        pieces = []
        for row, col, columns in self.layout.pieces():
            step = col // self.layout.chunk_size
            part = strips[row][index, chunks.start + step : chunks.stop + step].flatten(0, 1)
            pieces.append(part[:, :columns].flatten(1, 2))
        return pieces

    def _add(
        self, totals: list[Tensor], weights: list[Tensor], sources: Tensor, global_total: Tensor | None, image: int
    ) -> None:
        """Add to the gradients of keys or values: weights (N, keys, P) of ``sources`` (N, P, D)."""
        for total, part in zip(totals, weights, strict=False):
            if total.is_contiguous():
                total.baddbmm_(part, sources)
            else:
                total.add_(part @ sources)
        if global_total is not None:
            global_total[image] += (weights[-1] @ sources).unflatten(0, (-1, self.heads)).sum(0)

    def _chunks(self, x: Tensor) -> Tensor:
        """(B, M, H, W, E) -> (B, rows, cols, M, P, E), padded with zeros."""
        size = self.layout.chunk_size
        x = F.pad(x, (0, 0, 0, padding_to_multiple(self.width, size), 0, padding_to_multiple(self.height, size)))
        x = x.unflatten(3, (self.cols, size)).unflatten(2, (self.rows, size))
        return x.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).contiguous()

    def _from_chunks(self, x: Tensor) -> Tensor:
        """(B, rows, cols, M, P, E) -> (B, M, H, W, E), which lies in memory as (B, H, W, M, E)."""
        x = x.unflatten(4, (self.layout.chunk_size, -1)).permute(0, 1, 4, 2, 5, 3, 6).flatten(3, 4).flatten(1, 2)
        return x[:, : self.height, : self.width].permute(0, 3, 1, 2, 4)

    def _with_halo(self, key: Tensor, value: Tensor) -> Tensor:
        """Keys and values with the windows' margins: (2, B, groups, M, w columns, rows * w + 2 * side, D + 1).

        A group is the columns of a chunk; groups of the margins follow on both sides, and the last may be filled up.
        The last channel of values is 1; that of keys 0 for a token, and a large negative number elsewhere.
        """
        size, side = self.layout.chunk_size, self.layout.side
        width, height = self.cols * size + -(-2 * side // size) * size, self.rows * size + 2 * side
        halo = key.new_zeros(2, self.batch, width, self.heads, height, self.channels + 1)
        halo[1, ..., -1] = 1.0
        if self.layout.is_cyclic:
            cols, hidden_cols, rows, hidden_rows = self._sources(key.device)
            for target, x in zip(halo, (key, value), strict=True):
                target[..., :-1] = x.permute(0, 3, 1, 2, 4).index_select(1, cols).index_select(3, rows)
            halo[0, ..., -1] = (hidden_cols[:, None] | hidden_rows).to(key.dtype)[:, None] * _MASK
        else:
            halo[0, ..., -1] = _MASK
            inside = halo[:, :, side : side + self.width, :, side : side + self.height]
            for target, x in zip(inside, (key, value), strict=True):
                target[..., :-1] = x.permute(0, 3, 1, 2, 4)
            inside[0, ..., -1] = 0.0
        return halo.unflatten(2, (-1, size)).transpose(3, 4)

    def _without_halo(self, x: Tensor) -> Tensor:
        """The gradients of what :meth:`_with_halo` took, (2, B, M, H, W, D), from that of its result."""
        side, x = self.layout.side, x.transpose(3, 4).flatten(2, 3)
        if self.layout.is_cyclic:
            cols, _, rows, _ = self._sources(x.device)
            x = x.new_zeros(*x.shape[:2], self.width, *x.shape[3:]).index_add_(2, cols, x)
            x = x.new_zeros(*x.shape[:4], self.height, x.shape[5]).index_add_(4, rows, x)
        else:
            x = x[:, :, side : side + self.width, :, side : side + self.height]
        return x.permute(0, 1, 3, 4, 2, 5)

    def _sources(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the source of each position and its mask, for columns and for rows; padding has source 0."""
        size, sources = self.layout.chunk_size, []
        for axis, number in ((self.width, self.cols), (self.height, self.rows)):
            source, hidden = wrap(axis, number * size, size, device)
            sources += [source.where(source < axis, 0), hidden]
        return tuple(sources)


def _as_columns(x: Tensor, last: Tensor | float) -> Tensor:
    """(..., P, D) -> (..., D + 1, P), ``last`` (..., P) being the last channel."""
    columns = x.new_empty(*x.shape[:-2], x.shape[-1] + 1, x.shape[-2])
    columns[..., :-1, :] = x.transpose(-1, -2)
    columns[..., -1, :] = last
    return columns
