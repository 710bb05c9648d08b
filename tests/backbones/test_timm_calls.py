"""What timm's own tests ask of a model, and what its users call, of one variant of each family.

After ``tests/test_models.py`` of timm 1.0.31: forward, backward, configs, features, intermediates, pruning, other heads
and other sizes. The models are those of ``timm.create_model``, of small images where nothing else is asked.
"""

import copy
import functools
import inspect

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.models import FeatureInfo, FeatureListNet, get_model_input_config, save_for_hf
from torch import Tensor, nn

from backbones import InputError, list_variants, timm_models
from backbones.timm_api import TimmClassifier
from tests.backbones.helpers import random_images, randomise
from tests.selection import slow_except

SMALL = "vil_tiny_1_1_3_1"
RELATIVE = "vil_tiny_1_1_3_1_rpb"
FAMILIES = [SMALL, RELATIVE, "performer_tiny", "linformer_tiny", "ls_tiny", "cvt_ls_13", "lit_ti", "lit_s"]
# The narrow ones, whose weights are drawn in no time
FAST = [SMALL, RELATIVE]
SIZE = (64, 96)
every_family = pytest.mark.parametrize("name", slow_except(FAMILIES, FAST))
every_flexible_family = pytest.mark.parametrize(
    "name", slow_except([name for name in FAMILIES if not name.startswith("linformer")], FAST)
)


@functools.cache
def _made(name: str, **options) -> nn.Module:
    return randomise(timm.create_model(name, **options)).eval()


def classifier(name: str, *, img_size: int | tuple[int, int] = SIZE, num_classes: int = 4, **options) -> nn.Module:
    """A model of one's own, with random weights that are the same in each; made once, since drawing takes its time."""
    return copy.deepcopy(_made(name, img_size=img_size, num_classes=num_classes, **options))


def images(*size: int, batch: int = 2) -> Tensor:
    return random_images(batch, 3, *(size or SIZE), dtype=torch.float32)


def assert_maps_are_as_told(maps: list[Tensor], info: FeatureInfo, size: tuple[int, int]) -> None:
    """As many as there are, of the channels and strides that timm's users read."""
    wanted = [(c, *(-(-side // r) for side in size)) for c, r in zip(info.channels(), info.reduction(), strict=True)]
    assert [tuple(m.shape[1:]) for m in maps] == wanted
    assert all(m.isfinite().all() for m in maps)


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
    "name, position_resizing, fixed",
    slow_except(
        [(SMALL, "map", False), (SMALL, "load", True), (RELATIVE, "load", False)]
        + [("lit_ti", "load", True), ("ls_tiny", "load", True), ("ls_tiny", "map", False)],
        FAST,
    ),
)
def test_a_fixed_size_follows_from_how_positions_are_resized(name, position_resizing, fixed):
    options = {"position_resizing": position_resizing, "num_classes": 2}
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
def test_images_are_prepared_as_the_config_says(name):
    config = resolve_model_data_config(classifier(name))
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8))
    image = create_transform(**config)(photo)
    assert tuple(image.shape) == config["input_size"] == (3, 224, 224)


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


@pytest.mark.parametrize("method", ["forward_intermediates", "prune_intermediate_layers", "reset_classifier"])
def test_signatures_are_those_of_timm(method):
    def defaults(owner: type) -> dict:
        return {p.name: p.default for p in inspect.signature(getattr(owner, method)).parameters.values()}

    theirs = defaults(timm.models.swin_transformer.SwinTransformer)
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
