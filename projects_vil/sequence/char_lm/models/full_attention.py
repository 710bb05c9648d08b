"""The model to compare with: full causal attention over the memory and the part, as in Transformer-XL.

All but the attention is as in the official Transformer-LS: a layer norms its input, and what it adds is added to the
normed input; the embedding is also the output's matrix. Positions are rotations of queries and keys by their place in
memory and part, so that only differences of places count; Transformer-XL's own have a bias of each pair of places
instead, which is a matrix of the size that fused attention avoids.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.execution.precision import at_least_float32

_ROTATION_BASE = 10_000.0


def rotate(x: Tensor, first: int) -> Tensor:
    """Turn pairs of channels by angles that grow with the place: (B, M, N, D), places ``first`` and on -> the same."""
    half = x.shape[-1] // 2
    frequencies = _ROTATION_BASE ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    places = torch.arange(first, first + x.shape[-2], device=x.device, dtype=torch.float32)
    angles = places[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half : 2 * half]
    turned = torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)
    return torch.cat([turned, x[..., 2 * half :]], dim=-1)


class FullAttention(nn.Module):
    """Multi-head attention of a part's N tokens over themselves, no later one, and L tokens of memory."""

    def __init__(self, dim: int, *, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.projection = nn.Linear(dim, dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, past: Tensor) -> Tensor:
        """(B, N, C) and (B, L, C), L of 0 or more -> (B, N, C)"""
        num_past, number = past.shape[1], tokens.shape[1]
        key, value = self.key_value(torch.cat([past, tokens], dim=1)).chunk(2, dim=-1)
        query, key, value = (
            x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (self.query(tokens), key, value)
        )
        query, key = rotate(query, num_past), rotate(key, 0)
        if num_past:
            seen = tokens.new_ones((number, num_past + number), dtype=torch.bool).tril(num_past)
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        else:
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dropout(self.projection(output.transpose(1, 2).flatten(2)))


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm, which the shortcut takes in too."""

    def __init__(self, dim: int, *, num_heads: int, hidden_dim: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = FullAttention(dim, num_heads=num_heads, dropout=dropout)
        self.mlp_norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, hidden_dim)
        self.contract = nn.Linear(hidden_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, past: Tensor) -> Tensor:
        """(B, N, C) and (B, L, C) -> (B, N, C)"""
        tokens = self.attention_norm(tokens)
        tokens = self.mlp_norm(tokens + self.attention(tokens, self.attention_norm(past)))
        hidden = self.dropout(F.gelu(self.expand(tokens)))
        return tokens + self.dropout(self.contract(hidden))


class FullAttentionLM(nn.Module):
    """Ids (B, N) and the memory of the parts before -> log-probabilities (B, N, vocab_size) and the next memory.

    Args:
        vocab_size: ids are below it.
        dim: channels of a token.
        num_heads: divides ``dim``.
        hidden_dim: channels inside the MLPs.
        depth: layers.
        memory_length: most tokens before a part that it sees.
        dropout: rate after the embedding, the attention and in the MLPs, and before the output.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        num_heads: int,
        hidden_dim: int,
        depth: int,
        memory_length: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.memory_length = memory_length
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(
            Layer(dim, num_heads=num_heads, hidden_dim=hidden_dim, dropout=dropout) for _ in range(depth)
        )
        self.output_bias = nn.Parameter(torch.zeros(vocab_size))
        self.dropout = nn.Dropout(dropout)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for layer in self.layers:
            # Queries, keys and values of variance 1: the long-short model's norms give its keys and values that, and
            # without it a narrow model learns for hundreds of steps as if it had no attention.
            for projection in (layer.attention.query, layer.attention.key_value):
                nn.init.normal_(projection.weight, std=dim**-0.5)

    def forward(self, ids: Tensor, memory: Sequence[Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The memory has each layer's input, (B, L, C), without gradients; None at the start of a text."""
        tokens = self.dropout(self.embedding(ids) * self.embedding.embedding_dim**0.5)
        kept = []
        for index, layer in enumerate(self.layers):
            past = tokens[:, :0].detach() if memory is None else memory[index]
            kept.append(torch.cat([past, tokens.detach()], dim=1)[:, -self.memory_length :])
            tokens = layer(tokens, past)
        logits = F.linear(self.dropout(tokens), self.embedding.weight, self.output_bias)
        return at_least_float32(logits).log_softmax(dim=-1), tuple(kept)
