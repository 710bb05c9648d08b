"""The LIT model: position tables, token merging, sampled positions, and memory."""

import dataclasses

import pytest
import torch

from backbones.attention import cpu_blocks
from backbones.backbone import BackboneSettings
from backbones.layers.token_merging import sampled_positions
from backbones.lit import LIT
from tests.backbones.families import small_lit
from tests.backbones.helpers import LargestTensor, random_images
from tests.backbones.official_lit import TI, S


def test_positions_are_resized_by_height_and_by_width():
    """A feature map of 7 x 28 has as many tokens as the table of 14 x 14. The expected values are computed by hand."""
    model = LIT(TI, BackboneSettings(position_img_size=(224, 224))).double()
    positions = model.stages[2].positions
    assert positions.table.shape == (14, 14, 12)
    rows = positions.table.unflatten(0, (7, 2)).mean(dim=1)
    left = torch.cat([rows[:, :1], rows[:, :-1]], dim=1)
    right = torch.cat([rows[:, 1:], rows[:, -1:]], dim=1)
    expected = torch.stack([0.75 * rows + 0.25 * left, 0.75 * rows + 0.25 * right], dim=2).flatten(1, 2)
    torch.testing.assert_close(positions(7, 28), expected, atol=1e-12, rtol=1e-12)
    assert positions(14, 14) is positions.table


def test_structure_of_the_lit_variants():
    """``test_every_tensor_of_lit_is_converted`` tests the global token of LIT-Ti's classifier and the output norms."""
    assert list(small_lit(out_features=("stage1", "stage3")).output_norms) == ["stage3"]
    with torch.device("meta"):
        by_default = LIT(dataclasses.replace(S, position_img_size=800), BackboneSettings(max_img_size=(64, 64)))
        absolute = LIT(TI, BackboneSettings(position_img_size=(250, 100)))
    assert [stage.blocks[0].attention.relative_bias.size for stage in by_default.stages[2:]] == [(50, 50), (25, 25)]
    sizes = [tuple(stage.positions.table.shape[:2]) for stage in absolute.stages]
    assert sizes == [(63, 25), (32, 13), (16, 7), (8, 4)]


def test_sampling_offsets_equal_the_forward_pass():
    model, images, seen = small_lit("absolute"), random_images(2, 3, 37, 50), {}
    for index, stage in enumerate(model.stages):
        stage.patch_embed.register_forward_hook(lambda module, args, output, index=index: seen.update({index: args[0]}))
    offsets = model.sampling_offsets(images)
    shapes = {"stage2": (2, 5, 7, 2, 2, 2), "stage3": (2, 3, 4, 2, 2, 2), "stage4": (2, 2, 2, 2, 2, 2)}
    assert {name: tuple(offset.shape) for name, offset in offsets.items()} == shapes
    assert 3 not in seen  # the last stage is not computed
    model(images)
    for index in (1, 2, 3):
        expected = model.stages[index].patch_embed.offsets(seen[index])
        torch.testing.assert_close(offsets[f"stage{index + 1}"], expected)
    positions = sampled_positions([offset[1] for offset in offsets.values()], 1, 0)
    assert positions.shape == (64, 2) and len(positions.unique(dim=0)) > 16


@pytest.mark.parametrize("training", [True, False])
def test_large_map_needs_no_bias_or_scores_of_all_pairs(training, monkeypatch):
    """At a reduced size: 800 x 1333 has 4200 tokens in stage 3 and groups of 2^22 scores per head."""
    groups = 2**14
    monkeypatch.setattr(cpu_blocks, "BLOCK_SCORES", groups)
    model, images = small_lit("relative").train(training), random_images(1, 3, 16 * 20, 16 * 33)
    tokens, heads = 20 * 33, 3
    with LargestTensor() as largest, torch.set_grad_enabled(training):
        features = model(images)
        if training:
            sum(feature.square().sum() for feature in features.values()).backward()
    # A group has at least one row of the feature map.
    group = heads * max(groups, 33 * tokens)
    others = max(images.numel(), 4 * S.stages[0].dim * 80 * 132, heads * (2 * 20 - 1) * 33 * 33)
    assert largest.nbytes / 8 <= max(group, others) < heads * tokens**2 / 2
