"""The fastest kernel is taken, if it is right; all processes of a run take the same."""

import functools
import logging

import pytest
import torch

from backbones import ConfigError, create_backbone
from backbones.attention import backends, reference, sliding_chunk
from backbones.attention.backends import KernelKey, choose_kernel
from backbones.attention.sliding_chunk import SlidingChunkAttention, sliding_chunk_attention
from tests.backbones.helpers import assert_all_close, attention_inputs, outputs_and_gradients, randomise
from tests.gpu import DEVICE, on_gpu
from tests.projects_vil.engine.gloo import in_processes


def kernel_key(**changes) -> KernelKey:
    names = "query", "key", "value", "global_key", "global_value", "local_bias", "global_bias"
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "heads": 2, "channels": 4, "window_size": 3}
    options |= {"mode": "zero_pad", "is_shifted": False, "num_global": 1, "biases": names[5:], "learned": names}
    return KernelKey(**options | changes)


@pytest.fixture
def seconds(monkeypatch):
    """How long each kernel takes; nothing is decided yet."""
    times = {}
    monkeypatch.setattr(backends, "_decided", {})
    monkeypatch.setattr(backends, "_seconds", lambda kernel, kernel_key: times[kernel])
    return times


def named(times: dict, **kernels) -> dict:
    """Kernels with the seconds that they are to take."""
    times.update({kernel: seconds for kernel, seconds in kernels.values()})
    return {name: kernel for name, (kernel, _) in kernels.items()}


def right(**arguments):
    return sliding_chunk_attention(**arguments)


def wrong(**arguments):
    return 1.2 * sliding_chunk_attention(**arguments)


def wrong_gradient(**arguments):
    output = sliding_chunk_attention(**arguments)
    return output + (output - output.detach())


def no_numbers(**arguments):
    return sliding_chunk_attention(**arguments) * float("nan")


def failing(**arguments):
    raise RuntimeError("ptxas has no such device\nand more")


@pytest.mark.parametrize("first, second, expected", [(1.0, 2.0, "sdpa"), (2.0, 1.0, "other")])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64, "mode": "cyclic", "is_shifted": True},
        {"num_global": 0, "biases": (), "learned": ("query",), "mode": "exact"},
        {"learned": ()},
    ],
    ids=["float32", "bfloat16", "shift", "no bias", "inference"],
)
def test_the_fastest_is_taken(seconds, caplog, first, second, expected, changes):
    caplog.set_level(logging.INFO)
    kernels = named(seconds, sdpa=(sliding_chunk_attention, first), other=(right, second))
    assert choose_kernel(kernels, kernel_key(**changes)) == expected
    (line,) = caplog.messages
    assert line.endswith(f": {expected} (sdpa {1000 * first:.2f} ms, other {1000 * second:.2f} ms)")
    # Once: the clock has another answer now.
    seconds.update({sliding_chunk_attention: 1.0, right: 1.0} | {right: 0.5} if expected == "sdpa" else {right: 9.0})
    assert choose_kernel(kernels, kernel_key(**changes)) == expected and len(caplog.messages) == 1


@pytest.mark.parametrize(
    "kernel, reason",
    [
        (wrong, "it is off by 2.0e-01 of the largest value"),
        (wrong_gradient, "it is off by 1.0e+00 of the largest value"),
        (no_numbers, "it is off by inf of the largest value"),
        (failing, "RuntimeError: ptxas has no such device"),
    ],
)
def test_a_wrong_or_failing_one_is_left_out(seconds, caplog, kernel, reason):
    kernels = named(seconds, sdpa=(sliding_chunk_attention, 5.0), other=(kernel, 0.1))
    assert choose_kernel(kernels, kernel_key()) == "sdpa"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    of_what = "2 heads of 4, window 3, zero_pad, 1 global, local_bias, global_bias, float32, training on cpu"
    assert line == f"attention of {of_what}: other is not taken: {reason}"


def test_where_none_is_right_the_first_one_is_taken(seconds, caplog):
    caplog.set_level(logging.INFO)
    kernels = named(seconds, sdpa=(failing, 1.0), other=(wrong, 1.0))
    assert choose_kernel(kernels, kernel_key()) == "sdpa"
    assert caplog.messages[-1].endswith(": sdpa (not timed)")


def test_what_is_not_for_this_case_is_passed_over(seconds, caplog):
    def refusing(**arguments):
        raise ConfigError("no float64")

    kernels = named(seconds, sdpa=(sliding_chunk_attention, 5.0), other=(refusing, 0.1))
    assert choose_kernel(kernels, kernel_key()) == "sdpa" and not caplog.messages


def test_nothing_is_decided_where_memory_was_short(seconds):
    has_memory = False

    def large(**arguments):
        if not has_memory:
            raise torch.OutOfMemoryError("8 GB")
        return sliding_chunk_attention(**arguments)

    kernels = named(seconds, sdpa=(sliding_chunk_attention, 5.0), other=(large, 0.1))
    assert choose_kernel(kernels, kernel_key()) == "sdpa"
    has_memory = True
    assert choose_kernel(kernels, kernel_key()) == "other"


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_autocast_and_checkpointing_of_the_caller_do_not_reach_the_comparison(seconds, caplog, grad_mode):
    packed, seen = [], []

    def noting(**arguments):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), arguments["query"].is_inference()))
        return sliding_chunk_attention(**arguments)

    kernels = named(seconds, sdpa=(noting, 1.0))
    with (
        grad_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x),
    ):
        assert choose_kernel(kernels, kernel_key()) == "sdpa"
    assert seen == [(False, True, False)] and not packed and not caplog.messages


@on_gpu
def test_a_comparison_within_a_backward_pass(seconds, caplog):
    """As where activations are computed again in the caller's backward pass, on a thread of the device."""
    kernels, device = named(seconds, sdpa=(sliding_chunk_attention, 1.0)), torch.device(DEVICE)
    product = 2 * torch.ones(1, device=device, requires_grad=True)
    product.register_hook(lambda grad: seconds.update(chosen=choose_kernel(kernels, kernel_key(device=device))))
    product.sum().backward()
    assert seconds["chosen"] == "sdpa" and not caplog.messages


def test_a_kernel_is_timed_forward_and_backward():
    calls = []

    def counting(**arguments):
        calls.append(arguments["query"].requires_grad)
        return sliding_chunk_attention(**arguments)

    assert backends._seconds(counting, kernel_key()) > 0
    assert calls == [True] * 7


def _choose(folder) -> None:
    """The first process finds one to be faster, and the second, which comes later, the other one."""
    rank = torch.distributed.get_rank()
    backends._seconds = lambda kernel, kernel_key: float((kernel is right) == (rank == 0))
    if rank == 1:
        torch.distributed.barrier()
    chosen = choose_kernel({"sdpa": sliding_chunk_attention, "other": right}, kernel_key())
    if rank == 0:
        torch.distributed.barrier()
    (folder / str(rank)).write_text(chosen)


def test_the_first_process_decides(tmp_path):
    in_processes(2, _choose, tmp_path, store=tmp_path / "store")
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["sdpa", "sdpa"]


# -- in the module ---------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_auto_asks_for_what_it_is_used_for(monkeypatch, training):
    """As on a GPU: with the types that autocast chooses, and the shift of training."""
    asked, used = [], {}

    def choose(kernels, kernel_key):
        asked.append(kernel_key)
        return "triton"

    def kernel(*, window_size, mode, shift, **tensors):
        used.update(tensors)
        return reference.sliding_chunk_attention(**tensors, window_size=window_size, mode=mode, shift=shift)

    monkeypatch.setattr(sliding_chunk, "_has_several_kernels", lambda device: True)
    monkeypatch.setattr(sliding_chunk, "choose_kernel", choose)
    monkeypatch.setitem(sliding_chunk._KERNELS, "triton", kernel)
    module = randomise(SlidingChunkAttention(8, num_heads=2, window_size=3, relative_bias=True, backend="auto"))
    module.train(training).shift = (1, 0)
    tokens, shared = torch.randn(1, 7, 10, 8), torch.randn(1, 1, 8)
    with torch.set_grad_enabled(training), torch.autocast("cpu", torch.bfloat16):
        module(tokens, shared)
    learned = ("query", "key", "value", "global_key", "global_value", "local_bias", "global_bias") if training else ()
    assert asked == [kernel_key(dtype=torch.bfloat16, is_shifted=training, learned=learned)]
    # The inputs of the comparison have the memory layout of the module's: 2 x 3 chunks and a token more.
    compared = asked[0].inputs(2, 3, 1, rest=1)
    assert {name: (x.shape, x.stride()) for name, x in compared.items()} == {
        name: (x.shape, x.stride()) for name, x in used.items()
    }


def test_what_is_empty_makes_no_difference(monkeypatch):
    """No global token is as none at all; of no image there is nothing to choose."""
    asked = []
    monkeypatch.setattr(sliding_chunk, "_has_several_kernels", lambda device: True)
    monkeypatch.setattr(
        sliding_chunk, "choose_kernel", lambda kernels, kernel_key: asked.append(kernel_key.num_global) or "sdpa"
    )
    inputs = attention_inputs(7, 10)
    none = {name: inputs["query"][:, :, 0, :0] for name in ("global_key", "global_value")}
    expected = sliding_chunk_attention(**inputs, window_size=3)
    assert torch.equal(sliding_chunk.fastest_chunk_attention(**inputs, **none, window_size=3), expected)
    images = {name: x[:0] for name, x in inputs.items()}
    assert not sliding_chunk.fastest_chunk_attention(**images, window_size=3).numel() and asked == [0]


def test_on_a_cpu_there_is_nothing_to_choose(monkeypatch):
    """Nor where Triton's interpreter would take minutes."""
    monkeypatch.setattr(sliding_chunk, "choose_kernel", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    inputs = attention_inputs(7, 10, num_global=1, local_bias=True, global_bias=True)
    functions = (sliding_chunk.BACKENDS[name] for name in ("auto", "reference"))
    actual, expected = (outputs_and_gradients(functools.partial(f, window_size=3), inputs) for f in functions)
    assert_all_close(actual, expected, tolerance=1e-11)


def test_backends_of_the_stages():
    """Sliding chunks have kernels of their own; full attention has PyTorch's."""
    for asked, chunks, others in (("auto", "auto", "sdpa"), ("triton", "triton", "sdpa"), ("reference",) * 3):
        model = create_backbone("vil_tiny", attention=["sliding_chunk"] * 3 + ["dense"], attention_backend=asked)
        assert [stage.blocks[0].attention.backend for stage in model.stages] == [chunks] * 3 + [others]
    default = create_backbone("vil_tiny")
    assert default.stages[0].blocks[0].attention.backend == "auto"


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_a_traced_run_takes_no_triton_kernel(monkeypatch, backend):
    monkeypatch.setattr(sliding_chunk, "_has_several_kernels", lambda device: True)
    monkeypatch.setattr(sliding_chunk, "choose_kernel", lambda kernels, kernel_key: pytest.fail("it was asked for one"))
    module = SlidingChunkAttention(8, num_heads=2, window_size=3, backend=backend).eval()
    tokens, shared = torch.randn(1, 7, 10, 8), torch.randn(1, 1, 8)
    traced = torch.jit.trace(module, (tokens, shared), check_trace=False)
    module.backend = "sdpa"
    with torch.no_grad():
        for actual, expected in zip(traced(tokens, shared), module(tokens, shared), strict=True):
            torch.testing.assert_close(actual, expected)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changes", [{}, {"is_shifted": True}, {"learned": ()}], ids=["training", "shift", "inference"])
def test_both_kernels_are_right_on_a_gpu(monkeypatch, caplog, dtype, changes):
    if DEVICE == "cpu":
        pytest.skip("the kernels are not compiled for a CPU")
    monkeypatch.setattr(backends, "_decided", {})
    sizes = {"heads": 3, "channels": 32, "window_size": 7}
    caplog.set_level(logging.INFO)
    choose_kernel(sliding_chunk._KERNELS, kernel_key(device=torch.device(DEVICE), dtype=dtype, **sizes | changes))
    (line,) = caplog.messages
    assert "sdpa " in line and "triton " in line and " ms" in line


@pytest.mark.parametrize("name", ["lit_ti", "cvt_ls_13", "ls_tiny"])
def test_triton_is_of_sliding_chunks(name):
    with pytest.raises(ConfigError) as caught:
        create_backbone(name, attention_backend="triton")
    assert "triton" in str(caught.value)
