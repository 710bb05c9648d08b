"""Drawings of the inside of a backbone: attention of a token, and sampling positions of LIT's token merging."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.structures import ImageList
from torch import Tensor, nn

from backbones import ConfigError
from backbones.attention.efficient import SpatialReductionAttention
from backbones.backbone import Backbone
from backbones.layers.token_merging import sampled_positions
from backbones.lit import LIT
from projects_vil.checkpoint import load_detector
from projects_vil.data import read_for_testing
from projects_vil.modeling import TransformerBackbone
from projects_vil.visualization.attention import attention_weights
from projects_vil.visualization.drawing import GAP, PANEL_WIDTH, fit, sheet, write_image

COLUMNS = 4
MIN_CROP = 16  # tokens: the smallest part of an attention map that is drawn
MAX_POINTS = 32
GREEN, YELLOW, RED = (0, 255, 0), (255, 255, 0), (255, 0, 0)

Box = tuple[int, int, int, int]  # top, left, bottom, right in pixels


@dataclasses.dataclass(frozen=True)
class ModelInput:
    """An image as the input of a backbone.

    Attributes:
        path: its file.
        file_size: height and width of the file, in pixels.
        pixels: (H, W, 3) uint8 RGB, resized as for testing.
        batch: (1, 3, H', W'), normalised, and padded below and on the right.
    """

    path: Path
    file_size: tuple[int, int]
    pixels: np.ndarray
    batch: Tensor

    def find(self, point: Sequence[int]) -> tuple[int, int]:
        """Return row and column in ``pixels`` of a pixel of the file.

        Raises:
            ConfigError: for a point outside the image.
        """
        (y, x), (height, width) = point, self.file_size
        if not (0 <= y < height and 0 <= x < width):
            raise ConfigError(f"point {y} {x} is outside {self.path}, which is {height} pixels high and {width} wide")
        rows, cols = self.pixels.shape[:2]
        return (2 * y + 1) * rows // (2 * height), (2 * x + 1) * cols // (2 * width)


def load_model(cfg: CfgNode, weights: str | Path | None = None) -> tuple[nn.Module, Backbone]:
    """Load a model on the CPU in eval mode; without weights it is random, and a warning is logged.

    Raises:
        ConfigError: for a backbone of another project, and weights that are missing or do not fit.
    """
    model, _ = load_detector(cfg, weights or "", complete=False)
    if not isinstance(getattr(model.backbone, "bottom_up", None), TransformerBackbone):
        raise ConfigError(f"MODEL.BACKBONE.NAME is {cfg.MODEL.BACKBONE.NAME}, which is not a backbone of this project")
    if not weights:
        logging.getLogger(__name__).warning("no weights are given: those of the model are random")
    return model, model.backbone.bottom_up.net


def read_input(cfg: CfgNode, model: nn.Module, path: str | Path) -> ModelInput:
    """Read an image, and resize, normalise and pad it as for testing.

    Raises:
        ConfigError: for a file that cannot be read.
    """
    pixels, file_size = read_for_testing(cfg, path, image_format="RGB")
    channels = pixels[:, :, ::-1] if cfg.INPUT.FORMAT == "BGR" else pixels
    image = torch.as_tensor(channels.transpose(2, 0, 1).astype("float32"))
    image = (image - model.pixel_mean) / model.pixel_std
    batch = ImageList.from_tensors([image], model.backbone.size_divisibility).tensor
    return ModelInput(Path(path), file_size, pixels, batch)


# -- attention -------------------------------------------------------------------------------------


def draw_attention(
    cfg: CfgNode,
    weights: str | Path | None,
    image_file: str | Path,
    output: str | Path,
    *,
    stage: int,
    block: int,
    point: tuple[int, int],
) -> Path:
    """Draw the attention of the token at a pixel: the image with the token, then a heat map for each head.

    A neighbourhood smaller than the image is enlarged, and framed in the image. Colours go from the least to the
    largest weight above 0 on the image itself; a title gives both, and the shares of the global tokens and of the
    padding. Projected keys and reduced feature maps have panels of their own.

    Args:
        cfg: config of a detector or segmentor.
        weights: its checkpoint; None for random weights.
        output: folder for the PNG.
        stage, block: numbers of the stage and the block in the backbone, from 1.
        point: y and x, in pixels of the image file.

    Raises:
        ConfigError: for a stage or block that does not exist or has no attention on the image, a point outside the
            image, or files that cannot be read or written.
    """
    model, backbone = load_model(cfg, weights)
    module = _attention_module(backbone, stage, block)
    image = read_input(cfg, model, image_file)
    y, x = image.find(point)
    inputs = []
    handle = module.register_forward_pre_hook(lambda module, args: inputs.append(args))
    with torch.no_grad():
        backbone(image.batch)
    handle.remove()
    tokens, global_tokens = inputs[0]
    stride = image.batch.shape[2] // tokens.shape[1]
    row, col = y // stride, x // stride
    attention = attention_weights(module, tokens, global_tokens, row, col)
    # The tokens of the image itself; attention on the padding is a share in the titles.
    rows, cols = (-(-side // stride) for side in image.pixels.shape[:2])
    direct, spread = attention.direct[:, :rows, :cols], attention.spread[:, :rows, :cols]
    if not direct.any() and not spread.any():
        raise ConfigError(f"stage {stage} attends to its global tokens alone: there are no weights on the image")

    height, width = image.pixels.shape[:2]
    cell = (row * stride, col * stride, (row + 1) * stride, (col + 1) * stride)
    everything = frame = (0, 0, height, width)
    whole, scale = fit(image.pixels)
    if direct.any():
        frame = _attended_box(direct.sum(dim=0), height, width, stride)
    if frame != everything:
        _draw_box(whole, frame, scale, YELLOW)
    _draw_box(whole, cell, scale, GREEN)
    center = round((cell[1] + cell[3]) / 2 * scale), round((cell[0] + cell[2]) / 2 * scale)
    cv2.circle(whole, center, PANEL_WIDTH // 32, GREEN, 2, cv2.LINE_AA)
    panels = [(f"{height} x {width} pixels, a token has {stride} x {stride}", whole)]
    keys = "reduced feature map" if isinstance(module, SpatialReductionAttention) else "projected keys"
    for visible, weights_of, name, part in (
        (direct, attention.direct, "", frame),
        (spread, attention.spread, keys, everything),
    ):
        for head in range(module.num_heads) if visible.any() else ():
            share, on_image = weights_of[head].sum(), visible[head].sum()
            positive = visible[head][visible[head] > 0]
            label = f"head {head + 1}" + (f", {name} {_percent(share)}" if name else "")
            label += (
                f": {_percent(positive.min())} to {_percent(positive.max())} each"
                if len(positive)
                else ": none on the image"
            )
            if attention.to_globals.numel():
                label += f", globals {_percent(attention.to_globals[head].sum())}"
            if share - on_image > 5e-4:
                label += f", padding {_percent(share - on_image)}"
            panels.append((label, _heat_map(visible[head], image.pixels, stride, part, cell)))
    title = f"{image.path.name}: stage {stage}, block {block}, {type(module).__name__}, point {point[0]} {point[1]}"
    name = f"{cfg.MODEL.TRANSFORMER.NAME}_stage{stage}_block{block}_{point[0]}_{point[1]}"
    path = Path(output) / f"{image.path.stem}_{name}.png"
    write_image(path, sheet(title, _in_rows(panels)))
    return path


def _attention_module(backbone: Backbone, stage: int, block: int) -> nn.Module:
    if not 1 <= stage <= len(backbone.stages):
        raise ConfigError(f"stage is {stage}: the backbone has the stages 1 to {len(backbone.stages)}")
    blocks = backbone.stages[stage - 1].blocks
    if not 1 <= block <= len(blocks):
        raise ConfigError(f"block is {block}: stage {stage} has the blocks 1 to {len(blocks)}")
    if blocks[block - 1].attention is None:
        raise ConfigError(f"stage is {stage}: its blocks are MLPs, without attention")
    return blocks[block - 1].attention


def _attended_box(weights: Tensor, height: int, width: int, stride: int) -> Box:
    """Return the part of the image with all weights (H, W) above 0, at least 16 x 16 tokens."""
    sides = []
    for axis, length in enumerate((height, width)):
        attended = weights.sum(dim=1 - axis).nonzero().flatten()
        first, last = int(attended[0]), int(attended[-1]) + 1
        missing = max(0, MIN_CROP - (last - first))
        first, last = (first - missing // 2) * stride, (last + missing - missing // 2) * stride
        shift = max(0, -first) - max(0, last - length)
        sides.append((max(0, first + shift), min(length, last + shift)))
    (top, bottom), (left, right) = sides
    return top, left, bottom, right


def _heat_map(weights: Tensor, pixels: np.ndarray, stride: int, part: Box, cell: Box) -> np.ndarray:
    """Colour weights (H, W) from the least above 0 to the largest, over a grey part of the image; frame the query."""
    top, left, bottom, right = part
    positive = weights > 0
    least = weights[positive].min() if positive.any() else weights.min()
    heat = ((weights - least) / (weights.max() - least).clamp(min=1e-30)).clamp(min=0)
    heat, opacity = (
        x.double().numpy().repeat(stride, axis=0).repeat(stride, axis=1)[top:bottom, left:right]
        for x in (heat, (0.25 + 0.55 * heat) * positive)
    )
    grey = cv2.cvtColor(pixels[top:bottom, left:right], cv2.COLOR_RGB2GRAY)[:, :, None]
    colored = cv2.applyColorMap((heat * 255).round().astype(np.uint8), cv2.COLORMAP_INFERNO)[:, :, ::-1]
    opacity = opacity[:, :, None]
    panel, scale = fit(((1 - opacity) * 0.6 * grey + opacity * colored).round().astype(np.uint8))
    _draw_box(panel, (cell[0] - top, cell[1] - left, cell[2] - top, cell[3] - left), scale, GREEN)
    return panel


def _percent(share: Tensor) -> str:
    return f"{100 * share.item():.3g}%"


def _draw_box(panel: np.ndarray, box: Sequence[float], scale: float, color: tuple[int, int, int]) -> None:
    top, left, bottom, right = (round(float(side) * scale) for side in box)
    cv2.rectangle(panel, (left, top), (right - 1, bottom - 1), color, 2)


def _in_rows(panels: list) -> list[list]:
    return [panels[start : start + COLUMNS] for start in range(0, len(panels), COLUMNS)]


# -- deformable token merging ----------------------------------------------------------------------


@torch.no_grad()
def sampling_positions(backbone: Backbone, batch: Tensor, tokens: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Trace tokens of the last stage of a LIT to where its merging modules sample the image (LIT Figure 2).

    A position between tokens of a stage continues at the nearest one, without interpolation.

    Args:
        backbone: a LIT with n merging modules, three in all variants that end with stage 4.
        batch: (1, 3, H, W).
        tokens: row and column of each token in the last feature map.

    Returns:
        The positions, and those without offsets in the same order, (len(tokens), 4^n, 2) each: y and x, in pixels of
        ``batch``, of the centres of 4 x 4 patches; whole numbers are centres of pixels.

    Raises:
        ConfigError: for a backbone without deformable merging, or of one stage.
    """
    if not isinstance(backbone, LIT):
        raise ConfigError(f"{type(backbone).__name__} has no deformable token merging: only LIT has")
    offsets = [offset[0] for offset in backbone.sampling_offsets(batch).values()]
    if not offsets:
        raise ConfigError("the backbone ends with stage 1, which merges no tokens")
    patch = backbone.stages[0].patch_embed.patch_size
    sampled, regular = (
        torch.stack([sampled_positions(chain, row, col) for row, col in tokens])
        for chain in (offsets, [torch.zeros_like(offset) for offset in offsets])
    )
    return (sampled + 0.5) * patch - 0.5, (regular + 0.5) * patch - 0.5


def draw_offsets(
    cfg: CfgNode,
    weights: str | Path | None,
    image_files: Sequence[str | Path],
    output: str | Path,
    *,
    num_points: int = 8,
    point: tuple[int, int] | None = None,
) -> list[Path]:
    """Draw sampling positions as red dots, and the field of the regular grid as a green box, in a PNG for each image.

    The image is at the top, and below it each token, enlarged.

    Args:
        cfg: config of a detector or segmentor with a LIT.
        weights: its checkpoint; None for random weights.
        output: folder for the PNGs.
        num_points: tokens, spread evenly over the image, 1 to 32.
        point: y and x, in pixels of the image file, of the only token, instead of ``num_points``.

    Raises:
        ConfigError: for a model without deformable merging, a point outside an image, a number out of range, two
            images of one name, or files that cannot be read or written.
    """
    if not 1 <= num_points <= MAX_POINTS:
        raise ConfigError(f"num_points is {num_points}: it must be 1 to {MAX_POINTS}")
    paths = [Path(output) / f"{Path(file).stem}_offsets.png" for file in image_files]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"two images would be written to {path}")
    model, backbone = load_model(cfg, weights)
    for file, path in zip(image_files, paths, strict=True):
        image = read_input(cfg, model, file)
        if point is None:
            # An additive recurrence (R2): any number of its points is spread evenly, and the first is in the middle.
            fractions = 0.05 + 0.9 * ((0.5 + np.arange(num_points)[:, None] * [0.7548776662, 0.5698402910]) % 1)
            points = (fractions * image.pixels.shape[:2]).astype(int).tolist()
        else:
            points = [image.find(point)]
        write_image(path, _draw_sampling(image, backbone, points))
    return paths


def _draw_sampling(image: ModelInput, backbone: Backbone, points: list[tuple[int, int]]) -> np.ndarray:
    merged = 2 ** (len(backbone.stages) - 1)
    side = backbone.stages[0].patch_embed.patch_size * merged  # pixels of a token of the last stage
    tokens = [(y // side, x // side) for y, x in points]
    sampled, regular = (x.double().numpy() for x in sampling_positions(backbone, image.batch, tokens))
    size = np.array(image.pixels.shape[:2])
    columns = min(COLUMNS, max(2, len(tokens)))
    whole, scale = fit(image.pixels, width=columns * PANEL_WIDTH + (columns - 1) * GAP, height=2 * PANEL_WIDTH)
    panels = []
    for number, ((row, col), dots, grid) in enumerate(zip(tokens, sampled, regular, strict=True), start=1):
        field = np.array([row, col, row + 1, col + 1]) * side
        _mark(whole, field, dots, scale)
        corner = round(field[3] * scale) + 4, round(field[0] * scale) + 14
        cv2.putText(whole, str(number), corner, cv2.FONT_HERSHEY_SIMPLEX, 0.6, GREEN, 2, cv2.LINE_AA)
        title = f"{number}: mean shift {np.linalg.norm(dots - grid, axis=1).mean():.1f} pixels"
        outside = ((dots < -0.5) | (dots > size - 0.5)).any(axis=1).sum()
        if outside:
            title += f", {outside} of {len(dots)} outside the image"
        # The part of the image with all dots, at least three fields a side.
        center = (field[:2] + field[2:]) / 2
        shape = np.minimum(round(2 * max(1.5 * side, np.abs(dots - center).max() + side / 4)), size)
        top, left = np.clip(np.round(center - shape / 2), 0, size - shape).astype(int)
        panel, enlarged = fit(image.pixels[top : top + shape[0], left : left + shape[1]], height=PANEL_WIDTH)
        _mark(panel, field - [top, left, top, left], dots - [top, left], enlarged)
        panels.append((title, panel))
    title = (
        f"{image.path.name}, {size[0]} x {size[1]}: {sampled.shape[1]} sampling positions (red), regular field (green)"
    )
    return sheet(title, [[("", whole)], *_in_rows(panels)])


def _mark(panel: np.ndarray, field: np.ndarray, dots: np.ndarray, scale: float) -> None:
    """Draw a field and dots, given in pixels before scaling, whose centres are whole numbers."""
    _draw_box(panel, field, scale, GREEN)
    radius = round(16 * min(4.0, max(2.0, 0.8 * scale)))
    for y, x in np.round(16 * ((dots + 0.5) * scale - 0.5)).astype(int).tolist():  # in 16ths of a pixel
        cv2.circle(panel, (x, y), radius, RED, -1, cv2.LINE_AA, shift=4)
