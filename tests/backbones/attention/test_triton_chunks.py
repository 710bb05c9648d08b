"""The Triton kernels of window attention equal the reference in Triton's interpreter, and compiled on a GPU.

The compiler may reject code that the interpreter runs. A slow test compiles every kernel, which needs no GPU.
"""

import functools
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from backbones.attention import reference, triton_chunks
from backbones.attention.long_short import LongShortAttention
from backbones.attention.sliding_chunk import MODES, SHIFTS, SlidingChunkAttention
from backbones.attention.triton_chunks import (
    Launch,
    triton_chunk_attention,
    triton_long_short_attention,
    unmet_requirement,
)
from backbones.errors import ConfigError
from tests.backbones.attention.cases import attend, case
from tests.backbones.attention.triton_cases import (
    ALL_INPUTS,
    assert_near,
    bytes_of_registers_in_memory,
    compile_only,
    interpreted,
    on_this_gpu,
    skip_without_compiler,
)
from tests.backbones.helpers import (
    assert_padding_is_hidden_in_half_precision,
    attention_inputs,
    outputs_and_gradients,
    random_images,
    randomize,
)
from tests.gpu import DEVICE
from tests.selection import slow_except


def assert_equals_reference(inputs, *, device="cpu", **options):
    """Check that outputs and all gradients match the reference for the same rounded inputs in float64."""
    actual = outputs_and_gradients(triton_chunk_attention, {k: x.to(device) for k, x in inputs.items()}, **options)
    inputs = {name: x.cpu().double() for name, x in inputs.items()}
    assert_near(actual, outputs_and_gradients(reference.sliding_chunk_attention, inputs, **options))


# Chunk size, height, width, mode, shift and others. Axes have one to four chunks, most of them incomplete.
CASES = {
    "two by three chunks": (3, 4, 7, "zero_pad", None, ALL_INPUTS),
    "whole chunks": (2, 4, 6, "zero_pad", None, {"num_global": 2, "global_bias": True}),
    "one chunk": (4, 3, 2, "exact", None, {"local_bias": True, "num_global": 1}),
    "strip": (3, 1, 8, "zero_pad", None, {"num_global": 1}),
    "exact": (3, 4, 7, "exact", None, ALL_INPUTS | {"num_global": 2}),
    "exact without bias": (2, 3, 5, "exact", None, {}),
    "cyclic": (2, 5, 6, "cyclic", None, {"local_bias": True}),
    "cyclic along one axis": (2, 3, 7, "cyclic", None, ALL_INPUTS),
    "cyclic with two chunks": (3, 5, 4, "cyclic", None, {"num_global": 2, "global_bias": True}),
    "images": (3, 2, 5, "zero_pad", None, ALL_INPUTS | {"batch": 2, "heads": 2}),
    "many global tokens": (3, 2, 3, "zero_pad", None, {"num_global": 18, "global_bias": True}),
    "shift": (3, 4, 7, "zero_pad", (0, 1), ALL_INPUTS | {"heads": 2}),
    "shift, exact": (3, 4, 7, "exact", (-1, -1), {"local_bias": True}),
    "shift, cyclic": (2, 3, 5, "cyclic", (1, -1), ALL_INPUTS),
    "shift, strip": (2, 1, 5, "cyclic", (1, 0), {"num_global": 2}),
}


@interpreted
@pytest.mark.parametrize("name", slow_except(CASES, ["two by three chunks", "strip"]))
def test_equals_the_reference(name):
    chunk_size, height, width, mode, shift, others = CASES[name]
    inputs = attention_inputs(height, width, chunk_size=chunk_size, **({"batch": 1, "heads": 1} | others))
    assert_equals_reference(inputs, chunk_size=chunk_size, mode=mode, shift=shift)


# Segment side, height, width and others. Windows have three tokens per axis for a segment of one, and nine for five.
SEGMENTS = {
    "two by three segments": (3, 4, 7, {"heads": 2}),
    "even window": (4, 5, 9, {"num_global": 0}),
    "pairs": (2, 4, 5, {"num_global": 2, "biases": False}),
    "single tokens": (1, 2, 4, {"num_global": 0, "biases": False}),
    "one segment, many global tokens": (5, 3, 4, {"num_global": 18}),
}


def assert_long_short_equals_reference(chunk_size, height, width, others, *, dtype=torch.float64, device="cpu"):
    _, by_reference, inputs = case(
        "long_short", height, width, chunk_size=chunk_size, **({"batch": 1, "heads": 1} | others)
    )
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    on_device = {name: x.to(device) for name, x in inputs.items()}
    actual = outputs_and_gradients(triton_long_short_attention, on_device, chunk_size=chunk_size)
    assert_near(actual, outputs_and_gradients(by_reference, {name: x.double() for name, x in inputs.items()}))


@interpreted
@pytest.mark.parametrize("name", slow_except(SEGMENTS, ["even window"]))
def test_long_short_attention_equals_the_reference(name):
    assert_long_short_equals_reference(*SEGMENTS[name])


@interpreted
@pytest.mark.parametrize(
    "channels, dtype",
    slow_except(
        [(16, torch.float32), (24, torch.float16), (32, torch.bfloat16), (96, torch.float32), (128, torch.float16)],
        [24, 32],
    ),
    ids=str,
)
def test_types_and_sizes_of_heads(channels, dtype):
    inputs = attention_inputs(2, 5, batch=1, heads=1, channels=channels, **ALL_INPUTS)
    assert_equals_reference({name: x.to(dtype) for name, x in inputs.items()}, chunk_size=3)


@pytest.mark.slow
@interpreted
def test_several_blocks_of_positions(monkeypatch):
    small = Launch(positions=16, tokens=64, channels=16, num_warps=4)
    monkeypatch.setattr(triton_chunks, "launch_parameters", lambda *args: small)
    monkeypatch.setattr(triton_chunks, "_SHARES", 30)
    inputs = attention_inputs(3, 6, chunk_size=5, batch=1, heads=1, num_global=17, local_bias=True, global_bias=True)
    assert_equals_reference(inputs, chunk_size=5)
    assert_long_short_equals_reference(5, 3, 6, {})


@interpreted
@pytest.mark.parametrize("mode", slow_except(MODES, ["cyclic"]))
def test_any_strides_and_nothing_outside_the_map_is_read(mode):
    """The inputs are split heads, and slices of tensors full of NaN, which would reach the output."""
    inputs = attention_inputs(2, 5, batch=1, heads=2, num_global=1)
    expected = outputs_and_gradients(reference.sliding_chunk_attention, inputs, chunk_size=3, mode=mode)
    tokens = torch.full((1, 4, 9, 2, 3, 4), float("nan"), dtype=torch.float64)
    with torch.no_grad():
        for index, name in enumerate(("query", "key")):
            tokens[:, 1:3, 2:7, :, index] = inputs[name].permute(0, 2, 3, 1, 4)
            inputs[name] = tokens[:, 1:3, 2:7, :, index].permute(0, 3, 1, 2, 4)
    wide = torch.full((2, 5, 1, 2, 8), float("nan"), dtype=torch.float64)
    wide[..., ::2] = inputs["value"].permute(1, 3, 0, 2, 4)
    inputs["value"] = wide.permute(2, 0, 3, 1, 4)[..., ::2]
    inputs["global_key"] = inputs["global_key"].transpose(1, 3).contiguous().transpose(1, 3)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    assert not any(leaves[name].is_contiguous() for name in ("query", "key", "value"))
    output = triton_chunk_attention(**leaves, chunk_size=3, mode=mode)
    weights = torch.sin(torch.arange(output.numel(), dtype=torch.float64)).view(output.shape)
    output.backward(weights.transpose(1, 4).contiguous().transpose(1, 4))
    gradients = {f"gradient of {name}": x.grad for name, x in leaves.items()}
    assert_near({"output": output.detach()} | gradients, expected)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("autocast", [True, False])
def test_padding_is_hidden_in_half_precision(autocast):
    inputs = attention_inputs(2, 4, channels=64, batch=1, heads=1, **ALL_INPUTS)
    functions = (
        functools.partial(function, chunk_size=3)
        for function in (triton_chunk_attention, reference.sliding_chunk_attention)
    )
    assert_padding_is_hidden_in_half_precision(*functions, inputs, dtype=torch.bfloat16, autocast=autocast)


@interpreted
def test_no_global_tokens():
    inputs = attention_inputs(1, 2, batch=1)
    none = {name: inputs["query"][:, :, 0, :0] for name in ("global_key", "global_value")}
    expected = triton_chunk_attention(**inputs, chunk_size=3)
    assert torch.equal(triton_chunk_attention(**inputs, **none, chunk_size=3), expected)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("attention", [SlidingChunkAttention, functools.partial(LongShortAttention, rank=2)])
def test_module_with_activation_checkpointing(attention):
    results = []
    for backend in ("triton", "reference"):
        module = attention(8, num_heads=2, chunk_size=3, relative_bias=True, backend=backend)
        module = randomize(module).double()
        inputs = [random_images(1, *shape).requires_grad_() for shape in ((2, 5, 8), (1, 8))]
        outputs = checkpoint(attend, module, *inputs, use_reentrant=False)
        sum(x.square().sum() for x in outputs).backward()
        results.append([*outputs, *(x.grad for x in (*inputs, *module.parameters()))])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.slow
@interpreted
def test_a_bias_of_one_head_applies_to_all_heads():
    """This includes the sum of its gradient over the heads."""
    inputs = attention_inputs(2, 5, batch=1, heads=2, **ALL_INPUTS)
    inputs |= {name: inputs[name][:1] for name in ("local_bias", "global_bias")}
    assert_equals_reference(inputs, chunk_size=3)


# -- where it does not run -------------------------------------------------------------------------


@pytest.mark.parametrize("is_installed, named", [(True, "'cpu'"), (False, "triton")])
def test_missing_requirement_raises(monkeypatch, is_installed, named):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton_chunks, "_is_installed", lambda: is_installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert (unmet_requirement(torch.device("cuda")) is None) is is_installed
    with pytest.raises(ConfigError, match=f"{named}.*attention_backend 'sdpa'"):
        triton_chunk_attention(**attention_inputs(2, 4), chunk_size=3)


@interpreted
@pytest.mark.parametrize("channels, mode, named", [(132, "exact", "128 .*132"), (4, "zero", "zero_pad")])
def test_unsupported_arguments_raise(channels, mode, named):
    with pytest.raises(ConfigError, match=named):
        triton_chunk_attention(**attention_inputs(2, 4, channels=channels), chunk_size=3, mode=mode)


@pytest.mark.slow
def test_imports_without_triton():
    """In a separate process, because the module registers an operator."""
    code = (
        "import sys, torch; sys.modules['triton'] = None; from backbones.attention import triton_chunks; "
        "print(triton_chunks.unmet_requirement(torch.device('cuda')))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "not installed" in process.stdout


# -- compiled --------------------------------------------------------------------------------------


# Bytes of stack that a thread may take, in float32. All other kernels must take none.
SPILLED = {("key_grad_kernel", 80, 32, "long_short"): 8, ("query_grad_kernel", 80, 96, "zero_pad"): 144}


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, dtype, channels, mode, shift",
    [
        *((sm, torch.bfloat16, channels, "zero_pad", None) for sm in (80, 120) for channels in (24, 32, 64)),
        *((sm, torch.bfloat16, 64, mode, None) for sm in (90, 100) for mode in ("zero_pad", "long_short")),
        *((sm, torch.bfloat16, channels, "long_short", None) for sm in (80, 120) for channels in (32, 64)),
        *((90, dtype, 32, "zero_pad", None) for dtype in (torch.float16, torch.float32)),
        *((80, dtype, 96, "zero_pad", None) for dtype in (torch.float16, torch.bfloat16, torch.float32)),
        (90, torch.float16, 96, "exact", None),
        (90, torch.float16, 32, "cyclic", (0, 1)),
    ],
    ids=str,
)
def test_every_kernel_compiles(monkeypatch, tmp_path, architecture, dtype, channels, mode, shift):
    skip_without_compiler()
    from backbones.attention import triton_kernels

    compiled = compile_only(monkeypatch, tmp_path, triton_kernels, architecture, dtype)
    if mode == "long_short":
        inputs, attention, options = (
            case(mode, 20, 27, chunk_size=7, channels=channels)[2],
            triton_long_short_attention,
            {},
        )
    else:
        inputs = attention_inputs(20, 27, chunk_size=7, batch=1, channels=channels, **ALL_INPUTS)
        attention, options = triton_chunk_attention, {"mode": mode, "shift": shift}
    inputs = {name: x.to(torch.float32 if dtype == torch.float32 else torch.float16) for name, x in inputs.items()}
    outputs_and_gradients(attention, inputs, chunk_size=7, **options)
    assert len(compiled) == 5
    for name, kernel in compiled.items():
        spilled = bytes_of_registers_in_memory(kernel.asm["cubin"], tmp_path)
        # The shared memory of the smallest of these devices, sm_86 and sm_89.
        assert kernel.metadata.shared <= 99 * 1024, name
        assert spilled is None or spilled <= SPILLED.get((name, architecture, channels, mode), 0), name


@on_this_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_size, height, width, mode, shift, others", CASES.values(), ids=CASES)
def test_compiled_equals_the_reference(chunk_size, height, width, mode, shift, others, dtype):
    inputs = attention_inputs(height, width, chunk_size=chunk_size, **({"channels": 16} | others))
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    assert_equals_reference(inputs, device=DEVICE, chunk_size=chunk_size, mode=mode, shift=shift)


@on_this_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_size, channels", [(7, 32), (8, 64), (2, 16)])
def test_compiled_long_short_attention_equals_the_reference(chunk_size, channels, dtype):
    sizes = {"channels": channels, "heads": 2, "num_global": 20}
    assert_long_short_equals_reference(chunk_size, 23, 36, sizes, dtype=dtype, device=DEVICE)


@on_this_gpu
@pytest.mark.parametrize(
    "dtype, mode, shift, chunk_size, channels",
    [
        *((torch.float16, mode, shift, 7, 32) for mode in MODES for shift in (None, *SHIFTS[::3])),
        *((torch.bfloat16, "zero_pad", None, *sizes) for sizes in [(7, 64), (7, 96), (4, 48), (5, 24), (15, 16)]),
        *((torch.float32, "exact", None, *sizes) for sizes in [(7, 32), (7, 64), (7, 96), (15, 16)]),
    ],
    ids=str,
)
def test_compiled_equals_the_reference_on_larger_maps(dtype, mode, shift, chunk_size, channels):
    inputs = attention_inputs(23, 36, chunk_size=chunk_size, channels=channels, **(ALL_INPUTS | {"num_global": 2}))
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    assert_equals_reference(inputs, device=DEVICE, chunk_size=chunk_size, mode=mode, shift=shift)


@on_this_gpu
def test_compiled_runs_are_bitwise_reproducible():
    inputs = attention_inputs(57, 80, chunk_size=7, channels=32, **ALL_INPUTS)
    inputs = {name: x.to(DEVICE, torch.bfloat16) for name, x in inputs.items()}
    first, second = (outputs_and_gradients(triton_chunk_attention, inputs, chunk_size=7) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@on_this_gpu
def test_offsets_of_more_than_31_bits():
    rows = torch.empty(2**31 + 32, dtype=torch.float16, device=DEVICE).as_strided((1, 1, 9, 1, 32), (0, 0, 2**28, 0, 1))
    rows.normal_()
    output, expected = (
        triton_chunk_attention(query=x, key=x, value=x, chunk_size=3)
        for x in (rows, rows.clone(memory_format=torch.contiguous_format))
    )
    assert torch.equal(output, expected)


@on_this_gpu
def test_no_float64_on_a_gpu():
    inputs = {name: x.to(DEVICE) for name, x in attention_inputs(2, 4).items()}
    with pytest.raises(ConfigError, match="float64"):
        triton_chunk_attention(**inputs, chunk_size=3)
