"""Drawings of attention and of LIT's sampling positions, with known weights and offsets."""

import cv2
import numpy as np
import pytest
import torch

from backbones.backbone import BackboneSettings
from backbones.lit import LIT, LITStage, LITVariant
from projects_vil.visualization.attention import AttentionWeights
from projects_vil.visualization.inspection import draw_attention, plot_attention, plot_offsets, sampling_positions
from tests.backbones.helpers import random_images
from tests.projects_vil.helpers import message, small_config
from tests.selection import slow_except
from tests.tolerances import FLOAT32


@pytest.fixture
def photo(tmp_path):
    """50 x 75 pixels of noise."""
    cv2.imwrite(str(tmp_path / "photo.png"), np.random.default_rng(0).integers(60, 120, (50, 75, 3), dtype=np.uint8))
    return tmp_path / "photo.png"


def draw(photo, *overrides: str, stage: int = 3, block: int = 1, point=(20, 30)):
    cfg = small_config("retinanet", *overrides)
    return draw_attention(cfg, None, photo, photo.parent / "drawn", stage=stage, block=block, point=point)


VARIANTS = [("vil_tiny", 3, 1), ("ls_tiny", 2, 2), ("sra32_tiny", 2, 1), ("lit_ti", 3, 2), ("cvt_ls_13", 2, 2)]


@pytest.mark.parametrize("name, stage, rows", slow_except(VARIANTS, ["ls_tiny"]))
def test_a_drawing_has_a_panel_for_the_image_and_each_head(photo, name, stage, rows):
    features = ["MODEL.FPN.IN_FEATURES", "['stage1', 'stage2', 'stage3']"] if name.startswith("cvt") else []
    path = draw(photo, "MODEL.TRANSFORMER.VARIANT", name, *features, stage=stage)
    assert path == photo.parent / f"drawn/photo_{name}_stage{stage}_block1_20_30.png"
    assert cv2.imread(str(path)).shape == (480 * rows + 28, 4 * 480, 3)


def boxes(axes) -> list[tuple[float, ...]]:
    """Left, top, width and height of each box."""
    return [(*box.get_xy(), box.get_width(), box.get_height()) for box in axes.patches]


def test_colors_ignore_weights_on_the_padding():
    """An image of 50 x 75 pixels is padded to 64 x 96, so that one column of tokens is padding."""
    direct = torch.arange(24.0).reshape(1, 4, 6).repeat(3, 1, 1)
    direct[:, :, 5:] = 100
    attention = AttentionWeights(direct, direct[:, 0, :0], torch.zeros(3, 4, 6), direct[:, 0, :2])
    figure = plot_attention(attention, np.zeros((50, 75, 3), np.uint8), 16, (1, 2), keys="projected keys")
    image, *heads = figure.axes
    assert len(heads) == 3 and [boxes(axes) for axes in figure.axes] == [[(31.5, 15.5, 16, 16)]] * 4
    for axes in heads:
        weights = axes.images[1]
        np.testing.assert_array_equal(weights.get_array(), direct[0, :4, :5])
        assert tuple(weights.get_extent()) == (-0.5, 5 * 16 - 0.5, 4 * 16 - 0.5, -0.5)
        assert weights.get_clim() == (1, 22) and weights.get_array().mask.sum() == 1  # the weight of 0
        assert "to padding 400" in axes.get_title() and "to global tokens 1" in axes.get_title()


def test_a_window_is_enlarged_and_framed():
    direct = torch.zeros(1, 80, 120)
    direct[:, :14, 112:] = 1
    attention = AttentionWeights(direct, direct[:, 0, :0], 0 * direct, direct[:, 0, :0])
    figure = plot_attention(attention, np.zeros((640, 960, 3), np.uint8), 8, (0, 119), keys="")
    # 14 x 8 tokens of 8 pixels at a corner are drawn with a margin of 3 tokens.
    assert boxes(figure.axes[0])[0] == (960 - 88 - 0.5, -0.5, 88, 136)
    assert figure.axes[1].get_xlim() == (871.5, 959.5) and figure.axes[1].get_ylim() == (135.5, -0.5)


@pytest.mark.parametrize(
    "overrides, options, name",
    [
        ([], {"stage": 5}, "Stage 5"),
        ([], {"point": (50, 30)}, "Point 50 30 is outside"),
        (["MODEL.TRANSFORMER.VARIANT", "lit_ti"], {"stage": 2}, "stage 2"),
        (["MODEL.TRANSFORMER.VARIANT", "global_tiny"], {}, "Stage 3"),
        (["MODEL.TRANSFORMER.VARIANT", "timm:resnet18"], {}, "timm:resnet18"),
    ],
)
def test_invalid_stages_blocks_and_points(photo, overrides, options, name):
    assert name in message(draw, photo, *overrides, **options)
    assert not (photo.parent / "drawn").exists()


# Deformable token merging --------------------------------------------------------------------------------------------


@pytest.fixture
def small_lit() -> LIT:
    """Return a LIT in eval mode whose offsets are zero."""
    stages = (LITStage(1, 4), LITStage(1, 8), LITStage(1, 8, 2), LITStage(1, 16, 4))
    variant = LITVariant(stages, relative_bias=True, norm_eps=1e-5, output_norms=("stage2",), position_img_size=64)
    return LIT(variant, BackboneSettings()).eval()


def set_offset(backbone: LIT, stage: int, y: float, x: float) -> None:
    """Set all offsets of the token merging at the start of a stage, in tokens of the previous stage."""
    with torch.no_grad():
        backbone.stages[stage - 1].patch_embed.offset.bias.copy_(torch.tensor([y, x] * 4))


def test_without_offsets_positions_are_a_regular_grid(small_lit):
    # 96 x 160 pixels are 3 x 5 tokens of the last stage.
    tokens = [(row, col) for row in range(3) for col in range(5)]
    sampled, regular = sampling_positions(small_lit, random_images(1, 3, 96, 160).float(), tokens)
    assert sampled.shape == (15, 64, 2) and torch.equal(sampled, regular)
    for (row, col), positions in zip(tokens, sampled, strict=True):
        grid = {(32 * row + y + 1.5, 32 * col + x + 1.5) for y in range(0, 32, 4) for x in range(0, 32, 4)}
        assert set(map(tuple, positions.tolist())) == grid


@pytest.mark.parametrize(
    "offsets, pixels",
    [
        ({2: (0.25, -1.5)}, (1, -6)),
        ({4: (-1, 2)}, (-16, 32)),
        ({3: (0.4, -0.4)}, (0, 0)),  # a position between tokens is traced to the nearest token
        ({2: (0.5, 0), 3: (0, 1), 4: (1, -1)}, (2 + 16, 8 - 16)),
    ],
)
def test_known_offsets_move_all_positions(small_lit, offsets, pixels):
    for stage, offset in offsets.items():
        set_offset(small_lit, stage, *offset)
    images = random_images(1, 3, 160, 224).float()
    sampled, regular = sampling_positions(small_lit, images, [(2, 3)])
    torch.testing.assert_close(sampled - regular, torch.tensor(pixels).float().expand(1, 64, 2), **FLOAT32)
    figure = plot_offsets(small_lit, images, np.zeros((160, 224, 3), np.uint8), [(70, 100)])
    assert len(figure.axes) == 2
    for axes in figure.axes:
        assert boxes(axes) == [(95.5, 63.5, 32, 32)]
        torch.testing.assert_close(torch.tensor(axes.lines[0].get_xydata()).flip(1).float(), sampled[0], **FLOAT32)
