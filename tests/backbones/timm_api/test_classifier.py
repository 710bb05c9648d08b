"""What timm's own tests ask of a model, after its ``tests/test_models.py``: of one variant of each family."""

import copy
import inspect

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.models import FeatureInfo, get_model_input_config, save_for_hf
from torch import nn

from backbones import InputError
from backbones.timm_api import TimmClassifier
from tests.backbones.timm_api.models import (
    FAMILIES,
    RELATIVE,
    SIZE,
    SMALL,
    assert_maps_are_as_told,
    classifier,
    every_family,
    images,
)
from tests.selection import slow_except


@every_family
def test_forward(name):
    model = classifier(name)
    with torch.no_grad():
        logits = model(images())
        assert logits.shape == (2, 4) and logits.isfinite().all()
        model.set_grad_checkpointing()
        assert torch.equal(model(images()), logits)


@every_family
def test_backward(name):
    model = classifier(name, num_classes=42).train()
    logits = model(images())
    assert logits.shape == (2, 42)
    logits.mean().backward()
    assert [n for n, parameter in model.named_parameters() if parameter.grad is None] == []
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", slow_except(FAMILIES, [SMALL]))
def test_the_config_is_that_of_the_model(name):
    """At the size that it names, on a device without memory."""
    with torch.device("meta"):
        model = timm.create_model(name).eval()
        unpooled = timm.create_model(name, num_classes=0, global_pool="").eval()
    config = model.default_cfg
    state_dict = model.state_dict()
    assert {f"{config[key]}.weight" for key in ("classifier", "first_conv")} <= state_dict.keys()
    assert model.num_classes == config["num_classes"] == 1000 and model.in_chans == config["input_size"][0]
    batch = torch.empty(1, *config["input_size"], device="meta")
    tokens = model.forward_features(batch)
    assert tokens.shape[2] == model.num_features
    assert model.forward_head(tokens, pre_logits=True).shape == (1, model.head_hidden_size)
    (last,) = model.forward_intermediates(batch, indices=1, intermediates_only=True)
    assert tuple(last.shape[2:]) == config["pool_size"]
    model.reset_classifier(0)
    assert model.num_classes == 0 and model.forward_head(tokens).shape == (1, model.head_hidden_size)
    model.reset_classifier(0, "")
    assert model.forward_head(tokens).shape == unpooled(batch).shape == tokens.shape
    assert unpooled.global_pool == model.global_pool == ""


@every_family
def test_images_are_prepared_as_the_config_says(name):
    config = resolve_model_data_config(classifier(name))
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8))
    image = create_transform(**config)(photo)
    assert tuple(image.shape) == config["input_size"] == (3, 224, 224)


@every_family
def test_intermediates(name):
    model = classifier(name)
    info = FeatureInfo(model.feature_info, len(model.feature_info))
    with torch.no_grad():
        tokens, maps = model.forward_intermediates(images())
        assert_maps_are_as_told(maps, info, SIZE)
        assert_maps_are_as_told(maps, model.feature_info, SIZE)
        assert torch.equal(tokens, model.forward_features(images()))
        model.set_grad_checkpointing()
        assert torch.equal(model.forward_intermediates(images())[0], tokens)
    assert [model.get_submodule(module) for module in info.module_name()] == list(model.backbone.stages)


@pytest.mark.parametrize(
    "method, owner",
    [
        ("forward_intermediates", timm.models.swin_transformer.SwinTransformer),
        ("prune_intermediate_layers", timm.models.swin_transformer.SwinTransformer),
        ("reset_classifier", timm.models.pvt_v2.PyramidVisionTransformerV2),
        ("set_input_size", timm.models.vision_transformer.VisionTransformer),
    ],
)
def test_signatures_are_those_of_timm(method, owner):
    def defaults(owner: type) -> dict:
        return {p.name: p.default for p in inspect.signature(getattr(owner, method)).parameters.values()}

    theirs = defaults(owner)
    theirs = {"images" if name == "x" else name: default for name, default in theirs.items()}
    assert list(defaults(TimmClassifier).items()) == list(theirs.items())


@every_family
@pytest.mark.parametrize("indices, last", [([1], 1), ((0, -2), None), (1, None)], ids=str)
def test_a_pruned_model_has_the_same_maps(name, indices, last):
    whole = classifier(name)
    number = len(whole.backbone.stages)
    last = {(0, -2): number - 2, 1: number - 1}.get(indices) if last is None else last
    model = copy.deepcopy(whole)
    kept = model.prune_intermediate_layers(indices)
    assert kept == sorted(range(number)[i] for i in ([-1] if indices == 1 else indices)) and kept[-1] == last
    assert len(model.backbone.stages) == len(model.feature_info) == last + 1
    assert model.num_features == model.feature_info.channels()[-1] and model.num_classes == 0
    with torch.no_grad():
        wanted = whole.forward_intermediates(images(), intermediates_only=True)[: last + 1]
        for actual, expected in zip(model.forward_intermediates(images())[1], wanted, strict=True):
            assert torch.equal(actual, expected)
        tokens = model(images())
        assert model.global_pool == ""
        if last + 1 < number:
            assert torch.equal(tokens, wanted[-1].flatten(2).transpose(1, 2))
        else:
            assert torch.equal(tokens, whole.forward_features(images()))
        # A head of its own again
        model.reset_classifier(3, "token" if model.pool == "global_token" else "avg")
        assert model(images()).shape == (2, 3)
    state_dict = model.state_dict()
    assert {key for key in state_dict if not key.startswith("head.")} <= whole.state_dict().keys()
    assert model.no_weight_decay() <= dict(model.named_parameters()).keys()


def test_what_is_pruned_beside_stages():
    model = classifier(RELATIVE)
    logits = model(images())
    assert model.prune_intermediate_layers(4, prune_head=False) == [0, 1, 2, 3]
    assert torch.equal(model(images()), logits)
    model.prune_intermediate_layers([3], prune_norm=True, prune_head=False)
    assert isinstance(model.norm, nn.Identity) and model(images()).shape == (2, 4)
    for indices in ([4], 5, (), "1", 1.5):
        with pytest.raises(InputError, match="the model has the stages 0 to 3"):
            model.prune_intermediate_layers(indices)
    model.prune_intermediate_layers([1])
    with pytest.raises(InputError, match="the model has the stages 0 to 1"):
        model.forward_intermediates(images(), indices=[2])


@pytest.mark.parametrize("name", slow_except([SMALL, "lit_ti"], [SMALL]))
def test_a_pruned_model_is_trained_and_saved(name):
    model = classifier(name).train()
    model.prune_intermediate_layers([2])
    with pytest.raises(InputError, match="global_pool='token': this variant pools by 'avg'"):
        model.reset_classifier(5, "token")
    model.reset_classifier(5, "avg")
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    model(images()).mean().backward()
    optimizer.step()
    assert [n for n, parameter in model.named_parameters() if parameter.grad is None] == []
    other = classifier(name).train()
    other.prune_intermediate_layers([2])
    other.reset_classifier(5, "avg")
    other.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(images()), other.eval()(images()))


@every_family
def test_another_head(name):
    model = classifier(name).double().train()
    features = model.forward_head(model.forward_features(images().double()), pre_logits=True)
    before = model.head
    model.reset_classifier(4)
    assert model.head is not before and not torch.equal(model.head.weight, before.weight)
    assert model.head.training and model.head.weight.dtype == torch.float64
    model.reset_classifier(7, "")
    tokens = model.forward_features(images().double())
    assert model(images().double()).shape == (*tokens.shape[:2], 7)
    model.reset_classifier(0, "token" if name == "lit_ti" else "avg")
    torch.testing.assert_close(model(images().double()), features)
    for num_classes in (-1, 2.0, None):
        with pytest.raises(InputError, match="num_classes="):
            model.reset_classifier(num_classes)
    with pytest.raises(InputError, match="global_pool='max'"):
        model.reset_classifier(3, "max")
    assert model.num_classes == 0


@every_family
def test_a_model_is_saved_for_the_hub_and_made_again(name, tmp_path):
    model = classifier(name, num_classes=4)
    model.reset_classifier(6, "")
    if not name.startswith("linformer"):
        model.set_input_size((96, 64))
    size = get_model_input_config(model)["input_size"][1:]
    save_for_hf(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(images(*size)), model(images(*size)))


@pytest.mark.parametrize("name", slow_except(FAMILIES, [RELATIVE]))
def test_a_model_is_traced(name):
    """``torch.jit.script`` and ``torch.fx`` cannot: the models decide by sizes."""
    model = classifier(name)
    with torch.no_grad():
        traced = torch.jit.trace(model, images(), check_trace=False)
        torch.testing.assert_close(traced(images()), model(images()))


@pytest.mark.slow
@every_family
def test_a_model_is_compiled(name):
    model = classifier(name)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(images()), model(images()))
