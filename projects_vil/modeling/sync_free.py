"""Parts of detectron2's detectors that compute the same without the host waiting for a GPU."""

import torch
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from torch import Tensor, nn


class DeviceAnchorGenerator(DefaultAnchorGenerator):
    """detectron2's anchors, whose grids are made on the device instead of copied to it."""

    def _grid_anchors(self, grid_sizes: list[list[int]]) -> list[Tensor]:
        anchors = []
        for size, stride, cells in zip(grid_sizes, self.strides, self.cell_anchors, strict=True):
            rows, columns = (
                stride * (self.offset + torch.arange(number, dtype=cells.dtype, device=cells.device)) for number in size
            )
            shifts = torch.cartesian_prod(rows, columns).flip(1).repeat(1, 2)
            anchors.append((shifts[:, None] + cells).reshape(-1, 4))
        return anchors


class DeviceMatcher(Matcher):
    """detectron2's matches, with masks instead of indices and without its assertion that IoUs are not negative."""

    def __call__(self, match_quality_matrix: Tensor) -> tuple[Tensor, Tensor]:
        if match_quality_matrix.numel() == 0:
            return super().__call__(match_quality_matrix)
        best, matches = match_quality_matrix.max(dim=0)
        labels = torch.ones_like(matches, dtype=torch.int8)
        for label, low, high in zip(self.labels, self.thresholds[:-1], self.thresholds[1:], strict=True):
            labels.masked_fill_((best >= low) & (best < high), label)
        if self.allow_low_quality_matches:
            is_best = match_quality_matrix == match_quality_matrix.amax(dim=1, keepdim=True)
            labels.masked_fill_(is_best.any(dim=0), 1)
        return matches, labels


class DeviceBoxTransform(Box2BoxTransform):
    """detectron2's deltas between boxes, without its assertion that their widths are positive."""

    def get_deltas(self, src_boxes: Tensor, target_boxes: Tensor) -> Tensor:
        deltas = []
        for axis in range(2):
            size, target_size = (boxes[:, 2 + axis] - boxes[:, axis] for boxes in (src_boxes, target_boxes))
            center, target_center = src_boxes[:, axis] + 0.5 * size, target_boxes[:, axis] + 0.5 * target_size
            deltas.append(self.weights[axis] * (target_center - center) / size)
            deltas.append(self.weights[2 + axis] * torch.log(target_size / size))
        return torch.stack(deltas[::2] + deltas[1::2], dim=1)


_REPLACED = {
    DefaultAnchorGenerator: DeviceAnchorGenerator,
    Matcher: DeviceMatcher,
    Box2BoxTransform: DeviceBoxTransform,
}


def avoid_waits(model: nn.Module) -> None:
    """Give parts of a detector the classes of this module, where theirs are detectron2's own."""
    for module in model.modules():
        for part in (module, *vars(module).values()):
            if type(part) in _REPLACED:
                part.__class__ = _REPLACED[type(part)]
