"""Looking inside a model: its backbone, and an image as the backbone sees it."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.structures import ImageList
from torch import Tensor, nn

from backbones import InputError
from backbones.backbone import Backbone
from projects_vil.checkpoint import load_detector
from projects_vil.data import read_for_testing
from projects_vil.modeling import TransformerBackbone


@dataclasses.dataclass(frozen=True)
class SeenImage:
    """An image as a backbone sees it.

    Attributes:
        path: its file.
        file_size: height and width of the file, in pixels.
        pixels: (H, W, 3) uint8 RGB, resized as for testing.
        batch: (1, 3, H', W'), normalised, and padded below and on the right.
    """

    path: Path
    file_size: tuple[int, int]
    pixels: np.ndarray
    batch: Tensor

    def find(self, point: Sequence[int]) -> tuple[int, int]:
        """Row and column in ``pixels`` of a pixel of the file.

        Raises:
            InputError: for a point outside the image.
        """
        (y, x), (height, width) = point, self.file_size
        if not (0 <= y < height and 0 <= x < width):
            raise InputError(f"--point {y} {x} is outside {self.path}, which is {height} pixels high and {width} wide")
        rows, cols = self.pixels.shape[:2]
        return (2 * y + 1) * rows // (2 * height), (2 * x + 1) * cols // (2 * width)


def load_model(cfg: CfgNode, weights: str | Path | None = None) -> nn.Module:
    """The model of a config on the CPU, in eval mode; without weights it is random, and a warning says so.

    Raises:
        InputError: for a backbone that is none of this project's, or weights that are missing or do not fit.
    """
    model, _ = load_detector(cfg, weights or "", complete=False)
    if not isinstance(getattr(model.backbone, "bottom_up", None), TransformerBackbone):
        raise InputError(f"MODEL.BACKBONE.NAME is {cfg.MODEL.BACKBONE.NAME}: none of this project's")
    if not weights:
        logging.getLogger(__name__).warning("no weights were given (--weights): those of the model are random")
    return model


def backbone_of(model: nn.Module) -> Backbone:
    return model.backbone.bottom_up.net


def see_image(cfg: CfgNode, model: nn.Module, path: str | Path) -> SeenImage:
    """Read an image, and resize, normalise and pad it as for testing.

    Raises:
        InputError: for a file that cannot be read.
    """
    pixels, file_size = read_for_testing(cfg, path, image_format="RGB")
    channels = pixels[:, :, ::-1] if cfg.INPUT.FORMAT == "BGR" else pixels
    image = torch.as_tensor(channels.transpose(2, 0, 1).astype("float32"))
    image = (image - model.pixel_mean) / model.pixel_std
    batch = ImageList.from_tensors([image], model.backbone.size_divisibility).tensor
    return SeenImage(Path(path), file_size, pixels, batch)
