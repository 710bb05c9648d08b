"""Bits per character, each byte predicted once from all that the memory has of those before it."""

import math

import torch
from torch import Tensor, nn

from projects_vil.sequence.char_lm.texts.streams import Streams
from projects_vil.sequence.char_lm.texts.text import Vocabulary


@torch.no_grad()
def bits_per_character(
    model: nn.Module,
    ids: Tensor,
    *,
    vocabulary: Vocabulary,
    length: int,
    num_streams: int = 1,
    device: torch.device | str = "cpu",
) -> float:
    """The mean of -log2 of the probability that the model gives to each byte of ``ids`` but the first.

    A byte that the vocabulary does not know has its share of the probability of all those, which are alike to the
    model.

    Args:
        model: as :func:`create_model` makes it; its memory goes from part to part.
        ids: (T,), T of 2 or more.
        vocabulary: of the ids.
        length: bytes of a part.
        num_streams: side by side; each begins without a memory, so that more of them are faster, and a little worse.
    """
    was_training = model.training
    model.eval()
    streams = Streams(ids, min(num_streams, len(ids) - 1), length)
    bits_of_which = math.log2(max(vocabulary.num_unknown, 1))
    total, num_unknown, memory = 0.0, 0, None
    for index in range(len(streams)):
        part = streams.part(index)
        log_probabilities, memory = model(part.inputs.to(device), memory)
        picked = log_probabilities.gather(2, part.targets.to(device)[..., None])[..., 0]
        total -= picked[part.is_own.to(device)].double().sum().item()
        num_unknown += int((part.targets[part.is_own] == vocabulary.other).sum())
    model.train(was_training)
    return (total / math.log(2) + num_unknown * bits_of_which) / (len(ids) - 1)
