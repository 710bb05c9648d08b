"""Where a token looks: the exact attention weights of one token, for every mechanism, and their drawing.

The output of a head is linear in the values, with the attention weights as factors. So the weights are the gradient of
one channel of the output with respect to that channel of each value, keys and queries held fixed: one backward pass
through the module's own kernel, for all heads at once, and no second definition of any mechanism.
"""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from torch import Tensor, nn

from backbones import InputError
from backbones.attention.alternatives.global_memory import GlobalMemoryAttention
from backbones.attention.alternatives.performer import PerformerAttention
from backbones.attention.alternatives.spatial_reduction import SpatialReductionAttention
from backbones.attention.dense import DenseAttention, split_heads
from backbones.attention.long_short import DualNormAttention
from backbones.attention.sliding_chunk import SlidingChunkAttention
from backbones.backbone import Backbone
from projects_vil.visualization.drawing import write_image
from projects_vil.visualization.inspection import SeenImage, backbone_of, load_model, see_image
from projects_vil.visualization.panels import PANEL_WIDTH, fit, in_rows, sheet

COLUMNS = 4
MIN_CROP = 16  # tokens; a smaller neighbourhood is drawn with what is round it
QUERY_COLOR = (0, 255, 0)
CROP_COLOR = (255, 255, 0)
_VALUE_LAYERS = ("qkv", "key_value", "local_norm", "projected_norm")
_SCORE_LAYER = "dynamic_projection"

Frame = tuple[int, int, int, int]  # top, left, bottom, right in pixels


@dataclasses.dataclass(frozen=True)
class Attention:
    """Where one token looks; ``direct``, ``projected`` and ``to_globals`` together sum to 1 in each of the M heads.

    Attributes:
        direct: (M, H, W), on the tokens of the map themselves.
        projected: (M, K), on keys that each sum up many tokens: those of a dynamic projection, or of a reduced map.
        spread: (M, H, W), the weights of ``projected`` handed on to what each sums up: by the dynamic projection's P,
            or evenly over R x R tokens. An account of where they come from, since the norm or convolution that follows
            is not part of it.
        to_globals: (M, G).
    """

    direct: Tensor
    projected: Tensor
    spread: Tensor
    to_globals: Tensor

    @property
    def on_map(self) -> Tensor:
        """(M, H, W); with ``to_globals`` it sums to 1 in each head."""
        return self.direct + self.spread


def attention_of(module: nn.Module, tokens: Tensor, global_tokens: Tensor | None, row: int, col: int) -> Attention:
    """The attention weights of one token of a map.

    Args:
        module: an attention of :mod:`backbones`, in eval mode.
        tokens, global_tokens: its input, (1, H, W, C) and (1, G, C) or None.
        row, col: of the token.

    Raises:
        InputError: for a module whose weights do not sum to 1 (Linformer), or that is no attention.
    """
    kinds = (DenseAttention, DualNormAttention, GlobalMemoryAttention, PerformerAttention, SlidingChunkAttention)
    if not isinstance(module, (*kinds, SpatialReductionAttention)):
        raise InputError(f"{type(module).__name__} has no attention weights to draw")
    height, width = tokens.shape[1:3]
    with torch.enable_grad(), _leaves(module) as (leaves, outputs):
        module(tokens.detach(), None if global_tokens is None else global_tokens.detach())
        # Local tokens come first, or after the global ones in one sequence.
        local = outputs[0].flatten(0, -2)[-height * width :]
        head_channel = local[row * width + col].unflatten(0, (module.num_heads, -1))[:, 0].sum()
        used = [(name, leaf) for name in _VALUE_LAYERS for leaf in leaves[name]]
        gradients = torch.autograd.grad(head_channel, [leaf for _, leaf in used], materialize_grads=True)
    weights = defaultdict(list)
    for (name, _), gradient in zip(used, gradients, strict=True):
        weights[name].append(_head_weights(gradient, module))

    num_global = 0 if global_tokens is None else global_tokens.shape[1]
    direct = spread = tokens.new_zeros(module.num_heads, height * width)
    projected = to_globals = tokens.new_zeros(module.num_heads, 0)
    if isinstance(module, DualNormAttention):
        # Keys and values by turns; those of the global tokens first
        direct, projected = weights["local_norm"][-1], weights["projected_norm"][-1]
        to_globals = weights["local_norm"][1] if num_global else to_globals
        # (M, H * W, r)
        shares = split_heads(leaves[_SCORE_LAYER][0].detach(), module.num_heads)[0].flatten(1, 2).softmax(dim=1)
        spread = (shares @ projected[..., None])[..., 0]
    elif isinstance(module, SlidingChunkAttention):
        direct = weights["key_value"][0]
        to_globals = weights["key_value"][1] if num_global else to_globals
    elif isinstance(module, GlobalMemoryAttention):
        to_globals = weights["key_value"][0]
    elif isinstance(module, SpatialReductionAttention):
        to_globals, projected = weights["key_value"][0].tensor_split([num_global], dim=1)
        spread = _spread_evenly(projected, module.reduction, height, width).flatten(1)
        if module.reduction == 1:
            direct, spread, projected = spread, direct, projected[:, :0]
    else:
        to_globals, direct = weights["qkv"][0].tensor_split([num_global], dim=1)
    direct, spread = (x.unflatten(1, (height, width)) for x in (direct, spread))
    return Attention(direct=direct, projected=projected, spread=spread, to_globals=to_globals)


@contextlib.contextmanager
def _leaves(module: nn.Module) -> Iterator[tuple[dict[str, list[Tensor]], list[Tensor]]]:
    """Collect what layers with values give, by name, and what the output projection takes, each in order of its calls.

    What the layers give becomes a leaf, so that a gradient ends there: queries, keys and projections stay fixed.
    """
    leaves, outputs, handles = defaultdict(list), [], []

    def cut(name: str):
        def hook(layer: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
            leaves[name].append(output.detach().requires_grad_())
            return leaves[name][-1]

        return hook

    for name, layer in module.named_children():
        if name in (*_VALUE_LAYERS, _SCORE_LAYER):
            handles.append(layer.register_forward_hook(cut(name)))
    handles.append(module.projection.register_forward_pre_hook(lambda layer, inputs: outputs.append(inputs[0])))
    try:
        yield leaves, outputs
    finally:
        for handle in handles:
            handle.remove()


def _head_weights(gradient: Tensor, module: nn.Module) -> Tensor:
    """(1, ..., n * C), values last -> the first channel of each head, (M, L)."""
    values = gradient.flatten(0, -2)[:, -module.projection.in_features :]
    return values.unflatten(1, (module.num_heads, -1))[:, :, 0].T


def _spread_evenly(weights: Tensor, reduction: int, height: int, width: int) -> Tensor:
    """(M, K) of a reduced map -> (M, height, width); what does not fill a place at the end of the map is not seen."""
    rows, cols = max(1, height // reduction), max(1, width // reduction)
    each = weights / (min(reduction, height) * min(reduction, width))
    spread = each.unflatten(1, (rows, cols)).repeat_interleave(reduction, 1).repeat_interleave(reduction, 2)
    spread = spread[:, :height, :width]
    return F.pad(spread, (0, width - spread.shape[2], 0, height - spread.shape[1]))


# -- drawing ---------------------------------------------------------------------------------------


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
    """Draw where the token at a pixel looks: the image with the token, then its attention, a panel a head.

    A neighbourhood smaller than the map is enlarged, and its frame drawn in the image. Colours go from the least to the
    largest weight of a token that is seen; a title gives both, and what the head spends on the global tokens. What it
    spends on projected keys or reduced places is a panel of its own.

    Args:
        cfg: of a detector or segmentor.
        weights: its checkpoint; None for random weights.
        image_file: the image.
        output: folder for the PNG.
        stage, block: of the backbone, from 1.
        point: y and x, in pixels of the image file.

    Returns:
        The PNG's path.

    Raises:
        InputError: for a stage or block that does not exist or has no attention or none on the map, a point outside
            the image, or files that cannot be read or written.
    """
    model = load_model(cfg, weights)
    module = _attention_module(backbone_of(model), stage, block)
    image = see_image(cfg, model, image_file)
    y, x = image.find(point)
    tokens, global_tokens = _input_of(module, backbone_of(model), image.batch)
    stride = image.batch.shape[2] // tokens.shape[1]
    row, col = y // stride, x // stride
    attention = attention_of(module, tokens, global_tokens, row, col)
    if not attention.on_map.any():
        raise InputError(
            f"the tokens of stage {stage} look at its {attention.to_globals.shape[1]} global tokens alone: "
            "there is nothing to draw on the image"
        )
    panels = _draw(module, attention, image, stride, row, col)
    title = f"{image.path.name}: stage {stage}, block {block}, {type(module).__name__}, point {point[0]} {point[1]}"
    place = f"{cfg.MODEL.TRANSFORMER.NAME}_stage{stage}_block{block}_{point[0]}_{point[1]}"
    path = Path(output) / f"{image.path.stem}_{place}.png"
    write_image(path, sheet(title, in_rows(panels, COLUMNS)))
    return path


def _attention_module(backbone: Backbone, stage: int, block: int) -> nn.Module:
    if not 1 <= stage <= len(backbone.stages):
        raise InputError(f"--stage is {stage}: the backbone has the stages 1 to {len(backbone.stages)}")
    blocks = backbone.stages[stage - 1].blocks
    if not 1 <= block <= len(blocks):
        raise InputError(f"--block is {block}: stage {stage} has the blocks 1 to {len(blocks)}")
    module = blocks[block - 1].attention
    if module is None:
        raise InputError(f"--stage is {stage}: its blocks are MLPs, without attention")
    return module


@torch.no_grad()
def _input_of(module: nn.Module, backbone: Backbone, batch: Tensor) -> tuple[Tensor, Tensor | None]:
    """What reaches an attention module when the backbone sees a batch."""
    caught = []
    handle = module.register_forward_pre_hook(lambda module, inputs: caught.append(inputs))
    try:
        backbone(batch)
    finally:
        handle.remove()
    return caught[0]


def _draw(
    module: nn.Module, attention: Attention, image: SeenImage, stride: int, row: int, col: int
) -> list[tuple[str, np.ndarray]]:
    """Titled panels: the image, and of each head the tokens it looks at, and those it looks at by projected keys."""
    cell = (row * stride, col * stride, (row + 1) * stride, (col + 1) * stride)
    height, width = image.pixels.shape[:2]
    whole, scale = fit(image.pixels)
    frame = (0, 0, height, width)
    if attention.direct.any():
        frame = _frame(attention.direct.sum(dim=0), image, stride)
        if frame != (0, 0, height, width):
            _rectangle(whole, frame, scale, CROP_COLOR)
    _rectangle(whole, cell, scale, QUERY_COLOR)
    center = round((cell[1] + cell[3]) / 2 * scale), round((cell[0] + cell[2]) / 2 * scale)
    cv2.circle(whole, center, PANEL_WIDTH // 32, QUERY_COLOR, 2, cv2.LINE_AA)
    panels = [(f"{height} x {width} pixels, a token has {stride} x {stride}", whole)]

    heads = range(module.num_heads)
    to_globals = [""] * module.num_heads
    if attention.to_globals.numel():
        to_globals = [f", globals {_percent(weights.sum())}" for weights in attention.to_globals]
    if attention.direct.any():
        for head in heads:
            text, panel = _heat_map(attention.direct[head], image, stride, frame, cell)
            panels.append((f"head {head + 1}: {text}{to_globals[head]}", panel))
        to_globals = [""] * module.num_heads
    if attention.projected.numel():
        kind = "reduced places" if isinstance(module, SpatialReductionAttention) else "projected keys"
        for head in heads:
            text, panel = _heat_map(attention.spread[head], image, stride, (0, 0, height, width), cell)
            share = _percent(attention.projected[head].sum())
            panels.append((f"head {head + 1}, {kind} {share}: {text}{to_globals[head]}", panel))
    return panels


def _percent(share: Tensor) -> str:
    return f"{100 * share.item():.3g}%"


def _frame(total: Tensor, image: SeenImage, stride: int) -> Frame:
    """The part of the image that has all that is looked at."""
    sides = []
    for axis, length in enumerate(image.pixels.shape[:2]):
        seen = total.sum(dim=1 - axis).nonzero().flatten()
        first, last = int(seen[0]), int(seen[-1]) + 1
        missing = max(0, MIN_CROP - (last - first))
        first, last = (first - missing // 2) * stride, (last + missing - missing // 2) * stride
        shift = max(0, -first) - max(0, last - length)
        sides.append((max(0, first + shift), min(length, last + shift)))
    (top, bottom), (left, right) = sides
    return top, left, bottom, right


def _heat_map(weights: Tensor, image: SeenImage, stride: int, frame: Frame, cell: Frame) -> tuple[str, np.ndarray]:
    """Weights (H, W) over a part of the image, and their range: colours go from the least that is seen to the largest.

    The image is grey and dim; a token that is not seen has no colour.
    """
    top, left, bottom, right = frame
    seen = weights > 0
    least, largest = weights[seen].min() if seen.any() else weights.max(), weights.max()
    heat = ((weights - least) / (largest - least).clamp(min=1e-30)).clamp(min=0)
    opacity = (0.25 + 0.55 * heat) * seen
    heat, opacity = (
        x.double().numpy().repeat(stride, axis=0).repeat(stride, axis=1)[top:bottom, left:right]
        for x in (heat, opacity)
    )
    grey = cv2.cvtColor(image.pixels[top:bottom, left:right], cv2.COLOR_RGB2GRAY)[:, :, None]
    colored = cv2.applyColorMap((heat * 255).round().astype(np.uint8), cv2.COLORMAP_INFERNO)[:, :, ::-1]
    opacity = opacity[:, :, None]
    panel, scale = fit(((1 - opacity) * 0.6 * grey + opacity * colored).round().astype(np.uint8))
    _rectangle(panel, (cell[0] - top, cell[1] - left, cell[2] - top, cell[3] - left), scale, QUERY_COLOR)
    return f"{_percent(least)} to {_percent(largest)} each", panel


def _rectangle(panel: np.ndarray, frame: Frame, scale: float, color: tuple[int, int, int]) -> None:
    top, left, bottom, right = (round(side * scale) for side in frame)
    cv2.rectangle(panel, (left, top), (right - 1, bottom - 1), color, 2)
