"""Every kernel on a GPU, in every type: outputs and gradients as the reference's in float64 on the CPU."""

import functools

import pytest
import torch

from backbones.attention import reference
from backbones.attention.efficient import performer_attention, sample_features
from backbones.attention.sliding_chunk import SHIFTS, sliding_chunk_attention
from tests.backbones.attention.test_gradients import case, kernels, num_globals
from tests.backbones.helpers import outputs_and_gradients, random_images
from tests.gpu import DEVICE, on_gpu

# Relative to the largest value of each tensor.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def assert_close_to_reference(function, by_reference, inputs, dtype, **options):
    rounded = {name: x.to(DEVICE, dtype) for name, x in inputs.items()}
    actual = outputs_and_gradients(function, rounded, **options)
    expected = outputs_and_gradients(by_reference, {name: x.cpu().double() for name, x in rounded.items()}, **options)
    for name, x in expected.items():
        found = actual[name]
        assert found.dtype == dtype and found.device.type == DEVICE, name
        assert (found.cpu().double() - x).abs().max() <= TOLERANCES[dtype] * x.abs().max(), name


@on_gpu
@kernels
@num_globals
@dtypes
@pytest.mark.parametrize("channels", [16, 32, 48, 96])
def test_learned_biases(kernel, num_global, dtype, channels):
    function, by_reference, inputs = case(kernel, num_global, channels=channels)
    assert_close_to_reference(function, by_reference, inputs, dtype)


@on_gpu
@kernels
@num_globals
@dtypes
def test_no_bias(kernel, num_global, dtype):
    function, by_reference, inputs = case(kernel, num_global, channels=32)
    inputs = {name: x for name, x in inputs.items() if "bias" not in name}
    assert_close_to_reference(function, by_reference, inputs, dtype)


@on_gpu
@dtypes
@pytest.mark.parametrize("shift", SHIFTS[::3], ids=str)
@pytest.mark.parametrize("mode", ["zero_pad", "exact", "cyclic"])
def test_random_shift(mode, shift, dtype):
    _, _, inputs = case(mode, 1, channels=32)
    functions = (
        functools.partial(function, window_size=3, mode=mode, shift=shift)
        for function in (sliding_chunk_attention, reference.sliding_chunk_attention)
    )
    assert_close_to_reference(*functions, inputs, dtype)


@on_gpu
def test_performer():
    inputs = {name: random_images(2, 2, 40, 16, seed=seed) for seed, name in enumerate(("query", "key", "value"))}
    features = sample_features(24, 16, generator=torch.Generator().manual_seed(0))
    functions = (
        functools.partial(performer_attention, features=features.to(DEVICE)),
        functools.partial(reference.performer_attention, features=features.double()),
    )
    assert_close_to_reference(*functions, inputs, torch.float32)
