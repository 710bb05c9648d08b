"""Images from files, folders and memory, in batches of one padded size, and the frames of videos."""

import contextlib
import dataclasses
import errno
import functools
import itertools
import operator
import re
import time
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import IO, Any
from urllib.parse import urlsplit

import cv2
import fsspec
import numpy as np
import PIL.Image
import torch
from detectron2.data import transforms as T
from torch import Tensor

from backbones import ConfigError
from projects_vil.config import one_line
from projects_vil.data import UnreadableImage, read_image, read_size, upright_pixels, upright_size
from projects_vil.inference.runners import EagerRunner, ExportedRunner

VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ogv", ".ts")
DEFAULT_FRAME_RATE = 25.0  # for videos without one
READERS = 4  # threads that read files
LOOKAHEAD_IMAGES = 512  # images among which those of one padded size are searched for
BATCHES_AHEAD = 2
Runner = EagerRunner | ExportedRunner

# Two threads must not load one PIL image, as when it is given twice.
_PIL_LOCK = Lock()


@dataclasses.dataclass(frozen=True)
class ImageSource:
    """An image that can be read.

    Attributes:
        image: a path, a URL as text, the contents of a file, an array (H, W, 3) uint8 RGB, a PIL image, or the error
            for which there is none.
        name: its name in messages and results; for a file, its path below the input folder, with ``/``.
        image_id: its id in the results.
        size: height and width that an annotation file gives; None if any size will do.
    """

    image: Path | str | bytes | np.ndarray | PIL.Image.Image | OSError
    name: str
    image_id: int
    size: tuple[int, int] | None = None

    @functools.cached_property
    def content(self) -> bytes:
        """The contents of a file that is not read from a path; those of a URL are fetched once."""
        try:
            if isinstance(self.image, OSError):
                raise self.image
            if isinstance(self.image, bytes):
                return self.image
            with os_errors(self.image):
                # In one request, where opening and reading are two.
                return fsspec.filesystem(self.image.partition("://")[0]).cat_file(self.image)
        except OSError as error:
            raise UnreadableImage(self.name, error.strerror) from error

    def read_size(self) -> tuple[int, int]:
        """Return height and width without reading pixels; raises UnreadableImage."""
        if isinstance(self.image, Path):
            return read_size(self.image)
        if isinstance(self.image, str | bytes | OSError):
            return read_size(self.name, content=self.content)
        return self.image.shape[:2] if isinstance(self.image, np.ndarray) else upright_size(self.image)

    def read(self) -> np.ndarray:
        """Return (H, W, 3) uint8 RGB, upright; raises UnreadableImage."""
        if isinstance(self.image, Path):
            return read_image(self.image, "RGB")
        if isinstance(self.image, str | bytes | OSError):
            return read_image(self.name, "RGB", content=self.content)
        if isinstance(self.image, np.ndarray):
            return self.image
        with _PIL_LOCK:
            return upright_pixels(self.image, "RGB", name=self.name)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An image, ready for a runner.

    Attributes:
        index: position in the input, from 0.
        entry: the entry of ``images.json``: id, file name, height and width.
        image: (3, H, W) uint8, resized.
        source: the original image, for drawings.
        padded_size: height and width to which the runner pads it.
    """

    index: int
    entry: dict[str, Any]
    image: Tensor
    source: ImageSource
    padded_size: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Skipped:
    """An image that cannot be used, or the rest of a video: position in the input, name and reason."""

    index: int
    name: str
    reason: str


class ImageBatches:
    """Images in batches of one padded size, read in threads.

    An image alone is padded to that size too, so that every batch size gives the same detections. Batches never cross a
    window: those of a window depend on its images only. Headers of files give the sizes by which images are batched. A
    batch whose images have other sizes once they are read is split. Pixels are in memory for a few batches only.

    Args:
        images: the images, in the order of the results; any iterable, of which one window is taken at a time.
        window: number of images among which those of one padded size are searched for.
        keep_pixels: whether all images are drawn, so that no file is read twice.
    """

    unit = "image"

    def __init__(
        self, images: Iterable[ImageSource], *, window: int = LOOKAHEAD_IMAGES, keep_pixels: bool = False
    ) -> None:
        self.images = images
        self.window = window
        self.keep_pixels = keep_pixels

    def __len__(self) -> int:
        """Return the number of images, or 0 where the iterable does not know it."""
        return operator.length_hint(self.images)

    def batches(self, runner: Runner, batch_size: int) -> Generator[list[Loaded | Skipped], None, None]:
        """Yield batches for a runner."""
        load = functools.partial(_load, runner=runner, keep_pixels=self.keep_pixels)
        with ThreadPoolExecutor(READERS) as pool:
            numbered = enumerate(self.images)
            while window := list(itertools.islice(numbered, self.window)):
                buckets = defaultdict(list)
                for image, size in zip(window, pool.map(_size, window), strict=True):
                    buckets[runner.padded_size(*size) if size else None].append(image)
                for bucket in buckets.values():
                    for first in range(0, len(bucket), batch_size):
                        yield from _of_one_size(pool.map(load, bucket[first : first + batch_size]))


class Video:
    """The frames of a video file, a camera or a stream, which can be read once.

    Args:
        source: a file, or a string: the number of a camera, or a URL.

    Attributes:
        name: the file's name, or one made from the camera's number or the URL, without a password that it may have.

    Raises:
        ConfigError: for a camera or a stream that cannot be opened.
    """

    unit = "frame"

    def __init__(self, source: Path | str) -> None:
        self.source = source
        is_camera = isinstance(source, str) and source.isdecimal()
        self.capture = cv2.VideoCapture(int(source) if is_camera else str(source))
        if isinstance(source, Path):
            self.name = source.name
        elif self.capture.isOpened():
            url = urlsplit(source)
            self.name = f"camera_{source}" if is_camera else Path(url.path).name or url.hostname or "stream"
        else:
            raise ConfigError(f"source {source}: OpenCV cannot open this {'camera' if is_camera else 'stream'}")
        frame_rate = self.capture.get(cv2.CAP_PROP_FPS)
        # Some streams have none, and some give the rate of their clock, 90,000.
        self.frame_rate = frame_rate if 0 < frame_rate <= 1000 else DEFAULT_FRAME_RATE
        self.num_frames = max(int(self.capture.get(cv2.CAP_PROP_FRAME_COUNT)), 0)

    def __len__(self) -> int:
        """Return the number of frames in the file's header, which some containers only estimate."""
        return self.num_frames

    def batches(self, runner: Runner, batch_size: int) -> Generator[list[Loaded | Skipped], None, None]:
        """Yield batches for a runner; pixels are always kept, because frames cannot be read again."""
        if not self.capture.isOpened():
            yield [Skipped(0, self.name, "OpenCV cannot read it as a video")]
            return
        index, batch, start = 0, [], time.monotonic()
        # Frames that come while the model works may be lost.
        is_live = isinstance(self.source, str) and not self.num_frames
        try:
            while (read := self.capture.read())[0]:
                pixels = np.ascontiguousarray(read[1][..., ::-1])
                reason = runner.size_error(*pixels.shape[:2])
                if reason is not None:
                    raise ConfigError(f"{self.source}: frames of {reason}")
                entry = {"id": index + 1, "file_name": self.name, "height": len(pixels), "width": pixels.shape[1]}
                seconds = time.monotonic() - start if is_live else index / self.frame_rate
                entry |= {"frame": index, "seconds": round(seconds, 3)}
                source = ImageSource(pixels, self.name, index + 1)
                padded_size = runner.padded_size(*pixels.shape[:2])
                # Streams may change their size.
                if batch and batch[0].padded_size != padded_size:
                    yield batch
                    batch = []
                batch.append(Loaded(index, entry, prepare(pixels, runner), source, padded_size))
                index += 1
                if len(batch) == batch_size:
                    yield batch
                    batch = []
            if batch:
                yield batch
        finally:
            self.capture.release()
        # An estimate may differ by a few frames.
        if index < min(self.num_frames - 2, 0.95 * self.num_frames):
            reason = f"from frame {index} on: only {index} of its {self.num_frames} frames can be read"
            yield [Skipped(index, self.name, reason)]


def _size(numbered: tuple[int, ImageSource]) -> tuple[int, int] | None:
    try:
        return numbered[1].read_size()
    except UnreadableImage:
        return None  # reading the pixels reports it


def _of_one_size(batch: Iterable[Loaded | Skipped]) -> Iterator[list[Loaded | Skipped]]:
    """Split a batch by padded size: a size is unknown if reading the header failed, and a header may be wrong."""
    groups = defaultdict(list)
    for item in batch:
        groups[item.padded_size if isinstance(item, Loaded) else None].append(item)
    yield from groups.values()


def _load(numbered: tuple[int, ImageSource], runner: Runner, *, keep_pixels: bool) -> Loaded | Skipped:
    index, source = numbered
    try:
        pixels = source.read()
    except UnreadableImage as error:
        return Skipped(index, source.name, error.reason)
    height, width = pixels.shape[:2]
    reason = runner.size_error(height, width)
    if source.size not in (None, (height, width)):
        reason = f"it is {height} x {width} pixels, and {source.size[0]} x {source.size[1]} in its annotations"
    if reason is not None:
        return Skipped(index, source.name, reason)
    entry = {"id": source.image_id, "file_name": source.name, "height": height, "width": width}
    if keep_pixels:
        source = ImageSource(pixels, source.name, source.image_id)
    return Loaded(index, entry, prepare(pixels, runner), source, runner.padded_size(height, width))


def without_password(text: str) -> str:
    """Return a text without the user names and passwords of URLs in it."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", text)


@contextlib.contextmanager
def os_errors(place: str | Path) -> Iterator[None]:
    """Raise what reading a path or URL raises as an OSError that names it."""
    name = without_password(str(place))
    try:
        yield
    except ConfigError:
        raise
    except ImportError as error:
        hint = "pip install 'vil-detectron2[scale]' for Parquet and HTTP"
        raise ConfigError(f"{name}: {one_line(error)} ({hint})") from error
    except Exception as error:  # Each file system of fsspec has its own, and so have tarfile and pyarrow.
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {one_line(error)}"
        raise OSError(errno.EIO, without_password(reason), name) from error


@contextlib.contextmanager
def open_file(place: str | Path) -> Iterator[IO[bytes]]:
    """Open a path, or a URL that fsspec knows, for reading; what goes wrong while it is open is an OSError."""
    is_url = "://" in str(place)
    with os_errors(place):
        # Opening a pipe waits until someone writes to it.
        if not is_url and Path(place).is_fifo():
            raise OSError(errno.ESPIPE, "it is a pipe, which cannot be read twice. Write its contents to a file.")
        with fsspec.open(place, "rb") if is_url else open(place, "rb") as file:
            yield file


def prepare(pixels: np.ndarray, runner: Runner) -> Tensor:
    """Resize (H, W, 3) uint8 RGB as for testing -> (3, H', W') uint8 in the runner's channel order."""
    height, width = pixels.shape[:2]
    resized = T.ResizeTransform(height, width, *runner.input_size(height, width)).apply_image(pixels)
    channels = resized[..., ::-1] if runner.channels == "BGR" else resized
    # PIL's memory is read-only.
    return torch.from_numpy(channels.transpose(2, 0, 1).copy())


def read_ahead(batches: Iterator[Any], *, depth: int = BATCHES_AHEAD) -> Generator[Any, None, None]:
    """Yield the same batches, with the next ``depth`` of them made in a thread."""
    end = object()
    thread, pending = ThreadPoolExecutor(1), deque()
    try:
        for _ in range(depth):
            pending.append(thread.submit(next, batches, end))
        while (batch := pending.popleft().result()) is not end:
            pending.append(thread.submit(next, batches, end))
            yield batch
    finally:
        thread.shutdown(cancel_futures=True)
