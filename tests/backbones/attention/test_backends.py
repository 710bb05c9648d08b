"""The fastest kernel is used, if it is right; all processes of a run use the same."""

import logging

import pytest
import torch

from backbones import ConfigError, create_backbone
from backbones.attention import backends, reference, sliding_chunk
from backbones.attention.backends import KernelKey, choose_kernel
from backbones.attention.chunks import WindowInputs
from backbones.attention.sliding_chunk import SlidingChunkAttention, sliding_chunk_attention
from tests.backbones.attention.cases import OnMap, attend
from tests.backbones.helpers import attention_inputs, randomise
from tests.gpu import DEVICE, on_gpu
from tests.projects_vil.engine.gloo import in_processes


def kernel_key(**changes) -> KernelKey:
    names = WindowInputs._fields
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "heads": 2, "channels": 4, "window_size": 3}
    options |= {"mode": "zero_pad", "is_shifted": False, "num_global": 1, "biases": names[5:], "learned": names}
    return KernelKey(**options | changes)


@pytest.fixture
def choose(monkeypatch):
    """Choose between ``sdpa``, which takes 5 seconds, and another kernel; nothing is decided yet."""
    monkeypatch.setattr(backends, "_decided", {})

    def run(other, seconds=0.1, **changes) -> str:
        monkeypatch.setattr(backends, "_seconds", lambda kernel, key: seconds if kernel is other else 5.0)
        return choose_kernel({"sdpa": sliding_chunk_attention, "other": other}, kernel_key(**changes))

    return run


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


def refusing(**arguments):
    raise ConfigError("no float64")


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
def test_fastest_kernel_is_chosen_once(choose, changes):
    assert choose(right, **changes) == "other"
    assert choose(right, seconds=9.0, **changes) == "other"


@pytest.mark.parametrize("kernel", [wrong, wrong_gradient, no_numbers, failing])
def test_wrong_or_failing_kernels_are_excluded_with_a_warning(choose, caplog, kernel):
    assert choose(kernel) == "sdpa"
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and "other" in caplog.text


def test_kernels_without_support_for_the_dtype_are_skipped(choose, caplog):
    assert choose(refusing) == "sdpa" and not caplog.messages
    assert choose(right, seconds=9.0, num_global=2) == "sdpa"
    assert choose_kernel({"first": failing, "second": wrong}, kernel_key()) == "first"


def test_choice_is_not_kept_after_out_of_memory(choose):
    has_memory = False

    def large(**arguments):
        if not has_memory:
            raise torch.OutOfMemoryError("8 GB")
        return sliding_chunk_attention(**arguments)

    assert choose(large) == "sdpa"
    has_memory = True
    assert choose(large) == "other"


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_comparison_ignores_autocast_and_checkpointing_of_the_caller(choose, caplog, grad_mode):
    packed, seen = [], []

    def noting(**arguments):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), arguments["query"].is_inference()))
        return sliding_chunk_attention(**arguments)

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x)
    with grad_mode(), torch.autocast("cpu", torch.bfloat16), hooks:
        assert choose(noting) == "other"
    assert seen == [(False, True, False)] and not packed and not caplog.messages


@on_gpu
def test_comparison_within_a_backward_pass(choose, caplog):
    """As where activations are computed again in the caller's backward pass, on a thread of the device."""
    device, chosen = torch.device(DEVICE), []
    product = 2 * torch.ones(1, device=device, requires_grad=True)
    product.register_hook(lambda grad: chosen.append(choose(right, device=device)))
    product.sum().backward()
    assert chosen == ["other"] and not caplog.messages


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


def test_all_processes_use_the_choice_of_the_first(tmp_path):
    in_processes(2, _choose, tmp_path, store=tmp_path / "store")
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["sdpa", "sdpa"]


# -- in the module ---------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_auto_backend_describes_its_inputs_to_the_choice(monkeypatch, training):
    """As on a GPU: with the types that autocast chooses, and the shift of training."""
    asked, used = [], {}

    def kernel(*, window_size, mode, shift, **tensors):
        used.update(tensors)
        return reference.sliding_chunk_attention(**tensors, window_size=window_size, mode=mode, shift=shift)

    monkeypatch.setattr(sliding_chunk, "_has_several_kernels", lambda device: True)
    monkeypatch.setattr(sliding_chunk, "choose_kernel", lambda kernels, key: asked.append(key) or "triton")
    monkeypatch.setitem(sliding_chunk._KERNELS, "triton", kernel)
    module = randomise(SlidingChunkAttention(8, num_heads=2, window_size=3, relative_bias=True, backend="auto"))
    module.train(training).shift = (1, 0)
    with torch.set_grad_enabled(training), torch.autocast("cpu", torch.bfloat16):
        attend(module, torch.randn(2, 7, 10, 8), torch.randn(2, 1, 8))
    learned = WindowInputs._fields if training else ()
    assert asked == [kernel_key(dtype=torch.bfloat16, is_shifted=training, learned=learned)]
    # The inputs of the comparison have the memory layout of the module's: 2 x 3 chunks and a token more.
    compared = asked[0].inputs(2, 3, 2, rest=1)
    assert {name: (x.shape, x.stride()) for name, x in compared.items()} == {
        name: (x.shape, x.stride()) for name, x in used.items()
    }


def test_empty_tensors_do_not_change_the_choice(monkeypatch):
    """No global token is as none at all; for no image there is nothing to choose."""
    asked = []
    monkeypatch.setattr(sliding_chunk, "_has_several_kernels", lambda device: True)
    monkeypatch.setattr(sliding_chunk, "choose_kernel", lambda kernels, key: asked.append(key.num_global) or "sdpa")
    inputs = attention_inputs(7, 10)
    none = {name: inputs["query"][:, :, 0, :0] for name in ("global_key", "global_value")}
    expected = sliding_chunk_attention(**inputs, window_size=3)
    assert torch.equal(sliding_chunk.fastest_chunk_attention(**inputs, **none, window_size=3), expected)
    images = {name: x[:0] for name, x in inputs.items()}
    assert not sliding_chunk.fastest_chunk_attention(**images, window_size=3).numel() and asked == [0]


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_cpu_and_traced_runs_use_no_triton_kernel(monkeypatch, backend):
    """Not even where Triton's interpreter would run it, which takes minutes."""
    monkeypatch.setattr(sliding_chunk, "choose_kernel", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = SlidingChunkAttention(8, num_heads=2, window_size=3, backend=backend).eval()
    inputs = torch.randn(1, 7, 10, 8), torch.randn(1, 1, 8)
    outputs = [attend(module, *inputs)] if backend == "auto" else []
    monkeypatch.setattr(sliding_chunk, "_has_several_kernels", lambda device: True)
    outputs.append(torch.jit.trace(OnMap(module), inputs, check_trace=False)(*inputs))
    module.backend = "sdpa"
    for output in outputs:
        torch.testing.assert_close(output, attend(module, *inputs))


def test_backends_of_the_stages():
    """Sliding chunks have kernels of their own; full attention has PyTorch's."""
    for asked, chunks, others in (("auto", "auto", "sdpa"), ("triton", "triton", "sdpa"), ("reference",) * 3):
        model = create_backbone("vil_tiny", attention=["sliding_chunk"] * 3 + ["dense"], attention_backend=asked)
        assert [stage.blocks[0].attention.backend for stage in model.stages] == [chunks] * 3 + [others]
    with pytest.raises(ConfigError, match="triton"):
        create_backbone("lit_ti", attention_backend="triton")


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
    assert "sdpa" in line and "triton" in line
