"""Every kernel on a GPU in every dtype: outputs and gradients match the reference in float64 on the CPU."""

import functools

import pytest
import torch

from backbones.attention import reference
from backbones.attention.efficient import performer_attention, sample_features
from backbones.attention.sliding_chunk import SHIFTS
from tests.backbones.attention.cases import case, kernels
from tests.backbones.helpers import outputs_and_gradients, random_images
from tests.gpu import DEVICE, on_gpu

TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def assert_close_to_reference(function, by_reference, inputs, dtype):
    rounded = {name: x.to(DEVICE, dtype) for name, x in inputs.items()}
    actual = outputs_and_gradients(function, rounded)
    expected = outputs_and_gradients(by_reference, {name: x.cpu().double() for name, x in rounded.items()})
    # The gradient of a bias is a sum over all queries that nearly cancels, so its rounding errors have the size of the
    # largest gradient.
    largest = max(x.abs().max().item() for x in expected.values())
    for name, x in expected.items():
        assert actual[name].dtype == dtype and actual[name].device.type == DEVICE, name
        scale = largest if "bias" in name else x.abs().max().item()
        assert (actual[name].cpu().double() - x).abs().max().item() <= TOLERANCES[dtype] * scale, name


@on_gpu
@kernels
@dtypes
@pytest.mark.parametrize(
    "num_global, channels, biases", [(1, 16, True), (2, 32, True), (0, 32, False), (0, 48, True), (1, 96, True)]
)
def test_kernels(kernel, num_global, dtype, channels, biases):
    shift = SHIFTS[2 * num_global] if "shift" in kernel else None
    functions_and_inputs = case(kernel, num_global=num_global, channels=channels, biases=biases, shift=shift)
    assert_close_to_reference(*functions_and_inputs, dtype)


@on_gpu
def test_performer():
    inputs = {name: random_images(2, 2, 40, 16, seed=seed) for seed, name in enumerate(("query", "key", "value"))}
    features = sample_features(24, 16, generator=torch.Generator().manual_seed(0))
    functions = (
        functools.partial(performer_attention, features=features.to(DEVICE)),
        functools.partial(reference.performer_attention, features=features.double()),
    )
    assert_close_to_reference(*functions, inputs, torch.float32)
