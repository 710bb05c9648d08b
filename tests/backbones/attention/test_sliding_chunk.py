"""ViL attention as a module, token by token, and random-shift training."""

import pytest
import torch
from torch import Tensor

from backbones.attention.sliding_chunk import SHIFTS, SlidingChunkAttention, sample_shifts
from tests.backbones.attention.cases import attend
from tests.backbones.helpers import random_images, randomize, small_vil


def attention_module(num_global: int, *, shared: bool = True) -> SlidingChunkAttention:
    options = {"num_global_tokens": num_global, "relative_bias": True, "shared_projections": shared}
    return randomize(SlidingChunkAttention(8, num_heads=2, chunk_size=3, **options)).double()


@pytest.mark.parametrize("num_global, shared", [(1, True), (2, True), (2, False)])
def test_module_equals_explicit_products_per_head(num_global, shared):
    """On a feature map of one chunk. Global tokens attend to all tokens of any feature map."""
    module = attention_module(num_global, shared=shared)
    positions = [(row, col) for row in range(2) for col in range(3)]
    tokens, global_tokens = random_images(2, 2, 3, 8), random_images(2, num_global, 8, seed=2)
    everything = torch.cat([global_tokens, tokens.flatten(1, 2)], dim=1)

    def expected_of(queries: Tensor, bias: Tensor, own: str) -> Tensor:
        query, key_value = getattr(module, f"{own}query")(queries), getattr(module, f"{own}key_value")(everything)
        (key, value), heads = key_value.chunk(2, dim=-1), []
        for head in range(2):
            channels = slice(4 * head, 4 * head + 4)
            scores = query[..., channels] @ key[..., channels].transpose(1, 2) / 2 + bias[head]
            heads.append(scores.softmax(-1) @ value[..., channels])
        return getattr(module, "global_proj" if own else "proj")(torch.cat(heads, dim=-1))

    bias = torch.zeros(2, 6, num_global + 6, dtype=torch.float64)
    bias[:, :, :num_global] = module.local_to_global[:, None]
    for i, (row, col) in enumerate(positions):
        for j, (key_row, key_col) in enumerate(positions):
            bias[:, i, num_global + j] = module.relative_bias.table[(row - key_row + 5) * 11 + col - key_col + 5]
    output, global_output = attend(module, tokens, global_tokens)
    expected = expected_of(tokens.flatten(1, 2), bias, "").unflatten(1, (2, 3))
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    bias = torch.cat([module.global_to_global, module.global_to_local[:, :, None].expand(-1, -1, 6)], dim=2)
    expected = expected_of(global_tokens, bias, "" if shared else "global_")
    torch.testing.assert_close(global_output, expected, atol=1e-12, rtol=1e-12)


def test_evaluation_attends_to_all_chunks():
    module, inputs = attention_module(1), (random_images(2, 7, 11, 8), random_images(2, 1, 8))
    expected = attend(module, *inputs)[0]
    module.shift = (0, 1)
    assert not torch.allclose(attend(module, *inputs)[0], expected)
    torch.testing.assert_close(attend(module.eval(), *inputs)[0], expected)


def test_shifts_depend_only_on_the_seed_and_the_layer():
    models, sampled = (small_vil(), small_vil()), []
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    for seed in range(40):
        assert sample_shifts(models[0], seed=seed) == sample_shifts(models[1], seed=seed) > 1
        one, other = ([m.shift for m in x.modules() if isinstance(m, SlidingChunkAttention)] for x in models)
        assert one == other
        sampled.append(one)
    assert torch.equal(torch.rand(2), expected)
    assert any(len(set(shifts)) > 1 for shifts in sampled)
    assert all(set(of_layer) == set(SHIFTS) for of_layer in zip(*sampled, strict=True))
    sample_shifts(models[0], seed=None)
    assert {m.shift for m in models[0].modules() if isinstance(m, SlidingChunkAttention)} == {None}
