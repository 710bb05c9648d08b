"""Where the tokens of LIT's last stage come from: the picture of its learned offsets (LIT Figure 2)."""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import torch
from detectron2.config import CfgNode
from torch import Tensor

from backbones import InputError
from backbones.backbone import Backbone
from backbones.layers.token_merging import sampled_positions
from backbones.lit import LIT
from projects_vil.visualization.drawing import write_image
from projects_vil.visualization.inspection import SeenImage, backbone_of, load_model, see_image
from projects_vil.visualization.panels import GAP, PANEL_WIDTH, fit, in_rows, sheet

MAX_POINTS = 32
COLUMNS = 4
DOT_COLOR, FRAME_COLOR = (255, 0, 0), (0, 255, 0)
# The golden ratio's sisters: of any number of multiples, the fractions are spread evenly over a square.
_STEP = np.array([0.7548776662466927, 0.5698402909980532])


@torch.no_grad()
def sampling_positions(backbone: Backbone, batch: Tensor, places: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Where tokens of the last stage sample the image through all merging modules, one after another.

    A position that falls between tokens of a stage is traced on through the nearest one (no interpolation).

    Args:
        backbone: a LIT with n merging modules, three in all variants that end with stage 4.
        batch: (1, 3, H, W).
        places: row and column of each token in the map of the last stage.

    Returns:
        The positions, and those without offsets in the same order, (len(places), 4^n, 2) each: y and x, in pixels of
        ``batch``, of the centres of 4 x 4 patches; whole numbers are centres of pixels.

    Raises:
        InputError: for a backbone without deformable merging, or of one stage.
    """
    if not isinstance(backbone, LIT):
        raise InputError(f"{type(backbone).__name__} has no deformable token merging: only LIT has")
    offsets = [offset[0] for offset in backbone.sampling_offsets(batch).values()]
    if not offsets:
        raise InputError("the backbone ends with stage 1, which merges no tokens")
    patch = backbone.stages[0].patch_embed.patch_size
    none = [torch.zeros_like(offset) for offset in offsets]
    sampled, regular = (
        torch.stack([sampled_positions(chain, row, col) for row, col in places]) for chain in (offsets, none)
    )
    return (sampled + 0.5) * patch - 0.5, (regular + 0.5) * patch - 0.5


def regular_field(backbone: Backbone, row: int, col: int) -> tuple[int, int, int, int]:
    """Top, left, bottom and right, in pixels, of what a place of the last stage covers without offsets."""
    side = backbone.stages[0].patch_embed.patch_size * 2 ** (len(backbone.stages) - 1)
    return row * side, col * side, (row + 1) * side, (col + 1) * side


def draw_offsets(
    cfg: CfgNode,
    weights: str | Path | None,
    image_files: Sequence[str | Path],
    output: str | Path,
    *,
    num_points: int = 8,
    point: tuple[int, int] | None = None,
) -> list[Path]:
    """Draw sampling positions as red dots, and the regular grid's field as a green rectangle, into a PNG an image.

    The image stands above, and each place below it, enlarged.

    Args:
        cfg: of a detector or segmentor with a LIT.
        weights: its checkpoint; None for random weights.
        image_files: the images.
        output: folder for the PNGs.
        num_points: places, spread evenly over the image.
        point: y and x, in pixels of the image file, of the only place, in the stead of ``num_points``.

    Returns:
        The PNGs' paths.

    Raises:
        InputError: for a model without deformable merging, a point outside an image, a number out of range, two
            images of one name, or files that cannot be read or written.
    """
    if not 1 <= num_points <= MAX_POINTS:
        raise InputError(f"--points is {num_points}; it must be 1 to {MAX_POINTS}")
    paths = [Path(output) / f"{Path(file).stem}_offsets.png" for file in image_files]
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f"two --input images would be written to {path}")
    model = load_model(cfg, weights)
    backbone = backbone_of(model)
    for file, path in zip(image_files, paths, strict=True):
        image = see_image(cfg, model, file)
        points = [image.find(point)] if point is not None else _spread_points(image, num_points)
        side = regular_field(backbone, 0, 0)[2]
        places = [(y // side, x // side) for y, x in points]
        write_image(path, _draw(image, backbone, places))
    return paths


def _spread_points(image: SeenImage, number: int) -> list[tuple[int, int]]:
    """Pixels (y, x), the first in the middle."""
    fractions = 0.05 + 0.9 * ((0.5 + np.arange(number)[:, None] * _STEP) % 1)
    return [tuple(map(int, pixel)) for pixel in fractions * image.pixels.shape[:2]]


def _draw(image: SeenImage, backbone: Backbone, places: list[tuple[int, int]]) -> np.ndarray:
    dots, regular = (part.double().numpy() for part in sampling_positions(backbone, image.batch, places))
    fields = np.array([regular_field(backbone, row, col) for row, col in places])
    columns = min(COLUMNS, max(2, len(places)))
    height, width = image.pixels.shape[:2]
    whole, scale = fit(image.pixels, width=columns * PANEL_WIDTH + (columns - 1) * GAP, height=2 * PANEL_WIDTH)
    panels = []
    for number, field in enumerate(fields):
        _mark(whole, field, dots[number], scale)
        corner = round(field[3] * scale) + 4, round(field[0] * scale) + 14
        cv2.putText(whole, str(number + 1), corner, cv2.FONT_HERSHEY_SIMPLEX, 0.6, FRAME_COLOR, 2, cv2.LINE_AA)
        shift = np.linalg.norm(dots[number] - regular[number], axis=1).mean()
        outside = ((dots[number] < -0.5) | (dots[number] > [height - 0.5, width - 0.5])).any(axis=1).sum()
        title = f"{number + 1}: mean shift {shift:.1f} pixels"
        if outside:
            title += f", {outside} of {len(dots[number])} beyond the image"
        panels.append((title, _enlarge(image, field, dots[number])))
    title = (
        f"{image.path.name}, {height} x {width}: {dots.shape[1]} sampling positions of {len(backbone.stages) - 1} "
        f"merging modules (red), regular field (green)"
    )
    return sheet(title, [[("", whole)], *in_rows(panels, columns)])


def _enlarge(image: SeenImage, field: np.ndarray, dots: np.ndarray) -> np.ndarray:
    """The part of the image that has a place and all its dots, at least three fields a side."""
    size = np.array(image.pixels.shape[:2])
    center, regular = (field[:2] + field[2:]) / 2, field[2] - field[0]
    reach = max(1.5 * regular, np.abs(dots - center).max() + regular / 4)
    shape = np.minimum(round(2 * reach), size)
    top, left = np.clip(np.round(center - shape / 2), 0, size - shape).astype(int)
    panel, scale = fit(image.pixels[top : top + shape[0], left : left + shape[1]], height=PANEL_WIDTH)
    _mark(panel, field - (top, left, top, left), dots - (top, left), scale)
    return panel


def _mark(panel: np.ndarray, field: np.ndarray, dots: np.ndarray, scale: float) -> None:
    """The frame of a field, and dots at centres of pixels, in a panel that is enlarged by ``scale``."""
    top, left, bottom, right = (round(float(side) * scale) for side in field)
    cv2.rectangle(panel, (left, top), (right - 1, bottom - 1), FRAME_COLOR, 2)
    # The last bits of a position are fractions of a pixel.
    radius = round(16 * min(4.0, max(2.0, 0.8 * scale)))
    for y, x in np.round(16 * ((dots + 0.5) * scale - 0.5)).astype(int).tolist():
        cv2.circle(panel, (x, y), radius, DOT_COLOR, -1, cv2.LINE_AA, shift=4)
