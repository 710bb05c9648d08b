"""Dense definitions of the attention mechanisms. They are quadratic, and simple enough to be checked by reading.

Every fast kernel is tested against these functions.

Shapes: B images, M heads, H x W tokens of a feature map, N = H * W, D channels per head, G global tokens, w the side of
a chunk.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Return scaled dot-product attention with an explicit softmax.

    Args:
        query: (B, M, L, D).
        key: (B, M, S, D).
        value: (B, M, S, D).
        bias: Broadcast to (B, M, L, S) and added to the scaled products. -inf masks a pair.

    Returns:
        (B, M, L, D)
    """
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    return scores.softmax(dim=-1) @ value


def map_attention(
    query: Tensor, key: Tensor, value: Tensor, local_bias: Tensor, global_bias: Tensor | None = None
) -> Tensor:
    """Return the result of :func:`.triton_dense.triton_map_attention`, from all pairs of tokens."""
    heads, height, width = query.shape[1:4]
    token = torch.arange(height * width, device=query.device)
    row, col = token // width, token % width
    bias = local_bias[:, row[:, None] - row + height - 1, col[:, None] - col + width - 1]
    if global_bias is None:
        global_bias = bias.new_zeros(heads, key.shape[2] - height * width)
    bias = torch.cat([global_bias[:, None].expand(-1, height * width, -1), bias], dim=2)
    return attention(query.flatten(2, 3), key, value, bias=bias)


def _axis_neighborhood(size: int, chunk_size: int, mode: str) -> tuple[Tensor, Tensor]:
    """Return which keys a query attends to along one axis, and their slots: both (size, size), [query, key].

    A slot is the position in the three chunks around the query, 0 to 3w - 1. It is undefined for hidden keys.
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
    """Return the bias (M, N, N) of all pairs of tokens, with -inf for hidden keys.

    Args:
        query: (B, M, H, W, D).
        rows: Which keys a query attends to along the height, and their slots in the window.
        cols: The same along the width.
        chunk_size: Side w of a chunk.
        local_bias: (M, w * w, L * L), positions in a chunk by slots in its L x L window, row by row, or None.
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
    """Return the result of :func:`.sliding_chunk.sliding_chunk_attention`, from all N x N pairs."""
    height, width = query.shape[2:4]
    rows, cols = (_axis_neighborhood(size, chunk_size, mode) for size in (height, width))
    bias = _window_bias(query, rows, cols, chunk_size, local_bias)
    if shift is not None:
        row_step, col_step = rows[1] // chunk_size - 1, cols[1] // chunk_size - 1
        own, neighbor = (
            (row_step == row)[:, None, :, None] & (col_step == col)[None, :, None, :] for row, col in ((0, 0), shift)
        )
        bias = bias.masked_fill(~(own | neighbor).reshape(bias.shape[1:]).to(query.device), float("-inf"))

    key, value = key.flatten(2, 3), value.flatten(2, 3)
    if global_key is not None:
        if global_bias is None:
            global_bias = query.new_zeros(query.shape[1], global_key.shape[2])
        bias = torch.cat([global_bias[:, None, :].expand(-1, bias.shape[1], -1), bias], dim=-1)
        key, value = torch.cat([global_key, key], dim=2), torch.cat([global_value, value], dim=2)
    return attention(query.flatten(2, 3), key, value, bias=bias).unflatten(2, (height, width))


def performer_attention(query: Tensor, key: Tensor, value: Tensor, *, features: Tensor, eps: float = 1e-4) -> Tensor:
    """Return the result of :func:`.efficient.performer_attention`, from all pairs of tokens.

    The weight of a pair is the mean product of the positive features of both tokens. The features of a token x, scaled
    by ``D ** -0.25``, are ``exp(feature . x - largest - |x|^2 / 2) + eps``. Each query has its own largest product. All
    keys of an image share one.
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
    """Return which keys a query attends to along one axis, and their slots: both (size, size), [query, key].

    A slot is the position in the window of w + 2 * side. It is undefined for hidden keys.
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
    """Return the result of :func:`.long_short.long_short_attention`, from all N x N pairs."""
    height, width = query.shape[2:4]
    rows, cols = (_axis_segments(size, chunk_size) for size in (height, width))
    bias = _window_bias(query, rows, cols, chunk_size, local_bias)

    key, value = (torch.cat([x, y.flatten(2, 3)], dim=2) for x, y in ((projected_key, key), (projected_value, value)))
    # Projected keys come first and have no bias.
    bias = F.pad(bias, (key.shape[2] - bias.shape[2], 0))
    return attention(query.flatten(2, 3), key, value, bias=bias).unflatten(2, (height, width))


def window_attention(query: Tensor, key: Tensor, value: Tensor, *, window_size: int) -> Tensor:
    """Return the result of :func:`.hilo.window_attention`, from all N x N pairs."""
    height, width = query.shape[2:4]
    token = torch.arange(height * width, device=query.device)
    row, col = token // width // window_size, token % width // window_size
    same = (row[:, None] == row) & (col[:, None] == col)
    bias = torch.zeros_like(same, dtype=query.dtype).masked_fill(~same, float("-inf"))
    return attention(*(x.flatten(2, 3) for x in (query, key, value)), bias=bias).unflatten(2, (height, width))
