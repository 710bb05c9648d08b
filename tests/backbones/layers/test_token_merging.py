"""Token merging: torchvision's deformable convolution, dtypes under autocast, norms, uniform merging, Figure 2."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import deform_conv2d

from backbones import ConfigError
from backbones.layers.conv import BATCH_NORMS
from backbones.layers.token_merging import DeformableTokenMerging, sampled_positions
from tests.backbones.helpers import assert_all_close, random_images, randomize

SIZES = [(6, 8), (5, 8), (6, 7), (3, 5), (1, 1), (2, 9)]
sizes = pytest.mark.parametrize("height, width", SIZES)


def small_merging(in_channels: int = 3, dim: int = 4, **options) -> DeformableTokenMerging:
    """Return a merging module in eval mode, with random float64 weights and statistics."""
    module = randomize(DeformableTokenMerging(in_channels, dim, **options)).double().eval()
    with torch.no_grad():
        module.offset.weight.mul_(2)
        module.norm.weight.copy_(1 + 0.3 * random_images(dim, seed=3))
        module.norm.bias.copy_(random_images(dim, seed=4))
        module.norm.running_mean.copy_(random_images(dim, seed=5))
        module.norm.running_var.copy_(0.5 + random_images(dim, seed=6).abs())
    return module


def finish(module: DeformableTokenMerging, merged: Tensor) -> Tensor:
    """Return the output of equation 8 in eval mode, channels last."""
    norm = module.norm
    scale = (norm.weight / (norm.running_var + norm.eps).sqrt())[:, None, None]
    merged = (merged - norm.running_mean[:, None, None]) * scale + norm.bias[:, None, None]
    return (0.5 * merged * (1 + torch.erf(merged / math.sqrt(2)))).permute(0, 2, 3, 1)


def padded(features: Tensor) -> Tensor:
    return F.pad(features, (0, features.shape[3] % 2, 0, features.shape[2] % 2))


@sizes
def test_equals_the_operator_of_torchvision_with_its_gradients(height, width):
    """The CPU uses grid sampling, which is faster. A GPU uses torchvision's operator."""
    module, features = small_merging(), random_images(2, 3, height, width).requires_grad_()
    leaves = {"features": features} | {n: p for n, p in module.named_parameters()}

    def results(output: Tensor) -> dict[str, Tensor]:
        weights = torch.sin(torch.arange(output.numel(), dtype=output.dtype)).view(output.shape)
        gradients = torch.autograd.grad((output * weights).sum(), list(leaves.values()))
        return {"output": output.detach()} | dict(zip(leaves, gradients, strict=True))

    offset = F.conv2d(padded(features), module.offset.weight, module.offset.bias, stride=2)
    assert offset.abs().max() > (1 if height > 1 else 0.5)
    merged = deform_conv2d(padded(features), offset, module.weight, module.bias, stride=2)
    expected = results(finish(module, merged))
    actual = results(module(features))
    assert actual["output"].shape == (2, -(-height // 2), -(-width // 2), 4)
    assert_all_close(actual, expected, tolerance=1e-10)
    assert all(tensor.ne(0).any() for tensor in actual.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sampling_is_float32_under_autocast(dtype):
    module, features = small_merging().float(), random_images(2, 3, 5, 8, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        output, offsets = module(features), module.offsets(features)
    # The lower precision differs by more than 5e-4.
    torch.testing.assert_close(output, module(features), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(offsets, module.offsets(features), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm", BATCH_NORMS)
def test_merging_keeps_the_dtype(dtype, norm):
    module, features = small_merging(norm=norm), random_images(2, 3, 5, 8)
    output = module.to(dtype)(features.to(dtype))
    assert output.dtype == dtype
    tolerance = {torch.bfloat16: 0.3, torch.float16: 0.05, torch.float32: 1e-3, torch.float64: 1e-10}[dtype]
    torch.testing.assert_close(output.double(), small_merging(norm=norm)(features), atol=tolerance, rtol=tolerance)


def test_sampled_positions_by_hand():
    first, second = torch.zeros(4, 3, 2, 2, 2), torch.zeros(2, 2, 2, 2, 2)
    second[0, 1, 1, 0] = torch.tensor([1.4, -0.6])  # from (1, 2) to (2.4, 1.4), next to (2, 1)
    second[0, 1, 0, 1] = torch.tensor([-9.0, 9.0])  # beyond the map: its corner (0, 2)
    first[2, 1, 1, 1] = torch.tensor([0.25, 0.5])
    positions = sampled_positions([first, second], 0, 1).view(2, 2, 2, 2, 2)
    assert positions[1, 0].tolist() == [[[4.0, 2.0], [4.0, 3.0]], [[5.0, 2.0], [5.25, 3.5]]]
    assert positions[0, 1].tolist() == [[[0.0, 4.0], [0.0, 5.0]], [[1.0, 4.0], [1.0, 5.0]]]
    for row, col in ((2, 0), (0, 2), (-1, 0)):
        with pytest.raises(ConfigError, match=rf"\({row}, {col}\)"):
            sampled_positions([first, second], row, col)
