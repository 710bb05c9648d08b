"""A batch of no images goes through every family: empty maps, and gradients of zero."""

import pytest
import torch

from backbones import create_backbone, create_classifier
from tests.backbones.helpers import FAMILIES, random_images, small_vil
from tests.selection import slow_except

# One of each family, and of each mechanism of which the small ViL below has none.
NAMES = ["vil_tiny", "vil_tiny_rpb", "ls_tiny", "cvt_ls_13", "lit_ti", "lit_s", "partial_sra32_tiny", "performer_tiny"]


def check(model: torch.nn.Module, images: torch.Tensor) -> None:
    features = model(images)
    assert {name: tuple(feature.shape) for name, feature in features.items()} == {
        name: (0, info.channels, *(-(-side // info.stride) for side in images.shape[2:]))
        for name, info in model.feature_info.items()
    }
    sum(feature.square().sum() for feature in features.values()).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(gradient.eq(0).all() for gradient in gradients)
    assert all(x.isfinite().all() for x in model.state_dict().values() if x.is_floating_point())


@pytest.mark.parametrize("training", slow_except([True, False], [True]))
@pytest.mark.parametrize("name", NAMES)
def test_backbones(name, training):
    check(create_backbone(name).train(training), torch.zeros(0, 3, 68, 100))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("height, width", [(37, 50), (130, 150)])
def test_mechanisms_of_vil(family, height, width):
    check(small_vil(family).train(), random_images(0, 3, height, width))


@pytest.mark.parametrize("family", FAMILIES)
def test_inference(family):
    with torch.inference_mode():
        assert all(len(feature) == 0 for feature in small_vil(family)(random_images(0, 3, 130, 150)).values())


@pytest.mark.parametrize("name", ["vil_tiny_rpb", "ls_tiny", "cvt_ls_13", "lit_ti", "linformer_tiny"])
def test_classifiers(name):
    model = create_classifier(name, num_classes=5)
    logits = model(torch.zeros(0, 3, 224, 224))
    assert logits.shape == (0, 5)
    logits.sum().backward()
