"""Both models by name, with one way to call them and to keep what they remember."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from backbones.sequence import create_char_lm
from backbones.utils.errors import InputError
from projects_vil.sequence.char_lm.models.full_attention import FullAttentionLM
from projects_vil.sequence.char_lm.models.presets import ModelSize

KINDS = ("long_short", "full")
# What both have; the rest of a ModelSize is the long-short one's.
_SHARED = ("dim", "num_heads", "hidden_dim", "depth")
_OWN = ("window_size", "segment_length", "rank")

Memory = tuple[Tensor, ...] | None


def create_model(kind: str, size: ModelSize, *, vocab_size: int, memory_length: int, dropout: float = 0.0) -> nn.Module:
    """A model with random weights: ids (B, N) and a memory, or None -> log-probabilities (B, N, V), the next memory.

    Weights do not depend on the memory's length.

    Args:
        kind: one of ``KINDS``.
        vocab_size: V.

    Raises:
        InputError: for sizes that cannot be.
    """
    if size.dim % size.num_heads:
        raise InputError(f"--heads {size.num_heads} does not divide --dim {size.dim}: choose a divisor")
    if memory_length % size.segment_length:
        raise InputError(
            f"a memory of {memory_length} bytes is no multiple of --segment {size.segment_length}: choose another "
            "--memory or --length"
        )
    if memory_length < size.window_size:
        raise InputError(
            f"a memory of {memory_length} bytes is below --window {size.window_size}: choose another "
            "--memory, --length or --window"
        )
    if size.dim % 2:
        raise InputError(f"--dim {size.dim}: it is even, for half of the positions are sines and half cosines")
    names = _SHARED if kind == "full" else (*_SHARED, *_OWN)
    options = {name: getattr(size, name) for name in names}
    options |= {"vocab_size": vocab_size, "memory_length": memory_length, "dropout": dropout}
    return FullAttentionLM(**options) if kind == "full" else create_char_lm(**options)


def count_parameters(model: nn.Module) -> int:
    """Of all weights; the embedding, which is the output's matrix too, counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_of(kind: str, size: ModelSize, vocab_size: int) -> int:
    """The parameters of a model of this size, without its memory being taken."""
    # Some length that the sizes allow: a memory has no weights.
    memory_length = size.segment_length * size.window_size
    with torch.device("meta"):
        return count_parameters(create_model(kind, size, vocab_size=vocab_size, memory_length=memory_length))


def kept(memory: Iterable[Tensor], change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """A memory with each tensor changed: moved to a device, or without what is behind it."""
    return tuple(change(part) for part in memory)
