"""Linformer: attention to learned combinations of the tokens of one map size."""

import pytest
import torch

from backbones.attention.efficient import LinformerAttention
from backbones.errors import ConfigError
from tests.backbones.helpers import random_images, randomise


def module(num_global: int, **options) -> LinformerAttention:
    attention = LinformerAttention(
        8, num_heads=2, map_size=(3, 5), num_features=4, num_global_tokens=num_global, **options
    )
    return randomise(attention).double()


@pytest.mark.parametrize("num_global", [0, 1, 2])
def test_equals_its_definition_head_by_head(num_global):
    attention, tokens = module(num_global), random_images(2, 3, 5, 8)
    global_tokens = random_images(2, num_global, 8, seed=2) if num_global else None
    sequence = tokens.flatten(1, 2)
    if num_global:
        sequence = torch.cat([global_tokens, sequence], dim=1)
    query, (key, value) = attention.query(sequence), attention.key_value(sequence).chunk(2, dim=-1)
    key, value = (torch.einsum("bnc,nk->bkc", x, attention.project_length) for x in (key, value))
    heads = []
    for channels in (slice(0, 4), slice(4, 8)):
        scores = query[..., channels] @ key[..., channels].transpose(1, 2) / 2
        heads.append(scores.softmax(-1) @ value[..., channels])
    expected = attention.projection(torch.cat(heads, dim=-1))
    output, global_output = attention(tokens, global_tokens)
    torch.testing.assert_close(output.flatten(1, 2), expected[:, num_global:], atol=1e-12, rtol=1e-12)
    if num_global:
        torch.testing.assert_close(global_output, expected[:, :num_global], atol=1e-12, rtol=1e-12)
        last, none = module(num_global, update_globals=False)(tokens, global_tokens)
        assert none is None
        torch.testing.assert_close(last, output)
    (output.square().sum() + (0 if global_output is None else global_output.square().sum())).backward()
    assert all(p.grad.abs().sum() > 0 for p in attention.parameters())


def test_initial_projections_keep_the_scale():
    bound = 256**-0.5
    table = LinformerAttention(8, num_heads=2, map_size=(9, 9)).project_length
    assert table.shape == (82, 256) and 0.9 * bound < table.abs().max() <= bound


@pytest.mark.parametrize("size", [(5, 3), (3, 6)])
def test_another_map_size_raises(size):
    with pytest.raises(ConfigError, match=f"tied to maps of 3 x 5 tokens, and this one has {size[0]} x {size[1]}"):
        module(0)(random_images(1, *size, 8), None)
