"""A trained detector on image files, folders of them or a video: COCO results, drawings, and what could not be read.

Images are read and resized as by the test loader, so that results equal those of ``tools/train_net.py --eval-only``.
A batch holds only images that are of one size when they are resized: detectron2 would pad others to a common size, and
what a network sees beyond an image's border changes its answers. So every batch size gives the same answers, up to
the rounding of floating-point sums. Files are read in threads while the detector works, a few batches ahead.
Results carry the category ids of the checkpoint or the exported file; with an annotation file, that file's.
"""

import contextlib
import dataclasses
import json
import logging
import os
from pathlib import Path

from detectron2.config import CfgNode

from backbones import InputError
from projects_vil.checkpoint import dataset_categories
from projects_vil.config import number_of_classes
from projects_vil.data import load_dataset, register_datasets
from projects_vil.inference.categories import categories_as_annotated
from projects_vil.inference.detector import Detector
from projects_vil.inference.drawings import ImageDrawings, VideoDrawings
from projects_vil.inference.runners import ExportedRunner, check_runner, config_of_export
from projects_vil.inference.sources import VIDEO_SUFFIXES, ImageFile, Images, Skipped, Video, find_images
from projects_vil.inference.writers import JsonList, Progress, written_whole
from projects_vil.utils import check_output_folder

RESULTS_FILE, IMAGES_FILE, DRAWINGS_FOLDER = "results.json", "images.json", "drawings"
SMALLEST_DRAWING = 480  # pixels of the longer side


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
    cfg: CfgNode | None,
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
        cfg: the detector's config; None for an exported file, which needs none.
        weights: its checkpoint, or an exported file.
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
    cfg = config_of_export(weights) if cfg is None else cfg
    check_runner(cfg, weights, tta=tta)
    files: Images | Video
    if annotations is not None:
        _check_not_overwritten(Path(annotations), output)
        cfg, images = _annotated_images(cfg, source, Path(annotations))
    else:
        register_datasets(cfg)
        images = find_images(source, leave_out=output)
    if source.is_file() and source.suffix.lower() in VIDEO_SUFFIXES:
        files = Video(source)
    else:
        files = Images(images, threads=max(cfg.DATALOADER.NUM_WORKERS, 1))
    detector = Detector.build(cfg, weights, tta=tta)
    if batch_size > 1 and isinstance(detector.runner, ExportedRunner) and not detector.runner.model.batched:
        logging.getLogger(__name__).warning(
            "--batch-size %d has no effect: %s takes one image at a time", batch_size, weights
        )
    if annotations is not None:
        annotated = dataset_categories(cfg.DATASETS.TEST, number_of_classes(cfg)[1])
        detector = Detector(detector.runner, categories=categories_as_annotated(detector.categories, annotated))
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output}: it cannot be made ({error.strerror})") from error
    drawer = None
    if drawings and isinstance(files, Video):
        drawer = VideoDrawings(output / DRAWINGS_FOLDER, source.name, files.frame_rate)
    elif drawings:
        drawer = ImageDrawings(output / DRAWINGS_FOLDER, [file.name for file in images])
    return run(files, detector, output, drawer, batch_size=batch_size, score_threshold=score_threshold)


def run(
    files: Images | Video,
    detector: Detector,
    output: Path,
    drawer: ImageDrawings | VideoDrawings | None,
    *,
    batch_size: int = 1,
    score_threshold: float = 0.5,
) -> Summary:
    """Detect in all files and write what :func:`predict` promises.

    Args:
        files: what is read.
        detector: what detects.
        output: a folder that is there.
        drawer: takes the drawings; None where there are none.
        batch_size: images at once, at most.
        score_threshold: for drawings.

    Raises:
        InputError: where a drawing cannot be written.
    """
    entries: dict[int, dict] = {}
    skipped: list[Skipped] = []
    drawn = {"score_threshold": score_threshold, "longer_side": SMALLEST_DRAWING}
    with written_whole(output / RESULTS_FILE, output / IMAGES_FILE) as (file, images_file):
        with (
            contextlib.closing(Progress(len(files), files.unit)) as progress,
            drawer or contextlib.nullcontext(),
            contextlib.closing(
                detector.detect(files, batch_size=batch_size, keep_pixels=drawer is not None)
            ) as batches,
        ):
            results = JsonList(file)
            for batch in batches:
                for item, detections in batch:
                    if isinstance(item, Skipped):
                        skipped.append(item)
                        results.put(item.index, [])
                        progress.say(f"skipped {item.name}: {item.reason}")
                        continue
                    if drawer is not None:
                        drawer.add(item.entry, detections.draw(**drawn))
                    entries[item.index] = item.entry
                    results.put(item.index, detections.to_coco(item.entry["id"]))
                progress.add(len(batch))
            results.close()
        skipped.sort(key=lambda item: item.index)
        content = {
            "images": [entries[index] for index in sorted(entries)],
            "categories": [
                {"id": category_id, "name": name}
                for category_id, name in zip(detector.categories.ids, detector.names, strict=True)
            ],
            "skipped": [{"file_name": item.name, "reason": item.reason} for item in skipped],
        }
        json.dump(content, images_file)
        images_file.write("\n")
    written = [output / RESULTS_FILE, output / IMAGES_FILE]
    if drawer is not None and entries:
        written.append(output / DRAWINGS_FOLDER)
    return Summary(files.unit, len(entries), results.length, tuple(skipped), tuple(written))


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
    check_output_folder(output)
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
