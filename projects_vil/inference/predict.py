"""A trained detector on image files, folders of them or a video: COCO results, drawings, and what could not be read.

Images are read and resized as by the test loader, so that results equal those of ``tools/train_net.py --eval-only``.
A batch holds only images that are of one size when they are resized: detectron2 would pad others to a common size, and
what a network sees beyond an image's border changes its answers. So every batch size gives the same answers, up to
the rounding of floating-point sums. Files are read in threads while the detector works, a few batches ahead.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data import transforms as T
from detectron2.data.catalog import Metadata
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.modeling import GeneralizedRCNNWithTTA, build_model
from detectron2.structures import Instances
from torch import Tensor
from tqdm import tqdm

from backbones import InputError
from projects_vil.checkpoint.detection_checkpoint import Checkpointer, check_weights, check_weights_file
from projects_vil.checkpoint.provenance import PROVENANCE_KEY, Provenance, coco_categories
from projects_vil.data.build import load_dataset, number_of_classes, register_datasets, size_for_testing
from projects_vil.data.detection_utils import UnreadableImage, read_image, read_size
from projects_vil.engine.defaults import check_device
from projects_vil.export.api import DETECTORS, to_instances
from projects_vil.export.formats import ExportedModel, is_exported, read_metadata
from projects_vil.modeling.test_time_augmentation import add_tta, augmentation_sizes, longest_side
from projects_vil.visualization.results import draw_instances

RESULTS_FILE, IMAGES_FILE, DRAWINGS_FOLDER = "results.json", "images.json", "drawings"
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".dib", ".tif", ".tiff", ".webp", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"),
)
VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ogv", ".ts")
VIDEO_CODEC = "mp4v"
USUAL_FRAME_RATE = 25.0  # for videos that do not tell theirs
WINDOW = 512  # images that are looked through for those of one size
BATCHES_AHEAD = 2
SMALLEST_DRAWING, LABELLED_SIDE = 480, 1000  # pixels of the longer side
SECONDS_BETWEEN_LINES = 30


# -- runners ---------------------------------------------------------------------------------------


class Runner(Protocol):
    """What detects: an eager detector, or an exported one.

    Attributes:
        channels: the order that it takes, ``"RGB"`` or ``"BGR"``.
        classes: their names, where it knows them.
    """

    channels: str
    classes: tuple[str, ...] | None

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width to which it wants an image of this size to be resized."""

    def refusal(self, height: int, width: int) -> str | None:
        """Why it cannot take an image of this size; None where it can."""

    def __call__(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        """Detect.

        Args:
            images: (3, H, W) uint8 on the CPU, all of one size, that of :meth:`input_size`.
            sizes: height and width of each image's file.

        Returns:
            For each image ``pred_boxes`` in pixels of the file, ``scores``, ``pred_classes`` and, for Mask R-CNN,
            ``pred_masks`` (N, height, width), on the CPU.
        """


class Predictor:
    """The eager detector of a config on ``MODEL.DEVICE``, as a :class:`Runner`.

    Args:
        cfg: the detector's config.
        weights: its checkpoint.
        tta: whether to augment (:mod:`projects_vil.modeling.test_time_augmentation`); then it takes images as they are
            in their files.

    Raises:
        InputError: where the weights are missing or do not fit.
    """

    def __init__(self, cfg: CfgNode, weights: str | Path, *, tta: bool = False) -> None:
        check_weights(cfg, str(weights), complete=True)
        model = build_model(cfg)
        contents = Checkpointer(model, cfg=cfg, complete=True).load(str(weights))
        self.cfg = cfg
        self.channels = cfg.INPUT.FORMAT
        self.classes = Provenance.of({PROVENANCE_KEY: contents.get(PROVENANCE_KEY)}).classes
        self.tta = tta
        self.longest_side = longest_side(model)
        self.model = add_tta(cfg, model.eval()) if tta else model.eval()

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        return (height, width) if self.tta else size_for_testing(self.cfg, height, width)

    def refusal(self, height: int, width: int) -> str | None:
        if not self.tta:
            return _refusal((height, width), self.input_size(height, width), (1, self.longest_side))
        mapper = self.model.tta_mapper if isinstance(self.model, GeneralizedRCNNWithTTA) else self.model.mapper
        # The smallest; its longest side is no more than the mapper's.
        size = T.ResizeShortestEdge.get_output_shape(height, width, min(mapper.min_sizes), mapper.max_size)
        return _refusal((height, width), size, (1, None))

    @torch.no_grad()
    def __call__(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        inputs = [
            {"image": image, "height": height, "width": width}
            for image, (height, width) in zip(images, sizes, strict=True)
        ]
        return [output["instances"].to("cpu") for output in self.model(inputs)]


class ExportedRunner:
    """An exported model, as a :class:`Runner`: resized as its metadata says, whatever the config.

    Args:
        path: of the file; its metadata stands beside it.

    Raises:
        InputError: where either is missing or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.model = ExportedModel(path)
        self.channels = self.model.metadata["input"]["color_order"]
        self.classes = tuple(self.model.metadata["classes"])
        self.resizing = self.model.metadata["resizing"]
        self.sides = self.model.metadata["input"].get("sides") or (1, None)

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        if not self.resizing["short_side"]:
            return height, width
        sides = self.resizing["short_side"], self.resizing["longest_side"]
        return T.ResizeShortestEdge.get_output_shape(height, width, *sides)

    def refusal(self, height: int, width: int) -> str | None:
        return _refusal((height, width), self.input_size(height, width), self.sides)

    def __call__(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        if self.model.batched:
            found = self.model(torch.stack(list(images)))
            image_index = found.pop("image_index")
            each = [
                {name: value[image_index == index] for name, value in found.items()} for index in range(len(images))
            ]
        else:
            each = [self.model(image) for image in images]
        return [
            to_instances(found, image.shape[1:], size) for found, image, size in zip(each, images, sizes, strict=True)
        ]


def check_runner(cfg: CfgNode, weights: str | Path, *, tta: bool = False) -> None:
    """What can be checked of :func:`build_runner` in no time.

    Raises:
        InputError: for a model that is no detector, missing weights, an exported model of other classes, a device that
            is not here, or sizes to augment to that are none.
    """
    if cfg.MODEL.META_ARCHITECTURE not in DETECTORS:
        raise InputError(f"a {cfg.MODEL.META_ARCHITECTURE} finds no boxes to predict: {' and '.join(DETECTORS)} do")
    if cfg.INPUT.FORMAT not in ("RGB", "BGR"):
        raise InputError(f"INPUT.FORMAT is {cfg.INPUT.FORMAT}: it is RGB or BGR")
    if not str(weights):
        raise InputError("no weights were given: name the checkpoint of a trained detector with --weights")
    if is_exported(weights):
        if tta:
            raise InputError(f"--tta changes the images inside the detector, and {weights} is an exported one")
        check_number_of_classes(cfg, read_metadata(weights)["classes"])
        return
    check_weights_file(str(weights))
    check_device(cfg)
    if tta:
        augmentation_sizes(cfg)


def build_runner(cfg: CfgNode, weights: str | Path, *, tta: bool = False) -> Runner:
    """What detects: an exported model where the name of the file ends like one, or the config's with its weights.

    Raises:
        InputError: where the file cannot be loaded or does not fit the config.
    """
    if is_exported(weights):
        return ExportedRunner(weights)
    return Predictor(cfg, weights, tta=tta)


def check_number_of_classes(cfg: CfgNode, classes: Sequence[str] | None) -> None:
    """Raise an :class:`InputError` where a model has ``classes``, and its config another number of them."""
    key, number = number_of_classes(cfg)
    if classes is not None and len(classes) != number:
        names = f"{', '.join(classes[:3])}{', ...' if len(classes) > 3 else ''}"
        raise InputError(f"{key} is {number}, and the weights know {len(classes)} classes ({names}): set it to that")


def _refusal(file_size: tuple[int, int], size: tuple[int, int], sides: Sequence[int | None]) -> str | None:
    """Why a file of ``file_size`` that is resized to ``size`` is nothing for a model that takes these sides."""
    smallest, largest = sides
    before = f"{file_size[0]} x {file_size[1]} pixels"
    if min(size) < 1:
        return f"{before}: resized, nothing would be left of it"
    if min(size) < smallest or (largest is not None and max(size) > largest):
        takes = f"{smallest} or more" if largest is None else f"{smallest} to {largest}"
        return f"{before}: resized to {size[0]} x {size[1]}, and the model takes sides of {takes}"
    return None


# -- what is read ----------------------------------------------------------------------------------


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


# -- what is found ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Categories:
    """The classes of results, in the order of the model's.

    Attributes:
        ids: their ``category_id`` in the results.
        names: of the classes.
        colors: RGB in 0..255 of each in drawings, where a dataset says them.
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]
    colors: Sequence[Sequence[int]] | None = None

    @property
    def metadata(self) -> Metadata:
        """For detectron2's drawings."""
        colors = {} if self.colors is None else {"thing_colors": self.colors}
        return Metadata(thing_classes=list(self.names), **colors)


def find_categories(cfg: CfgNode, classes: Sequence[str] | None, *, annotated: bool = False) -> Categories:
    """Those of the first of ``DATASETS.TEST`` that is known here and has the model's classes; or else ids from 1, with
    the names ``classes``, or numbers.

    Args:
        cfg: the detector's config.
        classes: that the model was trained on; None, or numbers, where their names are not known: then any dataset with
            as many will do.
        annotated: whether ``DATASETS.TEST`` was given for these images, so that only its number of classes counts.

    Raises:
        InputError: where the model has another number of classes than the config.
    """
    check_number_of_classes(cfg, classes)
    _, number = number_of_classes(cfg)
    any_names = annotated or classes is None or all(name.isdecimal() for name in classes)
    for name in cfg.DATASETS.TEST:
        if name not in DatasetCatalog.list():
            continue
        metadata = MetadataCatalog.get(name)
        names = metadata.get("thing_classes")
        index_of = metadata.get("thing_dataset_id_to_contiguous_id")
        # detectron2 learns both with the first loading of a COCO file, not with its registration.
        if names and index_of:
            pairs = [(category_id, names[index]) for category_id, index in sorted(index_of.items(), key=lambda i: i[1])]
        else:
            pairs = coco_categories(metadata.get("json_file")) or list(enumerate(names or (), start=1))
        if len(pairs) == number and (any_names or [name for _, name in pairs] == list(classes)):
            return Categories(*map(tuple, zip(*pairs, strict=True)), colors=metadata.get("thing_colors"))
    ids = range(1, number + 1)
    return Categories(tuple(ids), tuple(classes or (f"class {category_id}" for category_id in ids)))


# -- what is written -------------------------------------------------------------------------------


@contextlib.contextmanager
def written_whole(*paths: Path) -> Iterator[tuple[Any, ...]]:
    """Text files to write to, which take their names only when all are written: an interruption leaves those before."""
    partials = [path.with_name(f".{path.name}.{os.getpid()}.partial") for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            yield tuple(stack.enter_context(partial.open("w")) for partial in partials)
        for partial, path in zip(partials, paths, strict=True):
            partial.replace(path)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)


class JsonList:
    """A JSON list, an item a line, in the order of an index that the items come without.

    Args:
        file: to write to.
    """

    def __init__(self, file: Any) -> None:
        self.file = file
        self.length = 0
        self._next = 0
        self._waiting: dict[int, list[dict]] = {}
        file.write("[")

    def put(self, index: int, items: list[dict]) -> None:
        self._waiting[index] = items
        while self._next in self._waiting:
            for item in self._waiting.pop(self._next):
                self.file.write(f"{',' if self.length else ''}\n{json.dumps(item)}")
                self.length += 1
            self._next += 1

    def close(self) -> None:
        self.file.write("\n]\n")


def draw(pixels: np.ndarray, instances: list[dict], metadata: Metadata) -> np.ndarray:
    """An image with its instances, (H, W, 3) uint8 RGB: as large as it is, or enlarged where it is small."""
    longer = max(pixels.shape[:2])
    label_size = max(longer / LABELLED_SIDE, 1)
    return draw_instances(pixels, instances, metadata, scale=max(SMALLEST_DRAWING / longer, 1), label_size=label_size)


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


def write_image(path: Path, image: np.ndarray) -> None:
    """Write (H, W, 3) uint8 RGB as the path's suffix says; its folder is created.

    Raises:
        InputError: where the file cannot be written.
    """
    encoded, buffer = cv2.imencode(path.suffix, image[..., ::-1])
    if not encoded:
        raise RuntimeError(f"OpenCV could not encode {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(buffer.tobytes())
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror}); choose another --output") from error


class Progress:
    """A bar on stderr, or a line now and then where that is no terminal.

    Args:
        total: of what is to do; 0 where that is not known.
        unit: its name.
    """

    def __init__(self, total: int, unit: str) -> None:
        self.total = total
        self.unit = unit
        self.done = 0
        self.start = self.last = time.monotonic()
        # tqdm shows no bar where stderr is no terminal, with None.
        self.bar = tqdm(total=total or None, unit=unit, file=sys.stderr, disable=None, dynamic_ncols=True)

    def add(self, number: int) -> None:
        self.done += number
        self.bar.update(number)
        now = time.monotonic()
        if self.bar.disable and now - self.last >= SECONDS_BETWEEN_LINES:
            self.last = now
            of_total = f" of {self.total}" if self.total else ""
            rate = self.done / (now - self.start)
            self.say(f"{self.done}{of_total} {self.unit}s, {rate:.2g} a second")

    def say(self, line: str) -> None:
        """Print a line on stderr, over the bar."""
        tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        self.bar.close()


# -- all together ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a run did.

    Attributes:
        unit: ``"image"`` or ``"frame"``.
        done: images or frames that were predicted.
        detections: in all of them.
        skipped: what could not be read.
        files: what was written, folders among them.
    """

    unit: str
    done: int
    detections: int
    skipped: tuple[Skipped, ...]
    files: tuple[Path, ...]

    def lines(self) -> list[str]:
        """The last lines of the tool."""
        lines = [f"{_count(self.done, self.unit)}, {_count(self.detections, 'detection')}"]
        lines.append(f"wrote {', '.join(map(str, self.files))}")
        if self.skipped:
            lines.append(f"skipped {_count(len(self.skipped), 'file')} that could not be read")
        return lines


def predict(
    cfg: CfgNode,
    weights: str | Path,
    source: str | Path,
    output: str | Path,
    *,
    batch_size: int = 1,
    tta: bool = False,
    annotations: str | Path | None = None,
    drawings: bool = True,
    score_threshold: float = 0.5,
) -> Summary:
    """Predict on an image, on all images of a folder and the folders in it, or on the frames of a video.

    Writes into ``output``:

    - ``results.json``: all detections in COCO's format of results, in the order of the input; boxes and masks are in
      pixels of the (upright) file, whatever size the detector saw;
    - ``images.json``: ``images`` with id, file name, height and width, and for a video frame (from 0) and seconds;
      ``categories`` with id and name; ``skipped`` with file name and reason;
    - ``drawings/``: every image under its own name, or a video.

    Image ids count from 1, in the order of the names; a video's frames likewise. Files whose names begin with a dot,
    and ``output`` where it lies in the folder, are left alone.

    Args:
        cfg: the detector's config.
        weights: its checkpoint.
        source: an image, a folder or a video (by its suffix).
        output: folder for the results.
        batch_size: images at once, at most.
        tta: whether to use test-time augmentation.
        annotations: COCO file of the folder's images: those in it are predicted, in its order, with its ids.
        drawings: whether to draw.
        score_threshold: for drawings, in [0, 1]; the results have all that the detector gives.

    Raises:
        InputError: for a wrong value, missing or wrong files; before the detector is built where that can be known.
    """
    source, output = Path(source), Path(output)
    _check_options(source, output, batch_size, score_threshold)
    check_runner(cfg, weights, tta=tta)
    files: ImageFiles | Video
    if annotations is not None:
        _check_not_overwritten(Path(annotations), output)
        cfg, images = _annotated_images(cfg, source, Path(annotations))
    else:
        register_datasets(cfg)
        images = find_images(source, leave_out=output)
    if source.is_file() and source.suffix.lower() in VIDEO_SUFFIXES:
        files = Video(source)
    else:
        files = ImageFiles(images, threads=max(cfg.DATALOADER.NUM_WORKERS, 1))
    runner = build_runner(cfg, weights, tta=tta)
    categories = find_categories(cfg, runner.classes, annotated=annotations is not None)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output}: it cannot be made ({error.strerror})") from error
    drawer = None
    if drawings and isinstance(files, Video):
        drawer = VideoDrawings(output / DRAWINGS_FOLDER, source.name, files.frame_rate)
    elif drawings:
        drawer = ImageDrawings(output / DRAWINGS_FOLDER, [file.name for file in images])
    return run(files, runner, categories, output, drawer, batch_size=batch_size, score_threshold=score_threshold)


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


def run(
    files: ImageFiles | Video,
    runner: Runner,
    categories: Categories,
    output: Path,
    drawer: ImageDrawings | VideoDrawings | None,
    *,
    batch_size: int = 1,
    score_threshold: float = 0.5,
) -> Summary:
    """Detect in all files and write what :func:`predict` promises.

    Args:
        files: what is read.
        runner: what detects.
        categories: of the runner's classes.
        output: a folder that is there.
        drawer: takes the drawings; None where there are none.
        batch_size: images at once, at most.
        score_threshold: for drawings.

    Raises:
        InputError: where a drawing cannot be written.
    """
    entries: dict[int, dict] = {}
    skipped: list[Skipped] = []
    metadata = categories.metadata
    with written_whole(output / RESULTS_FILE, output / IMAGES_FILE) as (file, images_file):
        with (
            contextlib.closing(Progress(len(files), files.unit)) as progress,
            drawer or contextlib.nullcontext(),
            contextlib.closing(files.batches(runner, batch_size, keep_pixels=drawer is not None)) as batches,
            contextlib.closing(read_ahead(batches)) as batches_ahead,
        ):
            results = JsonList(file)
            for batch in batches_ahead:
                for item in batch:
                    if isinstance(item, Skipped):
                        skipped.append(item)
                        results.put(item.index, [])
                        progress.say(f"skipped {item.name}: {item.reason}")
                for loaded, instances in _detect(runner, [item for item in batch if isinstance(item, Loaded)]):
                    found = instances_to_coco_json(instances, loaded.entry["id"])
                    if drawer is not None:
                        kept = [item for item in found if item["score"] >= score_threshold]
                        drawer.add(loaded.entry, draw(loaded.pixels, kept, metadata))
                    entries[loaded.index] = loaded.entry
                    ids = categories.ids
                    results.put(loaded.index, [item | {"category_id": ids[item["category_id"]]} for item in found])
                progress.add(len(batch))
            results.close()
        skipped.sort(key=lambda item: item.index)
        content = {
            "images": [entries[index] for index in sorted(entries)],
            "categories": [
                {"id": category_id, "name": name}
                for category_id, name in zip(categories.ids, categories.names, strict=True)
            ],
            "skipped": [{"file_name": item.name, "reason": item.reason} for item in skipped],
        }
        json.dump(content, images_file)
        images_file.write("\n")
    written = [output / RESULTS_FILE, output / IMAGES_FILE]
    if drawer is not None and entries:
        written.append(output / DRAWINGS_FOLDER)
    return Summary(files.unit, len(entries), results.length, tuple(skipped), tuple(written))


def _detect(runner: Runner, batch: list[Loaded]) -> Iterator[tuple[Loaded, Instances]]:
    # One group, but for files whose header told another size than their pixels.
    groups = defaultdict(list)
    for loaded in batch:
        groups[loaded.image.shape].append(loaded)
    for group in groups.values():
        sizes = [(loaded.entry["height"], loaded.entry["width"]) for loaded in group]
        yield from zip(group, runner([loaded.image for loaded in group], sizes), strict=True)


def _annotated_images(cfg: CfgNode, folder: Path, annotations: Path) -> tuple[CfgNode, list[ImageFile]]:
    """The images of a COCO file, and the config with it for ``DATASETS.TEST``."""
    if not folder.is_dir():
        raise InputError(f"--annotations are for the images of a folder, and --input {folder} is none")
    if not annotations.is_file():
        raise InputError(f"--annotations {annotations}: there is no such file")
    name = f"{annotations} for {folder}"
    cfg = cfg.clone()
    cfg.defrost()
    cfg.DATASETS.COCO = [*cfg.DATASETS.COCO, [name, str(annotations), str(folder)]]
    cfg.DATASETS.TEST = (name,)
    cfg.freeze()
    register_datasets(cfg)
    images = []
    for record in load_dataset(cfg, [name], train=False):
        path = Path(record["file_name"])
        if not path.is_relative_to(folder) or ".." in path.relative_to(folder).parts:
            raise InputError(f"{annotations} has {path}: an image outside the folder --input {folder}")
        size = record["height"], record["width"]
        images.append(ImageFile(path, path.relative_to(folder).as_posix(), record["image_id"], size))
    return cfg, images


def _check_options(source: Path, output: Path, batch_size: int, score_threshold: float) -> None:
    if batch_size < 1:
        raise InputError(f"--batch-size is {batch_size}: it is 1 or more")
    if not 0 <= score_threshold <= 1:
        raise InputError(f"--score-threshold is {score_threshold}: it is 0 to 1")
    if not source.exists():
        raise InputError(f"--input {source}: there is no such file or folder")
    if output.exists() and not output.is_dir():
        raise InputError(f"--output {output}: it is a file, and a folder is needed")
    present = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    if not present.is_dir() or not os.access(present, os.W_OK):
        raise InputError(f"--output {output}: {present} cannot be written to")
    drawn = (output / DRAWINGS_FOLDER).resolve()
    if source.resolve() == output.resolve():
        raise InputError(f"--output {output}: it is the --input folder; choose another")
    if drawn in (source.resolve(), *source.resolve().parents):
        raise InputError(f"--input {source}: drawings of it would be written over it; choose another --output")


def _check_not_overwritten(annotations: Path, output: Path) -> None:
    written = [(output / name).resolve() for name in (RESULTS_FILE, IMAGES_FILE)]
    if annotations.resolve() in written:
        raise InputError(f"--annotations {annotations}: results would be written over it; choose another --output")


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"
