"""Spatial reduction: keys and values from a smaller map."""

import pytest
import torch

from backbones.attention.efficient import SpatialReductionAttention, instance_norm
from tests.backbones.helpers import random_images, randomise, trace


def module(num_global: int = 1, *, reduction: int = 2, **options) -> SpatialReductionAttention:
    attention = SpatialReductionAttention(8, num_heads=2, reduction=reduction, num_global_tokens=num_global, **options)
    return randomise(attention).double()


def inputs(height: int, width: int, num_global: int) -> tuple:
    return random_images(2, height, width, 8), random_images(2, num_global, 8, seed=2) if num_global else None


@pytest.mark.parametrize("num_global", [0, 1, 2])
@pytest.mark.parametrize("height, width, reduction", [(4, 6, 2), (5, 7, 2), (7, 9, 3), (2, 9, 4), (3, 4, 1), (1, 1, 2)])
def test_equals_its_definition(num_global, height, width, reduction):
    """By loops over the positions of the smaller map; what does not fill one is not seen, unless nothing would be."""
    attention = module(num_global, reduction=reduction)
    tokens, global_tokens = inputs(height, width, num_global)
    sequence = tokens.flatten(1, 2)
    reduced = sequence
    if reduction > 1:
        padded = torch.zeros(2, max(height, reduction), max(width, reduction), 8, dtype=torch.float64)
        padded[:, :height, :width] = tokens
        positions = []
        for row in range(padded.shape[1] // reduction):
            for col in range(padded.shape[2] // reduction):
                rows = slice(row * reduction, (row + 1) * reduction)
                cols = slice(col * reduction, (col + 1) * reduction)
                positions.append(torch.einsum("bijc,ocij->bo", padded[:, rows, cols], attention.reduce.weight))
        reduced = torch.stack(positions, dim=1)
        mean = reduced.mean(dim=1, keepdim=True)
        reduced = (reduced - mean) / ((reduced - mean).square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
    if num_global:
        reduced, sequence = (torch.cat([global_tokens, x], dim=1) for x in (reduced, sequence))
    query, (key, value) = attention.query(sequence), attention.key_value(reduced).chunk(2, dim=-1)
    heads = []
    for channels in (slice(0, 4), slice(4, 8)):
        scores = query[..., channels] @ key[..., channels].transpose(1, 2) / 2
        heads.append(scores.softmax(-1) @ value[..., channels])
    expected = attention.projection(torch.cat(heads, dim=-1))
    output, global_output = attention(tokens, global_tokens)
    torch.testing.assert_close(output.flatten(1, 2), expected[:, num_global:], atol=1e-10, rtol=1e-10)
    if num_global:
        torch.testing.assert_close(global_output, expected[:, :num_global], atol=1e-10, rtol=1e-10)


def test_a_last_block_gives_the_same_maps_and_no_global_tokens():
    output, none = module(2, update_globals=False)(*inputs(5, 6, 2))
    assert none is None
    torch.testing.assert_close(output, module(2)(*inputs(5, 6, 2))[0])


def test_a_trace_is_right_for_other_sizes_also_below_a_reduction():
    attention = module(reduction=4)
    traced = trace(attention, inputs(9, 8, 1))
    for height, width in ((4, 5), (12, 7), (3, 2), (2, 30)):
        example = inputs(height, width, 1)
        for actual, expected in zip(traced(*example), attention(*example), strict=True):
            torch.testing.assert_close(actual, expected)


def test_instance_norm():
    x = random_images(2, 3, 11)
    expected = torch.nn.functional.instance_norm(x)
    torch.testing.assert_close(instance_norm(x), expected)
    assert instance_norm(x[:, :, :1]).eq(0).all()
    assert instance_norm(x.half()).dtype == torch.float16
