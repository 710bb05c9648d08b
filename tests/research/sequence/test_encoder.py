"""The encoder: attention equals its definition, padding changes nothing, gradients, half precision, wrong arguments."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backbones.errors import ConfigError
from research.sequence import create_sequence_encoder, reference
from research.sequence import encoder as encoder_module
from research.sequence.encoder import sequence_attention
from tests.backbones.helpers import (
    LargestTensor,
    assert_all_close,
    outputs_and_gradients,
    random_ids,
    random_images,
    randomise,
)

SMALL_ENCODER = {"vocab_size": 11, "dim": 8, "num_heads": 2, "hidden_dim": 12, "depth": 2, "max_length": 24}
SMALL_ENCODER |= {"window_size": 4, "rank": 3, "class_token": True}


def small_encoder(*, dtype: torch.dtype = torch.float64, **changes) -> torch.nn.Module:
    return randomise(create_sequence_encoder(**SMALL_ENCODER | changes).to(dtype)).eval()


def mask_of(length: int, *real: int) -> Tensor:
    """(B, N): the first ``real`` tokens of each sequence."""
    return torch.arange(length) < torch.tensor(real)[:, None]


MASKS = {
    "all real": None,
    "padding": lambda n: mask_of(n, n, (n + 1) // 2),
    "wholly masked": lambda n: mask_of(n, 0, n),
}


def inputs_of(length: int, shared: int) -> dict[str, Tensor]:
    names = ("query", "key", "value")
    inputs = {name: random_images(2, 2, length, 4, seed=seed) for seed, name in enumerate(names)}
    if shared:
        inputs |= {name: random_images(2, 2, shared, 4, seed=9 + len(name)) for name in ("shared_key", "shared_value")}
    return inputs


def compare(fast: Callable, dense: Callable, inputs: dict[str, Tensor], **options) -> None:
    """Outputs and gradients; what is not looked at has none, where the definition's are zero."""
    actual, expected = (outputs_and_gradients(function, inputs, **options) for function in (fast, dense))
    actual = {name: torch.zeros_like(expected[name]) if x is None else x for name, x in actual.items()}
    assert_all_close(actual, expected, tolerance=1e-9)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "window_size, shared, length",
    [(1, 0, 5), (2, 1, 1), (3, 0, 150), (4, 5, 12), (16, 1, 64), (70, 2, 99), (0, 4, 9)],
)
def test_equals_the_definition(window_size, shared, length, mask):
    mask = MASKS[mask] and MASKS[mask](length)
    options = {"window_size": window_size, "mask": mask}
    compare(sequence_attention, reference.sequence_attention, inputs_of(length, shared), **options)


CASES = {
    "class token": {},
    "tokens": {"class_token": False},
    "class token in the last layer": {"class_token": "last_layer", "depth": 3},
    "only the window, class token in the last layer": {"class_token": "last_layer", "rank": 0},
    "only the window": {"rank": 0},
    "only the window, tokens": {"rank": 0, "class_token": False},
    "only the projection": {"window_size": 0},
    "only the projection, tokens": {"window_size": 0, "class_token": False},
    "window of one": {"window_size": 1, "rank": 1},
}
cases = pytest.mark.parametrize("changes", CASES.values(), ids=CASES)


def without_dropout(function: Callable, *tensors: Tensor, dropout: float = 0.0, **options) -> Tensor:
    assert dropout == 0
    return function(*tensors, **options)


@cases
def test_encoder_matches_reference_with_and_without_padding(changes, monkeypatch):
    """Padding changes nothing, also as the only content of a sequence, and the definition gives the same."""
    encoder, ids, mask = small_encoder(**changes), random_ids(3, 17), mask_of(17, 7, 12, 0)
    output = encoder(ids, mask)
    assert output.shape == (3, 1 if encoder.class_token is not None else 17, 8) and output.isfinite().all()
    assert encoder.class_token is not None or not output[~mask].any()
    other = torch.where(mask, ids, (ids + 3) % 11)
    torch.testing.assert_close(encoder(other, mask)[:2], output[:2], atol=1e-12, rtol=0)
    torch.testing.assert_close(encoder(ids[:1, :7]), output[:1, :7], atol=1e-12, rtol=0)
    output.square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # It cancels in the softmax over the tokens; official weights have it.
        assert parameter.grad.any() or name.endswith("dynamic_projection.bias"), name
    by_definition = functools.partial(without_dropout, reference.sequence_attention)
    monkeypatch.setattr(encoder_module, "sequence_attention", by_definition)
    torch.testing.assert_close(encoder(ids, mask), output, atol=1e-12, rtol=0)
    decayed = {name for name, _ in encoder.named_parameters()} - encoder.no_weight_decay()
    assert "embedding.weight" in decayed and all(name.endswith(".weight") for name in decayed)


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


def test_class_token_in_the_last_layer():
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


def test_dropout_acts_only_in_training():
    encoder, ids = small_encoder(dropout=0.5, attention_dropout=0.5), random_ids(2, 12)
    torch.testing.assert_close(encoder(ids), small_encoder()(ids))
    encoder.train()
    assert not torch.equal(encoder(ids), encoder(ids))


@pytest.mark.parametrize(
    "changes",
    [
        {"windowsize": 4},
        {"num_heads": 3},
        {"window_size": -1},
        {"rank": -1},
        {"rank": 0, "window_size": 0},
        {"class_token": "first_layer"},
        {"max_length": 8},
    ],
    ids=str,
)
def test_wrong_arguments(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))) as caught:
        create_sequence_encoder(**SMALL_ENCODER | changes)(random_ids(1, 9))
    assert "\n" not in str(caught.value)
