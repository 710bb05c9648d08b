"""Random-shift training of ViL: a token sees its own chunk, one of the eight round it and the global tokens.

Which neighbour is drawn anew for each layer and iteration; 98 local keys stand in for 441. The paper does not have it:
it is of the official code, for the greater part of training. Evaluation sees all nine chunks.

Shapes: B images, M heads, H x W tokens, D channels a head, G global tokens, chunks of w x w = P places, N of them in
all images; E channels with those that mark what is hidden.
"""

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from backbones.attention.kernels.chunks import mark_channels, mark_of_keys, mark_queries, near_only, own_and_neighbour
from backbones.attention.kernels.dense_gradients import FullBias, dense_gradients
from backbones.attention.kernels.flash import attention_and_sums, in_autocast_type
from backbones.execution.precision import autocast_off
from backbones.execution.tracing import missing

# Steps of chunks, down and to the right, to a neighbour.
SHIFTS = tuple((row, col) for row in (-1, 0, 1) for col in (-1, 0, 1) if (row, col) != (0, 0))


@torch.compiler.disable
def shifted_chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    global_key: Tensor | None,
    global_value: Tensor | None,
    local_bias: Tensor | None,
    global_bias: Tensor | None,
    *,
    window_size: int,
    shift: tuple[int, int],
    mode: str,
) -> Tensor:
    """Attention to a token's own chunk, its neighbour at ``shift`` and the global tokens.

    Scores are never in memory as a whole, and are made again for the gradients; nor are the keys of each chunk kept.

    Args and returns as :func:`backbones.attention.sliding_chunk.sliding_chunk_attention`.
    """
    if mode == "exact":
        local_bias = near_only(query, window_size, local_bias)
    bias = _bias(query, window_size, shift, global_key, local_bias, global_bias)
    cut = _Cut(window_size, *query.shape[2:4], shift, is_cyclic=mode == "cyclic")
    return _ShiftedAttention.apply(cut, *in_autocast_type(query, key, value, global_key, global_value, bias))


def _bias(
    query: Tensor,
    window_size: int,
    shift: tuple[int, int],
    global_key: Tensor | None,
    local_bias: Tensor | None,
    global_bias: Tensor | None,
) -> Tensor:
    """What is added to the scores of every chunk alike, (M or 1, P, 2 * P + G)."""
    places = window_size**2
    if local_bias is None:
        local_bias = query.new_zeros(1, places, 9 * places)
    parts = [part.flatten(2) for part in own_and_neighbour(local_bias, window_size, shift)]
    if global_key is not None:
        if global_bias is None:
            global_bias = local_bias.new_zeros(1, global_key.shape[2])
        parts.append(global_bias[:, None].expand(-1, places, -1))
    heads = max(part.shape[0] for part in parts)
    return torch.cat([part.expand(heads, -1, -1) for part in parts], dim=2)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How a map of H x W tokens is cut into chunks, and which of them a chunk sees."""

    window_size: int
    height: int
    width: int
    shift: tuple[int, int]
    is_cyclic: bool

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of chunks."""
        return -(-self.height // self.window_size), -(-self.width // self.window_size)

    def chunks(self, x: Tensor) -> Tensor:
        """(B, M, H, W, E) -> (B, rows, cols, M, w, w, E), filled up with zeros; a view of whole chunks."""
        size = self.window_size
        below, right = missing(self.height, size), missing(self.width, size)
        if below or right:
            x = F.pad(x, (0, 0, 0, right, 0, below))
        return x.unflatten(3, (-1, size)).unflatten(2, (-1, size)).permute(0, 2, 4, 1, 3, 5, 6)

    def map(self, chunks: Tensor, batch: int) -> Tensor:
        """(N, M, P, E) -> (B, M, H, W, E)."""
        chunks = chunks.unflatten(2, (self.window_size,) * 2).unflatten(0, (batch, *self.grid))
        whole = chunks.permute(0, 3, 1, 4, 2, 5, 6).flatten(4, 5).flatten(2, 3)
        return whole[:, :, : self.height, : self.width]

    def neighbours(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Chunks, of (B, rows, cols, ...), and the neighbours that they see."""
        rows, cols = self.grid
        for row, seen_row in self._steps(rows, self.shift[0]):
            for col, seen_col in self._steps(cols, self.shift[1]):
                yield (slice(None), row, col), (slice(None), seen_row, seen_col)

    def _steps(self, number: int, step: int) -> Iterator[tuple[slice, slice]]:
        first, last = max(0, -step), number - max(0, step)
        yield slice(first, last), slice(first + step, last + step)
        # With fewer than three chunks the one behind the border is a neighbour already.
        if step and self.is_cyclic and number >= 3:
            border, opposite = (0, number - 1) if step < 0 else (number - 1, 0)
            yield slice(border, border + 1), slice(opposite, opposite + 1)

    def seen(self, x: Tensor, global_tokens: Tensor | None, *, extra: int, mark: float = 0.0) -> Tensor:
        """What each chunk sees, (N, M, 2 * P + G, D + extra), with ``mark`` in the extra channels of no token.

        Args:
            x: (B, M, H, W, D).
            global_tokens: (B, M, G, D), or None.
        """
        chunks = self.chunks(x)
        batch, rows, cols, heads, size, _, channels = chunks.shape
        places = size**2
        keys = 2 * places + (0 if global_tokens is None else global_tokens.shape[2])
        seen = x.new_empty(batch, rows, cols, heads, keys, channels + extra)
        own, neighbour, rest = seen.split([places, places, keys - 2 * places], dim=4)
        neighbour.zero_()[..., channels:] = mark
        own[..., :channels].unflatten(4, (size, size)).copy_(chunks)
        own[..., channels:] = self._marks(own[..., channels:], mark)
        for places_of, seen_there in self.neighbours():
            neighbour[places_of] = own[seen_there]
        if global_tokens is not None:
            rest.copy_(F.pad(global_tokens, (0, extra))[:, None, None])
        return seen.flatten(0, 2)

    def _marks(self, like: Tensor, mark: float) -> Tensor:
        """``mark`` where a place of a chunk lies beyond the map, 0 elsewhere: (rows, cols, 1, P, 1)."""
        beyond = like.new_zeros(1, 1, self.height, self.width, 1)
        size = self.window_size
        pad = (0, 0, 0, missing(self.width, size), 0, missing(self.height, size))
        beyond = F.pad(beyond, pad, value=mark).unflatten(3, (-1, size)).unflatten(2, (-1, size))
        return beyond[0].permute(1, 3, 0, 2, 4, 5).flatten(3, 4)

    def gradient(self, seen: Tensor, batch: int, channels: int) -> tuple[Tensor, Tensor]:
        """The gradient of what is seen, (N, M, 2 * P + G, D or more), as those of the map and of the global tokens."""
        places = self.window_size**2
        seen = seen[..., :channels].unflatten(0, (batch, *self.grid))
        own, neighbour, rest = seen.split([places, places, seen.shape[4] - 2 * places], dim=4)
        for places_of, seen_there in self.neighbours():
            own[seen_there] += neighbour[places_of]
        return self.map(own.flatten(0, 2), batch), rest.sum(dim=(1, 2))


class _ShiftedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        cut: _Cut,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        global_key: Tensor | None,
        global_value: Tensor | None,
        bias: Tensor,
    ) -> Tensor:
        batch, channels = query.shape[0], query.shape[4]
        with autocast_off(query.device):
            queries, keys, extra = _queries_and_keys(cut, query, key, global_key)
            values = cut.seen(value, global_value, extra=extra)
            scale = (channels + extra) ** -0.5
            output, sums = attention_and_sums(queries, keys, values, bias=bias[None], scale=scale)
            output = output[..., :channels].contiguous()
        ctx.cut = cut
        ctx.save_for_backward(query, key, value, global_key, global_value, bias, output, sums)
        return cut.map(output, batch)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, global_key, global_value, bias, output, sums = ctx.saved_tensors
        cut, batch, channels = ctx.cut, query.shape[0], query.shape[4]
        with autocast_off(grad.device):
            queries, keys, extra = _queries_and_keys(cut, query, key, global_key)
            values = cut.seen(value, global_value, extra=0)
            grads = cut.chunks(grad).flatten(4, 5).flatten(0, 2)
            full = FullBias(bias, keys.shape[2])
            query_grad, key_grad, value_grad = dense_gradients(grads, output, sums, queries, keys, values, full)
            query_grad = cut.map(query_grad[..., :channels], batch) * _factor(channels, extra)
            key_grad, global_key_grad = cut.gradient(key_grad, batch, channels)
            value_grad, global_value_grad = cut.gradient(value_grad, batch, channels)
        tensors = (query, key, value, global_key, global_value, bias)
        gradients = (query_grad, key_grad, value_grad, global_key_grad, global_value_grad, *full.gradients())
        return None, *(None if t is None else x.to(t.dtype) for x, t in zip(gradients, tensors, strict=True))


def _queries_and_keys(cut: _Cut, query: Tensor, key: Tensor, global_key: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """(N, M, P, E), (N, M, 2 * P + G, E), and how many of the E channels are marks."""
    channels = query.shape[4]
    extra = mark_channels(channels, query.device)
    queries = cut.chunks(query).flatten(4, 5).flatten(0, 2) * _factor(channels, extra)
    mark = mark_of_keys(key, extra=extra, scale=(channels + extra) ** -0.5)
    return mark_queries(queries, extra), cut.seen(key, global_key, extra=extra, mark=mark), extra


def _factor(channels: int, extra: int) -> float:
    """Of the queries: scores are scaled by all channels, those of the marks too."""
    return ((channels + extra) / channels) ** 0.5
