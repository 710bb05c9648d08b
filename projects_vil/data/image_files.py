"""Read image and label files. Dataset checks, training, evaluation, visualization and prediction share these functions.

Importing this module does not import PyTorch.
"""

import contextlib
import functools
import importlib.util
import io
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import IO

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError
from PIL.Image import Transpose

from backbones import ConfigError
from backbones.errors import pip_install

# The file name suffixes of images.
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".dib", ".tif", ".tiff", ".webp", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx", ".avif"),
    *(".mpo", ".apng", ".tga", ".pcx", ".sgi", ".ras", ".psd", ".qoi", ".dds"),
)
if importlib.util.find_spec("pillow_heif") is not None:
    import pillow_heif

    pillow_heif.register_heif_opener()
    IMAGE_SUFFIXES += (".heic", ".heif")
# Images and videos that are not read. HEIC needs pillow-heif.
UNSUPPORTED_SUFFIXES = {
    *(".heic", ".heif", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raw", ".svg", ".dcm", ".pdf"),
    *(".mp4", ".avi", ".mov", ".mkv", ".webm", ".wmv"),
}.difference(IMAGE_SUFFIXES)
SizeAndDamage = tuple[tuple[int, int] | None, str | None]
# The label of pixels that training and evaluation ignore.
IGNORED_LABEL = 255
# The key of an input for damaged images: a dict from the file name to the damage.
DAMAGED = "damaged"
# The damaged images that this process has logged.
_logged: set[str] = set()
# The exceptions that Pillow raises for files that are damaged, too large, or not convertible to RGB.
_DAMAGED = (
    *(OSError, SyntaxError, ValueError, EOFError, RuntimeError, OverflowError, MemoryError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
# A network disk has a high latency, so many headers are read at the same time.
_NUM_THREADS, _FILES_PER_TASK = 16, 64
# How an image becomes upright, by its EXIF orientation. Orientations of at least 5 swap height and width.
_TURNS = {2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, 5: Transpose.TRANSPOSE}
_TURNS |= {6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90}
# A detector resizes the longest side to 1333 pixels. With this ratio the short side then has about three pixels.
_LARGEST_RATIO = 400


class UnreadableImage(ConfigError):
    """Raised if an image file cannot be read.

    Args:
        path: The file name.
        reason: The reason, without the file name.
        package: The package that reads images of this format, if it is not installed.

    Attributes:
        path: The file name.
        reason: The reason, and how to install ``package``.
    """

    def __init__(self, path: str | Path, reason: str, *, package: str | None = None) -> None:
        advice = "Fix or remove it." if package is None else pip_install(package)
        super().__init__(f"Cannot read image '{path}': {reason}. {advice}")
        self.path = str(path)
        self.reason = reason if package is None else f"{reason}. {advice.rstrip('.')}"


class _OnlyInThisThread:
    """A value of Pillow's global ``LOAD_TRUNCATED_IMAGES`` that is false in other threads."""

    lock = threading.Lock()

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self.thread


@contextlib.contextmanager
def _opened(path: str | Path, content: bytes | None = None) -> Iterator[Image.Image]:
    with _unreadable_image(path):
        # Opening a pipe blocks until another process writes to it.
        if content is None and not os.path.isfile(path) and os.path.exists(path) and not os.path.isdir(path):
            raise OSError("not a regular file")
        with _file(str(path)) if content is None else io.BytesIO(content) as file, Image.open(file) as image:
            if max(image.size) > _LARGEST_RATIO * min(image.size):
                raise ValueError(f"its size is {image.size}, and the largest aspect ratio is {_LARGEST_RATIO}")
            yield image


def _file(path: str) -> IO[bytes]:
    if "://" not in path:
        return open(path, "rb")
    # detectron2 imports PyTorch, and the dataset check must not.
    from detectron2.utils.file_io import PathManager

    return PathManager.open(path, "rb")


@contextlib.contextmanager
def _unreadable_image(name: str | Path) -> Iterator[None]:
    """Convert Pillow's exceptions to :class:`UnreadableImage`."""
    try:
        yield
    except _DAMAGED as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()).rstrip(".") or type(error).__name__
        package = None
        if isinstance(error, UnidentifiedImageError):
            is_empty = os.path.isfile(name) and not os.path.getsize(name)
            reason = "it is empty" if is_empty else "it is not an image of a known format"
            if str(name).lower().endswith((".heic", ".heif")) and ".heic" not in IMAGE_SUFFIXES:
                package = "pillow-heif"
        raise UnreadableImage(name, reason, package=package) from error


def read_image(path: str | Path, image_format: str | None = "RGB", *, content: bytes | None = None) -> np.ndarray:
    """Read an image file as (H, W, channels) uint8, rotated according to its EXIF orientation.

    Like detectron2's ``read_image``, this function converts the first frame to ``image_format`` with Pillow and drops
    transparency. There are four differences:

    - The part of a damaged image that can be decoded is returned, as in browsers and OpenCV. A warning is logged.
    - 16-bit channels keep their upper 8 bits. Pillow clips gray 16-bit channels at 255, which gives a white image.
    - 32-bit channels raise an error because their range is unknown.
    - A TIFF file is rotated once, not twice.

    Args:
        path: A local path, or a path with ``://`` that detectron2's ``PathManager`` supports.
        image_format: ``"RGB"``, ``"BGR"`` or another format of detectron2.
        content: The bytes of the file. If they are given, ``path`` is only used in messages.

    Raises:
        UnreadableImage: If the file is missing or not an image, or if no part of it can be decoded.
    """
    pixels, damage = decode_image(path, image_format, content=content)
    log_damaged(damage)
    return pixels


def decode_image(
    path: str | Path, image_format: str | None = "RGB", *, content: bytes | None = None
) -> tuple[np.ndarray, dict[str, str]]:
    """Return the image of :func:`read_image`, and a dict from its path to its damage, which is empty without damage."""

    try:
        with _opened(path, content) as image:
            return _pixels(image, image_format), {}
    except UnreadableImage as error:
        with _OnlyInThisThread.lock:
            before, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, _OnlyInThisThread()
            try:
                with _opened(path, content) as image:
                    pixels = _pixels(image, image_format)
            finally:
                ImageFile.LOAD_TRUNCATED_IMAGES = before
        # Pillow fills the missing part with one color.
        if (pixels == pixels[0, 0]).all():
            raise
        return pixels, {str(path): f"{error.reason}. Only a part of it is decoded"}


def log_damaged(damaged: Mapping[str, str]) -> None:
    """Log each damaged image once per process, with the number of damaged images.

    Args:
        damaged: A dict from the file name to the damage.
    """
    for path in damaged.keys() - _logged:
        _logged.add(path)
        text = "Image '%s' is damaged: %s (damaged images so far: %d)."
        logging.getLogger(__name__).warning(text, path, damaged[path], len(_logged))


def read_size(path: str | Path, *, content: bytes | None = None) -> tuple[int, int]:
    """Return the height and width of the image from :func:`read_image`. Only the header of the file is read.

    Raises:
        UnreadableImage: If the file is missing or not an image.
    """
    with _opened(path, content) as image:
        width, height = image.size
        # Without this condition Pillow would read a whole PNG file to find EXIF data behind the pixels. A TIFF file has
        # no "exif" entry, and its size is already upright.
        orientation = image.getexif().get(ExifTags.Base.Orientation) if "exif" in image.info else None
    return (width, height) if orientation in (5, 6, 7, 8) else (height, width)


def size_or_none(path: str) -> tuple[int, int] | None:
    """Return the height and width of an image, or None if it cannot be read."""
    with contextlib.suppress(UnreadableImage):
        return read_size(path)


def is_image(path: str) -> bool:
    """Return whether a file has the suffix of an image that can be read."""
    return path.lower().endswith(IMAGE_SUFFIXES)


def missing_files(paths: Iterable[str]) -> list[str]:
    """Return the paths that do not exist. Each folder is listed once, which is faster than a test per file."""
    names = functools.cache(lambda folder: set(os.listdir(folder)) if os.path.isdir(folder) else set())
    return [path for path in paths if os.path.basename(path) not in names(os.path.dirname(path))]


def read_sizes(paths: Iterable[str | Path], *, pixels: bool = False) -> Iterator[SizeAndDamage]:
    """Yield the height and width of each image, or None if it cannot be read, and the damage of a damaged image.

    Args:
        paths: The image files. They are read in threads.
        pixels: Whether to decode the images. Otherwise only their headers are read.
    """

    def read(path: str | Path) -> SizeAndDamage:
        try:
            if not pixels:
                return read_size(path), None
            image, damage = decode_image(path)
        except UnreadableImage as error:
            return None, error.reason
        return image.shape[:2], damage.get(str(path))

    with ThreadPool((os.cpu_count() or 1) if pixels else _NUM_THREADS) as pool:
        yield from pool.imap(read, paths, chunksize=1 if pixels else _FILES_PER_TASK)


def upright_pixels(image: Image.Image, image_format: str | None = "RGB", *, name: str = "the image") -> np.ndarray:
    """Return the pixels of a Pillow image as in :func:`read_image`. Error messages contain ``name``."""
    with _unreadable_image(name):
        return _pixels(image, image_format)


def _pixels(image: Image.Image, image_format: str | None) -> np.ndarray:
    # Loading rotates a TIFF and removes its orientation.
    image.load()
    turn = None
    # EXIF data may be damaged.
    with contextlib.suppress(Exception):
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
    upright = image if turn is None else image.transpose(turn)
    # The mode of 16-bit gray images is "I;16". For PGM files, and for PNG files in older versions of Pillow, it is "I".
    if upright.mode.startswith("I;16") or (upright.mode == "I" and image.format in ("PNG", "PPM")):
        upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    elif upright.mode in ("I", "F"):
        raise ValueError("its channel has 32 bits and an unknown range, so convert it to 8 or 16 bits")
    if image_format == "RGB":
        return np.asarray(upright.convert("RGB"))
    from detectron2.data.detection_utils import convert_PIL_to_numpy

    return convert_PIL_to_numpy(upright, image_format)


# -- label images ----------------------------------------------------------------------------------


def read_labels(path: str | Path, *, first_label: int, num_classes: int) -> np.ndarray:
    """Read a label image as (H, W) uint8 class indices from 0 to ``num_classes`` - 1, and :data:`IGNORED_LABEL`.

    Args:
        path: An image file with one 8-bit channel, or with a palette whose indices are the labels.
        first_label: The label of the first class in the file. 1 for published ADE20K files, which ignore 0. 0 for files
            that ignore 255.
        num_classes: The number of classes of the dataset, at most 254.

    Raises:
        ConfigError: If the file cannot be read, has another mode, or has a label that is not a class.
    """
    with _opened(path) as image:
        mode, labels = image.mode, np.array(image)
    if mode not in ("L", "P"):
        raise ConfigError(f"The label image '{path}' has PIL mode {mode!r}. Convert it to one 8-bit channel.")
    # If first_label is 1, the ignored label 0 wraps to 255.
    labels = labels - np.uint8(first_label)
    wrong = labels[(labels >= num_classes) & (labels != IGNORED_LABEL)]
    if len(wrong):
        last, ignored = first_label + num_classes - 1, 0 if first_label else IGNORED_LABEL
        advice = f"Use labels {first_label} to {last}, and {ignored} for ignored pixels."
        raise ConfigError(f"The label image '{path}' has the label {int(wrong.max()) + first_label}. {advice}")
    return labels
