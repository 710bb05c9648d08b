"""Bits per character."""

import math

import pytest
import torch
from torch import nn

from projects_vil.sequence.char_lm import KINDS, ModelSize, Vocabulary, bits_per_character, create_model

SIZE = ModelSize(dim=16, num_heads=2, hidden_dim=24, depth=2, window_size=8, segment_length=4, rank=1)
SEVEN = Vocabulary(range(7))


class Uniform(nn.Module):
    """Knows nothing, and counts what it is asked."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, ids, memory=None):
        scores = torch.zeros(*ids.shape, self.vocab_size)
        return scores.log_softmax(dim=-1), (ids,)


@pytest.mark.parametrize("num_streams", [1, 3, 500])
@pytest.mark.parametrize("vocab_size", [2, 17, 256])
def test_a_uniform_model_needs_log2_of_the_vocabulary(vocab_size, num_streams):
    ids = torch.randint(vocab_size - 1, (137,), dtype=torch.int16)
    vocabulary = Vocabulary(range(vocab_size - 1))
    bits = bits_per_character(Uniform(vocab_size), ids, vocabulary=vocabulary, length=10, num_streams=num_streams)
    assert bits == pytest.approx(math.log2(vocab_size), abs=1e-6)


@pytest.mark.parametrize("num_streams", [1, 3])
def test_a_byte_that_is_not_known_is_one_of_all_those(num_streams):
    """Whoever knows nothing needs 8 bits for a byte, however many of them have an id."""
    vocabulary = Vocabulary(range(127))
    ids = torch.cat([torch.zeros(1, dtype=torch.int16), vocabulary.encode(bytes([200, 5, 255, 127] * 10))])
    bits = bits_per_character(Uniform(128), ids, vocabulary=vocabulary, length=8, num_streams=num_streams)
    assert bits == pytest.approx(7 + 0.75 * math.log2(129))


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_goes_from_part_to_part(kind):
    torch.manual_seed(0)
    model = create_model(kind, SIZE, vocab_size=7, memory_length=16, dropout=0.5)
    ids = torch.randint(7, (50,), dtype=torch.int16)
    memory, total = None, 0.0
    model.eval()
    for inputs, targets in zip(ids[None, :-1].long().split(12, dim=1), ids[1:].long().split(12), strict=True):
        with torch.no_grad():
            log_probabilities, memory = model(inputs, memory)
        total -= log_probabilities[0, torch.arange(len(targets)), targets].sum().item()
    model.train()
    assert bits_per_character(model, ids, vocabulary=SEVEN, length=12) == pytest.approx(
        total / math.log(2) / 49, rel=1e-5
    )
    # Without dropout, and in training again afterwards.
    assert model.training


def test_bits_as_one_part_and_as_several_are_the_same_with_full_attention():
    torch.manual_seed(0)
    model = create_model("full", SIZE, vocab_size=7, memory_length=64)
    ids = torch.randint(7, (60,), dtype=torch.int16)
    whole = bits_per_character(model, ids, vocabulary=SEVEN, length=59)
    assert bits_per_character(model, ids, vocabulary=SEVEN, length=7) == pytest.approx(whole, rel=1e-5)
