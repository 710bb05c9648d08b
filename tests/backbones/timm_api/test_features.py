"""Backbones by ``features_only=True``, in the classes that timm has for them."""

import pytest
import timm
import torch
from timm.models import FeatureListNet
from torch import nn

from backbones import InputError
from tests.backbones.timm_api.models import (
    RELATIVE,
    SIZE,
    SMALL,
    assert_maps_are_as_told,
    classifier,
    every_family,
    every_flexible_family,
    images,
)


@every_flexible_family
def test_features(name):
    model = timm.create_model(name, features_only=True, max_img_size=(64, 96)).eval()
    assert model.output_fmt == "NCHW" and not model.default_cfg["fixed_input_size"]
    maps = model(images(45, 70))
    assert isinstance(maps, list)
    assert_maps_are_as_told(maps, model.feature_info, (45, 70))
    assert all(isinstance(model.get_submodule(module), nn.Module) for module in model.feature_info.module_name())


@pytest.mark.parametrize("feature_cls", ["dict", "Dict"])
def test_features_as_a_dict(feature_cls):
    options = {"features_only": True, "out_indices": (-1, 1), "max_img_size": 64}
    model = timm.create_model(RELATIVE, feature_cls=feature_cls, **options).eval()
    as_list = timm.create_model(RELATIVE, feature_cls=FeatureListNet, **options).eval()
    as_list.load_state_dict(model.state_dict())
    maps = model(images(45, 70))
    assert list(maps) == ["1", "3"]
    for actual, wanted in zip(maps.values(), as_list(images(45, 70)), strict=True):
        assert torch.equal(actual, wanted)


@every_family
def test_features_by_timms_getter(name):
    whole = classifier(name)
    model = timm.create_model(name, features_only=True, feature_cls="getter", out_indices=(0, -2), img_size=SIZE).eval()
    model.model.load_state_dict({key: whole.state_dict()[key] for key in model.model.state_dict()})
    maps = model(images())
    assert_maps_are_as_told(maps, model.feature_info, SIZE)
    for actual, wanted in zip(maps, whole.forward_intermediates(images(), indices=(0, -2))[1], strict=True):
        assert torch.equal(actual, wanted)
    assert len(model.model.backbone.stages) == len(whole.backbone.stages) - 1
    assert isinstance(model.model.head, nn.Identity) and isinstance(model.model.norm, nn.Identity)


def test_the_getter_norms_the_last_map():
    whole = classifier(SMALL)
    config = {"feature_cls": "getter", "norm": True, "out_indices": 2}
    model = timm.create_model(SMALL, features_only=True, img_size=SIZE, feature_cfg=config).eval()
    model.model.load_state_dict(whole.state_dict(), strict=False)
    wanted = whole.forward_intermediates(images(), indices=2, norm=True, intermediates_only=True)
    for actual, expected in zip(model(images()), wanted, strict=True):
        assert torch.equal(actual, expected)


def test_the_getter_takes_a_checkpoint_of_another_size(tmp_path):
    torch.save(classifier(SMALL, img_size=64).state_dict(), tmp_path / "trained.pth")
    overlay = {"file": str(tmp_path / "trained.pth"), "num_classes": 4}
    options = {"pretrained": True, "pretrained_cfg_overlay": overlay, "img_size": SIZE}
    model = timm.create_model(SMALL, features_only=True, feature_cls="getter", **options).eval()
    resized = timm.create_model(SMALL, num_classes=4, **options).eval()
    for actual, wanted in zip(model(images()), resized.forward_intermediates(images())[1], strict=True):
        assert torch.equal(actual, wanted)


def test_feature_cfg_counts_and_a_keyword_of_its_own_wins():
    options = {"features_only": True, "feature_cfg": {"out_indices": (1,)}}
    with torch.device("meta"):
        assert timm.create_model(RELATIVE, **options).feature_info.channels() == [96]
        assert timm.create_model(RELATIVE, out_indices=(2,), **options).feature_info.channels() == [192]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"feature_cls": "getter"}, "feature_cls='getter': it is for features_only=True"),
        ({"feature_cfg": {}}, r"feature_cfg=\{\}: it is for features_only=True"),
        ({"features_only": True, "feature_cls": "hook"}, "unknown feature_cls 'hook': it is one of list, dict, getter"),
        ({"features_only": True, "feature_cls": "geter"}, "unknown feature_cls 'geter'.* did you mean 'getter'"),
        ({"features_only": True, "feature_cls": nn.Linear}, "unknown feature_cls 'Linear'"),
        ({"features_only": True, "feature_cls": 3}, "unknown feature_cls 3"),
        ({"features_only": True, "feature_cfg": [1]}, r"feature_cfg=\[1\]: it is a dict"),
        ({"features_only": True, "feature_cfg": {"norm": True}}, "feature_cfg has 'norm', and feature_cls='list' has"),
        ({"features_only": True, "feature_cls": "getter", "out_indices": (0, 4)}, "has the stages 0 to 3"),
        ({"features_only": True, "feature_cls": "getter", "out_indices": "12"}, "out_indices='12': .* the stages"),
        ({"features_only": True, "out_indices": (0.5,)}, r"out_indices=\(0.5,\): .* the stages"),
        ({"features_only": True, "feature_cls": "getter", "max_img_size": 64}, "no keyword 'max_img_size'"),
        ({"num_classes": -1}, "num_classes=-1: it is a whole number, 0 for no head"),
        ({"num_classes": "ten"}, "num_classes='ten'"),
        ({"num_classes": True}, "num_classes=True"),
        ({"global_pool": "token"}, "global_pool='token': this variant pools by 'avg', or '' is for no pooling"),
    ],
    ids=str,
)
def test_wrong_values_are_one_line(options, message):
    with torch.device("meta"), pytest.raises(InputError, match=message) as caught:
        timm.create_model(SMALL, **options)
    assert "\n" not in str(caught.value)
