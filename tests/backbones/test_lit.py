"""The LIT model: the papers' equations, what its tables do, what stands still, and what it keeps in memory."""

import dataclasses

import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from backbones import ConfigError, create_backbone, create_classifier
from backbones.attention import blocked
from backbones.backbone import BackboneSettings
from backbones.build import VARIANTS
from backbones.convert import convert_state_dict
from backbones.layers.patch_embed import PatchEmbed
from backbones.layers.token_merging import DeformableTokenMerging, LinearTokenMerging, sampled_positions
from backbones.lit import LIT
from tests.backbones.families import LITS, small_classifier, small_lit
from tests.backbones.helpers import LargestTensor, assert_all_close, map_gradients, random_images
from tests.backbones.official_lit import TI, S, official_forward, official_state_dict

NAMES = {"absolute": "lit_absolute", "relative": "lit_relative"}


@pytest.fixture(autouse=True)
def small_variants(monkeypatch):
    """The small models by name, for the functions that take names."""
    for family, name in NAMES.items():
        monkeypatch.setitem(VARIANTS, name, LITS[family])


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(
    "height, width, backend",
    [(37, 50, "sdpa"), (64, 33, "reference"), (5, 9, "sdpa"), (64, 64, "sdpa"), (112, 448, "sdpa"), (448, 112, "sdpa")],
)
def test_maps_are_those_of_the_equations(family, height, width, backend):
    """From official names; (112, 448) has as many tokens as a square of 224, and another shape."""
    official = official_state_dict(LITS[family], classifier=False)
    converted, report = convert_state_dict(official, NAMES[family])
    assert not report.resized and not report.initialised
    model = create_backbone(NAMES[family], attention_backend=backend).double().eval()
    model.load_state_dict(converted, strict=True)
    images = random_images(2, 3, height, width)
    expected, _ = official_forward(official, images, LITS[family])
    assert_all_close(model(images), expected, tolerance=1e-9)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("height, width", [(50, 43), (96, 40)])
def test_logits_are_those_of_the_equations(family, height, width):
    official = official_state_dict(LITS[family], classifier=True)
    options = {"num_classes": 10, "img_size": 64}
    converted, report = convert_state_dict(official, NAMES[family], classifier=True, model_options=options)
    assert not report.resized and not report.initialised
    model = create_classifier(NAMES[family], **options).double().eval()
    model.load_state_dict(converted, strict=True)
    images = random_images(2, 3, height, width)
    _, expected = official_forward(official, images, LITS[family])
    torch.testing.assert_close(model(images), expected, atol=1e-9, rtol=1e-9)


def test_positions_are_resized_by_height_and_by_width():
    """A map of 7 x 28 has as many tokens as the table of 14 x 14: by hand, rows in pairs and columns in between."""
    with torch.random.fork_rng():
        model = LIT(TI, BackboneSettings(position_img_size=(224, 224))).double()
    positions = model.stages[2].positions
    assert positions.table.shape == (14, 14, 12)
    rows = positions.table.unflatten(0, (7, 2)).mean(dim=1)
    left = torch.cat([rows[:, :1], rows[:, :-1]], dim=1)
    right = torch.cat([rows[:, 1:], rows[:, -1:]], dim=1)
    expected = torch.stack([0.75 * rows + 0.25 * left, 0.75 * rows + 0.25 * right], dim=2).flatten(1, 2)
    torch.testing.assert_close(positions(7, 28), expected, atol=1e-12, rtol=1e-12)
    assert positions(14, 14) is positions.table


def test_what_a_classifier_has():
    absolute, relative = small_classifier("lit_absolute").backbone, small_classifier("lit_relative").backbone
    assert [stage.global_tokens is not None for stage in absolute.stages] == [False, False, False, True]
    assert [stage.positions.global_tokens is not None for stage in absolute.stages] == [False, False, False, True]
    assert not any(stage.global_tokens is not None for stage in relative.stages)
    assert not relative.output_norms
    assert not any("global" in name for name, _ in small_lit("absolute").named_parameters())
    assert list(small_lit("relative").output_norms) == ["stage2", "stage3", "stage4"]
    assert list(small_lit(out_features=("stage1", "stage3")).output_norms) == ["stage3"]
    assert not small_lit("absolute").output_norms


def test_tables_have_the_size_of_the_map():
    with torch.device("meta"):
        by_default = LIT(dataclasses.replace(S, position_img_size=800), BackboneSettings(max_img_size=(64, 64)))
        other = LIT(S, BackboneSettings(position_img_size=(250, 100)))
        absolute = LIT(TI, BackboneSettings(position_img_size=(250, 100)))
    assert [stage.blocks[0].attention.relative_bias.size for stage in by_default.stages[2:]] == [(50, 50), (25, 25)]
    assert [stage.blocks[0].attention.relative_bias.size for stage in other.stages[2:]] == [(16, 7), (8, 4)]
    tables = [tuple(stage.positions.table.shape[:2]) for stage in absolute.stages]
    assert tables == [(63, 25), (32, 13), (16, 7), (8, 4)]


def test_how_tokens_are_merged():
    types = {
        "absolute": DeformableTokenMerging,
        "relative": DeformableTokenMerging,
        "absolute_uniform": PatchEmbed,
        "relative_uniform": LinearTokenMerging,
    }
    for family, expected in types.items():
        embeddings = [stage.patch_embed for stage in small_lit(family).stages]
        assert type(embeddings[0]) is PatchEmbed and embeddings[0].patch_size == 4
        assert {type(embedding) for embedding in embeddings[1:]} == {expected}
        norms = [m for embedding in embeddings for m in embedding.modules() if isinstance(m, nn.LayerNorm)]
        assert {norm.eps for norm in norms} == {1e-5}
    frozen = small_lit("frozen")
    assert all(isinstance(stage.patch_embed.norm, FrozenBatchNorm2d) for stage in frozen.stages[1:])


def test_initial_values():
    torch.manual_seed(0)
    for name, parameter in create_backbone("lit_ti").named_parameters():
        if name.endswith("norm.weight"):
            assert parameter.eq(1).all(), name
        elif "patch_embed.offset" in name:
            assert parameter.eq(0).all(), name
        elif "patch_embed" in name:
            # A convolution's, or the bias of a norm
            assert parameter.eq(0).all() or parameter.std().item() > 0.01, name
        elif name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif parameter.numel() > 1000:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
    for name, module in create_backbone("lit_s", out_features=("stage2",)).named_modules():
        if isinstance(module, DeformableTokenMerging):
            assert module.weight.std().item() == pytest.approx((4 * 96 * 3) ** -0.5, rel=0.05), name


@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_frozen_stages_stand_still(number):
    model = small_lit(drop_path_rate=0.5).train()
    model.freeze_stages(number)
    for _ in range(2):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        gradients = map_gradients(model, random_images(8, 3, 64, 80))
        for name, gradient in gradients.items():
            if not name.startswith("output_norms") and gradient is not None:
                assert int(name.split(".")[1]) >= number, name
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]) == (int(name.split(".")[1]) < number), name
        # As a trainer does after an evaluation
        model.eval().train()
    for index, stage in enumerate(model.stages):
        assert stage.training == (index >= number)
        assert all(parameter.requires_grad == (index >= number) for parameter in stage.parameters())


def test_sampling_offsets_are_those_of_the_forward_pass():
    model, images = small_lit("absolute"), random_images(2, 3, 37, 50)
    seen = {}
    for index, stage in enumerate(model.stages):
        stage.patch_embed.register_forward_hook(lambda module, args, output, index=index: seen.update({index: args[0]}))
    offsets = model.sampling_offsets(images)
    assert {name: tuple(offset.shape) for name, offset in offsets.items()} == {
        "stage2": (2, 5, 7, 2, 2, 2),
        "stage3": (2, 3, 4, 2, 2, 2),
        "stage4": (2, 2, 2, 2, 2, 2),
    }
    assert 3 not in seen  # the last stage is not computed
    model(images)
    for index in (1, 2, 3):
        expected = model.stages[index].patch_embed.offsets(seen[index])
        torch.testing.assert_close(offsets[f"stage{index + 1}"], expected)
    positions = sampled_positions([offset[1] for offset in offsets.values()], 1, 0)
    assert positions.shape == (64, 2) and len(positions.unique(dim=0)) > 16


def test_a_new_model_samples_the_regular_grid():
    offsets = LIT(S).sampling_offsets(random_images(1, 3, 64, 96, dtype=torch.float32))
    positions = sampled_positions([offset[0] for offset in offsets.values()], 1, 2)
    assert positions.amin(dim=0).tolist() == [8, 16] and positions.amax(dim=0).tolist() == [15, 23]
    with pytest.raises(ConfigError, match="uniform merging has no offsets"):
        small_lit("absolute_uniform").sampling_offsets(random_images(1, 3, 64, 96))


@pytest.mark.parametrize("training", [True, False])
def test_a_large_map_has_no_bias_or_scores_of_all_pairs(training, monkeypatch):
    """At a reduced size: 800 x 1333 has 4200 tokens in stage 3 and groups of 2^22 scores a head."""
    groups = 2**14
    monkeypatch.setitem(blocked.BLOCK_SCORES, "cpu", groups)
    model, images = small_lit("relative").train(training), random_images(1, 3, 16 * 20, 16 * 33)
    tokens, heads = 20 * 33, 3
    with LargestTensor() as largest, torch.set_grad_enabled(training):
        features = model(images)
        if training:
            sum(feature.square().sum() for feature in features.values()).backward()
    # A group is one row of the map at least.
    group = heads * max(groups, 33 * tokens)
    others = max(images.numel(), 4 * S.stages[0].dim * 80 * 132, heads * (2 * 20 - 1) * 33 * 33)
    assert largest.nbytes / 8 <= max(group, others) < heads * tokens**2 / 2
    monkeypatch.undo()
    assert blocked.BLOCK_SCORES["cpu"] < 4200**2 / 4
