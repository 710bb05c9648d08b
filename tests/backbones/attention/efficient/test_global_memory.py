"""Global memory: ViL's attention with the window taken away."""

import pytest
import torch

from backbones.attention.efficient import GlobalMemoryAttention
from backbones.errors import ConfigError
from tests.backbones.helpers import random_images, randomise, trace


def module(num_global: int = 3, **options) -> GlobalMemoryAttention:
    return randomise(GlobalMemoryAttention(8, num_heads=2, num_global_tokens=num_global, **options)).double()


@pytest.mark.parametrize("num_global", [1, 2, 5])
def test_is_masked_full_attention(num_global):
    """Head by head, all tokens as keys, and minus infinity where a local token would see a local one."""
    attention, height, width = module(num_global), 3, 7
    tokens, global_tokens = random_images(2, height, width, 8), random_images(2, num_global, 8, seed=2)
    sequence = torch.cat([global_tokens, tokens.flatten(1, 2)], dim=1)
    query, (key, value) = attention.query(sequence), attention.key_value(sequence).chunk(2, dim=-1)
    hidden = torch.zeros(len(sequence[0]), len(sequence[0]), dtype=torch.bool)
    hidden[num_global:, num_global:] = True
    heads = []
    for channels in (slice(0, 4), slice(4, 8)):
        scores = query[..., channels] @ key[..., channels].transpose(1, 2) / 2
        heads.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value[..., channels])
    expected = attention.projection(torch.cat(heads, dim=-1))
    output, global_output = attention(tokens, global_tokens)
    torch.testing.assert_close(output.flatten(1, 2), expected[:, num_global:], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(global_output, expected[:, :num_global], atol=1e-12, rtol=1e-12)


def test_a_last_block_gives_the_same_maps_and_no_global_tokens():
    inputs = random_images(2, 4, 5, 8), random_images(2, 3, 8, seed=2)
    output, none = module(update_globals=False)(*inputs)
    assert none is None
    torch.testing.assert_close(output, module()(*inputs)[0])


def test_a_trace_is_right_for_other_sizes():
    attention = module()
    traced = trace(attention, (random_images(1, 3, 5, 8), random_images(1, 3, 8)))
    for height, width in ((7, 2), (1, 9)):
        inputs = random_images(2, height, width, 8), random_images(2, 3, 8, seed=3)
        for actual, expected in zip(traced(*inputs), attention(*inputs), strict=True):
            torch.testing.assert_close(actual, expected)


def test_without_a_global_token_there_is_nothing_to_see():
    with pytest.raises(ConfigError, match="at least one global token"):
        module(0)
