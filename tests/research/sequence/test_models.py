"""The encoder and the language model: attention equals its definition, padding, memory, gradients, half precision."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from backbones.errors import ConfigError
from research.sequence import char_lm, create_char_lm, create_sequence_encoder, encoder, reference
from tests.backbones.helpers import LargestTensor, assert_all_close, outputs_and_gradients, random_images, randomize

SMALL_ENCODER = {"vocab_size": 11, "dim": 8, "num_heads": 2, "hidden_dim": 12, "depth": 2, "max_length": 24}
SMALL_ENCODER |= {"window_size": 4, "rank": 3, "class_token": True}
SMALL_CHAR_LM = {"vocab_size": 11, "dim": 8, "hidden_dim": 12, "num_heads": 2, "depth": 2, "memory_length": 12}
SMALL_CHAR_LM |= {"segment_length": 4, "rank": 2, "window_size": 5}


def small(create: Callable = create_sequence_encoder, *, dtype: torch.dtype = torch.float64, **changes) -> nn.Module:
    sizes = SMALL_CHAR_LM if create is create_char_lm else SMALL_ENCODER
    return randomize(create(**sizes | changes).to(dtype)).eval()


def random_ids(batch: int, length: int) -> Tensor:
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(0))


def mask_of(length: int, *real: int) -> Tensor:
    """Return a mask (B, N) of the first ``real`` tokens of each sequence."""
    return torch.arange(length) < torch.tensor(real)[:, None]


def read(model: nn.Module, ids: Tensor, lengths: list[int]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Return the log-probabilities of each block, and the last memory."""
    outputs, memory = [], None
    for block in ids.split(lengths, dim=1):
        output, memory = model(block, memory)
        outputs.append(output)
    return outputs, memory


# -- attention -------------------------------------------------------------------------------------


def assert_equal_to_definition(fast: Callable, dense: Callable, shapes: dict[str, tuple[int, ...]], **options) -> None:
    """Compare outputs and gradients. A gradient of zeros may be missing."""
    inputs = {name: random_images(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    actual, expected = (outputs_and_gradients(function, inputs, **options) for function in (fast, dense))
    actual = {name: torch.zeros_like(expected[name]) if x is None else x for name, x in actual.items()}
    assert_all_close(actual, expected, tolerance=1e-9)


@pytest.mark.parametrize("real", [None, lambda n: (n, (n + 1) // 2), lambda n: (0, n)], ids=["all", "some", "none"])
@pytest.mark.parametrize(
    "window_size, shared, length", [(1, 0, 5), (2, 1, 1), (3, 0, 150), (4, 5, 12), (16, 1, 64), (70, 2, 99), (0, 4, 9)]
)
def test_bidirectional_attention(window_size, shared, length, real):
    shapes = dict.fromkeys(("query", "key", "value"), (2, 2, length, 4))
    shapes |= dict.fromkeys(("shared_key", "shared_value") if shared else (), (2, 2, shared, 4))
    options = {"window_size": window_size, "mask": real and mask_of(length, *real(length))}
    assert_equal_to_definition(encoder.sequence_attention, reference.sequence_attention, shapes, **options)


@pytest.mark.parametrize(
    "window_size, segment_length, rank", [(1, 1, 1), (1, 4, 2), (2, 3, 1), (4, 4, 2), (5, 4, 1), (8, 2, 3), (12, 5, 2)]
)
@pytest.mark.parametrize("length, in_memory", [(1, 1), (4, 3), (12, 1), (25, 3)])
def test_causal_attention(window_size, segment_length, rank, length, in_memory):
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
    options = {"window_size": window_size, "segment_length": segment_length, "rank": rank}
    assert_equal_to_definition(char_lm.causal_attention, reference.causal_attention, shapes, **options)


def without_dropout(function: Callable, *tensors: Tensor, dropout: float = 0.0, **options) -> Tensor:
    assert dropout == 0
    return function(*tensors, **options)


# -- models ----------------------------------------------------------------------------------------


def assert_trains(model: nn.Module, loss: Tensor, *constant: str) -> None:
    """Every parameter has a finite gradient; biases and norms have no weight decay."""
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # The bias cancels in the softmax over the tokens; official weights have it.
        assert parameter.grad.abs().max() > 1e-12 or name.endswith(("dynamic_projection.bias", *constant)), name
    decayed = {name for name, _ in model.named_parameters()} - model.no_weight_decay()
    assert "embedding.weight" in decayed and all(name.endswith(".weight") for name in decayed)


ENCODERS = {
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


@pytest.mark.parametrize("changes", ENCODERS.values(), ids=ENCODERS)
def test_encoder(changes, monkeypatch):
    """Padding has no effect, even as the only content of a sequence, and the definition gives the same output."""
    model, ids, mask = small(**changes), random_ids(3, 17), mask_of(17, 7, 12, 0)
    output = model(ids, mask)
    assert output.shape == (3, 1 if model.class_token is not None else 17, 8) and output.isfinite().all()
    assert model.class_token is not None or not output[~mask].any()
    other = torch.where(mask, ids, (ids + 3) % 11)
    torch.testing.assert_close(model(other, mask)[:2], output[:2], atol=1e-12, rtol=0)
    torch.testing.assert_close(model(ids[:1, :7]), output[:1, :7], atol=1e-12, rtol=0)
    assert_trains(model, output.square().sum())
    by_definition = functools.partial(without_dropout, reference.sequence_attention)
    monkeypatch.setattr(encoder, "sequence_attention", by_definition)
    torch.testing.assert_close(model(ids, mask), output, atol=1e-12, rtol=0)


def test_encoder_with_a_class_token_in_the_last_layer():
    """The layers before the last one are the layers of an encoder without a class token."""
    model, ids, mask = small(class_token="last_layer", depth=3), random_ids(2, 13), mask_of(13, 13, 6)
    without = small(class_token=False, depth=2)
    without.load_state_dict({name: x for name, x in model.state_dict().items() if name in without.state_dict()})
    tokens = model.embedding(ids) + model.positions[:13]
    for layer in without.layers:
        tokens, _ = layer(tokens, None, mask)
    _, token = model.layers[2](tokens, model.class_token.expand(2, -1, -1), mask)
    torch.testing.assert_close(model(ids, mask), model.norm(token), atol=1e-12, rtol=0)


CHAR_LMS = {
    "small": {},
    "window below the segment": {"window_size": 2},
    "window of one": {"window_size": 1, "rank": 1},
    "window as long as the memory": {"window_size": 12, "rank": 3},
    "segments of one": {"segment_length": 1, "rank": 1},
    "one segment in the memory": {"segment_length": 12},
}


@pytest.mark.parametrize("changes", CHAR_LMS.values(), ids=CHAR_LMS)
def test_char_lm(changes, monkeypatch):
    """Blocks of different lengths give the output of the definition."""
    model, ids = small(create_char_lm, **changes), random_ids(2, 52)
    lengths = [7, 1, 20, 4, 1, 19]
    fast = read(model, ids, lengths)
    torch.testing.assert_close(fast[1][0], model.embedding(ids)[:, -12:] * 8**0.5, atol=1e-12, rtol=0)
    # The softmax of a single token is 1 for any score.
    constant = ("dynamic_projection.weight",) if model.segment_length == 1 else ()
    assert_trains(model, sum(output.square().sum() for output in fast[0]), *constant)
    by_definition = functools.partial(without_dropout, reference.causal_attention)
    monkeypatch.setattr(char_lm, "causal_attention", by_definition)
    dense = read(model, ids, lengths)
    for actual, expected in zip((*fast[0], *fast[1]), (*dense[0], *dense[1]), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("changes", [{}, {"rank": 0, "class_token": False}, {"window_size": 0}, None], ids=str)
def test_half_precision(changes, autocast, dtype):
    """``changes`` are options of the encoder. None means the language model, whose output is float32."""
    ids, mask = random_ids(3, 22), mask_of(22, 22, 9, 0)
    model = small(create_char_lm, dtype=torch.float32) if changes is None else small(dtype=torch.float32, **changes)

    def run(model: nn.Module) -> Tensor:
        return torch.cat(read(model, ids, [13, 1, 8])[0], dim=1) if changes is None else model(ids, mask)

    expected = run(model)
    with torch.autocast("cpu", dtype, enabled=autocast):
        output = run(model if autocast else model.to(dtype))
    assert output.isfinite().all() and (changes is not None or output.dtype == torch.float32)
    tolerance = 0.1 if dtype == torch.bfloat16 else 0.02
    assert (output.float() - expected)[:2].abs().max() <= tolerance * expected.abs().max()


def test_no_tensor_has_all_pairs_of_tokens():
    """The memory of the encoder is linear in the length. The language model has an eighth as many keys as tokens."""
    largest = []
    for length in (512, 1024):
        with LargestTensor() as mode:
            small(max_length=length, window_size=8)(random_ids(1, length), mask_of(length, length)).sum().backward()
        largest.append(mode.nbytes)
    assert largest[1] <= 2.1 * largest[0]
    with LargestTensor() as mode:
        model = small(create_char_lm, window_size=8, segment_length=8, memory_length=8, rank=1)
        model(random_ids(1, 512))[0].sum().backward()
    # Float64 scores of 2 heads and all pairs have 16 bytes for each pair.
    assert mode.nbytes < 16 * 512**2 / 2


@pytest.mark.parametrize(
    "create, changes",
    [
        (create_sequence_encoder, {"num_heads": 3}),
        (create_sequence_encoder, {"rank": 0, "window_size": 0}),
        (create_sequence_encoder, {"class_token": "first_layer"}),
        (create_sequence_encoder, {"max_length": 8}),
        (create_char_lm, {"rank": 0}),
        (create_char_lm, {"window_size": 0}),
        (create_char_lm, {"memory_length": 14}),
        (create_char_lm, {"dim": 9, "num_heads": 3}),
    ],
)
def test_wrong_arguments(create, changes):
    sizes = SMALL_CHAR_LM if create is create_char_lm else SMALL_ENCODER
    with pytest.raises(ConfigError, match=next(iter(changes))) as caught:
        create(**sizes | changes)(random_ids(1, 9))
    assert "\n" not in str(caught.value)


def test_memory_of_the_language_model():
    """No weight depends on its length, and a memory of another model or batch raises."""
    model, longer = small(create_char_lm), small(create_char_lm, memory_length=24)
    longer.load_state_dict(model.state_dict(), strict=True)
    assert longer(random_ids(1, 9))[0].isfinite().all()
    for shapes in ([(1, 12, 8)], [(1, 12, 8), (1, 8, 8)], [(2, 12, 8), (2, 12, 8)]):
        with pytest.raises(ConfigError, match="memory"):
            model(random_ids(1, 3), tuple(torch.zeros(shape, dtype=torch.float64) for shape in shapes))
