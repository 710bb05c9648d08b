"""Triton operators with their references and inputs, interpreted and compiled kernels, and a mark for a GPU."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from backbones.attention import reference, triton_chunks
from backbones.attention.triton_chunks import triton_chunk_attention, triton_long_short_attention
from backbones.attention.triton_dense import triton_map_attention
from tests.backbones.attention.cases import case
from tests.backbones.helpers import attention_inputs, outputs_and_gradients, random_images
from tests.gpu import DEVICE, on_gpu

# Relative to the largest value of each tensor. A gradient of the global bias is small compared with its summands.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
interpreted = pytest.mark.usefixtures("interpreter")
# Options of ``attention_inputs``.
ALL_INPUTS = {"num_global": 1, "local_bias": True, "global_bias": True}


def map_inputs(height, width, *, num_global=0, biases=True, batch=1, heads=1, channels=16, dtype=torch.float64):
    """Return random arguments of ``triton_map_attention``."""
    shapes = {"query": (batch, heads, height, width, channels)}
    shapes |= dict.fromkeys(("key", "value"), (batch, heads, num_global + height * width, channels))
    shapes["local_bias"] = (heads, 2 * height - 1, 2 * width - 1)
    if num_global and biases:
        shapes["global_bias"] = (heads, num_global)
    return {name: random_images(*shape, seed=seed).to(dtype) for seed, (name, shape) in enumerate(shapes.items())}


def segment_inputs(height: int, width: int, **sizes) -> dict[str, torch.Tensor]:
    return case("long_short", height, width, **sizes)[2]


# The operator, its reference, and a function (height, width, **sizes) -> arguments of both
OPERATORS = {
    "chunks": (triton_chunk_attention, reference.sliding_chunk_attention, attention_inputs),
    "segments": (triton_long_short_attention, reference.long_short_attention, segment_inputs),
    "dense": (triton_map_attention, reference.map_attention, map_inputs),
}


def make_inputs(name: str, height: int, width: int, options: dict, *, dtype=torch.float64, **sizes: int) -> dict:
    """Return random arguments of an operator besides ``options``. The default is one image with one head."""
    chunk_size = {key: size for key, size in options.items() if key == "chunk_size"}
    inputs = OPERATORS[name][2](height, width, **{"batch": 1, "heads": 1} | chunk_size | sizes)
    return {key: x.to(dtype) for key, x in inputs.items()}


def assert_equals_reference(name: str, inputs: dict, options: dict, *, device: str = "cpu") -> None:
    """Check that outputs and all gradients match the reference for the same rounded inputs in float64."""
    operator, by_reference, _ = OPERATORS[name]
    actual = outputs_and_gradients(operator, {key: x.to(device) for key, x in inputs.items()}, **options)
    inputs = {key: x.cpu().double() for key, x in inputs.items()}
    assert_near(actual, outputs_and_gradients(by_reference, inputs, **options))


@functools.cache
def interpreted_kernels(name: str = "triton_kernels") -> ModuleType:
    """Import an interpreted copy of the kernels, apart from the module that other tests may have imported."""
    shared = "backbones.attention.triton_kernels"
    found = sys.modules.get(shared)
    if name != "triton_kernels":
        sys.modules[shared] = interpreted_kernels()
    try:
        path = Path(triton_chunks.__file__).with_name(f"{name}.py")
        spec = importlib.util.spec_from_file_location(f"interpreted_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.modules.pop(shared, None)
        if found is not None:
            sys.modules[shared] = found
    # A call of a helper makes the interpreter patch triton.language again, which takes most of the time.
    for helper, function in list(vars(module).items()):
        if helper.startswith("_") and hasattr(function, "rewrite"):
            setattr(module, helper, function.rewrite())
    return module


def assert_near(actual, expected):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert actual[name].shape == x.shape, name
        difference = (actual[name].cpu().double() - x).abs().max()
        assert difference <= TOLERANCES[actual[name].dtype] * x.abs().max(), f"{name}: {difference}"


def compile_only(monkeypatch, folder: Path, kernels: ModuleType, architecture: int, dtype: torch.dtype) -> dict:
    """Let kernels be compiled for an architecture, which needs no GPU, instead of started.

    Returns:
        The compiled kernels by name, after their start. The inputs are on the CPU, where bfloat16 would be taken as
        float32: give float16 for it.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    # A device whose number is its architecture: triton keeps what it has compiled by the number.
    driver = SimpleNamespace(
        get_current_device=lambda: architecture,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
    )
    active = "_active" if hasattr(triton.runtime.driver, "_active") else "active"
    monkeypatch.setattr(triton.runtime.driver, active, driver)
    compiled = {}

    def compile_kernel(run, name, warmup, **arguments):
        arguments = {
            key: x.to(dtype) if torch.is_tensor(x) and x.dtype == torch.float16 else x for key, x in arguments.items()
        }
        compiled[name] = run(warmup=True, **arguments)

    for name, kernel in vars(kernels).items():
        if name.endswith("_kernel"):
            monkeypatch.setattr(kernel, "run", functools.partial(compile_kernel, kernel.run, name))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(triton_chunks, "unmet_requirement", lambda *query: None)
    return compiled


def skip_without_compiler() -> None:
    triton = pytest.importorskip("triton", minversion="3.3", reason="triton 3.3 or later is not installed")
    if "TRITON_INTERPRET" in os.environ:
        pytest.skip("TRITON_INTERPRET is set: the kernels are interpreted")
    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists():
        pytest.skip("triton has no ptxas here")


def bytes_of_registers_in_memory(cubin: bytes, folder: Path) -> int | None:
    """Return the register spill of a thread in bytes, or None without cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None
    (folder / "kernel.cubin").write_bytes(cubin)
    process = subprocess.run([tool, "-res-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", process.stdout)[1])


def on_this_gpu(test):
    """:func:`tests.gpu.on_gpu`, for what neither a CPU nor an interpreter can do."""
    reason = f"the kernels are not compiled for {DEVICE}"
    is_compiled = DEVICE == "cuda" and "TRITON_INTERPRET" not in os.environ
    return on_gpu(pytest.mark.skipif(not is_compiled, reason=reason)(test))
