"""Drawings of attention and of LIT's sampling positions: known weights and offsets, in pixels of the drawing."""

import cv2
import numpy as np
import pytest
import torch

from backbones import ConfigError, create_backbone
from backbones.lit import LIT, LITStage, LITVariant
from projects_vil.visualization import draw_attention, draw_offsets, inspection
from projects_vil.visualization.attention import AttentionWeights
from projects_vil.visualization.drawing import GAP, HEADER, PANEL_WIDTH
from projects_vil.visualization.inspection import sampling_positions
from tests.backbones.helpers import random_images
from tests.projects_vil.helpers import small_config
from tests.selection import slow_except

GREEN, YELLOW = (0, 255, 0), (255, 255, 0)


@pytest.fixture
def photo(tmp_path):
    """50 x 75 pixels of noise without saturated colours."""
    noise = np.random.default_rng(0).integers(60, 120, (50, 75, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / "photo.png"), noise)
    return tmp_path / "photo.png"


def draw(photo, *overrides: str, stage: int = 3, block: int = 1, point=(20, 30)):
    cfg = small_config("retinanet", *overrides)
    return draw_attention(cfg, None, photo, photo.parent / "drawn", stage=stage, block=block, point=point)


def panel(path, index: int, *, top: int = 2 * HEADER) -> np.ndarray:
    """Return a panel of one row of a drawing, without its title: RGB."""
    drawn = cv2.imread(str(path))[..., ::-1]
    left = index * (PANEL_WIDTH + GAP)
    return drawn[top:, left : left + PANEL_WIDTH]


def extent(image: np.ndarray, color: tuple[int, int, int]) -> list[int]:
    """Return top, left, bottom and right of the pixels of a colour."""
    found = np.argwhere((image == color).all(axis=2))
    return [*found.min(axis=0).tolist(), *found.max(axis=0).tolist()]


VARIANTS = [
    ("vil_tiny", 3, 4),
    ("ls_tiny", 2, 7),
    ("sra32_tiny", 2, 4),
    ("performer_tiny", 2, 4),
    ("lit_ti", 3, 6),
    ("cvt_ls_13", 2, 7),
]


@pytest.mark.parametrize("name, stage, panels", slow_except(VARIANTS, ["cvt_ls_13"]))
def test_attention_has_a_panel_for_the_image_and_each_head(photo, name, stage, panels):
    features = ["MODEL.FPN.IN_FEATURES", "['stage1', 'stage2', 'stage3']"] if name.startswith("cvt") else []
    path = draw(photo, "MODEL.TRANSFORMER.NAME", name, *features, stage=stage)
    assert path == photo.parent / f"drawn/photo_{name}_stage{stage}_block1_20_30.png"
    drawn = cv2.imread(str(path))
    rows = -(-panels // 4)
    assert drawn.shape[1] == 4 * (PANEL_WIDTH + GAP) and drawn.shape[0] > rows * 300
    for index in range(4):
        assert extent(panel(path, index), GREEN)


def test_a_window_is_enlarged_and_framed(photo):
    large = ["INPUT.MIN_SIZE_TEST", "640", "MODEL.TRANSFORMER.GLOBAL_TOKENS", "[1, 1, 1, 1]"]
    path = draw(photo, *large, stage=2, point=(0, 74))
    # Two chunks below the corner and 8 tokens left of it are 14 x 8, drawn as 16 x 16 tokens of 8 pixels, halved;
    # the line is a pixel wider than the frame.
    assert extent(panel(path, 0), YELLOW) == [0, 480 - 64 - 1, 64, 480 - 1]
    assert panel(path, 1)[:480].std() > 5


def test_colours_go_over_the_weights_on_the_image_alone(photo, monkeypatch):
    """An image of 50 x 75 pixels is padded to 64 x 96: a column of tokens covers padding alone."""
    sizes = ["INPUT.MIN_SIZE_TEST", "50", "INPUT.MAX_SIZE_TEST", "75"]
    drawn = []
    for on_padding in (0.0, 100.0):

        def weights(module, tokens, global_tokens, row, col, on_padding=on_padding):
            direct = torch.arange(4.0 * 6).reshape(4, 6).repeat(3, 1, 1) + 1
            assert tokens.shape[1:3] == (4, 6)
            direct[:, :, 5:] = on_padding
            none = direct.new_zeros(3, 0)
            return AttentionWeights(direct=direct, projected=none, spread=0 * direct, to_globals=none)

        monkeypatch.setattr(inspection, "attention_weights", weights)
        path = draw(photo, *sizes, stage=3, point=(5, 5))
        drawn.append([panel(path, index) for index in (1, 2, 3)])
    for without, with_padding in zip(*drawn, strict=True):
        np.testing.assert_array_equal(without, with_padding)
        # From the dark end of the colours to the bright one.
        assert without[:320].max() > 200


@pytest.mark.parametrize(
    "overrides, options, name",
    [
        ([], {"stage": 5}, "stage is 5"),
        ([], {"block": 4}, "block is 4"),
        ([], {"point": (50, 30)}, "point 50 30 .*photo.png"),
        ([], {"point": (0, -1)}, "point 0 -1 .*photo.png"),
        (["MODEL.TRANSFORMER.NAME", "lit_ti"], {"stage": 2}, "stage is 2"),
        (["MODEL.TRANSFORMER.NAME", "global_tiny"], {}, "stage 3"),
        (["MODEL.BACKBONE.NAME", "build_resnet_backbone"], {}, "MODEL.BACKBONE.NAME"),
    ],
)
def test_attention_that_cannot_be_drawn(photo, overrides, options, name):
    if "build_resnet_backbone" in overrides:
        overrides = [*overrides, "MODEL.RETINANET.IN_FEATURES", "['res4']", "MODEL.RESNETS.OUT_FEATURES", "['res4']"]
        overrides += ["MODEL.ANCHOR_GENERATOR.SIZES", "[[32]]"]
    with pytest.raises(ConfigError, match=name):
        draw(photo, *overrides, **options)
    assert not (photo.parent / "drawn").exists()


# -- deformable token merging ----------------------------------------------------------------------


@pytest.fixture
def small_lit() -> LIT:
    """Build a LIT in eval mode, with offsets that are zero for any image."""
    stages = (LITStage(1, 4), LITStage(1, 8), LITStage(1, 8, 2), LITStage(1, 16, 4))
    variant = LITVariant(stages, relative_bias=True, norm_eps=1e-5, output_norms=("stage2",), position_img_size=64)
    return LIT(variant).eval()


def set_offset(backbone: LIT, stage: int, y: float, x: float) -> None:
    """Set all offsets of the merging at the start of a stage, in tokens of the stage before."""
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
        ({3: (0.4, -0.4)}, (0, 0)),  # between tokens the nearest one is traced
        ({2: (0.5, 0), 3: (0, 1), 4: (1, -1)}, (2 + 16, 8 - 16)),
    ],
)
def test_known_offsets_move_all_positions(small_lit, offsets, pixels):
    for stage, offset in offsets.items():
        set_offset(small_lit, stage, *offset)
    sampled, regular = sampling_positions(small_lit, random_images(1, 3, 160, 224).float(), [(2, 3)])
    torch.testing.assert_close(sampled - regular, torch.tensor(pixels).float().expand(1, 64, 2))


@pytest.mark.parametrize(
    "name, options",
    [("vil_tiny", {}), ("lit_ti", {"merging": "uniform"}), ("lit_ti", {"out_features": ("stage1",)})],
)
def test_backbones_without_offsets(name, options):
    with pytest.raises(ConfigError):
        sampling_positions(create_backbone(name, **options), random_images(1, 3, 64, 64).float(), [(0, 0)])


@pytest.fixture
def bright_photo(tmp_path):
    cv2.imwrite(str(tmp_path / "photo.png"), np.full((96, 128, 3), 200, np.uint8))
    return tmp_path / "photo.png"


def draw_lit(photo, *overrides: str, **options):
    cfg = small_config("retinanet", "MODEL.TRANSFORMER.NAME", "lit_ti", "INPUT.MIN_SIZE_TEST", "192", *overrides)
    return draw_offsets(cfg, None, [photo], photo.parent / "drawn", **options)


@pytest.mark.parametrize("offset", [(0, 0), (1, -2)])
def test_dots_are_at_the_sampling_positions(bright_photo, monkeypatch, offset):
    def load(*args):
        model, backbone = load_model(*args)
        set_offset(backbone, 2, *offset)
        return model, backbone

    load_model = inspection.load_model
    monkeypatch.setattr(inspection, "load_model", load)
    (path,) = draw_lit(bright_photo, point=(50, 70))
    assert path == bright_photo.parent / "drawn/photo_offsets.png"
    # The image, 192 x 256 pixels enlarged to 968 x 726, and below it the panel of the token in row 3 and column 4.
    below = panel(path, 0, top=2 * HEADER + 726 + GAP + HEADER)
    top, left, bottom, right = extent(below, GREEN)
    red = ((below[:, :, 0] > 220) & (below[:, :, 1] < 90)).astype(np.uint8)
    dots = cv2.connectedComponentsWithStats(red)[3][1:, ::-1]
    scale = (bottom - top) / 32
    steps = np.arange(8) * 4 + 2
    expected = [(top + (y + 4 * offset[0]) * scale, left + (x + 4 * offset[1]) * scale) for y in steps for x in steps]
    assert len(dots) == 64 and (scale > 4) and bottom - top == right - left
    np.testing.assert_allclose(sorted(map(tuple, dots.round())), expected, atol=2)


def test_a_panel_for_each_token(bright_photo):
    (path,) = draw_lit(bright_photo, num_points=5)
    one = cv2.imread(str(path)).shape
    assert one[1] == 4 * (PANEL_WIDTH + GAP) and one[0] > 2 * PANEL_WIDTH


@pytest.mark.parametrize(
    "options, name",
    [({"num_points": 0}, "num_points is 0"), ({"point": (96, 0)}, "point 96 0 .*photo.png")],
)
def test_offsets_that_cannot_be_drawn(bright_photo, options, name):
    with pytest.raises(ConfigError, match=name):
        draw_lit(bright_photo, **options)
    assert not (bright_photo.parent / "drawn").exists()


def test_files_that_cannot_be_read_or_written(bright_photo, tmp_path):
    cfg = small_config("retinanet", "MODEL.TRANSFORMER.NAME", "lit_ti")
    for weights, images, name in (
        ("absent.pth", [bright_photo], "absent.pth"),
        (None, [tmp_path / "absent.png"], "absent.png"),
        (None, [bright_photo, tmp_path / "other/photo.jpg"], "photo_offsets.png"),
    ):
        with pytest.raises(ConfigError, match=name):
            draw_offsets(cfg, weights, images, tmp_path)
    (tmp_path / "drawn").write_text("")
    with pytest.raises(ConfigError, match=r"photo_offsets\.png"):
        draw_lit(bright_photo)
