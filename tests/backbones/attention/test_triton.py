"""The Triton operators equal their references in Triton's interpreter and compiled on a GPU.

The compiler may reject code that the interpreter runs. A slow test compiles every kernel, which needs no GPU.
"""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from backbones.attention import triton_chunks
from backbones.attention.chunks import MODES, WindowInputs
from backbones.attention.dense import DenseAttention
from backbones.attention.long_short import LongShortAttention
from backbones.attention.sliding_chunk import SHIFTS, SlidingChunkAttention
from backbones.errors import ConfigError
from tests.backbones.attention.triton_cases import (
    ALL_INPUTS,
    OPERATORS,
    assert_equals_reference,
    assert_near,
    bytes_of_registers_in_memory,
    compile_only,
    interpreted,
    make_inputs,
    on_this_gpu,
    skip_without_compiler,
)
from tests.backbones.helpers import assert_all_close, outputs_and_gradients, random_images, randomize
from tests.gpu import DEVICE
from tests.selection import slow_except


def window(chunk_size: int, mode: str = "zero_pad", shift: tuple[int, int] | None = None) -> dict:
    return {"chunk_size": chunk_size, "mode": mode, "shift": shift}


# Operator, height, width, options of the operator, and sizes of the inputs.
CASES = {
    # Axes have one to four chunks, most of them incomplete.
    "two by three chunks": ("chunks", 4, 7, window(3), ALL_INPUTS),
    "whole chunks": ("chunks", 4, 6, window(2), {"num_global": 2, "global_bias": True}),
    "one chunk": ("chunks", 3, 2, window(4, "exact"), {"local_bias": True, "num_global": 1}),
    "strip": ("chunks", 1, 8, window(3), {"num_global": 1}),
    "exact": ("chunks", 4, 7, window(3, "exact"), ALL_INPUTS | {"num_global": 2}),
    "exact without bias": ("chunks", 3, 5, window(2, "exact"), {}),
    "cyclic": ("chunks", 5, 6, window(2, "cyclic"), {"local_bias": True}),
    "cyclic along one axis": ("chunks", 3, 7, window(2, "cyclic"), ALL_INPUTS),
    "cyclic with two chunks": ("chunks", 5, 4, window(3, "cyclic"), {"num_global": 2, "global_bias": True}),
    "images of chunks": ("chunks", 2, 5, window(3), ALL_INPUTS | {"batch": 2, "heads": 2}),
    "many global tokens of chunks": ("chunks", 2, 3, window(3), {"num_global": 18, "global_bias": True}),
    "shift": ("chunks", 4, 7, window(3, shift=(0, 1)), ALL_INPUTS | {"heads": 2}),
    "shift, exact": ("chunks", 4, 7, window(3, "exact", (-1, -1)), {"local_bias": True}),
    "shift, cyclic": ("chunks", 3, 5, window(2, "cyclic", (1, -1)), ALL_INPUTS),
    "shift, strip": ("chunks", 1, 5, window(2, "cyclic", (1, 0)), {"num_global": 2}),
    # Windows have three tokens per axis for a segment of one, and nine for five.
    "two by three segments": ("segments", 4, 7, {"chunk_size": 3}, {"heads": 2}),
    "even window": ("segments", 5, 6, {"chunk_size": 4}, {"num_global": 0}),
    "pairs": ("segments", 4, 5, {"chunk_size": 2}, {"num_global": 2, "biases": False}),
    "single tokens": ("segments", 2, 4, {"chunk_size": 1}, {"num_global": 0, "biases": False}),
    "one segment, many global tokens": ("segments", 3, 4, {"chunk_size": 5}, {"num_global": 18}),
    # Several blocks of tokens, most of them incomplete.
    "several blocks": ("dense", 7, 11, {}, {"num_global": 1, "heads": 2}),
    "images": ("dense", 3, 5, {}, {"num_global": 2, "batch": 2, "channels": 32}),
    "whole block": ("dense", 8, 8, {}, {}),
    "one row": ("dense", 1, 6, {}, {}),
    "one column": ("dense", 9, 1, {}, {"num_global": 1}),
    "one token": ("dense", 1, 1, {}, {"num_global": 1}),
    "wide": ("dense", 2, 70, {}, {"channels": 24}),
    "global tokens without bias": ("dense", 3, 4, {}, {"num_global": 2, "biases": False}),
    "many global tokens": ("dense", 4, 5, {}, {"num_global": 70, "channels": 64}),
}
FAST = ["strip", "even window", "images", "one row", "global tokens without bias"]
HEADS = [(16, torch.float32, "chunks"), (24, torch.float16, "chunks"), (32, torch.bfloat16, "chunks")]
HEADS += [(96, torch.float32, "chunks"), (128, torch.float16, "chunks")]
HEADS += [(32, torch.float16, "dense"), (24, torch.bfloat16, "dense"), (128, torch.float32, "dense")]
# The operators with a bias of global tokens, with options and sizes.
BIASED = {"chunks": ({"chunk_size": 3}, ALL_INPUTS), "dense": ({}, {"num_global": 1})}
biased = pytest.mark.parametrize("name", BIASED)
dense_is_fast = pytest.mark.parametrize("name", slow_except(BIASED, ["dense"]))


def biased_inputs(name: str, height: int, width: int, **sizes: int) -> dict[str, torch.Tensor]:
    return make_inputs(name, height, width, BIASED[name][0], **BIASED[name][1] | sizes)


# -- interpreted -----------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("case", slow_except(CASES, FAST))
def test_equals_the_reference(case):
    name, height, width, options, sizes = CASES[case]
    assert_equals_reference(name, make_inputs(name, height, width, options, **sizes), options)


@interpreted
@pytest.mark.parametrize("channels, dtype, name", slow_except(HEADS, [24]), ids=str)
def test_types_and_sizes_of_heads(name, channels, dtype):
    inputs = biased_inputs(name, 2, 5, channels=channels, dtype=dtype)
    assert_equals_reference(name, inputs, BIASED[name][0])


@interpreted
@dense_is_fast
@pytest.mark.parametrize(
    "learned", [("query", "global_key"), ("key", "global_bias"), ("value",), ("local_bias",), ("global_bias",)], ids=str
)
def test_gradients_of_some_inputs(name, learned):
    inputs, (operator, by_reference, _), (options, _) = biased_inputs(name, 2, 5), OPERATORS[name], BIASED[name]
    learned = inputs.keys() & learned
    expected = outputs_and_gradients(by_reference, inputs, **options)
    leaves = {key: x.detach().requires_grad_(key in learned) for key, x in inputs.items()}
    output = operator(**leaves, **options)
    output.backward(torch.sin(torch.arange(output.numel(), dtype=torch.float64)).view(output.shape))
    gradients = {f"gradient of {key}": x.grad for key, x in leaves.items() if x.grad is not None}
    assert_near(gradients, {f"gradient of {key}": expected[f"gradient of {key}"] for key in learned})


@interpreted
@biased
def test_bias_of_minus_infinity_hides_keys(name):
    inputs = biased_inputs(name, 3, 5)
    inputs["local_bias"][..., ::2] = inputs["global_bias"][:] = float("-inf")
    assert_equals_reference(name, inputs, BIASED[name][0])


@interpreted
@biased
def test_a_bias_of_one_head_is_used_by_all_heads(name):
    (operator, by_reference, _), options = OPERATORS[name], BIASED[name][0]
    inputs = biased_inputs(name, 2, 5, heads=2)
    inputs |= {key: x[:1] for key, x in inputs.items() if "bias" in key}

    def expanded(**given):
        given |= {key: x.expand(2, *x.shape[1:]) for key, x in given.items() if "bias" in key}
        return by_reference(**given, **options)

    actual = outputs_and_gradients(operator, inputs, **options)
    assert_near(actual, outputs_and_gradients(expanded, inputs))


@interpreted
@biased
def test_no_images(name):
    inputs = {key: x if "bias" in key else x[:0] for key, x in biased_inputs(name, 4, 7, heads=2).items()}
    actual = outputs_and_gradients(OPERATORS[name][0], inputs, **BIASED[name][0])
    assert actual["output"].shape == ((0, 2, 4, 7, 4) if name == "chunks" else (0, 2, 28, 16))
    assert not actual["gradient of local_bias"].any() and not actual["gradient of global_bias"].any()


@pytest.mark.slow
@interpreted
@biased
def test_operator_passes_pytorchs_opcheck(name):
    inputs = {key: x.requires_grad_() for key, x in biased_inputs(name, 2, 5).items()}
    if name == "chunks":
        arguments = (*(inputs[key] for key in WindowInputs._fields), 3, "zero_pad", None)
    else:
        arguments = (inputs.pop("query").flatten(2, 3).detach().requires_grad_(), *inputs.values())
    torch.library.opcheck(getattr(torch.ops.backbones, f"triton_{name}").default, arguments)


@pytest.mark.slow
@interpreted
@biased
def test_compiled_models_trace_through_the_operator(name):
    """There is no graph break for any size of the feature map, and outputs and gradients equal eager mode."""
    operator, options = OPERATORS[name][0], BIASED[name][0]
    torch.compiler.reset()
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True, dynamic=True)
    options |= {"shift": (0, 1)} if name == "chunks" else {}
    for height, width in ((2, 5), (4, 7)):
        inputs = biased_inputs(name, height, width, batch=2, heads=2)
        actual = outputs_and_gradients(compiled, inputs, **options)
        assert_near(actual, outputs_and_gradients(operator, inputs, **options))


def trained(module, x, *size):
    """Return the output of a module with activation checkpointing, and all gradients."""
    x = x.clone().requires_grad_()
    output = checkpoint(module, x, *size, use_reentrant=False)
    output = output["stage4"] if isinstance(output, dict) else output
    output.square().sum().backward()
    return {"output": output.detach(), "input": x.grad} | {name: p.grad for name, p in module.named_parameters()}


_WINDOW = {"chunk_size": 3, "relative_bias": True}
_DENSE = functools.partial(DenseAttention, bias_size=(3, 4))
MODULES = {
    "chunks": functools.partial(SlidingChunkAttention, **_WINDOW),
    "segments": functools.partial(LongShortAttention, rank=2, **_WINDOW),
    "dense": functools.partial(_DENSE, num_global_tokens=2),
    "dense without global tokens": functools.partial(_DENSE, num_global_tokens=0),
    "dense, last block": functools.partial(_DENSE, update_globals=False),
}


@interpreted
@pytest.mark.parametrize("name", slow_except(MODULES, ["dense"]))
def test_module_with_activation_checkpointing(name):
    results = []
    for backend in ("triton", "reference"):
        module = randomize(MODULES[name](8, num_heads=2, backend=backend)).double()
        results.append(trained(module, random_images(2, module.num_global_tokens + 10, 8), (2, 5)))
    assert_all_close(*results, tolerance=1e-9)


@pytest.mark.parametrize("is_installed, named", [(True, "'cpu'"), (False, "triton")])
@pytest.mark.parametrize("name", OPERATORS)
def test_missing_requirement_raises(monkeypatch, name, is_installed, named):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton_chunks, "_is_installed", lambda: is_installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert (triton_chunks.unmet_requirement(torch.device("cuda")) is None) is is_installed
    options = {} if name == "dense" else {"chunk_size": 3}
    with pytest.raises(ConfigError, match=f"{named}.*attention_backend 'sdpa'"):
        OPERATORS[name][0](**make_inputs(name, 2, 4, options), **options)


# -- compiled --------------------------------------------------------------------------------------

# Bytes of stack that a thread may take. All other kernels must take none.
SPILLED = {
    ("segments", "key_grad_kernel", 80, torch.bfloat16, 32): 8,
    ("chunks", "query_grad_kernel", 80, torch.float32, 96): 144,
    ("dense", "key_grad_kernel", 80, torch.bfloat16, 32): 16,
    ("dense", "key_grad_kernel", 120, torch.bfloat16, 32): 8,
    ("dense", "query_grad_kernel", 80, torch.bfloat16, 64): 16,
    ("dense", "key_grad_kernel", 80, torch.bfloat16, 64): 216,
    ("dense", "key_grad_kernel", 120, torch.bfloat16, 64): 208,
    ("dense", "pair_grad_kernel", 80, torch.bfloat16, 32): 72,
    ("dense", "pair_grad_kernel", 120, torch.bfloat16, 32): 64,
    ("dense", "query_grad_kernel", 80, torch.float32, 96): 176,
    ("dense", "key_grad_kernel", 80, torch.float32, 96): 16,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, architecture, dtype, channels, options",
    [
        *(("chunks", sm, torch.bfloat16, channels, window(7)) for sm in (80, 120) for channels in (24, 32, 64)),
        *(("chunks", sm, torch.bfloat16, 64, window(7)) for sm in (90, 100)),
        *(("chunks", 90, dtype, 32, window(7)) for dtype in (torch.float16, torch.float32)),
        *(("chunks", 80, dtype, 96, window(7)) for dtype in (torch.float16, torch.bfloat16, torch.float32)),
        ("chunks", 90, torch.float16, 96, window(7, "exact")),
        ("chunks", 90, torch.float16, 32, window(7, "cyclic", (0, 1))),
        *(("segments", sm, torch.bfloat16, 64, {"chunk_size": 7}) for sm in (80, 90, 100, 120)),
        *(("segments", sm, torch.bfloat16, 32, {"chunk_size": 7}) for sm in (80, 120)),
        *(("dense", sm, torch.bfloat16, channels, {}) for sm in (80, 90, 100, 120) for channels in (32, 64)),
        *(("dense", sm, torch.float32, 32, {}) for sm in (80, 90)),
        *(("dense", 80, dtype, 96, {}) for dtype in (torch.float16, torch.float32)),
    ],
    ids=str,
)
def test_every_kernel_compiles(monkeypatch, tmp_path, name, architecture, dtype, channels, options):
    skip_without_compiler()
    from backbones.attention import triton_dense_kernels, triton_kernels

    kernels = triton_dense_kernels if name == "dense" else triton_kernels
    compiled = compile_only(monkeypatch, tmp_path, kernels, architecture, dtype)
    type_on_cpu = torch.float32 if dtype == torch.float32 else torch.float16
    sizes = ALL_INPUTS if name == "chunks" else {"num_global": 1}
    inputs = make_inputs(name, 20, 27, options, channels=channels, dtype=type_on_cpu, **sizes)
    outputs_and_gradients(OPERATORS[name][0], inputs, **options)
    assert len(compiled) == (6 if name == "dense" else 5)
    for kernel, code in compiled.items():
        spilled = bytes_of_registers_in_memory(code.asm["cubin"], tmp_path)
        # The shared memory of the smallest of these devices, sm_86 and sm_89.
        assert code.metadata.shared <= 99 * 1024, kernel
        assert spilled is None or spilled <= SPILLED.get((name, kernel, architecture, dtype, channels), 0), kernel


@on_this_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_compiled_equals_the_reference(case, dtype):
    name, height, width, options, sizes = CASES[case]
    inputs = make_inputs(name, height, width, options, dtype=dtype, **{"batch": 2, "heads": 2, "channels": 16} | sizes)
    assert_equals_reference(name, inputs, options, device=DEVICE)


_CHUNKS = ALL_INPUTS | {"num_global": 2, "batch": 2, "heads": 2}
_SEGMENTS = {"num_global": 20, "heads": 2}


@on_this_gpu
@pytest.mark.parametrize(
    "name, height, width, dtype, channels, options, sizes",
    [
        *(
            ("chunks", 23, 36, torch.float16, 32, window(7, mode, shift), _CHUNKS)
            for mode in MODES
            for shift in (None, *SHIFTS[::3])
        ),
        *(
            ("chunks", 23, 36, torch.bfloat16, channels, window(size), _CHUNKS)
            for size, channels in [(7, 64), (7, 96), (4, 48), (5, 24), (15, 16)]
        ),
        *(
            ("chunks", 23, 36, torch.float32, channels, window(size, "exact"), _CHUNKS)
            for size, channels in [(7, 32), (7, 64), (7, 96), (15, 16)]
        ),
        *(
            ("segments", 23, 36, dtype, channels, {"chunk_size": size}, _SEGMENTS)
            for size, channels in [(7, 32), (8, 64), (2, 16)]
            for dtype in (torch.float32, torch.bfloat16)
        ),
        ("dense", 50, 84, torch.bfloat16, 32, {}, {}),
        ("dense", 25, 42, torch.float16, 32, {}, {}),
        ("dense", 38, 57, torch.bfloat16, 64, {}, {"num_global": 1}),
        ("dense", 23, 36, torch.bfloat16, 96, {}, {"num_global": 2}),
        ("dense", 23, 36, torch.float16, 128, {}, {"num_global": 1}),
        ("dense", 23, 36, torch.float32, 32, {}, {"num_global": 1}),
        ("dense", 23, 36, torch.float32, 96, {}, {"num_global": 1}),
    ],
    ids=str,
)
def test_compiled_equals_the_reference_on_larger_maps(name, height, width, dtype, channels, options, sizes):
    inputs = make_inputs(name, height, width, options, dtype=dtype, channels=channels, **sizes)
    assert_equals_reference(name, inputs, options, device=DEVICE)


@on_this_gpu
@pytest.mark.parametrize(
    "name, height, width, options, sizes",
    [("chunks", 57, 80, window(7), ALL_INPUTS), ("dense", 40, 57, {}, {"num_global": 1})],
)
def test_compiled_runs_are_bitwise_reproducible(name, height, width, options, sizes):
    sizes = sizes | {"batch": 2, "heads": 2, "channels": 32}
    inputs = make_inputs(name, height, width, options, dtype=torch.bfloat16, **sizes)
    inputs = {key: x.to(DEVICE) for key, x in inputs.items()}
    first, second = (outputs_and_gradients(OPERATORS[name][0], inputs, **options) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
