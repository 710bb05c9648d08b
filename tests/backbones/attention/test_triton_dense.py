"""The Triton kernels of attention with a learned bias: in Triton's interpreter and on a GPU as the reference.

What the interpreter takes the compiler may refuse: a slow test compiles every kernel, which needs no GPU.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from backbones.attention import reference, triton_check, triton_dense
from backbones.attention.dense import DenseAttention
from backbones.attention.triton_dense import DENSE_MODE, Launch, rows_per_group, triton_map_attention
from backbones.backbone import BackboneSettings
from backbones.errors import ConfigError
from backbones.lit import LIT, LITStage, LITVariant
from tests.backbones.attention.triton_cases import (
    assert_near,
    bytes_of_registers_in_memory,
    compile_only,
    interpreted,
    map_inputs,
    on_this_gpu,
    skip_without_compiler,
)
from tests.backbones.helpers import assert_all_close, outputs_and_gradients, random_images, randomize
from tests.gpu import DEVICE
from tests.selection import slow_except


def assert_equals_reference(inputs, *, device="cpu"):
    """Outputs and all gradients as the reference's, of the same rounded inputs, in float64."""
    actual = outputs_and_gradients(triton_map_attention, {name: x.to(device) for name, x in inputs.items()})
    inputs = {name: x.cpu().double() for name, x in inputs.items()}
    assert_near(actual, outputs_and_gradients(reference.map_attention, inputs))


# Height, width, others. Several blocks of tokens, most of them not whole.
CASES = {
    "several blocks": (7, 11, {"num_global": 1, "heads": 2}),
    "images": (3, 5, {"num_global": 2, "batch": 2, "channels": 32}),
    "whole block": (8, 8, {}),
    "one row": (1, 6, {}),
    "one column": (9, 1, {"num_global": 1}),
    "one token": (1, 1, {"num_global": 1}),
    "wide": (2, 70, {"channels": 24}),
    "global tokens without bias": (3, 4, {"num_global": 2, "biases": False}),
    "many global tokens": (4, 5, {"num_global": 70, "channels": 64}),
}


@interpreted
@pytest.mark.parametrize("name", slow_except(CASES, ["images", "one row", "global tokens without bias"]))
def test_equals_the_reference(name):
    height, width, others = CASES[name]
    assert_equals_reference(map_inputs(height, width, **others))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("queries, keys", [(16, 16), (16, 32), (32, 16)])
def test_blocks_of_other_sizes(monkeypatch, queries, keys):
    """With partial sums of the gradient of the bias for two shares of the images."""
    monkeypatch.setattr(triton_dense, "launch_parameters", lambda *args: Launch(queries, keys, num_warps=4))
    assert_equals_reference(map_inputs(5, 7, num_global=17, batch=3))
    monkeypatch.setattr(triton_dense, "_PROGRAMS", 2 * 3 * (5 if keys == 16 else 3))
    assert_equals_reference(map_inputs(2, 11, num_global=1, batch=3))


@interpreted
@pytest.mark.parametrize(
    "channels, dtype", slow_except([(32, torch.float16), (24, torch.bfloat16), (128, torch.float32)], [24, 32]), ids=str
)
def test_types_and_sizes_of_heads(channels, dtype):
    assert_equals_reference(map_inputs(3, 5, num_global=1, channels=channels, dtype=dtype))


@interpreted
def test_any_strides_and_nothing_else_is_read():
    """The inputs are views of one projection, and slices of tensors of NaNs, which would show in the output if read."""
    inputs = map_inputs(3, 5, num_global=1, heads=2)
    expected = outputs_and_gradients(reference.map_attention, inputs)
    tokens = torch.full((1, 18, 3, 2, 16), float("nan"), dtype=torch.float64)
    tokens[:, 1:17, 1], tokens[:, 1:17, 2] = inputs["key"].transpose(1, 2), inputs["value"].transpose(1, 2)
    tokens[:, 2:17, 0] = inputs["query"].flatten(2, 3).transpose(1, 2)
    query, inputs["key"], inputs["value"] = tokens[:, 1:17].permute(2, 0, 3, 1, 4)
    inputs["query"] = query[:, :, 1:].unflatten(2, (3, 5))
    table = torch.full((7, 11, 4), float("nan"), dtype=torch.float64)
    table[1:6, 1:10, ::2] = inputs["local_bias"].movedim(0, -1)
    inputs["local_bias"] = table[1:6, 1:10, ::2].movedim(-1, 0)
    inputs["global_bias"] = inputs["global_bias"].T.contiguous().T
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    output = triton_map_attention(**leaves)
    # The merge of the heads is a view.
    assert output.transpose(1, 2).is_contiguous()
    output.backward(torch.sin(torch.arange(output.numel(), dtype=torch.float64)).view(output.shape))
    assert_near({"output": output.detach()} | {f"gradient of {name}": x.grad for name, x in leaves.items()}, expected)


def test_rows_per_group():
    """Groups fill blocks of queries, with little memory."""
    assert [rows_per_group(50, width, 64) for width in (84, 42, 14, 64)] == [3, 3, 4, 1]
    assert rows_per_group(1, 14, 64) == 1


def test_missing_requirement_raises(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="'cpu'.*attention_backend 'sdpa'|triton.*attention_backend 'sdpa'"):
        triton_map_attention(**map_inputs(2, 3))


# -- in modules ------------------------------------------------------------------------------------


def trained(module, x, *size):
    """The output of a module with activation checkpointing, and the gradients of all parameters and of ``x``."""
    x = x.clone().requires_grad_()
    output = checkpoint(module, x, *size, use_reentrant=False)
    output = output["stage4"] if isinstance(output, dict) else output
    output.square().sum().backward()
    return {"output": output.detach(), "input": x.grad} | {name: p.grad for name, p in module.named_parameters()}


@interpreted
@pytest.mark.parametrize("num_global, update_globals", slow_except([(0, False), (2, True), (1, False)], [2]))
def test_module_with_activation_checkpointing(num_global, update_globals):
    results = []
    for backend in ("triton", "reference"):
        sizes = {"num_global_tokens": num_global, "update_globals": update_globals, "bias_size": (3, 4)}
        module = randomize(DenseAttention(16, num_heads=2, backend=backend, **sizes)).double()
        results.append(trained(module, random_images(2, num_global + 10, 16), (2, 5)))
    assert_all_close(*results, tolerance=1e-9)


@pytest.mark.slow
@interpreted
def test_lit():
    """A model whose tables are resized to the feature maps."""
    stages = LITStage(1, 8), LITStage(1, 8), LITStage(1, 16, heads=2), LITStage(2, 16, heads=1)
    variant = LITVariant(stages, relative_bias=True, norm_eps=1e-5, output_norms=(), position_img_size=64)
    results = []
    for backend in ("triton", "reference"):
        model = randomize(LIT(variant, BackboneSettings(attention_backend=backend))).double()
        results.append(trained(model, random_images(1, 3, 70, 100)))
    assert_all_close(*results, tolerance=1e-9)


@pytest.mark.parametrize("num_global, biases", [(0, ("local_bias",)), (1, ("local_bias", "global_bias"))])
def test_module_describes_its_inputs_to_the_check(monkeypatch, num_global, biases):
    asked = []
    monkeypatch.setattr(triton_check, "_can_check", lambda query: True)
    monkeypatch.setattr(triton_check, "choose_kernel", lambda *key, **options: asked.append((key, options)) or "sdpa")
    module = DenseAttention(8, num_heads=2, num_global_tokens=num_global, bias_size=(3, 4), backend="triton")
    tokens = torch.randn(2, num_global + 10, 8)
    with torch.autocast("cpu", torch.bfloat16):
        output = module(tokens, (2, 5))
        module.backend = "sdpa"
        assert torch.equal(output, module(tokens, (2, 5)))
    options = {"chunk_size": 0, "mode": DENSE_MODE, "shift": None}
    assert asked == [((torch.device("cpu"), torch.bfloat16, 4, num_global, biases, True), options)]


@interpreted
@pytest.mark.parametrize("factor, chosen", [(1, "triton"), (1.2, "sdpa")])
def test_check_against_the_reference(monkeypatch, factor, chosen):
    triton_check.choose_kernel.cache_clear()
    monkeypatch.setattr(triton_check, "triton_map_attention", lambda **given: factor * reference.map_attention(**given))
    key = (torch.device("cpu"), torch.float32, 8, 1, ("local_bias", "global_bias"), True)
    assert triton_check.choose_kernel(*key, chunk_size=0, mode=DENSE_MODE, shift=None) == chosen
    triton_check.choose_kernel.cache_clear()


# -- compiled --------------------------------------------------------------------------------------


# Bytes of stack that a thread may take; none elsewhere.
SPILLED = {
    ("key_grad_kernel", 80, torch.bfloat16, 32): 16,
    ("key_grad_kernel", 120, torch.bfloat16, 32): 8,
    ("query_grad_kernel", 80, torch.bfloat16, 64): 16,
    ("key_grad_kernel", 80, torch.bfloat16, 64): 216,
    ("key_grad_kernel", 120, torch.bfloat16, 64): 208,
    ("pair_grad_kernel", 80, torch.bfloat16, 32): 72,
    ("pair_grad_kernel", 120, torch.bfloat16, 32): 64,
    ("query_grad_kernel", 80, torch.float32, 96): 176,
    ("key_grad_kernel", 80, torch.float32, 96): 16,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, dtype, channels",
    [
        *((sm, torch.bfloat16, channels) for sm in (80, 90, 100, 120) for channels in (32, 64)),
        *((sm, torch.float32, 32) for sm in (80, 90)),
        *((80, dtype, 96) for dtype in (torch.float16, torch.float32)),
    ],
    ids=str,
)
def test_every_kernel_compiles(monkeypatch, tmp_path, architecture, dtype, channels):
    skip_without_compiler()
    from backbones.attention import triton_dense_kernels

    compiled = compile_only(monkeypatch, tmp_path, triton_dense_kernels, architecture, dtype)
    type_on_cpu = torch.float32 if dtype == torch.float32 else torch.float16
    outputs_and_gradients(triton_map_attention, map_inputs(20, 27, num_global=1, channels=channels, dtype=type_on_cpu))
    assert len(compiled) == 6
    for name, kernel in compiled.items():
        spilled = bytes_of_registers_in_memory(kernel.asm["cubin"], tmp_path)
        # The limit of the smallest of these devices, sm_86 and sm_89.
        assert kernel.metadata.shared <= 99 * 1024, name
        assert spilled is None or spilled <= SPILLED.get((name, architecture, dtype, channels), 0), name


@on_this_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("height, width, others", CASES.values(), ids=CASES)
def test_compiled_equals_the_reference(height, width, others, dtype):
    assert_equals_reference(map_inputs(height, width, dtype=dtype, **others), device=DEVICE)


@on_this_gpu
@pytest.mark.parametrize(
    "height, width, num_global, channels, dtype",
    [
        (50, 84, 0, 32, torch.bfloat16),
        (25, 42, 0, 32, torch.float16),
        (38, 57, 1, 64, torch.bfloat16),
        (23, 36, 2, 96, torch.bfloat16),
        (23, 36, 1, 128, torch.float16),
        (23, 36, 1, 32, torch.float32),
        (23, 36, 1, 96, torch.float32),
    ],
    ids=str,
)
def test_compiled_equals_the_reference_on_larger_maps(height, width, num_global, channels, dtype):
    inputs = map_inputs(height, width, num_global=num_global, channels=channels, dtype=dtype)
    assert_equals_reference(inputs, device=DEVICE)


@on_this_gpu
def test_compiled_runs_are_bitwise_reproducible():
    inputs = map_inputs(40, 57, num_global=1, heads=2, batch=2, channels=32, dtype=torch.bfloat16)
    inputs = {name: x.to(DEVICE) for name, x in inputs.items()}
    first, second = (outputs_and_gradients(triton_map_attention, inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@on_this_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernel_is_chosen_on_a_gpu(dtype):
    key = (torch.device(DEVICE), dtype, 32, 1, ("local_bias", "global_bias"), True)
    assert triton_check.choose_kernel(*key, chunk_size=0, mode=DENSE_MODE, shift=None) == "triton"
