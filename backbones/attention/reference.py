"""Dense definitions of the attention mechanisms: quadratic, and meant to be obviously right.

Every fast kernel is tested against these. Shapes, here and in the kernels: B images, M heads, H x W tokens of a feature
map, N = H * W, D channels per head, G global tokens, w the side of a chunk.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention with an explicit softmax.

    Args:
        query: (B, M, L, D). key, value: (B, M, S, D).
        bias: broadcast to (B, M, L, S) and added to the scaled products; -inf forbids a pair.

    Returns:
        (B, M, L, D)
    """
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    return scores.softmax(dim=-1) @ value


def _axis_neighbourhood(size: int, chunk_size: int, mode: str) -> tuple[Tensor, Tensor]:
    """Return which keys a query sees along one axis, and where: both (size, size), indexed [query, key].

    The second result is the key's position in the three chunks around the query's own, 0 to 3w - 1; its value
    for keys that are not seen is undefined.
    """
    position = torch.arange(size)
    chunk = position // chunk_size
    num_chunks = -(-size // chunk_size)
    step = chunk[None, :] - chunk[:, None]
    if mode == "cyclic" and num_chunks >= 3:
        step = (step + 1) % num_chunks - 1
    seen = step.abs() <= 1
    if mode == "exact":
        seen = (position[None, :] - position[:, None]).abs() <= chunk_size
    slot = (step + 1) * chunk_size + (position % chunk_size)[None, :]
    return seen, slot.clamp(0, 3 * chunk_size - 1)


def _window_bias(
    query: Tensor, rows: tuple[Tensor, Tensor], cols: tuple[Tensor, Tensor], chunk_size: int, local_bias: Tensor | None
) -> Tensor:
    """The bias of all pairs of tokens, (M, N, N): -inf for a key that is not seen.

    Args:
        rows, cols: along each axis which keys a query sees, and where in its window.
        local_bias: (M, w * w, L * L), positions in a chunk by positions in its window of L x L, row by row, or None.
    """
    heads, height, width = query.shape[1:4]
    tokens = height * width
    seen = (rows[0][:, None, :, None] & cols[0][None, :, None, :]).reshape(tokens, tokens)
    bias = query.new_zeros(heads, tokens, tokens)
    if local_bias is not None:
        slot = rows[1][:, None, :, None] * math.isqrt(local_bias.shape[2]) + cols[1][None, :, None, :]
        row, col = torch.arange(height) % chunk_size, torch.arange(width) % chunk_size
        position = (row[:, None] * chunk_size + col[None, :]).reshape(tokens, 1)
        bias = local_bias[:, position, slot.reshape(tokens, tokens)]
    return bias.masked_fill(~seen.to(query.device), float("-inf"))


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
    """The contract of :func:`backbones.attention.sliding_chunk.sliding_chunk_attention`, with all N x N pairs."""
    height, width = query.shape[2:4]
    rows, cols = (_axis_neighbourhood(size, chunk_size, mode) for size in (height, width))
    bias = _window_bias(query, rows, cols, chunk_size, local_bias)
    if shift is not None:
        row_step, col_step = rows[1] // chunk_size - 1, cols[1] // chunk_size - 1
        own, neighbour = (
            (row_step == row)[:, None, :, None] & (col_step == col)[None, :, None, :] for row, col in ((0, 0), shift)
        )
        bias = bias.masked_fill(~(own | neighbour).reshape(bias.shape[1:]).to(query.device), float("-inf"))

    key, value = key.flatten(2, 3), value.flatten(2, 3)
    if global_key is not None:
        if global_bias is None:
            global_bias = query.new_zeros(query.shape[1], global_key.shape[2])
        bias = torch.cat([global_bias[:, None, :].expand(-1, bias.shape[1], -1), bias], dim=-1)
        key, value = torch.cat([global_key, key], dim=2), torch.cat([global_value, value], dim=2)
    return attention(query.flatten(2, 3), key, value, bias=bias).unflatten(2, (height, width))


def performer_attention(query: Tensor, key: Tensor, value: Tensor, *, features: Tensor, eps: float = 1e-4) -> Tensor:
    """The contract of :func:`backbones.attention.efficient.performer_attention`, with all pairs of tokens.

    The weight of a pair is the mean over the features of the product of both tokens' positive features: for a token x
    scaled by ``D ** -0.25`` they are ``exp(feature . x - largest - |x|^2 / 2) + eps``, the largest product being a
    query's own, and one for all keys of an image.
    """
    query, key = (x * x.shape[-1] ** -0.25 for x in (query, key))
    query_products = torch.einsum("bmld,kd->bmlk", query, features)
    key_products = torch.einsum("bmsd,kd->bmsk", key, features)
    query_largest = query_products.max(dim=-1).values[..., None]
    key_largest = key_products.flatten(1).max(dim=-1).values[:, None, None, None]
    query = torch.exp(query_products - query_largest - 0.5 * (query * query).sum(-1, keepdim=True)) + eps
    key = torch.exp(key_products - key_largest - 0.5 * (key * key).sum(-1, keepdim=True)) + eps
    weights = torch.einsum("bmlk,bmsk->bmls", query, key)
    return weights / weights.sum(dim=-1, keepdim=True) @ value


def _axis_segments(size: int, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Return which keys a query sees along one axis, and where: both (size, size), indexed [query, key].

    The second result is the key's position in the window of w + 2 * side; its value for keys that are not seen is
    undefined.
    """
    side = max(chunk_size // 2, 1)
    length = chunk_size + 2 * side
    position = torch.arange(size)
    first = position // chunk_size * chunk_size - side
    slot = position[None, :] - first[:, None]
    return (slot >= 0) & (slot < length), slot.clamp(0, length - 1)


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
    """The contract of :func:`backbones.attention.long_short.long_short_attention`, with all N x N pairs."""
    height, width = query.shape[2:4]
    rows, cols = (_axis_segments(size, chunk_size) for size in (height, width))
    bias = _window_bias(query, rows, cols, chunk_size, local_bias)

    key, value = (torch.cat([x, y.flatten(2, 3)], dim=2) for x, y in ((projected_key, key), (projected_value, value)))
    # Projected keys come first, without bias.
    bias = F.pad(bias, (key.shape[2] - bias.shape[2], 0))
    return attention(query.flatten(2, 3), key, value, bias=bias).unflatten(2, (height, width))
