"""Anchors and boxes."""

import torch
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from torch import Tensor


def per_anchor(predictions: Tensor, channels: int) -> Tensor:
    """(B, A * channels, H, W) -> (B, H * W * A, channels), in the order of :func:`grid_anchors`."""
    # A copy in any case: whether the axes can be joined without one depends on the size that is recorded.
    predictions = predictions.unflatten(1, (-1, channels)).permute(0, 3, 4, 1, 2)
    return predictions.clone(memory_format=torch.contiguous_format).flatten(1, 3)


def grid_anchors(generator: DefaultAnchorGenerator, maps: list[Tensor]) -> list[Tensor]:
    """The anchors of each map, (H * W * A, 4), XYXY in pixels: as ``generator`` makes them."""
    anchors = []
    for level, stride, cell in zip(maps, generator.strides, generator.cell_anchors, strict=True):
        top, left = (
            (torch.arange(size, dtype=torch.float32, device=cell.device) + generator.offset) * stride
            for size in level.shape[2:]
        )
        # (H, W, 1, 4) and (A, 4)
        top, left = torch.meshgrid(top, left, indexing="ij")
        shifts = torch.stack([left, top, left, top], dim=-1)[:, :, None]
        anchors.append((shifts + cell.float()).flatten(0, 2))
    return anchors


def decode(transform, deltas: Tensor, anchors: Tensor) -> Tensor:
    """Boxes (..., 4) that ``deltas`` (..., 4) make of ``anchors`` (..., 4): ``apply_deltas``, in float32."""
    deltas = deltas.float().unbind(-1)
    dx, dy, dw, dh = (delta / weight for delta, weight in zip(deltas, transform.weights, strict=True))
    left, top, right, bottom = anchors.unbind(-1)
    width, height = right - left, bottom - top
    center_x, center_y = left + 0.5 * width + dx * width, top + 0.5 * height + dy * height
    half_width = 0.5 * (dw.clamp(max=transform.scale_clamp).exp() * width)
    half_height = 0.5 * (dh.clamp(max=transform.scale_clamp).exp() * height)
    corners = center_x - half_width, center_y - half_height, center_x + half_width, center_y + half_height
    return torch.stack(corners, dim=-1)


def clip(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """The part of the boxes (..., 4) that is inside an image of ``size`` (height, width)."""
    height, width = size
    left, top, right, bottom = boxes.unbind(-1)
    corners = [
        left.clamp(min=0, max=width),
        top.clamp(min=0, max=height),
        right.clamp(min=0, max=width),
        bottom.clamp(min=0, max=height),
    ]
    return torch.stack(corners, dim=-1)


def has_area(boxes: Tensor, least: float = 0.0) -> Tensor:
    """(..., 4) -> (...): whether both sides are longer than ``least`` pixels."""
    left, top, right, bottom = boxes.unbind(-1)
    return (right - left > least) & (bottom - top > least)
