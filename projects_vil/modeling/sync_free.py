"""Parts of detectron2's detectors that compute the same results without synchronizing with the GPU."""

from collections.abc import Sequence

import torch
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from torch import Tensor, nn


def grid_anchors(generator: DefaultAnchorGenerator, sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the anchors of each feature map, (H * W * A, 4), XYXY in pixels, as ``generator`` does.

    Args:
        generator: The anchor generator, with A anchors per position.
        sizes: Height and width of each feature map.
    """
    anchors = []
    for size, stride, cells in zip(sizes, generator.strides, generator.cell_anchors, strict=True):
        top, left = (
            stride * (generator.offset + torch.arange(number, dtype=cells.dtype, device=cells.device))
            for number in size
        )
        # (H, W, 1, 4) and (A, 4)
        top, left = torch.meshgrid(top, left, indexing="ij")
        shifts = torch.stack([left, top, left, top], dim=-1)[:, :, None]
        anchors.append((shifts + cells).flatten(0, 2))
    return anchors


class SyncFreeAnchorGenerator(DefaultAnchorGenerator):
    """detectron2's anchors, with grids that are created on the device instead of copied to it.

    Args:
        generator: The generator to replace.
    """

    def __init__(self, generator: DefaultAnchorGenerator) -> None:
        nn.Module.__init__(self)
        self.strides, self.offset = generator.strides, generator.offset
        self.num_features, self.cell_anchors = generator.num_features, generator.cell_anchors

    _grid_anchors = grid_anchors


class SyncFreeMatcher(Matcher):
    """detectron2's matches, with masks instead of indices and without the check that IoUs are not negative.

    Args:
        matcher: The matcher to replace.
    """

    def __init__(self, matcher: Matcher) -> None:
        # detectron2 adds infinities at both ends.
        super().__init__(matcher.thresholds[1:-1], matcher.labels, matcher.allow_low_quality_matches)

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


class SyncFreeBoxTransform(Box2BoxTransform):
    """detectron2's box deltas, without the check that widths are positive.

    Args:
        transform: The transform to replace.
    """

    def __init__(self, transform: Box2BoxTransform) -> None:
        super().__init__(transform.weights, transform.scale_clamp)

    def get_deltas(self, src_boxes: Tensor, target_boxes: Tensor) -> Tensor:
        deltas = []
        for axis in range(2):
            size, target_size = (boxes[:, 2 + axis] - boxes[:, axis] for boxes in (src_boxes, target_boxes))
            center, target_center = src_boxes[:, axis] + 0.5 * size, target_boxes[:, axis] + 0.5 * target_size
            deltas.append(self.weights[axis] * (target_center - center) / size)
            deltas.append(self.weights[2 + axis] * torch.log(target_size / size))
        return torch.stack(deltas[::2] + deltas[1::2], dim=1)


_SYNC_FREE = {
    DefaultAnchorGenerator: SyncFreeAnchorGenerator,
    Matcher: SyncFreeMatcher,
    Box2BoxTransform: SyncFreeBoxTransform,
}


def use_sync_free_parts(detector: nn.Module) -> None:
    """Replace the anchor generators, matchers and box transforms of a detector by the classes of this module.

    Parts of other classes, including subclasses, are not replaced.
    """
    for module in list(detector.modules()):
        for name, part in [*module.named_children(), *vars(module).items()]:
            if type(part) in _SYNC_FREE:
                setattr(module, name, _SYNC_FREE[type(part)](part))
