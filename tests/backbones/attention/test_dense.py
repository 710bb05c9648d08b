"""Full attention: equal to the reference, with bias and global tokens in the right positions."""

import pytest
import torch

from backbones.attention import reference
from backbones.attention.dense import DenseAttention, dense_attention, merge_heads, split_heads
from tests.backbones.helpers import (
    assert_all_close,
    attention_inputs,
    outputs_and_gradients,
    random_images,
    randomise,
    trace,
)


def dense_module(num_global: int, *, size: tuple[int, int] | None, **options) -> DenseAttention:
    module = DenseAttention(8, num_heads=2, num_global_tokens=num_global, bias_size=size, **options)
    return randomise(module).double()


def module_inputs(num_global: int, height: int, width: int) -> tuple:
    tokens = random_images(2, height, width, 8)
    return tokens, random_images(2, num_global, 8, seed=2) if num_global else None


@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_the_reference(with_bias):
    inputs = {name: tensor.flatten(2, 3) for name, tensor in attention_inputs(5, 7).items()}
    if with_bias:
        inputs["bias"] = random_images(2, 35, 35)
    actual = outputs_and_gradients(dense_attention, inputs)
    assert_all_close(actual, outputs_and_gradients(reference.attention, inputs), tolerance=1e-12)


def test_heads_are_split_and_merged():
    tokens = random_images(2, 3, 5, 8)
    heads = split_heads(tokens, 2)
    assert heads.shape == (2, 2, 3, 5, 4)
    torch.testing.assert_close(heads[:, 1], tokens[..., 4:])
    torch.testing.assert_close(merge_heads(heads), tokens)


@pytest.mark.parametrize("num_global", [0, 1, 2])
@pytest.mark.parametrize("size", [None, (3, 5)])
def test_module_is_plain_attention_head_by_head(num_global, size):
    module = dense_module(num_global, size=size)
    tokens, global_tokens = module_inputs(num_global, 3, 5)
    sequence = tokens.flatten(1, 2)
    if num_global:
        sequence = torch.cat([global_tokens, sequence], dim=1)
    query, key, value = module.qkv(sequence).chunk(3, dim=-1)
    heads = []
    for head in range(2):
        channels = slice(4 * head, 4 * head + 4)
        scores = query[..., channels] @ key[..., channels].transpose(1, 2) / 2
        if size:
            scores = scores + module.relative_bias(3, 5)[head]
        heads.append(scores.softmax(-1) @ value[..., channels])
    expected = module.projection(torch.cat(heads, dim=-1))
    output, global_output = module(tokens, global_tokens)
    torch.testing.assert_close(output, expected[:, num_global:].unflatten(1, (3, 5)), atol=1e-12, rtol=1e-12)
    if num_global:
        torch.testing.assert_close(global_output, expected[:, :num_global], atol=1e-12, rtol=1e-12)
    else:
        assert global_output is None


@pytest.mark.parametrize("size", [None, (3, 5)])
def test_module_that_drops_its_global_tokens(size):
    module, last = dense_module(2, size=size), dense_module(2, size=size, update_globals=False)
    missing, unexpected = last.load_state_dict(module.state_dict(), strict=False)
    assert not missing and len(unexpected) == (2 if size else 0)
    output, none = last(*module_inputs(2, 4, 6))
    assert none is None
    torch.testing.assert_close(output, module(*module_inputs(2, 4, 6))[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("size", [None, (3, 5)])
@pytest.mark.parametrize("traced_at", [(3, 5), (4, 7)])
def test_traced_once_equals_eager_at_other_sizes(size, traced_at):
    module = dense_module(2, size=size)
    traced = trace(module, module_inputs(2, *traced_at))
    for height, width in ((3, 5), (4, 7), (2, 9), (6, 1)):
        inputs = module_inputs(2, height, width)
        for actual, expected in zip(traced(*inputs), module(*inputs), strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_a_large_map_keeps_little_in_training():
    """The memory kept for the backward pass does not grow with the square of the tokens."""
    module, kept = dense_module(0, size=(3, 5)), []
    tokens = random_images(1, 20, 24, 8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        module(tokens, None)
    assert max(kept) < (20 * 24) ** 2 / 4


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 3e-3), (torch.bfloat16, 3e-2)])
def test_relative_bias_in_half_precision(dtype, tolerance):
    module, inputs = dense_module(2, size=(3, 5)), module_inputs(2, 7, 6)
    with torch.no_grad():
        expected = module(*inputs)[0]
        output = module.to(dtype)(*(x.to(dtype) for x in inputs))[0]
        assert (output.double() - expected).abs().max() < tolerance * expected.abs().max() * 4
        with torch.autocast("cpu", dtype):
            output = module.float()(*(x.float() for x in inputs))[0]
        assert (output.double() - expected).abs().max() < tolerance * expected.abs().max() * 4
