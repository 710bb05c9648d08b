"""Long-short attention (Transformer-LS section 3): a window around each segment, and a dynamic low-rank projection.

The feature map is cut into segments of w x w tokens. A token attends to its own segment, to w // 2 tokens around it, to
r projected keys that summarize the whole feature map, and to the global tokens, in one softmax. Memory is linear in the
number of tokens.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backbones.attention import chunks, cpu_blocks, reference
from backbones.attention.dense import global_query_attention, merge_heads, pytorch_attention, split_globals, split_heads
from backbones.attention.triton_check import resolve_backend
from backbones.attention.triton_chunks import SEGMENT_MODE, triton_long_short_attention
from backbones.layers.block import AutocastLayerNorm
from backbones.layers.position import SegmentRelativeBias
from backbones.layers.tracing import autocast_off, contiguous_for_export, is_tracing, padding_to_multiple, static_size

# On a GPU, segments without a bias are joined to chunks of about this side. The kernels have tiles of 64 queries.
_CHUNKS = {"cuda": 8}
# On a GPU, windows are kept for the backward pass only if the keys of the feature map have at most this many elements.
_KEPT_CHANNELS = 2**23


def dynamic_projection(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return r weighted sums of all tokens. The weights are a softmax over the tokens (equation 3).

    The softmax is computed in float32 or better. Tokens in bfloat16 are summed with weights in bfloat16. All others are
    summed in float32 or better, because the weights of many tokens are below the resolution of float16.

    Args:
        scores: (B, M, H, W, r).
        tokens: (B, M, H, W, E), such as concatenated keys and values.

    Returns:
        (B, M, r, E), in the dtype of ``tokens``.
    """
    with autocast_off(scores.device):
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        dtype = torch.bfloat16 if tokens.dtype == torch.bfloat16 else dtype
        # If scores and weights are bfloat16, PyTorch sums in float32.
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
    """Return the attention of the local tokens to their windows and to the projected keys.

    Shapes: B images, M heads, H x W tokens, D channels per head.

    Args:
        query: (B, M, H, W, D), with any H and W.
        key: (B, M, H, W, D).
        value: (B, M, H, W, D).
        chunk_size: Side w of a segment. Its window has ``side = max(w // 2, 1)`` more tokens on each side.
        projected_key: (B, M, R, D), the r projected keys and the keys of the global tokens.
        projected_value: (B, M, R, D).
        local_bias: (M, w * w, (w + 2 * side)^2), the bias of positions in a segment by positions in its window, row by
            row. None for no bias.

    Returns:
        (B, M, H, W, D)

    Source: sections 3.2 and 3.4, equation 6. The keys of a row of windows lie column by column in memory, with the
    projected keys once per segment. Windows over them overlap without further copies.
    """
    side = max(chunk_size // 2, 1)
    number = _CHUNKS.get(query.device.type, 1) // chunk_size
    if number > 1 and local_bias is None and chunks.is_plain(query):
        local_bias = _segments_mask(chunk_size, number, side, query.dtype, query.device)
        chunk_size *= number
    inputs = chunks.WindowInputs(query, key, value, projected_key, projected_value, local_bias)
    attend = functools.partial(_attend, chunk_size=chunk_size, side=side)
    if query.device.type != "cpu" and chunks.is_plain(query) and key.numel() > _KEPT_CHANNELS:
        # The windows take as much memory as the rest of a block, so the backward pass computes them again.
        return checkpoint(attend, inputs, use_reentrant=False, preserve_rng_state=False)
    if torch.is_grad_enabled() and cpu_blocks.is_needed(*inputs):
        return cpu_blocks.window_attention(attend, inputs, chunk_size=chunk_size, side=side)
    return attend(inputs)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def _segments_mask(chunk_size: int, number: int, side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a bias (1, P, S) for ``number`` x ``number`` segments in one chunk: -inf at keys outside the window."""
    first = torch.arange(number * chunk_size, device=device)[:, None] // chunk_size * chunk_size
    slot = torch.arange(number * chunk_size + 2 * side, device=device)
    # Positions by slots along an axis
    seen = (slot >= first) & (slot < first + chunk_size + 2 * side)
    seen = (seen[:, None, :, None] & seen[:, None]).flatten(2).flatten(0, 1)[None]
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


def _attend(
    inputs: chunks.WindowInputs, *, chunk_size: int, side: int, attention: Callable[..., Tensor] = pytorch_attention
) -> Tensor:
    """Return the attention of all segments by one call of ``attention``. See :func:`.attend_chunks`."""
    query, key, value, shared_key, shared_value, local_bias, _ = inputs
    (height, width), length = query.shape[2:4], chunk_size + 2 * side
    extra, _ = chunks.extra_channels(static_size(query.shape[4]), query.device)
    right, below = (padding_to_multiple(size, chunk_size) for size in (width, height))
    halo = (max(chunk_size - side, side), side + right, side, side + below)
    both = chunks.pad_keys_values(key, value, halo, extra)

    # The shared keys fill whole columns of a window: (2 * B, M, n, w + 2 * side, D + extra)
    shared = static_size(shared_key.shape[2])
    fill = padding_to_multiple(shared, length)
    shared_both = chunks.pad_keys_values(shared_key[:, :, None], shared_value[:, :, None], (0, fill, 0, 0), extra)
    shared_both = shared_both.squeeze(2).unflatten(2, (-1, length))

    # (B * rows * M, cols, S, D + extra)
    keys_values = _windows(both, shared_both, chunk_size, side)
    keys, values = keys_values.unflatten(0, (2, keys_values.shape[0] // 2)).unbind()
    bias = None if local_bias is None else _window_bias(local_bias, shared + fill, length, side)
    return chunks.attend_chunks(attention, query, keys, values, bias, chunk_size)


def _windows(x: Tensor, shared: Tensor, chunk_size: int, side: int) -> Tensor:
    """Return the S keys of each segment, (B * rows * M, cols, S, E): a view of keys that are copied about twice.

    They are the window of the segment, column by column. The shared keys follow the first 2 * side columns. For w of at
    least 2, no window of another segment has this position.

    Args:
        x: (B, M, rows * w + 2 * side, (cols + 1) * w, E), the feature map with the margins of the windows. The left
            margin has w - side columns.
        shared: (B, M, n, w + 2 * side, E), keys that all segments attend to.
        chunk_size: Side w of a segment.
        side: Margin of a window.
    """
    length, before = chunk_size + 2 * side, 2 * side
    # (B, rows, M, columns, length, E)
    columns = chunks.windows(x, 2, length, chunk_size).permute(0, 2, 1, 4, 3, 5)
    # With sizes of -1, OpenVINO 2026.4 returns uninitialized memory.
    shared = shared[:, None, :, None]
    if chunk_size < before:
        # (B, rows, M, cols, length, length, E)
        columns = chunks.windows(columns, 3, length, chunk_size)
        shared = shared.expand(*columns.shape[:4], *shared.shape[4:])
        left, right = columns.split([before, chunk_size], dim=4)
        columns = torch.cat([left, shared, right], dim=4)
        return columns.flatten(4, 5).flatten(0, 2)
    # (B, rows, M, cols + 1, w, length, E)
    columns = columns.unflatten(3, (-1, chunk_size))
    shared = shared.expand(*columns.shape[:4], *shared.shape[4:])
    columns = torch.cat([shared, columns], dim=4)
    # A window is the last columns of one piece and the whole next piece.
    step = static_size(columns.shape[4]) * length
    keys = columns.flatten(3, 5).flatten(0, 2)
    return chunks.windows(keys[:, step - before * length :], 1, step + before * length, step)


def _window_bias(local_bias: Tensor, num_shared: int, length: int, side: int) -> Tensor:
    """Return the bias (M, w * w, S or more) in the order of :func:`_windows`, with 0 for the shared keys."""
    # (M, w * w, columns, rows)
    bias = local_bias.unflatten(2, (length, length)).transpose(2, 3)
    none = bias.new_zeros(1, 1, 1).expand(*bias.shape[:2], num_shared)
    left, right = bias.split([2 * side, length - 2 * side], dim=2)
    return chunks.aligned_bias([left.flatten(2), none, right.flatten(2)])


BACKENDS = {
    "sdpa": long_short_attention,
    "triton": triton_long_short_attention,
    "reference": reference.long_short_attention,
}


def _pair(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the two entries of an axis. OpenVINO does not fuse an ``unbind`` whose other sizes vary."""
    return (x.select(dim, 0), x.select(dim, 1)) if is_tracing() else x.unbind(dim)


class DualNorm(nn.Module):
    """The norms of long-short attention, over the channels of all heads (DualLN, equation 7).

    One LayerNorm normalizes the keys and values of tokens. Another one normalizes the projected keys and values.

    Args:
        dim: Channels of a token.
        num_heads: Number of heads. It divides ``dim``.
        projects: Whether there are projected keys.
    """

    def __init__(self, dim: int, *, num_heads: int, projects: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.local_norm = AutocastLayerNorm(dim)
        self.projected_norm = AutocastLayerNorm(dim) if projects else None

    def norm_local(self, tokens: Tensor) -> Tensor:
        """Normalize the keys and values of tokens: (2, B, N, C) -> (B, M, N, 2, D)."""
        return split_heads(self.local_norm(tokens).movedim(0, 2), self.num_heads)

    def norm_projected(self, sums: Tensor) -> Tensor:
        """Normalize projected keys and values: (2, B, r, C) -> (B, M, r, 2, D)."""
        return split_heads(self.projected_norm(sums).movedim(0, 2), self.num_heads)


class DualNormAttention(DualNorm):
    """Long-short attention without the projections, which a subclass adds (section 3.4).

    Args:
        dim: Channels of a token.
        num_heads: Number of heads. It divides ``dim``.
        chunk_size: Side w of a segment.
        relative_bias: Whether each offset in the window has a learned bias.
        backend: ``"auto"`` or a key of ``BACKENDS``. ``"reference"`` is quadratic and for debugging.
    """

    num_global_tokens, update_globals = 0, False

    def __init__(
        self, dim: int, *, num_heads: int, chunk_size: int, relative_bias: bool = False, backend: str = "sdpa"
    ) -> None:
        super().__init__(dim, num_heads=num_heads)
        self.chunk_size = chunk_size
        self.backend = backend
        self.relative_bias = SegmentRelativeBias(chunk_size, num_heads) if relative_bias else None

    def attend(
        self, query: Tensor, keys_values: Tensor, scores: Tensor, global_keys_values: Tensor | None = None
    ) -> Tensor:
        """Return the output of each head, (B, M, H, W, D).

        Args:
            query: (B, M, H, W, D).
            keys_values: (B, M, H, W, 2, D), normalized.
            scores: (B, H, W, M * r), the scores of the dynamic projection. The channel is ``head * r + rank``.
            global_keys_values: (B, M, G, 2, D), normalized, or None without global tokens.
        """
        sums = dynamic_projection(split_heads(scores, self.num_heads), keys_values.flatten(4))
        # (2, B, r, C)
        sums = contiguous_for_export(sums.unflatten(3, (2, -1)).permute(3, 0, 2, 1, 4)).flatten(3)
        shared = self.norm_projected(sums)
        if global_keys_values is not None:
            shared = torch.cat([shared, global_keys_values], dim=2)
        (key, value), (projected_key, projected_value) = _pair(keys_values, 4), _pair(shared, 3)
        tensors = {
            "query": query,
            "key": key,
            "value": value,
            "projected_key": projected_key,
            "projected_value": projected_value,
            "local_bias": None if self.relative_bias is None else self.relative_bias(),
        }
        backend = resolve_backend(self.backend, tensors, mode=SEGMENT_MODE, chunk_size=self.chunk_size)
        return BACKENDS[backend](chunk_size=self.chunk_size, **tensors)


class LongShortAttention(DualNormAttention):
    """Multi-head long-short attention over a feature map and its global tokens, as in the official ViL-LS.

    The global tokens attend to themselves and to the outputs of the local tokens before the output projection. These
    outputs are keys and values at the same time.

    Args:
        dim: Channels of a token.
        rank: Number r of projected keys of a head.
        num_global_tokens: Number G of global tokens, 0 or more.
        update_globals: Whether the global tokens are queries too. The last block of a stage drops them.
        common: See :class:`DualNormAttention`. A token attends to about 2w x 2w tokens.
    """

    def __init__(
        self,
        dim: int,
        *,
        rank: int,
        num_global_tokens: int = 1,
        update_globals: bool = True,
        **common: int | bool | str,
    ) -> None:
        super().__init__(dim, **common)
        self.num_global_tokens = num_global_tokens
        self.update_globals = update_globals and num_global_tokens > 0
        self.qkv = nn.Linear(dim, 3 * dim)
        self.dynamic_projection = nn.Linear(dim, self.num_heads * rank)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the updated tokens. See :meth:`.TokenAttention.forward`."""
        query, keys_values = self.qkv(tokens).unflatten(2, (3, -1)).split([1, 2], dim=2)
        query = split_heads(query.squeeze(2), self.num_heads)
        keys_values = self.norm_local(keys_values.movedim(2, 0)).contiguous()
        (global_query, query), (global_keys_values, keys_values) = (
            split_globals(x, self.num_global_tokens, dim=2) for x in (query, keys_values)
        )
        # The scores of the global tokens are not used. Leaving them out would copy the local tokens.
        scores = split_globals(self.dynamic_projection(tokens), self.num_global_tokens)[1].unflatten(1, size)
        output = self.attend(query.unflatten(2, size), keys_values.unflatten(2, size), scores, global_keys_values)
        merged = merge_heads(output).flatten(1, 2)
        if not self.update_globals:
            return self.proj(merged)
        gathered = contiguous_for_export(output).flatten(2, 3)
        key, value = (torch.cat([x, gathered], dim=2) for x in _pair(global_keys_values, 3))
        update = merge_heads(global_query_attention(global_query, key, value))
        return self.proj(torch.cat([update, merged], dim=1))
