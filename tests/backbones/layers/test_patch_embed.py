"""Patch embedding: a linear map of each patch, a LayerNorm, and zeros where the map ends within a patch."""

import pytest
import torch
import torch.nn.functional as F

from backbones.layers.patch_embed import PatchEmbed
from tests.backbones.helpers import random_images, randomise


@pytest.mark.parametrize("height, width", [(8, 12), (7, 10), (3, 1)])
@pytest.mark.parametrize("patch_size", [2, 4])
def test_embeds_each_patch(height, width, patch_size):
    embed = randomise(PatchEmbed(3, 6, patch_size=patch_size, norm_eps=1e-3)).double()
    features = random_images(2, 3, height, width)
    output = embed(features)
    rows, cols = -(-height // patch_size), -(-width // patch_size)
    assert output.shape == (2, rows, cols, 6)
    weight = embed.projection.weight.flatten(1)
    for row in range(rows):
        for col in range(cols):
            patch = torch.zeros(2, 3, patch_size, patch_size, dtype=torch.float64)
            top, left = row * patch_size, col * patch_size
            inside = features[:, :, top : top + patch_size, left : left + patch_size]
            patch[:, :, : inside.shape[2], : inside.shape[3]] = inside
            linear = patch.flatten(1) @ weight.T + embed.projection.bias
            expected = F.layer_norm(linear, (6,), embed.norm.weight, embed.norm.bias, eps=1e-3)
            torch.testing.assert_close(output[:, row, col], expected, atol=1e-12, rtol=1e-12)
