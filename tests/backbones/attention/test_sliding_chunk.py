"""ViL attention: equal to the reference, blind to padding, linear in memory, the same in every type and in a trace."""

import contextlib
import functools

import pytest
import torch

from backbones.attention import reference, sliding_chunk
from backbones.attention.chunks import copied_windows
from backbones.attention.sliding_chunk import MODES, SlidingChunkAttention, sliding_chunk_attention
from backbones.errors import ConfigError
from tests.backbones.helpers import (
    LargestTensor,
    assert_all_close,
    assert_padding_is_hidden_in_half_precision,
    attention_inputs,
    mark_as_on_a_gpu,
    outputs_and_gradients,
    random_images,
    randomise,
    trace,
)
from tests.selection import slow_except

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WINDOW = 3
SIZES = [
    (2, 1),  # below one chunk
    (3, 3),  # one chunk
    (6, 5),  # two chunks
    (9, 9),  # three chunks
    (7, 11),  # no multiples
    (12, 6),  # one axis of two chunks, where cyclic must not repeat them
    (3, 11),  # one axis of one chunk
    (10, 2),
    (4, 8),  # two and three chunks, none of them whole
    (1, 20),  # long and thin
]
# Global tokens (w is 3), local bias, global bias
EXTRAS = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 1), (2, 0, 1), (2, 1, 0), (5, 1, 1)]


def extras(num_global: int, local_bias: int, global_bias: int) -> dict:
    return {"num_global": num_global, "local_bias": bool(local_bias), "global_bias": bool(global_bias)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("height, width", SIZES)
def test_equals_the_reference(height, width, mode):
    # Each of the extras occurs with several sizes and with every mode.
    extra = EXTRAS[(SIZES.index((height, width)) + 2 * MODES.index(mode)) % len(EXTRAS)]
    inputs = attention_inputs(height, width, **extras(*extra))
    options = {"window_size": WINDOW, "mode": mode}
    actual = outputs_and_gradients(sliding_chunk_attention, inputs, **options)
    expected = outputs_and_gradients(reference.sliding_chunk_attention, inputs, **options)
    assert_all_close(actual, expected, tolerance=1e-11)


@pytest.mark.parametrize("window_size", [1, 2, 5])
@pytest.mark.parametrize("mode", MODES)
def test_equals_the_reference_for_other_windows(window_size, mode):
    inputs = attention_inputs(11, 8, window_size=window_size, num_global=2, local_bias=True, global_bias=True)
    options = {"window_size": window_size, "mode": mode}
    actual = outputs_and_gradients(sliding_chunk_attention, inputs, **options)
    expected = outputs_and_gradients(reference.sliding_chunk_attention, inputs, **options)
    assert_all_close(actual, expected, tolerance=1e-11)


@functools.cache
def traced_attention(mode: str, *extra: int, copied: bool):
    """The kernel traced at one size, one image, as a function of named tensors."""
    example = attention_inputs(8, 13, batch=1, **extras(*extra))

    def attend(*tensors):
        return sliding_chunk_attention(**dict(zip(example, tensors, strict=True)), window_size=WINDOW, mode=mode)

    with copied_windows() if copied else contextlib.nullcontext():
        traced = trace(attend, tuple(example.values()))
    assert ("aten::unfold" in str(traced.inlined_graph)) is not copied
    return lambda **inputs: traced(*(inputs[name] for name in example))


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extra", [(0, 0, 0), (2, 1, 1), (5, 0, 1)], ids=str)
def test_traced_once_equals_the_reference_at_all_sizes(mode, extra, copied):
    """A trace takes chunks where the eager function takes the whole map at once: both are covered so."""
    traced = traced_attention(mode, *extra, copied=copied)
    for height, width in SIZES:
        inputs = attention_inputs(height, width, **extras(*extra))
        expected = outputs_and_gradients(reference.sliding_chunk_attention, inputs, window_size=WINDOW, mode=mode)
        assert_all_close(outputs_and_gradients(traced, inputs), expected, tolerance=1e-11)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("height, width", [(4, 5), (7, 11)])
def test_never_reads_beyond_the_map(height, width, mode):
    """The map is cut out of a larger one full of NaN, to which no gradient goes either."""
    inputs = attention_inputs(height, width, num_global=1)
    expected = sliding_chunk_attention(**inputs, window_size=WINDOW, mode=mode)
    surrounded = {}
    for name in ("query", "key", "value"):
        frame = torch.full((2, 2, height + 8, width + 8, 4), float("nan"), dtype=torch.float64)
        frame[:, :, 4:-4, 4:-4] = inputs[name]
        surrounded[name] = frame.requires_grad_()
    cut = {name: frame[:, :, 4:-4, 4:-4] for name, frame in surrounded.items()}
    output = sliding_chunk_attention(**(inputs | cut), window_size=WINDOW, mode=mode)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    output.square().sum().backward()
    for frame in surrounded.values():
        inside = frame.grad[:, :, 4:-4, 4:-4].clone()
        assert inside.isfinite().all() and inside.abs().sum() > 0
        frame.grad[:, :, 4:-4, 4:-4] = 0
        assert frame.grad.eq(0).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("score", [-5e3, -2e4])
def test_padding_is_hidden_from_very_low_scores(mode, score):
    """Where all keys score far below the 0 of padding, padding still counts for nothing."""
    side = (abs(score) / 2) ** 0.5  # 4 channels, scaled by 1/2
    inputs = attention_inputs(7, 11)
    inputs |= {"query": 0 * inputs["query"] + side, "key": 1e-6 * inputs["key"] - side}
    options = {"window_size": WINDOW, "mode": mode}
    actual = sliding_chunk_attention(**inputs, **options)
    expected = reference.sliding_chunk_attention(**inputs, **options)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("extra", [(0, 0, 0), (2, 1, 1)], ids=str)
def test_padding_is_hidden_from_very_low_scores_in_half_precision(mode, dtype, autocast, extra):
    inputs = attention_inputs(7, 11, channels=64, **extras(*extra))
    functions = (
        functools.partial(function, window_size=WINDOW, mode=mode)
        for function in (sliding_chunk_attention, reference.sliding_chunk_attention)
    )
    assert_padding_is_hidden_in_half_precision(*functions, inputs, dtype=dtype, autocast=autocast)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels", [4, 8])
@pytest.mark.parametrize("extra", [(0, 0, 0), (2, 1, 1)], ids=str)
def test_the_marks_of_a_gpu_give_the_same(monkeypatch, mode, channels, extra):
    inputs = attention_inputs(7, 11, channels=channels, **extras(*extra))
    expected = outputs_and_gradients(sliding_chunk_attention, inputs, window_size=WINDOW, mode=mode)
    monkeypatch.setattr(sliding_chunk, "mask_channels", mark_as_on_a_gpu)
    actual = outputs_and_gradients(sliding_chunk_attention, inputs, window_size=WINDOW, mode=mode)
    assert_all_close(actual, expected, tolerance=1e-11)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 5e-6), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)], ids=str
)
@pytest.mark.parametrize("height, width", [(5, 6), (7, 11)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def test_lower_precision_is_close_to_float64(height, width, dtype, tolerance, mode, device):
    # 64 channels: the mask channel of hidden keys is largest for many channels, and float16 must hold it
    inputs = attention_inputs(height, width, num_global=2, local_bias=True, global_bias=True, channels=64)
    rounded = {name: tensor.to(device, dtype) for name, tensor in inputs.items()}
    options = {"window_size": WINDOW, "mode": mode}
    actual = outputs_and_gradients(sliding_chunk_attention, rounded, **options)
    exact = {name: tensor.cpu().double() for name, tensor in rounded.items()}
    expected = outputs_and_gradients(reference.sliding_chunk_attention, exact, **options)
    assert {tensor.dtype for tensor in actual.values()} == {dtype}
    for name, tensor in expected.items():
        error = (actual[name].cpu().double() - tensor).abs().max() / tensor.abs().max()
        assert error <= tolerance, name


def largest_tensor(height: int, width: int, mode: str) -> int:
    inputs = attention_inputs(
        height, width, window_size=7, num_global=1, local_bias=True, global_bias=True, batch=1, heads=1, channels=2
    )
    inputs = {name: tensor.float().requires_grad_() for name, tensor in inputs.items()}
    with LargestTensor() as largest:
        sliding_chunk_attention(**inputs, window_size=7, mode=mode).sum().backward()
    return largest.numel


@pytest.mark.parametrize("mode", slow_except(MODES, ["exact"]))
def test_memory_is_linear_in_the_tokens(mode):
    """Tokens of an image of 800 x 1336 at stride 4, and of a quarter of it."""
    small, large = largest_tensor(100, 167, mode), largest_tensor(200, 334, mode)
    assert large < (200 * 334) ** 2 / 100
    assert large / small < 5


def test_recording_sees_a_quadratic_tensor():
    """The recorder of the test above, on the reference, which has one."""
    inputs = attention_inputs(10, 12, batch=1, heads=1)
    with LargestTensor() as largest:
        reference.sliding_chunk_attention(**inputs, window_size=WINDOW)
    assert largest.numel >= (10 * 12) ** 2


MODULES = [(0, True), (1, True), (2, True), (2, False)]


def attention_module(num_global: int, shared: bool, **options) -> SlidingChunkAttention:
    options = {"window_size": WINDOW, "relative_bias": True} | options
    module = SlidingChunkAttention(8, num_heads=2, num_global_tokens=num_global, shared_projections=shared, **options)
    return randomise(module).double()


def module_inputs(num_global: int, height: int = 7, width: int = 10) -> tuple:
    tokens = random_images(2, height, width, 8)
    return tokens, random_images(2, num_global, 8, seed=2) if num_global else None


@pytest.mark.parametrize("num_global, shared", MODULES)
@pytest.mark.parametrize("mode", MODES)
def test_module_is_the_same_with_both_backends(num_global, shared, mode):
    module = attention_module(num_global, shared, mode=mode)
    check = attention_module(num_global, shared, mode=mode, backend="reference")
    for actual, expected in zip(module(*module_inputs(num_global)), check(*module_inputs(num_global)), strict=True):
        assert (actual is None) == (expected is None) == (actual is None and num_global == 0)
        if actual is not None:
            torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("num_global, shared", MODULES[1:])
def test_global_tokens_attend_to_everything(num_global, shared):
    """Head by head, with explicit products."""
    module = attention_module(num_global, shared)
    tokens, global_tokens = module_inputs(num_global)
    own = "" if shared else "global_"
    query_layer, key_value_layer = getattr(module, f"{own}query"), getattr(module, f"{own}key_value")
    everything = torch.cat([global_tokens, tokens.flatten(1, 2)], dim=1)
    query, (key, value) = query_layer(global_tokens), key_value_layer(everything).chunk(2, dim=-1)
    heads = []
    for head in range(2):
        channels = slice(4 * head, 4 * head + 4)
        scores = query[..., channels] @ key[..., channels].transpose(1, 2) / 2
        scores[..., :num_global] += module.global_to_global[head]
        scores[..., num_global:] += module.global_to_local[head][:, None]
        heads.append(scores.softmax(-1) @ value[..., channels])
    expected = getattr(module, f"{own}projection")(torch.cat(heads, dim=-1))
    torch.testing.assert_close(module(tokens, global_tokens)[1], expected, atol=1e-12, rtol=1e-12)


def test_local_tokens_see_the_global_ones_with_their_bias():
    """One chunk: plain attention over the global tokens and the map, head by head."""
    module = attention_module(2, True)
    tokens, global_tokens = module_inputs(2, 2, 3)
    everything = torch.cat([global_tokens, tokens.flatten(1, 2)], dim=1)
    query, (key, value) = module.query(tokens.flatten(1, 2)), module.key_value(everything).chunk(2, dim=-1)
    positions = [(row, col) for row in range(2) for col in range(3)]
    heads = []
    for head in range(2):
        channels = slice(4 * head, 4 * head + 4)
        scores = query[..., channels] @ key[..., channels].transpose(1, 2) / 2
        for i, (row, col) in enumerate(positions):
            scores[:, i, :2] += module.local_to_global[head]
            for j, (key_row, key_col) in enumerate(positions):
                offset = (row - key_row + 5) * 11 + col - key_col + 5
                scores[:, i, 2 + j] += module.relative_bias.table[offset, head]
        heads.append(scores.softmax(-1) @ value[..., channels])
    expected = module.projection(torch.cat(heads, dim=-1)).unflatten(1, (2, 3))
    torch.testing.assert_close(module(tokens, global_tokens)[0], expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
def test_module_that_drops_its_global_tokens(shared):
    """The last block of a stage: the same local tokens, and nothing that only global queries would use."""
    module = attention_module(2, shared)
    last = attention_module(2, shared, update_globals=False)
    missing, unexpected = last.load_state_dict(module.state_dict(), strict=False)
    assert not missing
    assert unexpected and all("global_" in name for name in unexpected)
    tokens, global_tokens = module_inputs(2)
    output, none = last(tokens, global_tokens)
    assert none is None
    torch.testing.assert_close(output, module(tokens, global_tokens)[0], atol=0, rtol=0)


@pytest.mark.parametrize(
    "option, named", [({"mode": "exakt"}, "'exact'"), ({"backend": "flash"}, "auto, sdpa, triton, reference")]
)
def test_unknown_options_raise(option, named):
    with pytest.raises(ConfigError, match=named):
        attention_module(1, True, **option)
