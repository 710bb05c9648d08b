"""Dense definitions of the attention of both models on sequences: quadratic, and easy to check by reading.

The fast functions are tested against these. Shapes: B sequences, M heads, N tokens, D channels per head.
"""

import torch
from torch import Tensor

from backbones.attention.reference import attention


def sequence_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window_size: int,
    mask: Tensor | None = None,
    shared_key: Tensor | None = None,
    shared_value: Tensor | None = None,
) -> Tensor:
    """Compute :func:`research.sequence.encoder.sequence_attention` from all N x N pairs."""
    tokens = query.shape[2]
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    if window_size:
        position = torch.arange(tokens)
        # Keys by their position in the window around the segment of each query
        slot = position - (position // window_size * window_size)[:, None] + max(window_size // 2, 1)
        seen = (slot >= 0) & (slot < window_size + 2 * max(window_size // 2, 1))
    seen = seen.to(query.device)[None, None]
    if mask is not None:
        # Padding must attend to a key, or its output would be NaN. Its output is masked below.
        seen = (seen & mask[:, None, None, :]) | ~mask[:, None, :, None]
    bias = query.new_zeros(seen.shape).masked_fill(~seen, float("-inf"))
    if shared_key is not None:
        bias = torch.cat([bias.new_zeros(*bias.shape[:-1], shared_key.shape[2]), bias], dim=-1)
        key, value = torch.cat([shared_key, key], dim=2), torch.cat([shared_value, value], dim=2)
    output = attention(query, key, value, bias=bias)
    return output if mask is None else output * mask[:, None, :, None]


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window_size: int,
    segment_length: int,
    rank: int,
    projected_key: Tensor,
    projected_value: Tensor,
    key_bias: Tensor,
    query_bias: Tensor,
    window_positions: Tensor,
    segment_positions: Tensor,
) -> Tensor:
    """Compute :func:`research.sequence.char_lm.causal_attention` from all pairs of queries and keys.

    The scaled product of each pair has a bias, which is -inf for hidden keys.
    """
    scaled = query * query.shape[-1] ** -0.5
    token = torch.arange(query.shape[2], device=query.device)[:, None]

    # Tokens: window_size of them come before the block.
    distance = token + window_size - torch.arange(key.shape[2], device=query.device)
    position = (window_size - 1 - distance).clamp(0, window_size - 1)
    query_bias, key_bias = query_bias[:, None, :], key_bias[:, None, :]
    token_bias = torch.einsum("bmtd,mtsd->bmts", scaled + query_bias, window_positions[:, position])
    token_bias = token_bias + (key * key_bias).sum(-1)[:, :, None, :]
    token_bias = token_bias.masked_fill((distance < 0) | (distance >= window_size), float("-inf"))

    # Sums of the memory, and of all segments of the block except the last one.
    vectors, segments = projected_key.shape[2], -(-query.shape[2] // segment_length)
    in_memory = vectors - (segments - 1) * rank
    back = in_memory + token // segment_length * rank - 1 - torch.arange(vectors, device=query.device)
    position = (segment_positions.shape[1] - 1 - back).clamp(0, segment_positions.shape[1] - 1)
    sum_bias = torch.einsum("bmtd,mtsd->bmts", scaled, segment_positions[:, position])
    sum_bias = sum_bias.masked_fill(back < 0, float("-inf"))

    key, value = torch.cat([projected_key, key], dim=2), torch.cat([projected_value, value], dim=2)
    return attention(query, key, value, bias=torch.cat([sum_bias, token_bias], dim=3))
