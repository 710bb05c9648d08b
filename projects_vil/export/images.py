"""Images that a detector is recorded with, compared on and calibrated with."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from torch import Tensor

from projects_vil.data import read_for_testing, read_image, size_for_testing
from projects_vil.export.fitting import fitted_size, padded
from projects_vil.modeling import SMALLEST_SIDE


def example_image(height: int, width: int, *, seed: int = 0) -> Tensor:
    """A (3, height, width) uint8 image of bright rectangles on dim noise: a detector has something to find."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(3, height, width, generator=generator) * 60
    for _ in range(6):
        top, left = (int(torch.randint(0, side * 3 // 4, (), generator=generator)) for side in (height, width))
        color = 100 + 155 * torch.rand(3, 1, 1, generator=generator)
        image[:, top : top + height // 5, left : left + width // 5] = color
    return image.to(torch.uint8)


def comparison_images(
    cfg: CfgNode, files: Sequence[str | Path] = (), *, fixed: tuple[int, int] | None = None
) -> list[Tensor]:
    """Images (3, H, W) uint8 to compare on: the files, in the format and size of testing, or four drawn ones.

    Args:
        fixed: height and width of all of them, for a model that takes nothing else.

    Raises:
        InputError: for a file that cannot be read.
    """
    if files and fixed:
        images = (read_image(file, cfg.INPUT.FORMAT) for file in files)
        return [_fitted(image, fixed, cfg.MODEL.PIXEL_MEAN) for image in images]
    if files:
        images = (read_for_testing(cfg, file, image_format=cfg.INPUT.FORMAT)[0] for file in files)
        return [_as_tensor(image) for image in images]
    if fixed:
        return [example_image(*fixed, seed=seed) for seed in range(1, 5)]
    sizes = [size_for_testing(cfg, *size) for size in ((400, 600), (600, 450), (360, 600), (500, 500))]
    # The last one is smaller than testing has it, and no model takes less than the least side.
    sizes[-1] = tuple(side // 2 + 3 for side in sizes[-1])
    sizes = [tuple(max(side, SMALLEST_SIDE) for side in size) for size in sizes]
    return [example_image(*size, seed=seed) for seed, size in enumerate(sizes, start=1)]


def _fitted(image: np.ndarray, size: tuple[int, int], mean: Sequence[float]) -> Tensor:
    """(H, W, 3) -> (3, *size)."""
    height, width = image.shape[:2]
    resize = T.ResizeTransform(height, width, *fitted_size(height, width, size))
    return padded(_as_tensor(resize.apply_image(image)), size, mean)


def _as_tensor(image: np.ndarray) -> Tensor:
    """(H, W, 3) -> (3, H, W)."""
    return torch.as_tensor(image.transpose(2, 0, 1).copy())
