"""The backward pass of attention to windows of a map, by blocks that fit the cache.

Scores are made again for a few chunks at a time, from the queries, keys and values that were given, and the
log-sum-exps of the forward pass; never are all of them in memory. A learned bias is the same for all chunks, so that
its gradient is a sum that grows block by block.

Shapes: B images, M heads, H x W tokens, D channels a head, chunks of w x w = P positions, S keys that all tokens see.
The window of a chunk has ``side`` tokens more on each of its sides, L = w + 2 * side. It is taken in pieces, each w
columns of L rows, of which neighbouring chunks share all but the first.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from backbones.attention.blocked import BLOCK_SCORES, LEAST_EXPONENT, in_autocast_dtype
from backbones.layers.tracing import at_least_float32, autocast_off, missing

_MASK = -1e9


@dataclasses.dataclass(frozen=True)
class Windows:
    """Sizes of the windows that a feature map is cut into.

    Attributes:
        window_size: w.
        side: tokens round a chunk that its window has too.
        wrap: a function of the size of an axis, the same padded to whole chunks, w and the device; it returns for each
            position of the axis with its halo the source index, and whether the position is masked. None for an empty
            halo.
    """

    window_size: int
    side: int
    wrap: Callable[[int, int, int, torch.device], tuple[Tensor, Tensor]] | None = None

    @property
    def length(self) -> int:
        return self.window_size + 2 * self.side

    @property
    def pieces(self) -> int:
        return -(-self.length // self.window_size)

    def columns(self, piece: int) -> int:
        """Return the number of columns of a piece; the last one may have fewer than w."""
        return min(self.window_size, self.length - piece * self.window_size)


def window_attention(
    attend: Callable[..., tuple[Tensor, Tensor | None]],
    windows: Windows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared_key: Tensor | None,
    shared_value: Tensor | None,
    local_bias: Tensor | None,
    shared_bias: Tensor | None,
) -> Tensor:
    """``attend(query, ...)`` with gradients by blocks.

    Args:
        attend: from the tensors below to the output, (B, M, H, W, D), and the log-sum-exps by chunks,
            (B, rows, cols, M, P), or None.
        query, key, value: (B, M, H, W, D).
        shared_key, shared_value: (B, M, S, D), keys that all tokens see, or None.
        local_bias: (M or 1, P, L * L), positions in a chunk by positions in its window, row by row, or None.
        shared_bias: (M, S), or None.
    """
    tensors = in_autocast_dtype(query, key, value, shared_key, shared_value, local_bias, shared_bias)
    return _WindowAttention.apply(attend, windows, *tensors)


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attend: Callable, windows: Windows, *tensors: Tensor | None) -> Tensor:
        with autocast_off(tensors[0].device):
            output, sums = attend(*tensors)
        ctx.windows = windows
        ctx.save_for_backward(*tensors, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, output, sums = ctx.saved_tensors
        with autocast_off(grad.device):
            run = _Gradients(ctx.windows, grad, output, sums, *tensors, biases_learn=ctx.needs_input_grad[-2:])
            gradients = run.all()
        gradients = (
            None if not needed or x is None else x.to(tensor.dtype)
            for x, tensor, needed in zip(gradients, tensors, ctx.needs_input_grad[2:], strict=True)
        )
        return None, None, *gradients


class _Gradients:
    """One backward pass: arguments as for :func:`window_attention`, ``grad`` and ``output`` (B, M, H, W, D).

    Scores lie keys first, (chunks * M, keys, P), so that all products but one are of matrices as they lie.
    """

    def __init__(
        self,
        windows: Windows,
        grad: Tensor,
        output: Tensor,
        sums: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        shared_key: Tensor | None,
        shared_value: Tensor | None,
        local_bias: Tensor | None,
        shared_bias: Tensor | None,
        *,
        biases_learn: tuple[bool, bool],
    ) -> None:
        self.windows, self.sums, self.biases_learn = windows, sums, biases_learn
        self.batch, self.heads, self.height, self.width, self.channels = query.shape
        self.scale = self.channels**-0.5
        self.rows, self.cols = (-(-size // windows.window_size) for size in (self.height, self.width))
        query, grad, output = (at_least_float32(x) for x in (query, grad, output))
        # (B, rows, cols, M, P, D), and with one channel more (B, rows, cols, M, D + 1, P)
        self.query, self.grad = self._chunks(query) * self.scale, self._chunks(grad)
        self.query_columns = _as_columns(self.query, 1.0)
        self.grad_columns = _as_columns(self.grad, -self._chunks((grad * output).sum(dim=-1, keepdim=True))[..., 0])
        # The last channel of keys masks hidden ones; that of values meets that of the gradient.
        self.keys, self.values = self._halo(at_least_float32(key), hide=True), self._halo(at_least_float32(value))
        self.local_bias = None if local_bias is None else self._by_columns(at_least_float32(local_bias))
        self.has_shared = shared_key is not None
        if self.has_shared:
            self.shared_key = F.pad(at_least_float32(shared_key), (0, 1))
            self.shared_value = F.pad(at_least_float32(shared_value), (0, 1), value=1.0)
            self.shared_bias = None if shared_bias is None else at_least_float32(shared_bias)

    def all(self) -> tuple[Tensor | None, ...]:
        """The gradients of query, key, value, shared key and value, local and shared bias."""
        self.query_grad = torch.empty_like(self.query)
        self.key_grad, self.value_grad = (torch.zeros_like(x[..., :-1]).contiguous() for x in (self.keys, self.values))
        self.local_bias_grad = torch.zeros_like(self.local_bias) if self.biases_learn[0] else None
        self.shared_grads = [None] * 3
        if self.has_shared:
            shape = (self.batch, self.heads, self.shared_key.shape[2])
            self.shared_grads = [self.query.new_zeros(*shape, self.channels) for _ in range(2)]
            self.shared_grads.append(self.query.new_zeros(shape[1:]) if self.biases_learn[1] else None)
        # Buffers that all rows and blocks use in turn: new memory for each would take as long as some of the products.
        (_, groups, heads, size), (length, channels) = self.keys.shape[:4], (self.windows.length, self.channels)
        self.strips = self.query.new_empty(2, groups, heads, size, length, channels + 1)
        self.strip_grads = self.query.new_empty(2, groups, heads, size * length, channels)
        keys = length**2 + (self.shared_key.shape[2] if self.has_shared else 0)
        most = max(last - first for first, last in self._blocks())
        self.buffer = self.query.new_empty(2, most * heads * keys * size**2)
        for image in range(self.batch):
            for row in range(self.rows):
                self._row(image, row)
        local_bias_grad = None
        if self.local_bias_grad is not None:
            # (M, L columns, L rows, P) -> (M, P, L * L) row by row
            local_bias_grad = self.local_bias_grad.permute(0, 3, 2, 1).flatten(2)
        return (
            self._from_chunks(self.query_grad.mul_(self.scale)),
            self._without_halo(self.key_grad),
            self._without_halo(self.value_grad),
            *self.shared_grads[:2],
            local_bias_grad,
            self.shared_grads[2],
        )

    def _row(self, image: int, row: int) -> None:
        """Add what one row of chunks gives."""
        size, length = self.windows.window_size, self.windows.length
        rows = slice(row * size, row * size + length)
        for strip, x in zip(self.strips, (self.keys, self.values), strict=True):
            strip.copy_(x[image, :, :, :, rows])
        # (cols + pieces - 1, M, w * L, D + 1), and D
        keys, values = self.strips.flatten(3, 4)
        key_grads, value_grads = self.strip_grads.zero_()
        for first, last in self._blocks():
            self._block(image, row, slice(first, last), keys, values, key_grads, value_grads)
        for total, part in ((self.key_grad, key_grads), (self.value_grad, value_grads)):
            total[image, :, :, :, rows].add_(part.unflatten(2, (size, length)))

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of chunks, as equal as may be."""
        scores = self.heads * self.windows.length**2 * self.windows.window_size**2
        limit = BLOCK_SCORES.get(self.query.device.type, BLOCK_SCORES["other"])
        number = -(-self.cols // max(1, limit // scores))
        edges = [self.cols * i // number for i in range(number + 1)]
        return zip(edges[:-1], edges[1:], strict=True)

    def _block(
        self, image: int, row: int, chunks: slice, keys: Tensor, values: Tensor, key_grads: Tensor, value_grads: Tensor
    ) -> None:
        """Add what some neighbouring chunks give; the last four are those of the row, as in :meth:`_row`."""
        # (N, P, D) and (N, D + 1, P) with N = chunks * M
        query, query_columns, grad, grad_columns, query_grad = (
            x[image, row, chunks].flatten(0, 1)
            for x in (self.query, self.query_columns, self.grad, self.grad_columns, self.query_grad)
        )
        keys, values = self._pieces(keys, chunks), self._pieces(values, chunks)
        key_grads, value_grads = self._pieces(key_grads, chunks), self._pieces(value_grads, chunks)
        if self.has_shared:
            keys.append(self.shared_key[image].expand(chunks.stop - chunks.start, -1, -1, -1).flatten(0, 1))
            values.append(self.shared_value[image].expand(chunks.stop - chunks.start, -1, -1, -1).flatten(0, 1))
        # Both by pieces, and as one: (N, keys of a piece, P)
        all_weights, weights = _by_pieces(self.buffer[0], query, keys)
        all_products, products = _by_pieces(self.buffer[1], query, keys)

        sums = None if self.sums is None else self.sums[image, row, chunks].flatten(0, 1)[:, None]
        for index, (part, key) in enumerate(zip(weights, keys, strict=True)):
            self._start(part, index, sums)
            part.baddbmm_(key, query_columns)
        if sums is None:
            sums = torch.stack([part.logsumexp(dim=1) for part in weights]).logsumexp(dim=0)[:, None]
            for part in weights:
                part.sub_(sums)
        all_weights.clamp_(min=LEAST_EXPONENT).exp_()
        for part, value in zip(products, values, strict=True):
            torch.bmm(value, grad_columns, out=part)
        self._add(value_grads, weights, grad, self.shared_grads[1], image)
        # From here on the gradient of the scores
        all_products.mul_(all_weights)
        self._add(key_grads, products, query, self.shared_grads[0], image)
        self._add_to_biases(products)
        for index, (part, key) in enumerate(zip(products, keys, strict=True)):
            query_grad.baddbmm_(part.transpose(1, 2), key[..., :-1], beta=min(index, 1))

    def _pieces(self, x: Tensor, chunks: slice) -> list[Tensor]:
        """The windows of some chunks in the row's (cols + pieces - 1, M, w * L, E): each (N, columns * L, E), views."""
        pieces = []
        for piece in range(self.windows.pieces):
            part = x[chunks.start + piece : chunks.stop + piece].flatten(0, 1)
            pieces.append(part[:, : self.windows.columns(piece) * self.windows.length])
        return pieces

    def _start(self, scores: Tensor, piece: int, sums: Tensor | None) -> None:
        """Set the scores (N, keys, P) of a piece to the bias less the log-sum-exps (N, 1, P)."""
        bias = None
        if piece < self.windows.pieces:
            if self.local_bias is not None:
                bias = self._bias_of_piece(self.local_bias, piece)
        elif self.shared_bias is not None:
            bias = self.shared_bias[:, :, None]
        if bias is None:
            scores.zero_() if sums is None else torch.neg(sums.expand_as(scores), out=scores)
            return
        scores = scores.unflatten(0, (-1, self.heads))
        if sums is None:
            scores.copy_(bias)
        else:
            torch.sub(bias, sums.unflatten(0, (-1, self.heads)), out=scores)

    def _add(
        self, totals: list[Tensor], weights: list[Tensor], sources: Tensor, shared_total: Tensor | None, image: int
    ) -> None:
        """Add to the gradients of keys or values: weights (N, keys, P) of ``sources`` (N, P, D)."""
        for total, part in zip(totals, weights, strict=False):
            if total.is_contiguous():
                total.baddbmm_(part, sources)
            else:
                total.add_(part @ sources)
        if self.has_shared:
            shared_total[image].add_((weights[-1] @ sources).unflatten(0, (-1, self.heads)).sum(0))

    def _add_to_biases(self, score_grads: list[Tensor]) -> None:
        parts = [part.unflatten(0, (-1, self.heads)) for part in score_grads]
        if self.local_bias_grad is not None:
            for index, part in enumerate(parts[: self.windows.pieces]):
                total = self._bias_of_piece(self.local_bias_grad, index)
                total.add_(part.sum(0) if total.shape[0] > 1 else part.sum((0, 1)))
        if self.shared_grads[2] is not None:
            self.shared_grads[2].add_(parts[-1].sum((0, 3)))

    def _bias_of_piece(self, bias: Tensor, piece: int) -> Tensor:
        """(M, L, L, P) by columns -> (M, keys, P), a view."""
        first = piece * self.windows.window_size
        return bias[:, first : first + self.windows.columns(piece)].flatten(1, 2)

    def _by_columns(self, bias: Tensor) -> Tensor:
        """(M, P, L * L) row by row -> (M, L columns, L rows, P)."""
        return bias.unflatten(2, (self.windows.length, -1)).permute(0, 3, 2, 1).contiguous()

    def _chunks(self, x: Tensor) -> Tensor:
        """(B, M, H, W, E) -> (B, rows, cols, M, P, E), padded with zeros."""
        size = self.windows.window_size
        x = F.pad(x, (0, 0, 0, missing(self.width, size), 0, missing(self.height, size)))
        x = x.unflatten(3, (self.cols, size)).unflatten(2, (self.rows, size))
        return x.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).contiguous()

    def _from_chunks(self, x: Tensor) -> Tensor:
        """(B, rows, cols, M, P, E) -> (B, M, H, W, E), which lies in memory as (B, H, W, M, E)."""
        x = x.unflatten(4, (self.windows.window_size, -1)).permute(0, 1, 4, 2, 5, 3, 6).flatten(3, 4).flatten(1, 2)
        return x[:, : self.height, : self.width].permute(0, 3, 1, 2, 4)

    def _halo(self, x: Tensor, *, hide: bool = False) -> Tensor:
        """(B, M, H, W, D) with the windows' margins: (B, cols + pieces - 1, M, w columns, rows * w + 2 * side, D + 1).

        The last channel is 1, or, to ``hide``, 0 for a token and a large negative number elsewhere.
        """
        size, side, (width, height) = self.windows.window_size, self.windows.side, self._size_with_halo()
        halo = x.new_zeros(self.batch, width, self.heads, height, self.channels + 1)
        if self.windows.wrap is None:
            halo[..., -1] = _MASK if hide else 1.0
            inside = halo[:, side : side + self.width, :, side : side + self.height]
            inside[..., :-1] = x.permute(0, 3, 1, 2, 4)
            if hide:
                inside[..., -1] = 0.0
        else:
            cols, hidden_cols, rows, hidden_rows = self._sources(x.device)
            halo[..., :-1] = x.permute(0, 3, 1, 2, 4).index_select(1, cols).index_select(3, rows)
            hidden = (hidden_cols[:, None] | hidden_rows).to(x.dtype)[:, None]
            halo[..., -1] = hidden * _MASK if hide else 1.0
        # (B, cols + pieces - 1, w, M, rows * w + 2 * side, D + 1) for a moment
        return halo.unflatten(1, (-1, size)).transpose(2, 3)

    def _without_halo(self, x: Tensor) -> Tensor:
        """The gradient of what :meth:`_halo` took, (B, M, H, W, D), from that of its result."""
        side, x = self.windows.side, x.transpose(2, 3).flatten(1, 2)
        if self.windows.wrap is None:
            x = x[:, side : side + self.width, :, side : side + self.height]
        else:
            cols, _, rows, _ = self._sources(x.device)
            x = x.new_zeros(self.batch, self.width, *x.shape[2:]).index_add_(1, cols, x)
            x = x.new_zeros(*x.shape[:3], self.height, x.shape[4]).index_add_(3, rows, x)
        return x.permute(0, 2, 3, 1, 4)

    def _size_with_halo(self) -> tuple[int, int]:
        """Width and height."""
        size = self.windows.window_size
        return (self.cols + self.windows.pieces - 1) * size, self.rows * size + 2 * self.windows.side

    def _sources(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the source of each position and its mask, for columns and for rows; padding has source 0."""
        size, sources = self.windows.window_size, []
        for axis, number in ((self.width, self.cols), (self.height, self.rows)):
            source, hidden = self.windows.wrap(axis, number * size, size, device)
            sources += [source.where(source < axis, 0), hidden]
        return tuple(sources)


def _as_columns(x: Tensor, last: Tensor | float) -> Tensor:
    """(..., P, D) -> (..., D + 1, P), ``last`` (..., P) being the last channel."""
    columns = x.new_empty(*x.shape[:-2], x.shape[-1] + 1, x.shape[-2])
    columns[..., :-1, :] = x.transpose(-1, -2)
    columns[..., -1, :] = last
    return columns


def _by_pieces(buffer: Tensor, query: Tensor, keys: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return views of ``buffer`` for the scores of ``query`` (N, P, D) and ``keys``, each (N, keys, D).

    Returns:
        The part of ``buffer`` in use, and a view (N, keys, P) of it for each tensor of ``keys``.
    """
    number, positions = query.shape[:2]
    sizes = [number * key.shape[1] * positions for key in keys]
    whole = buffer[: sum(sizes)]
    return whole, [part.view(number, -1, positions) for part in whole.split(sizes)]
