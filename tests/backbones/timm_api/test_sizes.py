"""Images of other sizes: which models take them, and ``set_input_size``."""

import copy

import pytest
import timm
import torch
from timm.models import get_model_input_config

from backbones import InputError, list_variants, timm_models
from tests.backbones.timm_api.models import (
    FAST,
    RELATIVE,
    SIZE,
    SMALL,
    classifier,
    every_family,
    every_flexible_family,
    images,
)
from tests.selection import slow_except


@every_family
def test_a_fixed_size_is_one_that_a_larger_image_does_not_fit(name):
    model = classifier(name)
    assert get_model_input_config(model)["fixed_input_size"] == model.default_cfg["fixed_input_size"]
    if model.default_cfg["fixed_input_size"]:
        with pytest.raises(InputError, match="img_size"):
            model(images(96, 128))
    else:
        assert model(images(96, 128)).shape == (2, 4)


def test_the_sizes_of_all_variants_are_fixed_where_positions_are_absolute():
    flexible = {n for n in list_variants() if n.endswith("_rpb") or n.startswith(("ls_", "cvt_", "lit_"))}
    fixed = {name for name in list_variants() if timm_models.default_cfgs[name].default.fixed_input_size}
    assert fixed == set(list_variants()) - flexible


@pytest.mark.parametrize(
    "name, position_resizing, others, fixed",
    slow_except(
        [(SMALL, "map", {}, False), (SMALL, "load", {}, True), (RELATIVE, "load", {}, False)]
        + [(RELATIVE, "load", {"attention": "dense"}, True), (RELATIVE, "map", {"attention": "dense"}, False)]
        + [("lit_ti", "load", {}, True), ("ls_tiny", "load", {}, True), ("ls_tiny", "map", {}, False)],
        FAST,
    ),
)
def test_a_fixed_size_follows_from_how_positions_are_resized(name, position_resizing, others, fixed):
    options = {"position_resizing": position_resizing, "num_classes": 2, **others}
    model = timm.create_model(name, img_size=32, **options).eval()
    assert model.default_cfg["fixed_input_size"] == fixed
    if fixed:
        with pytest.raises(InputError, match="does not fit the position table"):
            model(images(64, 64))
    else:
        model(images(64, 64))


def test_the_size_of_a_config_is_that_of_a_fixed_model():
    overlay = {"input_size": (3, 64, 96)}
    model = timm.create_model(SMALL, pretrained_cfg_overlay=overlay)
    positions = model.backbone.stages[0].positions
    assert (len(positions.rows), len(positions.cols)) == (16, 24)
    features = timm.create_model(SMALL, features_only=True, pretrained_cfg_overlay=overlay)
    assert not features.default_cfg["fixed_input_size"] and features.backbone.settings.max_img_size == (1333, 1333)


@every_family
def test_the_same_size_changes_nothing(name):
    model = classifier(name)
    logits, state_dict = model(images()), copy.deepcopy(model.state_dict())
    model.set_input_size(SIZE)
    model.set_input_size()
    model.set_input_size(patch_size=4)
    assert torch.equal(model(images()), logits)
    assert all(torch.equal(tensor, state_dict[key]) for key, tensor in model.state_dict().items())


@every_flexible_family
def test_another_size_is_as_a_model_of_it_that_loads_the_weights(name, tmp_path):
    model = classifier(name, img_size=64)
    torch.save(model.state_dict(), tmp_path / "trained.pth")
    overlay = {"file": str(tmp_path / "trained.pth"), "num_classes": 4}
    wanted = timm.create_model(name, num_classes=4, img_size=SIZE, pretrained=True, pretrained_cfg_overlay=overlay)
    before, random_state = [id(parameter) for parameter in model.parameters()], torch.get_rng_state()
    with torch.no_grad():
        unchanged = None if model.default_cfg["fixed_input_size"] else model(images())
        model.set_input_size(SIZE)
        assert [id(parameter) for parameter in model.parameters()] == before
        assert torch.equal(torch.get_rng_state(), random_state)
        state_dict = wanted.state_dict()
        assert model.state_dict().keys() == state_dict.keys()
        assert all(torch.equal(tensor, state_dict[key]) for key, tensor in model.state_dict().items())
        logits = model(images())
        assert torch.equal(wanted.eval()(images()), logits)
        if unchanged is not None:
            # Those tables are resized to each map anyway.
            torch.testing.assert_close(unchanged, logits)
    assert get_model_input_config(model)["input_size"] == (3, *SIZE)


@pytest.mark.parametrize("name", slow_except(["ls_tiny", "lit_s", "lit_ti", SMALL, RELATIVE], FAST))
def test_a_size_that_is_no_square_is_known(name):
    """A relative bias for 2 x 14 tokens has as many offsets as one for 14 x 2."""
    options = {"attention": "dense"} if name == RELATIVE else {}
    model = classifier(name, **options)
    turned = copy.deepcopy(model)
    turned.set_input_size(SIZE[::-1])
    with torch.no_grad():
        logits = turned(images(*SIZE[::-1]))
        if not model.default_cfg["fixed_input_size"]:
            torch.testing.assert_close(logits, model(images(*SIZE[::-1])))
        fresh = timm.create_model(name, num_classes=4, img_size=SIZE[::-1], **options).eval()
        fresh.load_state_dict(turned.state_dict())
        assert torch.equal(fresh(images(*SIZE[::-1])), logits)


def test_a_resized_model_goes_on_training():
    model = classifier(SMALL, img_size=64).train()
    model.backbone.stages[0].positions.rows.requires_grad_(False)
    model(images(64, 64)).mean().backward()
    optimizer = timm.optim.create_optimizer_v2(model, "sgd", lr=0.1)
    model.set_input_size((128, 64))
    assert model.backbone.stages[1].positions.rows.grad is None and model.norm.weight.grad is not None
    assert not model.backbone.stages[0].positions.rows.requires_grad
    optimizer.zero_grad()
    model(images(128, 64)).mean().backward()
    before = model.backbone.stages[1].positions.rows.detach().clone()
    optimizer.step()
    assert not torch.equal(model.backbone.stages[1].positions.rows, before)


def test_a_pruned_model_takes_another_size():
    model, whole = (classifier(RELATIVE, attention="dense") for _ in range(2))
    model.prune_intermediate_layers([2])
    for resized in (model, whole):
        resized.set_input_size((96, 128))
    maps = whole.forward_intermediates(images(96, 128), indices=[2], intermediates_only=True)
    assert torch.equal(model.forward_intermediates(images(96, 128), [2], intermediates_only=True)[0], maps[0])


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("linformer_tiny", {"img_size": 224}, "project_length is .* belongs to one image size: create the model"),
        (SMALL, {"img_size": 0}, "img_size=0: it is a side"),
        (SMALL, {"img_size": (64, 64, 3)}, r"img_size=\(64, 64, 3\): it is a side"),
        (SMALL, {"img_size": "large"}, "img_size='large': it is a side"),
        (SMALL, {"img_size": 64.0}, "img_size=64.0: it is a side"),
        (SMALL, {"patch_size": 8}, "patch_size=8: the patches of this model are of 4, and stay so"),
    ],
    ids=str,
)
def test_a_size_that_cannot_be_leaves_the_model_as_it_was(name, options, message):
    model = classifier(name)
    logits = model(images())
    with pytest.raises(InputError, match=message) as caught:
        model.set_input_size(**options)
    assert "\n" not in str(caught.value)
    assert torch.equal(model(images()), logits) and get_model_input_config(model)["input_size"] == (3, *SIZE)
