"""Long-short attention: the attended keys, the official bias, the dynamic projection, and the module step by step."""

import itertools

import pytest
import torch
from torch import Tensor

from backbones.attention import long_short
from backbones.attention.long_short import LongShortAttention, dynamic_projection
from backbones.layers.position import SegmentRelativeBias
from tests.backbones.attention.cases import attend, case, side_of
from tests.backbones.helpers import assert_all_close, outputs_and_gradients, random_images, randomize


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4])
def test_tokens_see_their_window(chunk_size):
    """Gradients show which keys influence each token. The expected keys come from plain loops."""
    height, width, side = 6, 11, side_of(chunk_size)
    _, by_reference, inputs = case("long_short", height, width, chunk_size=chunk_size, batch=1, heads=1)
    value = inputs["value"].requires_grad_()
    output = by_reference(**inputs)
    for row, col in itertools.product(range(height), range(width)):
        (gradient,) = torch.autograd.grad(output[0, 0, row, col].sum(), value, retain_graph=True)
        first_row, first_col = row // chunk_size * chunk_size, col // chunk_size * chunk_size
        expected = torch.zeros(height, width, dtype=torch.bool)
        for key_row, key_col in itertools.product(range(height), range(width)):
            expected[key_row, key_col] = (
                first_row - side <= key_row < first_row + chunk_size + side
                and first_col - side <= key_col < first_col + chunk_size + side
            )
        assert torch.equal(gradient[0, 0].abs().sum(-1) > 0, expected)


@pytest.mark.parametrize("chunk_size", [1, 2, 4])
def test_segments_in_larger_chunks_equal_the_reference(chunk_size, monkeypatch):
    """Compute as on a GPU."""
    monkeypatch.setattr(long_short, "_CHUNKS", {"cpu": 8})
    function, by_reference, inputs = case("long_short", 11, 18, chunk_size=chunk_size, biases=False)
    expected = outputs_and_gradients(by_reference, inputs)
    assert_all_close(outputs_and_gradients(function, inputs), expected, tolerance=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_dynamic_projection_of_very_many_tokens_in_half_precision(dtype, autocast):
    """70,000 equal weights would be subnormal in float16, and their sum would be wrong in bfloat16."""
    value, scores = torch.ones(1, 1, 200, 350, 2), torch.zeros(1, 1, 200, 350, 1)
    with torch.autocast("cpu", dtype, enabled=autocast):
        projected = dynamic_projection(*(x if autocast else x.to(dtype) for x in (scores, value)))
    assert projected.dtype == (torch.float32 if autocast else dtype)
    torch.testing.assert_close(projected.float(), torch.ones(1, 1, 1, 2), atol=2e-3, rtol=0)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 8])
def test_bias_index_is_the_official_formula(chunk_size):
    """The expected offsets come from plain loops over the positions in the segment and in its window."""
    bias, p = SegmentRelativeBias(chunk_size, 2), side_of(chunk_size)
    with torch.no_grad():
        bias.table.copy_(torch.arange(bias.table.numel()).view_as(bias.table))
    assert len(bias.table) == 2 * (chunk_size + p - 1) * (2 * p + chunk_size + 1) + 1
    values, window = bias(), range(-p, chunk_size + p)
    for position, (row, col) in enumerate(itertools.product(range(chunk_size), repeat=2)):
        for slot, (key_row, key_col) in enumerate(itertools.product(window, repeat=2)):
            shifted_row, shifted_col = row - key_row + p + chunk_size - 1, col - key_col + p + chunk_size - 1
            index = shifted_row * (2 * p + chunk_size) + shifted_col
            assert torch.equal(values[:, position, slot], bias.table[index])
    assert values.max() == bias.table.max() and list(bias.state_dict()) == ["table"]


@pytest.mark.parametrize("num_global", [0, 1, 2])
def test_module_equals_its_steps_by_hand(num_global):
    """Each token is computed separately: DualLN, the projection, one softmax, and the update of the global tokens."""
    module = LongShortAttention(8, num_heads=2, chunk_size=3, rank=5, num_global_tokens=num_global, relative_bias=True)
    randomize(module).double()
    (dim, heads, rank), (height, width) = (8, 2, 5), (7, 10)
    tokens = random_images(2, height, width, dim)
    global_tokens = random_images(2, num_global, dim, seed=2) if num_global else None
    update, global_update = attend(module, tokens, global_tokens)

    def normed(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias

    for image in range(2):
        local = tokens[image].reshape(-1, dim)
        everything = local if global_tokens is None else torch.cat([global_tokens[image], local])
        query, key, value = (everything @ module.qkv.weight.T + module.qkv.bias).split(dim, dim=-1)
        key, value = normed(key, module.local_norm), normed(value, module.local_norm)
        scores = local @ module.dynamic_projection.weight.T
        projected_key, projected_value = [], []
        for head in range(heads):
            channels = slice(4 * head, 4 * head + 4)
            weights = scores[:, head * rank : (head + 1) * rank].softmax(dim=0)
            projected_key.append(weights.T @ key[num_global:, channels])
            projected_value.append(weights.T @ value[num_global:, channels])
        projected_key = normed(torch.cat(projected_key, dim=-1), module.projected_norm)
        projected_value = normed(torch.cat(projected_value, dim=-1), module.projected_norm)

        output = torch.zeros(height * width, dim, dtype=torch.float64)
        for head, row, col in itertools.product(range(heads), range(height), range(width)):
            channels, token = slice(4 * head, 4 * head + 4), row * width + col
            seen, bias = [], []
            for key_row, key_col in itertools.product(range(height), range(width)):
                if -1 <= key_row - row // 3 * 3 <= 3 and -1 <= key_col - col // 3 * 3 <= 3:
                    seen.append(num_global + key_row * width + key_col)
                    bias.append(module.relative_bias.table[(row - key_row + 3) * 5 + col - key_col + 3, head])
            keys = torch.cat([projected_key, key[:num_global], key[seen]])[:, channels]
            values = torch.cat([projected_value, value[:num_global], value[seen]])[:, channels]
            products = keys @ query[num_global + token, channels] / 2
            products[rank + num_global :] += torch.stack(bias)
            output[token, channels] = products.softmax(0) @ values
        expected = output @ module.proj.weight.T + module.proj.bias
        torch.testing.assert_close(update[image].flatten(0, 1), expected, atol=1e-12, rtol=0)

        if global_tokens is None:
            assert global_update is None
            continue
        own = torch.zeros(num_global, dim, dtype=torch.float64)
        for head in range(heads):
            channels = slice(4 * head, 4 * head + 4)
            keys = torch.cat([key[:num_global, channels], output[:, channels]])
            values = torch.cat([value[:num_global, channels], output[:, channels]])
            own[:, channels] = (query[:num_global, channels] @ keys.T / 2).softmax(-1) @ values
        expected = own @ module.proj.weight.T + module.proj.bias
        torch.testing.assert_close(global_update[image], expected, atol=1e-12, rtol=0)
