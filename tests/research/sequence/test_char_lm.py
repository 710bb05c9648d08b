"""The character language model: attention equals its definition, causality, memory, gradients, half precision."""

import pytest
import torch
from torch import Tensor

from backbones.errors import ConfigError
from research.sequence import create_char_lm, reference
from research.sequence.char_lm import causal_attention
from tests.backbones.helpers import (
    LargestTensor,
    assert_all_close,
    outputs_and_gradients,
    random_ids,
    random_images,
    randomise,
)

SMALL_CHAR_LM = {"vocab_size": 11, "dim": 8, "hidden_dim": 12, "num_heads": 2, "depth": 2, "memory_length": 12}
SMALL_CHAR_LM |= {"segment_length": 4, "rank": 2, "window_size": 5}


def small_char_lm(*, dtype: torch.dtype = torch.float64, **changes) -> torch.nn.Module:
    return randomise(create_char_lm(**SMALL_CHAR_LM | changes).to(dtype)).eval()


# Window, segment, rank: below, equal, no multiples of one another.
SIZES = [(1, 1, 1), (1, 4, 2), (2, 3, 1), (4, 4, 2), (5, 4, 1), (8, 2, 3), (12, 5, 2)]


def inputs_of(length: int, window_size: int, segment_length: int, rank: int, *, in_memory: int) -> dict[str, Tensor]:
    vectors = (in_memory + -(-length // segment_length) - 1) * rank
    shapes = {
        "query": (2, 2, length, 4),
        "key": (2, 2, window_size + length, 4),
        "value": (2, 2, window_size + length, 4),
        "projected_key": (2, 2, vectors, 4),
        "projected_value": (2, 2, vectors, 4),
        "key_bias": (2, 4),
        "query_bias": (2, 4),
        "window_positions": (2, window_size, 4),
        "segment_positions": (2, vectors + rank, 4),
    }
    return {name: random_images(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("window_size, segment_length, rank", SIZES)
@pytest.mark.parametrize("length, in_memory", [(1, 1), (4, 3), (12, 1), (25, 3)])
def test_equals_the_definition(window_size, segment_length, rank, length, in_memory):
    inputs = inputs_of(length, window_size, segment_length, rank, in_memory=in_memory)
    options = {"window_size": window_size, "segment_length": segment_length, "rank": rank}
    actual = outputs_and_gradients(causal_attention, inputs, **options)
    expected = outputs_and_gradients(reference.causal_attention, inputs, **options)
    assert_all_close(actual, expected, tolerance=1e-9)


CASES = {
    "small": {},
    "window below the segment": {"window_size": 2},
    "window of one": {"window_size": 1, "rank": 1},
    "window as long as the memory": {"window_size": 12, "rank": 3},
    "segments of one": {"segment_length": 1, "rank": 1},
    "one segment in the memory": {"segment_length": 12},
}
cases = pytest.mark.parametrize("changes", CASES.values(), ids=CASES)


def read(model: torch.nn.Module, ids: Tensor, lengths: list[int]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Log-probabilities of each block, and the last memory."""
    outputs, memory = [], None
    for block in ids.split(lengths, dim=1):
        output, memory = model(block, memory)
        outputs.append(output)
    return outputs, memory


@cases
def test_blocks_of_different_lengths_match_reference(changes, monkeypatch):
    model, ids = small_char_lm(**changes), random_ids(2, 52)
    lengths = [7, 1, 20, 4, 1, 19]
    fast = read(model, ids, lengths)
    torch.testing.assert_close(fast[1][0], model.embedding(ids)[:, -12:] * 8**0.5)

    def by_definition(*tensors: Tensor, dropout: float, **options) -> Tensor:
        return reference.causal_attention(*tensors, **options)

    monkeypatch.setattr("research.sequence.char_lm.causal_attention", by_definition)
    dense = read(model, ids, lengths)
    for actual, expected in zip((*fast[0], *fast[1]), (*dense[0], *dense[1]), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)


@cases
def test_every_parameter_gets_a_gradient(changes):
    model, ids = small_char_lm(**changes), random_ids(2, 40)
    _, memory = model(ids[:, :20])
    log_probabilities, _ = model(ids[:, 20:], memory)
    log_probabilities.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        # The softmax of a single token is 1, whatever its score.
        is_constant = "dynamic_projection" in name and model.segment_length == 1
        cancels = name.endswith("dynamic_projection.bias")
        assert parameter.grad.abs().max() > 1e-12 or is_constant or cancels, name
    decayed = {name for name, _ in model.named_parameters()} - model.no_weight_decay()
    assert "embedding.weight" in decayed and all(name.endswith(".weight") for name in decayed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(autocast, dtype):
    ids = random_ids(2, 30)
    model = small_char_lm(dtype=torch.float32)
    expected = torch.cat(read(model, ids, [13, 1, 16])[0], dim=1)
    with torch.autocast("cpu", dtype, enabled=autocast):
        output = torch.cat(read(model if autocast else model.to(dtype), ids, [13, 1, 16])[0], dim=1)
    assert output.isfinite().all() and output.dtype == torch.float32
    tolerance = 0.1 if dtype == torch.bfloat16 else 0.02
    assert (output - expected).abs().max() <= tolerance * expected.abs().max()


def test_no_tensor_holds_all_pairs_of_tokens():
    model = small_char_lm(window_size=8, segment_length=8, memory_length=8, rank=1)
    with LargestTensor() as largest:
        model(random_ids(1, 512))[0].sum().backward()
    # Float64 scores of 2 heads and all pairs would be 16 bytes each.
    assert largest.nbytes < 16 * 512**2 / 2


def test_trained_model_runs_with_another_memory_length():
    """No weight depends on its length: the paper tests with 32768."""
    model, longer = small_char_lm(), small_char_lm(memory_length=24)
    longer.load_state_dict(model.state_dict(), strict=True)
    assert longer(random_ids(1, 9))[0].isfinite().all()


def test_dropout_acts_only_in_training():
    model, ids = small_char_lm(dropout=0.5, attention_dropout=0.5), random_ids(2, 12)
    torch.testing.assert_close(model(ids)[0], small_char_lm()(ids)[0])
    model.train()
    assert not torch.equal(model(ids)[0], model(ids)[0])


@pytest.mark.parametrize(
    "changes",
    [{"rank": 0}, {"window_size": 0}, {"memory_length": 14}, {"memory_length": 4}, {"dim": 9, "num_heads": 3}],
    ids=str,
)
def test_wrong_arguments(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        create_char_lm(**SMALL_CHAR_LM | changes)


@pytest.mark.parametrize("shapes", [[(1, 12, 8)], [(1, 12, 8), (1, 8, 8)], [(2, 12, 8), (2, 12, 8)]], ids=str)
def test_memory_of_another_model_or_batch_raises(shapes):
    with pytest.raises(ConfigError, match="memory"):
        small_char_lm()(random_ids(1, 3), tuple(torch.zeros(shape, dtype=torch.float64) for shape in shapes))
