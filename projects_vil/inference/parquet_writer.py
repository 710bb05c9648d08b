"""Write detections to Parquet part files, with one row per image, and resume after the last complete part."""

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from backbones.errors import counted
from projects_vil.checkpoint import Categories, fingerprint
from projects_vil.export import digest_of
from projects_vil.inference.detector import Detections, Detector
from projects_vil.inference.image_loading import (
    ImageBatches,
    ImageSource,
    Loaded,
    Runner,
    Skipped,
    os_errors,
    without_password,
)
from projects_vil.inference.predict import Summary, progress_bar, report_skipped

with os_errors("Parquet files"):
    import pyarrow as pa
    from pyarrow import parquet

# Boxes are left, top, right, bottom in pixels of the upright image. Scores descend. Masks are the counts of COCO's
# compressed RLE of size (height, width), or null for a detector without masks. A row with an error has no detections.
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


def to_row(item: Loaded | Skipped, detections: Detections | None) -> dict[str, Any]:
    """Return the row of an image with the columns of ``SCHEMA``."""
    if detections is None:
        empty = dict.fromkeys(SCHEMA.names) | {"boxes": [], "scores": [], "category_ids": []}
        return empty | {"file_name": item.name, "error": item.reason}
    ids, rles = detections.categories.ids, detections.rles
    return {
        **{name: item.entry[name] for name in ("file_name", "height", "width")},
        "boxes": detections.boxes.tolist(),
        "scores": detections.scores.tolist(),
        "category_ids": [ids[index] for index in detections.classes.tolist()],
        "masks": None if rles is None else [rle["counts"] for rle in rles],
        "error": None,
    }


def to_table(rows: Sequence[dict[str, Any]], categories: Categories) -> pa.Table:
    """Return rows as a table of ``SCHEMA``. Its metadata has the ``categories`` in COCO's format, as JSON."""
    listed = [{"id": number, "name": name} for number, name in zip(categories.ids, categories.names, strict=True)]
    return pa.Table.from_pylist(rows, SCHEMA.with_metadata({"categories": json.dumps(listed)}))


def describe_runner(runner: Runner) -> dict[str, str]:
    """Return everything about a runner that changes its detections: a fingerprint of the model, and options."""
    model = fingerprint(runner.cfg, runner.detector) if hasattr(runner, "cfg") else digest_of(runner.weights)
    return {"model": model} | {name: str(getattr(runner, name, None)) for name in ("dtype", "tta", "score_threshold")}


def check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a :class:`ConfigError` that lists what changed since a file of the output was written."""
    pairs = [(name, before[name], value) for name, value in now.items() if before[name] != value]
    if changed := "; ".join(f"{name} was {old}, and now it is {new}" for name, old, new in pairs):
        raise ConfigError(f"Cannot resume from '{path}': {changed}. Choose another output directory.")


def write_parts(
    detector: Detector,
    images: Iterator[ImageSource],
    output: Path,
    *,
    source: str,
    part_size: int,
    batch_size: int = 1,
    column: str | None = None,
    shard: tuple[int, int] | None = None,
) -> Summary:
    """Run a detector on any number of images, and write Parquet files with ``part_size`` rows of ``SCHEMA``.

    The output directory gets the part files ``part-000000.parquet`` and so on, and ``manifest.jsonl``. The first line
    of the manifest describes the model and the input, and each other line the name and the SHA-256 of a part file. With
    a shard, the names of these files begin with ``shard-0003-of-0016-``. Part files are written atomically. Complete
    part files are not written again, and the result is identical to an uninterrupted run, byte for byte, with the same
    batch size and on the same machine. Memory use does not depend on the number of images.

    Args:
        detector: the detector.
        images: the images of ``source``, as :func:`~projects_vil.inference.image_listing.find_images` lists them.
        output: the output directory, for one model and one input.
        source, column, shard: the arguments with which the images were listed.
        part_size: number of rows in a part file.
        batch_size: maximum number of images in a batch.

    Returns:
        The totals over all part files of this job.

    Raises:
        ConfigError: if the output is of another model, input, ``part_size`` or number of shards, or if the images of a
            part have changed.
    """
    description = describe_runner(detector.runner) | {
        "input": without_password(source) if "://" in source else os.path.realpath(source),
        "column": column,
        "part_size": part_size,
        "number of shards": shard and shard[1],
    }
    prefix = "" if shard is None else f"shard-{shard[0]:04}-of-{shard[1]:04}-"
    manifest = output / f"{prefix}manifest.jsonl"
    parts = _read_manifest(manifest, description)
    if parts:
        logging.getLogger(__name__).info("Resuming in %s: complete parts of %d are kept.", output, len(parts))
    output.mkdir(parents=True, exist_ok=True)
    _write_manifest(manifest, [description, *parts])
    with progress_bar("image") as progress:

        def convert(item: Loaded | Skipped, detections: Detections | None) -> dict[str, Any]:
            progress.update()
            if detections is None:
                report_skipped(item)
            return to_row(item, detections)

        for number in itertools.count():
            path, before = output / f"{prefix}part-{number:06}.parquet", (parts[number:] or [None])[0]
            part_images, rows = itertools.islice(images, part_size), []
            if before and path.is_file() and digest_of(path) == before["sha256"]:
                names = [image.name for image in part_images]
            else:
                # No batch contains images of two parts, so that a part is the same after a resume.
                rows = list(detector.detect(ImageBatches(part_images), convert, batch_size=batch_size))
                names = [row["file_name"] for row in rows]
            part = {"file": path.name, "images": len(names), "ends": names[:1] + names[-1:]}
            part["names_sha256"] = hashlib.sha256("\n".join(names).encode()).hexdigest()
            if before and any(before.get(name) != part[name] for name in part):
                old, new = (f"{one['images']} images, {' to '.join(one['ends'])}" for one in (before, part))
                raise ConfigError(
                    f"The input has changed since '{path}' was written, from {old} to {new}. Use the same input, or "
                    "choose another output directory."
                )
            if not names:
                break
            if rows:
                with atomic_write(path) as partial:
                    parquet.write_table(to_table(rows, detector.categories), partial)
                part["errors"] = sum(row["error"] is not None for row in rows)
                part["detections"] = sum(len(row["scores"]) for row in rows)
                part["sha256"] = digest_of(path)
                parts[number : number + 1] = [part]
                if before is None:
                    _append(manifest, part)
                elif part != before:
                    _write_manifest(manifest, [description, *parts])
    totals = (sum(part[name] for part in parts) for name in ("images", "errors", "detections"))
    return summarize_parts(output, *totals, len(parts))


def summarize_parts(output: Path, images: int, errors: int, detections: int, parts: int) -> Summary:
    """Return the summary of Parquet files: numbers of images, of images with an error, of detections and of files."""
    units = {"image": images, "error": errors, "detection": detections, "part": parts}
    line = f"{output}: {', '.join(counted(number, unit) for unit, number in units.items())}"
    return Summary(images - errors, detections, errors, (line,))


def _read_manifest(manifest: Path, description: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a manifest. Raise a :class:`ConfigError` if the output directory has other parts."""
    # The manifests of other shards must agree. Parquet files without a manifest belong to something else.
    files = (manifest, *manifest.parent.glob("*manifest.jsonl"), *manifest.parent.glob("*.parquet"))
    path = next((path for path in files if path.exists()), None)
    if path is None:
        return []
    try:
        text = path.read_text("utf-8")
        # The last line may be incomplete if the process was killed.
        before, *parts = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
        check_same(path, before, description)
        # Two jobs that write the same shard both append lines.
        return list({part["file"]: part for part in parts}.values()) if path == manifest else []
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"Output has '{path}', but no valid manifest. Choose another output directory.") from error


def _write_manifest(manifest: Path, lines: Sequence[dict[str, Any]]) -> None:
    with atomic_write(manifest) as partial:
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _append(manifest: Path, part: dict[str, Any]) -> None:
    try:
        with open(manifest, "a") as file:
            file.write(json.dumps(part) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"Cannot write '{manifest}': {error.strerror}. Check the free space.") from error
