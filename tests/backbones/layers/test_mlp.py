"""The feed-forward part."""

import torch

from backbones.layers.mlp import Mlp
from tests.backbones.helpers import random_images, randomise


def test_is_two_linear_layers_with_an_exact_gelu():
    mlp = randomise(Mlp(6, expansion=3)).double()
    assert mlp.expand.weight.shape == (18, 6)
    tokens = random_images(2, 3, 5, 6)
    hidden = tokens @ mlp.expand.weight.T + mlp.expand.bias
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    expected = hidden @ mlp.contract.weight.T + mlp.contract.bias
    torch.testing.assert_close(mlp(tokens), expected, atol=1e-12, rtol=1e-12)
