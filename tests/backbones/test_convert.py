"""Official checkpoints of ViL and Transformer-LS: every name is mapped, every value used, and a wrong one raises."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from backbones import ConfigError, create_backbone, create_classifier
from backbones.convert import convert_state_dict
from tests.backbones.helpers import random_images
from tests.backbones.official import TINY, OfficialStage, official_forward, official_state_dict

NAMES = {True: "vil_tiny_1_1_3_1_rpb", False: "vil_tiny_1_1_3_1"}
GLOBALS = (1, 2, 1, 0)
# Official positions for 224 pixels, so that nothing is resized
AT_224 = {"max_img_size": 224}


def with_globals(*numbers: int) -> tuple[OfficialStage, ...]:
    return tuple(dataclasses.replace(stage, globals=number) for stage, number in zip(TINY, numbers, strict=True))


def loaded(create, name: str, options: dict, official: dict) -> torch.nn.Module:
    """The model with the converted weights, in float64 and eval mode."""
    converted, _ = convert_state_dict(official, name, classifier=create is create_classifier, model_options=options)
    model = create(name, **options).double().eval()
    model.load_state_dict(converted, strict=True)
    return model


@pytest.mark.parametrize(
    "relative_bias, num_global, shared",
    [
        (True, (1, 1, 1, 0), True),
        (True, (1, 2, 0, 1), False),
        (False, (1, 1, 1, 0), False),
        (False, (1, 2, 0, 1), True),
    ],
)
def test_converted_backbone_computes_what_the_official_one_does(relative_bias, num_global, shared):
    stages = with_globals(*num_global)
    official = official_state_dict(stages, relative_bias=relative_bias, shared=shared)
    options = AT_224 | {"global_tokens": num_global, "shared_projections": shared}
    model = loaded(create_backbone, NAMES[relative_bias], options, official)
    images = random_images(2, 3, 37, 54)
    expected, _ = official_forward(official, images, stages)
    features = model(images)
    assert features.keys() == expected.keys()
    for stage, output in features.items():
        torch.testing.assert_close(output, expected[stage], atol=1e-10, rtol=1e-10, msg=lambda m, s=stage: f"{s}: {m}")


@pytest.mark.parametrize("relative_bias, num_global", [(True, (1, 1, 1, 0)), (False, (0, 1, 0, 2))])
def test_converted_classifier_computes_what_the_official_one_does(relative_bias, num_global):
    stages = with_globals(*num_global)
    official = official_state_dict(stages, relative_bias=relative_bias)
    options = {"num_classes": 10, "global_tokens": num_global}
    model = loaded(create_classifier, NAMES[relative_bias], options, official)
    images = random_images(2, 3, 50, 43)
    _, expected = official_forward(official, images, stages)
    torch.testing.assert_close(model(images), expected, atol=1e-10, rtol=1e-10)


def test_full_attention_is_converted_into_full_and_into_sliding_chunks():
    stages = (OfficialStage(1, 4, 1, 48), OfficialStage(1, 2, 3, 96), OfficialStage(9, 2, 3, 192))
    stages = (*stages, OfficialStage(1, 2, 6, 384, globals=0))
    stages = tuple(dataclasses.replace(stage, full=True) for stage in stages)
    official = official_state_dict(stages, relative_bias=False)
    images = random_images(1, 3, 37, 54)
    expected, _ = official_forward(official, images, stages)
    for name in ("full_tiny", "vil_tiny"):
        features = loaded(create_backbone, name, AT_224, official)(images)
        for stage, output in features.items():
            torch.testing.assert_close(output, expected[stage], atol=1e-10, rtol=1e-10)


def test_each_tensor_goes_to_its_name():
    official = official_state_dict(with_globals(*GLOBALS), relative_bias=True)
    converted, report = convert_state_dict(official, NAMES[True], model_options={"global_tokens": GLOBALS})
    block, ours = "layer3.3", "stages.2.blocks.1"
    expected = {
        "stages.1.global_tokens": official["layer2.0.cls_token"],
        "stages.0.patch_embed.projection.weight": official["layer1.0.proj.weight"],
        "stages.3.patch_embed.norm.bias": official["layer4.0.norm_embed.bias"],
        f"{ours}.attention_norm.weight": official[f"{block}.norm.weight"],
        f"{ours}.mlp_norm.weight": official["layer3.4.norm.weight"],
        f"{ours}.mlp.expand.weight": official["layer3.4.mlp.fc1.weight"],
        f"{ours}.mlp.contract.bias": official["layer3.4.mlp.fc2.bias"],
        f"{ours}.attention.query.weight": official[f"{block}.attn.query.weight"],
        f"{ours}.attention.key_value.bias": official[f"{block}.attn.kv.bias"],
        f"{ours}.attention.projection.weight": official[f"{block}.attn.proj.weight"],
        f"{ours}.attention.relative_bias.table": official[f"{block}.attn.local_relative_position_bias_table"],
        f"{ours}.attention.global_to_local": official[f"{block}.attn.g2l_relative_position_bias"][0],
        f"{ours}.attention.local_to_global": official[f"{block}.attn.g2l_relative_position_bias"][1],
        f"{ours}.attention.global_to_global": official[f"{block}.attn.g2g_relative_position_bias"],
    }
    for name, tensor in expected.items():
        assert torch.equal(converted[name], tensor), name
    assert report.mapped[f"{block}.attn.kv.bias"] == f"{ours}.attention.key_value.bias"
    assert report.tied[f"{block}.attn.kv_global.bias"] == f"{ours}.attention.key_value.bias"
    assert report.split[f"{block}.attn.g2l_relative_position_bias"] == (
        f"{ours}.attention.global_to_local",
        f"{ours}.attention.local_to_global",
    )
    dropped = {f"{block}.attn.relative_position_index", "layer3.5.attn.query_global.weight", "head.weight", "norm.bias"}
    # In the last block of a stage only the bias from local to global tokens is used.
    assert dropped | {"layer1.1.attn.g2l_relative_position_bias[0]"} <= report.dropped.keys()
    assert report.mapped["layer1.1.attn.g2l_relative_position_bias"] == "stages.0.blocks.0.attention.local_to_global"


@pytest.mark.parametrize("relative_bias", [True, False])
@pytest.mark.parametrize("classifier", [True, False])
def test_every_name_is_in_the_report(relative_bias, classifier):
    official = official_state_dict(relative_bias=relative_bias)
    options = {"num_classes": 10} if classifier else None
    converted, report = convert_state_dict(official, NAMES[relative_bias], classifier=classifier, model_options=options)
    parts = (report.mapped, report.split, report.tied, report.dropped)
    listed = [name for part in parts for name in part if name in official]
    twice = {name for name in listed if listed.count(name) > 1}
    assert set(listed) == official.keys()
    assert all("g2l_relative" in name for name in twice)
    filled = [*report.mapped.values(), *(name for names in report.split.values() for name in names)]
    assert sorted(filled) == sorted(converted)
    assert report.resized.keys() <= converted.keys()
    assert bool(report.resized) == (not relative_bias and not classifier)
    fields = ("mapped", "resized", "split", "tied", "dropped", "initialised")
    assert report.summary() == ", ".join(f"{len(getattr(report, part))} {part}" for part in fields)
    assert not report.initialised


@pytest.mark.parametrize("prefix", ["module.", "backbone.bottom_up.", "module.backbone.bottom_up."])
def test_prefixes_are_taken_off(prefix):
    official = official_state_dict(relative_bias=True)
    expected, _ = convert_state_dict(official, NAMES[True])
    prefixed = {prefix + name: tensor for name, tensor in official.items()}
    converted, report = convert_state_dict(prefixed, NAMES[True])
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[name], expected[name]) for name in expected)
    assert report.mapped[f"{prefix}layer1.0.proj.bias"] == "stages.0.patch_embed.projection.bias"


def test_shared_projections_fill_separate_ones():
    official = official_state_dict(relative_bias=True)
    converted, report = convert_state_dict(official, NAMES[True], model_options={"shared_projections": False})
    attention = "stages.2.blocks.0.attention"
    assert torch.equal(converted[f"{attention}.global_query.weight"], converted[f"{attention}.query.weight"])
    assert not report.tied


def interpolate(table: np.ndarray, size: int) -> np.ndarray:
    """(L, C) -> (size, C), linear, with half-pixel centres and clamped ends."""
    position = (np.arange(size) + 0.5) * len(table) / size - 0.5
    return np.stack([np.interp(position, np.arange(len(table)), column) for column in table.T], axis=1)


@pytest.mark.parametrize("max_img_size, lengths", [(1333, (336, 168, 84, 42)), ((160, 90), (40, 20, 10, 5))])
def test_absolute_positions_are_resized(max_img_size, lengths):
    """From 224 pixels; 1333 pixels are 42 positions of 32."""
    official = official_state_dict(relative_bias=False)
    converted, report = convert_state_dict(official, NAMES[False], model_options={"max_img_size": max_img_size})
    for index, length in enumerate(lengths):
        name, source = f"stages.{index}.positions.rows", official[f"layer{index + 1}.0.x_pos_embed"][0]
        expected = interpolate(source.numpy(), length)
        np.testing.assert_allclose(converted[name].numpy(), expected, atol=1e-5)
        assert report.resized[name] == (tuple(source.shape), (length, source.shape[1]))
    cols, source = converted["stages.0.positions.cols"], official["layer1.0.y_pos_embed"][0]
    np.testing.assert_allclose(cols.numpy(), interpolate(source.numpy(), len(cols)), atol=1e-5)
    assert len(cols) == (336 if max_img_size == 1333 else 24)
    create_backbone(NAMES[False], max_img_size=max_img_size).load_state_dict(converted, strict=True)


def test_window_bias_is_resized_to_another_window():
    official = official_state_dict(relative_bias=True)
    converted, report = convert_state_dict(official, NAMES[True], model_options={"window_size": 5})
    source = official["layer2.1.attn.local_relative_position_bias_table"].numpy().reshape(27, 27, 3)
    rows = interpolate(source.reshape(27, -1), 19).reshape(19, 27, 3)
    expected = interpolate(rows.swapaxes(0, 1).reshape(27, -1), 19).reshape(19, 19, 3).swapaxes(0, 1)
    name = "stages.1.blocks.0.attention.relative_bias.table"
    np.testing.assert_allclose(converted[name].numpy(), expected.reshape(361, 3), atol=1e-5)
    assert report.resized[name] == ((729, 3), (361, 3))


# Ours -> official, for the parts of a long-short block
LONG_SHORT = {
    "attention.relative_bias.table": "attn.local_relative_position_bias_table",
    "attention.local_norm": "attn.dual_ln_full",
    "attention.projected_norm": "attn.dual_ln_dp",
    "attention.dynamic_projection": "attn.to_dynamic_projection",
    "attention.qkv": "attn.qkv",
    "attention.projection": "attn.proj",
    "attention_norm": "norm",
}


def test_long_short_attention_is_mapped_name_by_name():
    """The first stage of an official Transformer-LS."""
    options = {"out_features": ("stage1",)}
    model = create_backbone("ls_tiny", **options)
    official, mlp = {}, "stages.0.blocks.0.mlp"
    for ours, tensor in model.state_dict().items():
        name = ours.replace("stages.0.patch_embed.projection", "layer1.0.proj")
        name = name.replace("stages.0.patch_embed.norm", "layer1.0.norm_embed")
        name = name.replace("stages.0.global_tokens", "layer1.0.cls_token")
        name = name.replace(f"{mlp}_norm", "layer1.2.norm").replace(f"{mlp}.expand", "layer1.2.mlp.fc1")
        name = name.replace(f"{mlp}.contract", "layer1.2.mlp.fc2")
        for part, theirs in LONG_SHORT.items():
            name = name.replace(f"stages.0.blocks.0.{part}", f"layer1.1.{theirs}")
        assert name.startswith("layer1.")
        official[name] = torch.randn_like(tensor)
    official["layer1.1.attn.relative_position_index"] = torch.zeros(49, 169, dtype=torch.long)
    converted, report = convert_state_dict(official, "ls_tiny", model_options=options)
    assert converted.keys() == model.state_dict().keys() and not report.split and not report.resized
    assert list(report.dropped) == ["layer1.1.attn.relative_position_index"]
    assert all(torch.equal(converted[ours], official[name]) for name, ours in report.mapped.items())
    for part, theirs in LONG_SHORT.items():
        leaf = "" if part.endswith("table") else ".weight"
        assert report.mapped[f"layer1.1.{theirs}{leaf}"] == f"stages.0.blocks.0.{part}{leaf}"


@pytest.mark.parametrize("window_size", [5, 8])
def test_the_bias_of_segments_is_never_resized(window_size):
    """Its rows are shared by offsets; that of w = 5 has 121 rows, as if it were a square."""
    model = create_backbone("ls_tiny", window_size=window_size, out_features=("stage1",))
    table = model.stages[0].blocks[0].attention.relative_bias.table.detach()
    with pytest.raises(ConfigError, match="relative_position_bias_table"):
        convert_state_dict({"layer1.1.attn.local_relative_position_bias_table": table}, "ls_tiny")


def test_a_performer_from_a_partial_one_gets_random_features():
    """ViL Table 8: full stages have what performer stages have, but for the features."""
    partial = create_classifier("partial_performer_tiny_1_2_8_1").state_dict()
    official = {}
    for name, tensor in partial.items():
        if name.startswith("backbone.stages"):
            axis = name.endswith(("positions.rows", "positions.cols"))
            official[official_name(name)] = tensor[None] if axis else tensor
    state_dict, report = convert_state_dict(official, "performer_tiny_1_2_8_1", model_options={"max_img_size": 224})
    blocks = [f"stages.2.blocks.{block}" for block in range(8)] + ["stages.3.blocks.0"]
    sampled = {f"{block}.attention.features" for block in blocks}
    assert report.initialised.keys() == sampled
    create_backbone("performer_tiny_1_2_8_1", max_img_size=224).load_state_dict(state_dict)


def official_name(name: str) -> str:
    """The official name of one of our classifier's backbone parameters, of models with ``qkv`` throughout."""
    match = re.fullmatch(r"backbone\.stages\.(\d)\.(.+)", name)
    stage, rest = int(match[1]) + 1, match[2]
    embed = {
        "global_tokens": "cls_token",
        "positions.global_tokens": "cls_pos_embed",
        "positions.rows": "x_pos_embed",
        "positions.cols": "y_pos_embed",
    }
    if rest in embed:
        return f"layer{stage}.0.{embed[rest]}"
    if rest.startswith("patch_embed."):
        part, leaf = rest.split(".")[1:]
        return f"layer{stage}.0.{'proj' if part == 'projection' else 'norm_embed'}.{leaf}"
    block, rest = re.fullmatch(r"blocks\.(\d+)\.(.+)", rest).groups()
    attention, mlp = f"layer{stage}.{2 * int(block) + 1}", f"layer{stage}.{2 * int(block) + 2}"
    for ours, theirs in {
        "attention_norm.": f"{attention}.norm.",
        "mlp_norm.": f"{mlp}.norm.",
        "mlp.expand.": f"{mlp}.mlp.fc1.",
        "mlp.contract.": f"{mlp}.mlp.fc2.",
        "attention.projection.": f"{attention}.attn.proj.",
        "attention.features": f"{attention}.attn.fast_attention.projection_matrix",
        "attention.": f"{attention}.attn.",
    }.items():
        if rest.startswith(ours):
            return theirs + rest.removeprefix(ours)
    raise AssertionError(name)


def _deeper() -> dict:
    return official_state_dict((*TINY[:2], dataclasses.replace(TINY[2], depth=4), TINY[3]), relative_bias=True)


@pytest.mark.parametrize(
    "change, name, options, hint",
    [
        (lambda w: w | {"epoch": torch.zeros(1)}, NAMES[True], {}, "epoch"),
        (lambda w: w | {"layer1.0.surprise": torch.zeros(1)}, NAMES[True], {}, "layer1.0.surprise"),
        (lambda w: w | {"layer1.2.mlp.fc3.weight": torch.zeros(1)}, NAMES[True], {}, "layer1.2.mlp.fc3"),
        (lambda w: w | {"layer1.0.proj.bias": torch.full((48,), torch.nan)}, NAMES[True], {}, "layer1.0.proj.bias"),
        (lambda w: w | {"layer1.0.proj.bias": torch.ones(48).int()}, NAMES[True], {}, "layer1.0.proj.bias"),
        (lambda w: {k: t for k, t in w.items() if k != "layer3.2.mlp.fc1.bias"}, NAMES[True], {}, "mlp.expand.bias"),
        (lambda w: {k: t for k, t in w.items() if not k.startswith("layer2.2.")}, NAMES[True], {}, "and 1 more"),
        (lambda w: w, "vil_small_1_1_9_1_rpb", {}, "layer1.0.cls_token"),
        (lambda w: w, NAMES[False], {}, "relative_position_bias"),
        (lambda w: w, "vil_tiny_1_10_1_rpb", {}, "vil_tiny_1_10_1_rpb|layer1"),
        (lambda w: w, "vil_tiny_rpb", {}, "stages.2.blocks.3"),
        (lambda w: _deeper(), NAMES[True], {}, "layer3.7"),
        (lambda w: official_state_dict(with_globals(2, 1, 1, 0), relative_bias=True), NAMES[True], {}, "cls_token"),
        (lambda w: official_state_dict(relative_bias=True, shared=False), NAMES[True], {}, "shared_projections=False"),
        (lambda w: w, NAMES[True], {"max_image_size": 224}, "max_img_size"),
        (lambda w: w, "cvt_ls_13", {}, "cvt_ls_13"),
    ],
)
def test_what_does_not_fit(change, name, options, hint):
    with pytest.raises(ConfigError, match=hint) as caught:
        convert_state_dict(change(official_state_dict(relative_bias=True)), name, model_options=options)
    assert "\n" not in str(caught.value)


def test_another_number_of_classes():
    official = official_state_dict(relative_bias=True, num_classes=5)
    with pytest.raises(ConfigError, match="head.weight"):
        convert_state_dict(official, NAMES[True], classifier=True, model_options={"num_classes": 10})
