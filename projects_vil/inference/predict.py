"""Predict on images, folders, lists, tar files, videos and streams, and write COCO JSON, drawings or Parquet files.

Images are read and resized as for evaluation, so that the detections are identical to an evaluation.
"""

import contextlib
import dataclasses
import functools
import glob
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
from tqdm import tqdm

from backbones import ConfigError
from backbones.errors import GENERATOR, check_choice, check_file, check_replaceable, check_whole, counted, printable
from backbones.files import atomic_write
from projects_vil.checkpoint import weights_of
from projects_vil.config import CONFIG_FILE, Overrides
from projects_vil.data import IMAGE_SUFFIXES, Categories
from projects_vil.data.catalog import describe_classes, match_all_classes
from projects_vil.data.readers import read_coco
from projects_vil.data.writers import check_output, write_detections
from projects_vil.export import ExportedModel
from projects_vil.files import atomic_folder
from projects_vil.inference.detector import Detections, Detector, check_threshold
from projects_vil.inference.image_listing import TABLES, find_images, is_video, list_paths, number_of_images, suffix_of
from projects_vil.inference.image_loading import ImageBatches, ImageSource, Loaded, Skipped, Video
from projects_vil.utils import stop_requests
from vil.choices import PART_SIZE, PREDICTION_FORMATS, SCORE_THRESHOLD

if TYPE_CHECKING:
    from projects_vil.inference.tracking import Tracker

RESULTS_FILE, IMAGES_FILE, DRAWINGS_FOLDER, DATASET_FOLDER = "results.json", "images.json", "drawings", "dataset"
MIN_DRAWING_SIDE = 480  # smaller images are enlarged to this many pixels on the longer side
VIDEO_CODEC = "mp4v"
SECONDS_BETWEEN_LINES = 30  # between progress lines in a log file


@dataclasses.dataclass(frozen=True)
class Summary:
    """The outcome of :func:`predict`.

    Attributes:
        num_images: Number of images or frames with results.
        num_detections: Number of detections in all of them.
        num_skipped: Number of images that could not be read.
        lines: A description for the terminal.
    """

    num_images: int
    num_detections: int
    num_skipped: int
    lines: tuple[str, ...]


def predict(
    model: Detector | str | os.PathLike,
    source: str | os.PathLike | Sequence[str],
    output: str | os.PathLike,
    *,
    file_format: str | None = None,
    batch_size: int = 1,
    column: str | None = None,
    annotations: str | os.PathLike | None = None,
    drawings: bool = True,
    score_threshold: float | None = None,
    save_labels: str | None = None,
    part_size: int | None = None,
    shard: tuple[int, int] | None = None,
    ray: bool = False,
    ray_workers: Sequence[int] | None = None,
    workers_per_gpu: int | None = None,
    tta: bool = False,
    track: bool = False,
    overrides: Overrides = (),
) -> Summary:
    """Detect objects in the images of an input and write the results into an output directory.

    With ``file_format="coco"`` the output directory gets these files:

    - ``results.json``: all detections in COCO's results format, in the order of the input. Boxes and masks are in
      pixels of the upright image.
    - ``images.json``: ``images`` with id, file name, height and width, ``damaged`` (the reason) if only a part could be
      decoded, and for a video the frame (from 0) and the time in seconds; ``categories`` with id and name; ``skipped``
      with file name and reason.
    - ``drawings/``: a drawing of each image under the name of the image, or a video.
    - ``dataset/``: with ``save_labels``, the detections above the threshold and copies of the images as a dataset.

    Image ids count from 1 in the order of the input. Category ids come from the detector, or from ``annotations``.
    Both JSON files are streamed to temporary files and renamed at the end. A camera or a stream is read until it ends,
    or until SIGINT (Ctrl-C) or SIGTERM. A live stream drops frames while the detector is busy.

    With ``file_format="parquet"`` or ``ray=True`` the output directory gets Parquet files with one row per image, and
    the same command resumes an interrupted run; see docs/scale.md.

    Args:
        model: A detector, or a name or path for :meth:`Detector.load`. With ``ray=True`` a name or path.
        source: See :func:`~projects_vil.inference.image_listing.find_images`. For COCO results also a video file, the
            number of a camera, or the URL of a stream that OpenCV can open. Several images or folders are a sequence of
            paths or a pattern such as ``"photos/*.jpg"``.
        output: The output directory, which must not be the output directory of a training run. Earlier results in it
            are replaced, and drawings of other images are kept. If it is inside the input folder, it is not read.
        file_format: ``"coco"`` or ``"parquet"``. By default ``"coco"``, or ``"parquet"`` with Ray.
        batch_size: Maximum number of images in a batch.
        column: The column of a table of paths or URLs. By default the first of ``COLUMNS``.
        annotations: A COCO file of the images in the folder. Only its images are used, in its order and with its ids.
        drawings: Whether to write drawings.
        score_threshold: Lowest score in drawings and labels, in [0, 1]; 0.3 by default. The results contain all
            detections.
        save_labels: The format of ``dataset/``: ``"coco"``, ``"yolo"``, ``"voc"``, ``"labelme"`` or ``"cvat"``. The
            input is an image or a folder.
        part_size: Number of rows in a Parquet file; 1024 by default.
        shard: (i, n) for job i, counted from 0, of n jobs that share the output directory.
        ray: Whether to distribute the images over a Ray cluster.
        ray_workers: Minimum and maximum number of detectors on the cluster.
        workers_per_gpu: Number of detectors that share a GPU of the cluster; 1 by default.
        tta: Whether to use test-time augmentation, if ``model`` is a name or path.
        track: Whether to track objects through the frames of a video or a folder. Tracked detections have ``track_id``
            in the results, and the drawings show it. ``score_threshold`` is the lowest score that starts a track.
        overrides: Config keys and values, if ``model`` is a name or path.

    Raises:
        ConfigError: If an argument or a file is invalid, before anything is written, or if a file cannot be written.

    Example:
        ``predict("output/vil_tiny", "photos", "predictions", batch_size=4)``
    """
    check_choice("file_format", file_format or "coco", PREDICTION_FORMATS)
    if ray and file_format == "coco":
        raise ConfigError("--ray writes Parquet files, so --format coco has no effect. Leave out one of them.")
    flag = "--ray" if ray else f"--format {file_format or 'coco'}"
    for name, value, *flags in (
        ("annotations", annotations, "--format coco"),
        ("score_threshold", score_threshold, "--format coco"),
        ("save_labels", save_labels, "--format coco"),
        ("track", track or None, "--format coco"),
        ("part_size", part_size, "--format parquet", "--ray"),
        ("shard", shard, "--format parquet"),
        ("ray_workers", ray_workers, "--ray"),
        ("workers_per_gpu", workers_per_gpu, "--ray"),
    ):
        if value is not None and flag not in flags:
            raise ConfigError(f"{name} has no effect without {' or '.join(flags)}. Leave it out, or add {flags[0]}.")
    check_whole("batch_size", batch_size)
    check_threshold(score_threshold)
    if "://" in str(output):
        raise ConfigError(f"Cannot write to the URL '{output}'. Use a local output directory, and copy it to the URL.")
    if isinstance(source, str) and not os.path.exists(source):
        source = sorted(glob.glob(source)) or source
    is_single, output = isinstance(source, (str, os.PathLike)), Path(output)
    source = os.fspath(source) if is_single else [*dict.fromkeys(map(os.fspath, source))]
    if (output / CONFIG_FILE).is_file() and weights_of(output) is not None:
        raise ConfigError(f"'{output}' has the config and the weights of a detector. Choose another output directory.")
    if column is not None and not (is_single and suffix_of(source) in TABLES):
        raise ConfigError(f"column is {column!r}, but '{source}' is not a table. Leave out --column.")
    if track:
        from projects_vil.inference.tracking import Tracker  # needs optional packages
    options = {"batch_size": batch_size, "column": column, "part_size": part_size or PART_SIZE}
    if ray:
        from projects_vil.inference.on_ray import predict_on_ray

        options |= {"num_workers": ray_workers, "workers_per_gpu": workers_per_gpu or 1}
        return predict_on_ray(model, source, output, tta=tta, overrides=overrides, **options)
    # The input is checked before the model is loaded.
    images, is_parquet = None, file_format == "parquet"
    if not is_parquet:
        for path in [source] if is_single else source:
            _check_paths(Path(path), output, annotations and Path(annotations))
    if annotations and not is_single:
        raise ConfigError("--annotations needs the folder of its images, but there are several inputs.")
    if save_labels:
        check_output(output / DATASET_FOLDER, save_labels)
        if not (is_single and (source.lower().endswith(IMAGE_SUFFIXES) or number_of_images(source, exclude=output))):
            raise ConfigError("--save-labels needs one image, or one folder of images without tar files.")
    if shard is not None and not 0 <= shard[0] < shard[1]:
        raise ConfigError(f"Shard {shard[0]}/{shard[1]} does not exist. Count shards from 0, up to {shard[1] - 1}.")
    if is_parquet:
        paths = list_paths(source, exclude=output, column=column)
        paths = itertools.chain(list(itertools.islice(paths, 1)), paths)
    elif not (annotations or (is_single and is_video(source))):
        images = find_images(source, exclude=output, column=column)
    detector = model if isinstance(model, Detector) else Detector.load(model, tta=tta, overrides=overrides)
    if is_parquet:
        from projects_vil.inference.parquet_writer import write_parts

        return write_parts(detector, paths, output, source=source, shard=shard, **options)
    model = getattr(detector.runner, "model", None)
    if batch_size > 1 and isinstance(model, ExportedModel) and not model.batched:
        logging.getLogger(__name__).warning("batch_size is %d, but '%s' takes one image.", batch_size, model.path)
    if annotations is not None:
        images, categories = _annotated_images(detector, Path(source), Path(annotations))
        detector = Detector(detector.runner, categories=categories)
    if images is None:
        opened = Video(source)
        writer = _video_writer(output / DRAWINGS_FOLDER, opened)
    else:
        opened = ImageBatches(images, keep_pixels=drawings)
        opened.total = opened.total or number_of_images(source, exclude=output)
        root = Path(source if is_single else "")
        writer = contextlib.nullcontext(functools.partial(_write_drawing, output / DRAWINGS_FOLDER, root))
    threshold = SCORE_THRESHOLD if score_threshold is None else score_threshold
    tracker = Tracker(frame_rate=opened.frame_rate, threshold=threshold) if track else None
    labels: list[tuple[dict, list[dict]]] | None = [] if save_labels else None
    options = {"batch_size": batch_size, "threshold": threshold, "tracker": tracker, "labels": labels}
    summary = _write_coco(detector, opened, output, writer=writer if drawings else None, **options)
    if labels:
        root = source if os.path.isdir(source) else os.path.dirname(source)
        lines = write_detections(labels, detector.categories.to_coco(), root, output / DATASET_FOLDER, save_labels)
        summary = dataclasses.replace(summary, lines=(*summary.lines, *lines))
    return summary


def _write_coco(
    detector: Detector,
    source: ImageBatches | Video,
    output: Path,
    *,
    batch_size: int,
    threshold: float,
    writer: contextlib.AbstractContextManager | None,
    tracker: "Tracker | None",
    labels: list[tuple[dict, list[dict]]] | None,
) -> Summary:
    """Run the detector on a source and stream the results to the COCO files.

    Args:
        detector: The detector.
        source: The opened input.
        output: The output directory.
        batch_size: Maximum number of images in a batch.
        threshold: Lowest score in drawings and labels.
        writer: Context of a function that writes a drawing; None for no drawings.
        tracker: The tracker of a video or a folder; None without tracks.
        labels: Gets the entry of each image and its results above the threshold.
    """
    num_images = num_detections = num_drawn = 0
    highest_score, skipped, tracks = 0.0, [], set()
    if source.is_stream:
        logging.getLogger(__name__).info("Reading %s. Press Ctrl-C to stop and to write the results.", source.name)
    with (
        atomic_write(output / RESULTS_FILE) as results_path,
        atomic_write(output / IMAGES_FILE) as images_path,
        open(results_path, "w") as results_file,
        open(images_path, "w") as images_file,
        stop_requests(single_process=True) if source.is_stream else contextlib.nullcontext([]) as received,
        progress_bar(source.unit, total=source.total) as progress,
        writer or contextlib.nullcontext() as write_drawing,
    ):

        def convert(item: Loaded | Skipped, detections: Detections | None) -> tuple[dict | None, list[dict]]:
            nonlocal num_drawn, highest_score
            if detections is None:
                skipped.append(item)
                report_skipped(item)
                return None, []
            if tracker is not None:
                detections = tracker.update(item, detections)
                tracks.update(detections.track_ids[detections.track_ids >= 0].tolist())
            if write_drawing is not None:
                drawn = detections.draw(score_threshold=threshold, longer_side=MIN_DRAWING_SIDE)
                write_drawing(item.entry, drawn)
                num_drawn += int((detections.scores >= threshold).sum())
            highest_score = max([highest_score, *detections.scores[:1].tolist()])
            return item.entry, detections.to_coco(item.entry["id"])

        results_file.write("[")
        # check_replaceable reads only the beginning of a file.
        images_file.write(json.dumps({"info": {"description": GENERATOR}})[:-1] + ', "images": [')
        with contextlib.closing(detector.detect(source, convert, batch_size=batch_size)) as converted:
            for entry, results in converted:
                for result in results:
                    results_file.write(", " * (num_detections > 0) + json.dumps(result))
                    num_detections += 1
                if entry is not None:
                    images_file.write(", " * (num_images > 0) + json.dumps(entry))
                    num_images += 1
                    if labels is not None:
                        labels.append((entry, [result for result in results if result["score"] >= threshold]))
                progress.update()
                if received:
                    break
        results_file.write("]")
        if skipped and not num_images:
            # The files of an earlier prediction are kept.
            first = f"'{skipped[0].name}' ({skipped[0].reason})"
            raise ConfigError(f"No input can be read: {counted(len(skipped), 'file')}, such as {first}. Check them.")
        skipped.sort(key=lambda item: item.index)
        reasons = [{"file_name": item.name, "reason": item.reason} for item in skipped]
        tail = {"categories": detector.categories.to_coco(), "skipped": reasons}
        images_file.write("], " + json.dumps(tail)[1:])
    total = counted(num_detections, "detection")
    lines = [f"{counted(num_images, source.unit)}, {total}" + f", {counted(len(tracks), 'track')}" * bool(tracker)]
    if writer is not None and num_detections:
        highest = "" if num_drawn else f"; the highest score is {highest_score:.3g}"
        lines.append(f"{num_drawn:,} of {total} drawn (score >= {threshold:g}){highest}")
    written = [output / RESULTS_FILE, output / IMAGES_FILE]
    written += [output / DRAWINGS_FOLDER] * (writer is not None and num_images > 0)
    lines.append(f"wrote {', '.join(map(str, written))}")
    number = counted(len(skipped), "file")
    lines += [f"skipped {number} that could not be read, such as '{item.name}'" for item in skipped[:1]]
    return Summary(num_images, num_detections, len(skipped), tuple(lines))


def report_skipped(item: Skipped) -> None:
    """Print a skipped image above the progress bar."""
    tqdm.write(printable(f"skipped {item.name}: {item.reason}"), file=sys.stderr)


def progress_bar(unit: str, *, total: int = 0) -> tqdm:
    """Return a progress bar, which prints a line every 30 seconds if stderr is not a terminal."""
    interval = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
    return tqdm(total=total or None, unit=f" {unit}s", dynamic_ncols=True, mininterval=interval)


def _check_paths(source: Path, output: Path, annotations: Path | None) -> None:
    real = source.resolve()
    if real == output.resolve() or (output / DRAWINGS_FOLDER).resolve() in (real, *real.parents):
        raise ConfigError(f"Output '{output}' would overwrite the input '{source}'. Choose another output directory.")
    check_replaceable(output / IMAGES_FILE, advice="Choose another output directory.")
    if (output / RESULTS_FILE).exists() and not (output / IMAGES_FILE).exists():
        raise ConfigError(f"'{output / RESULTS_FILE}' was not written by vil. Choose another output directory.")
    if annotations is not None:
        check_file(annotations, "COCO file", key="annotations")
        if not source.is_dir():
            raise ConfigError(f"--annotations needs the folder of its images, but the input is '{source}'.")
        if annotations.resolve() in [(output / name).resolve() for name in (RESULTS_FILE, IMAGES_FILE)]:
            raise ConfigError(f"The results would overwrite the annotations '{annotations}'. Choose another output.")


# Annotations ---------------------------------------------------------------------------------------------------------


def _annotated_images(detector: Detector, folder: Path, annotations: Path) -> tuple[list[ImageSource], Categories]:
    """Return the images of a COCO file, and the classes of the detector with the ids and names of the file.

    Classes are matched by name, or else by index.

    Raises:
        ConfigError: If an image or category lacks a key or has a repeated id, if the number of classes differs, or if
            only some of the names match in another order.
    """
    content = read_coco(annotations)
    for name, keys in {"images": ("id", "file_name", "height", "width"), "categories": ("id", "name")}.items():
        entries = content[name]
        for key in keys:
            if any(not isinstance(entry, dict) or entry.get(key) is None for entry in entries):
                raise ConfigError(f"'{annotations}' has {name} without {key!r}. Correct the file; see 'vil check'.")
        if len({entry["id"] for entry in entries}) < len(entries):
            raise ConfigError(f"'{annotations}' has {name} with the same id. Correct the file; see 'vil check'.")
    images = [
        ImageSource(folder / image["file_name"], image["file_name"], image["id"], (image["height"], image["width"]))
        for image in content["images"]
    ]
    ids, names = zip(*sorted((category["id"], category["name"]) for category in content["categories"]), strict=True)
    differ = f"the model has {describe_classes(detector.names)}, and the annotations have {describe_classes(names)}"
    order = match_all_classes(detector.names, names, differ=differ)
    return images, Categories(tuple(ids[index] for index in order), tuple(names[index] for index in order))


# Drawings ------------------------------------------------------------------------------------------------------------


def _write_drawing(folder: Path, source: Path, entry: dict, drawn: np.ndarray) -> None:
    """Write a drawing. JPEG and PNG files keep their names; ``.png`` is appended to others."""
    # The path in a list may lead out of the folder.
    name = "/".join(part for part in entry["file_name"].split("/") if part not in ("", ".", ".."))
    if not name.lower().endswith((".jpg", ".jpeg", ".png")):
        name += ".png"
        while (source / name).exists():
            name += ".png"
    from projects_vil.visualization.drawing import write_image

    write_image(folder / name, drawn)


@contextlib.contextmanager
def _video_writer(folder: Path, video: Video) -> Iterator[Callable[[dict, np.ndarray], None]]:
    """Yield a function that adds a drawing to a video."""
    name, codec = f"{Path(video.name).stem}.mp4", cv2.VideoWriter_fourcc(*VIDEO_CODEC)
    writer, size = cv2.VideoWriter(), None
    with atomic_folder(folder) as unfinished:

        def write(entry: dict, drawn: np.ndarray) -> None:
            nonlocal size
            # OpenCV drops frames of another size than the first. Encoders need even sides.
            size = size or (drawn.shape[1] // 2 * 2, drawn.shape[0] // 2 * 2)
            if not writer.isOpened() and not writer.open(str(unfinished / name), codec, video.frame_rate, size):
                raise ConfigError(f"OpenCV cannot encode {VIDEO_CODEC} for '{folder / name}'. Use --no-drawings.")
            writer.write(np.ascontiguousarray(cv2.resize(drawn, size)[..., ::-1]))

        try:
            yield write
        finally:
            writer.release()
        if (unfinished / name).exists():
            (unfinished / name).replace(folder / name)
