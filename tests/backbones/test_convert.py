"""Official checkpoints of ViL and LIT: the format, every name and value, and errors for mismatches."""

import dataclasses

import pytest
import torch

from backbones import ConfigError, create_backbone, create_classifier
from backbones.build import VARIANTS
from backbones.convert import convert_state_dict, detect_format
from backbones.layers.position import resize_table
from tests import layouts
from tests.backbones import official_lit
from tests.backbones.helpers import assert_all_close, random_images, with_tensor, without
from tests.backbones.official import TINY, OfficialStage, official_state_dict
from tests.backbones.official_lit import TI, V2, S
from tests.golden import golden, golden_state_dict

RELATIVE, ABSOLUTE = "vil_tiny_1_1_3_1_rpb", "vil_tiny_1_1_3_1"
NAMES = {True: RELATIVE, False: ABSOLUTE}
LITS = {"lit_absolute": TI, "lit_relative": S, "litv2": V2}
HEADS = {"backbone.fpn_lateral3.weight": torch.ones(2), "head.cls_score.bias": torch.ones(3)}
HEAD_AND_NORM = {"norm.weight", "norm.bias", "head.weight", "head.bias"}


@pytest.fixture(autouse=True)
def small_variants(monkeypatch):
    for name, variant in LITS.items():
        monkeypatch.setitem(VARIANTS, name, variant)
        if name != "litv2":
            monkeypatch.setitem(VARIANTS, f"{name}_128", dataclasses.replace(variant, position_img_size=128))


def vil(**options) -> dict[str, torch.Tensor]:
    return official_state_dict(**{"relative_bias": True} | options)


def lit(name: str = "lit_relative", *, classifier: bool = False, **options) -> dict[str, torch.Tensor]:
    return official_lit.official_state_dict(LITS[name], classifier=classifier, **options)


def with_globals(*numbers: int) -> tuple[OfficialStage, ...]:
    return tuple(dataclasses.replace(stage, globals=number) for stage, number in zip(TINY, numbers, strict=True))


def loaded(create, name: str, weights: dict, options: dict | None = None) -> tuple[torch.nn.Module, object]:
    """Return the model with the converted weights in float64 and eval mode, and the report. Each name is in it once."""
    options, classifier = options or {}, create is create_classifier
    converted, report = convert_state_dict(weights, name, classifier=classifier, model_options=options)
    parts = (report.mapped, report.split, report.tied, report.dropped)
    assert {key for part in parts for key in part if key in weights} == weights.keys()
    filled = [*report.mapped.values(), *(key for keys in report.split.values() for key in keys), *report.initialized]
    assert sorted(filled) == sorted(converted) and report.resized.keys() <= converted.keys()
    with torch.device("meta"):
        model = create(name, **options).double().eval()
    model.load_state_dict(converted, strict=True, assign=True)
    return model, report


@pytest.mark.parametrize(
    "relative_bias, num_global, shared",
    [(True, (1, 1, 1, 0), True), (True, (1, 0, 2, 1), False), (False, (1, 2, 0, 1), True), (False, (0, 1, 0, 2), True)],
)
def test_every_tensor_of_vil_is_converted(relative_bias, num_global, shared):
    weights = official_state_dict(with_globals(*num_global), relative_bias=relative_bias, shared=shared)
    name, options = NAMES[relative_bias], {"global_tokens": num_global, "shared_projections": shared}
    # Official positions are for 224 pixels, so that nothing is resized.
    _, report = loaded(create_backbone, name, weights, options | {"max_img_size": 224})
    loaded(create_classifier, name, weights, options | {"num_classes": 10})
    assert not report.resized and not report.initialized and report.dropped.keys() >= HEAD_AND_NORM
    assert bool(report.tied) == (shared and relative_bias)
    if not shared:
        for official, ours in (("query", "query"), ("kv", "key_value"), ("proj", "proj")):
            key = report.mapped[f"layer3.1.attn.{official}_global.weight"]
            assert key == f"stages.2.blocks.0.attention.global_{ours}.weight"


def test_full_attention_is_converted_into_full_and_into_sliding_chunks():
    """Both attend to the same tokens if the feature map has at most two chunks per side."""
    sizes = ((1, 4, 1, 48), (1, 2, 3, 96), (9, 2, 3, 192), (1, 2, 6, 384))
    stages = tuple(OfficialStage(*size, globals=int(index < 3), full=True) for index, size in enumerate(sizes))
    weights, images = official_state_dict(stages, relative_bias=False), random_images(1, 3, 37, 54)
    full, chunks = (loaded(create_backbone, name, weights, {"max_img_size": 224}) for name in ("full_tiny", "vil_tiny"))
    assert_all_close(chunks[0](images), full[0](images), tolerance=1e-10)
    assert "layer3.3.attn.qkv.weight" in chunks[1].split and "layer3.3.attn.qkv.weight" in full[1].mapped


def test_shared_projections_fill_separate_ones():
    model, report = loaded(create_backbone, RELATIVE, vil(), {"shared_projections": False})
    attention = model.stages[2].blocks[0].attention
    assert torch.equal(attention.global_query.weight, attention.query.weight) and not report.tied


@pytest.mark.parametrize("prefix", ["module.", "module.backbone.bottom_up."])
def test_prefixes_are_removed(prefix):
    expected, _ = convert_state_dict(vil(), RELATIVE)
    converted, report = convert_state_dict({prefix + name: tensor for name, tensor in vil().items()}, RELATIVE)
    assert_all_close(converted, expected, tolerance=0)
    assert report.mapped[f"{prefix}layer1.0.proj.bias"] == "stages.0.patch_embed.proj.bias"
    assert report.summary().startswith(f"{len(report.mapped)} mapped, 0 resized")


@pytest.mark.parametrize("max_img_size, lengths", [(1333, (336, 168, 84, 42)), ((160, 90), (40, 20, 10, 5))])
def test_absolute_positions_are_resized(max_img_size, lengths):
    """The tables are for 224 pixels. 1333 pixels have 42 positions at stride 32."""
    weights = vil(relative_bias=False)
    converted, report = convert_state_dict(weights, ABSOLUTE, model_options={"max_img_size": max_img_size})
    for index, length in enumerate(lengths):
        name, source = f"stages.{index}.positions.rows", weights[f"layer{index + 1}.0.x_pos_embed"][0]
        assert torch.equal(converted[name], resize_table(source, (length,)))
        assert report.resized[name] == (tuple(source.shape), (length, source.shape[1]))
    cols, source = converted["stages.0.positions.cols"], weights["layer1.0.y_pos_embed"][0]
    assert torch.equal(cols, resize_table(source, (len(cols),)))
    assert len(cols) == (336 if max_img_size == 1333 else 24)


def test_window_bias_is_resized_to_another_window():
    converted, report = convert_state_dict(vil(), RELATIVE, model_options={"chunk_size": 5})
    source = vil()["layer2.1.attn.local_relative_position_bias_table"].unflatten(0, (27, 27))
    name = "stages.1.blocks.0.attention.relative_bias.table"
    assert torch.equal(converted[name], resize_table(source, (19, 19)).flatten(0, 1))
    assert report.resized[name] == ((729, 3), (361, 3))


@pytest.mark.parametrize("chunk_size", [5, 8])
def test_segment_bias_is_never_resized(chunk_size):
    """Offsets share rows of the table. For w = 5 it has 121 rows, which look like a square table."""
    model = create_backbone("ls_tiny", chunk_size=chunk_size, out_features=("stage1",))
    table = model.stages[0].blocks[0].attention.relative_bias.table.detach()
    with pytest.raises(ConfigError, match="relative_position_bias_table"):
        convert_state_dict({"layer1.1.attn.local_relative_position_bias_table": table}, "ls_tiny")


def test_a_performer_from_a_partial_one_gets_random_features():
    """ViL Table 8: full stages have the parameters of performer stages, except for the features."""
    weights = golden_state_dict(golden("performer_tiny_ape_cls"))
    features = [key for key in weights if key.startswith(("layer3", "layer4")) and key.endswith("projection_matrix")]
    for key in features:
        del weights[key]
    model, report = loaded(create_backbone, "performer_tiny", weights, {"max_img_size": 224})
    blocks = [f"stages.2.blocks.{block}" for block in range(9)] + ["stages.3.blocks.0"]
    assert report.initialized.keys() == {f"{block}.attention.features" for block in blocks}
    assert len(features) == 10 and model.stages[3].blocks[0].attention.features.ne(0).any()


@pytest.mark.parametrize("name", LITS)
def test_every_tensor_of_lit_is_converted(name):
    for create, options in ((create_backbone, {}), (create_classifier, {"num_classes": 10, "img_size": 64})):
        _, report = loaded(create, name, lit(name, classifier=create is create_classifier), options)
        assert not report.resized and not report.initialized and not report.tied


def test_a_lit_classifier_gives_a_backbone_without_its_output_norms():
    model, report = loaded(create_backbone, "lit_relative", lit(classifier=True))
    norms = {f"output_norms.stage{number}.{leaf}" for number in (2, 3, 4) for leaf in ("weight", "bias")}
    assert report.initialized.keys() == norms
    assert {key for key in report.dropped if "relative_position_index" not in key} == HEAD_AND_NORM
    assert all(model.state_dict()[key].eq(key.endswith("weight")).all() for key in norms)


def test_a_lit_ti_classifier_gives_a_backbone_without_its_global_token():
    weights = lit("lit_absolute", classifier=True)
    model, report = loaded(create_backbone, "lit_absolute", weights)
    assert report.dropped.keys() == {"cls_token", "pos_embed4[:, 0]"} | HEAD_AND_NORM and not report.initialized
    assert torch.equal(model.stages[3].positions.table.flatten(0, 1), weights["pos_embed4"][0, 1:])


@pytest.mark.parametrize(
    "name, trained, size",
    [
        ("lit_absolute", 64, (96, 64)),
        ("lit_relative", 64, (40, 100)),
        # In stage 4, there are as many offsets for 27 x 3 as for 9 x 9.
        ("lit_relative", 160, (448, 64)),
    ],
)
def test_lit_tables_are_resized_as_in_the_model(name, trained, size):
    """If the image has the size of the new tables, resizing in the file and in the model is the same."""
    weights, images = lit(name, classifier=True, img_size=trained), random_images(1, 3, *size)
    as_trained, model = (
        loaded(create_classifier, name, weights, {"num_classes": 10, "img_size": img_size})
        for img_size in (trained, size)
    )
    torch.testing.assert_close(model[0](images), as_trained[0](images), atol=1e-9, rtol=1e-9)
    assert len(model[1].resized) == (4 if name == "lit_absolute" else 3) and not as_trained[1].resized
    weights, images = lit(name), random_images(1, 3, 128, 128)
    model, report = loaded(create_backbone, f"{name}_128", weights)
    assert_all_close(model(images), loaded(create_backbone, name, weights)[0](images), tolerance=1e-9)
    table = "stages.3.positions.table" if name == "lit_absolute" else "stages.3.blocks.0.attention.relative_bias.table"
    assert report.resized[table] == (((2, 2, 16), (4, 4, 16)) if name == "lit_absolute" else ((9, 6), (49, 6)))


def test_batch_statistics_go_into_other_norms():
    images = random_images(1, 3, 37, 50)
    expected = loaded(create_backbone, "lit_relative", lit())[0](images)
    for norm, dropped in (("FrozenBN", 3), ("SyncBN", 0)):
        model, report = loaded(create_backbone, "lit_relative", lit(), {"norm": norm})
        assert_all_close(model(images), expected, tolerance=1e-9)
        assert len(report.dropped) == dropped


def test_uniform_merging_of_pvt_has_the_names_of_its_embedding():
    weights = {}
    for key, tensor in lit("lit_absolute").items():
        if not any(part in key for part in ("dconv", "running", "num_batches_tracked")):
            weights[key.replace("norm_layer", "norm")] = tensor
    for number, (c, d) in enumerate(((6, 10), (10, 12), (12, 16)), start=2):
        weights |= {f"patch_embed{number}.proj.weight": random_images(d, c, 2, 2)}
        weights |= {f"patch_embed{number}.proj.bias": random_images(d)}
    model, _ = loaded(create_backbone, "lit_absolute", weights, {"token_merging": "uniform"})
    assert torch.equal(model.stages[2].patch_embed.proj.weight, weights["patch_embed3.proj.weight"])
    assert torch.equal(model.stages[3].patch_embed.norm.bias, weights["patch_embed4.norm.bias"])


BIAS = "layers.3.blocks.0.attn.relative_position_bias_table"


@pytest.mark.parametrize(
    "weights, change, name, options, hint",
    [
        (vil, with_tensor("epoch", 1), RELATIVE, {}, "epoch"),
        (vil, with_tensor("layer1.0.surprise", 1), RELATIVE, {}, "layer1.0.surprise"),
        (vil, with_tensor("layer1.0.proj.bias", 48, value=torch.nan), RELATIVE, {}, "layer1.0.proj.bias"),
        (vil, with_tensor("layer1.0.proj.bias", 48, dtype=torch.int32), RELATIVE, {}, "layer1.0.proj.bias"),
        (vil, without("layer3.2.mlp.fc1.bias"), RELATIVE, {}, "mlp.fc1.bias"),
        (vil, dict, "vil_small_1_1_9_1_rpb", {}, "layer1.0.cls_token"),
        (vil, dict, ABSOLUTE, {}, "relative_position_bias"),
        (vil, dict, "vil_tiny_rpb", {}, "stages.2.blocks.3"),
        (vil, dict, "vil_tiny_1_1_9_1_rpb", {"out_features": ("stage3",)}, "layer4"),
        (lambda: vil(stages=with_globals(2, 1, 1, 0)), dict, RELATIVE, {}, "cls_token"),
        (lambda: vil(shared=False), dict, RELATIVE, {}, "shared_projections=False"),
        (vil, dict, RELATIVE, {"max_image_size": 224}, "max_img_size"),
        (vil, dict, "cvt_ls_13", {}, "cvt_ls_13"),
        (vil, dict, "lit_relative", {}, "layer1"),
        (lambda: lit("lit_absolute"), without("pos_embed2"), "lit_absolute", {}, "stages.1.positions.table"),
        (lambda: lit("lit_absolute"), with_tensor("pos_embed3", 1, 17, 12), "lit_absolute", {}, "pos_embed3"),
        (lambda: lit("lit_absolute"), with_tensor("pos_embed4", 1, 4, 16), "lit_absolute", {}, "pos_embed4"),
        (lambda: lit("lit_absolute"), dict, "lit_absolute", {"token_merging": "uniform"}, "patch_embed2"),
        (lit, with_tensor("layers.3.downsample.dconv.weight", 1), "lit_relative", {}, "layers.3.downsample"),
        # Only a classifier has no output norms.
        (lit, without("norm2.weight"), "lit_relative", {}, "output_norms.stage3.weight"),
        (lit, with_tensor(BIAS, 10, 6), "lit_relative", {}, BIAS),
        (lit, with_tensor(BIAS, 9, 5), "lit_relative", {}, BIAS),
        (lit, dict, "lit_absolute", {}, "layers.0"),
        (lit, dict, "litv2", {}, "attn.proj"),
        (lambda: lit("litv2"), dict, "lit_relative", {}, "dwconv"),
        (lambda: lit("litv2"), without("layers.2.blocks.0.attn.h_"), "litv2", {}, "attention.high_qkv"),
        (lambda: vil(num_classes=5), dict, RELATIVE, {"num_classes": 10}, "head.weight"),
        (lambda: lit("lit_absolute"), dict, "lit_absolute", {"num_classes": 10}, "stages.3.global_tokens"),
        (lit, dict, "lit_relative", {"num_classes": 10}, "norm1.weight"),
    ],
)
def test_mismatched_weights_raise(weights, change, name, options, hint):
    classifier = "num_classes" in options
    with pytest.raises(ConfigError, match=hint) as caught:
        convert_state_dict(change(weights()), name, classifier=classifier, model_options=options)
    assert "\n" not in str(caught.value)


LONG_SHORT = {"layer1.1.attn.to_dynamic_projection.weight": torch.ones(8, 48)}
VIL_DETECTION = "VisionLongformerForObjectDetection"
MMDETECTION, MMSEGMENTATION = (layouts.mmdetection_heads(), layouts.mmdetection_heads(segmentor=True))


@pytest.mark.parametrize(
    "project, weights, wrap, heads",
    [
        ("vision-longformer", vil, layouts.vision_longformer, None),
        ("vision-longformer", vil, dict, None),
        ("transformer-ls", lambda: vil() | LONG_SHORT, layouts.vision_longformer, None),
        ("LIT", lambda: lit("lit_absolute", classifier=True), layouts.lit_classifier, None),
        ("LIT", lambda: lit(classifier=True), layouts.lit_classifier, None),
        (VIL_DETECTION, vil, layouts.detectron2_detector, HEADS),
        (VIL_DETECTION, vil, layouts.detectron2_detector, {}),
        ("LIT mmdetection", lambda: lit("lit_absolute"), layouts.mmdetection, MMDETECTION),
        ("LIT mmsegmentation", lit, layouts.mmdetection, MMSEGMENTATION),
    ],
)
def test_formats_of_official_checkpoints(project, weights, wrap, heads):
    found = detect_format(wrap(weights()) if heads is None else wrap(weights(), heads))
    assert (found.project, found.classifier) == (project, heads is None)
    assert_all_close(found.backbone, weights(), tolerance=0)
    assert_all_close(found.detector, heads or {}, tolerance=0)


def test_unusual_contents():
    contents = layouts.vision_longformer(vil())
    contents["net"]["module.calls"] = 3
    assert_all_close(detect_format(contents).backbone, vil(), tolerance=0)
    weights = {name: tensor for name, tensor in vil().items() if name not in HEAD_AND_NORM}
    assert not detect_format({"model": weights}).classifier


def test_other_checkpoints_have_no_official_format():
    ours, one = create_backbone(ABSOLUTE).state_dict(), torch.ones(1)
    for state_dict in (
        ours,
        {f"backbone.{name}": tensor for name, tensor in ours.items()},
        {f"backbone.bottom_up.net.{name}": tensor for name, tensor in ours.items()} | HEADS,
        {"layer1.0.conv1.weight": one, "layer1.0.bn1.bias": one, "fc.bias": one},
        {"backbone.bottom_up.res2.0.conv1.weight": one},
        {"blocks.0.attn.qkv.weight": one, "patch_embed.proj.weight": one},
    ):
        assert detect_format({"model": state_dict}) is None and detect_format(state_dict) is None
