"""The variants as timm models: the checks of timm's ``tests/test_models.py``, features, sizes, timm's scripts."""

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.models import group_parameters
from timm.models._hub import save_for_hf
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.testing import assert_close

from backbones import ConfigError, create_backbone, create_classifier, list_variants
from backbones.attention.efficient import PerformerAttention
from backbones.attention.sliding_chunk import SHIFTS, SlidingChunkAttention
from backbones.layers.position import fit_table
from research import timm_models
from tests.backbones.helpers import random_images, randomize
from tests.selection import slow_except

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "examples" / "timm_run.py"
SMALL, RELATIVE = "vil_tiny_1_1_3_1", "vil_tiny_1_1_3_1_rpb"
FAMILIES = [SMALL, RELATIVE, "performer_tiny", "linformer_tiny", "ls_tiny", "cvt_ls_13", "lit_ti", "lit_s"]
SIZE = (64, 96)


# A narrow model is created quickly.
families = pytest.mark.parametrize("name", slow_except(FAMILIES, [RELATIVE]))


def classifier(name: str, *, img_size: int | tuple[int, int] = SIZE, num_classes: int = 4, **options) -> nn.Module:
    """Return a new float64 model. Calls with the same arguments return the same random weights."""
    return randomize(timm.create_model(name, img_size=img_size, num_classes=num_classes, **options)).double().eval()


def meta_model(name: str, **options) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **options)


def images(*size: int) -> Tensor:
    return random_images(2, 3, *(size or SIZE))


def assert_shapes(features: list[Tensor], info, size: tuple[int, int]) -> None:
    """Check that the number of feature maps, their channels and their strides match ``feature_info``."""
    wanted = [(c, *(-(-side // r) for side in size)) for c, r in zip(info.channels(), info.reduction(), strict=True)]
    assert [tuple(m.shape[1:]) for m in features] == wanted and all(m.isfinite().all() for m in features)


def saved(model: nn.Module, folder: Path) -> dict:
    """Return options of ``timm.create_model`` that load the weights of ``model``."""
    torch.save({"state_dict": model.state_dict()}, folder / "trained.pth")
    return {"pretrained": True, "pretrained_cfg_overlay": {"file": str(folder / "trained.pth"), "num_classes": -1}}


def test_names_and_configs():
    assert sorted(timm.list_models(module="timm_models")) == list_variants()
    assert not set(timm.list_models(pretrained=True)) & set(list_variants())
    flexible = {n for n in list_variants() if n.endswith("_rpb") or n.startswith(("ls_", "cvt_", "lit"))}
    fixed = {name for name in list_variants() if timm_models.default_cfgs[name].default.fixed_input_size}
    assert fixed == set(list_variants()) - flexible
    for name, side in (("vil_small_rpb", 224), ("ls_medium_384", 384)):
        config = resolve_model_data_config(meta_model(name))
        assert config["input_size"] == (3, side, side) and config["interpolation"] == "bicubic"
        assert (config["mean"], config["std"]) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        # CROP_PCT of the official configurations, also for LS at 384
        assert config["crop_pct"] == 0.875


@families
def test_logits_equal_create_classifier(name):
    expected = randomize(create_classifier(name, num_classes=4, img_size=SIZE)).double().eval()
    model = timm.create_model(name, num_classes=4, img_size=SIZE).double().eval()
    model.load_state_dict(expected.state_dict())
    assert model.no_weight_decay() == expected.no_weight_decay()
    with torch.no_grad():
        assert_close(model(images()), expected(images()))
        tokens = model.forward_features(images())
        assert_close(model.head(model.forward_head(tokens, pre_logits=True)), model(images()))
    logits = model.train()(images())
    model.set_grad_checkpointing()
    assert_close(model(images()), logits)
    logits.mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@families
def test_the_config_describes_the_model(name):
    """Run at the input size of the pretrained config, on the meta device."""
    model, unpooled = meta_model(name).eval(), meta_model(name, num_classes=0, global_pool="").eval()
    config = model.default_cfg
    assert {f"{config[key]}.weight" for key in ("classifier", "first_conv")} <= model.state_dict().keys()
    assert model.num_classes == config["num_classes"] == 1000 and model.in_chans == config["input_size"][0]
    batch = torch.empty(1, *config["input_size"], device="meta")
    tokens = model.forward_features(batch)
    assert model.forward_head(tokens, pre_logits=True).shape == (1, model.num_features)
    (last,) = model.forward_intermediates(batch, indices=1, intermediates_only=True)
    assert tuple(last.shape[2:]) == config["pool_size"]
    model.reset_classifier(0, "")
    assert model.forward_head(tokens).shape == unpooled(batch).shape == tokens.shape
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8))
    assert create_transform(**resolve_model_data_config(model))(photo).shape == config["input_size"]


@families
@torch.no_grad()
def test_intermediates_and_heads(name, tmp_path):
    whole = classifier(name)
    tokens, features = whole.forward_intermediates(images())
    assert_shapes(features, whole.feature_info, SIZE)
    assert_close(tokens, whole.forward_features(images()))
    fed = images()
    for module, wanted in zip(whole.feature_info.module_name(), features, strict=True):
        fed = whole.get_submodule(module)(fed)[0].permute(0, 3, 1, 2)
        assert_close(wanted, fed)
    for indices, chosen in ((2, [-2, -1]), ((-1, 0), [0, -1]), ([1], [1])):
        some = whole.forward_intermediates(images(), indices=indices, intermediates_only=True, stop_early=True)
        assert_close(some, [features[index] for index in chosen])
    model = copy.deepcopy(whole).train()
    pooled = model.forward_head(model.forward_features(images()), pre_logits=True)
    model.reset_classifier(4)
    assert model.head.training and model.head.weight.dtype == torch.float64
    assert 0.01 < model.head.weight.std() < 0.03 and model.head.bias.eq(0).all()
    model.reset_classifier(0, "token" if name == "lit_ti" else "avg")
    assert_close(model(images()), pooled)
    assert model.num_classes == 0

    whole.reset_classifier(6, "")
    size = timm.models.get_model_input_config(whole)["input_size"][1:]
    save_for_hf(whole.float(), tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).double().eval()
    assert_close(again(images(*size)), whole.double()(images(*size)))
    assert again(images(*size)).shape == (*again.forward_features(images(*size)).shape[:2], 6)


@families
@torch.no_grad()
def test_features(name, tmp_path):
    whole = classifier(name)
    options = {"features_only": True, "img_size": SIZE, **saved(whole, tmp_path)}
    for config in (
        {"out_indices": (0, -2), "feature_cls": "getter"},
        {"feature_cfg": {"norm": True, "out_indices": 2}},
    ):
        norm = "feature_cfg" in config
        if norm:
            config["feature_cfg"]["feature_cls"] = "getter"
        model = timm.create_model(name, **config, **options).double().eval()
        indices = 2 if norm else (0, -2)
        assert_close(model(images()), whole.forward_intermediates(images(), indices, norm=norm)[1])
        assert_shapes(model(images()), model.feature_info, SIZE)
    if name == "linformer_tiny":
        return
    last = len(whole.backbone.stages) - 1
    some = timm.create_model(name, feature_cls="dict", out_indices=(-1, 0), features_only=True).double().eval()
    assert_shapes(list(some(images()).values()), some.feature_info, SIZE)
    assert list(some(images())) == ["0", str(last)]
    expected = randomize(create_backbone(name)).double().eval()
    model = timm.create_model(name, features_only=True).double().eval()
    model.backbone.load_state_dict(expected.state_dict())
    features = model(images(45, 70))
    assert isinstance(features, list) and not model.default_cfg["fixed_input_size"]
    assert_shapes(features, model.feature_info, (45, 70))
    assert_close(features, list(expected(images(45, 70)).values()))
    assert model.no_weight_decay() == {f"backbone.{key}" for key in expected.no_weight_decay()}


WRONG = {"in_chans": 1}, {"global_pool": "max"}, {"random_shift_iterations": 9, "attention": "dense"}


@pytest.mark.parametrize("options", [*WRONG, {"img_size": 224, "features_only": True}], ids=str)
def test_wrong_options(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        meta_model("vil_tiny", **options)


@pytest.mark.parametrize(
    "name, options, is_fixed",
    slow_except(
        [
            (SMALL, {}, True),
            (SMALL, {"position_interpolation": "per_feature_map"}, False),
            ("lit_ti", {"position_interpolation": "once"}, True),
        ],
        [SMALL],
    ),
)
def test_fixed_input_size_means_larger_images_raise(name, options, is_fixed):
    model = meta_model(name, img_size=32, **options)
    assert model.default_cfg["fixed_input_size"] == is_fixed
    larger = torch.empty(1, 3, 64, 64, device="meta")
    if is_fixed:
        with pytest.raises(ConfigError, match="img_size"):
            model(larger)
    else:
        model(larger)


@pytest.mark.parametrize(
    "name, options", [pytest.param(SMALL, {}, marks=pytest.mark.slow), (RELATIVE, {"chunk_size": (8, 12, 5, 7)})]
)
def test_a_checkpoint_of_another_size_head_and_window(name, options, tmp_path):
    trained = classifier(name, num_classes=3, img_size=64)
    pretrained = saved(trained, tmp_path)
    model = timm.create_model(name, num_classes=5, img_size=(128, 64), **pretrained, **options)
    features = timm.create_model(name, features_only=True, max_img_size=64, **pretrained)
    assert torch.equal(model.norm.weight, trained.norm.weight.float()) and model.head.out_features == 5
    assert all(torch.equal(tensor, trained.state_dict()[key].float()) for key, tensor in features.state_dict().items())
    for key, table in trained.backbone.state_dict().items():
        resized = dict(model.backbone.named_modules())[key.rpartition(".")[0]]
        assert_close(model.backbone.state_dict()[key], fit_table(table, resized, key.rpartition(".")[2]).float())
    with pytest.raises(ConfigError, match="another model"):
        timm.create_model(SMALL if name == RELATIVE else RELATIVE, **pretrained)


def test_dropout_and_layer_groups():
    model = timm.create_model(RELATIVE, num_classes=3, drop_rate=0.5, drop_path_rate=0.2).train()
    assert model.backbone.stages[3].blocks[-1].drop_path_rate == pytest.approx(0.2)
    ones = torch.ones(1, 1, model.num_features)
    assert 0.3 < (model.forward_head(ones, pre_logits=True) == 0).float().mean() < 0.7
    assert model.eval().forward_head(ones, pre_logits=True).eq(1).all()
    layers = group_parameters(model, model.group_matcher(), reverse=True)
    assert layers.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("options", [{}, {"layer_decay": 0.5}])
def test_litadamw_trains_offsets_at_a_hundredth(options):
    model = meta_model("lit_ti")

    def settings(optimizer: str) -> dict:
        optimizer = create_optimizer_v2(model, optimizer, lr=1e-3, weight_decay=0.05, **options)
        CosineLRScheduler(optimizer, t_initial=300, lr_min=1e-5).step(150)
        groups = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
        return {name: groups[id(parameter)] for name, parameter in model.named_parameters()}

    expected = settings("adamw")
    assert sum(".offset." in name for name in expected) == 6
    for name, (lr, decay) in settings("litadamw").items():
        factor = 0.01 if ".offset." in name else 1
        assert (lr, decay) == (pytest.approx(expected[name][0] * factor), expected[name][1]), name


@pytest.mark.slow
def test_a_performer_redraws_its_features():
    """ViL appendix D: every 1 + 5T iterations of epoch T. A resumed run continues this count."""
    torch.manual_seed(0)
    options = {"num_classes": 2, "redraw_epoch_length": 8}
    redrawn = []
    for first_epoch in (0, 1):
        model = timm.create_model("performer_tiny", redraw_first_epoch=first_epoch, **options)
        performers = [m for m in model.modules() if isinstance(m, PerformerAttention)]
        redrawn.append([])
        for iteration in range(22):
            before = [performer.features.clone() for performer in performers]
            model.eval()(images(32, 40).float())
            model.train()(images(32, 40).float())
            changed = {not torch.equal(b, p.features) for b, p in zip(before, performers, strict=True)}
            redrawn[-1] += [iteration] if changed == {True} else []
    # Every iteration in epoch 0, every 6th from iteration 8 on, every 11th from 16 on, every 16th from 24 on
    assert redrawn == [[1, 2, 3, 4, 5, 6, 7, 13], [6]]
    assert model.state_dict().keys() == create_classifier("performer_tiny").state_dict().keys()


def test_shifts_are_sampled_in_the_first_iterations():
    def shifts(**options):
        model = timm.create_model(SMALL, num_classes=2, random_shift_iterations=3, **options)
        for _ in range(4):
            model.train()(torch.randn(1, 3, 64, 64))
            yield [module.shift for module in model.modules() if isinstance(module, SlidingChunkAttention)]
            model.eval()(torch.randn(1, 3, 64, 64))

    first, second = list(shifts()), list(shifts(random_shift_first_iteration=2))
    assert set(sum(first[:3], [])) <= set(SHIFTS) and len(set(map(tuple, first[:3]))) == 3
    assert first[2] == second[0] and first[3] == second[1] == [None] * 6


@pytest.mark.slow
def test_tool_runs_a_timm_script_with_the_models(tmp_path):
    (tmp_path / "helper.py").write_text("value = 5\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, timm, helper\nprint(__name__, sys.argv, helper.value, timm.is_model('lit_ti'))\n")
    command = [sys.executable, TOOL, script, "--model", "lit_ti", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"__main__ {[str(script), '--model', 'lit_ti', '--help']} 5 True\n"
