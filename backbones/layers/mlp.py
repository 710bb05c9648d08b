"""The feed-forward part of a transformer block."""

import torch.nn.functional as F
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
        hidden = F.dropout(F.gelu(self.expand(tokens)), self.dropout, self.training)
        return F.dropout(self.contract(hidden), self.dropout, self.training)
