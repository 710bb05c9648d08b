"""The feed-forward part of a transformer block."""

import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    """Two linear layers with a GELU between them, applied to each token: (..., C) -> (..., C)."""

    def __init__(self, dim: int, *, expansion: int = 4) -> None:
        super().__init__()
        self.expand = nn.Linear(dim, expansion * dim)
        self.contract = nn.Linear(expansion * dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.contract(F.gelu(self.expand(tokens)))
