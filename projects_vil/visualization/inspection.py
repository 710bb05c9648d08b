"""Draw the attention maps of a backbone, and the sampling positions of LIT's deformable token merging."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.structures import ImageList
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from backbones import ConfigError
from backbones.attention.efficient import SpatialReductionAttention
from backbones.backbone import Backbone
from backbones.layers.token_merging import sampled_positions
from backbones.lit import LIT
from projects_vil.checkpoint import load_detector
from projects_vil.config import with_overrides
from projects_vil.data import read_image, size_for_testing, to_input
from projects_vil.modeling import TransformerBackbone
from projects_vil.visualization.attention import AttentionWeights, attention_weights
from projects_vil.visualization.drawing import titled, write_image

COLUMNS, PANEL = 4, 4.8  # images in a row, and their size in inches of 100 pixels
MARGIN = 3  # tokens around the attended part of the image


def load_model(cfg: CfgNode, weights: str | Path | None = None) -> tuple[nn.Module, Backbone]:
    """Return a model on the CPU in eval mode, and its backbone. Without weights, the model is random.

    Raises:
        ConfigError: If the backbone is not from this project, or if the weights are missing or do not fit.
    """
    model, _ = load_detector(with_overrides(cfg, {"MODEL.DEVICE": "cpu"}), weights or "", complete=False)
    backbone = getattr(model.backbone, "bottom_up", model.backbone)
    if not isinstance(backbone, TransformerBackbone):
        name = getattr(backbone, "variant", type(backbone).__name__)
        raise ConfigError(f"Cannot draw {name}. Train with --model vil_tiny, or --model lit_ti for sampling offsets.")
    if not weights:
        logging.getLogger(__name__).warning("The model has random weights. Use --weights to load a checkpoint.")
    return model, backbone.net


def read_input(
    cfg: CfgNode, model: nn.Module, path: str | Path, point: Sequence[int] | None = None
) -> tuple[np.ndarray, Tensor, tuple[int, int]]:
    """Read an image, and resize, normalize and pad it as for evaluation.

    Args:
        cfg, model: The config and the model.
        path: The image file.
        point: Row and column (y, x) of a pixel of the file. The default is the center.

    Returns:
        The resized image (H, W, 3) uint8 RGB; the input of the backbone (1, 3, H', W'), padded at the bottom and on the
        right; and the row and column of ``point`` in the resized image.

    Raises:
        ConfigError: If the file cannot be read, or if the point is outside the image.
    """
    original = read_image(path)
    height, width = original.shape[:2]
    image = to_input(original, size_for_testing(cfg, height, width), "RGB")
    rows, cols = image.shape[1:]
    y, x = (height // 2, width // 2) if point is None else point
    if not (0 <= y < height and 0 <= x < width):
        raise ConfigError(f"Point {y} {x} is outside '{path}' ({height} x {width} pixels). Choose another point.")
    point = (2 * y + 1) * rows // (2 * height), (2 * x + 1) * cols // (2 * width)
    pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    image = ((image.flip(0) if cfg.INPUT.FORMAT == "BGR" else image) - model.pixel_mean) / model.pixel_std
    return pixels, ImageList.from_tensors([image], model.backbone.size_divisibility).tensor, point


# Attention -----------------------------------------------------------------------------------------------------------


def draw_attention(
    cfg: CfgNode,
    weights: str | Path | None,
    image_file: str | Path,
    output: str | Path,
    *,
    stage: int | None = None,
    block: int | None = None,
    point: tuple[int, int] | None = None,
) -> Path:
    """Draw the attention of the token at a pixel, see :func:`plot_attention`, and return the path of the PNG file.

    Args:
        cfg: The config of a detector or a semantic segmentation model.
        weights: Its checkpoint; None for random weights.
        image_file: The image.
        output: The folder of the PNG file.
        stage, block: The stage and the block of the backbone, counted from 1. The default is the last one.
        point: Row and column (y, x) in pixels of the image file. The default is the center.

    Raises:
        ConfigError: If the stage or block does not exist or has no attention to the image, the point is outside the
            image, or a file cannot be read or written.
    """
    model, backbone = load_model(cfg, weights)
    stage = len(backbone.stages) if stage is None else stage
    module, block = _attention_module(backbone, stage, block)
    pixels, batch, (y, x) = read_input(cfg, model, image_file, point)
    inputs = []
    with module.register_forward_pre_hook(lambda module, args: inputs.append(args)), torch.no_grad():
        backbone(batch)
    tokens, size = inputs[0]
    stride = batch.shape[2] // size[0]
    token = y // stride, x // stride
    attention = attention_weights(module, tokens, size, *token)
    if not attention.direct.any() and not attention.spread.any():
        raise ConfigError(f"Stage {stage} attends only to its global tokens. Choose another stage.")
    keys = "reduced feature map" if isinstance(module, SpatialReductionAttention) else "projected keys"
    figure = plot_attention(attention, pixels, stride, token, keys=keys)
    path, variant = Path(image_file), cfg.MODEL.TRANSFORMER.VARIANT
    where = ("center",) if point is None else point
    title = f"{path.name}: stage {stage}, block {block}, {type(module).__name__}, point"
    name = "_".join(map(str, (path.stem, variant, f"stage{stage}", f"block{block}", *where))) + ".png"
    return _write(figure, Path(output) / name, " ".join(map(str, (title, *where))))


def plot_attention(
    attention: AttentionWeights, pixels: np.ndarray, stride: int, token: tuple[int, int], *, keys: str
) -> Figure:
    """Plot an image with a token, and a heat map of the attention of the token for each head.

    If the token attends to a part of the image, the heat maps show this part enlarged, with a frame in the image. The
    colors range from the smallest positive weight to the largest weight. The titles show this range, and the total
    weight on global tokens and on the padding.

    Args:
        attention: The attention weights of the token.
        pixels: (H, W, 3) uint8 RGB, without padding.
        stride: Side of a token in pixels.
        token: Row and column of the token.
        keys: A description of the projected keys, for the titles of their heat maps.
    """
    height, width = pixels.shape[:2]
    # Tokens of the padding are not drawn.
    rows, cols = -(-height // stride), -(-width // stride)
    direct, everything = attention.direct[:, :rows, :cols], (0, 0, height, width)
    part = _attended_box(direct.sum(dim=0), height, width, stride) if direct.any() else everything
    panels = []
    for weights, name, box in ((attention.direct, "", part), (attention.spread, keys, everything)):
        on_image = weights[:, :rows, :cols]
        for head in range(len(weights)) if on_image.any() else ():
            total, visible = weights[head].sum(), on_image[head].double().numpy()
            label = f"head {head + 1}" + (f", {name} (sum {total:.3g})" if name else "")
            positive = visible[visible > 0]
            label += f": {positive.min():.3g} to {positive.max():.3g}" if len(positive) else ": none on the image"
            if attention.to_globals.numel():
                label += f", to global tokens {attention.to_globals[head].sum():.3g}"
            if total - visible.sum() > 5e-4:
                label += f", to padding {total - visible.sum():.3g}"
            panels.append((label, visible, box))
    lines = -(-(1 + len(panels)) // COLUMNS)
    figure = Figure((PANEL * COLUMNS, PANEL * lines), layout="constrained")
    all_axes = [figure.add_subplot(lines, COLUMNS, index + 1) for index in range(1 + len(panels))]
    _show(all_axes[0], pixels, f"{height} x {width} pixels, a token has {stride} x {stride}")
    if part != everything:
        _add_box(all_axes[0], part, "yellow")
    for axes, (label, weights, (top, left, bottom, right)) in zip(all_axes[1:], panels, strict=True):
        _show(axes, pixels.mean(axis=2), label)
        extent = (-0.5, cols * stride - 0.5, rows * stride - 0.5, -0.5)
        visible = np.ma.masked_less_equal(weights, 0)
        axes.imshow(visible, cmap="inferno", alpha=0.7, extent=extent, interpolation="nearest")
        axes.set(xlim=(left - 0.5, right - 0.5), ylim=(bottom - 0.5, top - 0.5))
    for axes in all_axes:
        _add_box(axes, [side * stride for side in (*token, token[0] + 1, token[1] + 1)], "lime")
    return figure


def _attention_module(backbone: Backbone, stage: int, block: int | None) -> tuple[nn.Module, int]:
    """Return the attention of a block, by default of the last one, and the number of the block."""
    if not 1 <= stage <= len(backbone.stages):
        raise ConfigError(f"Stage {stage} does not exist. Choose a stage from 1 to {len(backbone.stages)}.")
    blocks = backbone.stages[stage - 1].blocks
    block = len(blocks) if block is None else block
    if not 1 <= block <= len(blocks):
        raise ConfigError(f"Block {block} does not exist in stage {stage}. Choose a block from 1 to {len(blocks)}.")
    if blocks[block - 1].attention is None:
        raise ConfigError(f"The blocks of stage {stage} are MLPs without attention. Choose another stage.")
    return blocks[block - 1].attention, block


def _attended_box(weights: Tensor, height: int, width: int, stride: int) -> tuple[int, int, int, int]:
    """Return top, left, bottom and right in pixels of all positive weights (H, W), with a margin of a few tokens."""
    (top, bottom), (left, right) = (
        (max(0, int(x.min()) - MARGIN) * stride, min(side, (int(x.max()) + 1 + MARGIN) * stride))
        for x, side in zip(weights.nonzero(as_tuple=True), (height, width), strict=True)
    )
    return top, left, bottom, right


def _show(axes: Axes, pixels: np.ndarray, title: str) -> None:
    axes.imshow(pixels, cmap="gray")
    axes.set_title(title, fontsize=8)
    axes.axis("off")


def _add_box(axes: Axes, box: Sequence[float], color: str) -> None:
    """Add a box of top, left, bottom and right in pixels. The center of a pixel has integer coordinates."""
    top, left, bottom, right = box
    axes.add_patch(Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, color=color, linewidth=2))


def _write(figure: Figure, path: Path, title: str) -> Path:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    # Matplotlib would draw the title without the letters that are only in installed fonts.
    write_image(path, titled(title, np.asarray(canvas.buffer_rgba())[:, :, :3]))
    return path


# Deformable token merging --------------------------------------------------------------------------------------------


@torch.no_grad()
def sampling_positions(backbone: Backbone, batch: Tensor, tokens: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return the positions in the image that tokens of the last stage of LIT are merged from (LIT Figure 2).

    A sampling position between tokens is traced to the nearest token, without interpolation.

    Args:
        backbone: A LIT with n token merging layers; three if it ends with stage 4.
        batch: (1, 3, H, W).
        tokens: Row and column of each token in the last feature map.

    Returns:
        The sampling positions, and in the same order the positions without offsets, (len(tokens), 4^n, 2) each: y and x
        of the centers of 4 x 4 patches, in pixels of ``batch``. The center of a pixel has integer coordinates.

    Raises:
        ConfigError: If the backbone has no deformable token merging, or only one stage.
    """
    if not isinstance(backbone, LIT):
        raise ConfigError(f"{type(backbone).__name__} has no deformable token merging. Use a LIT variant.")
    offsets = [offset[0] for offset in backbone.sampling_offsets(batch).values()]
    if not offsets:
        raise ConfigError("The backbone ends with stage 1, which merges no tokens. Use more stages.")
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
    """Draw the sampling positions of each image, see :func:`plot_offsets`, and return the paths of the PNG files.

    Args:
        cfg: The config of a detector or a semantic segmentation model with LIT.
        weights: Its checkpoint; None for random weights.
        image_files: The images.
        output: The folder of the PNG files.
        num_points: Number of tokens, evenly distributed over the image.
        point: Row and column (y, x) in pixels of the image file, for one token instead of ``num_points``.

    Raises:
        ConfigError: If the model has no deformable token merging, the point is outside an image, or a file cannot be
            read or written.
    """
    paths = [Path(output) / f"{Path(file).stem}_offsets.png" for file in image_files]
    model, backbone = load_model(cfg, weights)
    for file, path in zip(image_files, paths, strict=True):
        pixels, batch, resized_point = read_input(cfg, model, file, point)
        points = [resized_point]
        if point is None:
            # The R2 sequence: any number of its points is evenly distributed, and the first is in the center.
            fractions = 0.05 + 0.9 * ((0.5 + np.arange(num_points)[:, None] * [0.7548776662, 0.5698402910]) % 1)
            points = (fractions * pixels.shape[:2]).astype(int).tolist()
        figure = plot_offsets(backbone, batch, pixels, points)
        _write(figure, path, f"{Path(file).name}: sampling positions (red), regular grid (green)")
    return paths


def plot_offsets(backbone: Backbone, batch: Tensor, pixels: np.ndarray, points: Sequence[tuple[int, int]]) -> Figure:
    """Plot sampling positions as red dots, and the cells of the regular grid as green boxes.

    The complete image is at the top, and the tokens are enlarged below.

    Args:
        backbone, batch: See :func:`sampling_positions`.
        pixels: (H, W, 3) uint8 RGB, without padding.
        points: Row and column of each token in pixels.
    """
    # The side of a token of the last stage in pixels.
    side = backbone.stages[0].patch_embed.patch_size * 2 ** (len(backbone.stages) - 1)
    tokens = [(y // side, x // side) for y, x in points]
    sampled, regular = (x.double().numpy() for x in sampling_positions(backbone, batch, tokens))
    size = np.array(pixels.shape[:2])
    columns = min(COLUMNS, max(2, len(tokens)))
    rows = 2 + -(-len(tokens) // columns)
    figure = Figure((PANEL * columns, PANEL * rows), layout="constrained")
    grid = figure.add_gridspec(rows, columns)
    whole = figure.add_subplot(grid[:2, :])
    _show(whole, pixels, f"{size[0]} x {size[1]} pixels, {sampled.shape[1]} positions of each token")
    for number, (token, dots, centers) in enumerate(zip(tokens, sampled, regular, strict=True)):
        top, left = np.array(token) * side
        title = f"{number + 1}: mean shift {np.linalg.norm(dots - centers, axis=1).mean():.1f} pixels"
        outside = ((dots < -0.5) | (dots > size - 0.5)).any(axis=1).sum()
        title += f", {outside} of {len(dots)} outside the image" * bool(outside)
        panel = figure.add_subplot(grid[2 + number // columns, number % columns])
        _show(panel, pixels, title)
        for axes, marker_size in ((whole, 2), (panel, 6)):
            _add_box(axes, (top, left, top + side, left + side), "lime")
            axes.plot(*dots.T[::-1], ".", color="red", markersize=marker_size)
        whole.annotate(str(number + 1), (left + side, top), color="lime")
        # Shows all dots, and at least three cells per side.
        center = np.array([top, left]) + (side - 1) / 2
        reach = max(1.5 * side, abs(dots - center).max() + 4)
        (bottom, right), (top, left) = center + reach, center - reach
        panel.set(xlim=(left, right), ylim=(bottom, top))
    return figure
