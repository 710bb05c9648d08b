"""LIT's official checkpoints, of both formats: every name mapped, every table resized, and what does not fit raises."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from backbones import ConfigError, create_backbone, create_classifier
from backbones.build import VARIANTS
from backbones.convert import convert_state_dict
from tests.backbones.helpers import assert_all_close, random_images
from tests.backbones.official_lit import TI, S, official_forward, official_state_dict

SMALL = {"lit_absolute": TI, "lit_relative": S}
names = pytest.mark.parametrize("name", SMALL)
CLASSES = {"num_classes": 10, "img_size": 64}


@pytest.fixture(autouse=True)
def small_variants(monkeypatch):
    for name, variant in SMALL.items():
        monkeypatch.setitem(VARIANTS, name, variant)
        monkeypatch.setitem(VARIANTS, f"{name}_128", dataclasses.replace(variant, position_img_size=128))


def official(name: str, *, classifier: bool, **options) -> dict[str, torch.Tensor]:
    return official_state_dict(SMALL[name], classifier=classifier, **options)


def loaded(create, name: str, weights: dict, options: dict | None = None) -> tuple[torch.nn.Module, object]:
    """The model with the converted weights, in float64 and eval mode, and the report."""
    options = options or {}
    classifier = create is create_classifier
    converted, report = convert_state_dict(weights, name, classifier=classifier, model_options=options)
    model = create(name, **options).double().eval()
    model.load_state_dict(converted, strict=True)
    return model, report


@names
@pytest.mark.parametrize("from_classifier, classifier", [(True, True), (True, False), (False, False)])
def test_every_name_is_in_the_report(name, from_classifier, classifier):
    weights = official(name, classifier=from_classifier)
    options = CLASSES if classifier else None
    converted, report = convert_state_dict(weights, name, classifier=classifier, model_options=options)
    parts = (report.mapped, report.split, report.tied, report.dropped)
    listed = [key for part in parts for key in part if key in weights]
    assert sorted(listed) == sorted(weights)
    filled = [*report.mapped.values(), *(key for keys in report.split.values() for key in keys), *report.initialised]
    assert sorted(filled) == sorted(converted)
    assert not report.resized and not report.tied


def test_each_tensor_of_lit_ti_goes_to_its_name():
    weights = official("lit_absolute", classifier=True)
    converted, report = convert_state_dict(weights, "lit_absolute", classifier=True, model_options=CLASSES)
    expected = {
        "norm.weight": weights["norm.weight"],
        "head.bias": weights["head.bias"],
        "backbone.stages.3.global_tokens": weights["cls_token"],
        "backbone.stages.3.positions.global_tokens": weights["pos_embed4"][:, :1],
        "backbone.stages.3.positions.table": weights["pos_embed4"][0, 1:].view(2, 2, 16),
        "backbone.stages.2.positions.table": weights["pos_embed3"].view(4, 4, 12),
        "backbone.stages.0.patch_embed.projection.weight": weights["patch_embed1.proj.weight"],
        "backbone.stages.1.patch_embed.weight": weights["patch_embed2.dconv.weight"],
        "backbone.stages.2.patch_embed.offset.bias": weights["patch_embed3.dconv.conv_offset.bias"],
        "backbone.stages.3.patch_embed.norm.running_var": weights["patch_embed4.norm_layer.running_var"],
        "backbone.stages.3.patch_embed.norm.num_batches_tracked": torch.tensor(7),
        "backbone.stages.0.blocks.1.mlp.contract.weight": weights["block1.1.mlp.fc2.weight"],
        "backbone.stages.2.blocks.0.attention_norm.bias": weights["block3.0.norm1.bias"],
        "backbone.stages.2.blocks.1.mlp_norm.bias": weights["block3.1.norm2.bias"],
        "backbone.stages.3.blocks.0.attention.qkv.weight": weights["block4.0.attn.qkv.weight"],
        "backbone.stages.3.blocks.1.attention.projection.bias": weights["block4.1.attn.proj.bias"],
    }
    for key, tensor in expected.items():
        assert torch.equal(converted[key], tensor), key
    assert list(report.split) == ["pos_embed4"]


def test_each_tensor_of_lit_s_goes_to_its_name():
    weights = official("lit_relative", classifier=False)
    converted, report = convert_state_dict(weights, "lit_relative")
    expected = {
        "stages.0.patch_embed.norm.weight": weights["patch_embed.norm.weight"],
        "stages.1.patch_embed.bias": weights["layers.0.downsample.dconv.bias"],
        "stages.3.patch_embed.offset.weight": weights["layers.2.downsample.dconv.conv_offset.weight"],
        "stages.2.patch_embed.norm.running_mean": weights["layers.1.downsample.norm_layer.running_mean"],
        "stages.1.blocks.0.mlp_norm.weight": weights["layers.1.blocks.0.norm2.weight"],
        "stages.0.blocks.0.mlp.expand.bias": weights["layers.0.blocks.0.mlp.fc1.bias"],
        "stages.2.blocks.1.attention.relative_bias.table": weights[
            "layers.2.blocks.1.attn.relative_position_bias_table"
        ],
        "output_norms.stage2.weight": weights["norm1.weight"],
        "output_norms.stage4.bias": weights["norm3.bias"],
    }
    for key, tensor in expected.items():
        assert torch.equal(converted[key], tensor), key
    assert not report.dropped and not report.initialised and not report.split


def test_a_classifier_gives_a_backbone_without_its_output_norms():
    weights = official("lit_relative", classifier=True)
    model, report = loaded(create_backbone, "lit_relative", weights)
    assert report.initialised.keys() == {
        f"output_norms.stage{number}.{leaf}" for number in (2, 3, 4) for leaf in ("weight", "bias")
    }
    for name, norm in model.output_norms.items():
        assert norm.weight.eq(1).all() and norm.bias.eq(0).all(), name
    assert {key for key in report.dropped if "relative_position_index" not in key} == {
        "norm.weight",
        "norm.bias",
        "head.weight",
        "head.bias",
    }
    images = random_images(2, 3, 37, 50)
    expected, _ = official_forward(weights, images, S)
    for stage, feature in model(images).items():
        tokens = expected[stage].permute(0, 2, 3, 1)
        if stage != "stage1":
            tokens = F.layer_norm(tokens, tokens.shape[-1:], eps=1e-5)
        torch.testing.assert_close(feature, tokens.permute(0, 3, 1, 2), atol=1e-9, rtol=1e-9)


def test_a_classifier_gives_a_backbone_without_its_global_token():
    weights = official("lit_absolute", classifier=True)
    model, report = loaded(create_backbone, "lit_absolute", weights)
    assert not report.initialised
    heads = {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert report.dropped.keys() == {"cls_token", "pos_embed4[:, 0]"} | heads
    images = random_images(2, 3, 37, 50)
    detector = {key: tensor for key, tensor in weights.items() if key not in report.dropped}
    assert_all_close(model(images), official_forward(detector, images, TI)[0], tolerance=1e-9)


@names
def test_tables_are_resized_as_the_model_would(name):
    """From 64 pixels to 128: where the image has just that size, it does not matter who resizes."""
    weights = official(name, classifier=False)
    model, report = loaded(create_backbone, f"{name}_128", weights)
    images = random_images(1, 3, 128, 128)
    assert_all_close(model(images), official_forward(weights, images, SMALL[name])[0], tolerance=1e-9)
    if name == "lit_relative":
        table = "attention.relative_bias.table"
        assert report.resized == {
            **{f"stages.2.blocks.{number}.{table}": ((49, 3), (225, 3)) for number in (0, 1)},
            f"stages.3.blocks.0.{table}": ((9, 6), (49, 6)),
        }
    else:
        assert report.resized == {
            f"stages.{index}.positions.table": ((side, side, stage.dim), (2 * side, 2 * side, stage.dim))
            for index, (stage, side) in enumerate(zip(TI.stages, (16, 8, 4, 2), strict=True))
        }


@pytest.mark.parametrize(
    "name, trained, size",
    [
        ("lit_absolute", 64, (96, 64)),
        ("lit_relative", 64, (96, 64)),
        ("lit_relative", 64, (40, 100)),
        # 63 x 7 offsets are as many as 21 x 21.
        ("lit_relative", 176, (512, 64)),
    ],
)
def test_tables_are_resized_to_an_oblong(name, trained, size):
    weights = official(name, classifier=True, img_size=trained)
    model, report = loaded(create_classifier, name, weights, {"num_classes": 10, "img_size": size})
    assert report.resized
    images = random_images(1, 3, *size)
    torch.testing.assert_close(model(images), official_forward(weights, images, SMALL[name])[1], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("norm", ["frozen", "sync"])
@names
def test_statistics_go_into_other_norms(name, norm):
    weights, images = official(name, classifier=False), random_images(1, 3, 37, 50)
    model, report = loaded(create_backbone, name, weights, {"batch_norm": norm})
    assert_all_close(model(images), official_forward(weights, images, SMALL[name])[0], tolerance=1e-9)
    counters = {key for key in weights if key.endswith("num_batches_tracked")}
    assert {key for key in report.dropped if key in counters} == (counters if norm == "frozen" else set())


def test_uniform_merging_of_pvt_has_the_names_of_its_embedding():
    weights = {}
    for key, tensor in official("lit_absolute", classifier=False).items():
        if not any(part in key for part in ("dconv", "running", "num_batches_tracked")):
            weights[key.replace("norm_layer", "norm")] = tensor
    for number, (c, d) in enumerate(((6, 10), (10, 12), (12, 16)), start=2):
        weights[f"patch_embed{number}.proj.weight"] = random_images(d, c, 2, 2)
        weights[f"patch_embed{number}.proj.bias"] = random_images(d)
    model, _ = loaded(create_backbone, "lit_absolute", weights, {"merging": "uniform"})
    assert torch.equal(model.stages[2].patch_embed.projection.weight, weights["patch_embed3.proj.weight"])
    assert torch.equal(model.stages[3].patch_embed.norm.bias, weights["patch_embed4.norm.bias"])


def without(prefix: str):
    return lambda weights: {key: tensor for key, tensor in weights.items() if not key.startswith(prefix)}


def with_shape(key: str, *shape: int):
    return lambda weights: weights | {key: torch.zeros(shape)}


BIAS = "layers.3.blocks.0.attn.relative_position_bias_table"


@pytest.mark.parametrize(
    "name, change, options, hint",
    [
        ("lit_absolute", with_shape("block5.0.norm2.weight", 1), {}, "block5.0.norm2.weight"),
        ("lit_absolute", with_shape("patch_embed2.surprise", 1), {}, "patch_embed2.surprise"),
        ("lit_absolute", with_shape("layers.0.blocks.0.norm1.weight", 1), {}, "layers.0.blocks.0.norm1.weight"),
        ("lit_absolute", without("pos_embed2"), {}, "stages.1.positions.table"),
        ("lit_absolute", with_shape("pos_embed3", 1, 17, 12), {}, "pos_embed3"),
        ("lit_absolute", with_shape("pos_embed4", 1, 4, 16), {}, "pos_embed4"),
        ("lit_absolute", with_shape("pos_embed2", 1, 64, 11), {}, "pos_embed2"),
        ("lit_absolute", dict, {"merging": "uniform"}, "patch_embed2"),
        ("lit_relative", with_shape("layers.3.downsample.dconv.weight", 1), {}, "layers.3.downsample"),
        ("lit_relative", without("layers.1.downsample.norm_layer.running_var"), {}, "norm.running_var"),
        # Only a classifier has no output norms, and then none of them.
        ("lit_relative", without("norm2.weight"), {}, "output_norms.stage3.weight"),
        ("lit_relative", without("norm"), {}, "output_norms.stage2.weight"),
        ("lit_relative", with_shape(BIAS, 10, 6), {}, BIAS),
        ("lit_relative", with_shape(BIAS, 9, 5), {}, BIAS),
        ("lit_relative", with_shape("layers.0.blocks.0.mlp.fc1.weight", 24, 7), {}, "fc1.weight"),
    ],
)
def test_what_does_not_fit(name, change, options, hint):
    with pytest.raises(ConfigError, match=hint) as caught:
        convert_state_dict(change(official(name, classifier=False)), name, model_options=options)
    assert "\n" not in str(caught.value)


def test_other_models():
    for name, hint in (("lit_absolute", "stages.3.global_tokens"), ("lit_relative", "norm1.weight")):
        weights = official(name, classifier=False)
        with pytest.raises(ConfigError, match=hint):
            convert_state_dict(weights, name, classifier=True, model_options=CLASSES)
        for other in (*(SMALL.keys() - {name}), "vil_tiny"):
            with pytest.raises(ConfigError):
                convert_state_dict(weights, other)
    weights = official("lit_relative", classifier=True, num_classes=5)
    with pytest.raises(ConfigError, match="head.weight"):
        convert_state_dict(weights, "lit_relative", classifier=True, model_options=CLASSES)
