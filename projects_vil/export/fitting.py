"""Images for models that take one size: scaled into it, and padded."""

from collections.abc import Sequence

import torch
from torch import Tensor


def fitted_size(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of an image that is scaled, in its shape, to be as large as fits into ``size``."""
    scale = min(size[0] / height, size[1] / width)
    return int(height * scale + 0.5), int(width * scale + 0.5)


def padded(image: Tensor, size: tuple[int, int], mean: Sequence[float]) -> Tensor:
    """(3, h, w), h and w no more than ``size`` -> (3, *size), with the rounded ``mean`` below and on the right.

    Normalised, that is about 0: what detectron2 pads with.
    """
    canvas = torch.tensor(mean).round().to(image.dtype)[:, None, None].repeat(1, *size)
    canvas[:, : image.shape[1], : image.shape[2]] = image
    return canvas
