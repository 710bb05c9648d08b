"""Long-short attention: larger chunks, the dynamic projection, and the module step by step."""

import itertools

import pytest
import torch
from torch import Tensor

from backbones.attention import long_short
from backbones.attention.long_short import LongShortAttention, dynamic_projection
from tests.backbones.attention.cases import attend, case, side_of
from tests.backbones.helpers import assert_all_close, outputs_and_gradients, random_images, randomize


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


@pytest.mark.parametrize("chunk_size, num_global", [(1, 1), (2, 0), (3, 0), (3, 2), (4, 1), (8, 0)])
def test_module_equals_its_steps_by_hand(chunk_size, num_global):
    """Each token is computed separately: DualLN, the projection, one softmax, and the update of the global tokens.

    The index of the bias is the official formula.
    """
    options = {"chunk_size": chunk_size, "num_global_tokens": num_global, "relative_bias": True}
    module = randomize(LongShortAttention(8, num_heads=2, rank=5, **options)).double()
    side = side_of(chunk_size)
    last, stride = chunk_size + side - 1, chunk_size + 2 * side
    assert len(module.relative_bias.table) == 2 * last * (stride + 1) + 1
    (dim, heads, rank), (height, width) = (8, 2, 5), (7, 10)
    tokens = random_images(2, height, width, dim)
    global_tokens = random_images(2, num_global, dim, seed=2) if num_global else None
    update, global_update = attend(module, tokens, global_tokens)

    def normed(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias

    def split(x: Tensor) -> Tensor:
        return x.unflatten(1, (heads, -1)).transpose(0, 1)

    for image in range(2):
        local = tokens[image].reshape(-1, dim)
        everything = local if global_tokens is None else torch.cat([global_tokens[image], local])
        query, key, value = (everything @ module.qkv.weight.T + module.qkv.bias).split(dim, dim=-1)
        key, value = normed(key, module.local_norm), normed(value, module.local_norm)
        weights = split(local @ module.dynamic_projection.weight.T).softmax(dim=1).mT
        projected_key, projected_value = (
            normed((weights @ split(x[num_global:])).transpose(0, 1).flatten(1), module.projected_norm)
            for x in (key, value)
        )

        output = torch.zeros(height * width, dim, dtype=torch.float64)
        for head, row, col in itertools.product(range(heads), range(height), range(width)):
            channels, token = slice(4 * head, 4 * head + 4), row * width + col
            seen, bias = [], []
            for key_row, key_col in itertools.product(range(height), range(width)):
                offsets = [key - own // chunk_size * chunk_size for key, own in ((key_row, row), (key_col, col))]
                if all(-side <= offset <= last for offset in offsets):
                    seen.append(num_global + key_row * width + key_col)
                    bias.append((row - key_row + last) * stride + col - key_col + last)
            keys = torch.cat([projected_key, key[:num_global], key[seen]])[:, channels]
            values = torch.cat([projected_value, value[:num_global], value[seen]])[:, channels]
            products = keys @ query[num_global + token, channels] / 2
            products[rank + num_global :] += module.relative_bias.table[bias, head]
            output[token, channels] = products.softmax(0) @ values
        expected = output @ module.proj.weight.T + module.proj.bias
        torch.testing.assert_close(update[image].flatten(0, 1), expected, atol=1e-12, rtol=0)

        if global_tokens is None:
            assert global_update is None
            continue
        keys, values = (split(torch.cat([x[:num_global], output])) for x in (key, value))
        own = (split(query[:num_global]) @ keys.mT / 2).softmax(-1) @ values
        expected = own.transpose(0, 1).flatten(1) @ module.proj.weight.T + module.proj.bias
        torch.testing.assert_close(global_update[image], expected, atol=1e-12, rtol=0)
