"""Load images and video frames, preprocess them, and group images of the same padded size into batches."""

import contextlib
import dataclasses
import errno
import functools
import itertools
import operator
import os
import random
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import cv2
import fsspec
import numpy as np
from torch import Tensor

from backbones import ConfigError
from backbones.errors import one_line, pip_install
from projects_vil.data import to_input
from projects_vil.data.image_files import UnreadableImage, decode_image, log_damaged, read_size
from projects_vil.inference.runners import Runner

VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ogv", ".ts")
DEFAULT_FRAME_RATE = 25.0  # for videos without a frame rate
NUM_READERS = 4  # threads that read images
BATCHING_WINDOW = 256  # number of images from which batches of one padded size are formed
PREFETCHED_BATCHES = 2
NUM_REQUESTS = 64  # URLs that are fetched at the same time
REQUEST_TIMEOUT = 60.0  # seconds for one HTTP request
NUM_ATTEMPTS = 4  # of a request that fails for a reason that may be temporary
TEMPORARY_ERROR = "temporary error: "  # start of the reason of a URL that a resume requests again
_RETRIED_STATUSES = (408, 425, 429)  # and 500 to 599
# fsspec's file systems have different names for the ETag and the modification time.
_VERSION_KEYS = ("ETag", "etag", "mtime", "Last-Modified", "LastModified", "last_modified", "updated")


@dataclasses.dataclass(frozen=True)
class ImageSource:
    """An image before it is loaded.

    Attributes:
        image: A path, a URL (text), the encoded content of a file, an array (H, W, 3) uint8 RGB, or the error that
            occurred when the image was listed.
        name: The name in messages and results. For a file, its path relative to the input folder, with ``/``.
        image_id: The id in the results.
        size: The height and width in the annotation file; None if any size is accepted.
    """

    image: Path | str | bytes | np.ndarray | OSError
    name: str
    image_id: int
    size: tuple[int, int] | None = None

    def fetched(self, stop: threading.Event | None = None) -> "ImageSource":
        """Return the source with the content of its URL, or with the error. Others are returned unchanged.

        Args:
            stop: An event after which no request is started.
        """
        if not isinstance(self.image, str):
            return self
        try:
            return dataclasses.replace(self, image=_request(self.image, stop or threading.Event()))
        except OSError as error:
            return dataclasses.replace(self, image=error)

    def _file(self) -> dict[str, Any]:
        """Return the path of a local file, or the name and the content of another one."""
        image = self.fetched().image
        if isinstance(image, OSError):
            raise UnreadableImage(self.name, image.strerror) from image
        return {"path": image} if isinstance(image, Path) else {"path": self.name, "content": image}

    def read_size(self) -> tuple[int, int]:
        """Return the height and width from the header of the image. Raises UnreadableImage."""
        return self.image.shape[:2] if isinstance(self.image, np.ndarray) else read_size(**self._file())

    def decode(self) -> tuple[np.ndarray, dict[str, str]]:
        """Return the upright image (H, W, 3) uint8 RGB, and its damage by its name. Raises UnreadableImage."""
        if isinstance(self.image, np.ndarray):
            return self.image, {}
        pixels, damaged = decode_image(**self._file())
        log_damaged(damaged)
        return pixels, damaged


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A preprocessed image.

    Attributes:
        index: Position in the input, from 0.
        entry: The entry of ``images.json``: id, file name, height and width; ``damaged``, the reason if only a part of
            the image could be decoded; for a video the frame and its time.
        image: (3, H, W) uint8, resized to the input size of the model.
        source: The original image, for drawings.
        padded_size: The height and width after the model's padding.
    """

    index: int
    entry: dict[str, Any]
    image: Tensor
    source: ImageSource
    padded_size: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Skipped:
    """An image, or the rest of a video, that cannot be used: its position in the input, its name and the reason."""

    index: int
    name: str
    reason: str


class ImageBatches:
    """Load images in threads and group them into batches of the same padded size.

    A single image has the same padding, so that results do not depend on the batch size. Batches are formed within
    windows of consecutive images, so that a batch depends on the images of its window only. The headers of the files
    give the sizes for batching. If an image turns out to have another size, its batch is split. Only a few batches of
    pixels are in memory. The URLs of the next window are fetched while the model runs.

    Args:
        images: The images, in the order of the results. An iterator is consumed one window at a time.
        keep_pixels: Whether to keep the original pixels of each image, so that drawing does not read the file again.

    Attributes:
        total: Number of images; 0 if it is unknown.
        is_stream, frame_rate: As for :class:`Video`. A folder may have the frames of a video.
    """

    unit, is_stream, frame_rate = "image", False, DEFAULT_FRAME_RATE

    def __init__(self, images: Iterable[ImageSource], *, keep_pixels: bool = False) -> None:
        self.images, self.keep_pixels, self.total = images, keep_pixels, operator.length_hint(images)

    def batches(self, runner: Runner, batch_size: int) -> Generator[list[Loaded | Skipped], None, None]:
        """Yield the batches for a runner."""
        load = functools.partial(_load, runner=runner, keep_pixels=self.keep_pixels)
        stop = threading.Event()
        prefetched = contextlib.closing(read_ahead(self._windows(stop), depth=1))
        with ThreadPoolExecutor(NUM_READERS) as pool, prefetched as windows, contextlib.ExitStack() as stack:
            stack.callback(stop.set)
            for window in windows:
                buckets = defaultdict(list)
                for image, size in zip(window, pool.map(_read_size, window), strict=True):
                    buckets[runner.padded_size(*size) if size else None].append(image)
                for bucket in buckets.values():
                    for first in range(0, len(bucket), batch_size):
                        # The size is unknown if the header could not be read, and a header may be wrong.
                        by_size = defaultdict(list)
                        for item in pool.map(load, bucket[first : first + batch_size]):
                            by_size[getattr(item, "padded_size", None)].append(item)
                        yield from by_size.values()

    def _windows(self, stop: threading.Event) -> Iterator[list[tuple[int, ImageSource]]]:
        """Yield windows of numbered images, with the contents of the URLs. No request starts after ``stop``."""
        images = iter(self.images)
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            for first in itertools.count(0, BATCHING_WINDOW):
                window = list(itertools.islice(images, BATCHING_WINDOW))
                if not window:
                    return
                yield list(enumerate(pool.map(lambda image: image.fetched(stop), window), start=first))


class Video:
    """The frames of a video file, a camera or a stream. They can be read once.

    Args:
        source: A file, the number of a camera, or a URL.

    Attributes:
        name: The file name, or a name derived from the camera's number or the URL, without passwords.
        is_stream: Whether the source is a camera or a URL.
        frame_rate: Frames per second.
        total: Number of frames in the file's header, which may be an estimate; 0 if it is unknown.

    Raises:
        ConfigError: If a camera or a stream cannot be opened.
    """

    unit = "frame"

    def __init__(self, source: str) -> None:
        is_camera = source.isdecimal() and not os.path.exists(source)
        self.source, self.is_stream = source, is_camera or "://" in source
        self.capture = cv2.VideoCapture(int(source) if is_camera else source)
        if self.is_stream and not self.capture.isOpened():
            kind = "camera" if is_camera else "stream"
            raise ConfigError(f"OpenCV cannot open the {kind} '{without_password(source)}'. Check it.")
        url = urlsplit(source)
        name = Path(url.path).name or url.hostname or "stream" if self.is_stream else Path(source).name
        self.name = f"camera_{source}" if is_camera else name
        frame_rate = self.capture.get(cv2.CAP_PROP_FPS)
        # Some streams report no frame rate, others the rate of their clock, 90,000.
        self.frame_rate = frame_rate if 0 < frame_rate <= 1000 else DEFAULT_FRAME_RATE
        self.total = max(int(self.capture.get(cv2.CAP_PROP_FRAME_COUNT)), 0)

    def batches(self, runner: Runner, batch_size: int) -> Generator[list[Loaded | Skipped], None, None]:
        """Yield the batches for a runner. Pixels are always kept, because frames cannot be read again."""
        # The frame size of a stream may change.
        for _, frames in itertools.groupby(self._frames(runner), lambda item: getattr(item, "padded_size", None)):
            while batch := list(itertools.islice(frames, batch_size)):
                yield batch

    def _frames(self, runner: Runner) -> Iterator[Loaded | Skipped]:
        if not self.capture.isOpened():
            yield Skipped(0, self.name, "OpenCV cannot read it as a video")
            return
        index, start = 0, time.monotonic()
        # A live stream drops frames while the model is busy, so that the frame number does not give the time.
        is_live = self.is_stream and not self.total
        try:
            while (read := self.capture.read())[0]:
                pixels = np.ascontiguousarray(read[1][..., ::-1])
                seconds = round(time.monotonic() - start if is_live else index / self.frame_rate, 3)
                source = ImageSource(pixels, self.name, index + 1)
                frame = _loaded(index, source, pixels, runner, frame=index, seconds=seconds)
                if isinstance(frame, Skipped):
                    name = without_password(self.source)
                    raise ConfigError(f"Cannot use '{name}': {frame.reason}. Resize the video.")
                yield frame
                index += 1
        finally:
            self.capture.release()
        # The number of frames may be off by a few.
        if index < min(self.total - 2, 0.95 * self.total):
            reason = f"the video is damaged from frame {index} on: only {index} of its {self.total} frames can be read"
            yield Skipped(index, self.name, reason)


def file_versions(files: Mapping[str, str], *, strict: bool) -> dict[str, list | None]:
    """Return the size of each file or URL, and its ETag or modification time. None if it cannot be read.

    Args:
        files: The paths and URLs by name.
        strict: Whether a failure for a reason that may be temporary raises an error.

    Raises:
        OSError: With ``strict``, if a file cannot be read for a reason that may be temporary.
    """

    def version(path: str) -> list | None:
        try:
            info = _request(path, threading.Event(), "info")
        except OSError as error:
            if strict and error.strerror.startswith(TEMPORARY_ERROR):
                raise
            return None
        return [info.get("size") or 0, str(next((info[key] for key in _VERSION_KEYS if info.get(key)), ""))]

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        return dict(zip(files, pool.map(version, files.values()), strict=True))


def _request(url: str, stop: threading.Event, method: str = "cat_file") -> Any:
    """Call a method of an fsspec file system with a path or URL. The default method returns the content.

    A request that fails is repeated if the reason may be temporary.

    Raises:
        OSError: If all attempts fail. The reason names the last error.
    """
    if stop.is_set():
        raise InterruptedError(errno.EINTR, "the prediction was interrupted", url)
    options = {}
    with os_errors(url):
        if url.startswith(("http://", "https://")):
            from aiohttp import ClientTimeout  # an optional dependency

            timeout = ClientTimeout(total=REQUEST_TIMEOUT, sock_read=REQUEST_TIMEOUT / 3)
            options = {"client_kwargs": {"timeout": timeout}}
    for attempt in itertools.count(1):
        try:
            with os_errors(url):
                # One request. Opening and reading would be two.
                file_system, path = fsspec.url_to_fs(url, **options)
                return getattr(file_system, method)(path)
        except OSError as error:
            # HTTP's info raises a FileNotFoundError for all errors.
            cause = (options and method == "info" and error.__cause__.__cause__) or error.__cause__
            status = getattr(cause, "status", 500)
            is_final = isinstance(cause, (FileNotFoundError, PermissionError, ValueError))
            is_final = is_final or (400 <= status < 500 and status not in _RETRIED_STATUSES)
            # Full jitter: many clients of a busy server do not repeat their requests at the same time.
            if is_final or stop.is_set():
                raise
            if attempt == NUM_ATTEMPTS or stop.wait(random.uniform(0, 2**attempt)):
                raise OSError(error.errno, TEMPORARY_ERROR + error.strerror, error.filename) from error


def _read_size(numbered: tuple[int, ImageSource]) -> tuple[int, int] | None:
    # _load reports the error.
    with contextlib.suppress(UnreadableImage):
        return numbered[1].read_size()


def _load(numbered: tuple[int, ImageSource], runner: Runner, *, keep_pixels: bool) -> Loaded | Skipped:
    index, source = numbered
    try:
        pixels, damaged = source.decode()
    except UnreadableImage as error:
        return Skipped(index, source.name, error.reason)
    height, width = pixels.shape[:2]
    if source.size not in (None, (height, width)):
        reason = f"it is {height} x {width} pixels, but {source.size[0]} x {source.size[1]} in the annotations"
        return Skipped(index, source.name, reason)
    if keep_pixels:
        source = ImageSource(pixels, source.name, source.image_id)
    return _loaded(index, source, pixels, runner, **({"damaged": " ".join(damaged.values())} if damaged else {}))


def _loaded(index: int, source: ImageSource, pixels: np.ndarray, runner: Runner, **facts: Any) -> Loaded | Skipped:
    """Preprocess the pixels (H, W, 3) uint8 RGB of an image for a runner. ``facts`` are added to its entry."""
    height, width = pixels.shape[:2]
    resized, (smallest, largest) = runner.input_size(height, width), runner.sides
    if min(resized) < smallest or (largest is not None and max(resized) > largest):
        sides = f"{smallest} or more" if largest is None else f"{smallest} to {largest}"
        reason = f"{height} x {width} pixels are resized to {resized[0]} x {resized[1]}, but the model needs sides of"
        return Skipped(index, source.name, f"{reason} {sides} pixels")
    entry = {"id": source.image_id, "file_name": source.name, "height": height, "width": width} | facts
    image = to_input(pixels, resized, runner.channels)
    return Loaded(index, entry, image, source, runner.padded_size(height, width))


def read_ahead(batches: Iterator[Any], *, depth: int = PREFETCHED_BATCHES) -> Generator[Any, None, None]:
    """Yield the same batches. A thread prefetches the next ``depth`` batches."""
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


def without_password(text: str) -> str:
    """Return a text without user names and passwords in its URLs."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


@contextlib.contextmanager
def os_errors(path: str | Path) -> Iterator[None]:
    """Convert the exceptions of a file system or a file format to an OSError that names the path or URL."""
    name = without_password(str(path))
    try:
        yield
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(f"Cannot read '{name}': {one_line(error)}. {pip_install('pyarrow', 'fsspec')}") from error
    except Exception as error:  # each file system of fsspec, tarfile and pyarrow have their own exceptions
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {one_line(error)}"
        raise OSError(errno.EIO, without_password(reason), name) from error


@contextlib.contextmanager
def open_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a path or fsspec URL for reading. Errors inside the context are converted to OSError."""
    is_url = "://" in str(path)
    with os_errors(path):
        if not is_url and os.path.exists(path) and not os.path.isfile(path):
            # To read a pipe or a device may take forever.
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with fsspec.open(path) if is_url else open(path, "rb") as file:
            yield file
