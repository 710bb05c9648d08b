"""Long-short attention (Transformer-LS section 3): a window around each segment, and a dynamic low-rank projection.

The feature map is cut into segments of w x w tokens. A token sees its own segment, w // 2 tokens around it, r projected
keys that sum up the whole map, and the global tokens, all in one softmax. Memory is linear in the number of tokens.
"""

import functools

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backbones.attention import reference
from backbones.attention.backends import suggest_triton, triton_or_sdpa
from backbones.attention.chunks import (
    WindowInputs,
    aligned_bias,
    is_plain,
    mask_channels,
    pad_keys_values,
    padding_to_multiple,
    windows,
)
from backbones.attention.dense import dense_attention, merge_heads, split_globals, split_heads
from backbones.attention.triton_chunks import SEGMENT_MODE, triton_long_short_attention
from backbones.attention.windows import WindowLayout, attend_chunks, window_attention
from backbones.errors import check_choice
from backbones.layers.block import AutocastLayerNorm
from backbones.layers.position import SegmentRelativeBias
from backbones.layers.tracing import (
    autocast_off,
    contiguous_for_export,
    is_tracing,
    static_size,
)

# Segments without a bias are joined to chunks of about this side on a GPU, whose kernels have tiles of 64 queries.
_CHUNKS = {"cuda": 8}
# Windows of larger maps, by channels of their keys, are not kept on a GPU.
_KEPT_CHANNELS = 2**23


def dynamic_projection(scores: Tensor, tokens: Tensor) -> Tensor:
    """All tokens in r sums: P = softmax over the tokens (equation 3).

    The softmax is taken in float32 or better. Tokens in bfloat16 are summed with weights in bfloat16, all others in
    float32 or better: with very many tokens the weights are below the resolution of float16.

    Args:
        scores: (B, M, H, W, r).
        tokens: (B, M, H, W, E), such as keys and values beside each other.

    Returns:
        (B, M, r, E), in the type of ``tokens``.
    """
    with autocast_off(scores.device):
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        dtype = torch.bfloat16 if tokens.dtype == torch.bfloat16 else dtype
        # PyTorch sums in float32 where scores and weights are of bfloat16.
        exact = torch.promote_types(scores.dtype, dtype)
        weights = contiguous_for_export(scores).flatten(2, 3).softmax(dim=2, dtype=exact)
        # (B, M, r, H * W)
        weights = contiguous_for_export(weights.transpose(2, 3)).to(dtype)
        return (weights @ tokens.to(dtype).flatten(2, 3)).to(tokens.dtype)


def long_short_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    chunk_size: int,
    projected_key: Tensor,
    projected_value: Tensor,
    local_bias: Tensor | None = None,
) -> Tensor:
    """Attention of the local tokens: B images, M heads, H x W tokens, D channels per head.

    Args:
        query, key, value: (B, M, H, W, D); any H and W.
        chunk_size: w; the window has ``side = max(w // 2, 1)`` tokens more on each side of a segment.
        projected_key, projected_value: (B, M, R, D), the r projected ones and those of the global tokens.
        local_bias: (M, w * w, (w + 2 * side)^2), positions in a segment by positions in its window, row by row.

    Returns:
        (B, M, H, W, D)

    Source: sections 3.2 and 3.4, equation 6. All rows of a row of windows are laid out column by column, with the
    projected keys in between once a segment; windows over them overlap without further copies.
    """
    side = max(chunk_size // 2, 1)
    number = _CHUNKS.get(query.device.type, 1) // chunk_size
    if number > 1 and local_bias is None and is_plain(query):
        local_bias = _segments_mask(chunk_size, number, side, query.dtype, query.device)
        chunk_size *= number
    layout = WindowLayout(chunk_size, side)
    inputs = WindowInputs(query, key, value, projected_key, projected_value, local_bias)
    attention = functools.partial(window_attention, functools.partial(_attend, layout), layout)
    if query.device.type == "cpu" or not is_plain(query) or key.numel() <= _KEPT_CHANNELS:
        return attention(inputs)
    # They take as much memory as all else in a block: a backward pass makes them again.
    return checkpoint(attention, inputs, use_reentrant=False, preserve_rng_state=False)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def _segments_mask(chunk_size: int, number: int, side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A bias for ``number`` x ``number`` segments in one chunk, (1, P, S): -inf at keys beyond a query's window."""
    first = torch.arange(number * chunk_size, device=device)[:, None] // chunk_size * chunk_size
    slot = torch.arange(number * chunk_size + 2 * side, device=device)
    # Along an axis, the positions by the slots
    seen = (slot >= first) & (slot < first + chunk_size + 2 * side)
    seen = (seen[:, None, :, None] & seen[:, None]).flatten(2).flatten(0, 1)[None]
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


def _attend(layout: WindowLayout, inputs: WindowInputs, *, with_logsumexp: bool) -> tuple[Tensor, Tensor | None]:
    """All segments in one call: see :func:`.attend_chunks`. Projected keys are the global ones."""
    query, key, value, shared_key, shared_value, local_bias, _ = inputs
    chunk_size, side, length = layout.chunk_size, layout.side, layout.length
    (height, width), extra = query.shape[2:4], mask_channels(static_size(query.shape[4]), query.device)

    right, below = (padding_to_multiple(size, chunk_size) for size in (width, height))
    halo = (max(chunk_size - side, side), side + right, side, side + below)
    both = pad_keys_values(key, value, halo, extra)

    # Keys that all segments see fill whole columns of a window: (2 * B, M, n, w + 2 * side, D + extra)
    shared = static_size(shared_key.shape[2])
    fill = padding_to_multiple(shared, length)
    shared_both = pad_keys_values(shared_key[:, :, None], shared_value[:, :, None], (0, fill, 0, 0), extra)
    shared_both = shared_both.squeeze(2).unflatten(2, (-1, length))

    # (B * rows * M, cols, S, D + extra)
    keys_values = _windows(both, shared_both, chunk_size, side)
    keys, values = keys_values.unflatten(0, (2, keys_values.shape[0] // 2)).unbind()
    bias = None if local_bias is None else _window_bias(local_bias, shared + fill, length, side)
    return attend_chunks(query, keys, values, bias, chunk_size=chunk_size, with_logsumexp=with_logsumexp)


def _windows(x: Tensor, shared: Tensor, chunk_size: int, side: int) -> Tensor:
    """The S keys of each segment, (B * rows * M, cols, S, E): a view of keys that are copied about twice.

    They are its window column by column, with the shared keys after the first 2 * side columns: a position that, with w
    of 2 or more, no other segment's window has.

    Args:
        x: (B, M, rows * w + 2 * side, (cols + 1) * w, E), the map with the window's margins; of the columns, w - side
            are on the left.
        shared: (B, M, n, w + 2 * side, E), keys that all segments see.
    """
    length, before = chunk_size + 2 * side, 2 * side
    # (B, rows, M, columns, length, E)
    columns = windows(x, 2, length, chunk_size).permute(0, 2, 1, 4, 3, 5)
    # With sizes of -1 OpenVINO 2026.4 returns uninitialised memory.
    shared = shared[:, None, :, None]
    if chunk_size < before:
        # (B, rows, M, cols, length, length, E)
        columns = windows(columns, 3, length, chunk_size)
        shared = shared.expand(*columns.shape[:4], *shared.shape[4:])
        left, right = columns.split([before, chunk_size], dim=4)
        columns = torch.cat([left, shared, right], dim=4)
        return columns.flatten(4, 5).flatten(0, 2)
    # (B, rows, M, cols + 1, w, length, E)
    columns = columns.unflatten(3, (-1, chunk_size))
    shared = shared.expand(*columns.shape[:4], *shared.shape[4:])
    columns = torch.cat([shared, columns], dim=4)
    # A window is the last columns of one piece, and the whole of the next.
    step = static_size(columns.shape[4]) * length
    keys = columns.flatten(3, 5).flatten(0, 2)
    return windows(keys[:, step - before * length :], 1, step + before * length, step)


def _window_bias(local_bias: Tensor, num_shared: int, length: int, side: int) -> Tensor:
    """(M, w * w, length^2) row by row -> (M, w * w, S or more), as :func:`_windows`, 0 for the shared keys."""
    # (M, w * w, columns, rows)
    bias = local_bias.unflatten(2, (length, length)).transpose(2, 3)
    none = bias.new_zeros(1, 1, 1).expand(*bias.shape[:2], num_shared)
    left, right = bias.split([2 * side, length - 2 * side], dim=2)
    return aligned_bias([left.flatten(2), none, right.flatten(2)])


def auto_long_short_attention(**arguments: Tensor | int | None) -> Tensor:
    """:func:`long_short_attention`, with a line of the log about Triton's kernel if the device may run it."""
    suggest_triton(arguments["query"])
    return BACKENDS["sdpa"](**arguments)


def checked_long_short_attention(*, chunk_size: int, **tensors: Tensor | None) -> Tensor:
    """:func:`.triton_long_short_attention`, or :func:`long_short_attention` if the check excludes Triton's kernel."""
    is_right = triton_or_sdpa(tensors, chunk_size=chunk_size, mode=SEGMENT_MODE) == "triton"
    return (triton_long_short_attention if is_right else long_short_attention)(chunk_size=chunk_size, **tensors)


BACKENDS = {
    "auto": auto_long_short_attention,
    "sdpa": long_short_attention,
    "triton": checked_long_short_attention,
    "reference": reference.long_short_attention,
}


def _pair(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the two entries of an axis. OpenVINO fails to fuse what ``unbind`` becomes with sizes that vary."""
    return (x.select(dim, 0), x.select(dim, 1)) if is_tracing() else x.unbind(dim)


class DualNorm(nn.Module):
    """The norms of long-short attention, over the channels of all heads (DualLN, equation 7).

    Keys and values of tokens are normed by one LayerNorm, and those that sum up tokens by another.

    Args:
        dim: channels of a token.
        num_heads: divides ``dim``.
        projects: whether there are keys that the second norm is for.
    """

    def __init__(self, dim: int, *, num_heads: int, projects: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.local_norm = AutocastLayerNorm(dim)
        self.projected_norm = AutocastLayerNorm(dim) if projects else None

    def norm_local(self, tokens: Tensor) -> Tensor:
        """Keys and values of tokens, (2, B, N, C) -> (B, M, N, 2, D)."""
        return split_heads(self.local_norm(tokens).movedim(0, 2), self.num_heads)

    def norm_projected(self, sums: Tensor) -> Tensor:
        """Keys and values that sum up tokens, (2, B, r, C) -> (B, M, r, 2, D)."""
        return split_heads(self.projected_norm(sums).movedim(0, 2), self.num_heads)


class DualNormAttention(DualNorm):
    """Long-short attention of given queries, keys, values and scores, up to the output projection (section 3.4).

    Args:
        dim: channels of a token.
        num_heads: divides ``dim``.
        chunk_size: side w of a segment.
        relative_bias: whether offsets in the window have learned biases.
        backend: a key of ``BACKENDS``; ``"reference"`` is quadratic and for debugging.

    Raises:
        ConfigError: for an unknown backend.
    """

    num_global_tokens, update_globals = 0, False

    def __init__(
        self, dim: int, *, num_heads: int, chunk_size: int, relative_bias: bool = False, backend: str = "sdpa"
    ) -> None:
        super().__init__(dim, num_heads=num_heads)
        check_choice("attention backend", backend, BACKENDS)
        self.chunk_size = chunk_size
        self.backend = backend
        self.relative_bias = SegmentRelativeBias(chunk_size, num_heads) if relative_bias else None

    def attend(
        self,
        query: Tensor,
        keys_values: Tensor,
        scores: Tensor,
        global_keys_values: Tensor | None = None,
    ) -> Tensor:
        """The output of each head, (B, M, H, W, D).

        Args:
            query: (B, M, H, W, D).
            keys_values: (B, M, H, W, 2, D), after the norms.
            scores: (B, H, W, M * r), of the dynamic projection; channel ``head * r + rank``.
            global_keys_values: (B, M, G, 2, D), after the norms, or None for no global token.
        """
        sums = dynamic_projection(split_heads(scores, self.num_heads), keys_values.flatten(4))
        # (2, B, r, C)
        sums = contiguous_for_export(sums.unflatten(3, (2, -1)).permute(3, 0, 2, 1, 4)).flatten(3)
        shared = self.norm_projected(sums)
        if global_keys_values is not None:
            shared = torch.cat([shared, global_keys_values], dim=2)
        (key, value), (projected_key, projected_value) = _pair(keys_values, 4), _pair(shared, 3)
        # A Triton kernel cannot be traced or exported.
        return BACKENDS["sdpa" if self.backend == "triton" and is_tracing() else self.backend](
            query=query,
            key=key,
            value=value,
            chunk_size=self.chunk_size,
            projected_key=projected_key,
            projected_value=projected_value,
            local_bias=None if self.relative_bias is None else self.relative_bias(),
        )


class LongShortAttention(DualNormAttention):
    """Multi-head long-short attention over a feature map and its global tokens, as in the official ViL-LS.

    The global tokens are queries of themselves and of what the local tokens have gathered: of the attention's output
    before its projection, which is key and value at once.

    Args:
        dim: channels of a token.
        num_heads: divides ``dim``.
        chunk_size: side w of a segment; a token sees about 2w x 2w tokens.
        rank: r, projected keys of a head.
        num_global_tokens: G, 0 or more.
        relative_bias: whether offsets in the window have learned biases.
        update_globals: whether the global tokens are queries too; the last block of a stage drops them.
        backend: a key of ``BACKENDS``; ``"reference"`` is quadratic and for debugging.

    Raises:
        ConfigError: for an unknown backend.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        chunk_size: int,
        rank: int,
        num_global_tokens: int = 1,
        relative_bias: bool = False,
        update_globals: bool = True,
        backend: str = "sdpa",
    ) -> None:
        super().__init__(dim, num_heads=num_heads, chunk_size=chunk_size, relative_bias=relative_bias, backend=backend)
        self.num_global_tokens = num_global_tokens
        self.update_globals = update_globals and num_global_tokens > 0
        self.qkv = nn.Linear(dim, 3 * dim)
        self.dynamic_projection = nn.Linear(dim, num_heads * rank)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """(B, G + H * W, C), global tokens first, and (H, W) -> the same, or (B, H * W, C) without updated globals."""
        query, keys_values = self.qkv(tokens).unflatten(2, (3, -1)).split([1, 2], dim=2)
        query = split_heads(query.squeeze(2), self.num_heads)
        keys_values = self.norm_local(keys_values.movedim(2, 0)).contiguous()
        (global_query, query), (global_keys_values, keys_values) = (
            split_globals(x, self.num_global_tokens, dim=2) for x in (query, keys_values)
        )
        # Also of the global tokens, which are not used: the local ones would be copied.
        scores = split_globals(self.dynamic_projection(tokens), self.num_global_tokens)[1].unflatten(1, size)
        output = self.attend(query.unflatten(2, size), keys_values.unflatten(2, size), scores, global_keys_values)
        merged = merge_heads(output).flatten(1, 2)
        if not self.update_globals:
            return self.proj(merged)
        gathered = contiguous_for_export(output).flatten(2, 3)
        key, value = (torch.cat([x, gathered], dim=2) for x in _pair(global_keys_values, 3))
        update = merge_heads(dense_attention(global_query, key, value))
        return self.proj(torch.cat([update, merged], dim=1))
