"""Long-short attention over a sequence: equal to the definition, blind to padding, finite where all is padding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backbones.attention import reference
from backbones.sequence.long_short import SequenceAttention, class_token_attention, sequence_attention
from backbones.utils.errors import InputError
from tests.backbones.helpers import LargestTensor, outputs_and_gradients
from tests.backbones.sequence.helpers import assert_same, mask_of, normal, randomised

# Below a window, no multiples of it, and of several blocks.
LENGTHS = [1, 5, 12, 64, 150]
MASKS = {
    "all real": None,
    "padding": lambda n: mask_of(n, n, (n + 1) // 2),
    "wholly masked": lambda n: mask_of(n, 0, n),
}


def inputs_of(length: int, shared: int) -> dict[str, Tensor]:
    names = ("query", "key", "value")
    inputs = {name: normal(2, 2, length, 4, seed=seed) for seed, name in enumerate(names)}
    if shared:
        inputs |= {name: normal(2, 2, shared, 4, seed=9 + len(name)) for name in ("shared_key", "shared_value")}
    return inputs


def compare(fast: Callable, dense: Callable, inputs: dict[str, Tensor], **options) -> None:
    """Outputs and gradients; what is not looked at has none, where the definition's are zero."""
    actual, expected = (outputs_and_gradients(function, inputs, **options) for function in (fast, dense))
    actual = {name: torch.zeros_like(expected[name]) if x is None else x for name, x in actual.items()}
    assert_same(actual, expected)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window_size, shared", [(1, 0), (2, 1), (3, 0), (4, 5), (16, 1), (70, 2), (0, 4)])
def test_equals_the_definition(window_size, shared, length, mask):
    mask = MASKS[mask] and MASKS[mask](length)
    options = {"window_size": window_size, "mask": mask}
    compare(sequence_attention, reference.sequence_attention, inputs_of(length, shared), **options)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_class_token_equals_the_definition(length, mask):
    mask = MASKS[mask] and MASKS[mask](length)
    inputs = {name: normal(2, 2, 1, 4, seed=seed) for seed, name in enumerate(("query", "key", "value"))}
    inputs["gathered"] = normal(2, 2, length, 4, seed=7)
    compare(class_token_attention, reference.class_token_attention, inputs, mask=mask)


def test_a_token_sees_its_segment_and_both_sides_of_it():
    """Without shared keys, and of values that are one each in a channel of their own."""
    query, key, value = torch.zeros(1, 1, 9, 9), torch.zeros(1, 1, 9, 9), torch.eye(9)[None, None]
    seen = sequence_attention(query, key, value, window_size=4)[0, 0] > 0
    segments = ((range(4), range(6)), (range(4, 8), range(2, 9)), (range(8, 9), range(6, 9)))
    for tokens, window in segments:
        for token in tokens:
            assert seen[token].nonzero().flatten().tolist() == list(window)


@pytest.mark.parametrize("window_size, rank", [(3, 2), (0, 2), (3, 0)])
@pytest.mark.parametrize("class_token", [False, True])
def test_gradcheck_of_the_module(window_size, rank, class_token):
    module = SequenceAttention(4, num_heads=2, window_size=window_size, rank=rank, class_token=class_token).double()
    randomised(module)
    inputs = [normal(2, 5, 4).requires_grad_()] + [normal(2, 1, 4, seed=1).requires_grad_()] * class_token

    def run(tokens: Tensor, token: Tensor | None = None) -> list[Tensor]:
        return [x for x in module(tokens, token, mask_of(5, 5, 3)) if x is not None]

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_shared_keys_are_not_copied_for_each_token():
    """With a window of one token and many projected keys, as the best of the paper for Retrieval."""
    inputs = {name: normal(1, 2, 512, 16).float() for name in ("query", "key", "value")}
    inputs |= {name: normal(1, 2, 64, 16).float() for name in ("shared_key", "shared_value")}
    with LargestTensor() as largest:
        outputs_and_gradients(sequence_attention, inputs, window_size=1)
    scores = 4 * 2 * 512 * (64 + 66)
    assert largest.nbytes <= 2 * scores


def test_an_unknown_backend():
    with pytest.raises(InputError, match="did you mean 'sdpa'"):
        SequenceAttention(4, num_heads=2, window_size=2, rank=1, class_token=True, backend="sdp")
