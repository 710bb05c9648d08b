"""Performer's random features, and the initial values of the other efficient mechanisms."""

import functools

import pytest
import torch

from backbones.attention.efficient import (
    LinformerAttention,
    PerformerAttention,
    performer_attention,
    redraw_features,
    sample_features,
)
from tests.backbones.helpers import random_images


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_performer_with_many_tokens_in_half_precision(dtype):
    """The sum over 20000 keys would overflow in float16."""
    query, key, value = (random_images(1, 1, 20000, 8, seed=seed) for seed in (1, 2, 3))
    features = sample_features(32, 8).double()
    expected = performer_attention(query[:, :, :50], key, value, features=features)
    half = [x.to(dtype) for x in (query[:, :, :50], key, value)]
    for enabled in (False, True):
        with torch.autocast("cpu", dtype, enabled=enabled):
            output = performer_attention(*half, features=features.float())
        assert output.dtype == dtype and (output.double() - expected).abs().max() < 0.05


@pytest.mark.parametrize("number, dim", [(256, 48), (20, 32)])
def test_features_are_orthogonal_in_groups_and_as_long_as_gaussian_vectors(number, dim):
    features = sample_features(number, dim, generator=torch.Generator().manual_seed(0)).double()
    assert features.shape == (number, dim)
    products = features[:dim] @ features[:dim].T
    assert (products - products.diagonal().diag()).abs().max() < 1e-2
    assert features.norm(dim=1).square().mean() == pytest.approx(dim, rel=0.1) and features.norm(dim=1).std() > 0.3


def test_redrawn_features_depend_on_the_seed_and_are_saved():
    create = functools.partial(PerformerAttention, 8, num_heads=2, num_features=12)
    first, second = (torch.nn.Sequential(create(), create()) for _ in range(2))
    assert not torch.equal(first[0].features, second[0].features)
    redraw_features(first, seed=3)
    redraw_features(second, seed=3)
    assert torch.equal(first[1].features, second[1].features)
    assert not torch.equal(first[0].features, first[1].features)
    redraw_features(second, seed=4)
    assert not torch.equal(first[1].features, second[1].features)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first[1].features, second[1].features)


def test_initial_projections_of_linformer_keep_the_scale():
    table, bound = LinformerAttention(8, num_heads=2, map_size=(9, 9)).project_length, 256**-0.5
    assert table.shape == (82, 256) and 0.9 * bound < table.abs().max() <= bound
