"""Patch embeddings, and the convolutions of CvT."""

import pytest
import torch

from backbones.layers.block import PatchEmbed
from backbones.layers.conv import SeparableProjection, StandardizedConv2d
from tests.backbones.helpers import random_images, randomize


@pytest.mark.parametrize("kernel_size, stride, padding", [(7, 4, 2), (3, 2, 1), (4, 4, 0), (2, 2, 0)])
@pytest.mark.parametrize("height, width", [(1, 9), (16, 24), (17, 31), (18, 5)])
def test_embedding_of_any_size(kernel_size, stride, padding, height, width):
    """The embedding is a strided convolution and a LayerNorm. The image is padded with zeros below and on the right."""
    embed = randomize(PatchEmbed(3, 6, patch_size=stride, kernel_size=kernel_size, norm_eps=1e-5)).double()
    images = random_images(2, 3, height, width)
    padded = torch.zeros(2, 3, -(-height // stride) * stride, -(-width // stride) * stride, dtype=torch.float64)
    padded[:, :, :height, :width] = images
    projection = embed.proj
    expected = torch.nn.functional.conv2d(padded, projection.weight, projection.bias, stride, padding)
    expected = torch.nn.functional.layer_norm(expected.movedim(1, -1), (6,), embed.norm.weight, embed.norm.bias)
    tokens = embed(images)
    assert tokens.shape == (2, -(-height // stride), -(-width // stride), 6)
    torch.testing.assert_close(tokens, expected, atol=1e-12, rtol=0)


def test_separable_projection_is_a_convolution_of_each_channel_then_of_each_token():
    number = 2
    projection = randomize(SeparableProjection(4, 6, number=number)).double().eval()
    norm, linear = projection.norm, projection.pointwise
    with torch.no_grad():
        norm.running_mean.copy_(torch.linspace(-1, 1, number * 4))
        norm.running_var.copy_(torch.linspace(0.5, 3, number * 4))
    tokens = random_images(2, 5, 7, 4)
    outputs = projection(tokens)
    assert outputs.shape == (number, 2, 35, 6)
    copies = torch.nn.functional.pad(torch.cat([tokens] * number, dim=3), (0, 0, 1, 1, 1, 1))
    summed = sum(
        copies[:, row : row + 5, col : col + 7] * projection.depthwise.weight[:, 0, row, col]
        for row in range(3)
        for col in range(3)
    )
    normed = (summed - norm.running_mean) / (norm.running_var + 1e-5).sqrt() * norm.weight + norm.bias
    parts = normed.flatten(1, 2).chunk(number, 2), linear.weight.chunk(number), linear.bias.chunk(number)
    expected = torch.stack([x @ weight.T + bias for x, weight, bias in zip(*parts, strict=True)])
    torch.testing.assert_close(outputs, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_standardized_weights_have_mean_0_and_variance_1(dtype):
    conv = randomize(StandardizedConv2d(4, 6, 3, padding=1, groups=2)).to(dtype)
    weight = conv.standardized()
    assert weight.shape == conv.weight.shape and weight.dtype == dtype
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-3
    filters = weight.double().flatten(1)
    torch.testing.assert_close(filters.mean(1), torch.zeros(6).double(), atol=tolerance, rtol=0)
    torch.testing.assert_close(filters.var(1, correction=0), torch.ones(6).double(), atol=tolerance, rtol=0)
    images = random_images(2, 4, 5, 7, dtype=dtype)
    expected = torch.nn.functional.conv2d(images, weight, conv.bias, padding=1, groups=2)
    torch.testing.assert_close(conv(images), expected, atol=tolerance, rtol=tolerance)


def test_filters_of_equal_weights_are_finite():
    conv = StandardizedConv2d(2, 2, 3, groups=2, bias=False)
    torch.nn.init.ones_(conv.weight)
    conv.standardized().sum().backward()
    assert conv.standardized().eq(0).all() and conv.weight.grad.isfinite().all()
