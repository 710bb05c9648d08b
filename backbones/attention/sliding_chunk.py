"""Vision Longformer attention (ViL section 3.2, appendix C): a local 2-D window and global tokens.

The feature map is cut into chunks of w x w tokens. A token sees its own chunk, the eight chunks around it and the
global tokens; the global tokens see everything. Memory is linear in the number of tokens.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.attention import reference
from backbones.attention.backends import suggest_triton, triton_or_sdpa
from backbones.attention.chunks import (
    MODES,
    WindowInputs,
    aligned_bias,
    both_biases,
    copies_windows,
    mask_channels,
    to_chunks,
    windows,
    with_halo,
)
from backbones.attention.dense import TokenAttention, dense_attention, merge_heads, split_globals, split_heads
from backbones.attention.flex_chunks import flex_chunk_attention
from backbones.attention.triton_chunks import triton_chunk_attention
from backbones.attention.windows import WindowLayout, attend_chunks, window_attention
from backbones.errors import check_choice
from backbones.layers.position import WindowRelativeBias, position_parameter
from backbones.layers.tracing import is_tracing, padding_to_multiple, static_size


def sliding_chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    chunk_size: int,
    mode: str = "zero_pad",
    global_key: Tensor | None = None,
    global_value: Tensor | None = None,
    local_bias: Tensor | None = None,
    global_bias: Tensor | None = None,
    shift: tuple[int, int] | None = None,
) -> Tensor:
    """Attention of the local tokens: B images, M heads, H x W tokens, D channels per head, G global tokens.

    Args:
        query, key, value: (B, M, H, W, D); any H and W.
        chunk_size: side w of a chunk.
        mode: ``"zero_pad"``, chunks at the border have fewer neighbours; ``"exact"``, only the (2w + 1) x (2w + 1)
            tokens around each token; ``"cyclic"``, the neighbours of a chunk at the border are those at the opposite
            border, along an axis of three chunks or more. No key is seen twice in any mode.
        global_key, global_value: (B, M, G, D), or None for no global token.
        local_bias: (M, w * w, 9 * w * w), positions in a chunk by positions in its 3w x 3w neighbourhood, row by row.
        global_bias: (M, G), added where a local token looks at a global one.
        shift: one of :data:`SHIFTS`, for only the own chunk and this neighbour.

    Returns:
        (B, M, H, W, D)

    Source: ViL appendix C, "sliding chunk". Rows of chunks are copied three times into strips one chunk wide; three
    strips side by side are then one contiguous run of keys, and windows over them overlap without further copies. An
    exported model copies each window whole.
    """
    check_choice("attention mode", mode, MODES)
    inputs = WindowInputs(query, key, value, global_key, global_value, local_bias, global_bias)
    if shift is None and not is_tracing() and mode != "exact" and max(query.shape[2:4]) <= 2 * chunk_size:
        return _whole_map_attention(inputs, chunk_size)
    if mode == "exact":
        inputs = inputs._replace(local_bias=_hide_far_keys(both_biases(inputs, chunk_size)[0], chunk_size))
    layout = WindowLayout(chunk_size, side=chunk_size, is_cyclic=mode == "cyclic", shift=shift)
    return window_attention(functools.partial(_attend, layout), layout, inputs)


def _attend(layout: WindowLayout, inputs: WindowInputs, *, with_logsumexp: bool) -> tuple[Tensor, Tensor | None]:
    """All chunks in one call: see :func:`.attend_chunks`."""
    query, size = inputs.query, layout.chunk_size
    extra = mask_channels(static_size(query.shape[4]), query.device)
    keys, values = with_halo(inputs.key, inputs.value, size, is_cyclic=layout.is_cyclic, extra=extra)
    if layout.shift is None:
        # (B * rows * M, cols, S, D + extra), S keys of three strips
        keys, values = _windows(keys, size, inputs.global_key), _windows(values, size, inputs.global_value)
        bias = _window_bias(inputs, size)
    else:
        keys = _chunk_pairs(keys, layout, inputs.global_key)
        values = _chunk_pairs(values, layout, inputs.global_value)
        bias = _bias_of_pairs(inputs, layout)
    return attend_chunks(query, keys, values, bias, chunk_size=size, with_logsumexp=with_logsumexp)


def _chunk_pairs(x: Tensor, layout: WindowLayout, global_tokens: Tensor | None) -> Tensor:
    """(B, M, (rows + 2) * w, (cols + 2) * w, E), (B, M, G, D) with D <= E -> (B * rows * M, cols, S, E).

    The S keys of a chunk are its own, those of its neighbour, and the global tokens.
    """
    size, (height, width) = layout.chunk_size, x.shape[2:4]
    parts = [
        to_chunks(x[:, :, row : row + height - 2 * size, col : col + width - 2 * size], size)
        for row, col, _ in layout.pieces()
    ]
    if global_tokens is not None:
        extra = F.pad(global_tokens, (0, x.shape[4] - global_tokens.shape[3]))
        rows, cols = height // size - 2, width // size - 2
        parts.append(extra[:, None, :, None].expand(-1, rows, -1, cols, -1, -1).flatten(0, 2))
    return torch.cat(parts, dim=2)


def _bias_of_pairs(inputs: WindowInputs, layout: WindowLayout) -> Tensor | None:
    """Return the bias that all chunks share, (M or 1, w * w, S or more), in the order of :func:`_chunk_pairs`."""
    if inputs.local_bias is None and inputs.global_bias is None:
        return None
    size, (local, to_global) = layout.chunk_size, both_biases(inputs, layout.chunk_size)
    window = local.unflatten(2, (3 * size, -1))
    parts = [window[:, :, row : row + size, col : col + size].flatten(2) for row, col, _ in layout.pieces()]
    parts.append(to_global[:, None].expand(-1, size**2, -1))
    heads = max(part.shape[0] for part in parts)
    return aligned_bias([part.expand(heads, -1, -1) for part in parts])


def _hide_far_keys(local_bias: Tensor, chunk_size: int) -> Tensor:
    """A local bias of -inf for keys that are further than w from a position."""
    inside = torch.arange(chunk_size, device=local_bias.device) + chunk_size
    around = torch.arange(3 * chunk_size, device=local_bias.device)
    near = (inside[:, None] - around[None, :]).abs() <= chunk_size
    seen = near[:, None, :, None] & near[None, :, None, :]
    return local_bias.masked_fill(~seen.reshape(local_bias.shape[1:]), float("-inf"))


def _whole_map_attention(inputs: WindowInputs, chunk_size: int) -> Tensor:
    """:func:`sliding_chunk_attention` on a feature map of at most two chunks per side, where all tokens see each other.

    Source: ViL section 3.2, "equivalent to full attention", as in the last two stages at 224 x 224.
    """
    query, key, value, global_key, global_value, local_bias, global_bias = inputs
    (heads, height, width), bias = query.shape[1:4], None
    key, value = key.flatten(2, 3), value.flatten(2, 3)
    if local_bias is not None:
        row_position, row_slot = _positions_and_slots(height, chunk_size, query.device)
        col_position, col_slot = _positions_and_slots(width, chunk_size, query.device)
        position = row_position[:, None] * chunk_size + col_position
        slot = row_slot[:, None, :, None] * 3 * chunk_size + col_slot[None, :, None, :]
        index = position[:, :, None, None] * 9 * chunk_size**2 + slot
        # (M, H * W, H * W)
        bias = local_bias.flatten(1)[:, index.flatten(2, 3).flatten(0, 1)]
    if global_key is not None:
        if bias is not None or global_bias is not None:
            tokens, to_global = height * width, both_biases(inputs, chunk_size)[1]
            bias = query.new_zeros(heads, tokens, tokens) if bias is None else bias
            bias = torch.cat([to_global[:, None].expand(heads, tokens, -1), bias], dim=2)
        key, value = torch.cat([global_key, key], dim=2), torch.cat([global_value, value], dim=2)
    return dense_attention(query.flatten(2, 3), key, value, bias=bias).unflatten(2, (height, width))


def _positions_and_slots(size: int, chunk_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Along an axis: each query's position in its chunk, (size,), and each key's in the query's three, (size, size)."""
    position = torch.arange(size, device=device)
    first_slot = (position // chunk_size - 1) * chunk_size
    return position % chunk_size, position[None, :] - first_slot[:, None]


def _windows(x: Tensor, chunk_size: int, global_tokens: Tensor | None) -> Tensor:
    """(B, M, (rows + 2) * w, (cols + 2) * w, E), (B, M, G, D) with D <= E -> (B * rows * M, cols, S, E), overlapping.

    The S keys of a chunk are three strips, each 3w rows of w tokens followed by the global tokens, these filled up
    with zeros to whole rows.
    """
    # (B, M, (rows + 2) * w, cols + 2, w, E), and the global tokens, (B, M, rows of w, w, E)
    lines, extra = x.unflatten(3, (-1, chunk_size)), None
    if global_tokens is not None:
        fill = (0, lines.shape[5] - global_tokens.shape[3], 0, padding_to_multiple(global_tokens.shape[2], chunk_size))
        extra = F.pad(global_tokens, fill).unflatten(2, (-1, chunk_size))
    return (_copied_windows if copies_windows() else _viewed_windows)(lines, extra)


def _viewed_windows(lines: Tensor, extra: Tensor | None) -> Tensor:
    """:func:`_windows` of rows of w tokens, (B, M, (rows + 2) * w, cols + 2, w, E) and (B, M, g, w, E) or None."""
    chunk_size = static_size(lines.shape[4])
    # (B, rows, M, cols + 2, 3w, w, E)
    strips = windows(lines, 2, 3 * chunk_size, chunk_size).permute(0, 2, 1, 4, 3, 5, 6)
    if extra is not None:
        extra = extra[:, None, :, None]
        strips = torch.cat([strips, extra.expand(-1, strips.shape[1], -1, strips.shape[3], -1, -1, -1)], dim=4)
    strip_length = static_size(strips.shape[4]) * chunk_size
    return windows(strips.flatten(3, 5).flatten(0, 2), 1, 3 * strip_length, strip_length)


def _copied_windows(lines: Tensor, extra: Tensor | None) -> Tensor:
    """:func:`_viewed_windows` by one copy, of whole rows of w tokens, which lie together in memory as they are."""
    heads, chunk_size = static_size(lines.shape[1]), static_size(lines.shape[4])
    columns, device = lines.shape[3], lines.device
    rows, cols = lines.shape[2] // chunk_size - 2, columns - 2
    row = torch.arange(rows, device=device)[:, None] * chunk_size + torch.arange(3 * chunk_size, device=device)
    col = torch.arange(cols, device=device)[:, None] + torch.arange(3, device=device)
    # (rows, cols, 3, 3w)
    index = row[:, None, None] * columns + col[:, :, None]
    lines = lines.flatten(2, 3)
    if extra is not None:
        # With sizes of -1 OpenVINO 2026.4 returns uninitialised memory.
        num_extra = static_size(extra.shape[2])
        positions = lines.shape[2] + torch.arange(num_extra, device=device)
        index = torch.cat([index, positions.expand(rows, cols, 3, num_extra)], dim=3)
        lines = torch.cat([lines, extra], dim=2)
    strip = static_size(index.shape[3])
    index = torch.arange(heads, device=device)[:, None, None, None] * lines.shape[2] + index[:, None]
    windows = lines.flatten(3).flatten(1, 2).index_select(1, index.flatten())
    # (B, rows, M, cols, lines, w, E)
    windows = windows.unflatten(2, (chunk_size, -1)).unflatten(1, (rows, heads, cols, 3 * strip))
    return windows.flatten(4, 5).flatten(0, 2)


def _window_bias(inputs: WindowInputs, chunk_size: int) -> Tensor | None:
    """Return the bias that all chunks share, (M or 1, w * w, S or more), in the order of :func:`_windows`."""
    if inputs.local_bias is None and inputs.global_key is None:
        return None
    bias, to_global = both_biases(inputs, chunk_size)
    # (M, w * w, 3 strips, 3w * w)
    bias = bias.unflatten(2, (3 * chunk_size, 3, chunk_size)).transpose(2, 3).flatten(3, 4)
    if inputs.global_key is None:
        return aligned_bias([bias.flatten(2, 3)])
    heads, positions, num_global = inputs.query.shape[1], chunk_size**2, static_size(to_global.shape[1])
    # The global tokens are in every strip, filled up to whole rows; only the middle copy is unmasked.
    left, middle, right = bias.expand(heads, -1, -1, -1).unbind(2)
    to_global = to_global[:, None].expand(heads, positions, -1)
    hidden, fill = bias.new_full((1, 1, 1), float("-inf")), padding_to_multiple(num_global, chunk_size)
    filling, unseen = (hidden.expand(heads, positions, number) for number in (fill, num_global + fill))
    return aligned_bias([left, unseen, middle, to_global, *([filling] if fill else []), right, unseen])


# Steps of chunks, down and to the right, to a neighbour: of random-shift training.
SHIFTS = tuple((row, col) for row in (-1, 0, 1) for col in (-1, 0, 1) if (row, col) != (0, 0))


def auto_chunk_attention(**arguments: Tensor | int | str | tuple[int, int] | None) -> Tensor:
    """:func:`sliding_chunk_attention`, with a line of the log about Triton's kernel if the device may run it."""
    suggest_triton(arguments["query"])
    return BACKENDS["sdpa"](**arguments)


def checked_chunk_attention(
    *, chunk_size: int, mode: str = "zero_pad", shift: tuple[int, int] | None = None, **tensors: Tensor | None
) -> Tensor:
    """:func:`.triton_chunk_attention`, or :func:`sliding_chunk_attention` if the check excludes Triton's kernel."""
    options = {"chunk_size": chunk_size, "mode": mode, "shift": shift}
    is_right = triton_or_sdpa(tensors, **options) == "triton"
    return (triton_chunk_attention if is_right else sliding_chunk_attention)(**tensors, **options)


BACKENDS = {
    "auto": auto_chunk_attention,
    "sdpa": sliding_chunk_attention,
    "triton": checked_chunk_attention,
    "flex": flex_chunk_attention,
    "reference": reference.sliding_chunk_attention,
}


class SlidingChunkAttention(TokenAttention):
    """Multi-head ViL attention over the tokens of a feature map and its global tokens (ViL section 3.2).

    Args:
        chunk_size: side w of a chunk; the paper's window of 15 is w = 7.
        mode: see :func:`sliding_chunk_attention`.
        relative_bias: whether each offset in the window has a learned bias.
        shared_projections: whether local and global tokens share query, key, value and output projections.
        common: see :class:`.TokenAttention`. A backend is a key of ``BACKENDS``: ``"auto"`` is ``"sdpa"``, ``"triton"``
            and ``"flex"`` are for CUDA, and ``"reference"`` is quadratic and for debugging.

    Raises:
        ConfigError: for an unknown mode or backend.
    """

    backends = BACKENDS
    has_qkv = False
    no_weight_decay_names = ("local_to_global", "global_to_local", "global_to_global")

    def __init__(
        self,
        dim: int,
        *,
        chunk_size: int,
        mode: str = "zero_pad",
        relative_bias: bool = False,
        shared_projections: bool = True,
        **common: int | bool | str,
    ) -> None:
        check_choice("attention mode", mode, MODES)
        super().__init__(dim, **common)
        num_heads, num_global_tokens = self.num_heads, self.num_global_tokens
        self.chunk_size = chunk_size
        self.mode = mode
        # The one neighbouring chunk that is seen in training; None for all of them.
        self.shift: tuple[int, int] | None = None
        self.shared_projections = shared_projections
        if self.update_globals and not shared_projections:
            self.global_query = nn.Linear(dim, dim)
            self.global_key_value = nn.Linear(dim, 2 * dim)
            self.global_proj = nn.Linear(dim, dim)

        self.relative_bias = WindowRelativeBias(chunk_size, num_heads) if relative_bias else None
        self.local_to_global = self.global_to_local = self.global_to_global = None
        if relative_bias and num_global_tokens:
            self.local_to_global = position_parameter(num_heads, num_global_tokens)
        if relative_bias and self.update_globals:
            self.global_to_local = position_parameter(num_heads, num_global_tokens)
            self.global_to_global = position_parameter(num_heads, num_global_tokens, num_global_tokens)

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """(B, G + H * W, C), global tokens first, and (H, W) -> the same, or (B, H * W, C) without updated globals."""
        num_global, shared = self.num_global_tokens, self.shared_projections
        global_tokens, local_tokens = split_globals(tokens, num_global)
        queries_together = self.update_globals and shared
        query = split_heads(self.query(tokens if queries_together else local_tokens), self.num_heads)
        global_query, query = split_globals(query, num_global if queries_together else 0, dim=2)
        keys_values = split_heads(self.key_value(tokens), 2 * self.num_heads)
        global_key = global_value = None
        global_keys_values, local_keys_values = split_globals(keys_values, num_global, dim=2)
        if num_global:
            global_key, global_value = global_keys_values.chunk(2, dim=1)
        key, value = local_keys_values.unflatten(2, size).chunk(2, dim=1)
        # Neither can be traced or exported.
        attend = self.backends["sdpa" if self.backend in ("triton", "flex") and is_tracing() else self.backend]
        output = attend(
            query=query.unflatten(2, size),
            key=key,
            value=value,
            chunk_size=self.chunk_size,
            mode=self.mode,
            global_key=global_key,
            global_value=global_value,
            local_bias=None if self.relative_bias is None else self.relative_bias(),
            global_bias=self.local_to_global,
            shift=self.shift if self.training else None,
        )
        output = merge_heads(output).flatten(1, 2)
        if not self.update_globals:
            return self.proj(output)

        if not shared:
            global_query = split_heads(self.global_query(global_tokens), self.num_heads)
            keys_values = split_heads(self.global_key_value(tokens), 2 * self.num_heads)
        bias = None
        if self.global_to_global is not None:
            local = self.global_to_local[:, :, None].expand(-1, -1, local_tokens.shape[1])
            bias = torch.cat([self.global_to_global, local], dim=2)
        update = merge_heads(dense_attention(global_query, *keys_values.chunk(2, dim=1), bias=bias))
        if shared:
            return self.proj(torch.cat([update, output], dim=1))
        return torch.cat([self.global_proj(update), self.proj(output)], dim=1)


def sample_shifts(model: nn.Module, *, seed: int | None) -> int:
    """Sample the one neighbouring chunk that each :class:`SlidingChunkAttention` in ``model`` sees in training.

    The same seed gives the same chunks in every process. Evaluation sees all chunks at any time.

    Args:
        seed: None for all chunks in training too.

    Returns:
        How many modules there are.
    """
    modules = [module for module in model.modules() if isinstance(module, SlidingChunkAttention)]
    shifts = [None] * len(modules)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        shifts = [SHIFTS[index] for index in torch.randint(len(SHIFTS), (len(modules),), generator=generator).tolist()]
    for module, shift in zip(modules, shifts, strict=True):
        module.shift = shift
    return len(modules)
