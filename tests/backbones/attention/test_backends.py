"""Choice of the attention backend: 'triton' runs its kernel only if it is correct, and 'auto' only suggests it."""

import functools
import json
import logging
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from backbones import ConfigError, create_backbone
from backbones.attention import reference, triton_check, triton_chunks
from backbones.attention.dense import DenseAttention
from backbones.attention.long_short import LongShortAttention, long_short_attention
from backbones.attention.sliding_chunk import SlidingChunkAttention, sliding_chunk_attention
from backbones.attention.triton_check import Case, automatic_backend, choose_kernel, resolve_backend, suggest_tuning
from backbones.attention.triton_chunks import SEGMENT_MODE, triton_chunk_attention
from backbones.attention.triton_dense import DENSE_MODE
from tests.backbones.attention.cases import FakeGPU, OnMap, attend
from tests.backbones.helpers import attention_inputs
from tests.gpu import DEVICE, on_gpu

BIASES = ("local_bias", "global_bias")
CASE = Case(torch.device("cpu"), torch.float32, 4, 1, BIASES, True, 3, "zero_pad", None)
# Mode -> the kernel, a right implementation, and biases. Other modes are modes of sliding chunks.
OTHER_KERNELS = {
    SEGMENT_MODE: ("triton_long_short_attention", long_short_attention, ("local_bias",)),
    DENSE_MODE: ("triton_map_attention", reference.map_attention, BIASES),
}


@pytest.fixture
def choose(monkeypatch):
    """Return a function that chooses a backend with a given kernel instead of Triton's. Earlier choices are cleared."""
    pytest.importorskip("triton", reason="triton is not installed")
    choose_kernel.cache_clear()

    def run(kernel, **changes) -> str:
        case = CASE._replace(**changes)
        name = OTHER_KERNELS[case.mode][0] if case.mode in OTHER_KERNELS else "triton_chunk_attention"
        monkeypatch.setattr(triton_check, name, kernel)
        return choose_kernel(case)

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


KERNEL_ERRORS = [
    subprocess.CalledProcessError(1, ["gcc"]),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
    PermissionError("[Errno 13] Permission denied: '/root/.triton/cache'"),
    RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    AttributeError("module 'triton' has no attribute 'language'"),
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
def test_a_correct_kernel_is_chosen_and_checked_once(choose, caplog, changes):
    caplog.set_level(logging.INFO)
    assert choose(sliding_chunk_attention, **changes) == "triton"
    assert choose(wrong, **changes) == "triton"
    (line,) = caplog.messages
    assert "device cpu" in line and line.endswith(": triton")


@pytest.mark.parametrize("mode", OTHER_KERNELS)
def test_the_choice_for_other_kernels(choose, mode):
    _, right_kernel, biases = OTHER_KERNELS[mode]
    assert choose(right_kernel, mode=mode, biases=biases) == "triton"
    assert choose(lambda **given: 1.2 * right_kernel(**given), mode=mode, biases=biases, num_global=5) == "sdpa"


@pytest.mark.parametrize(
    "kernel", [wrong, wrong_gradient, no_numbers, refused_by_the_assembler, *map(raising, KERNEL_ERRORS)]
)
def test_a_kernel_that_is_wrong_or_fails_is_excluded_with_a_warning(choose, caplog, kernel):
    assert choose(kernel) == "sdpa"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert choose(wrong_gradient, is_learned=False) == "triton"


def test_a_broken_installation_of_triton_excludes_the_kernel_with_a_warning(choose, caplog, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton.errors", None)
    monkeypatch.setitem(sys.modules, "backbones.attention.triton_kernels", None)
    # The attribute exists if another test has imported the module.
    monkeypatch.delattr("backbones.attention.triton_kernels", raising=False)
    assert choose(triton_chunk_attention) == "sdpa"
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and "triton_kernels" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("8 GB"), ConfigError("no")], ids=repr)
def test_other_errors_are_raised_and_no_kernel_is_chosen(choose, error):
    with pytest.raises(type(error)) as raised:
        choose(raising(error))
    assert raised.value is error and choose(sliding_chunk_attention) == "triton"


def test_an_error_that_leaves_the_device_unusable_is_raised(choose, monkeypatch):
    error = RuntimeError("an illegal memory access was encountered")
    monkeypatch.setattr(torch.cpu, "synchronize", lambda device: raising(error)())
    for first in (RuntimeError("launch failure"), OSError("no assembler")):
        with pytest.raises(type(first)) as raised:
            choose(raising(first))
        assert raised.value is first


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
    """With activation checkpointing, the choice may happen in a backward pass, on a thread of the device."""
    chosen, product = [], 2 * torch.ones(1, device=DEVICE, requires_grad=True)
    product.register_hook(lambda grad: chosen.append(choose(sliding_chunk_attention, device=torch.device(DEVICE))))
    product.sum().backward()
    assert chosen == ["triton"]


# -- in the module ---------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """Return a list that collects the arguments of each choice, as on a GPU."""
    found = []
    monkeypatch.setattr(triton_check, "_can_check", lambda query: True)
    monkeypatch.setattr(triton_check, "choose_kernel", lambda case: found.append(case) or "sdpa")
    return found


SEGMENTS = {"chunk_size": 3, "rank": 5, "relative_bias": True}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "attention, num_global, described",
    [
        (functools.partial(SlidingChunkAttention, chunk_size=3, relative_bias=True), 1, (1, BIASES, 3, "zero_pad")),
        # Projected keys count as global tokens.
        (functools.partial(LongShortAttention, **SEGMENTS), 1, (6, ("local_bias",), 3, SEGMENT_MODE)),
        (functools.partial(DenseAttention, bias_size=(5, 9)), 0, (0, ("local_bias",), 0, DENSE_MODE)),
        (functools.partial(DenseAttention, bias_size=(5, 9)), 1, (1, BIASES, 0, DENSE_MODE)),
    ],
)
def test_triton_backend_describes_its_inputs_to_the_check(asked, training, attention, num_global, described):
    """The dtype is the dtype of autocast, and there is a random shift in training only."""
    module = attention(8, num_heads=2, num_global_tokens=num_global, backend="triton").train(training)
    module.shift, tokens = (1, 0), torch.randn(2, num_global + 70, 8)
    with torch.set_grad_enabled(training), torch.autocast("cpu", torch.bfloat16):
        output = module(tokens, (7, 10))
        module.backend = "sdpa"
        assert torch.equal(output, module(tokens, (7, 10)))
    keys, biases, chunk_size, mode = described
    shift = (1, 0) if training and mode == "zero_pad" else None
    assert asked == [Case(torch.device("cpu"), torch.bfloat16, 4, keys, biases, training, chunk_size, mode, shift)]


def test_empty_global_tokens_do_not_change_the_check(asked):
    inputs = attention_inputs(7, 10)
    none = {name: inputs["query"][:, :, 0, :0] for name in ("global_key", "global_value")}
    assert resolve_backend("triton", inputs | none, chunk_size=3, mode="zero_pad") == "sdpa"
    assert [case.num_global for case in asked] == [0]


@pytest.fixture
def on_device(monkeypatch, tmp_path):
    """Return a function that sets the compute capability of the GPU and the version of Triton."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def set_up(capability: tuple[int, int], triton: str | None = "3.6.0") -> None:
        monkeypatch.setattr(triton_chunks, "_is_installed", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(triton_check, "package_version", lambda name: triton)

    def clear() -> None:
        suggest_tuning.cache_clear()
        automatic_backend.cache_clear()

    clear()
    yield set_up
    clear()


ATTENTIONS = [
    functools.partial(SlidingChunkAttention, chunk_size=3),
    functools.partial(LongShortAttention, chunk_size=3, rank=2),
    functools.partial(DenseAttention, bias_size=(5, 9)),
]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_auto_and_traced_runs_use_no_triton_kernel(asked, monkeypatch, backend, attention):
    """This also holds in Triton's interpreter, which would take minutes."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = attention(8, num_heads=2, backend=backend).double().eval()
    inputs = torch.randn(1, 7, 10, 8).double(), torch.randn(1, 1, 8).double()
    outputs = [attend(module, *inputs)] if backend == "auto" else []
    outputs.append(torch.jit.trace(OnMap(module), inputs, check_trace=False)(*inputs))
    module.backend = "sdpa"
    for output in outputs:
        torch.testing.assert_close(output, attend(module, *inputs))
    assert not asked


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("capability, lines", [((8, 0), 1), ((7, 5), 0)])
def test_auto_is_pytorchs_attention_and_suggests_triton_once(on_device, caplog, attention, capability, lines):
    caplog.set_level(logging.INFO)
    on_device(capability)
    module = attention(8, num_heads=2, backend="auto")
    for _ in range(2):
        with FakeGPU() as gpu:
            attend(module, torch.randn(1, 7, 10, 8), torch.randn(1, 1, 8))
        assert gpu.cudnn
    assert [("vil benchmark --tune" in message) for message in caplog.messages] == [True] * lines


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(
    "capability, triton, dtype, is_measured",
    [
        ((9, 0), "3.6.0", torch.bfloat16, True),
        ((9, 0), "3.10rc1", torch.bfloat16, True),
        ((9, 0), "3.5.1", torch.bfloat16, False),
        ((9, 0), None, torch.bfloat16, False),
        ((9, 0), "3.6.0", torch.float16, True),
        ((9, 0), "3.6.0", torch.float32, False),
        ((8, 0), "3.6.0", torch.bfloat16, False),
    ],
)
def test_auto_is_triton_where_it_has_been_measured(asked, on_device, attention, capability, triton, dtype, is_measured):
    on_device(capability, triton)
    module = attention(8, num_heads=2, backend="auto").to(dtype)
    with FakeGPU():
        attend(module, torch.randn(1, 7, 10, 8, dtype=dtype), torch.randn(1, 1, 8, dtype=dtype))
    assert [case.dtype for case in asked] == [dtype] * is_measured


@pytest.mark.parametrize(
    "capability, hip, reason",
    [((9, 0), "6.4", "does not support AMD GPUs"), ((7, 5), None, "needs compute capability")],
)
def test_gpus_that_the_triton_kernels_do_not_support(asked, on_device, monkeypatch, capability, hip, reason):
    on_device(capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    module, tokens = ATTENTIONS[0](8, num_heads=2, backend="auto").bfloat16(), torch.randn(1, 7, 10, 8).bfloat16()
    with FakeGPU():
        attend(module, tokens, torch.randn(1, 1, 8).bfloat16())
        with pytest.raises(ConfigError, match=f"Triton attention {reason}.*Use attention_backend 'sdpa'"):
            triton_chunks.check_requirement(tokens)
    assert not asked and triton_chunks.unmet_requirement(torch.device("cuda")).startswith(reason)


KEY = f"capability 8.0, triton 3.6.0, torch {torch.__version__}, bfloat16"
OTHERS = (("8.0", "9.0"), ("3.6", "3.7"), ("torch ", "torch 1"), ("bfloat16", "float16"))


@pytest.mark.parametrize(
    "content, chosen, lines",
    [
        ({KEY: "triton"}, "triton", 0),
        ({KEY: "sdpa"}, "sdpa", 0),
        ({KEY: "flex"}, "sdpa", 1),
        *(({KEY.replace(*other): "triton"}, "sdpa", 1) for other in OTHERS),
        ("{", "sdpa", 2),
        ("1", "sdpa", 2),
        (None, "sdpa", 1),
    ],
    ids=str,
)
def test_auto_is_the_measured_choice_of_the_user(on_device, caplog, content, chosen, lines):
    caplog.set_level(logging.INFO)
    on_device((8, 0))
    file = triton_check.choices_file()
    if content is not None:
        file.parent.mkdir()
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    assert [automatic_backend(torch.device("cuda"), torch.bfloat16, 32) for _ in range(2)] == [chosen] * 2
    assert len(caplog.messages) == lines and (lines < 2 or str(file) in caplog.messages[0])


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_capture_of_a_cuda_graph(choose, on_device, monkeypatch, backend):
    """An earlier choice is used. Without one, a kernel cannot be checked."""
    on_device((9, 0))
    query = torch.randn(1, 2, 7, 10, 16, dtype=torch.bfloat16)
    tensors, options = dict.fromkeys(("query", "key", "value"), query), {"mode": "zero_pad", "chunk_size": 3}
    for is_known in (False, True):
        if is_known:
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            monkeypatch.setattr(triton_check, "_reason_against_triton", lambda case: None)
            with FakeGPU():
                assert resolve_backend(backend, tensors, **options) == "triton"
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with FakeGPU():
            if is_known or backend == "auto":
                assert resolve_backend(backend, tensors, **options) == ("triton" if is_known else "sdpa")
            else:
                with pytest.raises(ConfigError, match="Run the model once before"):
                    resolve_backend(backend, tensors, **options)


# -- cuDNN's attention -----------------------------------------------------------------------------


@pytest.mark.parametrize("attention", [*ATTENTIONS, DenseAttention])
def test_cudnns_attention_is_never_used(attention):
    with FakeGPU() as gpu:
        attend(attention(8, num_heads=2), torch.randn(1, 7, 10, 8), torch.randn(1, 1, 8))
    assert gpu.cudnn and not any(gpu.cudnn) and torch.backends.cuda.cudnn_sdp_enabled()


def test_kernels_that_the_caller_excludes_are_not_used():
    with FakeGPU() as gpu, sdpa_kernel(SDPBackend.MATH):
        attend(DenseAttention(8, num_heads=2), torch.randn(1, 7, 10, 8), torch.randn(1, 1, 8))
    assert gpu.flash == [False]


def test_backends_of_the_stages():
    """Full attention without a bias, which has no kernel of its own, has PyTorch's."""
    attention = ["sliding_chunk", "long_short", "sliding_chunk", "dense"]
    with torch.device("meta"):
        for asked, others in (("auto", "sdpa"), ("triton", "sdpa"), ("reference", "reference")):
            for name, last in (("vil_tiny", others), ("vil_tiny_rpb", asked)):
                model = create_backbone(name, attention=attention, attention_backend=asked)
                assert [stage.blocks[0].attention.backend for stage in model.stages] == [asked] * 3 + [last]
            model = create_backbone("cvt_ls_13", attention_backend=asked)
            assert {block.attention.backend for stage in model.stages for block in stage.blocks} == {asked}
            model = create_backbone("lit_s", attention_backend=asked)
            assert [stage.blocks[0].attention.backend for stage in model.stages[2:]] == [asked] * 2
    with pytest.raises(ConfigError, match="triton"):
        create_backbone("lit_ti", attention_backend="triton")


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name, changes",
    [
        ("triton_chunk_attention", {}),
        ("triton_chunk_attention", {"shift": (0, 1)}),
        ("triton_chunk_attention", {"is_learned": False}),
        ("triton_long_short_attention", {"mode": SEGMENT_MODE, "biases": ("local_bias",)}),
        ("triton_map_attention", {"mode": DENSE_MODE, "channels": 32}),
    ],
)
def test_triton_kernel_is_correct_on_a_gpu(choose, dtype, name, changes):
    if DEVICE == "cpu":
        pytest.skip("the kernels are not compiled for a CPU")
    changes = {"device": torch.device(DEVICE), "dtype": dtype, "chunk_size": 7} | changes
    assert choose(getattr(triton_check, name), **changes) == "triton"
