"""Sliding chunks by FlexAttention: equal to the reference on a CPU, and their blocks of keys for a GPU."""

import functools

import pytest
import torch
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask

from backbones.attention.flex_chunks import flex_chunk_attention, plan_chunks
from tests.backbones.attention.cases import WINDOWS, case
from tests.backbones.helpers import assert_all_close, outputs_and_gradients
from tests.gpu import DEVICE, on_gpu
from tests.selection import slow_except

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

CHUNKS = [name for name, options in WINDOWS.items() if options is not None]
# Height, width, window: below a chunk; one, two and three chunks; no multiples; long and thin.
SIZES = [(2, 1, 3), (3, 3, 3), (6, 5, 3), (7, 11, 3), (1, 20, 3), (11, 8, 1), (5, 13, 4), (19, 26, 7)]
EXTRAS = [(0, ()), (1, ()), (2, ()), (0, ("local_bias",)), (1, ("local_bias",)), (2, ("global_bias",))]
EXTRAS += [(1, ("local_bias", "global_bias"))]


@pytest.fixture
def gradients_on_a_cpu(monkeypatch):
    """PyTorch refuses inputs that need a gradient on a CPU, although its definition of the operator has one."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)


def flex_case(kernel, height=7, width=11, *, left_out=(), **options):
    _, by_reference, inputs = case(kernel, height, width, **options)
    function = functools.partial(flex_chunk_attention, **by_reference.keywords)
    return function, by_reference, {name: x for name, x in inputs.items() if name not in left_out}


@pytest.mark.usefixtures("gradients_on_a_cpu")
@pytest.mark.parametrize("kernel", CHUNKS)
@pytest.mark.parametrize("index", slow_except(range(len(SIZES)), [3, 6]), ids=lambda i: "x".join(map(str, SIZES[i])))
@pytest.mark.parametrize(
    "dtype, tolerance", slow_except([(torch.float64, 1e-12), (torch.float32, 1e-3)], [torch.float64]), ids=str
)
def test_outputs_and_gradients_equal_the_reference(kernel, index, dtype, tolerance):
    (height, width, chunk_size), number = SIZES[index], CHUNKS.index(kernel)
    num_global, left_out = EXTRAS[(index + 2 * number) % len(EXTRAS)]
    function, by_reference, inputs = flex_case(
        kernel, height, width, left_out=left_out, num_global=num_global, chunk_size=chunk_size
    )
    actual = outputs_and_gradients(function, {name: x.to(dtype) for name, x in inputs.items()})
    expected = outputs_and_gradients(by_reference, inputs)
    assert_all_close(actual, {name: x.to(dtype) for name, x in expected.items()}, tolerance=tolerance)


@pytest.mark.usefixtures("gradients_on_a_cpu")
def test_training_after_inference_on_the_same_map():
    """What is kept for a size of map is no tensor of inference mode."""
    function, _, inputs = flex_case("zero_pad", 8, 10)
    with torch.inference_mode():
        output = function(**inputs)
    assert_all_close({"output": output}, {"output": outputs_and_gradients(function, inputs)["output"]}, tolerance=1e-12)


@pytest.mark.parametrize("kernel", CHUNKS)
def test_blocks_of_keys_that_are_skipped_have_no_key_that_is_seen(kernel):
    """On a CPU blocks are ignored. In the order of rows a block of queries in the middle would see all 28 or 29."""
    mode, shift = WINDOWS[kernel].get("mode", "zero_pad"), WINDOWS[kernel].get("shift")
    block_mask = plan_chunks((21, 168), 100, 7, mode, shift, torch.device("cpu")).block_mask
    every, blocks = (
        create_block_mask(block_mask.mask_mod, None, None, 3528, 3628, "cpu").to_dense(),
        block_mask.to_dense(),
    )
    assert (blocks >= every).all() and ("exact" in kernel or blocks.equal(every)) and blocks.sum(dim=-1).max() <= 14


@on_gpu
@pytest.mark.parametrize("kernel", CHUNKS)
def test_kernels_of_a_gpu_equal_the_reference(kernel):
    if DEVICE == "cpu":
        pytest.skip("FlexAttention is compiled for a GPU only")
    function, by_reference, inputs = flex_case(kernel, 19, 26, num_global=1, chunk_size=7, channels=32)
    actual = outputs_and_gradients(function, {name: x.to(DEVICE, torch.float32) for name, x in inputs.items()})
    for name, x in outputs_and_gradients(by_reference, inputs).items():
        assert (actual[name].cpu() - x).abs().max() <= 5e-3 * x.abs().max(), name
