"""The Triton kernels of window attention in Triton's interpreter: strides, blocks, padding, and arguments."""

import functools
import subprocess
import sys

import pytest
import torch

from backbones.attention import reference, triton_chunks
from backbones.attention.chunks import MODES
from backbones.attention.triton_chunks import Launch, triton_chunk_attention
from backbones.errors import ConfigError
from tests.backbones.attention.triton_cases import (
    ALL_INPUTS,
    assert_equals_reference,
    assert_near,
    interpreted,
    make_inputs,
    on_this_gpu,
)
from tests.backbones.helpers import assert_padding_is_hidden_in_half_precision, attention_inputs, outputs_and_gradients
from tests.gpu import DEVICE
from tests.selection import slow_except


@pytest.mark.slow
@interpreted
def test_several_blocks_of_positions(monkeypatch):
    small = Launch(positions=16, tokens=64, channels=16, num_warps=4)
    monkeypatch.setattr(triton_chunks, "launch_parameters", lambda *args: small)
    monkeypatch.setattr(triton_chunks, "_SHARES", 30)
    for name, sizes in (("chunks", ALL_INPUTS | {"num_global": 17}), ("segments", {})):
        inputs = make_inputs(name, 3, 6, {"chunk_size": 5}, **sizes)
        assert_equals_reference(name, inputs, {"chunk_size": 5})


@interpreted
@pytest.mark.parametrize("mode", slow_except(MODES, ["cyclic"]))
def test_inputs_of_any_strides_and_no_values_outside_the_map_are_read(mode):
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
@pytest.mark.parametrize("autocast", slow_except([True, False], [True]))
def test_padding_is_hidden_in_half_precision(autocast):
    inputs = attention_inputs(2, 4, channels=64, batch=1, heads=1, **ALL_INPUTS)
    functions = [
        functools.partial(f, chunk_size=3) for f in (triton_chunk_attention, reference.sliding_chunk_attention)
    ]
    assert_padding_is_hidden_in_half_precision(*functions, inputs, dtype=torch.bfloat16, autocast=autocast)


@interpreted
def test_no_global_tokens():
    inputs = attention_inputs(1, 2, batch=1)
    none = {name: inputs["query"][:, :, 0, :0] for name in ("global_key", "global_value")}
    expected = triton_chunk_attention(**inputs, chunk_size=3)
    assert torch.equal(triton_chunk_attention(**inputs, **none, chunk_size=3), expected)


@pytest.mark.slow
@interpreted
def test_a_bias_of_one_head_applies_to_all_heads():
    """This includes the sum of its gradient over the heads."""
    inputs = attention_inputs(2, 5, batch=1, heads=2, **ALL_INPUTS)
    inputs |= {name: inputs[name][:1] for name in ("local_bias", "global_bias")}
    assert_equals_reference("chunks", inputs, {"chunk_size": 3})


@interpreted
def test_more_channels_than_the_kernels_support_raise():
    with pytest.raises(ConfigError, match="128 .*132"):
        triton_chunk_attention(**attention_inputs(2, 4, channels=132), chunk_size=3)


@pytest.mark.slow
def test_imports_without_triton():
    """In a separate process, because the module registers an operator."""
    code = "import sys, torch; sys.modules['triton'] = None; from backbones.attention import triton_chunks; "
    code += "print(triton_chunks.unmet_requirement(torch.device('cuda')))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "not installed" in process.stdout


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
