"""Images that a detector is traced with and compared on, and letterboxing for models of one size."""

from collections.abc import Sequence
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from torch import Tensor

from projects_vil.data import read_for_testing, read_image, size_for_testing
from projects_vil.modeling import MIN_EXPORT_SIDE


def letterbox_size(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width of an image that is scaled, keeping its shape, to the largest that fits ``size``."""
    scale = min(size[0] / height, size[1] / width)
    return int(height * scale + 0.5), int(width * scale + 0.5)


def pad_image(image: Tensor, size: tuple[int, int], mean: Sequence[float]) -> Tensor:
    """Pad (3, h, w), h and w at most ``size``, to (3, *size) with the rounded ``mean`` below and on the right.

    Normalised, that is about 0, as detectron2's padding.
    """
    canvas = torch.tensor(mean).round().to(image.dtype)[:, None, None].repeat(1, *size)
    canvas[:, : image.shape[1], : image.shape[2]] = image
    return canvas


def example_image(height: int, width: int, *, seed: int = 0) -> Tensor:
    """Return a (3, height, width) uint8 image of bright rectangles on dim noise, for a detector to find."""
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
    """Return images (3, H, W) uint8 to compare on: the files, in the format and size of testing, or synthetic ones.

    Args:
        fixed: height and width of all of them, for a model that takes nothing else.

    Raises:
        ConfigError: for a file that cannot be read.
    """
    if files:
        return [_read(cfg, file, fixed) for file in files]
    if fixed:
        return [example_image(*fixed, seed=seed) for seed in range(1, 5)]
    sizes = [size_for_testing(cfg, *size) for size in ((400, 600), (600, 450), (360, 600), (500, 500))]
    # The last is smaller than in testing; no model takes a side below the smallest.
    sizes[-1] = tuple(side // 2 + 3 for side in sizes[-1])
    sizes = [tuple(max(side, MIN_EXPORT_SIDE) for side in size) for size in sizes]
    return [example_image(*size, seed=seed) for seed, size in enumerate(sizes, start=1)]


def _read(cfg: CfgNode, file: str | Path, fixed: tuple[int, int] | None) -> Tensor:
    if fixed is None:
        pixels, _ = read_for_testing(cfg, file, image_format=cfg.INPUT.FORMAT)
    else:
        pixels = read_image(file, cfg.INPUT.FORMAT)
        height, width = pixels.shape[:2]
        pixels = T.ResizeTransform(height, width, *letterbox_size(height, width, fixed)).apply_image(pixels)
    image = torch.as_tensor(pixels.transpose(2, 0, 1).copy())
    return pad_image(image, fixed, cfg.MODEL.PIXEL_MEAN) if fixed else image
