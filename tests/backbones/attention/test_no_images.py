"""A batch of no images goes through every family: empty maps, and gradients of zero."""

import pytest
import torch

from backbones import create_backbone, create_classifier
from tests.backbones.helpers import FAMILIES, random_images, small_vil


@pytest.mark.parametrize("name", [*FAMILIES, "cvt_ls_13", "lit_ti", "lit_s"])
def test_backbones(name):
    model = (small_vil(name) if name in FAMILIES else create_backbone(name)).train()
    height, width = 130, 150
    images = random_images(0, 3, height, width, dtype=next(model.parameters()).dtype)
    features = model(images)
    for key, info in model.feature_info.items():
        assert features[key].shape == (0, info.channels, -(-height // info.stride), -(-width // info.stride))
    sum(feature.square().sum() for feature in features.values()).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(gradient.eq(0).all() for gradient in gradients)
    assert all(x.isfinite().all() for x in model.state_dict().values() if x.is_floating_point())
    with torch.inference_mode():
        assert all(len(feature) == 0 for feature in model.eval()(images).values())


@pytest.mark.parametrize("name", ["vil_tiny_rpb", "linformer_tiny"])
def test_classifiers(name):
    logits = create_classifier(name, num_classes=5)(torch.zeros(0, 3, 224, 224))
    assert logits.shape == (0, 5)
    logits.sum().backward()
