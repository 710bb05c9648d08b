"""Image and label files, read in one way by training, testing, visualization and prediction."""

import contextlib
import functools
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.data import transforms as T
from detectron2.data.detection_utils import _apply_exif_orientation, convert_PIL_to_numpy
from detectron2.structures import BitMasks, Boxes
from detectron2.utils.file_io import PathManager
from PIL import ExifTags, Image, UnidentifiedImageError

from backbones import ConfigError

# The suffixes of image files in folders.
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".dib", ".tif", ".tiff", ".webp", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"),
)
# The label of pixels that neither training nor evaluation counts, after a label image has been read.
IGNORED_LABEL = 255
# What Pillow's readers raise for files that are damaged, too large, or cannot become RGB.
_DAMAGED = (
    *(OSError, SyntaxError, ValueError, EOFError, RuntimeError, OverflowError, MemoryError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
_ROTATED = (5, 6, 7, 8)  # EXIF orientations that exchange height and width
# A detector's resize to a longest side of 1333 pixels leaves about three of a side that is this much shorter.
_LARGEST_RATIO = 400


class UnreadableImage(ConfigError):
    """An image file that cannot be read.

    Attributes:
        reason: why, without the file's name.
    """

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"cannot read the image {path}: {reason}")
        self.reason = reason


@contextlib.contextmanager
def _opened(path: str | Path, content: bytes | None = None) -> Iterator[Image.Image]:
    with _explained(path):
        # Opening a pipe waits until someone writes to it.
        if content is None and not os.path.isfile(path) and os.path.exists(path) and not os.path.isdir(path):
            raise OSError("not a regular file")
        with PathManager.open(str(path), "rb") if content is None else io.BytesIO(content) as file:
            with Image.open(file) as image:
                if max(image.size) > _LARGEST_RATIO * min(image.size):
                    raise ValueError(f"{image.size} pixels, of which one side is over {_LARGEST_RATIO} times the other")
                yield image


@contextlib.contextmanager
def _explained(name: str | Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            is_empty = os.path.isfile(name) and not os.path.getsize(name)
            reason = "it is empty" if is_empty else "not an image of a known format"
        raise UnreadableImage(name, reason) from error


def read_image(path: str | Path, image_format: str | None = "RGB", *, content: bytes | None = None) -> np.ndarray:
    """Read an image file as (H, W, channels) uint8, upright according to its EXIF orientation.

    As detectron2's ``read_image``: Pillow's conversion to ``image_format``, which drops transparency, and the first of
    several frames. There are three differences. Channels of 16 bits keep their upper 8 (Pillow clips grey ones at 255,
    which leaves a white image), those of 32 bits, whose range is unknown, are refused, and a TIFF is turned upright
    once, not twice.

    Args:
        path: local, or what detectron2's ``PathManager`` knows.
        image_format: ``"RGB"``, ``"BGR"`` or another one of detectron2's.
        content: the file's bytes, where they are not read from ``path``, which is then only a name.

    Raises:
        UnreadableImage: for a file that is missing, truncated, damaged or not an image.
    """
    with _opened(path, content) as image:
        return _pixels(image, image_format)


def read_size(path: str | Path, *, content: bytes | None = None) -> tuple[int, int]:
    """Return the height and width that :func:`read_image` would return, from only the file's header.

    Raises:
        UnreadableImage: for a file that is missing or not an image.
    """
    with _opened(path, content) as image:
        return upright_size(image)


def upright_pixels(image: Image.Image, image_format: str | None = "RGB", *, name: str = "the image") -> np.ndarray:
    """Return what :func:`read_image` would, for an image that Pillow has opened or made; ``name`` is for errors."""
    with _explained(name):
        return _pixels(image, image_format)


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the height and width of :func:`upright_pixels`, without reading the pixels."""
    width, height = image.size
    # Without this Pillow would look for EXIF behind the pixels of a PNG. A TIFF, whose size is upright, has none there.
    orientation = image.getexif().get(ExifTags.Base.Orientation) if "exif" in image.info else None
    return (width, height) if orientation in _ROTATED else (height, width)


def _pixels(image: Image.Image, image_format: str | None) -> np.ndarray:
    # A TIFF becomes upright by loading, and then has no orientation left.
    image.load()
    upright = _apply_exif_orientation(image)
    return convert_PIL_to_numpy(_in_8_bits(upright, image.format), image_format)


def _in_8_bits(image: Image.Image, file_format: str | None) -> Image.Image:
    # Pillow opens grey channels of 16 bits as "I;16" or, from a PGM and in older versions from a PNG, as "I".
    if image.mode.startswith("I;16") or (image.mode == "I" and file_format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its channel has 32 bits of an unknown range: convert it to 8 or 16 bits")
    return image


def read_for_testing(cfg: CfgNode, path: str | Path, *, image_format: str) -> tuple[np.ndarray, tuple[int, int]]:
    """Read an image file, resized as for testing, as (H, W, 3) uint8, and its original height and width.

    Raises:
        ConfigError: for a file that cannot be read.
    """
    original = read_image(path, image_format)
    height, width = original.shape[:2]
    resize = T.ResizeTransform(height, width, *size_for_testing(cfg, height, width))
    return np.ascontiguousarray(resize.apply_image(original)), (height, width)


def size_for_testing(cfg: CfgNode, height: int, width: int) -> tuple[int, int]:
    """Return height and width after the resize of ``INPUT.MIN_SIZE_TEST`` and ``INPUT.MAX_SIZE_TEST``."""
    short = cfg.INPUT.MIN_SIZE_TEST
    if not short:
        return height, width
    return T.ResizeShortestEdge.get_output_shape(height, width, short, cfg.INPUT.MAX_SIZE_TEST)


def boxes_of_masks(masks: BitMasks, boxes: Boxes) -> Boxes:
    """Return the boxes of the visible parts of cropped or covered objects.

    A mask consists of whole pixels, so that its box is up to one off on each side, which is much for a small object.
    Sides that are at most one pixel from those of the object's own box therefore stay as they are.

    Args:
        masks: N of (H, W).
        boxes: boxes of the objects (N, 4), inside the image.
    """
    visible = masks.get_bounding_boxes().tensor
    return Boxes(torch.where((visible - boxes.tensor).abs() <= 1, boxes.tensor, visible))


# -- label images ----------------------------------------------------------------------------------


def read_labels(path: str | Path, *, first_label: int, num_classes: int) -> np.ndarray:
    """Read a label image (H, W) as uint8 classes, 0 to ``num_classes`` - 1, and :data:`IGNORED_LABEL`.

    Args:
        path: a file with one 8-bit channel, or a palette whose indices are the labels.
        first_label: the file's label of the first class: 1 as published by ADE20K, where 0 is ignored, or 0, where 255
            is ignored.
        num_classes: number of classes of the dataset, at most 254.

    Raises:
        ConfigError: for a file that cannot be read, has another mode, or a label that is not a class.
    """
    with _opened(path) as image:
        mode, labels = image.mode, np.array(image)
    if mode not in ("L", "P"):
        raise ConfigError(f"the label image {path} has PIL's mode {mode}: one channel of 8 bits is expected")
    # In 8 bits the ignored 0 becomes 255.
    labels = labels - np.uint8(first_label)
    wrong = labels[(labels >= num_classes) & (labels != IGNORED_LABEL)]
    if len(wrong):
        raise ConfigError(
            f"{path} has the label {int(wrong.max()) + first_label}: classes are {first_label} to "
            f"{first_label + num_classes - 1}, and {0 if first_label else IGNORED_LABEL} is ignored"
        )
    return labels


def label_reader(dataset_name: str) -> Callable[..., np.ndarray]:
    """Return :func:`read_labels` of a dataset, as detectron2's SemSegEvaluator calls it: (path, dtype) -> (H, W)."""
    metadata = MetadataCatalog.get(dataset_name)
    options = {"first_label": metadata.get("first_label", 0), "num_classes": len(metadata.stuff_classes)}
    read = functools.partial(read_labels, **options)
    return lambda path, dtype=np.uint8: read(path).astype(dtype)
