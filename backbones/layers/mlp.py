"""The feed-forward part of a transformer block."""

import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    """Two linear layers with a GELU between them, applied to each token: (..., C) -> (..., C).

    Args:
        dim: C.
        expansion: channels between the layers, in multiples of ``dim``.
        hidden_dim: the same in channels; None for ``expansion``.
        dropout: rate after the GELU and after the second layer, in training.
    """

    def __init__(self, dim: int, *, expansion: int = 4, hidden_dim: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        hidden_dim = expansion * dim if hidden_dim is None else hidden_dim
        self.dropout = dropout
        self.expand = nn.Linear(dim, hidden_dim)
        self.contract = nn.Linear(hidden_dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.gelu(self.expand(tokens))
        if not self.dropout:
            return self.contract(hidden)
        return F.dropout(self.contract(F.dropout(hidden, self.dropout, self.training)), self.dropout, self.training)
