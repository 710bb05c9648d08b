"""Detections in a fixed number of rows, for runtimes that must know the shape of what comes out."""

import torch
from torch import Tensor

from projects_vil.export.exportable.nms import rank_in_image


def filled_up(found: dict[str, Tensor], *, number: int, num_images: int) -> dict[str, Tensor]:
    """As many rows for each image as it may have detections: those that it has, then zeros.

    Args:
        found: (D, ...) each, the best of an image first, with ``image_index``, (D,); at most ``number`` of an image.
        num_images: B.

    Returns:
        (B, number, ...) each, without ``image_index``, and ``count``, (B,) int64: how many rows are detections.
    """
    image = found["image_index"]
    rank = rank_in_image(image, num_images)
    rows = {name: value for name, value in found.items() if name != "image_index"}
    # Its shape is that of the zeros, so that it does not depend on how many there are.
    rows = {
        name: value.new_zeros(num_images, number, *value.shape[1:]).index_put((image, rank), value)
        for name, value in rows.items()
    }
    of_image = image[:, None] == torch.arange(num_images, device=image.device)
    return rows | {"count": of_image.long().sum(0)}


def without_filling(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """What :func:`filled_up` was given: (D, ...) each, the best of all images first, with ``image_index``."""
    count = rows["count"]
    is_real = torch.arange(rows["scores"].shape[1], device=count.device) < count[:, None]
    found = {name: value[is_real] for name, value in rows.items() if name != "count"}
    found["image_index"] = is_real.nonzero()[:, 0]
    order = found["scores"].argsort(descending=True, stable=True)
    return {name: value[order] for name, value in found.items()}
