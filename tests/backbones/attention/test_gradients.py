"""Gradients that are made of scores made again: equal to the reference, block by block, and nothing large is kept."""

import functools

import pytest
import torch
from torch import Tensor, nn

from backbones.attention import blocked, reference
from backbones.attention.dense import DenseAttention, dense_attention
from backbones.attention.long_short import LongShortAttention, long_short_attention
from backbones.attention.sliding_chunk import MODES, SlidingChunkAttention, sliding_chunk_attention
from tests.backbones.attention.test_long_short import attention_inputs as long_short_inputs
from tests.backbones.helpers import (
    assert_all_close,
    attention_inputs,
    outputs_and_gradients,
    random_images,
    randomise,
)

GLOBALS = [0, 1, 2]


def case(kernel: str, num_global: int, height: int = 7, width: int = 11, **options):
    """A kernel, its reference and their inputs, with every bias."""
    if kernel == "long_short":
        inputs = long_short_inputs(height, width, num_global=num_global, bias=True, rank=3, **options)
        functions = long_short_attention, reference.long_short_attention
        return *(functools.partial(function, window_size=3) for function in functions), inputs
    if kernel == "dense":
        tokens = num_global + height * width
        options = {"batch": 2, "heads": 2, "channels": 4} | options
        shape = (options["batch"], options["heads"], tokens, options["channels"])
        inputs = {name: random_images(*shape, seed=seed) for seed, name in enumerate(("query", "key", "value"))}
        return dense_attention, reference.attention, inputs | {"bias": random_images(shape[1], tokens, tokens)}
    inputs = attention_inputs(
        height, width, num_global=num_global, local_bias=True, global_bias=bool(num_global), **options
    )
    functions = sliding_chunk_attention, reference.sliding_chunk_attention
    return *(functools.partial(function, window_size=3, mode=kernel) for function in functions), inputs


kernels = pytest.mark.parametrize("kernel", [*MODES, "long_short", "dense"])
num_globals = pytest.mark.parametrize("num_global", GLOBALS)


@kernels
@num_globals
@pytest.mark.parametrize("block_scores", [1, 3000])
def test_blocks_of_any_size_give_the_same(monkeypatch, kernel, num_global, block_scores):
    """From one chunk, or one query of one head, at a time to several."""
    monkeypatch.setitem(blocked.BLOCK_SCORES, "cpu", block_scores)
    function, by_reference, inputs = case(kernel, num_global)
    expected = outputs_and_gradients(by_reference, inputs)
    assert_all_close(outputs_and_gradients(function, inputs), expected, tolerance=1e-11)


@kernels
@num_globals
def test_without_the_private_operator_it_is_the_same(monkeypatch, kernel, num_global):
    """As on a GPU, and with a torch that lacks it: the backward pass makes the log-sum-exps too."""
    function, by_reference, inputs = case(kernel, num_global)
    monkeypatch.setattr(blocked, "_CPU_KERNEL", None)
    expected = outputs_and_gradients(by_reference, inputs)
    assert_all_close(outputs_and_gradients(function, inputs), expected, tolerance=1e-11)


@kernels
def test_a_private_operator_that_refuses_is_not_used(monkeypatch, kernel):
    def refuse(*args, **kwargs):
        raise TypeError("another signature")

    function, by_reference, inputs = case(kernel, 1)
    monkeypatch.setattr(blocked, "_CPU_KERNEL", refuse)
    expected = outputs_and_gradients(by_reference, inputs)
    assert_all_close(outputs_and_gradients(function, inputs), expected, tolerance=1e-11)


@kernels
@num_globals
def test_gradcheck(kernel, num_global):
    function, _, inputs = case(kernel, num_global, 4, 7, batch=1, heads=1, channels=2)
    inputs = {name: 0.5 * x for name, x in inputs.items()}
    leaves = tuple(x.requires_grad_() for x in inputs.values())

    def run(*tensors: Tensor) -> Tensor:
        return function(**dict(zip(inputs, tensors, strict=True)))

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True, atol=1e-6, rtol=1e-6)


@kernels
def test_only_what_is_asked_for_has_a_gradient(kernel):
    function, _, inputs = case(kernel, 1)
    for chosen in inputs:
        leaves = {name: x.clone().requires_grad_(name == chosen) for name, x in inputs.items()}
        function(**leaves).square().sum().backward()
        assert [name for name, x in leaves.items() if x.grad is not None] == [chosen]


@kernels
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 4e-2), (torch.float16, 6e-3)])
def test_autocast(kernel, dtype, tolerance):
    function, by_reference, inputs = case(kernel, 1)
    expected = outputs_and_gradients(by_reference, inputs)
    with torch.autocast("cpu", dtype):
        actual = outputs_and_gradients(function, {name: x.float() for name, x in inputs.items()})
    for name, x in expected.items():
        assert actual[name].dtype == (dtype if name == "output" else torch.float32)
        assert (actual[name].double() - x).abs().max() <= tolerance * x.abs().max(), name


@kernels
def test_nothing_of_the_size_of_the_scores_is_kept(kernel):
    """The backward pass keeps the inputs, the output and a number for each query (of whole chunks)."""
    function, _, inputs = case(kernel, 1, 23, 31, batch=1, channels=8)
    leaves, saved = {name: x.requires_grad_() for name, x in inputs.items()}, {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.update({x.data_ptr(): x}) or x, lambda x: x):
        output = function(**leaves)
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved.values()}
    # Whole chunks are 24 x 33 tokens: an output of 2 heads of 8 channels, and a float64 for each of both heads
    whole = 2 * (24 * 33 + 1)
    biases = sum(x.numel() for name, x in leaves.items() if "bias" in name)
    others = sum(x.numel() for name, x in leaves.items() if "bias" not in name)
    assert sum(kept.values()) <= 8 * (others + 9 * whole + 2.2 * biases), (output.shape, kept)


MODULES = {
    "sliding_chunk": functools.partial(SlidingChunkAttention, window_size=3, relative_bias=True),
    "long_short": functools.partial(LongShortAttention, window_size=3, rank=2, relative_bias=True),
    "dense": functools.partial(DenseAttention, bias_size=(5, 7)),
}
modules = pytest.mark.parametrize("name", MODULES)


def module_gradients(module: nn.Module, num_global: int, height: int, width: int, run=None) -> dict[str, Tensor]:
    module.zero_grad(set_to_none=True)
    tokens = random_images(2, height, width, 8).requires_grad_()
    global_tokens = random_images(2, num_global, 8, seed=2).requires_grad_() if num_global else None
    outputs = [x for x in (module if run is None else run)(tokens, global_tokens) if x is not None]
    sum((x * torch.sin(torch.arange(x.numel())).view_as(x)).sum() for x in outputs).backward()
    return {"tokens": tokens.grad} | {name: p.grad for name, p in module.named_parameters()}


@modules
@num_globals
def test_modules_train_as_with_the_reference_at_one_size_after_another(monkeypatch, name, num_global):
    ours, check = (
        randomise(MODULES[name](8, num_heads=2, num_global_tokens=num_global, backend=backend)).double()
        for backend in ("sdpa", "reference")
    )
    for height, width, block_scores in ((7, 10, 2000), (12, 5, 1), (2, 3, 2**20), (7, 10, 2**20)):
        monkeypatch.setitem(blocked.BLOCK_SCORES, "cpu", block_scores)
        expected = module_gradients(check, num_global, height, width)
        assert_all_close(module_gradients(ours, num_global, height, width), expected, tolerance=1e-9)


@modules
def test_activation_checkpointing(name):
    module = randomise(MODULES[name](8, num_heads=2, num_global_tokens=1)).double()
    expected = module_gradients(module, 1, 7, 10)
    run = functools.partial(torch.utils.checkpoint.checkpoint, module, use_reentrant=False)
    assert_all_close(module_gradients(module, 1, 7, 10, run=run), expected, tolerance=1e-12)


@pytest.mark.slow
@modules
def test_compiled(name):
    """A compiled run takes PyTorch's gradients, without a break in the graph."""
    module = randomise(MODULES[name](8, num_heads=2, num_global_tokens=1)).double()
    expected = module_gradients(module, 1, 7, 10)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False)
    assert_all_close(module_gradients(module, 1, 7, 10, run=compiled), expected, tolerance=1e-9)


def test_channels_that_are_no_neighbours_in_memory():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 4, 6).transpose(2, 3) for _ in range(3))
    bias = torch.randn(2, 6, 6, requires_grad=True)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias[None])
    torch.testing.assert_close(dense_attention(query, key, value, bias=bias), expected)
