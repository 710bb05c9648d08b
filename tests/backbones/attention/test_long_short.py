"""Long-short attention: equal to the reference, blind to padding, linear in memory, right in every type and trace."""

import contextlib
import functools
import itertools

import pytest
import torch
from torch import Tensor

from backbones.attention import long_short, reference
from backbones.attention.chunks import copied_windows
from backbones.attention.long_short import LongShortAttention, dynamic_projection, long_short_attention
from backbones.errors import ConfigError
from backbones.layers.position import SegmentRelativeBias
from tests.backbones.helpers import (
    LargestTensor,
    assert_all_close,
    assert_padding_is_hidden_in_half_precision,
    mark_as_on_a_gpu,
    outputs_and_gradients,
    random_images,
    randomise,
    trace,
)

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = [
    (1, 1),
    (2, 1),  # below one segment
    (3, 3),
    (6, 5),
    (9, 9),
    (7, 11),  # no multiples
    (12, 6),
    (3, 14),
    (1, 20),  # long and thin
]
# Global tokens, relative bias, projected keys
EXTRAS = [(0, False, 1), (0, True, 4), (1, False, 7), (1, True, 1), (2, False, 30), (2, True, 5)]


def side_of(window_size: int) -> int:
    return max(window_size // 2, 1)


def attention_inputs(
    height: int,
    width: int,
    *,
    window_size: int = 3,
    num_global: int = 0,
    bias: bool = False,
    rank: int = 4,
    batch: int = 2,
    heads: int = 2,
    channels: int = 4,
) -> dict[str, Tensor]:
    """Random float64 arguments of ``long_short_attention``; what is not asked for is left out."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = {name: normal(batch, heads, height, width, channels) for name in ("query", "key", "value")}
    inputs |= {name: normal(batch, heads, rank, channels) for name in ("projected_key", "projected_value")}
    if num_global:
        inputs |= {name: normal(batch, heads, num_global, channels) for name in ("global_key", "global_value")}
    if bias:
        length = window_size + 2 * side_of(window_size)
        inputs["local_bias"] = normal(heads, window_size**2, length**2)
    return inputs


def extras(num_global: int, bias: bool, rank: int) -> dict:
    return {"num_global": num_global, "bias": bias, "rank": rank}


@pytest.mark.parametrize("height, width", SIZES)
@pytest.mark.parametrize("window_size", [1, 2, 3, 4, 5])
def test_equals_the_reference(window_size, height, width):
    # Each of the extras occurs with several sizes and with every window.
    extra = EXTRAS[(SIZES.index((height, width)) + window_size) % len(EXTRAS)]
    inputs = attention_inputs(height, width, window_size=window_size, **extras(*extra))
    actual = outputs_and_gradients(long_short_attention, inputs, window_size=window_size)
    expected = outputs_and_gradients(reference.long_short_attention, inputs, window_size=window_size)
    assert_all_close(actual, expected, tolerance=1e-11)


@pytest.mark.parametrize("window_size", [7, 8])
def test_equals_the_reference_for_the_papers_windows(window_size):
    inputs = attention_inputs(19, 26, window_size=window_size, num_global=1, bias=True, rank=8)
    actual = outputs_and_gradients(long_short_attention, inputs, window_size=window_size)
    expected = outputs_and_gradients(reference.long_short_attention, inputs, window_size=window_size)
    assert_all_close(actual, expected, tolerance=1e-11)


@pytest.mark.parametrize("function", [long_short_attention, reference.long_short_attention])
@pytest.mark.parametrize("window_size", [1, 2, 3, 4])
def test_what_each_token_sees(function, window_size):
    """Token by token, with plain loops: gradients show which keys have an influence."""
    height, width, side = 6, 11, side_of(window_size)
    inputs = attention_inputs(height, width, window_size=window_size, batch=1, heads=1)
    value = inputs["value"].requires_grad_()
    output = function(**inputs, window_size=window_size)
    for row, col in itertools.product(range(height), range(width)):
        (gradient,) = torch.autograd.grad(output[0, 0, row, col].sum(), value, retain_graph=True)
        first_row, first_col = row // window_size * window_size, col // window_size * window_size
        expected = torch.zeros(height, width, dtype=torch.bool)
        for key_row, key_col in itertools.product(range(height), range(width)):
            expected[key_row, key_col] = (
                first_row - side <= key_row < first_row + window_size + side
                and first_col - side <= key_col < first_col + window_size + side
            )
        assert torch.equal(gradient[0, 0].abs().sum(-1) > 0, expected)


def test_one_token_by_hand():
    """One softmax over the window, the projected keys and the global tokens, for a token in the middle."""
    inputs = attention_inputs(12, 12, num_global=2, bias=True, batch=1, heads=1)
    output = long_short_attention(**inputs, window_size=3)[0, 0, 7, 5]
    # Segment of rows 6 to 8 and columns 3 to 5, a token more round it, and position 1 * 3 + 2 in it
    keys = [inputs[name][0, 0] for name in ("projected_key", "global_key")]
    values = [inputs[name][0, 0] for name in ("projected_value", "global_value")]
    keys.append(inputs["key"][0, 0, 5:10, 2:7].reshape(25, 4))
    values.append(inputs["value"][0, 0, 5:10, 2:7].reshape(25, 4))
    scores = torch.cat(keys) @ inputs["query"][0, 0, 7, 5] / 2
    scores[6:] += inputs["local_bias"][0, 5]
    torch.testing.assert_close(output, scores.softmax(0) @ torch.cat(values), atol=1e-12, rtol=0)


@functools.cache
def traced_attention(window_size: int, *extra, copied: bool):
    """The kernel traced at one size, one image, as a function of named tensors."""
    example = attention_inputs(8, 13, batch=1, window_size=window_size, **extras(*extra))

    def attend(*tensors):
        return long_short_attention(**dict(zip(example, tensors, strict=True)), window_size=window_size)

    with copied_windows() if copied else contextlib.nullcontext():
        traced = trace(attend, tuple(example.values()))
    assert ("aten::unfold" in str(traced.inlined_graph)) is not copied
    return lambda **inputs: traced(*(inputs[name] for name in example))


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("window_size", [1, 2, 3])
@pytest.mark.parametrize("extra", EXTRAS[:2] + EXTRAS[-1:], ids=str)
def test_traced_once_equals_the_reference_at_all_sizes(extra, window_size, copied):
    traced = traced_attention(window_size, *extra, copied=copied)
    for height, width in SIZES:
        inputs = attention_inputs(height, width, window_size=window_size, **extras(*extra))
        expected = outputs_and_gradients(reference.long_short_attention, inputs, window_size=window_size)
        assert_all_close(outputs_and_gradients(traced, inputs), expected, tolerance=1e-11)


@pytest.mark.parametrize("window_size", [1, 2, 3])
@pytest.mark.parametrize("height, width", [(4, 5), (7, 11)])
def test_never_reads_beyond_the_map(height, width, window_size):
    """The map is cut out of a larger one full of NaN, to which no gradient goes either."""
    inputs = attention_inputs(height, width, window_size=window_size, num_global=1)
    expected = long_short_attention(**inputs, window_size=window_size)
    surrounded = {}
    for name in ("query", "key", "value"):
        frame = torch.full((2, 2, height + 8, width + 8, 4), float("nan"), dtype=torch.float64)
        frame[:, :, 4:-4, 4:-4] = inputs[name]
        surrounded[name] = frame.requires_grad_()
    cut = {name: frame[:, :, 4:-4, 4:-4] for name, frame in surrounded.items()}
    output = long_short_attention(**(inputs | cut), window_size=window_size)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    output.square().sum().backward()
    for frame in surrounded.values():
        inside = frame.grad[:, :, 4:-4, 4:-4].clone()
        assert inside.isfinite().all() and inside.abs().sum() > 0
        frame.grad[:, :, 4:-4, 4:-4] = 0
        assert frame.grad.eq(0).all()


@pytest.mark.parametrize("score", [-5e3, -2e4])
def test_padding_is_hidden_from_very_low_scores(score):
    """Where all keys score far below the 0 of padding, padding still counts for nothing."""
    side = (abs(score) / 2) ** 0.5  # 4 channels, scaled by 1/2
    inputs = attention_inputs(7, 11)
    inputs["query"] = 0 * inputs["query"] + side
    inputs |= {name: 1e-6 * inputs[name] - side for name in ("key", "projected_key")}
    actual = long_short_attention(**inputs, window_size=3)
    expected = reference.long_short_attention(**inputs, window_size=3)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("extra", EXTRAS[:1] + EXTRAS[-1:], ids=str)
def test_padding_is_hidden_from_very_low_scores_in_half_precision(dtype, autocast, extra):
    inputs = attention_inputs(7, 11, channels=64, **extras(*extra))
    functions = (
        functools.partial(function, window_size=3)
        for function in (long_short_attention, reference.long_short_attention)
    )
    assert_padding_is_hidden_in_half_precision(*functions, inputs, dtype=dtype, autocast=autocast)


@pytest.mark.parametrize("channels", [4, 8])
@pytest.mark.parametrize("extra", EXTRAS[:1] + EXTRAS[-1:], ids=str)
def test_the_marks_of_a_gpu_give_the_same(monkeypatch, channels, extra):
    inputs = attention_inputs(7, 11, channels=channels, **extras(*extra))
    expected = outputs_and_gradients(long_short_attention, inputs, window_size=3)
    monkeypatch.setattr(long_short, "mask_channels", mark_as_on_a_gpu)
    actual = outputs_and_gradients(long_short_attention, inputs, window_size=3)
    assert_all_close(actual, expected, tolerance=1e-11)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-6), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)], ids=str
)
@pytest.mark.parametrize("height, width", [(2, 2), (7, 11)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def test_lower_precision_is_close_to_float64(height, width, dtype, tolerance, device):
    # 64 channels: the mask channel of hidden keys is largest for many channels, and float16 must hold it
    inputs = attention_inputs(height, width, num_global=2, bias=True, channels=64)
    rounded = {name: tensor.to(device, dtype) for name, tensor in inputs.items()}
    actual = outputs_and_gradients(long_short_attention, rounded, window_size=3)
    exact = {name: tensor.cpu().double() for name, tensor in rounded.items()}
    expected = outputs_and_gradients(reference.long_short_attention, exact, window_size=3)
    assert {tensor.dtype for tensor in actual.values()} == {dtype}
    for name, tensor in expected.items():
        error = (actual[name].cpu().double() - tensor).abs().max() / tensor.abs().max()
        assert error <= tolerance, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_hides_padding(dtype):
    inputs = {name: tensor.float() for name, tensor in attention_inputs(2, 4, channels=64, num_global=1).items()}
    inputs["query"] = 0 * inputs["query"] + 8
    inputs |= {name: inputs[name] - 8 for name in ("key", "projected_key", "global_key")}
    expected = long_short_attention(**inputs, window_size=3)
    with torch.autocast("cpu", dtype):
        actual = long_short_attention(**inputs, window_size=3)
    assert actual.dtype == dtype
    # With 64 scores near -500 the rounding is large, and padding at 0 would take all weight.
    assert (actual.float() - expected).abs().max() < 0.5 * expected.abs().max()


def largest_tensor(height: int, width: int, bias: bool) -> int:
    inputs = attention_inputs(
        height, width, window_size=7, num_global=1, rank=8, bias=bias, batch=1, heads=1, channels=2
    )
    inputs = {name: tensor.float().requires_grad_() for name, tensor in inputs.items()}
    with LargestTensor() as largest:
        long_short_attention(**inputs, window_size=7).sum().backward()
    return largest.numel


@pytest.mark.parametrize("bias", [False, True])
def test_memory_is_linear_in_the_tokens(bias):
    """Tokens of an image of 800 x 1336 at stride 4, and of a quarter of it."""
    small, large = largest_tensor(100, 167, bias), largest_tensor(200, 334, bias)
    assert large < (200 * 334) ** 2 / 100
    assert large / small < 5


def test_keys_are_copied_about_twice():
    """7 x 7 tokens see 13 x 13 keys, of which 13 x 7 and a column of shared ones are copied: 3.4 times if all were."""
    inputs = attention_inputs(210, 336, window_size=7, num_global=1, rank=8, batch=1, heads=1, channels=2)
    with LargestTensor() as largest:
        long_short_attention(**inputs, window_size=7)
    assert largest.nbytes < 2.2 * 210 * 336 * 3 * inputs["key"].element_size()


def projection_inputs(*, height: int = 5, width: int = 7, rank: int = 3) -> dict[str, Tensor]:
    key, value = random_images(2, 2, height, width, 4), random_images(2, 2, height, width, 4, seed=2)
    return {"scores": random_images(2, 2, height, width, rank, seed=3), "key": key, "value": value}


def test_dynamic_projection_is_equation_3():
    """Image by image and head by head: P has columns that sum to 1 over all tokens, and sums keys and values."""
    inputs = projection_inputs()
    projected_key, projected_value = dynamic_projection(**inputs)
    for image, head in itertools.product(range(2), range(2)):
        scores, key, value = (inputs[name][image, head].flatten(0, 1) for name in ("scores", "key", "value"))
        weights = scores.exp() / scores.exp().sum(0)
        torch.testing.assert_close(projected_key[image, head], weights.T @ key, atol=1e-12, rtol=0)
        torch.testing.assert_close(projected_value[image, head], weights.T @ value, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_dynamic_projection_of_very_many_tokens_in_half_precision(dtype, autocast):
    """70,000 equal weights: in float16 each would be below the least normal number, in bfloat16 sums would stall."""
    height, width = 200, 350
    value = torch.ones(1, 1, height, width, 2)
    scores = torch.zeros(1, 1, height, width, 1)
    with torch.autocast("cpu", dtype, enabled=autocast):
        projected, _ = dynamic_projection(*(x if autocast else x.to(dtype) for x in (scores, value, value)))
    assert projected.dtype == (torch.float32 if autocast else dtype)
    torch.testing.assert_close(projected.float(), torch.ones(1, 1, 1, 2), atol=2e-3, rtol=0)


@pytest.mark.parametrize("window_size", [1, 2, 3, 5, 7, 8])
def test_bias_index_is_the_official_formula(window_size):
    """Plain loops over positions in the segment and in its window."""
    bias = SegmentRelativeBias(window_size, 2)
    with torch.no_grad():
        bias.table.copy_(torch.arange(bias.table.numel()).view_as(bias.table))
    p = side_of(window_size)
    assert len(bias.table) == 2 * (window_size + p - 1) * (2 * p + window_size + 1) + 1
    values, window, seen = bias(), range(-p, window_size + p), set()
    for position, (row, col) in enumerate(itertools.product(range(window_size), repeat=2)):
        for slot, (key_row, key_col) in enumerate(itertools.product(window, repeat=2)):
            shifted_row, shifted_col = row - key_row + p + window_size - 1, col - key_col + p + window_size - 1
            index = shifted_row * (2 * p + window_size) + shifted_col
            seen.add(index)
            assert bias.index[position, slot] == index
            assert torch.equal(values[:, position, slot], bias.table[index])
    assert max(seen) == len(bias.table) - 1
    assert "index" not in bias.state_dict()


def test_offsets_share_a_bias_as_in_the_official_code():
    bias = SegmentRelativeBias(7, 1)
    # A query at the first position: a key in the same row, and one in the row above, 13 columns to the left
    assert bias.index[0, 3 * 13 + 9] - bias.index[0, 4 * 13 + 9] == 13
    offsets = {(position // 7 - slot // 13, position % 7 - slot % 13) for position in range(49) for slot in range(169)}
    assert len(offsets) == 19**2 > len(bias.table) == 253


NUM_GLOBALS = [0, 1, 2]


def attention_module(num_global: int, **options) -> LongShortAttention:
    options = {"window_size": 3, "rank": 5, "relative_bias": True} | options
    module = LongShortAttention(8, num_heads=2, num_global_tokens=num_global, **options)
    return randomise(module).double()


def module_inputs(num_global: int, height: int = 7, width: int = 10) -> tuple:
    tokens = random_images(2, height, width, 8)
    return tokens, random_images(2, num_global, 8, seed=2) if num_global else None


@pytest.mark.parametrize("num_global", NUM_GLOBALS)
@pytest.mark.parametrize("window_size", [1, 2, 3])
def test_module_is_the_same_with_both_backends(num_global, window_size):
    module = attention_module(num_global, window_size=window_size)
    check = attention_module(num_global, window_size=window_size, backend="reference")
    for actual, expected in zip(module(*module_inputs(num_global)), check(*module_inputs(num_global)), strict=True):
        assert (actual is None) == (expected is None) == (actual is None and num_global == 0)
        if actual is not None:
            torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("num_global", NUM_GLOBALS)
def test_module_step_by_step(num_global):
    """Each token of each image by itself: DualLN, the projection, one softmax, and the global tokens' own update."""
    module = attention_module(num_global)
    tokens, global_tokens = module_inputs(num_global)
    update, global_update = module(tokens, global_tokens)
    (dim, heads, rank), (height, width) = (8, 2, 5), tokens.shape[1:3]

    def normed(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias

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
        expected = output @ module.projection.weight.T + module.projection.bias
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
        expected = own @ module.projection.weight.T + module.projection.bias
        torch.testing.assert_close(global_update[image], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_global", NUM_GLOBALS)
@pytest.mark.parametrize("update_globals", [True, False])
def test_every_parameter_gets_a_gradient(num_global, update_globals):
    module = attention_module(num_global, update_globals=update_globals)
    outputs = [output for output in module(*module_inputs(num_global)) if output is not None]
    sum((output * torch.sin(torch.arange(output.numel())).view_as(output)).sum() for output in outputs).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        if name == "dynamic_projection.bias":  # the softmax over tokens cancels it; official weights have it
            assert parameter.grad.abs().max() < 1e-12
        else:
            assert parameter.grad.abs().sum() > 1e-6, name


@pytest.mark.parametrize("relative_bias", [True, False])
def test_module_that_drops_its_global_tokens(relative_bias):
    """The last block of a stage: the same local tokens from the same weights."""
    module = attention_module(2, relative_bias=relative_bias)
    last = attention_module(2, relative_bias=relative_bias, update_globals=False)
    last.load_state_dict(module.state_dict())
    tokens, global_tokens = module_inputs(2)
    output, none = last(tokens, global_tokens)
    assert none is None
    torch.testing.assert_close(output, module(tokens, global_tokens)[0], atol=0, rtol=0)


@pytest.mark.parametrize("num_global", NUM_GLOBALS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-2), (torch.bfloat16, 1e-1)], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_module_in_lower_precision(num_global, dtype, tolerance, autocast):
    module, inputs = attention_module(num_global), module_inputs(num_global)
    expected = module(*inputs)
    kept = torch.float32 if autocast else dtype
    module, inputs = module.to(kept), [None if x is None else x.to(kept) for x in inputs]
    with torch.autocast("cpu", dtype, enabled=autocast):
        outputs = module(*inputs)
    for output, exact in zip(outputs, expected, strict=True):
        if exact is not None:
            assert output.dtype == dtype
            assert (output.double() - exact).abs().max() <= tolerance * exact.abs().max()


def test_unknown_backend_raises():
    with pytest.raises(ConfigError, match="sdpa, reference"):
        attention_module(1, backend="flash")
