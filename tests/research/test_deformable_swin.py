"""timm's Swin with deformable token merging."""

import pytest
import torch
from timm.models.swin_transformer import PatchMerging, SwinTransformer
from torch import nn

from backbones import ConfigError
from backbones.layers.token_merging import DeformableTokenMerging
from research.deformable_swin import with_deformable_merging
from tests.backbones.helpers import random_images, randomize


def test_swin_with_deformable_merging():
    """Table 4."""
    torch.manual_seed(0)
    sizes = {"embed_dim": 8, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 4)}
    swin = SwinTransformer(img_size=64, window_size=4, num_classes=5, **sizes)
    before = {name: tensor.clone() for name, tensor in swin.state_dict().items()}
    model = randomize(with_deformable_merging(swin)).double().train()
    assert not any(isinstance(module, PatchMerging) for module in model.modules())
    assert sum(isinstance(module, DeformableTokenMerging) for module in model.modules()) == 3
    features = model.forward_features(random_images(2, 3, 64, 64))
    assert features.shape == (2, 2, 2, 64)
    logits = model(random_images(2, 3, 64, 64))
    assert logits.shape == (2, 5)
    (logits * torch.arange(10).view(2, 5)).sum().backward()
    lacking = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not [name for name in lacking if "table" not in name and not name.endswith("downsample.bias")]
    assert swin.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in swin.state_dict().items())


def test_model_without_patch_merging_raises():
    with pytest.raises(ConfigError, match="Linear has no PatchMerging"):
        with_deformable_merging(nn.Linear(1, 1))
