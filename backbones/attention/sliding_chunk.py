"""Vision Longformer attention (ViL section 3.2, appendix C): a local 2-D window and global tokens.

The feature map is cut into chunks of w x w tokens. A token attends to its own chunk, the eight chunks around it and the
global tokens. The global tokens attend to all tokens. Memory is linear in the number of tokens.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.attention import chunks, cpu_blocks, dense, reference
from backbones.attention.triton_check import resolve_backend
from backbones.attention.triton_chunks import triton_chunk_attention
from backbones.errors import check_choice
from backbones.layers.position import WindowRelativeBias, global_query_bias, position_parameter
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
    """Return the attention of the local tokens to their windows and to the global tokens.

    Shapes: B images, M heads, H x W tokens, D channels per head, G global tokens.

    Args:
        query: (B, M, H, W, D), with any H and W.
        key: (B, M, H, W, D).
        value: (B, M, H, W, D).
        chunk_size: Side w of a chunk.
        mode: One of ``MODES``. With ``"zero_pad"``, chunks at the border have fewer neighbors. With ``"exact"``, a
            token attends only to the (2w + 1) x (2w + 1) tokens around it. With ``"cyclic"``, a chunk at the border
            also attends to chunks at the opposite border, along an axis of three chunks or more. No mode attends to a
            key twice.
        global_key: (B, M, G, D), or None without global tokens.
        global_value: (B, M, G, D), or None.
        local_bias: (M, w * w, 9 * w * w), the bias of positions in a chunk by positions in its 3w x 3w neighborhood,
            row by row. None for no bias.
        global_bias: (M, G), the bias of local queries at global keys. With global tokens, give both biases or neither.
        shift: One of :data:`SHIFTS`, to attend only to the own chunk and this neighbor. None for all neighbors.

    Returns:
        (B, M, H, W, D)

    Source: ViL appendix C, "sliding chunk". Rows of chunks are copied three times into strips one chunk wide. Three
    strips side by side are then one contiguous run of keys, and windows over them overlap without further copies. An
    exported model copies each window.
    """
    inputs = chunks.WindowInputs(query, key, value, global_key, global_value, local_bias, global_bias)
    if shift is None and not is_tracing() and mode != "exact" and max(query.shape[2:4]) <= 2 * chunk_size:
        return _whole_map_attention(inputs, chunk_size)
    if mode == "exact":
        local_bias, _ = _biases_or_zeros(inputs, chunk_size)
        inputs = inputs._replace(local_bias=_hide_far_keys(local_bias, chunk_size))
    options = {"chunk_size": chunk_size, "shift": shift}
    attend = functools.partial(_attend, is_cyclic=mode == "cyclic", **options)
    if torch.is_grad_enabled() and mode != "cyclic" and cpu_blocks.is_needed(*inputs):
        return cpu_blocks.window_attention(attend, inputs, side=chunk_size, **options)
    return attend(inputs)


def _attend(
    inputs: chunks.WindowInputs,
    *,
    chunk_size: int,
    is_cyclic: bool,
    shift: tuple[int, int] | None,
    attention: Callable[..., Tensor] = dense.pytorch_attention,
) -> Tensor:
    """Return the attention of all chunks by one call of ``attention``. See :func:`.attend_chunks`."""
    query, global_key, global_value = inputs.query, inputs.global_key, inputs.global_value
    keys, values = chunks.with_halo(inputs.key, inputs.value, chunk_size, is_cyclic=is_cyclic)
    biases = None
    if inputs.local_bias is not None or (global_key if shift is None else inputs.global_bias) is not None:
        biases = _biases_or_zeros(inputs, chunk_size)
    if shift is None:
        # (B * rows * M, cols, S, D + extra), S keys of three strips
        keys, values = _windows(keys, chunk_size, global_key), _windows(values, chunk_size, global_value)
        bias = None if biases is None else _window_bias(*biases, query.shape[1], chunk_size)
    else:
        keys = _chunk_pairs(keys, chunk_size, shift, global_key)
        values = _chunk_pairs(values, chunk_size, shift, global_value)
        bias = None if biases is None else _bias_of_pairs(*biases, chunk_size, shift)
    return chunks.attend_chunks(attention, query, keys, values, bias, chunk_size)


def _biases_or_zeros(inputs: chunks.WindowInputs, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Return the local bias (M or 1, w * w, 9 * w * w) and the global one (M or 1, G), with zeros instead of None."""
    local_bias, global_bias, global_key = inputs.local_bias, inputs.global_bias, inputs.global_key
    if local_bias is None:
        local_bias = inputs.query.new_zeros(1, chunk_size**2, 9 * chunk_size**2)
    if global_bias is None:
        global_bias = local_bias.new_zeros(1, 0 if global_key is None else static_size(global_key.shape[2]))
    return local_bias, global_bias


def _chunk_pairs(x: Tensor, chunk_size: int, shift: tuple[int, int], global_tokens: Tensor | None) -> Tensor:
    """Return the S keys of each chunk, (B * rows * M, cols, S, E): its own, its neighbor's and the global tokens.

    Args:
        x: (B, M, (rows + 2) * w, (cols + 2) * w, E).
        chunk_size: Side w of a chunk.
        shift: Step to the neighbor, in chunks down and to the right.
        global_tokens: (B, M, G, D) with D <= E, or None.
    """
    height, width = (size - 2 * chunk_size for size in x.shape[2:4])
    parts = []
    for row, col in ((chunk_size, chunk_size), ((1 + shift[0]) * chunk_size, (1 + shift[1]) * chunk_size)):
        parts.append(chunks.to_chunks(x[:, :, row : row + height, col : col + width], chunk_size))
    if global_tokens is not None:
        extra = F.pad(global_tokens, (0, x.shape[4] - global_tokens.shape[3]))[:, None, :, None]
        parts.append(extra.expand(-1, height // chunk_size, -1, width // chunk_size, -1, -1).flatten(0, 2))
    return torch.cat(parts, dim=2)


def _bias_of_pairs(local_bias: Tensor, global_bias: Tensor, chunk_size: int, shift: tuple[int, int]) -> Tensor:
    """Return the bias (M or 1, w * w, S or more) that all chunks share, in the order of :func:`_chunk_pairs`."""
    table = local_bias.unflatten(2, (3, chunk_size, 3, chunk_size))
    parts = [table[:, :, 1 + row, :, 1 + col].flatten(2) for row, col in ((0, 0), shift)]
    parts.append(global_bias[:, None].expand(-1, chunk_size**2, -1))
    heads = max(len(local_bias), len(global_bias))
    return chunks.aligned_bias([part.expand(heads, -1, -1) for part in parts])


def _hide_far_keys(local_bias: Tensor, chunk_size: int) -> Tensor:
    """Return the local bias with -inf for keys that are further than w from a position."""
    inside = torch.arange(chunk_size, device=local_bias.device) + chunk_size
    around = torch.arange(3 * chunk_size, device=local_bias.device)
    near = (inside[:, None] - around[None, :]).abs() <= chunk_size
    seen = near[:, None, :, None] & near[None, :, None, :]
    return local_bias.masked_fill(~seen.reshape(local_bias.shape[1:]), float("-inf"))


def _whole_map_attention(inputs: chunks.WindowInputs, chunk_size: int) -> Tensor:
    """Return the attention on a feature map of at most two chunks per side, where every token attends to all tokens.

    Source: ViL section 3.2, "equivalent to full attention", as in the last two stages at 224 x 224.
    """
    query, key, value, global_key, global_value, local_bias, global_bias = inputs
    (height, width), bias = query.shape[2:4], None
    key, value = key.flatten(2, 3), value.flatten(2, 3)
    if local_bias is not None:
        rows, cols = -(-height // chunk_size), -(-width // chunk_size)
        # (M, w, w, 3, w, 3, w), then one of the first axes and two of the last for each row or column of chunks
        bias = local_bias.unflatten(2, (3, chunk_size, 3, chunk_size)).unflatten(1, (chunk_size, chunk_size))
        bias = torch.stack([bias[:, :, :, 1 - row : 1 - row + rows] for row in range(rows)], dim=1)
        bias = torch.stack([bias[..., 1 - col : 1 - col + cols, :] for col in range(cols)], dim=3)
        # (M, rows * w, cols * w, rows * w, cols * w) -> (M, H * W, H * W)
        bias = bias.flatten(7, 8).flatten(5, 6).flatten(3, 4).flatten(1, 2)
        bias = bias[:, :height, :width, :height, :width].flatten(3, 4).flatten(1, 2)
    if global_key is not None:
        if bias is not None:
            bias = torch.cat([global_bias[:, None].expand(-1, height * width, -1), bias], dim=2)
        key, value = torch.cat([global_key, key], dim=2), torch.cat([global_value, value], dim=2)
    return dense.dense_attention(query.flatten(2, 3), key, value, bias=bias).unflatten(2, (height, width))


def _windows(x: Tensor, chunk_size: int, global_tokens: Tensor | None) -> Tensor:
    """Return the S keys of each chunk, (B * rows * M, cols, S, E): an overlapping view of strips of chunks.

    The keys of a chunk are three strips. A strip has 3w rows of w tokens, followed by the global tokens, which are
    padded with zeros to whole rows.

    Args:
        x: (B, M, (rows + 2) * w, (cols + 2) * w, E).
        chunk_size: Side w of a chunk.
        global_tokens: (B, M, G, D) with D <= E, or None.
    """
    # (B, M, (rows + 2) * w, cols + 2, w, E), and the global tokens, (B, M, rows of w, w, E)
    lines, extra = x.unflatten(3, (-1, chunk_size)), None
    if global_tokens is not None:
        fill = (0, lines.shape[5] - global_tokens.shape[3], 0, padding_to_multiple(global_tokens.shape[2], chunk_size))
        extra = F.pad(global_tokens, fill).unflatten(2, (-1, chunk_size))
    if chunks.copies_windows():
        return _copied_windows(lines, extra)
    # (B, rows, M, cols + 2, 3w, w, E)
    strips = chunks.windows(lines, 2, 3 * chunk_size, chunk_size).permute(0, 2, 1, 4, 3, 5, 6)
    if extra is not None:
        extra = extra[:, None, :, None]
        strips = torch.cat([strips, extra.expand(-1, strips.shape[1], -1, strips.shape[3], -1, -1, -1)], dim=4)
    strip_length = static_size(strips.shape[4]) * chunk_size
    return chunks.windows(strips.flatten(3, 5).flatten(0, 2), 1, 3 * strip_length, strip_length)


def _copied_windows(lines: Tensor, extra: Tensor | None) -> Tensor:
    """Return the keys of :func:`_windows` as one copy of rows of w tokens, which are contiguous in memory.

    Args:
        lines: (B, M, (rows + 2) * w, cols + 2, w, E).
        extra: The global tokens (B, M, rows, w, E), or None.
    """
    heads, chunk_size = static_size(lines.shape[1]), static_size(lines.shape[4])
    columns, device = lines.shape[3], lines.device
    rows, cols = lines.shape[2] // chunk_size - 2, columns - 2
    row = torch.arange(rows, device=device)[:, None] * chunk_size + torch.arange(3 * chunk_size, device=device)
    col = torch.arange(cols, device=device)[:, None] + torch.arange(3, device=device)
    # (rows, cols, 3, 3w)
    index = row[:, None, None] * columns + col[:, :, None]
    lines = lines.flatten(2, 3)
    if extra is not None:
        # With sizes of -1, OpenVINO 2026.4 returns uninitialized memory.
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


def _window_bias(local_bias: Tensor, global_bias: Tensor, heads: int, chunk_size: int) -> Tensor:
    """Return the bias (M or 1, w * w, S or more) that all chunks share, in the order of :func:`_windows`."""
    # (M, w * w, 3 strips, 3w * w)
    bias = local_bias.unflatten(2, (3 * chunk_size, 3, chunk_size)).transpose(2, 3).flatten(3, 4)
    num_global, positions = static_size(global_bias.shape[1]), chunk_size**2
    if not num_global:
        return chunks.aligned_bias([bias.flatten(2, 3)])
    # Every strip has the global tokens, padded to whole rows. Only the middle copy is not masked.
    left, middle, right = bias.expand(heads, -1, -1, -1).unbind(2)
    global_bias = global_bias[:, None].expand(heads, positions, -1)
    fill = padding_to_multiple(num_global, chunk_size)
    hidden = bias.new_full((1, 1, 1), float("-inf")).expand(heads, positions, num_global + fill)
    filling = [hidden[..., :fill]] if fill else []
    return chunks.aligned_bias([left, hidden, middle, global_bias, *filling, right, hidden])


# Steps to the neighbors of a chunk, down and to the right, for random-shift training.
SHIFTS = tuple((row, col) for row in (-1, 0, 1) for col in (-1, 0, 1) if (row, col) != (0, 0))


BACKENDS = {
    "sdpa": sliding_chunk_attention,
    "triton": triton_chunk_attention,
    "reference": reference.sliding_chunk_attention,
}


class SlidingChunkAttention(dense.TokenAttention):
    """Multi-head ViL attention over the tokens of a feature map and its global tokens (ViL section 3.2).

    Args:
        dim: Channels of a token.
        chunk_size: Side w of a chunk. The paper's window of 15 is w = 7.
        mode: See :func:`sliding_chunk_attention`.
        relative_bias: Whether each offset in the window has a learned bias.
        shared_projections: Whether local and global tokens share the query, key, value and output projections.
        common: See :class:`.TokenAttention`. The backend is ``"auto"`` or a key of ``BACKENDS``: ``"sdpa"`` for
            PyTorch's attention, ``"triton"`` for CUDA, or ``"reference"``, which is quadratic, for debugging.
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
        super().__init__(dim, **common)
        check_choice("attention_mode", mode, chunks.MODES)
        num_heads, num_global_tokens = self.num_heads, self.num_global_tokens
        self.chunk_size = chunk_size
        self.mode = mode
        # The only neighboring chunk to attend to in training. None for all of them.
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
        """Return the updated tokens. See :meth:`.TokenAttention.forward`."""
        num_global, shared = self.num_global_tokens, self.shared_projections
        global_tokens, local_tokens = dense.split_globals(tokens, num_global)
        queries_together = self.update_globals and shared
        query = dense.split_heads(self.query(tokens if queries_together else local_tokens), self.num_heads)
        global_query, query = dense.split_globals(query, num_global if queries_together else 0, dim=2)
        keys_values = dense.split_heads(self.key_value(tokens), 2 * self.num_heads)
        global_key = global_value = None
        global_keys_values, local_keys_values = dense.split_globals(keys_values, num_global, dim=2)
        if num_global:
            global_key, global_value = global_keys_values.chunk(2, dim=1)
        key, value = local_keys_values.unflatten(2, size).chunk(2, dim=1)
        tensors = {
            "query": query.unflatten(2, size),
            "key": key,
            "value": value,
            "global_key": global_key,
            "global_value": global_value,
            "local_bias": None if self.relative_bias is None else self.relative_bias(),
            "global_bias": self.local_to_global,
        }
        shift = self.shift if self.training else None
        options = {"chunk_size": self.chunk_size, "mode": self.mode, "shift": shift}
        output = BACKENDS[resolve_backend(self.backend, tensors, **options)](**tensors, **options)
        output = dense.merge_heads(output).flatten(1, 2)
        if not self.update_globals:
            return self.proj(output)

        if not shared:
            global_query = dense.split_heads(self.global_query(global_tokens), self.num_heads)
            keys_values = dense.split_heads(self.global_key_value(tokens), 2 * self.num_heads)
        bias = None
        if self.global_to_global is not None:
            bias = global_query_bias(self.global_to_global, self.global_to_local, local_tokens.shape[1])
        update = dense.merge_heads(dense.global_query_attention(global_query, *keys_values.chunk(2, dim=1), bias=bias))
        if shared:
            return self.proj(torch.cat([update, output], dim=1))
        return torch.cat([self.global_proj(update), self.proj(output)], dim=1)


def sample_shifts(model: nn.Module, *, seed: int | None) -> int:
    """Sample the only neighboring chunk that each :class:`SlidingChunkAttention` in ``model`` attends to in training.

    The same seed gives the same chunks in every process. Evaluation always uses all chunks.

    Args:
        model: A model with any number of such modules.
        seed: Seed of the random numbers. None to use all chunks in training too.

    Returns:
        The number of modules.
    """
    modules = [module for module in model.modules() if isinstance(module, SlidingChunkAttention)]
    shifts = [None] * len(modules)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        shifts = [SHIFTS[index] for index in torch.randint(len(SHIFTS), (len(modules),), generator=generator).tolist()]
    for module, shift in zip(modules, shifts, strict=True):
        module.shift = shift
    return len(modules)
