"""The backend auto takes Triton's kernel where it compiles and is right; an error of a device is an error."""

import functools
import itertools
import logging
import subprocess

import pytest
import torch

from backbones import ConfigError, create_backbone
from backbones.attention import backends, long_short, sliding_chunk
from backbones.attention.backends import choose_kernel
from backbones.attention.long_short import LongShortAttention, long_short_attention
from backbones.attention.sliding_chunk import SlidingChunkAttention, sliding_chunk_attention
from backbones.attention.triton_chunks import SEGMENT_MODE
from tests.backbones.attention.cases import OnMap, attend
from tests.backbones.helpers import attention_inputs, randomise
from tests.gpu import DEVICE, on_gpu

BIASES = ("local_bias", "global_bias")


@pytest.fixture
def choose(monkeypatch):
    """Choose for a kernel in place of Triton's; nothing is decided yet."""
    pytest.importorskip("triton", reason="triton is not installed")
    choose_kernel.cache_clear()

    def run(kernel, device="cpu", dtype=torch.float32, num_global=1, biases=BIASES, is_learned=True, **changes) -> str:
        is_segment = changes.get("mode") == SEGMENT_MODE
        monkeypatch.setattr(backends, f"triton_{'long_short' if is_segment else 'chunk'}_attention", kernel)
        options = {"window_size": 3, "mode": "zero_pad", "shift": None} | changes
        return choose_kernel(torch.device(device), dtype, 4, num_global, biases, is_learned, **options)

    yield run
    choose_kernel.cache_clear()


def wrong(**arguments):
    return 1.2 * sliding_chunk_attention(**arguments)


def wrong_gradient(**arguments):
    output = sliding_chunk_attention(**arguments)
    return output + (output - output.detach())


def no_numbers(**arguments):
    return sliding_chunk_attention(**arguments) * float("nan")


def refused_by_the_assembler(**arguments):
    from triton.runtime.errors import PTXASError

    raise PTXASError("ptxas has no such device\nand more")


def raising(error):
    def kernel(**arguments):
        raise error

    return kernel


COMPILER_ERRORS = [
    subprocess.CalledProcessError(1, ["gcc"]),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
    PermissionError("[Errno 13] Permission denied: '/root/.triton/cache'"),
]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.bfloat16},
        {"mode": "cyclic", "shift": (1, 0)},
        {"num_global": 0, "biases": (), "mode": "exact"},
        {"is_learned": False},
    ],
    ids=["float32", "bfloat16", "shift", "no bias", "inference"],
)
def test_a_right_kernel_is_chosen_and_checked_once(choose, caplog, changes):
    caplog.set_level(logging.INFO)
    assert choose(sliding_chunk_attention, **changes) == "triton"
    assert choose(wrong, **changes) == "triton"
    (line,) = caplog.messages
    assert line.endswith("on cpu: triton")


def test_the_choice_for_long_short_attention(choose):
    options = {"mode": SEGMENT_MODE, "biases": ("local_bias",)}
    assert choose(long_short_attention, **options) == "triton"
    assert choose(lambda **given: 1.2 * long_short_attention(**given), **options, num_global=5) == "sdpa"


@pytest.mark.parametrize(
    "kernel", [wrong, wrong_gradient, no_numbers, refused_by_the_assembler, *map(raising, COMPILER_ERRORS)]
)
def test_a_kernel_that_is_wrong_or_does_not_compile_is_excluded_with_a_warning(choose, caplog, kernel):
    assert choose(kernel) == "sdpa"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert choose(wrong_gradient, is_learned=False) == "triton"


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Triton Error [CUDA]: an illegal memory access"), torch.OutOfMemoryError("8 GB"), ConfigError("no")],
    ids=repr,
)
def test_other_errors_are_raised_and_nothing_is_decided(choose, error):
    with pytest.raises(type(error)) as raised:
        choose(raising(error))
    assert raised.value is error and choose(sliding_chunk_attention) == "triton"


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_comparison_ignores_autocast_and_checkpointing_of_the_caller(choose, grad_mode):
    packed, seen = [], []

    def noting(**arguments):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), arguments["query"].is_inference()))
        return sliding_chunk_attention(**arguments)

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x)
    with grad_mode(), torch.autocast("cpu", torch.bfloat16), hooks:
        assert choose(noting) == "triton"
    assert seen == [(False, True, False)] and not packed


@on_gpu
def test_comparison_within_a_backward_pass(choose):
    """As where activations are computed again in the caller's backward pass, on a thread of the device."""
    chosen, product = [], 2 * torch.ones(1, device=DEVICE, requires_grad=True)
    product.register_hook(lambda grad: chosen.append(choose(sliding_chunk_attention, DEVICE)))
    product.sum().backward()
    assert chosen == ["triton"]


# -- in the module ---------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """What a choice as on a GPU is asked for."""
    found = []
    monkeypatch.setattr(backends, "_may_use_triton", lambda query: True)
    monkeypatch.setattr(backends, "choose_kernel", lambda *key, **options: found.append((key, options)) or "triton")
    return found


@pytest.mark.parametrize("training", [False, True])
def test_auto_backend_describes_its_inputs_to_the_choice(asked, monkeypatch, training):
    """With the types that autocast chooses, and the shift of training."""
    used = []
    monkeypatch.setitem(
        sliding_chunk.BACKENDS, "triton", lambda **given: used.append(given) or sliding_chunk_attention(**given)
    )
    module = randomise(SlidingChunkAttention(8, num_heads=2, window_size=3, relative_bias=True, backend="auto"))
    module.train(training).shift = (1, 0)
    with torch.set_grad_enabled(training), torch.autocast("cpu", torch.bfloat16):
        attend(module, torch.randn(2, 7, 10, 8), torch.randn(2, 1, 8))
    options = {"window_size": 3, "mode": "zero_pad", "shift": (1, 0) if training else None}
    assert asked == [((torch.device("cpu"), torch.bfloat16, 4, 1, BIASES, training), options)] and len(used) == 1


def test_auto_backend_counts_projected_keys_as_global_tokens(asked, monkeypatch):
    monkeypatch.setitem(long_short.BACKENDS, "triton", long_short_attention)
    module = LongShortAttention(8, num_heads=2, window_size=3, rank=5, relative_bias=True, backend="auto")
    attend(module, torch.randn(2, 7, 10, 8), torch.randn(2, 1, 8))
    options = {"window_size": 3, "mode": SEGMENT_MODE, "shift": None}
    assert asked == [((torch.device("cpu"), torch.float32, 4, 6, ("local_bias",), True), options)]


def test_empty_tensors_do_not_change_the_choice(asked, monkeypatch):
    """No global token is as none at all; for no image there is nothing to choose."""
    monkeypatch.setitem(sliding_chunk.BACKENDS, "triton", sliding_chunk_attention)
    inputs = attention_inputs(7, 10)
    none = {name: inputs["query"][:, :, 0, :0] for name in ("global_key", "global_value")}
    expected = sliding_chunk_attention(**inputs, window_size=3)
    assert torch.equal(sliding_chunk.auto_chunk_attention(**inputs, **none, window_size=3), expected)
    images = {name: x[:0] for name, x in inputs.items()}
    assert not sliding_chunk.auto_chunk_attention(**images, window_size=3).numel()
    assert [key[3] for key, _ in asked] == [0]


@pytest.mark.parametrize(
    "backend, attention",
    [
        *itertools.product(("triton", "auto"), (SlidingChunkAttention, functools.partial(LongShortAttention, rank=2))),
        ("flex", SlidingChunkAttention),
    ],
)
def test_cpu_and_traced_runs_use_no_triton_kernel(monkeypatch, backend, attention):
    """Not even where Triton's interpreter would run it, which takes minutes."""
    monkeypatch.setattr(backends, "choose_kernel", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = attention(8, num_heads=2, window_size=3, backend=backend).eval()
    inputs = torch.randn(1, 7, 10, 8), torch.randn(1, 1, 8)
    outputs = [attend(module, *inputs)] if backend == "auto" else []
    monkeypatch.setattr(backends, "_may_use_triton", lambda query: True)
    outputs.append(torch.jit.trace(OnMap(module), inputs, check_trace=False)(*inputs))
    module.backend = "sdpa"
    for output in outputs:
        torch.testing.assert_close(output, attend(module, *inputs))


def test_backends_of_the_stages():
    """Sliding chunks and long-short attention have kernels of their own; full attention has PyTorch's."""
    attention = ["sliding_chunk", "long_short", "sliding_chunk", "dense"]
    for asked, *expected in (
        ("auto", "auto", "auto", "auto", "sdpa"),
        ("triton", "triton", "triton", "triton", "sdpa"),
        ("flex", "flex", "sdpa", "flex", "sdpa"),
        ("reference",) * 5,
    ):
        model = create_backbone("vil_tiny", attention=attention, attention_backend=asked)
        assert [stage.blocks[0].attention.backend for stage in model.stages] == expected
        if asked != "flex":
            model = create_backbone("cvt_ls_13", attention_backend=asked)
            assert {block.attention.backend for stage in model.stages for block in stage.blocks} == {asked}
    for name, backend in (("lit_ti", "triton"), ("lit_ti", "flex"), ("ls_tiny", "flex"), ("cvt_ls_13", "flex")):
        with pytest.raises(ConfigError, match=backend):
            create_backbone(name, attention_backend=backend)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"shift": (0, 1)}, {"is_learned": False}, {"mode": SEGMENT_MODE, "biases": ("local_bias",)}],
    ids=["training", "shift", "inference", "long-short"],
)
def test_tritons_kernel_is_right_on_a_gpu(choose, dtype, changes):
    if DEVICE == "cpu":
        pytest.skip("the kernels are not compiled for a CPU")
    name = "triton_long_short_attention" if "mode" in changes else "triton_chunk_attention"
    assert choose(getattr(backends, name), DEVICE, dtype, window_size=7, **changes) == "triton"
