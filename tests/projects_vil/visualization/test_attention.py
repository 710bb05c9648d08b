"""The attention weights times the values equal the output of the module, for every mechanism."""

import pytest
import torch
from torch import Tensor, nn

from backbones.attention.dense import DenseAttention, join_tokens
from backbones.attention.efficient import GlobalMemoryAttention, PerformerAttention, SpatialReductionAttention
from backbones.attention.long_short import DualNormAttention, LongShortAttention
from backbones.attention.sliding_chunk import SlidingChunkAttention
from backbones.cvt import ConvLongShortAttention
from projects_vil.visualization.attention import AttentionWeights, attention_weights
from tests.backbones.helpers import random_images, randomize

DIM, HEADS, HEIGHT, WIDTH = 8, 2, 7, 10
POSITIONS = [(0, 0), (3, 6), (6, 9)]


CASES = [
    (DenseAttention, 2, dict(bias_size=(5, 4))),
    (DenseAttention, 1, dict(bias_size=(5, 4), update_globals=False)),
    (SlidingChunkAttention, 2, dict(chunk_size=2, relative_bias=True, mode="exact")),
    (SlidingChunkAttention, 1, dict(chunk_size=2, mode="cyclic", shared_projections=False)),
    (SlidingChunkAttention, 1, dict(chunk_size=5, relative_bias=True, update_globals=False)),
    (LongShortAttention, 2, dict(chunk_size=3, rank=2, relative_bias=True)),
    (GlobalMemoryAttention, 3, {}),
    (SpatialReductionAttention, 2, dict(reduction=8)),
    (SpatialReductionAttention, 1, dict(reduction=1, update_globals=False)),
    (PerformerAttention, 2, dict(num_features=6)),
    (ConvLongShortAttention, 0, dict(chunk_size=2, rank=3)),
]


def build(attention_type: type, num_global: int, options: dict) -> tuple[nn.Module, Tensor, Tensor | None]:
    """Build a random attention in float64 and eval mode, and its input."""
    if attention_type is not ConvLongShortAttention:
        options = {**options, "num_global_tokens": num_global}
    module = randomize(attention_type(DIM, num_heads=HEADS, **options)).double().eval()
    global_tokens = random_images(1, num_global, DIM, seed=2) if num_global else None
    return module, random_images(1, HEIGHT, WIDTH, DIM), global_tokens


def weights_at(module: nn.Module, tokens: Tensor, global_tokens: Tensor | None, row: int, col: int) -> AttentionWeights:
    return attention_weights(module, join_tokens(tokens, global_tokens), tokens.shape[1:3], row, col)


def inputs_of(layer: nn.Module, module: nn.Module, *inputs) -> list[Tensor]:
    """Return the input of each call of a layer."""
    caught = []
    handle = layer.register_forward_pre_hook(lambda layer, args: caught.append(args[0].detach()))
    module(join_tokens(*inputs), inputs[0].shape[1:3])
    handle.remove()
    return caught


def values_of(module: nn.Module, tokens: Tensor, global_tokens: Tensor | None) -> dict[str, Tensor]:
    """Return the values (1, L, C) of the tokens, of projected or reduced keys, and of the global tokens."""
    if isinstance(module, DualNormAttention):
        flat = tokens.flatten(1, 2)
        values = module.qkv(flat)[..., 2 * DIM :] if hasattr(module, "qkv") else module.conv_qkv(tokens)[2]
        values = module.local_norm(values)
        shares = module.dynamic_projection(tokens).flatten(1, 2).softmax(dim=1)
        rank, width = shares.shape[2] // HEADS, DIM // HEADS
        sums = [shares[..., h * rank :][..., :rank].mT @ values[..., h * width :][..., :width] for h in range(HEADS)]
        parts = {"direct": values, "projected": module.projected_norm(torch.cat(sums, dim=2))}
        if global_tokens is not None:
            parts["to_globals"] = module.local_norm(module.qkv(global_tokens)[..., 2 * DIM :])
        return parts
    if isinstance(module, SlidingChunkAttention):
        values = {"direct": module.key_value(tokens).flatten(1, 2)[..., DIM:]}
        if global_tokens is not None:
            values["to_globals"] = module.key_value(global_tokens)[..., DIM:]
        return values
    if isinstance(module, GlobalMemoryAttention):
        return {"to_globals": module.key_value(global_tokens)[..., DIM:]}
    if isinstance(module, SpatialReductionAttention):
        (sequence,) = inputs_of(module.key_value, module, tokens, global_tokens)
        values = module.key_value(sequence)[..., DIM:]
    else:
        values = module.qkv(join_tokens(tokens, global_tokens))[..., 2 * DIM :]
    num_global = 0 if global_tokens is None else global_tokens.shape[1]
    name = "projected" if getattr(module, "reduction", 1) > 1 else "direct"
    return {"to_globals": values[:, :num_global], name: values[:, num_global:]}


@torch.no_grad()
def check(module: nn.Module, tokens: Tensor, global_tokens: Tensor | None, row: int, col: int) -> AttentionWeights:
    """Check that the weights are not negative, sum to 1, and give the output before its projection."""
    attention = weights_at(module, tokens, global_tokens, row, col)
    parts = {"direct": attention.direct.flatten(1), "projected": attention.projected}
    parts["to_globals"] = attention.to_globals
    values = values_of(module, tokens, global_tokens)
    output = 0
    for name, weights in parts.items():
        assert not weights.requires_grad and (weights >= -1e-12).all()
        if name not in values:
            assert not weights.any()
            continue
        # (M, L) and (L, M, D)
        output = output + torch.einsum("ml,lmd->md", weights, values[name][0].unflatten(1, (HEADS, -1)))
    expected = inputs_of(module.proj, module, tokens, global_tokens)[0].flatten(0, -2)[-HEIGHT * WIDTH :]
    torch.testing.assert_close(output.flatten(), expected[row * WIDTH + col], rtol=1e-9, atol=1e-9)
    ones = torch.ones(HEADS, dtype=torch.float64)
    torch.testing.assert_close(sum(weights.sum(dim=1) for weights in parts.values()), ones)
    shown = (attention.direct + attention.spread).sum(dim=(1, 2)) + attention.to_globals.sum(dim=1)
    torch.testing.assert_close(shown, ones)
    return attention


@pytest.mark.parametrize("attention_type, num_global, options", CASES)
def test_weights_and_values_give_the_output(attention_type, num_global, options):
    module, tokens, global_tokens = build(attention_type, num_global, options)
    for row, col in POSITIONS:
        attention = check(module, tokens, global_tokens, row, col)
    assert attention.spread.shape == (HEADS, HEIGHT, WIDTH) and attention.to_globals.shape == (HEADS, num_global)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_projected_weights_are_spread_by_the_dynamic_projection():
    module, tokens, _ = build(LongShortAttention, 0, {"chunk_size": 2, "rank": 3})
    attention = weights_at(module, tokens, None, 3, 6)
    shares = module.dynamic_projection(tokens)[0].flatten(0, 1).softmax(dim=0)
    for head in range(HEADS):
        expected = shares[:, 3 * head : 3 * head + 3] @ attention.projected[head]
        torch.testing.assert_close(attention.spread[head].flatten(), expected)


def test_a_reduced_position_is_spread_over_its_tokens():
    module, tokens, _ = build(SpatialReductionAttention, 0, {"reduction": 3})
    attention = weights_at(module, tokens, None, 3, 6)
    assert attention.projected.shape == (HEADS, 2 * 3) and not attention.direct.any()
    cells = attention.spread[:, :6, :9].unflatten(2, (3, 3)).unflatten(1, (2, 3))
    expected = (attention.projected / 9).unflatten(1, (2, 3))[:, :, None, :, None].expand_as(cells)
    torch.testing.assert_close(cells, expected)
    # The last row and column are outside of the reduced feature map.
    assert not attention.spread[:, 6:].any() and not attention.spread[:, :, 9:].any()
