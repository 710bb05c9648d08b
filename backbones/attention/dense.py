"""Full attention: every token sees every token (ViL section 3.3, ``a = full``), with or without relative bias."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.position import GridRelativeBias


def dense_attention(query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention over all keys.

    Args:
        query: (B, M, L, D). key, value: (B, M, S, D).
        bias: broadcast to (B, M, L, S) and added to the scaled products.

    Returns:
        (B, M, L, D)
    """
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def split_heads(tokens: Tensor, num_heads: int) -> Tensor:
    """(B, ..., M * D) -> (B, M, ..., D), a view."""
    return tokens.unflatten(-1, (num_heads, -1)).movedim(-2, 1)


def merge_heads(tokens: Tensor) -> Tensor:
    """(B, M, ..., D) -> (B, ..., M * D)."""
    return tokens.movedim(1, -2).flatten(-2)


class DenseAttention(nn.Module):
    """Multi-head self-attention over the tokens of a map and the global tokens together.

    Args:
        dim: channels of a token.
        num_heads: divides ``dim``.
        num_global_tokens: G; their bias is learned apart from that of the map where ``bias_size`` is given.
        bias_size: height and width, in tokens, of the map that the relative bias table is made for; for a map of
            another size the table is resized (bilinear). None for no relative bias.
        update_globals: whether the global tokens are queries too; the last block of a stage drops them.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        num_global_tokens: int = 1,
        bias_size: tuple[int, int] | None = None,
        update_globals: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.shared_projections = True
        self.update_globals = update_globals and num_global_tokens > 0
        self.qkv = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim)
        self.relative_bias = None
        if bias_size is not None:
            self.relative_bias = GridRelativeBias(
                bias_size, num_heads, num_global_tokens=num_global_tokens, global_queries=self.update_globals
            )

    def forward(self, tokens: Tensor, global_tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(B, H, W, C) and (B, G, C) or None -> the same; None for global tokens that are not updated."""
        height, width = tokens.shape[1:3]
        # (B, G + H * W, C)
        sequence, num_global = tokens.flatten(1, 2), 0
        if global_tokens is not None:
            sequence, num_global = torch.cat([global_tokens, sequence], dim=1), global_tokens.shape[1]
        query, key, value = split_heads(self.qkv(sequence), 3 * self.num_heads).chunk(3, dim=1)
        bias = None if self.relative_bias is None else self.relative_bias(height, width)
        if not self.update_globals:
            query = query[:, :, num_global:]
        output = self.projection(merge_heads(dense_attention(query, key, value, bias=bias)))
        if not self.update_globals:
            return output.unflatten(1, (height, width)), None
        return output[:, num_global:].unflatten(1, (height, width)), output[:, :num_global]
