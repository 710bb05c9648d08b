"""The encoder as a whole: any length and mask, padding that changes nothing, gradients, half precision."""

import pytest
import torch

from backbones.sequence.long_short import SequenceAttention
from backbones.utils.errors import InputError
from tests.backbones.helpers import LargestTensor
from tests.backbones.sequence.helpers import mask_of, random_ids, randomised, small_encoder

KINDS = {
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
kinds = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)


@kinds
@pytest.mark.parametrize("length", [1, 9, 24])
def test_shapes(changes, length):
    encoder = small_encoder(**changes)
    output = encoder(random_ids(2, length), mask_of(length, length, 1))
    assert output.shape == (2, 1 if encoder.class_token is not None else length, 8)
    assert output.isfinite().all()


@kinds
def test_a_batch_of_no_sequences(changes):
    encoder = small_encoder(**changes)
    ids = torch.zeros(0, 9, dtype=torch.int64)
    assert encoder(ids, mask_of(9, 9)[:0]).shape == encoder(ids).shape == (0, *encoder(random_ids(1, 9)).shape[1:])


@kinds
def test_both_backends(changes):
    encoder, ids, mask = small_encoder(**changes), random_ids(3, 13), mask_of(13, 13, 6, 0)
    fast = encoder(ids, mask)
    for module in encoder.modules():
        if isinstance(module, SequenceAttention):
            module.backend = "reference"
    torch.testing.assert_close(fast, encoder(ids, mask), atol=1e-12, rtol=0)


@kinds
def test_no_mask_is_a_mask_of_real_tokens(changes):
    encoder, ids = small_encoder(**changes), random_ids(2, 10)
    torch.testing.assert_close(encoder(ids), encoder(ids, mask_of(10, 10, 10)), atol=1e-12, rtol=0)


@kinds
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


@kinds
def test_a_sequence_of_padding_alone_is_finite(changes):
    """So are the gradients, and the other sequences know nothing of it."""
    encoder, ids, mask = small_encoder(**changes), random_ids(2, 9), mask_of(9, 0, 9)
    output = encoder(ids, mask)
    torch.testing.assert_close(output[1:], encoder(ids[1:]), atol=1e-12, rtol=0)
    output.square().sum().backward()
    assert output.isfinite().all() and all(p.grad.isfinite().all() for p in encoder.parameters())


@kinds
def test_every_parameter_gets_a_gradient(changes):
    encoder = small_encoder(**changes)
    encoder(random_ids(3, 24), mask_of(24, 24, 11, 24)).square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        # The softmax over the tokens cancels this one; official weights have it.
        assert parameter.grad.any() or name.endswith("dynamic_projection.bias"), name


def test_masks_with_holes():
    """Real tokens need not be the first: one that is hidden in the middle changes nothing."""
    encoder, ids = small_encoder(class_token=False), random_ids(1, 9)
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[0, 4] = False
    other = ids.clone()
    other[0, 4] = (ids[0, 4] + 1) % 11
    torch.testing.assert_close(encoder(ids, mask), encoder(other, mask), atol=0, rtol=0)
    assert not torch.equal(encoder(ids), encoder(other))


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
    """The mean over many draws is what there is without: the rate reaches the tokens' weights and nothing else."""
    module = SequenceAttention(8, num_heads=2, window_size=4, rank=2, class_token=False, dropout=0.3).double()
    randomised(module)
    tokens = torch.randn(1, 7, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = module.eval()(tokens, None, None)[0]
    module.train()
    torch.manual_seed(0)
    draws = module(tokens.expand(4000, -1, -1), None, None)[0]
    assert (draws.mean(0) - expected[0]).abs().max() <= 0.1 * expected.abs().max()


def test_no_weight_decay():
    encoder = small_encoder()
    names = encoder.no_weight_decay()
    assert {"positions", "class_token", "norm.weight", "layers.0.attention.local_norm.weight"} <= names
    decayed = {name for name, _ in encoder.named_parameters()} - names
    assert "embedding.weight" in decayed and all(name.endswith(".weight") for name in decayed)


def test_initial_values():
    """The class token is zero, and the tables are drawn as officially."""
    encoder = small_encoder()
    torch.manual_seed(0)
    fresh = type(encoder)(
        vocab_size=100,
        dim=64,
        num_heads=2,
        hidden_dim=9,
        depth=1,
        max_length=50,
        window_size=2,
        rank=1,
        class_token=True,
    )
    assert not fresh.class_token.any()
    assert abs(fresh.positions.std().item() - 0.02) < 2e-3 and abs(fresh.embedding.weight.std().item() - 0.02) < 2e-3


@pytest.mark.parametrize(
    "ids, mask, message",
    [
        (torch.zeros(1, 25, dtype=torch.int64), None, "25 tokens, and max_length is 24"),
        (torch.zeros(1, 0, dtype=torch.int64), None, r"shape \(1, 0\)"),
        (torch.tensor([[0, 11]]), None, "the id 11 is none of 0 to 10: vocab_size=11"),
        (torch.tensor([[-1, 11]]), None, "the id -1 is none of 0 to 10"),
        (torch.zeros(4, dtype=torch.int64), None, r"shape \(4,\)"),
        (torch.zeros(1, 4), None, "torch.float32: they are torch.int64"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4), "mask is torch.float32"),
        (
            torch.zeros(1, 4, dtype=torch.int64),
            torch.ones(1, 5, dtype=torch.bool),
            r"it is torch.bool of shape \(1, 4\)",
        ),
    ],
)
def test_wrong_inputs(ids, mask, message):
    with pytest.raises(InputError, match=message) as caught:
        small_encoder()(ids, mask)
    assert "\n" not in str(caught.value)
