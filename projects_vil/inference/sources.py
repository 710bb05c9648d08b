"""What is read: images, in files or in memory, in batches of one size, and videos."""

import dataclasses
import os
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import cv2
import numpy as np
import PIL.Image
import torch
from detectron2.data import transforms as T
from torch import Tensor

from backbones import InputError
from projects_vil.data import IMAGE_SUFFIXES, UnreadableImage, read_image, read_size, upright_pixels, upright_size
from projects_vil.inference.runners import Runner

VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ogv", ".ts")
USUAL_FRAME_RATE = 25.0  # for videos that do not tell theirs
WINDOW = 512  # images that are looked through for those of one size
BATCHES_AHEAD = 2


class ImageSource(Protocol):
    """An image that can be read.

    Attributes:
        name: by which it is reported.
        image_id: in the results.
        size: height and width that it must have; None where any will do.
    """

    name: str
    image_id: int
    size: tuple[int, int] | None

    def read_size(self) -> tuple[int, int]:
        """Height and width; raises UnreadableImage."""

    def read(self) -> np.ndarray:
        """(H, W, 3) uint8 RGB, upright; raises UnreadableImage."""


@dataclasses.dataclass(frozen=True)
class ImageFile:
    """A file to read, as an :class:`ImageSource`.

    Attributes:
        path: where it is.
        name: by which it is reported: its path below the input folder, with ``/``.
        image_id: in the results.
        size: height and width that an annotation file says it has.
    """

    path: Path
    name: str
    image_id: int
    size: tuple[int, int] | None = None

    def read_size(self) -> tuple[int, int]:
        return read_size(self.path)

    def read(self) -> np.ndarray:
        return read_image(self.path, "RGB")


@dataclasses.dataclass(frozen=True)
class ImageArray:
    """Pixels that are there, (H, W, 3) uint8 RGB, as an :class:`ImageSource`."""

    pixels: np.ndarray
    name: str
    image_id: int
    size: None = None

    def read_size(self) -> tuple[int, int]:
        return self.pixels.shape[:2]

    def read(self) -> np.ndarray:
        return self.pixels


@dataclasses.dataclass(frozen=True)
class PillowImage:
    """Pillow's image, read from its file or not yet, as an :class:`ImageSource`."""

    image: PIL.Image.Image
    name: str
    image_id: int
    size: None = None

    def read_size(self) -> tuple[int, int]:
        return upright_size(self.image)

    def read(self) -> np.ndarray:
        # Loading one image in two threads, as when it is given twice, breaks its file.
        with _PILLOW:
            return upright_pixels(self.image, "RGB", name=self.name)


_PILLOW = Lock()


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An image, ready for a runner.

    Attributes:
        index: its place in the input, from 0.
        entry: of ``images.json``: id, file name, height and width.
        image: (3, H, W) uint8, resized.
        source: its pixels, (height, width, 3), for drawings: kept, or to be read again.
    """

    index: int
    entry: dict[str, Any]
    image: Tensor
    source: ImageSource


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A file that could not be read, or a video from some frame on: its place in the input, its name, and why."""

    index: int
    name: str
    reason: str


class Images:
    """Images in batches of one size, read in threads.

    Only headers are looked at to make batches, of ``WINDOW`` files at a time; of files' pixels there is never more
    than the batch.

    Args:
        images: in the order of the results.
        threads: that read.
    """

    unit = "image"
    frame_rate = None

    def __init__(self, images: Sequence[ImageSource], *, threads: int = 1) -> None:
        self.images = images
        self.threads = threads

    def __len__(self) -> int:
        return len(self.images)

    def batches(
        self, runner: Runner, batch_size: int, *, keep_pixels: bool = False
    ) -> Iterator[list[Loaded | Skipped]]:
        """What ``runner`` is to take; ``keep_pixels`` where drawings are to need no second reading."""
        with ThreadPoolExecutor(self.threads) as pool:
            for start in range(0, len(self.images), WINDOW):
                indices = range(start, min(start + WINDOW, len(self.images)))
                groups = defaultdict(list)
                for index, size in zip(indices, pool.map(self._header, indices), strict=True):
                    groups[runner.input_size(*size) if size else None].append(index)
                for group in groups.values():
                    for first in range(0, len(group), batch_size):
                        batch = group[first : first + batch_size]
                        yield list(pool.map(lambda index: self._load(index, runner, keep_pixels), batch))

    def _header(self, index: int) -> tuple[int, int] | None:
        """Height and width; None where they cannot be read, which is reported when the pixels cannot be either."""
        try:
            return self.images[index].read_size()
        except UnreadableImage:
            return None

    def _load(self, index: int, runner: Runner, keep_pixels: bool) -> Loaded | Skipped:
        source = self.images[index]
        try:
            pixels = source.read()
        except UnreadableImage as error:
            return Skipped(index, source.name, error.reason)
        height, width = pixels.shape[:2]
        if source.size not in (None, (height, width)):
            reason = f"it is {height} x {width} pixels, and its annotations say {source.size[0]} x {source.size[1]}"
            return Skipped(index, source.name, reason)
        reason = runner.refusal(height, width)
        if reason is not None:
            return Skipped(index, source.name, reason)
        entry = {"id": source.image_id, "file_name": source.name, "height": height, "width": width}
        if keep_pixels:
            source = ImageArray(pixels, source.name, source.image_id)
        return Loaded(index, entry, prepare(pixels, runner), source)


class Video:
    """The frames of a video, read one after another.

    Args:
        path: a file.
    """

    unit = "frame"

    def __init__(self, path: Path) -> None:
        self.path = path
        capture = cv2.VideoCapture(str(path))
        self.is_open = capture.isOpened()
        self.frame_rate = capture.get(cv2.CAP_PROP_FPS) or USUAL_FRAME_RATE
        self.num_frames = max(int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), 0)
        capture.release()

    def __len__(self) -> int:
        """As the file tells it; some containers only estimate it."""
        return self.num_frames

    def batches(self, runner: Runner, batch_size: int, *, keep_pixels: bool = True) -> Iterator[list[Loaded | Skipped]]:
        """What ``runner`` is to take; pixels are kept, because frames cannot be read again."""
        if not self.is_open:
            yield [Skipped(0, self.path.name, "it is no video that OpenCV can read here")]
            return
        capture = cv2.VideoCapture(str(self.path))
        try:
            index, batch = 0, []
            while True:
                found, frame = capture.read()
                if not found:
                    break
                pixels = np.ascontiguousarray(frame[..., ::-1])
                reason = runner.refusal(*pixels.shape[:2])
                if reason is not None:
                    raise InputError(f"{self.path}: frames of {reason}")
                entry = {"id": index + 1, "file_name": self.path.name, "frame": index}
                entry |= {"seconds": round(index / self.frame_rate, 3)}
                entry |= {"height": pixels.shape[0], "width": pixels.shape[1]}
                source = ImageArray(pixels, self.path.name, index + 1)
                batch.append(Loaded(index, entry, prepare(pixels, runner), source))
                index += 1
                if len(batch) == batch_size:
                    yield batch
                    batch = []
            if batch:
                yield batch
        finally:
            capture.release()
        # Where the number is estimated, it may be a few frames off.
        if index < min(self.num_frames - 2, 0.95 * self.num_frames):
            reason = f"from frame {index} on: only {index} of its {self.num_frames} frames can be read"
            yield [Skipped(index, self.path.name, reason)]


def prepare(pixels: np.ndarray, runner: Runner) -> Tensor:
    """(H, W, 3) uint8 RGB -> (3, H', W') uint8 as the runner takes it, resized as by the test loader."""
    height, width = pixels.shape[:2]
    resized = T.ResizeTransform(height, width, *runner.input_size(height, width)).apply_image(pixels)
    channels = resized[..., ::-1] if runner.channels == "BGR" else resized
    # Copied: what Pillow gives may not be written to.
    return torch.from_numpy(channels.transpose(2, 0, 1).copy())


def read_ahead(batches: Iterator, *, depth: int = BATCHES_AHEAD) -> Iterator:
    """The same, with the next ``depth`` made in a thread while one is worked on."""
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


def find_images(source: Path, *, leave_out: Path) -> list[ImageFile]:
    """The image files of a folder and the folders in it, by name, or the file itself; ids count from 1.

    Raises:
        InputError: for a folder without images.
    """
    if not source.is_dir():
        return [ImageFile(source, source.name, 1)]
    left_out, names = leave_out.resolve(), []
    for folder, folders, files in os.walk(source):
        below = Path(folder)
        folders[:] = [name for name in folders if not name.startswith(".") and (below / name).resolve() != left_out]
        names += [
            (below / name).relative_to(source).as_posix()
            for name in files
            if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")
        ]
    if not names:
        raise InputError(f"--input {source}: there is no image in it ({', '.join(IMAGE_SUFFIXES)})")
    return [ImageFile(source / name, name, number) for number, name in enumerate(sorted(names), start=1)]
