"""What the tests of models on sequences share: small ones, with random weights, and token ids."""

import torch
from torch import Tensor, nn

from backbones.sequence import create_sequence_encoder

SMALL_ENCODER = {
    "vocab_size": 11,
    "dim": 8,
    "num_heads": 2,
    "hidden_dim": 12,
    "depth": 2,
    "max_length": 24,
    "window_size": 4,
    "rank": 3,
    "class_token": True,
}


def randomised(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """``model`` with all its parameters drawn, norms and what starts at zero too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def small_encoder(*, dtype: torch.dtype = torch.float64, **changes) -> nn.Module:
    return randomised(create_sequence_encoder(**SMALL_ENCODER | changes).to(dtype)).eval()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_ids(batch: int, length: int, *, below: int = 11, seed: int = 0) -> Tensor:
    return torch.randint(below, (batch, length), generator=torch.Generator().manual_seed(seed))


def mask_of(length: int, *real: int) -> Tensor:
    """(B, N): the first ``real`` tokens of each sequence."""
    return torch.arange(length) < torch.tensor(real)[:, None]
