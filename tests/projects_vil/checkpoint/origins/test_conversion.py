"""Official checkpoints into detectors: which tensor goes where, what is resized and how, and what becomes of heads."""

import dataclasses
import shlex

import numpy as np
import pytest
import torch
from detectron2.data import MetadataCatalog
from detectron2.modeling import build_model

from backbones import InputError, create_backbone
from backbones.convert import recognise
from backbones.variants import VARIANTS
from projects_vil import load_config
from projects_vil.checkpoint import PROVENANCE_KEY, Checkpointer, Provenance, convert_file
from projects_vil.checkpoint.origins.conversion import BACKBONE_PREFIX, Conversion, convert_official, expected_heads
from tests import wrapping
from tests.backbones import official_lit
from tests.backbones.helpers import random_images
from tests.backbones.official import TINY, OfficialStage, official_forward, official_state_dict
from tests.projects_vil.helpers import ROOT
from tests.selection import slow_except

NAME = "vil_tiny_1_1_3_1_rpb"
NARROW = ["MODEL.FPN.OUT_CHANNELS", "16", "MODEL.ROI_BOX_HEAD.FC_DIM", "8", "MODEL.ROI_MASK_HEAD.CONV_DIM", "8"]


def partial_stages(name: str) -> tuple[OfficialStage, ...]:
    """The official classifier of that size: full attention in the last two stages."""
    return tuple(
        OfficialStage(s.depth, s.patch_size, s.heads, s.dim, s.global_tokens, full=index >= 2)
        for index, s in enumerate(VARIANTS[name].stages)
    )


PARTIAL = partial_stages("vil_tiny_1_1_3_1_rpb")
detectors = pytest.mark.parametrize("detector", slow_except(["retinanet", "mask_rcnn"], ["retinanet"]))


def model_of(detector: str, variant: str = NAME, *overrides: str) -> torch.nn.Module:
    """As this project's configs have it, narrower; FPN and heads have the names of the real one."""
    keys = ["MODEL.TRANSFORMER.NAME", variant, "MODEL.DEVICE", "cpu", *NARROW, *overrides]
    torch.manual_seed(0)
    return build_model(load_config(ROOT / f"configs/{detector}/vil_tiny_1x.yaml", keys)).eval()


def heads_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state_dict = model.state_dict()
    return {name: torch.randn_like(t) for name, t in state_dict.items() if not name.startswith(BACKBONE_PREFIX)}


def converted(contents: dict, variant: str = NAME, **options) -> Conversion:
    return convert_official(recognise(contents), variant, **options)


def vil_detector(model: torch.nn.Module, **changes) -> dict:
    return wrapping.detectron2_detector(official_state_dict(relative_bias=True), heads_of(model) | changes)


# -- official ViL detectors ------------------------------------------------------------------------


@detectors
def test_an_official_vil_detector_becomes_a_whole_one(detector):
    model = model_of(detector)
    contents = vil_detector(model)
    conversion = converted(contents)
    state_dict = conversion.contents["model"]
    model.load_state_dict(state_dict, strict=True)
    for name in heads_of(model):
        assert torch.equal(state_dict[name], contents["model"][name]), name
        assert conversion.report.mapped[name] == name
    backbone = model.backbone.bottom_up.net.double()
    images = random_images(1, 3, 37, 54)
    expected, _ = official_forward(official_state_dict(relative_bias=True), images)
    for stage, output in backbone(images).items():
        torch.testing.assert_close(output, expected[stage], atol=1e-6, rtol=1e-6)


@detectors
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_model_weights_takes_the_file(tmp_path, detector, suffix):
    """All of the model, where the file must fill it: to evaluate an official detector."""
    model, output = model_of(detector), tmp_path / f"ours{suffix}"
    torch.save(vil_detector(model), tmp_path / "official.pth")
    conversion = convert_file(tmp_path / "official.pth", output, NAME)
    keys = ["MODEL.TRANSFORMER.NAME", NAME, *NARROW]
    cfg = load_config(ROOT / f"configs/{detector}/vil_tiny_1x.yaml", keys)
    Checkpointer(model, cfg=cfg, complete=True).load(str(output))
    state_dict = model.state_dict()
    assert state_dict.keys() == conversion.contents["model"].keys()
    for name, tensor in conversion.contents["model"].items():
        assert torch.equal(state_dict[name], tensor.to(state_dict[name].dtype)), name


@pytest.mark.parametrize(
    "detector, variant, features",
    [
        ("retinanet", "vil_small", None),
        ("mask_rcnn", "vil_base_deep_rpb", None),
        ("retinanet", "vil_tiny_1_10_1_rpb", "['stage1', 'stage2', 'stage3']"),
    ],
)
def test_names_of_fpn_and_heads_are_those_of_the_configs(detector, variant, features):
    overrides = ["MODEL.DEVICE", "meta", *(["MODEL.FPN.IN_FEATURES", features] if features else [])]
    with torch.device("meta"):
        names = model_of(detector, variant, *overrides).state_dict()
    heads = {name: tensor for name, tensor in names.items() if not name.startswith(BACKBONE_PREFIX)}
    assert expected_heads(heads, variant) == heads.keys()


@detectors
def test_a_backbone_for_the_official_detector_has_no_heads(detector):
    """What the official converter writes from a classifier."""
    conversion = converted(wrapping.detectron2_detector(official_state_dict(relative_bias=True)))
    assert all(name.startswith(BACKBONE_PREFIX) for name in conversion.contents["model"])
    assert Provenance.of(conversion.contents).classes is None


def test_a_detector_without_masks():
    model = model_of("mask_rcnn", NAME, "MODEL.MASK_ON", "False")
    model.load_state_dict(converted(vil_detector(model)).contents["model"], strict=True)


@detectors
def test_buffers_that_the_config_says_are_dropped(detector):
    prefix = "" if detector == "retinanet" else "proposal_generator."
    buffers = ["pixel_mean", "pixel_std", *(f"{prefix}anchor_generator.cell_anchors.{i}" for i in range(5))]
    conversion = converted(vil_detector(model_of(detector), **{name: torch.ones(3, 1, 1) for name in buffers}))
    assert all("config" in conversion.report.dropped[name] for name in buffers)
    assert not any(name in conversion.contents["model"] for name in buffers)


@pytest.mark.parametrize(
    "lost",
    ["head.cls_score.bias", "backbone.fpn_lateral3.weight", "backbone.top_block.p7.weight", "head.bbox_subnet.4.bias"],
)
def test_a_head_that_is_not_whole(lost):
    contents = vil_detector(model_of("retinanet"))
    del contents["model"][lost]
    with pytest.raises(InputError, match=f"nothing fills {lost}"):
        converted(contents)


@pytest.mark.parametrize("surprise", ["head.surprise.weight", "backbone.fpn_lateral2.weight", "roi_heads.extra", "x"])
def test_a_name_of_no_head(surprise):
    with pytest.raises(InputError, match=f"no rule explains {surprise}"):
        converted(vil_detector(model_of("retinanet"), **{surprise: torch.ones(1)}))


@detectors
@pytest.mark.parametrize("num_classes, known", [(80, True), (79, False)])
def test_the_classes_of_coco_are_known(detector, num_classes, known):
    keys = ["MODEL.RETINANET.NUM_CLASSES", str(num_classes), "MODEL.ROI_HEADS.NUM_CLASSES", str(num_classes)]
    conversion = converted(vil_detector(model_of(detector, NAME, *keys)))
    provenance = Provenance.of(conversion.contents)
    assert provenance.variant == NAME and provenance.input_format.channels == "RGB"
    names = tuple(MetadataCatalog.get("coco_2017_val").thing_classes)
    assert provenance.classes == (names if known else None)


# -- LIT's detectors -------------------------------------------------------------------------------


@pytest.fixture
def small_lit(monkeypatch):
    monkeypatch.setitem(VARIANTS, "lit_absolute", official_lit.TI)
    monkeypatch.setitem(VARIANTS, "lit_relative", official_lit.S)
    return {"lit_absolute": official_lit.TI, "lit_relative": official_lit.S}


@pytest.mark.parametrize("segmentor", [False, True])
@pytest.mark.parametrize("name", ["lit_absolute", "lit_relative"])
def test_heads_of_other_code_are_dropped_with_a_reason(small_lit, name, segmentor):
    weights = official_lit.official_state_dict(small_lit[name], classifier=False)
    heads = wrapping.mmdetection_heads(segmentor)
    conversion = converted(wrapping.mmdetection(weights, heads), name)
    assert all("starts anew" in conversion.report.dropped[head] for head in heads)
    state_dict = conversion.contents["model"]
    model = create_backbone(name).double().eval()
    model.load_state_dict({key.removeprefix(BACKBONE_PREFIX): t for key, t in state_dict.items()}, strict=True)
    images = random_images(1, 3, 96, 64)
    expected, _ = official_lit.official_forward(weights, images, small_lit[name])
    for stage, output in model(images).items():
        torch.testing.assert_close(output, expected[stage], atol=1e-9, rtol=1e-9)


def test_an_unknown_part_of_an_mmdetection_file(small_lit):
    weights = official_lit.official_state_dict(official_lit.S, classifier=False)
    with pytest.raises(InputError, match="no rule explains surprise.weight"):
        converted(wrapping.mmdetection(weights, {"surprise.weight": torch.ones(1)}), "lit_relative")


# -- what is resized -------------------------------------------------------------------------------


def linear(table: np.ndarray, size: int) -> np.ndarray:
    """Along the first axis; half-pixel centres, ends held."""
    place = np.clip((np.arange(size) + 0.5) * len(table) / size - 0.5, 0, len(table) - 1)
    low = np.minimum(place.astype(int), len(table) - 1)
    high, part = np.minimum(low + 1, len(table) - 1), place - low
    part = part.reshape(-1, *[1] * (table.ndim - 1))
    return table[low] * (1 - part) + table[high] * part


def cubic(table: np.ndarray, size: int) -> np.ndarray:
    """Along the first axis: Keys' kernel with a = -0.75, half-pixel centres, ends held."""
    place, a = (np.arange(size) + 0.5) * len(table) / size - 0.5, -0.75
    result = 0.0
    for tap in range(-1, 3):
        index = np.floor(place).astype(int) + tap
        x = np.abs(place - index)
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


def test_absolute_positions_of_a_classifier_for_800_x_1333():
    """Bilinear, as ViL's: 1333 pixels are 42 places of 32, both ways, since images lie and stand."""
    weights = official_state_dict(relative_bias=False)
    conversion = converted(wrapping.vision_longformer(weights), "vil_tiny_1_1_3_1", img_size=(800, 1333))
    state_dict = conversion.contents["model"]
    for index, (rows, cols) in enumerate([(336, 336), (168, 168), (84, 84), (42, 42)]):
        for axis, ours, length in (("x", "rows", rows), ("y", "cols", cols)):
            table = state_dict[f"{BACKBONE_PREFIX}stages.{index}.positions.{ours}"].numpy()
            source = weights[f"layer{index + 1}.0.{axis}_pos_embed"][0].numpy()
            np.testing.assert_allclose(table, linear(source, length), atol=1e-12)
            shapes = conversion.report.resized[f"stages.{index}.positions.{ours}"]
            assert shapes == (source.shape, (length, source.shape[1]))
    model = create_backbone("vil_tiny_1_1_3_1", **conversion.options)
    model.load_state_dict({key.removeprefix(BACKBONE_PREFIX): t for key, t in state_dict.items()}, strict=True)


def test_absolute_positions_of_a_classifier_by_default():
    weights = official_state_dict(relative_bias=False)
    state_dict = converted(wrapping.vision_longformer(weights), "vil_tiny_1_1_3_1").contents["model"]
    source = weights["layer3.0.y_pos_embed"][0].numpy()
    table = state_dict[f"{BACKBONE_PREFIX}stages.2.positions.cols"].numpy()
    np.testing.assert_allclose(table, linear(source, 84), atol=1e-12)


@pytest.mark.parametrize("img_size, sizes", [((96, 160), ((10, 10), (5, 5))), ((64, 64), ((4, 4), (2, 2)))])
def test_relative_tables_of_lit_are_resized_bicubically(small_lit, img_size, sizes):
    weights = official_lit.official_state_dict(official_lit.S, classifier=True)
    conversion = converted(wrapping.lit_classifier(weights), "lit_relative", img_size=img_size)
    state_dict = conversion.contents["model"]
    for stage, size in zip((2, 3), sizes, strict=True):
        source = square(weights[f"layers.{stage}.blocks.0.attn.relative_position_bias_table"])
        table = state_dict[f"{BACKBONE_PREFIX}stages.{stage}.blocks.0.attention.relative_bias.table"]
        grid = tuple(2 * side - 1 for side in size)
        np.testing.assert_allclose(table.view(*grid, -1).numpy(), both_axes(cubic, source, grid), atol=1e-9)
    assert bool(conversion.report.resized) == (img_size != (64, 64))
    model = create_backbone("lit_relative", **conversion.options)
    model.load_state_dict({key.removeprefix(BACKBONE_PREFIX): t for key, t in state_dict.items()}, strict=True)


def test_positions_of_lit_ti_are_resized_bilinearly(small_lit):
    weights = official_lit.official_state_dict(official_lit.TI, classifier=True)
    conversion = converted(wrapping.lit_classifier(weights), "lit_absolute", img_size=(96, 160))
    source = weights["pos_embed3"][0].view(4, 4, -1).numpy()
    table = conversion.contents["model"][f"{BACKBONE_PREFIX}stages.2.positions.table"].numpy()
    np.testing.assert_allclose(table, both_axes(linear, source, (10, 10)), atol=1e-9)


@pytest.mark.parametrize("name", [NAME, "vil_small_rpb"])
def test_relative_bias_of_full_attention_becomes_that_of_sliding_chunks(name):
    """As the official detection code converts classifiers of which the last two stages have full attention.

    At 224 pixels stage 3 has 14 x 14 tokens, whose 27 x 27 offsets are those of a chunk's neighbourhood; stage 4 has
    7 x 7, and its 13 x 13 offsets are stretched, bilinearly, to 27 x 27.
    """
    stages = partial_stages(name)
    weights = official_state_dict(stages, relative_bias=True)
    conversion = converted(wrapping.vision_longformer(weights), name)
    state_dict = conversion.contents["model"]
    for number in range(1, 2 * stages[2].depth, 2):
        ours = f"{BACKBONE_PREFIX}stages.2.blocks.{number // 2}.attention"
        theirs = f"layer3.{number}.attn"
        assert torch.equal(
            state_dict[f"{ours}.relative_bias.table"], weights[f"{theirs}.local_relative_position_bias_table"]
        )
        for leaf in ("weight", "bias"):
            joined = weights[f"{theirs}.qkv.{leaf}"]
            assert torch.equal(state_dict[f"{ours}.query.{leaf}"], joined[: stages[2].dim])
            assert torch.equal(state_dict[f"{ours}.key_value.{leaf}"], joined[stages[2].dim :])
    source = square(weights["layer4.1.attn.local_relative_position_bias_table"])
    assert source.shape[:2] == (13, 13)
    key = "stages.3.blocks.0.attention.relative_bias.table"
    table = state_dict[f"{BACKBONE_PREFIX}{key}"].view(27, 27, -1).numpy()
    np.testing.assert_allclose(table, both_axes(linear, source, (27, 27)), atol=1e-12)
    assert conversion.report.resized == {key: ((169, stages[3].heads), (729, stages[3].heads))}
    assert conversion.report.split["layer4.1.attn.qkv.weight"]


def test_sliding_chunks_compute_what_full_attention_did_up_to_stage_3():
    """On a map of 14 x 14 tokens or less, a chunk and its neighbours see all of it."""
    weights = official_state_dict(PARTIAL, relative_bias=True)
    state_dict = converted(wrapping.vision_longformer(weights)).contents["model"]
    model = create_backbone(NAME).double().eval()
    model.load_state_dict({key.removeprefix(BACKBONE_PREFIX): t for key, t in state_dict.items()}, strict=True)
    images = random_images(1, 3, 37, 54)
    expected, _ = official_forward(
        weights | {"layer4.1.attn.local_relative_position_bias_table": ZEROS}, images, PARTIAL
    )
    maps = model(images)
    for stage in ("stage1", "stage2", "stage3"):
        torch.testing.assert_close(maps[stage], expected[stage], atol=1e-10, rtol=1e-10)


ZEROS = torch.zeros(27**2, 6, dtype=torch.float64)


# -- options that a checkpoint has and its variant has not -----------------------------------------


def test_global_tokens_and_separate_projections_are_found():
    stages = tuple(dataclasses.replace(stage, globals=n) for stage, n in zip(TINY, (1, 2, 1, 1), strict=True))
    weights = official_state_dict(stages, relative_bias=True, shared=False)
    conversion = converted(wrapping.vision_longformer(weights))
    options = {"global_tokens": [1, 2, 1, 1], "shared_projections": False}
    assert conversion.options == options
    assert Provenance.of(conversion.contents).options == options
    keys = shlex.split(conversion.lines()[-1].removeprefix("to be loaded with "))
    node = load_config(ROOT / "configs/retinanet/vil_tiny_1x.yaml", keys).MODEL.TRANSFORMER
    assert node.GLOBAL_TOKENS == [1, 2, 1, 1] and node.SHARED_PROJECTIONS is False
    state_dict = conversion.contents["model"]
    model = create_backbone(NAME, **options).double().eval()
    model.load_state_dict({key.removeprefix(BACKBONE_PREFIX): t for key, t in state_dict.items()}, strict=True)
    images = random_images(1, 3, 37, 54)
    expected, _ = official_forward(weights, images, stages)
    for stage, output in model(images).items():
        torch.testing.assert_close(output, expected[stage], atol=1e-10, rtol=1e-10)


def test_full_stages_with_fewer_global_tokens():
    """As the official partial models with global memory: 256 in the first stages, one and none in the full ones."""
    stages = tuple(
        OfficialStage(s.depth, s.patch_size, s.heads, s.dim, globals=n, full=True)
        for s, n in zip(VARIANTS["full_tiny"].stages, (2, 2, 1, 0), strict=True)
    )
    weights = official_state_dict(stages, relative_bias=False, img_size=64)
    assert converted(wrapping.vision_longformer(weights), "full_tiny").options == {"global_tokens": [2, 2, 1, 0]}
    partial = converted(wrapping.vision_longformer(weights), "full_tiny", img_size=(64, 64))
    assert partial.options["global_tokens"] == [2, 2, 1, 0] and not partial.report.resized


def test_a_lost_global_token_is_an_error():
    weights = official_state_dict(relative_bias=True)
    del weights["layer2.0.cls_token"]
    with pytest.raises(InputError, match="nothing fills stages.1.global_tokens"):
        converted(wrapping.vision_longformer(weights))


# -- the report ------------------------------------------------------------------------------------


def test_lines_are_few_and_name_what_happened():
    conversion = converted(wrapping.vision_longformer(official_state_dict(PARTIAL, relative_bias=True)))
    lines = conversion.lines()
    assert lines[0] == f"vision-longformer: {conversion.report.summary()}"
    assert "resized: stages.3.blocks.*.attention.relative_bias.table (169, 6) to (729, 6)" in lines
    assert any(
        line.startswith("dropped: ") and "classification head" in line and "and 3 more" in line for line in lines
    )
    assert len(lines) < 10 and all("\n" not in line for line in lines)


def test_json_has_every_name():
    weights = official_state_dict(PARTIAL, relative_bias=True)
    report = converted(wrapping.vision_longformer(weights)).as_json()
    listed = {name for part in ("mapped", "split", "tied", "dropped") for name in report[part]}
    assert weights.keys() <= listed
    assert report["source"] == "vision-longformer" and report[PROVENANCE_KEY]["variant"] == NAME
    assert report["resized"] and report["summary"] and report["initialised"] == {}


def test_a_classifiers_checkpoint_is_needed_for_a_classifier():
    with pytest.raises(InputError, match="no classification head"):
        converted(wrapping.detectron2_detector(official_state_dict(relative_bias=True)), classifier=True)


def test_stages_of_the_official_generator_are_those_of_the_variant():
    ours = VARIANTS[NAME].stages
    assert [(s.depth, s.patch_size, s.heads, s.dim, s.global_tokens) for s in ours] == [
        (s.depth, s.patch, s.heads, s.dim, s.globals) for s in TINY
    ]
    assert all(isinstance(stage, OfficialStage) for stage in PARTIAL)
