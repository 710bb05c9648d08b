"""The encoder: attention equals its definition, padding changes nothing, gradients, half precision, wrong arguments."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backbones.attention import reference
from backbones.errors import ConfigError
from backbones.sequence import create_sequence_encoder
from backbones.sequence.encoder import SequenceAttention, class_token_attention, sequence_attention
from tests.backbones.helpers import LargestTensor, outputs_and_gradients
from tests.backbones.sequence.helpers import (
    SMALL_ENCODER,
    assert_same,
    mask_of,
    normal,
    random_ids,
    randomised,
    small_encoder,
)

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
@pytest.mark.parametrize(
    "window_size, shared, length",
    [(1, 0, 5), (2, 1, 1), (3, 0, 150), (4, 5, 12), (16, 1, 64), (70, 2, 99), (0, 4, 9)],
)
def test_equals_the_definition(window_size, shared, length, mask):
    mask = MASKS[mask] and MASKS[mask](length)
    options = {"window_size": window_size, "mask": mask}
    compare(sequence_attention, reference.sequence_attention, inputs_of(length, shared), **options)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [1, 64])
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


CASES = {
    "class token": {},
    "tokens": {"class_token": False},
    "class token in the last layer": {"class_token": "last_layer", "depth": 3},
    "window alone, class token in the last layer": {"class_token": "last_layer", "rank": 0},
    "window alone": {"rank": 0},
    "window alone, tokens": {"rank": 0, "class_token": False},
    "projection alone": {"window_size": 0},
    "projection alone, tokens": {"window_size": 0, "class_token": False},
    "window of one": {"window_size": 1, "rank": 1},
}
cases = pytest.mark.parametrize("changes", CASES.values(), ids=CASES)


@cases
@pytest.mark.parametrize("length", [1, 9, 24])
def test_shapes(changes, length):
    encoder = small_encoder(**changes)
    output = encoder(random_ids(2, length), mask_of(length, length, 1))
    assert output.shape == (2, 1 if encoder.class_token is not None else length, 8)
    assert output.isfinite().all()


@cases
def test_a_batch_of_no_sequences(changes):
    encoder = small_encoder(**changes)
    ids = torch.zeros(0, 9, dtype=torch.int64)
    assert encoder(ids, mask_of(9, 9)[:0]).shape == encoder(ids).shape == (0, *encoder(random_ids(1, 9)).shape[1:])


@cases
def test_both_backends(changes):
    encoder, ids, mask = small_encoder(**changes), random_ids(3, 13), mask_of(13, 13, 6, 0)
    fast = encoder(ids, mask)
    for module in encoder.modules():
        if isinstance(module, SequenceAttention):
            module.backend = "reference"
    torch.testing.assert_close(fast, encoder(ids, mask), atol=1e-12, rtol=0)


@cases
def test_padding_changes_nothing(changes):
    """Neither what it holds, nor how much of it there is, nor the other sequences of the batch."""
    encoder, ids = small_encoder(**changes), random_ids(2, 17)
    mask = mask_of(17, 7, 12)
    expected = encoder(ids, mask)
    other = torch.where(mask, ids, (ids + 3) % 11)
    torch.testing.assert_close(encoder(other, mask), expected, atol=0, rtol=0)
    alone = encoder(ids[:1, :7])
    torch.testing.assert_close(alone, expected[:1, :7], atol=1e-12, rtol=0)
    if encoder.class_token is None:
        assert not expected[~mask].any()


@cases
def test_a_sequence_of_padding_alone_is_finite(changes):
    """So are the gradients, and the other sequences know nothing of it."""
    encoder, ids, mask = small_encoder(**changes), random_ids(2, 9), mask_of(9, 0, 9)
    output = encoder(ids, mask)
    torch.testing.assert_close(output[1:], encoder(ids[1:]), atol=1e-12, rtol=0)
    output.square().sum().backward()
    assert output.isfinite().all() and all(p.grad.isfinite().all() for p in encoder.parameters())


@cases
def test_every_parameter_gets_a_gradient(changes):
    encoder = small_encoder(**changes)
    encoder(random_ids(3, 24), mask_of(24, 24, 11, 24)).square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        # The softmax over the tokens cancels this one; official weights have it.
        assert parameter.grad.any() or name.endswith("dynamic_projection.bias"), name


def test_a_far_token_is_seen_by_the_projection_and_not_by_the_window():
    ids = random_ids(1, 24)
    other = ids.clone()
    other[0, 23] = (ids[0, 23] + 1) % 11
    for rank, is_seen in ((3, True), (0, False)):
        encoder = small_encoder(class_token=False, depth=1, rank=rank)
        assert (encoder(ids)[0, 0] - encoder(other)[0, 0]).abs().max().item() > 1e-6 or not is_seen
        assert torch.equal(encoder(ids)[0, 0], encoder(other)[0, 0]) is not is_seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("changes", [{}, {"rank": 0, "class_token": False}, {"window_size": 0}], ids=str)
def test_half_precision(changes, autocast, dtype):
    ids, mask = random_ids(3, 22), mask_of(22, 22, 9, 0)
    encoder = small_encoder(dtype=torch.float32, **changes)
    expected = encoder(ids, mask)
    with torch.autocast("cpu", dtype, enabled=autocast):
        output = (encoder if autocast else encoder.to(dtype))(ids, mask)
    assert output.isfinite().all()
    tolerance = 0.1 if dtype == torch.bfloat16 else 0.02
    assert (output.float() - expected)[:2].abs().max() <= tolerance * expected.abs().max()


def test_memory_is_linear_in_the_length():
    largest = []
    for length in (512, 1024):
        encoder = small_encoder(max_length=length, window_size=8)
        with LargestTensor() as mode:
            encoder(random_ids(1, length), mask_of(length, length)).sum().backward()
        largest.append(mode.nbytes)
    assert largest[1] <= 2.1 * largest[0]


def test_a_class_token_in_the_last_layer():
    """The layers before it are those of an encoder of tokens."""
    encoder, ids, mask = small_encoder(class_token="last_layer", depth=3), random_ids(2, 13), mask_of(13, 13, 6)
    without = small_encoder(class_token=False, depth=2)
    shared = {name: x for name, x in encoder.state_dict().items() if name in without.state_dict()}
    without.load_state_dict(shared)
    tokens = encoder.embedding(ids) + encoder.positions[:13]
    for layer in without.layers:
        tokens, _ = layer(tokens, None, mask)
    _, token = encoder.layers[2](tokens, encoder.class_token.expand(2, -1, -1), mask)
    torch.testing.assert_close(encoder(ids, mask), encoder.norm(token), atol=1e-12, rtol=0)


def test_dropout_is_of_training_alone():
    encoder, ids = small_encoder(dropout=0.5, attention_dropout=0.5), random_ids(2, 12)
    torch.testing.assert_close(encoder(ids), small_encoder()(ids), atol=0, rtol=0)
    encoder.train()
    assert not torch.equal(encoder(ids), encoder(ids))


def test_dropout_of_the_attention_has_the_right_mean():
    """The mean over many samples equals the output without dropout: it concerns the tokens' weights alone."""
    module = SequenceAttention(8, num_heads=2, window_size=4, rank=2, class_token=False, dropout=0.3).double()
    randomised(module)
    tokens = torch.randn(1, 7, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = module.eval()(tokens, None, None)[0]
    module.train()
    torch.manual_seed(0)
    samples = module(tokens.expand(4000, -1, -1), None, None)[0]
    assert (samples.mean(0) - expected[0]).abs().max() <= 0.1 * expected.abs().max()


def test_no_weight_decay():
    encoder = small_encoder()
    names = encoder.no_weight_decay()
    assert {"positions", "class_token", "norm.weight", "layers.0.attention.local_norm.weight"} <= names
    decayed = {name for name, _ in encoder.named_parameters()} - names
    assert "embedding.weight" in decayed and all(name.endswith(".weight") for name in decayed)


def test_initial_values():
    torch.manual_seed(0)
    encoder = create_sequence_encoder(**SMALL_ENCODER | {"vocab_size": 100, "dim": 64, "max_length": 50})
    assert not encoder.class_token.any()
    assert encoder.positions.std().item() == pytest.approx(0.02, abs=2e-3)
    assert encoder.embedding.weight.std().item() == pytest.approx(0.02, abs=2e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"windowsize": 4},
        {"num_heads": 3},
        {"dropout": 1.0},
        {"attention_dropout": -0.1},
        {"window_size": -1},
        {"rank": -1},
        {"rank": 0, "window_size": 0},
        {"class_token": "first_layer"},
    ],
    ids=str,
)
def test_wrong_arguments(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))) as caught:
        create_sequence_encoder(**SMALL_ENCODER | changes)
    assert "\n" not in str(caught.value)


def test_a_sequence_that_is_too_long():
    with pytest.raises(ConfigError, match="25 tokens"):
        small_encoder()(random_ids(1, 25))


def test_the_examples_of_the_documentation():
    """The first block of Python in docs/sequences.md."""
    page = (Path(__file__).parents[3] / "docs/sequences.md").read_text()
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[:1]:
        exec(block, names)
    assert names["vector"].shape == (2, 1, 64) and names["log_probabilities"].shape == (2, 8, 48)
