"""Drawings of detections, as image files or as a video."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from tqdm import tqdm

from projects_vil.visualization import write_image

VIDEO_CODEC = "mp4v"


class ImageDrawings:
    """Drawings as files: JPEG and PNG keep their name, others become PNG with ``.png`` after it.

    Args:
        folder: for the drawings.
        names: of all images, so that no drawing takes another's place.
    """

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        self.names = {name: name for name in names}
        for name in list(self.names):
            if not name.lower().endswith((".jpg", ".jpeg", ".png")):
                drawn = f"{name}.png"
                while drawn in self.names:
                    drawn += ".png"
                self.names[name] = drawn

    def __enter__(self) -> "ImageDrawings":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, entry: dict[str, Any], drawn: np.ndarray) -> None:
        write_image(self.folder / self.names[entry["file_name"]], drawn)


class VideoDrawings:
    """Drawings as one MP4, or as a PNG a frame where it cannot be encoded here.

    Args:
        folder: for the drawings.
        name: of the video.
        frame_rate: frames a second.
        codec: four letters.
    """

    def __init__(self, folder: Path, name: str, frame_rate: float, *, codec: str = VIDEO_CODEC) -> None:
        self.path = folder / Path(name).with_suffix(".mp4")
        self.partial = self.path.with_name(f".{self.path.stem}.{os.getpid()}.partial.mp4")
        self.frame_rate = frame_rate
        self.codec = codec
        self.size: tuple[int, int] | None = None
        self.writer: cv2.VideoWriter | None = None

    def add(self, entry: dict[str, Any], drawn: np.ndarray) -> None:
        if self.size is None:
            self._open(drawn)
        if self.writer is None:
            write_image(self.path.with_suffix("") / f"{entry['frame']:06d}.png", drawn)
        else:
            # Sides are even, as encoders want them, and OpenCV drops frames of another size silently.
            resized = drawn if drawn.shape[1::-1] == self.size else cv2.resize(drawn, self.size)
            self.writer.write(np.ascontiguousarray(resized[..., ::-1]))

    def __enter__(self) -> "VideoDrawings":
        return self

    def __exit__(self, error_type: type | None, *error: object) -> None:
        if self.writer is not None:
            self.writer.release()
            if error_type is None:
                self.partial.replace(self.path)
        self.partial.unlink(missing_ok=True)

    def _open(self, drawn: np.ndarray) -> None:
        self.size = drawn.shape[1] // 2 * 2, drawn.shape[0] // 2 * 2
        self.path.parent.mkdir(parents=True, exist_ok=True)
        code = cv2.VideoWriter_fourcc(*self.codec)
        writer = cv2.VideoWriter(str(self.partial), code, self.frame_rate, self.size)
        if writer.isOpened():
            self.writer = writer
        else:
            where = self.path.with_suffix("")
            tqdm.write(f"OpenCV cannot encode {self.codec} here: frames are drawn as PNG in {where}", file=sys.stderr)
