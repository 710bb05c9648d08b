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
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances

from backbones import InputError
from projects_vil.data import load_dataset, register_datasets
from projects_vil.inference.categories import Categories, find_categories
from projects_vil.inference.drawings import ImageDrawings, VideoDrawings, draw
from projects_vil.inference.runners import Runner, build_runner, check_runner
from projects_vil.inference.sources import (
    VIDEO_SUFFIXES,
    ImageFile,
    ImageFiles,
    Loaded,
    Skipped,
    Video,
    find_images,
    read_ahead,
)
from projects_vil.inference.writers import JsonList, Progress, written_whole

RESULTS_FILE, IMAGES_FILE, DRAWINGS_FOLDER = "results.json", "images.json", "drawings"


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
