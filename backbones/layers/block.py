"""The transformer block of all families, and its feed-forward part."""

import torch.nn.functional as F
from timm.layers import drop_path
from torch import Tensor, nn


class Mlp(nn.Module):
    """Two linear layers with a GELU between them, applied to each token: (..., C) -> (..., C).

    Args:
        dim: C.
        hidden_dim: channels between the layers.
        dropout: rate after the GELU and after the second layer, in training.
    """

    def __init__(self, dim: int, *, hidden_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.expand = nn.Linear(dim, hidden_dim)
        self.contract = nn.Linear(hidden_dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.gelu(self.expand(tokens))
        if not self.dropout:
            # A trace would record it.
            return self.contract(hidden)
        return F.dropout(self.contract(F.dropout(hidden, self.dropout, self.training)), self.dropout, self.training)


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and with a skip connection (ViL section 3.1, equations 2 and 3).

    Args:
        dim: channels of a token.
        attention: (B, H, W, C) and (B, G, C) or None -> the same; None for only the MLP (LIT section 3.2).
        expansion: ratio of the MLP's inner channels to ``dim``.
        norm_eps: epsilon of the norms.
        drop_path_rate: rate of stochastic depth.
    """

    def __init__(
        self,
        dim: int,
        attention: nn.Module | None,
        *,
        expansion: int = 4,
        norm_eps: float = 1e-6,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim, eps=norm_eps) if attention is not None else None
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, hidden_dim=expansion * dim)
        self.drop_path_rate = drop_path_rate

    def forward(self, tokens: Tensor, global_tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(B, H, W, C) and (B, G, C) or None -> the same; None for global tokens that this block does not update."""
        # One sample for each image and path, for local and global tokens together.
        if self.attention is not None:
            keep = self._sample_keep(tokens)
            normed_globals = None if global_tokens is None else self.attention_norm(global_tokens)
            update, global_update = self.attention(self.attention_norm(tokens), normed_globals)
            tokens = tokens + _scaled(update, keep)
            global_tokens = None if global_update is None else global_tokens + _scaled(global_update, keep)
        keep = self._sample_keep(tokens)
        tokens = tokens + _scaled(self.mlp(self.mlp_norm(tokens)), keep)
        if global_tokens is not None:
            global_tokens = global_tokens + _scaled(self.mlp(self.mlp_norm(global_tokens)), keep)
        return tokens, global_tokens

    def _sample_keep(self, tokens: Tensor) -> Tensor | None:
        """The factor of each image's residual path, (B,), or None for all ones."""
        if not self.training or self.drop_path_rate == 0:
            return None
        return drop_path(tokens.new_ones(tokens.shape[0]), self.drop_path_rate, training=True)


def _scaled(update: Tensor, factor: Tensor | None) -> Tensor:
    """``update`` (B, ...) times ``factor`` (B,)."""
    return update if factor is None else update * factor.view(-1, *[1] * (update.ndim - 1))
