"""The variants in timm: registered once, equal to this project's own models, and trained by timm's own scripts.

The scripts are not in timm's package. With a folder that holds its train.py and validate.py:
``TIMM_SCRIPTS=FOLDER python -m pytest tests/backbones/test_timm_models.py -m slow -s``
"""

import csv
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageDraw
from timm.data import resolve_data_config
from timm.models import group_parameters
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

from backbones import InputError, create_backbone, create_classifier, list_variants, timm_models
from backbones.attention.alternatives.performer import PerformerAttention
from backbones.attention.kernels.random_shift import SHIFTS
from backbones.attention.sliding_chunk import SlidingChunkAttention
from tests.backbones.helpers import random_images, randomise
from tests.selection import slow_except

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "timm_run.py"
DEMO = "vil_tiny_1_1_3_1_rpb"
# One of each family, pooling and kind of position
MODELS = [DEMO, "vil_tiny_1_1_3_1", "ls_tiny", "cvt_ls_13", "lit_ti"]
# Depths alone tell the others apart.
NAMES = slow_except(list_variants(), [n for n in list_variants() if n.endswith(("_tiny", "_tiny_rpb", "_ti", "_13"))])
CLASSES = ("circle", "square", "triangle")


def meta_model(name: str, **options):
    with torch.device("meta"):
        return timm.create_model(name, **options)


def shapes(model: torch.nn.Module) -> dict:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_every_name_is_registered_once():
    assert sorted(timm.list_models(module="timm_models")) == list_variants()
    assert all(timm.models.model_entrypoint(name).__module__ == "backbones.timm_models" for name in list_variants())
    assert not set(timm.list_models(pretrained=True)) & set(list_variants())
    assert all(callable(getattr(timm_models, name)) for name in timm_models.__all__)


def test_a_name_of_timm_is_not_taken(monkeypatch):
    resnet = timm.models.model_entrypoint("resnet18")
    monkeypatch.setattr(timm_models, "list_variants", lambda: ["another", "resnet18"])
    with pytest.raises(InputError, match="timm already has a model resnet18, of timm.models.resnet"):
        timm_models._register()
    assert timm.models.model_entrypoint("resnet18") is resnet and not timm.is_model("another")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_creates_the_classifier(name):
    model = meta_model(name, num_classes=5)
    with torch.device("meta"):
        expected = create_classifier(name, num_classes=5, img_size=384 if name.endswith("_384") else 224)
    assert shapes(model) == shapes(expected)
    assert model.no_weight_decay() == expected.no_weight_decay()
    assert model.num_classes == 5 and model.get_classifier().out_features == 5
    assert model.get_submodule(model.default_cfg["first_conv"]).in_channels == 3
    assert model.get_submodule(model.default_cfg["classifier"]) is model.head


@pytest.mark.parametrize("name", slow_except(MODELS, MODELS[:2]))
def test_logits_are_those_of_create_classifier(name):
    expected = randomise(create_classifier(name, num_classes=4, img_size=(64, 96))).eval()
    model = timm.create_model(name, num_classes=4, img_size=(64, 96)).eval()
    model.load_state_dict(expected.state_dict())
    images = random_images(2, 3, 64, 96, dtype=torch.float32)
    torch.testing.assert_close(model(images), expected(images), atol=1e-5, rtol=1e-5)
    tokens = model.forward_features(images)
    assert tokens.ndim == 3 and tokens.shape[2] == model.num_features
    torch.testing.assert_close(model.forward_head(tokens), model(images))
    torch.testing.assert_close(model.head(model.forward_head(tokens, pre_logits=True)), model(images))


@pytest.mark.parametrize("name", slow_except(MODELS, MODELS[:2]))
def test_features_are_the_maps_of_create_backbone(name):
    expected = randomise(create_backbone(name)).eval()
    model = timm.create_model(name, features_only=True).eval()
    model.backbone.load_state_dict(expected.state_dict())
    images = random_images(1, 3, 45, 70, dtype=torch.float32)
    maps = model(images)
    assert isinstance(maps, list)
    for actual, wanted in zip(maps, expected(images).values(), strict=True):
        torch.testing.assert_close(actual, wanted, atol=0, rtol=0)
    info = expected.feature_info.values()
    assert model.feature_info.channels() == [i.channels for i in info] == [m.shape[1] for m in maps]
    assert model.feature_info.reduction() == [i.stride for i in info]
    assert model.no_weight_decay() == {f"backbone.{name}" for name in expected.no_weight_decay()}


@pytest.mark.parametrize(
    "out_indices, stages",
    [
        ((1, 3), (1, 3)),
        (tuple(np.arange(1, 4, 2)), (1, 3)),
        (np.int64(2), (2, 3)),
        ((-1, 0), (0, 3)),
        (2, (2, 3)),
        ([2], (2,)),
        (None, (0, 1, 2, 3)),
    ],
    ids=str,
)
def test_out_indices_are_those_of_timm(out_indices, stages):
    model = meta_model("vil_small_rpb", features_only=True, out_indices=out_indices)
    widths, strides = (96, 192, 384, 768), (4, 8, 16, 32)
    assert model.feature_info.channels() == [widths[stage] for stage in stages]
    assert model.feature_info.reduction() == [strides[stage] for stage in stages]
    assert [m.shape[1] for m in model(torch.empty(1, 3, 64, 96, device="meta"))] == model.feature_info.channels()
    assert len(model.backbone.stages) == max(stages) + 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"in_chans": 1}, "in_chans=1: vil_tiny takes images of 3 channels"),
        ({"in_chans": 1, "features_only": True}, "in_chans=1: vil_tiny takes images of 3 channels"),
        ({"pretrained": True}, "no weights of vil_tiny are hosted; docs/checkpoints.md"),
        ({"pretrained": True, "features_only": True}, "no weights of vil_tiny are hosted"),
        ({"global_pool": "max"}, "global_pool='max': this variant pools by 'avg'"),
        ({"scriptable": True}, "scriptable=True: the models decide by sizes; torch.jit.trace, torch.compile and"),
        ({"drop_rate": 1.5}, "drop_rate=1.5: it is at least 0 and below 1"),
        ({"drop_rate": True}, "drop_rate=True: it is at least 0 and below 1"),
        ({"features_only": True, "out_indices": (True, 2)}, r"out_indices=\(True, 2\): vil_tiny has the stages 0 to 3"),
        ({"bn_momentum": 0.1}, "no keyword 'bn_momentum'"),
        ({"drop_block_rate": 0.1}, "no keyword 'drop_block_rate'; did you mean 'drop_path_rate'"),
        ({"window_sise": 7}, "no keyword 'window_sise'; did you mean 'window_size'"),
        ({"redraw_epoch_length": 9}, "redraw_epoch_length: vil_tiny has no random features"),
        ({"random_shift_iterations": -1}, "random_shift_iterations=-1"),
        ({"random_shift_first_iteration": 3}, "random_shift_iterations=0, random_shift_first_iteration=3: 1 or more"),
        (
            {"random_shift_iterations": 9, "attention": "dense"},
            "random_shift_iterations: vil_tiny has no sliding chunks",
        ),
        ({"features_only": True, "img_size": 224}, "no keyword 'img_size'; did you mean 'max_img_size'"),
        ({"features_only": True, "out_features": ["stage2"]}, "takes out_indices"),
        ({"features_only": True, "out_indices": (1, 4)}, r"out_indices=\(1, 4\): vil_tiny has the stages 0 to 3"),
        ({"features_only": True, "out_indices": ()}, r"out_indices=\(\): vil_tiny has the stages 0 to 3"),
        ({"features_only": True, "out_indices": 0}, "out_indices=0: vil_tiny has the stages 0 to 3"),
        ({"features_only": True, "out_indices": 5}, "out_indices=5: vil_tiny has the stages 0 to 3"),
    ],
    ids=str,
)
def test_what_the_models_do_not_have_is_one_line(options, message):
    with pytest.raises(InputError, match=message) as caught:
        meta_model("vil_tiny", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["linformer_tiny", "partial_linformer_small"])
def test_linformer_is_a_classifier_only(name):
    with pytest.raises(InputError, match=f"{name} cannot be a backbone"):
        timm.create_model(name, features_only=True)
    assert resolve_data_config({}, model=meta_model(name))["input_size"] == (3, 224, 224)


def test_the_head_is_replaced():
    model = timm.create_model(DEMO, num_classes=0)
    images = random_images(2, 3, 45, 70, dtype=torch.float32)
    assert isinstance(model.get_classifier(), torch.nn.Identity) and model(images).shape == (2, model.num_features)
    model.reset_classifier(6)
    assert model.num_classes == 6 and model(images).shape == (2, 6)
    assert 0.01 < model.head.weight.std() < 0.03 and model.head.bias.eq(0).all()
    head = model.get_classifier()
    model.reset_classifier(6, "avg")
    assert model.get_classifier() is not head and not torch.equal(model.get_classifier().weight, head.weight)
    with pytest.raises(InputError, match="pools by 'token'"):
        meta_model("lit_ti").reset_classifier(3, global_pool="avg")


def test_options_and_dropout_reach_the_model():
    model = timm.create_model(DEMO, num_classes=3, drop_rate=0.5, drop_path_rate=0.2, window_size=4).train()
    assert model.backbone.stages[3].blocks[-1].drop_path_rate == pytest.approx(0.2)
    assert model.backbone.stages[0].blocks[0].attention.window_size == 4
    ones = torch.ones(1, 1, model.num_features)
    assert 0.3 < (model.forward_head(ones, pre_logits=True) == 0).float().mean() < 0.7
    assert model.eval().forward_head(ones, pre_logits=True).eq(1).all()


@pytest.mark.parametrize("features_only", [False, True])
def test_checkpointing_is_switched(features_only):
    model = meta_model(DEMO, features_only=features_only)
    for enable in (True, False):
        model.set_grad_checkpointing(enable)
        assert {stage.activation_checkpointing for stage in model.backbone.stages} == {enable}


@pytest.mark.parametrize("name, side", [("vil_small_rpb", 224), ("ls_medium_384", 384)])
def test_images_are_prepared_as_for_imagenet(name, side):
    config = resolve_data_config({}, model=meta_model(name))
    assert config["input_size"] == (3, side, side) and config["interpolation"] == "bicubic"
    assert (config["mean"], config["std"]) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    # CROP_PCT of the official configurations, also for LS at 384
    assert config["crop_pct"] == 0.875


@pytest.mark.parametrize("name", slow_except(MODELS, MODELS[:2]))
def test_intermediates_are_in_timms_form(name):
    model = randomise(timm.create_model(name, num_classes=4, img_size=(64, 96))).eval()
    images = random_images(2, 3, 64, 96, dtype=torch.float32)
    last = len(model.backbone.stages) - 1
    tokens, maps = model.forward_intermediates(images)
    assert torch.equal(tokens, model.forward_features(images)) and len(maps) == last + 1
    features = timm.create_model(name, features_only=True, max_img_size=(64, 96)).eval()
    assert [m.shape[1] for m in maps] == features.feature_info.channels()
    assert [-(-64 // m.shape[2]) for m in maps] == features.feature_info.reduction()
    fed = images
    for stage, wanted in zip(model.backbone.stages, maps, strict=True):
        fed = stage(fed)[0].permute(0, 3, 1, 2)
        torch.testing.assert_close(wanted, fed, atol=0, rtol=0)
    for indices, expected in ((2, [last - 1, last]), ((-1, 0), [0, last]), ([1], [1])):
        some = model.forward_intermediates(images, indices=indices, intermediates_only=True, stop_early=True)
        assert all(torch.equal(maps[index], m) for index, m in zip(expected, some, strict=True))
    early, (second,) = model.forward_intermediates(images, indices=[1], stop_early=True)
    torch.testing.assert_close(early[:, -1], second[:, :, -1, -1], atol=0, rtol=0)
    normed = model.forward_intermediates(images, indices=1, norm=True, intermediates_only=True)[0]
    torch.testing.assert_close(normed[:, :, -1, -1], tokens[:, -1])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"indices": [4]}, r"indices=\[4\]: the model has the stages 0 to 3"),
        ({"indices": 0}, "indices=0: the model has the stages 0 to 3"),
        ({"output_fmt": "NLC"}, "output_fmt='NLC': maps are 'NCHW'"),
    ],
    ids=str,
)
def test_intermediates_that_there_are_not(options, message):
    with pytest.raises(InputError, match=message):
        meta_model(DEMO).forward_intermediates(torch.empty(1, 3, 32, 32, device="meta"), **options)


def test_windows_of_12_are_full_attention_at_384_pixels():
    """The windows of the recipe in docs/checkpoints.md, (8, 12, 12, 12): stage 3 has 24 x 24 tokens there."""
    with torch.device("meta"):
        recipe = timm.create_model("vil_medium_deep", img_size=384, window_size=(8, 12, 12, 12))
    assert shapes(recipe) == shapes(meta_model("vil_medium_deep", img_size=384))
    assert [s.blocks[0].attention.window_size for s in recipe.backbone.stages] == [8, 12, 12, 12]
    tokens, global_tokens = random_images(1, 24, 24, 16, dtype=torch.float32), torch.zeros(1, 1, 16)
    # 24: one chunk, of all tokens
    whole = randomise(SlidingChunkAttention(16, num_heads=2, window_size=24)).eval()
    for window_size in (12, 7):
        chunks = SlidingChunkAttention(16, num_heads=2, window_size=window_size).eval()
        chunks.load_state_dict(whole.state_dict())
        same = torch.allclose(chunks(tokens, global_tokens)[0], whole(tokens, global_tokens)[0], atol=1e-5)
        assert same == (window_size == 12)


def test_layers_are_grouped_from_the_images_to_the_head():
    model = meta_model("vil_tiny")
    layers = group_parameters(model, model.group_matcher(), reverse=True)
    assert layers.keys() == shapes(model).keys()
    order = ["stages.0.patch_embed.projection.weight", "stages.0.blocks.0.mlp.expand.weight"]
    order += ["stages.1.patch_embed.projection.weight", "stages.1.blocks.0.mlp.expand.weight"]
    order += [f"stages.2.blocks.{block}.mlp.expand.weight" for block in range(9)]
    depths = [layers[f"backbone.{name}"] for name in order] + [layers["norm.weight"]]
    assert depths == sorted(set(depths)) and layers["backbone.stages.0.global_tokens"] == 0
    assert layers["head.weight"] == max(layers.values()) == layers["norm.weight"] + 1
    coarse = group_parameters(model, model.group_matcher(coarse=True), reverse=True)
    assert coarse[f"backbone.{order[4]}"] == coarse[f"backbone.{order[-1]}"]


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_litadamw_trains_offsets_at_a_hundredth(layer_decay):
    model = meta_model("lit_ti")
    options = {} if layer_decay is None else {"layer_decay": layer_decay}
    optimizer = create_optimizer_v2(model, "litadamw", lr=1e-3, weight_decay=0.05, **options)
    CosineLRScheduler(optimizer, t_initial=300, lr_min=1e-5).step(150)

    def settings(optimizer, model):
        groups = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
        return {name: groups[id(parameter)] for name, parameter in model.named_parameters()}

    expected = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, **options)
    CosineLRScheduler(expected, t_initial=300, lr_min=1e-5).step(150)
    expected = settings(expected, model)
    offsets = {name for name in expected if ".offset." in name}
    assert len(offsets) == 6
    for name, (lr, decay) in settings(optimizer, model).items():
        factor = 0.01 if name in offsets else 1
        assert (lr, decay) == (pytest.approx(expected[name][0] * factor), expected[name][1]), name


@pytest.mark.parametrize("name", ["vil_tiny", "cvt_ls_13"])
def test_litadamw_is_for_models_with_offsets(name):
    with pytest.raises(InputError, match="litadamw is for models with deformable token merging"):
        create_optimizer_v2(meta_model(name), "litadamw", lr=1e-3, weight_decay=0.05)


@pytest.mark.slow
def test_a_performer_redraws_as_the_paper():
    torch.manual_seed(0)
    models = [timm.create_model("performer_tiny", num_classes=2, redraw_epoch_length=8) for _ in range(2)]
    redrawn = [[], []]
    images = random_images(1, 3, 32, 40, dtype=torch.float32)
    for model, iterations in zip(models, redrawn, strict=True):
        performers = [m for m in model.modules() if isinstance(m, PerformerAttention)]
        for iteration in range(22):
            before = [performer.features.clone() for performer in performers]
            model.eval()(images)
            model.train()(images)
            changed = [not torch.equal(b, p.features) for b, p in zip(before, performers, strict=True)]
            assert len(set(changed)) == 1
            if changed[0]:
                iterations.append(iteration)
    # Epoch 0 every iteration, from iteration 8 on every 6, from 16 on every 11
    assert redrawn[0] == redrawn[1] == [1, 2, 3, 4, 5, 6, 7, 13]
    for first, second in zip(models[0].buffers(), models[1].buffers(), strict=True):
        assert torch.equal(first, second)
    assert models[0].state_dict().keys() == create_classifier("performer_tiny").state_dict().keys()


def test_a_resumed_performer_goes_on_at_its_epoch():
    model = meta_model("performer_tiny", redraw_epoch_length=10, redraw_first_epoch=3)
    (hook,) = model._forward_pre_hooks.values()
    assert hook.iteration == 30
    for options in ({"redraw_epoch_length": 0}, {"redraw_epoch_length": 5, "redraw_first_epoch": -1}):
        with pytest.raises(InputError, match="redraw_epoch_length="):
            meta_model("performer_tiny", **options)


def test_shifts_are_drawn_for_the_first_iterations_of_training():
    def shifts(**options):
        model = timm.create_model("vil_tiny_1_1_3_1", num_classes=2, random_shift_iterations=3, **options)
        for _ in range(4):
            model.train()(torch.randn(1, 3, 64, 64))
            yield [module.shift for module in model.modules() if isinstance(module, SlidingChunkAttention)]
            model.eval()(torch.randn(1, 3, 64, 64))

    first, second = list(shifts()), list(shifts(random_shift_first_iteration=2))
    assert set(sum(first[:3], [])) <= set(SHIFTS) and len(set(map(tuple, first[:3]))) == 3
    assert first[2] == second[0] and first[3] == second[1] == [None] * 6


def test_a_checkpoint_of_another_size_and_head_is_adapted(tmp_path):
    trained = randomise(timm.create_model("vil_tiny_1_1_3_1", num_classes=3, img_size=64))
    torch.save(trained.state_dict(), tmp_path / "trained.pth")
    overlay = {"file": str(tmp_path / "trained.pth"), "num_classes": -1}
    options = {"pretrained": True, "pretrained_cfg_overlay": overlay}
    model = timm.create_model("vil_tiny_1_1_3_1", num_classes=3, img_size=(128, 64), **options)
    rows = trained.backbone.stages[0].positions.rows
    wanted = torch.nn.functional.interpolate(rows.T[None], size=32, mode="linear")[0].T
    torch.testing.assert_close(model.backbone.stages[0].positions.rows, wanted)
    torch.testing.assert_close(model.backbone.stages[0].positions.cols, trained.backbone.stages[0].positions.cols)
    assert torch.equal(model.norm.weight, trained.norm.weight)
    assert not torch.equal(model.head.weight, trained.head.weight)
    features = timm.create_model("vil_tiny_1_1_3_1", features_only=True, max_img_size=64, **options)
    for name, tensor in features.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name]), name
    with pytest.raises(InputError, match="the checkpoint is of another model: .* among them"):
        timm.create_model("vil_tiny_1_1_3_1_rpb", **options)


@pytest.mark.parametrize("features_only", [False, True])
def test_a_checkpoint_of_other_windows_is_adapted(features_only, tmp_path):
    trained = randomise(timm.create_model(DEMO, num_classes=3, img_size=64))
    torch.save(trained.state_dict(), tmp_path / "trained.pth")
    options = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path / "trained.pth"), "num_classes": -1}}
    options |= {"features_only": True} if features_only else {"num_classes": 3}
    model = timm.create_model(DEMO, window_size=(8, 12, 5, 7), **options)
    tables = {key: tensor for key, tensor in model.state_dict().items() if key.endswith("relative_bias.table")}
    assert len(tables) == 6
    for key, tensor in tables.items():
        side = {"0": 31, "1": 47, "2": 19, "3": 27}[key.split(".")[2]]
        wanted = trained.state_dict()[key].T.view(1, -1, 27, 27)
        wanted = torch.nn.functional.interpolate(wanted, size=(side, side), mode="bilinear").flatten(2)[0].T
        torch.testing.assert_close(tensor, wanted, msg=key)


@pytest.mark.parametrize("name", slow_except([*MODELS[1:], "lit_s"], MODELS[1:2]))
def test_a_trained_classifier_becomes_a_backbone(name, tmp_path):
    trained = randomise(timm.create_model(name, num_classes=3, img_size=128))
    torch.save({"state_dict": trained.state_dict()}, tmp_path / "trained.pth")
    overlay = {"file": str(tmp_path / "trained.pth")}
    model = timm.create_model(name, features_only=True, pretrained=True, pretrained_cfg_overlay=overlay)
    fresh = create_backbone(name).state_dict()
    for key, tensor in model.backbone.state_dict().items():
        if key.startswith("output_norms."):
            wanted = fresh[key]
        else:
            wanted = trained.backbone.state_dict()[key]
        if tensor.shape == wanted.shape:
            assert torch.equal(tensor, wanted), key
            continue
        assert ".positions." in key or key.endswith("relative_bias.table"), key
        if key.endswith("relative_bias.table"):
            # By torch alone: a square of offsets becomes a larger one
            old, new = (round(math.sqrt(len(table))) for table in (wanted, tensor))
            mode = "bicubic" if name == "lit_s" else "bilinear"
            wanted = wanted.T.view(1, -1, old, old)
            wanted = torch.nn.functional.interpolate(wanted, size=(new, new), mode=mode).flatten(2)[0].T
        elif wanted.ndim == 3:
            wanted, size = wanted.movedim(-1, 0)[None], tensor.shape[:2]
            wanted = torch.nn.functional.interpolate(wanted, size=size, mode="bilinear")[0].movedim(0, -1)
        else:
            wanted = torch.nn.functional.interpolate(wanted.T[None], size=len(tensor), mode="linear")[0].T
        torch.testing.assert_close(tensor, wanted, msg=key)


def run_tool_in_process(monkeypatch, *arguments: str) -> None:
    spec = importlib.util.spec_from_file_location("timm_run", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [str(TOOL), *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    module.main()


def test_the_tool_runs_a_script_that_knows_the_models(tmp_path, monkeypatch, capsys):
    (tmp_path / "beside.py").write_text("value = 5\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, timm, beside\nprint(__name__, sys.argv, beside.value, timm.is_model('lit_ti'))\n")
    run_tool_in_process(monkeypatch, str(script), "--model", "lit_ti", "--help")
    assert capsys.readouterr().out == f"__main__ {[str(script), '--model', 'lit_ti', '--help']} 5 True\n"


def test_the_tool_names_a_script_that_is_not_there(monkeypatch):
    with pytest.raises(InputError, match="no file nowhere/train.py: .*pytorch-image-models"):
        run_tool_in_process(monkeypatch, "nowhere/train.py", "--model", "lit_ti")


def draw_folder(root: Path, *, num_train: int = 60, num_val: int = 40, seed: int = 0) -> Path:
    """An image folder of bright circles, squares and triangles on dim grounds, 64 to 96 pixels; colours say nothing."""
    rng = np.random.default_rng(seed)
    for split, number in (("train", num_train), ("val", num_val)):
        for kind in CLASSES:
            folder = root / split / kind
            folder.mkdir(parents=True)
            for index in range(number):
                side = int(rng.integers(64, 97))
                image = Image.new("RGB", (side, side), tuple(map(int, rng.integers(0, 90, 3))))
                draw, size = ImageDraw.Draw(image), int(side * rng.uniform(0.5, 0.8))
                left, top = map(int, rng.integers(0, side - size + 1, 2))
                box, fill = (left, top, left + size, top + size), tuple(map(int, rng.integers(150, 256, 3)))
                if kind == "circle":
                    draw.ellipse(box, fill=fill)
                elif kind == "square":
                    draw.rectangle(box, fill=fill)
                else:
                    draw.polygon([box[0], box[3], box[2], box[3], left + size // 2, top], fill=fill)
                image.save(folder / f"{index}.png")
    return root


@pytest.mark.slow
@pytest.mark.skipif("TIMM_SCRIPTS" not in os.environ, reason="TIMM_SCRIPTS names no folder with timm's train.py")
@pytest.mark.parametrize(
    "name, optimizer, lr", [(DEMO, "adamw", "1e-3"), ("ls_tiny", "adamw", "5e-4"), ("lit_ti", "litadamw", "5e-4")]
)
def test_timms_scripts_train_and_validate(name, optimizer, lr, tmp_path):
    scripts, data = Path(os.environ["TIMM_SCRIPTS"]), draw_folder(tmp_path / "shapes")
    model = ["--model", name, "--num-classes", "3", "--img-size", "64", "--model-kwargs", "img_size=64"]
    common = ["--data-dir", str(data), *model, "--crop-pct", "1", "--workers", "0", "--device", "cpu"]

    def run(script: str, *arguments: str) -> None:
        command = [sys.executable, str(TOOL), str(scripts / script), *common, *arguments]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-3000:]

    run(
        "train.py", "--val-split", "val", "--batch-size", "12", "--epochs", "10", "--warmup-epochs", "1", "--opt",
        optimizer, "--lr", lr, "--weight-decay", "0.05", "--smoothing", "0", "--scale", "0.8", "1", "--ratio", "1", "1",
        "--output", str(tmp_path), "--experiment", "run",
    )  # fmt: skip
    with open(tmp_path / "run" / "summary.csv") as file:
        accuracies = [float(row["eval_top1"]) for row in csv.DictReader(file)]
    run(
        "validate.py", "--split", "val", "--batch-size", "12", "--results-format", "json", "--results-file",
        str(tmp_path / "results.json"), "--checkpoint", str(tmp_path / "run" / "model_best.pth.tar"),
    )  # fmt: skip
    results = json.loads((tmp_path / "results.json").read_text())
    results = results[0] if isinstance(results, list) else results
    print(f"\n{name}: top-1 by epoch {[round(a, 1) for a in accuracies]}; validate.py {results['top1']}")
    assert results["top1"] == pytest.approx(max(accuracies), abs=1e-3)
    # By chance a third
    assert max(accuracies) > 60
