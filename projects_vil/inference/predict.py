"""Detection on image files, folders, videos and streams: COCO results, drawings, and a list of what cannot be read.

Images are read and resized as by the test loader, so that results equal those of ``tools/train_net.py --eval-only``.
Only images of one padded size share a batch: detectron2 would pad others further than alone, and padding changes the
detections of a network that sees it.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import torch
from tqdm import tqdm

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from backbones.errors import GENERATOR, check_replaceable, check_whole, printable
from projects_vil.checkpoint import Categories, dataset_categories
from projects_vil.config import default_config
from projects_vil.data import describe_classes, load_dataset, match_all_classes, register_datasets
from projects_vil.export import ExportedModel
from projects_vil.inference.detector import Detector, check_threshold
from projects_vil.inference.image_listing import check_column, find_images, is_stream, is_video
from projects_vil.inference.image_loading import ImageBatches, ImageSource, Skipped, Video
from projects_vil.utils import stop_requests
from projects_vil.visualization import DRAW_THRESHOLD, write_image

RESULTS_FILE, IMAGES_FILE, DRAWINGS_FOLDER = "results.json", "images.json", "drawings"
SMALLEST_DRAWING = 480  # pixels of the longer side
VIDEO_CODEC = "mp4v"
SECONDS_BETWEEN_LINES = 30  # between progress lines in a log file


@dataclasses.dataclass(frozen=True)
class Summary:
    """The outcome of :func:`predict`.

    Attributes:
        unit: ``"image"`` or ``"frame"``.
        done: number of images or frames with results.
        detections: number of detections in all of them.
        skipped: files that could not be read.
        files: the files and folders that were written.
        drawn: number of detections that were drawn; None without drawings.
        score_threshold: lowest score of those.
        highest_score: of all detections.
    """

    unit: str
    done: int
    detections: int
    skipped: tuple[Skipped, ...]
    files: tuple[Path, ...]
    drawn: int | None
    score_threshold: float
    highest_score: float

    def lines(self) -> list[str]:
        lines = [f"{_count(self.done, self.unit)}, {_count(self.detections, 'detection')}"]
        if self.drawn is not None and self.detections:
            drawn = f"{self.drawn} of {_count(self.detections, 'detection')} drawn (score >= {self.score_threshold:g})"
            lines.append(drawn + ("" if self.drawn else f"; the highest score is {self.highest_score:.3g}"))
        lines.append(f"wrote {', '.join(map(str, self.files))}")
        return lines + [f"skipped {_count(len(self.skipped), 'file')} that could not be read"] * bool(self.skipped)


def predict(
    detector: Detector,
    source: str | Path,
    output: str | Path,
    *,
    batch_size: int = 1,
    annotations: str | Path | None = None,
    drawings: bool = True,
    score_threshold: float = DRAW_THRESHOLD,
    column: str | None = None,
    workers: int = 0,
) -> Summary:
    """Detect objects in an image, in all images of a folder and its subfolders, or in the frames of a video or stream.

    Writes into ``output``:

    - ``results.json``: all detections in COCO's results format, in the order of the input; boxes and masks are in
      pixels of the (upright) file;
    - ``images.json``: ``images`` with id, file name, height and width, and for a video frame (from 0) and seconds;
      ``categories`` with id and name; ``skipped`` with file name and reason;
    - ``drawings/``: every image under its own name, or a video.

    Image ids count from 1, in the order of the names or frames. Hidden files, and ``output`` inside the folder, are
    skipped. Category ids are the detector's; with an annotation file, those of that file. Both JSON files are written
    as results come, and get their names at the end. A camera or a stream ends by itself, or by Ctrl-C or SIGTERM;
    frames that come while the detector works may be lost, and ``seconds`` are then those since the first frame.

    Args:
        detector: any; a batched export for several images at once.
        source: what :func:`~projects_vil.inference.image_listing.find_images` takes, a video (by its suffix), or a
            string: the number of a camera, or the URL of a video or stream that OpenCV opens.
        output: folder for the results.
        batch_size: maximum number of images at once.
        annotations: COCO file of the folder's images: only its images, in its order, with its ids.
        drawings: whether to draw.
        score_threshold: lowest score in drawings, in [0, 1]; the results contain all detections.
        column: the column of a table of paths or URLs; None for the first of ``COLUMNS``.
        workers: processes that draw while the detector works; 0 draws between its batches.

    Raises:
        ConfigError: for invalid arguments and files, before anything is written, and if a file cannot be written.
    """
    text, source, output = str(source), Path(source), Path(output)
    stream = text if is_stream(text) else None
    _check_paths(source, output, annotations and Path(annotations))
    check_whole("batch_size", batch_size)
    check_whole("workers", workers, least=0)
    check_threshold(score_threshold)
    check_column(text, column)
    if stream is not None:
        files: ImageBatches | Video = Video(stream)
        logging.getLogger(__name__).info("Ctrl-C ends %s and writes its results", files.name)
    elif is_video(text):
        files = Video(source)
    elif annotations is None:
        files = ImageBatches(find_images(text, exclude=output, column=column), keep_pixels=drawings)
    else:
        images, categories = _annotated_images(detector, source, Path(annotations))
        files = ImageBatches(images, keep_pixels=drawings)
        detector = Detector(detector.runner, categories=categories)
    model = getattr(detector.runner, "model", None)
    if batch_size > 1 and isinstance(model, ExportedModel) and not model.batched:
        logging.getLogger(__name__).warning("batch_size %d: %s takes one image at a time", batch_size, model.path)
    output.mkdir(parents=True, exist_ok=True)
    # Entries and results whose turn has not come: batches of one padded size may not be in the order of the input.
    waiting: dict[int, tuple[dict | None, list[dict]]] = {}
    skipped: list[Skipped] = []
    position = done = detections = drawn = 0
    highest_score = 0.0
    folder = output / DRAWINGS_FOLDER
    writer = contextlib.nullcontext(functools.partial(_write_drawing, folder, source))
    if drawings and isinstance(files, Video):
        writer = _video_writer(folder, files)
    with (
        atomic_write(output / RESULTS_FILE) as results_path,
        atomic_write(output / IMAGES_FILE) as images_path,
        open(results_path, "w") as results_file,
        open(images_path, "w") as images_file,
        contextlib.nullcontext([]) if stream is None else stop_requests(single_process=True) as received,
        progress_bar(files.unit, total=len(files)) as progress,
        writer as write_drawing,
        _drawing_in(workers if drawings else 0, write_drawing) as draw,
        contextlib.closing(detector.detect(files, batch_size=batch_size)) as batches,
    ):
        results_file.write("[")
        # check_replaceable reads only the beginning of a file.
        images_file.write(json.dumps({"info": {"description": GENERATOR}})[:-1] + ', "images": [')
        for batch in batches:
            for item, found in batch:
                if isinstance(item, Skipped):
                    waiting[item.index] = None, []
                    skipped.append(item)
                    tqdm.write(printable(f"skipped {item.name}: {item.reason}"), file=sys.stderr)
                    continue
                if drawings:
                    options = {"score_threshold": score_threshold, "longer_side": SMALLEST_DRAWING}
                    draw(item.entry, functools.partial(found.draw, **options))
                    drawn += int((found.scores >= score_threshold).sum())
                highest_score = max([highest_score, *found.scores[:1].tolist()])
                waiting[item.index] = item.entry, found.to_coco(item.entry["id"])
            while position in waiting:
                entry, results = waiting.pop(position)
                position += 1
                for result in results:
                    results_file.write(", " * (detections > 0) + json.dumps(result))
                    detections += 1
                if entry is not None:
                    images_file.write(", " * (done > 0) + json.dumps(entry))
                    done += 1
            progress.update(len(batch))
            if received:
                break
        results_file.write("]")
        if skipped and not done:
            # The files of an earlier prediction stay.
            raise ConfigError(f"none of {_count(len(skipped), 'file')} can be read, such as {skipped[0].name}")
        skipped.sort(key=lambda item: item.index)
        pairs = zip(detector.categories.ids, detector.names, strict=True)
        rest = {
            "categories": [{"id": category_id, "name": name} for category_id, name in pairs],
            "skipped": [{"file_name": item.name, "reason": item.reason} for item in skipped],
        }
        images_file.write("], " + json.dumps(rest)[1:])
    written = [output / RESULTS_FILE, output / IMAGES_FILE, *([folder] if drawings and done else [])]
    scores = drawn if drawings else None, score_threshold, highest_score
    return Summary(files.unit, done, detections, tuple(skipped), tuple(written), *scores)


def progress_bar(unit: str, *, total: int = 0) -> tqdm:
    """Return a bar of progress, with a line at times in a log file; ``total`` is 0 where nobody knows it."""
    interval = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
    return tqdm(total=total or None, unit=unit, dynamic_ncols=True, mininterval=interval)


def categories_as_annotated(model: Categories, dataset: Categories) -> Categories:
    """Return a model's classes with a dataset's ids and names: matched by name, or else all by index.

    Args:
        model: the model's classes, in the order of its outputs.
        dataset: the classes of the annotation file.

    Raises:
        ConfigError: if their numbers differ, or some names are in another order and others match nothing.
    """
    differ = (
        f"the model has {describe_classes(model.names)}, and the annotations have {describe_classes(dataset.names)}"
    )
    order = match_all_classes(model.names, dataset.names, differ=differ)
    ids, names = zip(*((dataset.ids[index], dataset.names[index]) for index in order), strict=True)
    return Categories(ids, names, dataset.colors and [dataset.colors[index] for index in order])


WriteDrawing = Callable[[dict, np.ndarray], None]


def _write_drawing(folder: Path, source: Path, entry: dict, drawn: np.ndarray) -> None:
    """JPEG and PNG keep their names; others become PNG, with ``.png`` appended."""
    # The names in a list may lead out of its folder.
    name = "/".join(part for part in entry["file_name"].split("/") if part not in ("", ".", ".."))
    if not name.lower().endswith((".jpg", ".jpeg", ".png")):
        name += ".png"
        while (source / name).exists():
            name += ".png"
    write_image(folder / name, drawn)


@contextlib.contextmanager
def _drawing_in(workers: int, write: WriteDrawing) -> Iterator[Callable[[dict, Callable[[], np.ndarray]], None]]:
    """Yield a function that draws in other processes, with 0 at once, and writes in the order of its calls."""
    if not workers:
        yield lambda entry, draw: write(entry, draw())
        return
    pending: deque[tuple[dict, Future]] = deque()
    with ProcessPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        # Starts the processes, before this one has threads whose locks they would copy.
        pool.submit(int)

        def draw_behind(entry: dict, draw: Callable[[], np.ndarray]) -> None:
            pending.append((entry, pool.submit(draw)))
            write_but(2 * workers)

        def write_but(number: int) -> None:
            while len(pending) > number:
                entry, drawn = pending.popleft()
                write(entry, drawn.result())

        yield draw_behind
        write_but(0)


@contextlib.contextmanager
def _video_writer(folder: Path, video: Video) -> Iterator[WriteDrawing]:
    path = folder / f"{Path(video.name).stem}.mp4"
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial.mp4")
    writer, size = cv2.VideoWriter(), None

    def write(entry: dict, drawn: np.ndarray) -> None:
        nonlocal size  # OpenCV drops frames of another size than the first
        size = size or (drawn.shape[1] // 2 * 2, drawn.shape[0] // 2 * 2)  # encoders need even sides
        if not writer.isOpened():
            folder.mkdir(parents=True, exist_ok=True)
            if not writer.open(str(partial), cv2.VideoWriter_fourcc(*VIDEO_CODEC), video.frame_rate, size):
                raise ConfigError(f"{path}: OpenCV cannot encode {VIDEO_CODEC}; leave the drawings out")
        writer.write(np.ascontiguousarray(cv2.resize(drawn, size)[..., ::-1]))

    try:
        yield write
        writer.release()
        if partial.exists():
            partial.replace(path)
    finally:
        writer.release()
        partial.unlink(missing_ok=True)


def _annotated_images(detector: Detector, folder: Path, annotations: Path) -> tuple[list[ImageSource], Categories]:
    """Return the images of a COCO file in a folder, and the detector's classes with the file's ids and names."""
    name = f"{annotations} for {folder}"
    cfg = getattr(detector.runner, "cfg", default_config()).clone()
    cfg.defrost()
    cfg.DATASETS.COCO = [[name, str(annotations), str(folder)]]
    # Only the names, sizes and ids of images are used, and an image of another size is skipped, not refused.
    cfg.DATASETS.CHECK = "off"
    cfg.MODEL.RETINANET.NUM_CLASSES = cfg.MODEL.ROI_HEADS.NUM_CLASSES = len(detector.names)
    register_datasets(cfg)
    images = []
    for record in load_dataset(cfg, [name], train=False):
        path = Path(record["file_name"])
        if not path.is_relative_to(folder) or ".." in path.relative_to(folder).parts:
            raise ConfigError(f"{annotations} has {path}, which is outside of the folder {folder}")
        size = record["height"], record["width"]
        images.append(ImageSource(path, path.relative_to(folder).as_posix(), record["image_id"], size))
    return images, categories_as_annotated(detector.categories, dataset_categories([name], len(detector.names)))


def _check_paths(source: Path, output: Path, annotations: Path | None) -> None:
    existing = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(f"output {output}: {existing} is not a folder that can be written to")
    inputs = (source.resolve(), *source.resolve().parents)
    if source.resolve() == output.resolve() or (output / DRAWINGS_FOLDER).resolve() in inputs:
        raise ConfigError(f"output {output}: drawings would overwrite the source {source}")
    check_replaceable(output / IMAGES_FILE, advice="Choose another output directory.")
    if (output / RESULTS_FILE).exists() and not (output / IMAGES_FILE).exists():
        raise ConfigError(
            f"output {output} has a {RESULTS_FILE} of another tool, without {IMAGES_FILE}: choose another"
        )
    if annotations is not None:
        if not source.is_dir() or not annotations.is_file():
            raise ConfigError(f"annotations {annotations} must be a COCO file, and source {source} a folder")
        if annotations.resolve() in [(output / name).resolve() for name in (RESULTS_FILE, IMAGES_FILE)]:
            raise ConfigError(f"annotations {annotations}: results would overwrite it")


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"
