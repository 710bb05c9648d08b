"""Performer: linear attention by random features, and the features themselves."""

import pytest
import torch

from backbones.attention import reference
from backbones.attention.efficient import (
    PerformerAttention,
    performer_attention,
    redraw_features,
    redraw_interval,
    sample_features,
)
from tests.backbones.helpers import assert_all_close, outputs_and_gradients, random_images, randomise, trace


def random_inputs(queries: int, keys: int) -> dict[str, torch.Tensor]:
    return {
        "query": random_images(2, 3, queries, 8),
        "key": random_images(2, 3, keys, 8, seed=2),
        "value": random_images(2, 3, keys, 8, seed=3),
    }


@pytest.mark.parametrize("queries, keys", [(1, 1), (5, 7), (40, 23)])
def test_equals_the_quadratic_reference(queries, keys):
    options = {"features": sample_features(20, 8).double()}
    inputs = random_inputs(queries, keys)
    actual = outputs_and_gradients(performer_attention, inputs, **options)
    expected = outputs_and_gradients(reference.performer_attention, inputs, **options)
    assert_all_close(actual, expected, tolerance=1e-10)


def test_many_features_come_near_softmax_attention():
    """It approximates softmax attention: the error falls with the number of features."""
    inputs = {name: 0.5 * tensor for name, tensor in random_inputs(6, 9).items()}
    expected = reference.attention(**inputs)
    generator = torch.Generator().manual_seed(0)
    errors = []
    for number in (16, 8192):
        output = performer_attention(**inputs, features=sample_features(number, 8, generator=generator).double())
        errors.append((output - expected).abs().mean() / expected.abs().mean())
    assert errors[1] < 0.05 and errors[1] < errors[0] / 3


def test_images_of_a_batch_do_not_mix():
    inputs = random_inputs(4, 6)
    inputs["key"][1] *= 3
    features = sample_features(20, 8).double()
    together = performer_attention(**inputs, features=features)
    alone = performer_attention(**{name: tensor[:1] for name, tensor in inputs.items()}, features=features)
    torch.testing.assert_close(together[:1], alone, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_many_tokens(dtype):
    """20000 keys, whose sum float16 would not hold."""
    query, key, value = (random_images(1, 1, 20000, 8, seed=seed) for seed in (1, 2, 3))
    features = sample_features(32, 8).double()
    expected = performer_attention(query[:, :, :50], key, value, features=features)
    half = [x.to(dtype) for x in (query[:, :, :50], key, value)]
    output = performer_attention(*half, features=features.float())
    assert output.dtype == dtype
    assert (output.double() - expected).abs().max() < 0.05
    with torch.autocast("cpu", dtype):
        assert torch.equal(performer_attention(*half, features=features.float()), output)


@pytest.mark.parametrize("number, dim", [(256, 48), (256, 64), (20, 32)])
def test_features_are_orthogonal_in_groups_and_as_long_as_gaussian_vectors(number, dim):
    features = sample_features(number, dim, generator=torch.Generator().manual_seed(0)).double()
    assert features.shape == (number, dim)
    group = features[:dim]
    products = group @ group.T
    assert (products - products.diagonal().diag()).abs().max() < 1e-4
    assert features.norm(dim=1).square().mean() == pytest.approx(dim, rel=0.1)
    assert features.norm(dim=1).std() > 0.3


def test_redrawing_is_the_same_in_every_process_and_travels_with_the_state():
    def model():
        return torch.nn.Sequential(*(PerformerAttention(8, num_heads=2, num_features=12) for _ in range(2)))

    first, second = model(), model()
    assert not torch.equal(first[0].features, second[0].features)
    assert redraw_features(first, seed=3) == redraw_features(second, seed=3) == 2
    assert torch.equal(first[1].features, second[1].features)
    assert not torch.equal(first[0].features, first[1].features)
    redraw_features(second, seed=4)
    assert not torch.equal(first[1].features, second[1].features)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first[1].features, second[1].features)
    assert redraw_features(torch.nn.Linear(1, 1), seed=0) == 0


def test_redraw_interval():
    assert [redraw_interval(epoch) for epoch in (0, 1, 299)] == [1, 6, 1496]


def module(num_global: int, **options) -> PerformerAttention:
    attention = PerformerAttention(8, num_heads=2, num_features=12, num_global_tokens=num_global, **options)
    return randomise(attention).double()


def inputs(height: int, width: int, num_global: int) -> tuple:
    return random_images(2, height, width, 8), random_images(2, num_global, 8, seed=2) if num_global else None


@pytest.mark.parametrize("num_global", [0, 1, 2])
def test_module(num_global):
    attention = module(num_global)
    output, global_output = attention(*inputs(3, 5, num_global))
    tokens, global_tokens = inputs(3, 5, num_global)
    sequence = tokens.flatten(1, 2) if not num_global else torch.cat([global_tokens, tokens.flatten(1, 2)], dim=1)
    query, key, value = (x.unflatten(2, (2, 4)).transpose(1, 2) for x in attention.qkv(sequence).chunk(3, dim=-1))
    expected = reference.performer_attention(query, key, value, features=attention.features)
    expected = attention.projection(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(output.flatten(1, 2), expected[:, num_global:], atol=1e-12, rtol=1e-12)
    if num_global:
        torch.testing.assert_close(global_output, expected[:, :num_global], atol=1e-12, rtol=1e-12)
        last, none = module(num_global, update_globals=False)(tokens, global_tokens)
        assert none is None
        torch.testing.assert_close(last, output)


def test_a_trace_is_right_for_other_sizes():
    attention = module(1)
    traced = trace(attention, inputs(4, 5, 1))
    for height, width in ((7, 3), (1, 9)):
        example = inputs(height, width, 1)
        for actual, expected in zip(traced(*example), attention(*example), strict=True):
            torch.testing.assert_close(actual, expected)
