"""Official checkpoints and classifiers of this project in detectors: values, options, and mismatches."""

import argparse
import dataclasses
import functools
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from detectron2.data import MetadataCatalog
from detectron2.modeling import build_model
from safetensors.torch import save_file
from torch import nn

from backbones import ConfigError, create_backbone, create_classifier
from backbones.build import VARIANTS
from backbones.checkpoint_files import read_checkpoint
from backbones.convert import convert_state_dict, detect_format
from projects_vil import Checkpointer, load_config
from projects_vil.checkpoint import METADATA_KEY, CheckpointMetadata, check_weights, convert_file, convert_official
from projects_vil.checkpoint.pretrained import BACKBONE_PREFIX, detector_layers
from tests import layouts
from tests.backbones import official_lit
from tests.backbones.helpers import randomize
from tests.backbones.official import TINY, OfficialStage, official_state_dict
from tests.golden import assert_close_to_golden, golden, golden_images, golden_state_dict
from tests.projects_vil import helpers
from tests.projects_vil.checkpoint.test_checkpointer import LOG, detector, log_of, save
from tests.projects_vil.helpers import ROOT, small_config
from tests.selection import slow_except
from tests.tolerances import FLOAT32

NAME = "vil_tiny_1_1_3_1_rpb"
NARROW = ["MODEL.FPN.OUT_CHANNELS", "16", "MODEL.ROI_BOX_HEAD.FC_DIM", "8", "MODEL.ROI_MASK_HEAD.CONV_DIM", "8"]
# Golden file -> variant, form of the official repository's file, options of the backbone; tests/backbones has them all.
GOLDEN = {
    "vil_tiny_rpb_det": ("vil_tiny_rpb", layouts.detectron2_detector, {}),
    "vil_small_rpb_g1_det": ("vil_small_rpb", layouts.detectron2_detector, {"global_tokens": [1, 1, 1, 1]}),
    "vil_tiny_ape_cls": ("vil_tiny", layouts.vision_longformer, {"max_img_size": 224}),
    "lit_ti_det": ("lit_ti", layouts.mmdetection, {}),
    "lit_s_seg": ("lit_s_seg", layouts.mmsegmentation, {}),
}


def converted(contents: dict, variant: str = NAME, **options):
    return convert_official(detect_format(contents), variant, **options)


def model_with(create: Callable, state_dict: dict, variant: str, **options) -> nn.Module:
    with torch.device("meta"):
        model = create(variant, **options).eval()
    weights = {key.removeprefix(BACKBONE_PREFIX): tensor for key, tensor in state_dict.items()}
    model.load_state_dict(weights, strict=True, assign=True)
    return model.double()


def detector_from(path: str, *overrides: str, name: str = "retinanet") -> nn.Module:
    """Return a detector with a file as MODEL.WEIGHTS, after the check that precedes training."""
    cfg = small_config(name, *overrides)
    check_weights(cfg, path)
    model = detector(name, *overrides).eval()
    Checkpointer(model, cfg=cfg).load(path)
    return model


def message(path: str, *overrides: str) -> str:
    text = helpers.message(check_weights, small_config("retinanet", *overrides), path)
    assert path in text
    return text


def float32(weights: dict) -> dict:
    return {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in weights.items()}


# Official files


@pytest.mark.parametrize("file", slow_except(GOLDEN, ["vil_tiny_rpb_det"]))
def test_golden_features(tmp_path, file):
    """A detector gives the official features, with the official file as MODEL.WEIGHTS and with the converted file."""
    reference, (name, form, options) = golden(file), GOLDEN[file]
    path = save(tmp_path, form(golden_state_dict(reference)))
    overrides = [text for key, value in options.items() for text in (f"MODEL.TRANSFORMER.{key.upper()}", str(value))]
    bottom_up = detector_from(path, "MODEL.TRANSFORMER.VARIANT", name, *overrides, name="mask_rcnn").backbone.bottom_up
    with torch.inference_mode():
        features = bottom_up.double()(golden_images(reference))
    assert features.keys() == reference["stages"].keys()
    for stage, expected in reference["stages"].items():
        assert_close_to_golden(features[stage], expected)
    img_size = (224, 224) if "max_img_size" in options else None
    conversion = convert_file(path, tmp_path / "ours.safetensors", name, img_size=img_size)
    assert not conversion.report.resized
    weights = read_checkpoint(tmp_path / "ours.safetensors")["model"]
    backbone = model_with(create_backbone, weights, name, **options).state_dict()
    assert all(torch.equal(backbone[key].to(tensor), tensor) for key, tensor in bottom_up.net.state_dict().items())


@pytest.mark.parametrize("name, suffix", [("retinanet", "pth"), ("mask_rcnn", "safetensors")])
def test_an_official_vil_detector_has_all_weights_of_the_model(tmp_path, name, suffix):
    """The heads match the configs of this project. Buffers that the config defines are dropped."""
    keys = ["MODEL.TRANSFORMER.VARIANT", NAME, "MODEL.DEVICE", "cpu", *NARROW]
    cfg = load_config(ROOT / f"configs/{name}/vil_tiny_rpb_1x.yaml", keys)
    model = build_model(cfg).eval()
    heads = {key: torch.randn_like(t) for key, t in model.state_dict().items() if not key.startswith(BACKBONE_PREFIX)}
    buffers = {"pixel_mean": torch.ones(3, 1, 1), "pixel_std": torch.ones(3, 1, 1)}
    anchors = "anchor_generator" if name == "retinanet" else "proposal_generator.anchor_generator"
    buffers |= {f"{anchors}.cell_anchors.{index}": torch.ones(3, 4) for index in range(5)}
    weights = official_state_dict(relative_bias=True)
    path = save(tmp_path, layouts.detectron2_detector(weights, heads | buffers))
    conversion = convert_file(path, tmp_path / f"ours.{suffix}", NAME)
    assert buffers.keys() <= conversion.report.dropped.keys()
    metadata = CheckpointMetadata.from_contents(read_checkpoint(tmp_path / f"ours.{suffix}"))
    assert metadata.variant == NAME and metadata.input.format == "RGB"
    assert metadata.classes == tuple(MetadataCatalog.get("coco_2017_val").thing_classes)
    for file in (path, str(tmp_path / f"ours.{suffix}")):
        Checkpointer(model, cfg=cfg, complete=True).load(file)
        assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in heads.items())


@pytest.mark.parametrize(
    "name, variant, overrides",
    [
        ("mask_rcnn", "vil_tiny_rpb", ["MODEL.MASK_ON", "False"]),
        ("retinanet", "vil_tiny_1_10_1_rpb", ["MODEL.FPN.IN_FEATURES", "['stage1', 'stage2', 'stage3']"]),
    ],
)
def test_names_of_fpn_and_heads_match_the_configs(name, variant, overrides):
    keys = ["MODEL.TRANSFORMER.VARIANT", variant, "MODEL.DEVICE", "meta", *overrides]
    with torch.device("meta"):
        names = build_model(load_config(ROOT / f"configs/{name}/vil_tiny_rpb_1x.yaml", keys)).state_dict()
    heads = {key: tensor for key, tensor in names.items() if not key.startswith(BACKBONE_PREFIX)}
    layers = detector_layers(heads, variant).values()
    assert {f"{layer}.{leaf}" for layer in layers for leaf in ("weight", "bias")} == heads.keys()


# Options and metadata


def test_global_tokens_and_separate_projections_are_found(tmp_path):
    stages = tuple(dataclasses.replace(stage, globals=n) for stage, n in zip(TINY, (1, 2, 1, 1), strict=True))
    weights = official_state_dict(stages, relative_bias=True, shared=False)
    conversion = converted(layouts.vision_longformer(weights))
    options = {"global_tokens": [1, 2, 1, 1], "shared_projections": False}
    assert conversion.options == options == CheckpointMetadata.from_contents(conversion.contents).options
    overrides = shlex.split(conversion.lines()[-1].removeprefix("load it with "))
    path = save(tmp_path, layouts.vision_longformer(float32(weights)))
    assert "vil convert" in message(path)
    with log_of(LOG) as log:
        detector_from(path, *overrides, "MODEL.TRANSFORMER.ATTENTION_MODE", "exact", "INPUT.FORMAT", "BGR")
    assert any("RGB" in line and "BGR" in line for line in log.output) and "ATTENTION_MODE" not in str(log.output)
    expected, _ = convert_state_dict(weights, NAME, model_options=options)
    for name, tensor in expected.items():
        assert torch.equal(conversion.contents["model"][BACKBONE_PREFIX + name], tensor), name


def test_options_of_other_official_models(tmp_path):
    """Partial models with global memory have fewer tokens in full stages; a classifier's tables show its windows."""
    stages = tuple(
        OfficialStage(s.depth, s.patch_size, s.heads, s.dim, globals=n, full=True)
        for s, n in zip(VARIANTS["full_tiny"].stages, (2, 2, 1, 0), strict=True)
    )
    weights = official_state_dict(stages, relative_bias=False, img_size=64)
    assert converted(layouts.vision_longformer(weights), "full_tiny").options == {"global_tokens": [2, 2, 1, 0]}
    weights = official_state_dict(relative_bias=True)
    for name in [name for name in weights if name.startswith("layer2") and "local_relative" in name]:
        weights[name] = torch.randn(47**2, weights[name].shape[1])  # windows of 12
    assert converted(layouts.vision_longformer(weights), classifier=True).options["chunk_size"] == [7, 12, 7, 7]


def test_an_official_file_is_loaded_with_another_window_and_saved_with_metadata(tmp_path):
    weights = float32(official_state_dict(relative_bias=True))
    window = ["MODEL.TRANSFORMER.CHUNK_SIZE", "[8, 8, 8, 8]"]
    model = detector_from(save(tmp_path, layouts.vision_longformer(weights)), *window)
    Checkpointer(model, str(tmp_path), cfg=small_config()).save("ours")
    saved = torch.load(tmp_path / "ours.pth", weights_only=True)[METADATA_KEY]
    assert saved["variant"] == NAME and set(saved["options"]) == {"chunk_size"}
    check_weights(small_config("retinanet", *window), str(tmp_path / "ours.pth"), complete=True)


@pytest.mark.parametrize("img_size, chunks", slow_except([(384, (8, 12)), (224, (7, 7))], [384]))
@pytest.mark.parametrize("name", ["vil_tiny_1_1_3_1", NAME])
def test_a_classifier_of_the_model_zoo_keeps_its_logits(tmp_path, monkeypatch, name, img_size, chunks):
    """Official classifiers have full attention in stages 3 and 4; at 384 pixels they have other chunk sizes too."""
    relative = name == NAME
    stages = tuple(dataclasses.replace(stage, full=index >= 2) for index, stage in enumerate(TINY))
    weights = official_state_dict(stages, relative_bias=relative, img_size=img_size, windows=chunks)
    sizes = "~, ~" if relative or img_size == 224 else f"384, {[*chunks, 12, 12]}"
    group = "[{title: t, url: 'http://{}', columns: [variant, img_size, chunk_size, params, file], files: {own: "
    (tmp_path / "zoo.yaml").write_text(f"{group}[{name}, {sizes}, 1, own]}}}}]")
    monkeypatch.setenv("VIL_ZOO", str(tmp_path / "zoo.yaml"))
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    (tmp_path / "vil_detectron2").mkdir()
    save(tmp_path / "vil_detectron2", layouts.vision_longformer(float32(weights)), "own.pth")

    options = {"attention": ["sliding_chunk", "sliding_chunk", "dense", "dense"], "chunk_size": [*chunks, 7, 7]}
    options |= {"img_size": img_size, "num_classes": 10}
    converted, _ = convert_state_dict(float32(weights), name, classifier=True, model_options=options)
    official = model_with(create_classifier, converted, name, **options)

    conversion = convert_file("own", tmp_path / "ours.pth", classifier=True)
    ours = model_with(create_classifier, read_checkpoint(tmp_path / "ours.pth")["model"], name, **conversion.options)
    assert not conversion.report.resized
    assert conversion.lines()[-1].startswith(f"load it with create_classifier('{name}', ")
    images = torch.rand(1, 3, img_size, img_size, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), official(images))


# Files that do not match


def test_heads_that_do_not_match(monkeypatch):
    monkeypatch.setitem(VARIANTS, "lit_relative", official_lit.S)
    heads = {f"head.cls_subnet.{index}.weight": torch.ones(1) for index in (0, 2, 4)}
    weights = official_state_dict(relative_bias=True)
    with pytest.raises(ConfigError, match=r"head\.cls_score\.bias|and .* more"):
        converted(layouts.detectron2_detector(weights, heads))
    for surprise in ("head.surprise.weight", "backbone.fpn_lateral2.weight", "roi_heads.extra", "keypoint_head.weight"):
        with pytest.raises(ConfigError, match=surprise):
            converted(layouts.detectron2_detector(weights, heads | {surprise: torch.ones(1)}))
    assert "classification head" in helpers.message(converted, layouts.detectron2_detector(weights), classifier=True)
    lit, others = (official_lit.official_state_dict(official_lit.S, classifier=False), layouts.mmdetection_heads(True))
    assert others.keys() <= converted(layouts.mmdetection(lit, others), "lit_relative").report.dropped.keys()
    with pytest.raises(ConfigError, match=r"surprise\.weight"):
        converted(layouts.mmdetection(lit, {"surprise.weight": torch.ones(1)}), "lit_relative")


def test_other_variants_and_other_files(tmp_path):
    path = save(tmp_path, layouts.vision_longformer(float32(official_state_dict(relative_bias=True))))
    for variant in ("vil_tiny_1_1_3_1", "lit_s"):
        assert variant in message(path, "MODEL.TRANSFORMER.VARIANT", variant)
    cvt = ["MODEL.TRANSFORMER.VARIANT", "cvt_ls_13", "MODEL.FPN.IN_FEATURES", "['stage2', 'stage3']"]
    assert "cvt_ls_13" in message(path, *cvt)
    assert Path(path).name in helpers.message(check_weights, small_config(), path, complete=True)
    for wrapper in ("net", "model"):
        message(save(tmp_path, {wrapper: {"conv1.weight": torch.ones(2), "layer1.0.conv1.weight": torch.ones(2)}}))


# Classifiers of this project


@functools.cache
def classifier(name: str) -> dict[str, torch.Tensor]:
    return randomize(create_classifier(name, num_classes=10)).state_dict()


@pytest.mark.parametrize(
    "name, form",
    slow_except(
        [("vil_tiny_1_1_3_1", "module"), (NAME, "safetensors"), ("lit_ti", "state_dict"), ("lit_s", "state_dict")],
        ["vil_tiny_1_1_3_1", NAME],
    ),
)
def test_a_classifier_has_all_weights_of_the_backbone(tmp_path, name, form):
    state = classifier(name)
    if form == "safetensors":
        path = str(tmp_path / "weights.safetensors")
        save_file(state, path)
    else:
        wrapped = {f"module.{key}": tensor for key, tensor in state.items()}
        path = save(tmp_path, wrapped if form == "module" else {"state_dict": state})
    with log_of(LOG) as log:
        loaded = detector_from(path, "MODEL.TRANSFORMER.VARIANT", name).state_dict()
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
    dropped = ["and 3 more: the classification head"]
    dropped += ["and 1 more: only a classifier has a global token"] if name == "lit_ti" else []
    assert all(any("dropped: " in line and text in line for line in log.output) for text in dropped)
    if name == "vil_tiny_1_1_3_1":
        tables = [loaded[f"{BACKBONE_PREFIX}stages.{stage}.positions.rows"] for stage in range(4)]
        assert [len(table) for table in tables] == [336, 168, 84, 42]
        table = state["backbone.stages.3.positions.rows"]
        expected = nn.functional.interpolate(table.T[None], size=42, mode="linear")[0].T
        torch.testing.assert_close(tables[3], expected, **FLOAT32)


@pytest.mark.slow
def test_a_segmentors_backbone_starts_from_the_classifier_of_its_size(tmp_path):
    path = save(tmp_path, {"state_dict": classifier("lit_s"), "args": argparse.Namespace(model="lit_s")})
    loaded = detector_from(path, "MODEL.TRANSFORMER.VARIANT", "lit_s_seg").state_dict()
    key = "stages.2.blocks.5.mlp.fc1.weight"
    assert torch.equal(loaded[f"{BACKBONE_PREFIX}{key}"], classifier("lit_s")[f"backbone.{key}"])
    text = message(path, "MODEL.TRANSFORMER.VARIANT", "lit_m_seg")
    assert "'lit_s'" in text and "lit_m_seg" in text


def test_classifiers_that_do_not_match(tmp_path):
    state = classifier(NAME)
    path = save(tmp_path, {"state_dict": state, "args": argparse.Namespace(model="vil_tiny_rpb")})
    assert "vil_tiny_rpb" in message(path) and NAME in message(path)
    for extra in ("stages.0.extra", "norm.running_mean", "backbone.head.weight"):
        assert extra.removeprefix("backbone.") in message(save(tmp_path, state | {extra: torch.ones(1, 1, 4)}))
    message(save(tmp_path, dict(list(state.items())[: len(state) // 2])))
    path = save(tmp_path, {"state_dict": state})
    assert "vil_small_rpb" in message(path, "MODEL.TRANSFORMER.VARIANT", "vil_small_rpb")
    for tokens in ("[0, 0, 0, 0]", "[2, 1, 1, 0]"):
        assert "stages.0.global_tokens" in message(path, "MODEL.TRANSFORMER.GLOBAL_TOKENS", tokens)
    assert Path(path).name in helpers.message(check_weights, small_config(), path, complete=True)
