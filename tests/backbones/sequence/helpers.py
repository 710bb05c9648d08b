"""Helpers of the tests of sequence models: small models, with random weights, and token ids."""

import torch
from torch import Tensor, nn

from backbones.sequence import create_char_lm, create_sequence_encoder

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

SMALL_CHAR_LM = {
    "vocab_size": 11,
    "dim": 8,
    "hidden_dim": 12,
    "num_heads": 2,
    "depth": 2,
    "memory_length": 12,
    "segment_length": 4,
    "rank": 2,
    "window_size": 5,
}


def randomised(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Fill all parameters of ``model`` with random values, norms and zeros too, and return it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def small_encoder(*, dtype: torch.dtype = torch.float64, **changes) -> nn.Module:
    return randomised(create_sequence_encoder(**SMALL_ENCODER | changes).to(dtype)).eval()


def small_char_lm(*, dtype: torch.dtype = torch.float64, **changes) -> nn.Module:
    return randomised(create_char_lm(**SMALL_CHAR_LM | changes).to(dtype)).eval()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_ids(batch: int, length: int, *, below: int = 11, seed: int = 0) -> Tensor:
    return torch.randint(below, (batch, length), generator=torch.Generator().manual_seed(seed))


def mask_of(length: int, *real: int) -> Tensor:
    """(B, N): the first ``real`` tokens of each sequence."""
    return torch.arange(length) < torch.tensor(real)[:, None]


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float = 1e-9) -> None:
    """The same names, and finite values within ``tolerance`` of the largest one."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].isfinite().all(), name
        # A gradient that is nothing but rounding has no scale of its own.
        assert (actual[name] - value).abs().max() <= tolerance * value.abs().max().clamp(min=1e-3), name
