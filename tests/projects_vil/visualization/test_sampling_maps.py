"""Sampling positions of known offsets, in pixels and as drawn."""

import cv2
import numpy as np
import pytest
import torch

from backbones import InputError, create_backbone
from backbones.lit import LIT
from backbones.variants import LITStage, LITVariant
from projects_vil.visualization import draw_offsets
from projects_vil.visualization.inspection import SeenImage
from projects_vil.visualization.sampling_maps import regular_field, sampling_positions
from tests.backbones.helpers import random_images
from tests.projects_vil.helpers import small_config

LIT_TI = ("MODEL.TRANSFORMER.NAME", "lit_ti")


@pytest.fixture
def small_lit() -> LIT:
    """In eval mode, with offsets that are zero whatever the image is."""
    stages = (LITStage(1, 4), LITStage(1, 8), LITStage(1, 8, 2), LITStage(1, 16, 4))
    variant = LITVariant(stages, relative_bias=True, norm_eps=1e-5, output_norms=("stage2",), position_img_size=64)
    return LIT(variant).eval()


def shift(backbone: LIT, stage: int, y: float, x: float) -> None:
    """Let the merging at the start of a stage move all its positions, in tokens of the stage before."""
    with torch.no_grad():
        backbone.stages[stage - 1].patch_embed.offset.bias.copy_(torch.tensor([y, x] * 4))


def places(height: int, width: int) -> list[tuple[int, int]]:
    return [(row, col) for row in range(height) for col in range(width)]


def test_without_offsets_positions_are_the_regular_grid_of_the_field(small_lit):
    # 96 x 160 pixels are 3 x 5 places.
    sampled, regular = sampling_positions(small_lit, random_images(1, 3, 96, 160).float(), places(3, 5))
    assert sampled.shape == (15, 64, 2) and torch.equal(sampled, regular)
    for (row, col), positions in zip(places(3, 5), sampled, strict=True):
        top, left, bottom, right = regular_field(small_lit, row, col)
        assert (top, left, bottom, right) == (32 * row, 32 * col, 32 * row + 32, 32 * col + 32)
        grid = {(y + 1.5, x + 1.5) for y in range(top, bottom, 4) for x in range(left, right, 4)}
        assert set(map(tuple, positions.tolist())) == grid


@pytest.mark.parametrize(
    "stage, offset, pixels",
    [(2, (0.25, -1.5), (1, -6)), (3, (1, -1), (8, -8)), (4, (-1, 2), (-16, 32)), (3, (0.4, -0.4), (0, 0))],
)
def test_a_known_offset_moves_all_positions(small_lit, stage, offset, pixels):
    """Those of stages 3 and 4 by whole tokens: what lies between them is traced on through the nearest one."""
    shift(small_lit, stage, *offset)
    sampled, regular = sampling_positions(small_lit, random_images(1, 3, 160, 224).float(), [(2, 3)])
    torch.testing.assert_close(sampled - regular, torch.tensor(pixels).float().expand(1, 64, 2))


def test_offsets_of_all_stages_add_up(small_lit):
    for stage, offset in ((2, (0.5, 0)), (3, (0, 1)), (4, (1, -1))):
        shift(small_lit, stage, *offset)
    sampled, regular = sampling_positions(small_lit, random_images(1, 3, 160, 224).float(), [(2, 3)])
    torch.testing.assert_close(sampled - regular, torch.tensor([2.0 + 16, 8 - 16]).expand(1, 64, 2))


def test_a_backbone_that_ends_earlier():
    backbone = create_backbone("lit_ti", out_features=("stage3",)).eval()
    sampled, _ = sampling_positions(backbone, random_images(1, 3, 64, 96).float(), [(1, 2)])
    assert sampled.shape == (1, 16, 2) and regular_field(backbone, 1, 2) == (16, 32, 32, 48)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("vil_tiny", {}, "ViL has no deformable token merging: only LIT has"),
        ("lit_ti", {"merging": "uniform"}, "uniform merging has no offsets"),
        ("lit_ti", {"out_features": ("stage1",)}, "ends with stage 1, which merges no tokens"),
    ],
)
def test_backbones_without_offsets(name, options, message):
    with pytest.raises(InputError, match=message):
        sampling_positions(create_backbone(name, **options), random_images(1, 3, 64, 64).float(), [(0, 0)])


@pytest.mark.parametrize("point, expected", [((0, 0), (0, 0)), ((49, 74), (95, 143)), ((25, 37), (48, 72))])
def test_pixels_of_the_file_in_the_image_as_it_is_seen(point, expected):
    image = SeenImage("photo.png", (50, 75), np.zeros((96, 144, 3), np.uint8), torch.zeros(1, 3, 96, 160))
    found = image.find(point)
    assert all(abs(ours - theirs) <= 1 for ours, theirs in zip(found, expected, strict=True))
    assert found[0] < 96 and found[1] < 144


# -- drawing ---------------------------------------------------------------------------------------


@pytest.fixture
def photo(tmp_path):
    cv2.imwrite(str(tmp_path / "photo.png"), np.full((96, 128, 3), 200, np.uint8))
    return tmp_path / "photo.png"


@pytest.fixture
def panels(monkeypatch):
    """The titled panels of the places, as they are drawn."""
    drawn = []
    monkeypatch.setattr("projects_vil.visualization.sampling_maps.in_rows", lambda p, columns: drawn.extend(p) or [p])
    return drawn


@pytest.fixture
def moved(monkeypatch):
    """A detector with LIT-Ti, whose positions move by 4 pixels down and 8 to the left."""

    def load(*args):
        model = load_model(*args)
        shift(model.backbone.bottom_up.net, 2, 1, -2)
        return model

    from projects_vil.visualization.inspection import load_model

    monkeypatch.setattr("projects_vil.visualization.sampling_maps.load_model", load)


def draw(photo, *overrides: str, **options):
    cfg = small_config("retinanet", "INPUT.MIN_SIZE_TEST", "192", *overrides)
    return draw_offsets(cfg, None, [photo], photo.parent / "drawn", **options)


def marks(panel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of a panel: top, left, bottom, right of the rectangle, and y and x of each dot."""
    green = np.argwhere((panel == (0, 255, 0)).all(axis=2))
    red = ((panel[:, :, 0] > 220) & (panel[:, :, 1] < 90)).astype(np.uint8)
    return np.concatenate([green.min(axis=0), green.max(axis=0)]), cv2.connectedComponentsWithStats(red)[3][1:, ::-1]


def test_drawn_dots_are_a_grid_in_the_rectangle(photo, panels):
    (path,) = draw(photo, *LIT_TI, point=(50, 70))
    assert path == photo.parent / "drawn/photo_offsets.png" and cv2.imread(str(path)).std() > 10
    ((title, panel),) = panels
    assert title == "1: mean shift 0.0 pixels"
    # Pixel (50, 70) of 96 x 128 is in place (3, 4); three fields of 32 pixels fill the panel.
    rectangle, dots = marks(panel)
    np.testing.assert_allclose(rectangle, [160, 160, 320, 320], atol=2)
    grid = 160 + 20 * np.arange(8) + 10
    expected = np.array([(y, x) for y in grid for x in grid])
    np.testing.assert_allclose(sorted(map(tuple, dots.round())), expected, atol=1)


def test_drawn_dots_move_with_their_offsets(photo, panels, moved):
    draw(photo, *LIT_TI, point=(50, 70))
    ((title, panel),) = panels
    assert title == "1: mean shift 8.9 pixels"
    rectangle, dots = marks(panel)
    scale = (rectangle[2] - rectangle[0]) / 32
    shifts = dots.mean(axis=0) - (rectangle[:2] + rectangle[2:]) / 2
    assert len(dots) == 64
    np.testing.assert_allclose(shifts / scale, [4, -8], atol=0.2)


def test_dots_beyond_the_image_are_counted(photo, panels, moved):
    draw(photo, *LIT_TI, point=(50, 0))
    assert panels[0][0].endswith(", 16 of 64 beyond the image")


def test_places_spread_over_the_image(photo, panels):
    draw(photo, *LIT_TI, num_points=5)
    assert [title[:3] for title, _ in panels] == ["1: ", "2: ", "3: ", "4: ", "5: "]


@pytest.mark.parametrize(
    "overrides, options, message",
    [
        (LIT_TI, {"num_points": 0}, "--points is 0; it must be 1 to 32"),
        (LIT_TI, {"point": (96, 0)}, "--point 96 0 is outside .*photo.png, which is 96 pixels high and 128 wide"),
        ((), {}, "ViL has no deformable token merging"),
    ],
)
def test_what_cannot_be_drawn(photo, overrides, options, message):
    with pytest.raises(InputError, match=message) as caught:
        draw(photo, *overrides, **options)
    assert "\n" not in str(caught.value) and not (photo.parent / "drawn").exists()


def test_files_that_are_not_there(photo, tmp_path):
    cfg = small_config("retinanet", *LIT_TI)
    with pytest.raises(InputError, match="there is no weights file absent.pth"):
        draw_offsets(cfg, "absent.pth", [photo], tmp_path)
    with pytest.raises(InputError, match="cannot read the image .*absent.png"):
        draw_offsets(cfg, None, [tmp_path / "absent.png"], tmp_path)
    with pytest.raises(InputError, match="cannot write .*drawn/photo_offsets.png"):
        (tmp_path / "drawn").write_text("")
        draw(photo, *LIT_TI)
    with pytest.raises(InputError, match="two --input images would be written to .*photo_offsets.png"):
        draw_offsets(cfg, None, [photo, tmp_path / "elsewhere" / "photo.jpg"], tmp_path)
