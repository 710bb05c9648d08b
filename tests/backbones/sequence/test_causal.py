"""Long-short attention over a text: equal to the definition, and of the past alone."""

import pytest
import torch
from torch import Tensor

from backbones.attention import reference
from backbones.sequence.causal import CausalAttention, causal_attention
from backbones.utils.errors import InputError
from tests.backbones.helpers import outputs_and_gradients
from tests.backbones.sequence.helpers import assert_same, normal, randomised

# Window, segment, rank: below, equal, no multiples of one another.
SIZES = [(1, 1, 1), (1, 4, 2), (2, 3, 1), (4, 4, 2), (5, 4, 1), (8, 2, 3), (12, 5, 2)]
# One token; below, at and above segments and windows; several blocks and an end that fills none.
LENGTHS = [1, 2, 4, 7, 12, 25]


def inputs_of(length: int, window_size: int, segment_length: int, rank: int, *, in_memory: int) -> dict[str, Tensor]:
    vectors = (in_memory + -(-length // segment_length) - 1) * rank
    shapes = {
        "query": (2, 2, length, 4),
        "key": (2, 2, window_size + length, 4),
        "value": (2, 2, window_size + length, 4),
        "summed_key": (2, 2, vectors, 4),
        "summed_value": (2, 2, vectors, 4),
        "key_bias": (2, 4),
        "query_bias": (2, 4),
        "window_positions": (2, window_size, 4),
        "segment_positions": (2, vectors + rank, 4),
    }
    return {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("in_memory", [1, 3])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window_size, segment_length, rank", SIZES)
def test_equals_the_definition(window_size, segment_length, rank, length, in_memory):
    inputs = inputs_of(length, window_size, segment_length, rank, in_memory=in_memory)
    options = {"window_size": window_size, "segment_length": segment_length, "rank": rank}
    actual = outputs_and_gradients(causal_attention, inputs, **options)
    assert_same(actual, outputs_and_gradients(reference.causal_attention, inputs, **options))


def test_what_each_token_sees():
    """Of values that are one each in a channel of their own: the window, and the segments before the token's own."""
    window_size, segment_length, rank, length, in_memory = 3, 4, 2, 10, 2
    inputs = inputs_of(length, window_size, segment_length, rank, in_memory=in_memory)
    vectors = inputs["summed_key"].shape[2]
    eye = torch.eye(vectors + window_size + length, dtype=torch.float64).expand(2, 2, -1, -1)
    inputs |= {"summed_value": eye[:, :, :vectors], "value": eye[:, :, vectors:]}
    # Queries have four channels, these values more.
    options = {"window_size": window_size, "segment_length": segment_length, "rank": rank}
    seen = causal_attention(**inputs, **options)[0, 0] > 0
    for token in range(length):
        summed, tokens = seen[token, :vectors], seen[token, vectors:]
        assert summed.nonzero().flatten().tolist() == list(range((in_memory + token // segment_length) * rank))
        # Three tokens stand before the part.
        assert tokens.nonzero().flatten().tolist() == list(range(token + 1, token + 1 + window_size))


def module_of(**changes) -> CausalAttention:
    sizes = {"num_heads": 2, "window_size": 3, "segment_length": 2, "rank": 1} | changes
    return randomised(CausalAttention(4, **sizes).double())


def test_gradcheck_of_the_module():
    module = module_of()
    inputs = (normal(2, 5, 4), normal(2, 4, 4, seed=1))
    # Two segments in the memory, and of the three of the part all but the last.
    tables = (normal(3, 4, seed=2), normal(5, 4, seed=3))
    assert torch.autograd.gradcheck(module, [x.requires_grad_() for x in (*inputs, *tables)], fast_mode=True)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_the_module_is_the_same_on_both_backends(length):
    fast, dense = module_of(), module_of(backend="reference")
    in_all = 2 + -(-length // 2)
    inputs = {"tokens": normal(2, length, 4), "memory": normal(2, 4, 4, seed=1)}
    inputs |= {"window_table": normal(3, 4, seed=2), "segment_table": normal(in_all, 4, seed=3)}
    assert_same(outputs_and_gradients(fast, inputs), outputs_and_gradients(dense, inputs))


def test_an_unknown_backend():
    with pytest.raises(InputError, match="did you mean 'sdpa'"):
        module_of(backend="sdp")
