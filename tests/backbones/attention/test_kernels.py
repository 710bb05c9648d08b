"""Every attention kernel equals its reference in all dtypes, ignores padding, and needs linear memory."""

import contextlib
import functools

import pytest
import torch

from backbones.attention import chunks, cpu_blocks, dense, reference
from backbones.attention.chunks import copied_windows
from backbones.attention.dense import dense_attention, global_query_attention
from backbones.attention.sliding_chunk import SHIFTS
from backbones.layers.position import GridRelativeBias
from tests.backbones import helpers
from tests.backbones.attention.cases import KERNELS, WINDOWS, FakeGPU, case, kernels, relative_error, windows
from tests.backbones.helpers import (
    LargestTensor,
    assert_all_close,
    outputs_and_gradients,
    random_images,
    randomize,
    trace,
)
from tests.selection import slow_except

# Height, width and chunk size: less than a chunk; one to three chunks; no multiples; two chunks or one along an axis;
# long and thin; other chunk sizes.
SIZES = [(2, 1, 3), (3, 3, 3), (6, 5, 3), (9, 9, 3), (7, 11, 3), (12, 6, 3), (3, 11, 3), (10, 2, 3), (4, 8, 3)]
SIZES += [(1, 20, 3), (11, 8, 1), (11, 8, 2), (5, 13, 4), (11, 8, 5), (19, 26, 7)]
# Number of global tokens, and whether there are biases.
EXTRAS = [(0, False), (0, True), (1, False), (1, True), (2, False), (2, True), (5, True)]


def assert_equals_reference(function, by_reference, inputs, *, tolerance=1e-11):
    expected = outputs_and_gradients(by_reference, inputs)
    assert_all_close(outputs_and_gradients(function, inputs), expected, tolerance=tolerance)


@kernels
@pytest.mark.parametrize("index", range(len(SIZES)), ids=lambda index: "x".join(map(str, SIZES[index])))
def test_equals_the_reference(kernel, index):
    (height, width, chunk_size), number = SIZES[index], list(KERNELS).index(kernel)
    # Each option occurs with several sizes and with every kernel.
    num_global, biases = EXTRAS[(index + 2 * number) % len(EXTRAS)]
    shift = SHIFTS[(index + 3 * number) % len(SHIFTS)] if "shift" in kernel else None
    options = {"num_global": num_global, "biases": biases, "chunk_size": chunk_size, "shift": shift}
    assert_equals_reference(*case(kernel, height, width, **options))


@windows
@pytest.mark.parametrize("block_scores", slow_except([1, 700, 3000], [700]))
def test_result_does_not_depend_on_the_block_size(monkeypatch, kernel, block_scores):
    """The kernel takes one chunk or several at a time."""
    monkeypatch.setattr(cpu_blocks, "BLOCK_SCORES", block_scores)
    assert_equals_reference(*case(kernel, num_global=2, batch=3))


@windows
@pytest.mark.parametrize("num_global", [0, 1, 2])
def test_result_is_the_same_as_on_a_gpu(monkeypatch, kernel, num_global):
    """The GPU path has mask channels, aligned biases, and the gradients of PyTorch."""
    monkeypatch.setattr(chunks, "needs_alignment", lambda device: True)
    monkeypatch.setattr(cpu_blocks, "is_needed", lambda *tensors: False)
    assert_equals_reference(*case(kernel, channels=8, num_global=num_global))


@pytest.mark.parametrize("num_global", [0, 1, 2])
@pytest.mark.parametrize("block_scores", [2**27, 4000, 900], ids=["one_call", "heads", "rows"])
def test_attention_of_a_map_as_on_a_gpu(monkeypatch, num_global, block_scores):
    """A call has some heads and some rows. Its bias is a view of the table by offset."""
    monkeypatch.setattr(dense, "_CALL_SCORES", block_scores)
    bias = randomize(GridRelativeBias((5, 7), 2, num_global_tokens=num_global)).double()
    tokens = num_global + 35
    inputs = [random_images(2, 2, *sizes, 4, seed=seed) for seed, sizes in enumerate([(5, 7), (tokens,), (tokens,)])]
    inputs = [x.requires_grad_() for x in inputs]
    query, key, value = inputs
    actual = dense.map_attention(query, key, value, bias.by_offset(5, 7), bias.local_to_global)
    expected = reference.attention(query.flatten(2, 3), key, value, bias=bias(5, 7))
    learned, weights = [*inputs, *bias.parameters()], torch.linspace(-1, 1, expected.numel()).view_as(expected)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    gradients = (torch.autograd.grad(x, learned, weights.double()) for x in (actual, expected))
    for actual_gradient, expected_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(actual_gradient, expected_gradient, atol=1e-12, rtol=0)


@kernels
def test_only_inputs_that_need_a_gradient_get_one(kernel):
    function, _, inputs = case(kernel)
    expected = outputs_and_gradients(function, inputs)
    for chosen in inputs:
        leaves = {name: x.clone().requires_grad_(name == chosen) for name, x in inputs.items()}
        output = function(**leaves)
        output.backward(torch.sin(torch.arange(output.numel(), dtype=output.dtype)).view(output.shape))
        assert [name for name, x in leaves.items() if x.grad is not None] == [chosen]
        torch.testing.assert_close(leaves[chosen].grad, expected[f"gradient of {chosen}"], atol=1e-11, rtol=0)


@functools.cache
def traced_case(kernel: str, num_global: int, biases: bool, chunk_size: int, copied: bool):
    """Return the kernel, traced at one size with one image, as a function of named tensors."""
    options = {"num_global": num_global, "biases": biases, "chunk_size": chunk_size}
    function, _, example = case(kernel, 8, 13, batch=1, **options)
    with copied_windows() if copied else contextlib.nullcontext():
        traced = trace(lambda *x: function(**dict(zip(example, x, strict=True))), tuple(example.values()))
    assert ("aten::unfold" in str(traced.inlined_graph)) is not copied
    return lambda **inputs: traced(*(inputs[name] for name in example))


@pytest.mark.parametrize("kernel", ["zero_pad", "exact", "cyclic", "long_short"])
@pytest.mark.parametrize("chunk_size", slow_except([1, 3], [3]))
@pytest.mark.parametrize("num_global, biases, copied", [(0, False, False), (2, True, False), (5, True, True)])
def test_traced_once_equals_the_reference_at_all_sizes(kernel, chunk_size, num_global, biases, copied):
    """A trace uses chunks if the eager function uses the whole map at once. Both are tested."""
    traced = traced_case(kernel, num_global, biases, chunk_size, copied)
    for height, width, _ in SIZES[::2]:
        options = {"num_global": num_global, "biases": biases, "chunk_size": chunk_size}
        _, by_reference, inputs = case(kernel, height, width, **options)
        torch.testing.assert_close(traced(**inputs), by_reference(**inputs), atol=1e-11, rtol=0)


@windows
@pytest.mark.parametrize("height, width", [(4, 5), (7, 11)])
def test_values_outside_the_map_are_not_read(kernel, height, width):
    """The feature map is a slice of a larger one full of NaN, which also gets no gradient."""
    function, by_reference, inputs = case(kernel, height, width)
    expected = by_reference(**inputs)
    frames = {}
    for name in ("query", "key", "value"):
        frame = torch.full((2, 2, height + 8, width + 8, 4), float("nan"), dtype=torch.float64)
        frame[:, :, 4:-4, 4:-4] = inputs[name]
        frames[name] = frame.requires_grad_()
    output = function(**inputs | {name: frame[:, :, 4:-4, 4:-4] for name, frame in frames.items()})
    torch.testing.assert_close(output, expected, atol=1e-11, rtol=0)
    output.square().sum().backward()
    for frame in frames.values():
        inside = frame.grad[:, :, 4:-4, 4:-4].clone()
        assert inside.isfinite().all() and inside.abs().sum() > 0
        frame.grad[:, :, 4:-4, 4:-4] = 0
        assert frame.grad.eq(0).all()


@windows
@pytest.mark.parametrize(
    "dtype, autocast",
    [(torch.float32, False), *((dtype, on) for dtype in (torch.float16, torch.bfloat16) for on in (False, True))],
    ids=str,
)
def test_padding_is_hidden_from_very_low_scores(kernel, dtype, autocast):
    """Padding has no effect even if all scores are far below 0, the score of padding."""
    function, by_reference, inputs = case(kernel, channels=64, num_global=2)
    helpers.assert_padding_is_hidden_in_half_precision(function, by_reference, inputs, dtype=dtype, autocast=autocast)


@kernels
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-5), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)], ids=str
)
@pytest.mark.parametrize("autocast", [False, True])
def test_lower_precision_is_close_to_float64(kernel, dtype, tolerance, autocast):
    # With 64 channels, the mask value is large, and it must be representable in float16.
    function, by_reference, inputs = case(kernel, channels=64)
    given = torch.float32 if autocast else dtype
    inputs = {name: x.to(given) for name, x in inputs.items()}
    with torch.autocast("cpu", dtype, enabled=autocast and dtype != torch.float32):
        actual = outputs_and_gradients(function, inputs)
    for name, x in outputs_and_gradients(by_reference, {name: x.double() for name, x in inputs.items()}).items():
        assert actual[name].dtype == (dtype if name == "output" else given)
        assert relative_error(actual[name], x) <= tolerance, name


@windows
def test_memory_is_linear_in_the_tokens(kernel):
    """In the forward and backward pass. The reference shows that the recorder detects a quadratic tensor."""

    def largest(index: int, height: int, width: int) -> int:
        *functions, inputs = case(kernel, height, width, batch=1)
        with LargestTensor() as seen:
            outputs_and_gradients(functions[index], inputs)
        return seen.numel

    assert largest(0, 24, 36) <= 4.5 * largest(0, 12, 18)
    assert largest(1, 12, 16) >= (12 * 16) ** 2


@pytest.mark.parametrize("kernel", [kernel for kernel in WINDOWS if "cyclic" not in kernel])
def test_scores_are_not_kept_for_the_backward_pass(kernel):
    """The backward pass stores the inputs, the output and one number per query, for whole chunks of 24 x 33 tokens."""
    function, _, inputs = case(kernel, 23, 31, batch=1, channels=8)
    leaves, saved = {name: x.requires_grad_() for name, x in inputs.items()}, {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.update({x.data_ptr(): x}) or x, lambda x: x):
        function(**leaves)
    kept = sum({x.untyped_storage().data_ptr(): x.untyped_storage().size() for x in saved.values()}.values()) // 8
    biases = sum(x.numel() for name, x in leaves.items() if "bias" in name)
    others = sum(x.numel() for name, x in leaves.items() if "bias" not in name)
    assert kept <= others + 2 * (24 * 33 + 1) * 9 + 2.2 * biases


def test_non_contiguous_channels():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 4, 6).double().transpose(2, 3) for _ in range(3))
    bias = torch.randn(2, 6, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias[None])
    torch.testing.assert_close(dense_attention(query, key, value, bias=bias), expected)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 2e-2)], ids=str
)
@pytest.mark.parametrize("num_queries", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
def test_global_queries_on_a_gpu_equal_the_reference(biased, num_queries, dtype, tolerance):
    """With the matrix products that a GPU runs, on strided views of one projection."""
    tokens = random_images(2, 3, 40, 3 * 8)
    inputs = dict(zip(("query", "key", "value"), tokens.split(8, dim=3), strict=True))
    inputs["query"] = inputs["query"][:, :, :num_queries]
    if biased:
        inputs["bias"] = random_images(3, num_queries, 40)
    expected = outputs_and_gradients(reference.attention, inputs)
    with FakeGPU():
        actual = outputs_and_gradients(global_query_attention, {name: x.to(dtype) for name, x in inputs.items()})
    assert_all_close({name: x.double() for name, x in actual.items()}, expected, tolerance=tolerance)
