"""Bits per character, each byte predicted once from all that the memory has of those before it."""

import math

import torch
from torch import Tensor, nn

from projects_vil.sequence.char_lm.streams import Streams


@torch.no_grad()
def bits_per_character(
    model: nn.Module, ids: Tensor, *, length: int, num_streams: int = 1, device: torch.device | str = "cpu"
) -> float:
    """The mean of -log2 of the probability that the model gives to each byte of ``ids`` but the first.

    Args:
        model: as :func:`create_model` makes it; its memory goes from part to part.
        ids: (T,), T of 2 or more.
        length: bytes of a part.
        num_streams: side by side; each begins without a memory, so that more of them are faster, and a little worse.
    """
    was_training = model.training
    model.eval()
    streams = Streams(ids, min(num_streams, len(ids) - 1), length)
    total, memory = 0.0, None
    for index in range(len(streams)):
        part = streams.part(index)
        log_probabilities, memory = model(part.inputs.to(device), memory)
        picked = log_probabilities.gather(2, part.targets.to(device)[..., None])[..., 0]
        total -= picked[part.is_own.to(device)].double().sum().item()
    model.train(was_training)
    return total / math.log(2) / (len(ids) - 1)
