"""The best of many candidates, without a number that is decided while a model is recorded."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import nms

_LEAST = -1e30  # below every score


def best_of_row(scores: Tensor, number: int, *, filler: float) -> tuple[Tensor, Tensor]:
    """The ``number`` largest values of each row and their places, from the largest: (B, N) -> (B, number) twice.

    Of a row that has fewer, the rest is ``filler``, at place 0.
    """
    # Put before the values, the fillers are known by their place alone, whatever N is.
    best, place = F.pad(scores, (number, 0), value=filler).topk(number, dim=1)
    place = place - number
    return best, place.maximum(place.new_zeros(()))


def best_above(scores: Tensor, threshold: float, number: int, *, batched: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The ``number`` largest values of each row that are above ``threshold``: rows, places and values, (N,) each.

    Args:
        scores: (B, N'), B of 1 where not ``batched``.
    """
    if batched:
        best, place = best_of_row(scores, number, filler=-math.inf)
        row, rank = (best > threshold).nonzero().unbind(1)
        return row, place[row, rank], best[row, rank]
    # Few of the millions of a large map pass: two to thirty times as fast as looking for the best of all.
    row, place = (scores > threshold).nonzero().unbind(1)
    check_writable(place)
    values = scores[row, place]
    best, index = best_of_row(values[None], number, filler=-math.inf)
    kept = index[0, (best[0] > threshold).nonzero()[:, 0]]
    return row[kept], place[kept], values[kept]


def divided(index: Tensor, number: int) -> Tensor:
    """``index // number`` of what is not negative: for ``//`` ONNX would ask for signs, and compare booleans."""
    return torch.div(index, number, rounding_mode="trunc")


def check_writable(x: Tensor) -> None:
    """Tell ``torch.export`` a bound for the length of ``x``; that of a product with it could be too large for ONNX."""
    if not torch.jit.is_tracing():
        torch._check(x.shape[0] <= 2**31)


def best_without_overlap(
    boxes: Tensor,
    scores: Tensor,
    *,
    group: Tensor,
    groups_per_image: int,
    threshold: float,
    number: int,
    image: Tensor | None = None,
    num_images: int = 1,
) -> Tensor:
    """Non-maximum suppression within groups, then the best of each image.

    Args:
        boxes: (N, 4). scores: (N,).
        group: (N,), 0 to ``num_images * groups_per_image - 1``.
        threshold: of the overlap.
        number: that are kept of each image; below 0 all.
        image: (N,), 0 to ``num_images - 1``; None for one image.

    Returns:
        Indices of the kept, the highest score first.
    """
    columns = math.ceil(math.sqrt(groups_per_image))
    # With a value of their own, because there may be no box.
    ends = F.pad(boxes.flatten(), (0, 1))
    field = ends.max() - ends.min() + 1
    offset = torch.stack([group % columns, divided(group, columns)], dim=1).to(boxes.dtype) * field
    # torchvision tells torch.export that it keeps two boxes or more: two without an area see to that, and come last.
    # OpenVINO would leave out scores of minus infinity.
    boxes = F.pad(boxes + offset.repeat(1, 2), (0, 0, 0, 2))
    kept = nms(boxes, F.pad(scores, (0, 2), value=_LEAST), threshold)[:-2]
    if number < 0:
        return kept
    if image is None:
        return kept[:number]
    return kept[rank_in_image(image[kept], num_images) < number]


def rank_in_image(image: Tensor, num_images: int) -> Tensor:
    """How many before each are of the same image: (N,), 0 to ``num_images - 1``, -> (N,) int64."""
    # (N, B): how many of each image there are up to here. TensorRT's CumSum takes no int64; in float32 this is exact.
    of_image = (image[:, None] == torch.arange(num_images, device=image.device)).float()
    return (of_image.cumsum(0) * of_image).sum(1).long() - 1
