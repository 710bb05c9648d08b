"""Detections as Parquet: a row an image, in part files after which a killed run goes on."""

import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from backbones.errors import check_whole
from projects_vil.checkpoint import Categories
from projects_vil.export import digest_of
from projects_vil.inference.detector import Detections, Detector
from projects_vil.inference.inputs import find_images, is_stream
from projects_vil.inference.predict import progress_bar
from projects_vil.inference.sources import (
    LOOKAHEAD_IMAGES,
    VIDEO_SUFFIXES,
    ImageBatches,
    ImageSource,
    Loaded,
    Skipped,
    without_password,
)

try:
    import pyarrow as pa
    from pyarrow import parquet
except ImportError as missing:
    raise ConfigError("Parquet needs pyarrow: pip install 'vil-detectron2[scale]'") from missing

PART_SIZE = 1024
# Boxes are left, top, right, bottom in pixels of the upright image, scores descend, and masks are the counts of COCO's
# compressed RLE of size (height, width), null for a detector without masks. A row with an error has no objects.
SCHEMA = pa.schema(
    {
        "file_name": pa.string(),
        "height": pa.int32(),
        "width": pa.int32(),
        "boxes": pa.list_(pa.list_(pa.float32(), 4)),
        "scores": pa.list_(pa.float32()),
        "category_ids": pa.list_(pa.int32()),
        "masks": pa.list_(pa.binary()),
        "error": pa.string(),
    }
)


def row_of(item: Loaded | Skipped, detections: Detections | None) -> dict[str, Any]:
    """Return the row of one image, with the columns of ``SCHEMA``, from a pair that ``Detector.detect`` yields."""
    if isinstance(item, Skipped):
        row = dict.fromkeys(SCHEMA.names) | {"boxes": [], "scores": [], "category_ids": []}
        return row | {"file_name": text_of(item.name), "error": item.reason}
    has_masks = detections.instances.has("pred_masks")
    return {
        "file_name": text_of(item.entry["file_name"]),
        "height": item.entry["height"],
        "width": item.entry["width"],
        "boxes": detections.boxes.tolist(),
        "scores": detections.scores.tolist(),
        "category_ids": [detections.categories.ids[index] for index in detections.classes.tolist()],
        "masks": [one["segmentation"]["counts"].encode() for one in detections.to_coco(0)] if has_masks else None,
        "error": None,
    }


def table_of(rows: Sequence[dict[str, Any]], categories: Categories) -> pa.Table:
    """Return rows as a table of ``SCHEMA``, whose metadata has the ``categories`` as COCO's list, in JSON."""
    listed = [{"id": number, "name": name} for number, name in zip(categories.ids, categories.names, strict=True)]
    return pa.Table.from_pylist(rows, SCHEMA.with_metadata({"categories": json.dumps(listed)}))


@dataclasses.dataclass(frozen=True)
class PartsSummary:
    """The outcome of :func:`predict_parts`.

    Attributes:
        output: the folder.
        parts: what its manifest says about each part.
        made: how many of these were made now, and not before.
    """

    output: Path
    parts: list[dict[str, Any]]
    made: int

    @property
    def skipped(self) -> int:
        """The number of images that could not be read."""
        return sum(part["errors"] for part in self.parts)

    def lines(self) -> list[str]:
        images, detections = (sum(part[name] for part in self.parts) for name in ("images", "detections"))
        lines = [f"{images - self.skipped} images, {detections} detections"]
        lines.append(f"{len(self.parts)} part files in {self.output}, {self.made} of them written now")
        return lines + [f"{self.skipped} files could not be read: their rows have an error"] * bool(self.skipped)


def predict_parts(
    detector: Detector,
    source: str | Path,
    output: str | Path,
    *,
    batch_size: int = 1,
    part_size: int = PART_SIZE,
    column: str | None = None,
    shard: tuple[int, int] | None = None,
) -> PartsSummary:
    """Detect objects in any number of images, and write Parquet files of ``part_size`` rows of ``SCHEMA``.

    ``output`` gets ``part-000000.parquet`` and so on, and ``manifest.json`` with what they were made of and their
    SHA-256; with a shard their names begin with ``shard-0003-of-0016-``. Each is written as a whole. Where some are
    there already, those that are whole are not made again, and all are as those of one run, byte for byte, if the
    batch size and the machine are the same. Memory does not grow with the number of images.

    Args:
        detector: any.
        source: what :func:`~projects_vil.inference.inputs.find_images` takes.
        output: folder of the parts, for one model and one input.
        batch_size: maximum number of images at once.
        part_size: number of images in a part. Batches are formed within the largest divisor of it up to 512.
        column: the column of a table of paths or URLs.
        shard: (i, N) for the i-th of N jobs, from 0, which share a folder.

    Raises:
        ConfigError: for invalid arguments, and for an output of another model, input, ``part_size`` or N.
    """
    source, output = str(source), Path(output)
    check_whole("batch_size", batch_size)
    check_whole("part_size", part_size)
    if is_stream(source) or source.lower().endswith(VIDEO_SUFFIXES):
        raise ConfigError(f"source {source}: Parquet is for images, not for videos")
    if shard is not None and not 0 <= shard[0] < shard[1]:
        raise ConfigError(f"shard {shard[0]}/{shard[1]}: shards of N are 0/N to {shard[1] - 1}/N")
    images = find_images(source, exclude=output, column=column, shard=shard)
    made_of = {
        "model": detector.runner.digest(),
        "input": without_password(source) if "://" in source else str(Path(source).resolve()),
        "column": column,
        "part_size": part_size,
        "shards": shard and shard[1],
    }
    parts = _Parts(output, "" if shard is None else f"shard-{shard[0]:04}-of-{shard[1]:04}-", made_of)
    window = next(size for size in range(min(part_size, LOOKAHEAD_IMAGES), 0, -1) if part_size % size == 0)
    batches = detector.detect(ImageBatches(parts.missing(images), window=window), batch_size=batch_size)
    rows: dict[int, dict[str, Any]] = {}
    numbers = (number for number in itertools.count() if number not in parts.whole)
    with contextlib.closing(batches), progress_bar("image") as progress:
        for batch in batches:
            for item, found in batch:
                rows[item.index] = row_of(item, found)
                if isinstance(item, Skipped):
                    tqdm.write(f"skipped {item.name}: {item.reason}", file=sys.stderr)
            progress.update(len(batch))
            # A batch is of one window, and a window of one part.
            if len(rows) == part_size:
                parts.write(next(numbers), [rows[index] for index in sorted(rows)], detector.categories)
                rows.clear()
    if rows:
        parts.write(next(numbers), [rows[index] for index in sorted(rows)], detector.categories)
    return PartsSummary(output, parts.listed, len(parts.listed) - len(parts.whole))


class _Parts:
    """The part files of one job, and their manifest.

    Args:
        folder: where they are; made if it is missing.
        prefix: the beginning of their names.
        made_of: what all parts in the folder have in common.

    Attributes:
        listed: an entry for each part, in their order.
        whole: the numbers of those that are there as they were written.
    """

    def __init__(self, folder: Path, prefix: str, made_of: dict[str, Any]) -> None:
        self.folder, self.prefix, self.made_of = folder, prefix, made_of
        self.manifest = folder / f"{prefix}manifest.json"
        others = itertools.chain([self.manifest], folder.glob("*manifest.json"))
        # All others are as any of them.
        path = next((path for path in others if path.exists()), None)
        if path is None and any(folder.glob("*.parquet")):
            raise ConfigError(f"output {folder} has Parquet files and no manifest.json: choose another folder")
        contents = {"made_of": made_of, "parts": []}
        if path is not None:
            try:
                contents = json.loads(path.read_bytes())
                before = contents["made_of"]
                differ = [name for name in made_of if before[name] != made_of[name]]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path} is damaged: choose another output, or delete the parts with it") from error
            if differ:
                values = f"{before[differ[0]]}, and now it is {made_of[differ[0]]}"
                raise ConfigError(f"output {folder} has parts whose {differ[0]} was {values}: choose another folder")
        self.listed = contents["parts"] if path == self.manifest else []
        self.whole = {number for number, part in enumerate(self.listed) if self._is_whole(part)}
        folder.mkdir(parents=True, exist_ok=True)
        self._write_manifest()

    def missing(self, images: Iterable[ImageSource]) -> Iterator[ImageSource]:
        """Yield the images of the parts that are not whole; raises ConfigError where others have changed."""
        images = iter(images)
        for number in itertools.count():
            count, first, last = 0, None, None
            for image in itertools.islice(images, self.made_of["part_size"]):
                count, last = count + 1, text_of(image.name)
                first = last if first is None else first
                if number not in self.whole:
                    yield image
            if count or number < len(self.listed):
                self._check(number, count, first, last)
            if count < self.made_of["part_size"] and number >= len(self.listed) - 1:
                return

    def write(self, number: int, rows: Sequence[dict[str, Any]], categories: Categories) -> None:
        """Write a part, and then the manifest."""
        part = {
            "file": f"{self.prefix}part-{number:06}.parquet",
            "images": len(rows),
            "errors": sum(row["error"] is not None for row in rows),
            "detections": sum(len(row["scores"]) for row in rows),
            "first": rows[0]["file_name"],
            "last": rows[-1]["file_name"],
        }
        self._check(number, part["images"], part["first"], part["last"])
        path = self.folder / part["file"]
        with atomic_write(path) as partial:
            parquet.write_table(table_of(rows, categories), partial)
        self.listed[number : number + 1] = [part | {"sha256": digest_of(path)}]
        self._write_manifest()

    def _is_whole(self, part: dict[str, Any]) -> bool:
        path = self.folder / part["file"]
        return path.is_file() and digest_of(path) == part["sha256"]

    def _check(self, number: int, images: int, first: str | None, last: str | None) -> None:
        if number >= len(self.listed):
            return
        before = self.listed[number]
        if (before["images"], before["first"], before["last"]) != (images, first, last):
            was = f"{before['images']} images, {before['first']} to {before['last']}"
            now = f"{images} images, {first} to {last}" if images else "none"
            changed = f"the input has changed since {before['file']} was written: {was} then, and now {now}"
            raise ConfigError(f"output {self.folder}: {changed}; choose another folder")

    def _write_manifest(self) -> None:
        with atomic_write(self.manifest) as partial:
            partial.write_text(json.dumps({"made_of": self.made_of, "parts": self.listed}, indent=1) + "\n")


def text_of(name: str) -> str:
    """Return a file's name with what is not UTF-8 as ``\\udc80`` and the like, since Parquet's strings are UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()
