"""Image files as training, testing, drawing and predicting read them: one function for all, so that they agree."""

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from detectron2.data.detection_utils import (
    _apply_exif_orientation,
    convert_PIL_to_numpy,
)
from detectron2.structures import BitMasks, Boxes
from detectron2.utils.file_io import PathManager
from PIL import ExifTags, Image, UnidentifiedImageError

from backbones import InputError

# By which image files are known in folders.
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".dib", ".tif", ".tiff", ".webp", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"),
)
# What Pillow's readers raise on files that are damaged, too large, or of a kind that cannot become RGB.
_DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    RuntimeError,
    OverflowError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
_ROTATED = (5, 6, 7, 8)  # EXIF orientations that exchange height and width


class UnreadableImage(InputError):
    """An image file that cannot be read.

    Attributes:
        reason: why, without the file's name.
    """

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"cannot read the image {path}: {reason}")
        self.reason = reason


def read_image(path: str | Path, image_format: str | None = "RGB") -> np.ndarray:
    """An image file as (H, W, channels) uint8, upright as its EXIF orientation says.

    As detectron2's ``read_image``: Pillow's conversion to ``image_format``, so that transparency is dropped, not
    blended with a background, and the first frame is taken of several. It differs in three things. Channels of 16 bits
    keep their upper 8 (Pillow clips grey ones at 255, which leaves a white image), those of 32 bits, whose range the
    file does not tell, are refused, and a TIFF is turned upright once, not twice.

    Args:
        path: local, or what detectron2's ``PathManager`` knows.
        image_format: ``"RGB"``, ``"BGR"`` or another of detectron2's.

    Raises:
        UnreadableImage: for a file that is missing, truncated, damaged or no image.
    """
    try:
        _check_is_regular(path)
        with PathManager.open(str(path), "rb") as file, Image.open(file) as image:
            return _pixels(image, image_format)
    except _DAMAGED as error:
        raise UnreadableImage(path, _reason(path, error)) from error


def read_unturned(path: str | Path) -> Image.Image:
    """An image file as RGB, not turned upright: as evaluations on ImageNet read it, timm's and torchvision's.

    Raises:
        UnreadableImage: for a file that is missing, truncated, damaged or no image.
    """
    try:
        _check_is_regular(path)
        with PathManager.open(str(path), "rb") as file, Image.open(file) as image:
            return _in_8_bits(image, image.format).convert("RGB")
    except _DAMAGED as error:
        raise UnreadableImage(path, _reason(path, error)) from error


def read_size(path: str | Path) -> tuple[int, int]:
    """Height and width that an image file will have once it is read, from its header alone.

    Raises:
        UnreadableImage: for a file that is missing or no image.
    """
    try:
        _check_is_regular(path)
        with PathManager.open(str(path), "rb") as file, Image.open(file) as image:
            return upright_size(image)
    except _DAMAGED as error:
        raise UnreadableImage(path, _reason(path, error)) from error


def upright_pixels(image: Image.Image, image_format: str | None = "RGB", *, name: str = "the image") -> np.ndarray:
    """As :func:`read_image`, of an image that Pillow has opened or made.

    Args:
        image: stays as it is.
        image_format: as for :func:`read_image`.
        name: by which an error names it.

    Raises:
        UnreadableImage: for a truncated or damaged file, or channels that cannot become RGB.
    """
    try:
        return _pixels(image, image_format)
    except _DAMAGED as error:
        raise UnreadableImage(name, _reason("", error)) from error


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Height and width that an image will have in :func:`upright_pixels`, without looking at its pixels."""
    width, height = image.size
    # Without this Pillow would look for EXIF behind the pixels of a PNG.
    orientation = image.getexif().get(ExifTags.Base.Orientation) if "exif" in image.info else None
    is_rotated = orientation in _ROTATED and image.format != "TIFF"
    return (width, height) if is_rotated else (height, width)


def _check_is_regular(path: str | Path) -> None:
    # Opening a pipe waits for someone who writes to it, perhaps for ever.
    if not os.path.isfile(path) and os.path.exists(path) and not os.path.isdir(path):
        raise OSError("it is no regular file")


def _pixels(image: Image.Image, image_format: str | None) -> np.ndarray:
    # A TIFF becomes upright by loading, and then has no orientation left.
    image.load()
    upright = _apply_exif_orientation(image)
    return convert_PIL_to_numpy(_in_8_bits(upright, image.format), image_format)


def _in_8_bits(image: Image.Image, file_format: str | None) -> Image.Image:
    # Pillow gives grey channels of 16 bits as "I;16" or, of a PGM and in older versions of a PNG, as "I".
    if image.mode.startswith("I;16") or (image.mode == "I" and file_format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its channel has 32 bits, of a range that it does not tell: convert it to 8 or 16 bits")
    return image


def _reason(path: str | Path, error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        is_empty = os.path.isfile(path) and not os.path.getsize(path)
        return "it is empty" if is_empty else "it is no image of a known format"
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__


def read_for_testing(cfg: CfgNode, path: str | Path, *, image_format: str) -> tuple[np.ndarray, tuple[int, int]]:
    """An image file (H, W, 3) uint8, resized as for testing, and its height and width before.

    Raises:
        InputError: for a file that cannot be read.
    """
    original = read_image(path, image_format)
    height, width = original.shape[:2]
    resize = T.ResizeTransform(height, width, *size_for_testing(cfg, height, width))
    return np.ascontiguousarray(resize.apply_image(original)), (height, width)


def size_for_testing(cfg: CfgNode, height: int, width: int) -> tuple[int, int]:
    """Height and width that an image has after ``INPUT.MIN_SIZE_TEST`` and ``INPUT.MAX_SIZE_TEST``."""
    short = cfg.INPUT.MIN_SIZE_TEST
    if not short:
        return height, width
    return T.ResizeShortestEdge.get_output_shape(height, width, short, cfg.INPUT.MAX_SIZE_TEST)


def boxes_of_masks(masks: BitMasks, boxes: Boxes) -> Boxes:
    """The boxes of what is left of objects that were cut off or covered.

    A mask is of whole pixels, so that its box is up to one off on each side, which is much of a small object. A side
    that is no farther from the object's own stays where that is.

    Args:
        masks: N of (H, W).
        boxes: of the objects (N, 4), inside the image.
    """
    seen = masks.get_bounding_boxes().tensor
    is_rounded = (seen - boxes.tensor).abs() <= 1
    return Boxes(torch.where(is_rounded, boxes.tensor, seen))
