"""What is read: image files in batches of one size, and videos."""

import dataclasses
import os
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from detectron2.data import transforms as T
from torch import Tensor

from backbones import InputError
from projects_vil.data import IMAGE_SUFFIXES, UnreadableImage, read_image, read_size
from projects_vil.inference.runners import Runner

VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ogv", ".ts")
USUAL_FRAME_RATE = 25.0  # for videos that do not tell theirs
WINDOW = 512  # images that are looked through for those of one size
BATCHES_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class ImageFile:
    """A file to read.

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


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An image, ready for a runner.

    Attributes:
        index: its place in the input, from 0.
        entry: of ``images.json``: id, file name, height and width.
        image: (3, H, W) uint8, resized.
        pixels: (height, width, 3) uint8 RGB as in the file; None where nothing is drawn.
    """

    index: int
    entry: dict[str, Any]
    image: Tensor
    pixels: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A file that could not be read, or a video from some frame on: its place in the input, its name, and why."""

    index: int
    name: str
    reason: str


class ImageFiles:
    """Image files in batches of one size, read in threads.

    Only headers are looked at to make batches, of ``WINDOW`` files at a time; of pixels there is never more than the
    batch.

    Args:
        files: in the order of the results.
        threads: that read.
    """

    unit = "image"
    frame_rate = None

    def __init__(self, files: Sequence[ImageFile], *, threads: int = 1) -> None:
        self.files = files
        self.threads = threads

    def __len__(self) -> int:
        return len(self.files)

    def batches(self, runner: Runner, batch_size: int, *, keep_pixels: bool) -> Iterator[list[Loaded | Skipped]]:
        with ThreadPoolExecutor(self.threads) as pool:
            for start in range(0, len(self.files), WINDOW):
                indices = range(start, min(start + WINDOW, len(self.files)))
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
            return read_size(self.files[index].path)
        except UnreadableImage:
            return None

    def _load(self, index: int, runner: Runner, keep_pixels: bool) -> Loaded | Skipped:
        file = self.files[index]
        try:
            pixels = read_image(file.path, "RGB")
        except UnreadableImage as error:
            return Skipped(index, file.name, error.reason)
        height, width = pixels.shape[:2]
        if file.size not in (None, (height, width)):
            reason = f"it is {height} x {width} pixels, and its annotations say {file.size[0]} x {file.size[1]}"
            return Skipped(index, file.name, reason)
        reason = runner.refusal(height, width)
        if reason is not None:
            return Skipped(index, file.name, reason)
        entry = {"id": file.image_id, "file_name": file.name, "height": height, "width": width}
        return Loaded(index, entry, prepare(pixels, runner), pixels if keep_pixels else None)


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

    def batches(self, runner: Runner, batch_size: int, *, keep_pixels: bool) -> Iterator[list[Loaded | Skipped]]:
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
                batch.append(Loaded(index, entry, prepare(pixels, runner), pixels if keep_pixels else None))
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
        folders[:] = [
            name for name in folders if not name.startswith(".") and (below / name).resolve() != left_out
        ]
        names += [
            (below / name).relative_to(source).as_posix()
            for name in files
            if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")
        ]
    if not names:
        raise InputError(f"--input {source}: there is no image in it ({', '.join(IMAGE_SUFFIXES)})")
    return [ImageFile(source / name, name, number) for number, name in enumerate(sorted(names), start=1)]
