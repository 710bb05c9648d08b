"""Official checkpoints and classifiers of this project in detectors: values, resized tables, and mismatches."""

import argparse
import dataclasses
import functools
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.data import MetadataCatalog
from detectron2.modeling import build_model
from safetensors.torch import save_file
from torch import nn

from backbones import ConfigError, create_backbone, create_classifier
from backbones.build import VARIANTS
from backbones.checkpoint_files import read_checkpoint
from backbones.convert import recognise
from projects_vil import load_config
from projects_vil.checkpoint import (
    METADATA_KEY,
    Checkpointer,
    CheckpointMetadata,
    check_weights,
    convert_file,
    convert_official,
)
from projects_vil.checkpoint.pretrained import BACKBONE_PREFIX, expected_heads
from tests import wrapping
from tests.backbones import official_lit
from tests.backbones.helpers import random_images, randomise
from tests.backbones.official import TINY, OfficialStage, official_forward, official_state_dict
from tests.golden import assert_close_to_golden, golden, golden_images, golden_state_dict
from tests.projects_vil.checkpoint.test_checkpointer import LOG, detector, log_of, save
from tests.projects_vil.helpers import ROOT, small_config
from tests.selection import slow_except

NAME = "vil_tiny_1_1_3_1_rpb"
NARROW = ["MODEL.FPN.OUT_CHANNELS", "16", "MODEL.ROI_BOX_HEAD.FC_DIM", "8", "MODEL.ROI_MASK_HEAD.CONV_DIM", "8"]
AT_224 = {"max_img_size": 224}
# Golden file -> variant, form of the official repository's file, options of the backbone (None for a classifier only)
GOLDEN = {
    "vil_tiny_rpb_det": ("vil_tiny_rpb", wrapping.detectron2_detector, {}),
    "vil_small_ape_det": ("vil_small", wrapping.detectron2_detector, {}),
    "vil_small_rpb_g1_det": ("vil_small_rpb", wrapping.detectron2_detector, {"global_tokens": [1, 1, 1, 1]}),
    "lit_ti_det": ("lit_ti", wrapping.mmdetection, {}),
    "lit_s_det": ("lit_s", wrapping.mmdetection, {}),
    "lit_s_seg": ("lit_s_seg", wrapping.mmsegmentation, {}),
    "vil_small_rpb_cls": ("vil_small_rpb", wrapping.vision_longformer, {}),
    "vil_tiny_ape_cls": ("vil_tiny", wrapping.vision_longformer, AT_224),
    "global_tiny_ape_cls": ("global_tiny", wrapping.vision_longformer, AT_224),
    "srformer64_tiny_ape_cls": ("sra64_tiny", wrapping.vision_longformer, AT_224),
    "performer_tiny_ape_cls": ("performer_tiny", wrapping.vision_longformer, AT_224),
    "ls_medium_224_cls": ("ls_medium", wrapping.vision_longformer, {}),
    "lit_ti_cls": ("lit_ti", wrapping.lit_classifier, None),
    "lit_s_cls": ("lit_s", wrapping.lit_classifier, None),
    "linformer_tiny_ape_cls": ("linformer_tiny", wrapping.vision_longformer, None),
}
BACKBONES = [name for name, (*_, options) in GOLDEN.items() if options is not None]
CLASSIFIERS = [name for name in GOLDEN if name.endswith("_cls")]


def partial_stages(name: str) -> tuple[OfficialStage, ...]:
    """Return the stages of the official classifier, with full attention in the last two."""
    return tuple(
        OfficialStage(s.depth, s.patch_size, s.heads, s.dim, s.global_tokens, full=index >= 2)
        for index, s in enumerate(VARIANTS[name].stages)
    )


def converted(contents: dict, variant: str = NAME, **options):
    return convert_official(recognise(contents), variant, **options)


def backbone_with(state_dict: dict, variant: str = NAME, *, double: bool = True, **options) -> nn.Module:
    model = create_backbone(variant, **options).eval()
    model = model.double() if double else model
    model.load_state_dict({key.removeprefix(BACKBONE_PREFIX): t for key, t in state_dict.items()}, strict=True)
    return model


def detector_from(path: str, *overrides: str, name: str = "retinanet") -> nn.Module:
    """A detector with a file as MODEL.WEIGHTS, after the check that precedes training."""
    cfg = small_config(name, *overrides)
    check_weights(cfg, path)
    model = detector(name, *overrides).eval()
    Checkpointer(model, cfg=cfg).load(path)
    return model


def message(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_weights(small_config("retinanet", *overrides), path)
    assert path in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def float32(weights: dict) -> dict:
    return {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in weights.items()}


@pytest.fixture
def small_lit(monkeypatch):
    variants = {"lit_absolute": official_lit.TI, "lit_relative": official_lit.S}
    for name, variant in variants.items():
        monkeypatch.setitem(VARIANTS, name, variant)
    return variants


# Outputs of the official code


@pytest.mark.parametrize("file", slow_except(BACKBONES, ["vil_tiny_rpb_det"]))
def test_golden_features(tmp_path, file):
    """A detector gives the official features, with the official file as MODEL.WEIGHTS and with the converted file."""
    reference, (name, form, options) = golden(file), GOLDEN[file]
    path = save(tmp_path, form(golden_state_dict(reference)))
    overrides = [text for key, value in options.items() for text in (f"MODEL.TRANSFORMER.{key.upper()}", str(value))]
    bottom_up = detector_from(path, "MODEL.TRANSFORMER.NAME", name, *overrides, name="mask_rcnn").backbone.bottom_up
    with torch.inference_mode():
        features = bottom_up(golden_images(reference))
    assert features.keys() == reference["stages"].keys()
    for stage, expected in reference["stages"].items():
        assert_close_to_golden(features[stage], expected)
    img_size = (224, 224) if options == AT_224 else None
    conversion = convert_file(path, tmp_path / "ours.safetensors", name, img_size=img_size)
    assert not conversion.report.resized
    state = read_checkpoint(tmp_path / "ours.safetensors")["model"]
    backbone = backbone_with(state, name, double=False, **options)
    for key, tensor in bottom_up.net.state_dict().items():
        assert torch.equal(backbone.state_dict()[key], tensor), key


@pytest.mark.parametrize("file", slow_except(CLASSIFIERS, ["vil_tiny_ape_cls"]))
def test_golden_logits(tmp_path, file):
    reference, (name, form, _) = golden(file), GOLDEN[file]
    path = save(tmp_path, form(golden_state_dict(reference)))
    conversion = convert_file(path, tmp_path / "ours.safetensors", name, classifier=True)
    assert not conversion.report.resized
    model = create_classifier(name).eval()
    model.load_state_dict(read_checkpoint(tmp_path / "ours.safetensors")["model"], strict=True)
    with torch.inference_mode():
        assert_close_to_golden(model(golden_images(reference)), reference["logits"])


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn"])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_an_official_vil_detector_has_all_weights_of_the_model(tmp_path, name, suffix):
    """The heads are those of this project's configs; buffers that the config defines are dropped."""
    keys = ["MODEL.TRANSFORMER.NAME", NAME, "MODEL.DEVICE", "cpu", *NARROW]
    cfg = load_config(ROOT / f"configs/{name}/vil_tiny_1x.yaml", keys)
    model = build_model(cfg).eval()
    heads = {key: torch.randn_like(t) for key, t in model.state_dict().items() if not key.startswith(BACKBONE_PREFIX)}
    buffers = {"pixel_mean": torch.ones(3, 1, 1), "pixel_std": torch.ones(3, 1, 1)}
    anchors = "anchor_generator" if name == "retinanet" else "proposal_generator.anchor_generator"
    buffers |= {f"{anchors}.cell_anchors.{index}": torch.ones(3, 4) for index in range(5)}
    weights = official_state_dict(relative_bias=True)
    path = save(tmp_path, wrapping.detectron2_detector(weights, heads | buffers))
    conversion = convert_file(path, tmp_path / f"ours.{suffix}", NAME)
    assert buffers.keys() <= conversion.report.dropped.keys()
    metadata = CheckpointMetadata.from_contents(read_checkpoint(tmp_path / f"ours.{suffix}"))
    assert metadata.variant == NAME and metadata.input.format == "RGB"
    assert metadata.classes == tuple(MetadataCatalog.get("coco_2017_val").thing_classes)
    for file in (path, str(tmp_path / f"ours.{suffix}")):
        Checkpointer(model, cfg=cfg, complete=True).load(file)
        assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in heads.items())
    backbone = backbone_with({k: t for k, t in conversion.contents["model"].items() if k.startswith(BACKBONE_PREFIX)})
    images = random_images(1, 3, 37, 54)
    expected, _ = official_forward(weights, images)
    for stage, output in backbone(images).items():
        torch.testing.assert_close(output, expected[stage], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    "name, variant, overrides",
    [
        ("retinanet", "vil_small", []),
        ("mask_rcnn", "vil_base_deep_rpb", []),
        ("mask_rcnn", "vil_tiny_rpb", ["MODEL.MASK_ON", "False"]),
        ("retinanet", "vil_tiny_1_10_1_rpb", ["MODEL.FPN.IN_FEATURES", "['stage1', 'stage2', 'stage3']"]),
    ],
)
def test_names_of_fpn_and_heads_are_those_of_the_configs(name, variant, overrides):
    keys = ["MODEL.TRANSFORMER.NAME", variant, "MODEL.DEVICE", "meta", *overrides]
    with torch.device("meta"):
        names = build_model(load_config(ROOT / f"configs/{name}/vil_tiny_1x.yaml", keys)).state_dict()
    heads = {key: tensor for key, tensor in names.items() if not key.startswith(BACKBONE_PREFIX)}
    assert expected_heads(heads, variant) == heads.keys()


@pytest.mark.parametrize("form", [wrapping.lit_classifier, wrapping.mmdetection, wrapping.mmsegmentation])
@pytest.mark.parametrize("name", ["lit_absolute", "lit_relative"])
def test_official_lit(small_lit, name, form):
    is_classifier = form is wrapping.lit_classifier
    weights = official_lit.official_state_dict(small_lit[name], classifier=is_classifier)
    heads = {} if is_classifier else wrapping.mmdetection_heads(form is wrapping.mmsegmentation)
    contents = form(weights) if form is not wrapping.mmdetection else form(weights, heads)
    conversion = converted(contents, name)
    assert heads.keys() <= conversion.report.dropped.keys()
    images = random_images(1, 3, 96, 64)
    only = {key: t for key, t in weights.items() if not key.startswith(("head.", "norm.", "cls_token"))}
    expected, _ = official_lit.official_forward(only, images, small_lit[name])
    for stage, output in backbone_with(conversion.contents["model"], name)(images).items():
        if is_classifier and name == "lit_relative" and stage != "stage1":
            # A classifier has no output norms: they start as ones and zeros.
            normed = nn.functional.layer_norm(expected[stage].permute(0, 2, 3, 1), expected[stage].shape[1:2])
            expected[stage] = normed.permute(0, 3, 1, 2)
        torch.testing.assert_close(output, expected[stage], atol=1e-9, rtol=1e-9)


def test_sliding_chunks_compute_what_full_attention_did_up_to_stage_3():
    """With 14 x 14 tokens or fewer, a chunk and its neighbours see the whole image."""
    stages = partial_stages(NAME)
    weights = official_state_dict(stages, relative_bias=True)
    model = backbone_with(converted(wrapping.vision_longformer(weights)).contents["model"])
    images = random_images(1, 3, 37, 54)
    no_bias = {"layer4.1.attn.local_relative_position_bias_table": torch.zeros(27**2, 6, dtype=torch.float64)}
    expected, _ = official_forward(weights | no_bias, images, stages)
    features = model(images)
    for stage in ("stage1", "stage2", "stage3"):
        torch.testing.assert_close(features[stage], expected[stage], atol=1e-10, rtol=1e-10)


# Resized tables


def linear(table: np.ndarray, size: int) -> np.ndarray:
    """Interpolate along the first axis, with half-pixel centers and clamped ends."""
    position = np.clip((np.arange(size) + 0.5) * len(table) / size - 0.5, 0, len(table) - 1)
    low = np.minimum(position.astype(int), len(table) - 1)
    high, part = np.minimum(low + 1, len(table) - 1), position - low
    part = part.reshape(-1, *[1] * (table.ndim - 1))
    return table[low] * (1 - part) + table[high] * part


def cubic(table: np.ndarray, size: int) -> np.ndarray:
    """Interpolate along the first axis by Keys' kernel with a = -0.75, half-pixel centers and clamped ends."""
    position, a = (np.arange(size) + 0.5) * len(table) / size - 0.5, -0.75
    result = 0.0
    for tap in range(-1, 3):
        index = np.floor(position).astype(int) + tap
        x = np.abs(position - index)
        near = (a + 2) * x**3 - (a + 3) * x**2 + 1
        far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
        weight = np.where(x <= 1, near, far).reshape(-1, *[1] * (table.ndim - 1))
        result = result + weight * table[np.clip(index, 0, len(table) - 1)]
    return result


def both_axes(resize, grid: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return resize(resize(grid, size[0]).swapaxes(0, 1), size[1]).swapaxes(0, 1)


def square(table: torch.Tensor) -> np.ndarray:
    side = round(len(table) ** 0.5)
    return table.view(side, side, -1).numpy()


@pytest.mark.parametrize("img_size", [None, (800, 1333)])
def test_absolute_positions_of_vil_are_resized_for_1333_pixels(img_size):
    """Bilinear tables of 42 x 42 tokens: 1333 pixels a side, since images are landscape and portrait."""
    weights = official_state_dict(relative_bias=False)
    conversion = converted(wrapping.vision_longformer(weights), "vil_tiny_1_1_3_1", img_size=img_size)
    state_dict = conversion.contents["model"]
    for index, length in enumerate((336, 168, 84, 42)):
        for axis, ours in (("x", "rows"), ("y", "cols")):
            table = state_dict[f"{BACKBONE_PREFIX}stages.{index}.positions.{ours}"].numpy()
            source = weights[f"layer{index + 1}.0.{axis}_pos_embed"][0].numpy()
            np.testing.assert_allclose(table, linear(source, length), atol=1e-12)
            shapes = conversion.report.resized[f"stages.{index}.positions.{ours}"]
            assert shapes == (source.shape, (length, source.shape[1]))
    backbone_with(state_dict, "vil_tiny_1_1_3_1", **conversion.options)


@pytest.mark.parametrize("img_size, sizes", [((96, 160), ((10, 10), (5, 5))), ((64, 64), ((4, 4), (2, 2)))])
def test_tables_of_lit_are_resized(small_lit, img_size, sizes):
    """Relative tables are resized bicubically, absolute positions bilinearly."""
    weights = official_lit.official_state_dict(official_lit.S, classifier=True)
    conversion = converted(wrapping.lit_classifier(weights), "lit_relative", img_size=img_size)
    for stage, size in zip((2, 3), sizes, strict=True):
        source = square(weights[f"layers.{stage}.blocks.0.attn.relative_position_bias_table"])
        key = f"{BACKBONE_PREFIX}stages.{stage}.blocks.0.attention.relative_bias.table"
        grid = tuple(2 * side - 1 for side in size)
        table = conversion.contents["model"][key].view(*grid, -1).numpy()
        np.testing.assert_allclose(table, both_axes(cubic, source, grid), atol=1e-9)
    assert bool(conversion.report.resized) == (img_size != (64, 64))
    backbone_with(conversion.contents["model"], "lit_relative", **conversion.options)
    weights = official_lit.official_state_dict(official_lit.TI, classifier=True)
    conversion = converted(wrapping.lit_classifier(weights), "lit_absolute", img_size=img_size)
    table = conversion.contents["model"][f"{BACKBONE_PREFIX}stages.2.positions.table"].numpy()
    expected = both_axes(linear, weights["pos_embed3"][0].view(4, 4, -1).numpy(), sizes[0])
    np.testing.assert_allclose(table, expected, atol=1e-9)


@pytest.mark.parametrize("name", [NAME, "vil_small_rpb"])
def test_relative_bias_of_full_attention_becomes_that_of_sliding_chunks(name):
    """The table equals the one that the official detection code makes of classifiers with two full stages.

    At 224 pixels stage 3 has 14 x 14 tokens, whose 27 x 27 offsets are those of a chunk's neighbourhood; stage 4 has
    7 x 7, and its 13 x 13 offsets are stretched, bilinearly, to 27 x 27.
    """
    stages = partial_stages(name)
    weights = official_state_dict(stages, relative_bias=True)
    conversion = converted(wrapping.vision_longformer(weights), name)
    state_dict = conversion.contents["model"]
    for number in range(1, 2 * stages[2].depth, 2):
        ours, theirs = f"{BACKBONE_PREFIX}stages.2.blocks.{number // 2}.attention", f"layer3.{number}.attn"
        table = weights[f"{theirs}.local_relative_position_bias_table"]
        assert torch.equal(state_dict[f"{ours}.relative_bias.table"], table)
        for leaf in ("weight", "bias"):
            joined = weights[f"{theirs}.qkv.{leaf}"]
            assert torch.equal(state_dict[f"{ours}.query.{leaf}"], joined[: stages[2].dim])
            assert torch.equal(state_dict[f"{ours}.key_value.{leaf}"], joined[stages[2].dim :])
    key = "stages.3.blocks.0.attention.relative_bias.table"
    source = square(weights["layer4.1.attn.local_relative_position_bias_table"])
    table = state_dict[f"{BACKBONE_PREFIX}{key}"].view(27, 27, -1).numpy()
    np.testing.assert_allclose(table, both_axes(linear, source, (27, 27)), atol=1e-12)
    assert conversion.report.resized == {key: ((169, stages[3].heads), (729, stages[3].heads))}
    lines = conversion.lines()
    assert any("blocks.*.attention.relative_bias.table (169," in line for line in lines) and len(lines) < 10


def test_another_window_size_in_a_detector(tmp_path):
    weights = float32(official_state_dict(relative_bias=True))
    path = save(tmp_path, wrapping.vision_longformer(weights))
    source = "layer3.3.attn.local_relative_position_bias_table"
    target = f"{BACKBONE_PREFIX}stages.2.blocks.1.attention.relative_bias.table"
    assert torch.equal(detector_from(path).state_dict()[target], weights[source])
    wider = detector_from(path, "MODEL.TRANSFORMER.WINDOW_SIZE", "[8, 8, 8, 8]").state_dict()[target]
    expected = both_axes(linear, square(weights[source].double()), (31, 31)).reshape(31**2, -1)
    np.testing.assert_allclose(wider.double().numpy(), expected, atol=1e-5)


# Options and metadata


def test_global_tokens_and_separate_projections_are_found(tmp_path):
    stages = tuple(dataclasses.replace(stage, globals=n) for stage, n in zip(TINY, (1, 2, 1, 1), strict=True))
    weights = official_state_dict(stages, relative_bias=True, shared=False)
    conversion = converted(wrapping.vision_longformer(weights))
    options = {"global_tokens": [1, 2, 1, 1], "shared_projections": False}
    assert conversion.options == options == CheckpointMetadata.from_contents(conversion.contents).options
    overrides = shlex.split(conversion.lines()[-1].removeprefix("load it with "))
    path = save(tmp_path, wrapping.vision_longformer(float32(weights)))
    assert "convert_checkpoint.py" in message(path)
    with log_of(LOG) as log:
        detector_from(path, *overrides, "MODEL.TRANSFORMER.ATTENTION_MODE", "exact", "INPUT.FORMAT", "BGR")
    assert any("RGB" in line and "BGR" in line for line in log) and not any("ATTENTION_MODE" in line for line in log)
    images = random_images(1, 3, 37, 54)
    expected, _ = official_forward(weights, images, stages)
    for stage, output in backbone_with(conversion.contents["model"], **options)(images).items():
        torch.testing.assert_close(output, expected[stage], atol=1e-10, rtol=1e-10)


def test_full_stages_with_fewer_global_tokens():
    """The official partial models with global memory have 256 tokens in the first stages, one and none in full ones."""
    stages = tuple(
        OfficialStage(s.depth, s.patch_size, s.heads, s.dim, globals=n, full=True)
        for s, n in zip(VARIANTS["full_tiny"].stages, (2, 2, 1, 0), strict=True)
    )
    weights = official_state_dict(stages, relative_bias=False, img_size=64)
    assert converted(wrapping.vision_longformer(weights), "full_tiny").options == {"global_tokens": [2, 2, 1, 0]}


def test_the_window_of_a_classifier_comes_from_its_table():
    weights = official_state_dict(relative_bias=True)
    for name in [name for name in weights if name.startswith("layer2") and "local_relative" in name]:
        weights[name] = torch.randn(47**2, weights[name].shape[1])  # windows of 12
    assert converted(wrapping.vision_longformer(weights), classifier=True).options["window_size"] == [7, 12, 7, 7]


def test_a_loaded_official_file_is_saved_with_metadata(tmp_path):
    weights = float32(official_state_dict(relative_bias=True))
    model = detector_from(save(tmp_path, wrapping.vision_longformer(weights)))
    Checkpointer(model, str(tmp_path), cfg=small_config()).save("ours")
    assert torch.load(tmp_path / "ours.pth", weights_only=True)[METADATA_KEY]["variant"] == NAME
    check_weights(small_config(), str(tmp_path / "ours.pth"), complete=True)


# Files that do not match


@pytest.mark.parametrize(
    "change, named",
    [
        ({"layer2.1.attn.qeury.weight": "layer2.1.attn.query.weight"}, "stages.1.blocks.0.attention.query.weight"),
        ({"layer2.1.attn.temperature": torch.ones(1)}, "layer2.1.attn.temperature"),
        ({"layer2.0.cls_token": None}, "stages.1.global_tokens"),
        ({"layer2.0.cls_token": torch.ones(3)}, "layer2.0.cls_token"),
        ({"layer1.0.proj.bias": torch.ones(3)}, "layer1.0.proj.bias"),
        ({"layer1.0.proj.bias": torch.full((48,), float("nan"))}, "layer1.0.proj.bias"),
        ({"layer1.0.proj.bias": torch.ones(48, dtype=torch.int64)}, "layer1.0.proj.bias"),
    ],
)
@pytest.mark.parametrize("form", [wrapping.vision_longformer, wrapping.detectron2_detector])
def test_names_and_tensors_that_do_not_match(tmp_path, form, change, named):
    weights = float32(official_state_dict(relative_bias=True))
    for name, value in change.items():
        if isinstance(value, str):
            weights[name] = weights.pop(value)
        elif value is None:
            del weights[name]
        else:
            weights[name] = value
    assert named in message(save(tmp_path, form(weights)))


def test_heads_that_do_not_match(small_lit):
    heads = {f"head.cls_subnet.{index}.weight": torch.ones(1) for index in (0, 2, 4)}
    weights = official_state_dict(relative_bias=True)
    with pytest.raises(ConfigError, match=r"head\.cls_score\.bias|and .* more"):
        converted(wrapping.detectron2_detector(weights, heads))
    for surprise in ("head.surprise.weight", "backbone.fpn_lateral2.weight", "roi_heads.extra", "keypoint_head.weight"):
        with pytest.raises(ConfigError, match=surprise):
            converted(wrapping.detectron2_detector(weights, heads | {surprise: torch.ones(1)}))
    weights = official_lit.official_state_dict(official_lit.S, classifier=False)
    with pytest.raises(ConfigError, match=r"surprise\.weight"):
        converted(wrapping.mmdetection(weights, {"surprise.weight": torch.ones(1)}), "lit_relative")
    with pytest.raises(ConfigError, match="classifier"):
        converted(wrapping.detectron2_detector(official_state_dict(relative_bias=True)), classifier=True)


def test_other_variants_and_other_files(tmp_path):
    path = save(tmp_path, wrapping.vision_longformer(float32(official_state_dict(relative_bias=True))))
    for variant in ("vil_tiny_1_1_3_1", "vil_small_rpb", "lit_s", "ls_tiny"):
        assert variant in message(path, "MODEL.TRANSFORMER.NAME", variant)
    cvt = ["MODEL.TRANSFORMER.NAME", "cvt_ls_13", "MODEL.FPN.IN_FEATURES", "['stage2', 'stage3']"]
    assert "cvt_ls_13" in message(path, *cvt)
    with pytest.raises(ConfigError, match=Path(path).name):
        check_weights(small_config(), path, complete=True)
    for wrapper in ("net", "state_dict", "model"):
        message(save(tmp_path, {wrapper: {"conv1.weight": torch.ones(2), "layer1.0.conv1.weight": torch.ones(2)}}))


# Classifiers of this project


@functools.cache
def classifier(name: str, **options) -> nn.Module:
    return randomise(create_classifier(name, num_classes=10, **options)).eval()


CLASSIFIER_NAMES = ["vil_tiny_1_1_3_1", NAME, "ls_tiny", "lit_ti", "lit_s", "performer_tiny"]


@pytest.mark.parametrize("name", slow_except(CLASSIFIER_NAMES, CLASSIFIER_NAMES[:2]))
@pytest.mark.parametrize("form", ["module", "state_dict", "safetensors"])
def test_a_classifier_has_all_weights_of_the_backbone(tmp_path, name, form):
    state = classifier(name).state_dict()
    if form == "safetensors":
        path = str(tmp_path / "weights.safetensors")
        save_file(state, path)
    else:
        wrapped = {f"module.{key}": tensor for key, tensor in state.items()}
        path = save(tmp_path, wrapped if form == "module" else {"state_dict": state})
    with log_of(LOG) as log:
        loaded = detector_from(path, "MODEL.TRANSFORMER.NAME", name).state_dict()
    same = 0
    for key, tensor in state.items():
        target = f"{BACKBONE_PREFIX}{key.removeprefix('backbone.')}"
        if target in loaded and loaded[target].shape == tensor.shape:
            assert torch.equal(loaded[target], tensor), key
            same += 1
    assert same > len(state) / 2
    norms = [key for key in loaded if "output_norms" in key]
    assert len(norms) == (6 if name == "lit_s" else 0)
    assert all((loaded[key] == float(key.endswith("weight"))).all() for key in norms)
    dropped = ["norm.weight", "head.bias"] + (["stages.3.global_tokens"] if name == "lit_ti" else [])
    assert any(line.startswith("dropped: ") and all(key in line for key in dropped) for line in log)
    if name == "vil_tiny_1_1_3_1":
        for stage, length in enumerate((336, 168, 84, 42)):
            table = state[f"backbone.stages.{stage}.positions.rows"].double().numpy()
            actual = loaded[f"{BACKBONE_PREFIX}stages.{stage}.positions.rows"].double().numpy()
            np.testing.assert_allclose(actual, linear(table, length), atol=1e-5)


@pytest.mark.slow
def test_a_segmentors_backbone_starts_from_the_classifier_of_its_size(tmp_path):
    contents = {"state_dict": classifier("lit_s").state_dict(), "args": argparse.Namespace(model="lit_s")}
    path = save(tmp_path, contents)
    loaded = detector_from(path, "MODEL.TRANSFORMER.NAME", "lit_s_seg").state_dict()
    key = "stages.2.blocks.5.mlp.expand.weight"
    assert torch.equal(loaded[f"{BACKBONE_PREFIX}{key}"], contents["state_dict"][f"backbone.{key}"])
    text = message(path, "MODEL.TRANSFORMER.NAME", "lit_m_seg")
    assert "lit_s," in text and "lit_m_seg" in text


def test_classifiers_that_do_not_match(tmp_path):
    state = classifier(NAME).state_dict()
    path = save(tmp_path, {"state_dict": state, "args": argparse.Namespace(model="vil_tiny_rpb")})
    assert "vil_tiny_rpb" in message(path) and NAME in message(path)
    for extra in ("backbone.stages.0.extra", "norm.running_mean", "backbone.head.weight", "head.fc.weight"):
        assert extra in message(save(tmp_path, state | {extra: torch.ones(1, 1, 4)}))
    message(save(tmp_path, dict(list(state.items())[: len(state) // 2])))
    path = save(tmp_path, {"state_dict": state})
    assert "vil_small_rpb" in message(path, "MODEL.TRANSFORMER.NAME", "vil_small_rpb")
    for tokens in ("[0, 0, 0, 0]", "[2, 1, 1, 0]"):
        assert "stages.0.global_tokens" in message(path, "MODEL.TRANSFORMER.GLOBAL_TOKENS", tokens)
    with pytest.raises(ConfigError, match=Path(path).name):
        check_weights(small_config(), path, complete=True)
