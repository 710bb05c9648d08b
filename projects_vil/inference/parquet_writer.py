"""Detections as Parquet: a row an image, in part files after which a killed run goes on."""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from backbones.errors import check_whole, printable
from projects_vil.checkpoint import Categories, fingerprint
from projects_vil.export import digest_of
from projects_vil.inference.detector import Detections, Detector
from projects_vil.inference.image_listing import find_images
from projects_vil.inference.image_loading import ImageBatches, Loaded, Runner, Skipped, os_errors, without_password
from projects_vil.inference.predict import progress_bar

with os_errors("Parquet files"):
    import pyarrow as pa
    from pyarrow import parquet

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


def table_of(rows: Sequence[dict[str, Any]], categories: Categories) -> pa.Table:
    """Return rows as a table of ``SCHEMA``, whose metadata has the ``categories`` as COCO's list, in JSON."""
    listed = [{"id": number, "name": name} for number, name in zip(categories.ids, categories.names, strict=True)]
    return pa.Table.from_pylist(rows, SCHEMA.with_metadata({"categories": json.dumps(listed)}))


def identity_of(runner: Runner) -> dict[str, str]:
    """Return what decides on the detections of a runner, by name."""
    model = fingerprint(runner.cfg, runner.detector) if hasattr(runner, "cfg") else digest_of(runner.weights)
    return {"model": model} | {name: str(getattr(runner, name, None)) for name in ("dtype", "tta", "score_threshold")}


def check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a :class:`ConfigError` that names all values in which a file of the output was made of something else."""
    pairs = [(name, before[name], value) for name, value in now.items() if before[name] != value]
    if changed := "; ".join(f"{name} was {was}, and now it is {value}" for name, was, value in pairs):
        raise ConfigError(f"output has {path}, whose {changed}: choose another one")


def predict_parts(
    detector: Detector,
    source: str | Path,
    output: str | Path,
    *,
    part_size: int,
    batch_size: int = 1,
    column: str | None = None,
    shard: tuple[int, int] | None = None,
) -> dict[str, int]:
    """Detect objects in any number of images, and write Parquet files of ``part_size`` rows of ``SCHEMA``.

    ``output`` gets ``part-000000.parquet`` and so on, each written as a whole, and ``manifest.jsonl``: a line with what
    they were made of, and one with the names and the SHA-256 of each. With a shard the names of these files begin with
    ``shard-0003-of-0016-``. Where some are there already, those that are whole are not made again, and all are as those
    of one run, byte for byte, if the batch size and the machine are the same. Memory does not grow with the number of
    images.

    Args:
        detector: any.
        source: what :func:`~projects_vil.inference.image_listing.find_images` takes.
        output: folder of the parts, for one model and one input.
        batch_size: maximum number of images at once.
        part_size: number of images in a part.
        column: the column of a table of paths or URLs.
        shard: (I, N) for job I, from 0, of N that share the folder.

    Returns:
        The numbers of ``images``, ``errors`` (images that could not be read), ``detections`` and ``parts`` in all
        part files of this job.

    Raises:
        ConfigError: for invalid arguments; for an output of another model, input, ``part_size`` or N; and where the
            images of a part are not those any more of which it was made.
    """
    source, output = str(source), Path(output)
    check_whole("part_size", part_size)
    images = find_images(source, exclude=output, column=column, shard=shard)
    made_of = identity_of(detector.runner) | {
        "input": without_password(source) if "://" in source else os.path.realpath(source),
        "column": column,
        "part_size": part_size,
        "number of shards": shard and shard[1],
    }
    prefix = "" if shard is None else f"shard-{shard[0]:04}-of-{shard[1]:04}-"
    manifest = output / f"{prefix}manifest.jsonl"
    parts = _read_parts(manifest, made_of)
    if parts:
        logging.getLogger(__name__).info("%s has %d parts already; whole ones are kept", output, len(parts))
    output.mkdir(parents=True, exist_ok=True)
    _write_lines(manifest, [made_of, *parts])
    with progress_bar("image") as progress:
        for number in itertools.count():
            path, before = output / f"{prefix}part-{number:06}.parquet", (parts[number:] or [None])[0]
            sources, rows = itertools.islice(images, part_size), []
            if before and path.is_file() and digest_of(path) == before["sha256"]:
                names = [source.name for source in sources]
            else:
                rows = _detect(detector, ImageBatches(sources), batch_size, progress)
                names = [row["file_name"] for row in rows]
            part = {"file": path.name, "images": len(names), "ends": names[:1] + names[-1:]}
            part["names_sha256"] = hashlib.sha256("\n".join(names).encode()).hexdigest()
            if before and any(before.get(name) != part[name] for name in part):
                was, now = (f"{one['images']} images, {' to '.join(one['ends'])}" for one in (before, part))
                raise ConfigError(f"the names of the input have changed since {path} was written: {was}; now {now}")
            if not names:
                break
            if rows:
                with atomic_write(path) as partial:
                    parquet.write_table(table_of(rows, detector.categories), partial)
                part["errors"] = sum(row["error"] is not None for row in rows)
                part["detections"] = sum(len(row["scores"]) for row in rows)
                part["sha256"] = digest_of(path)
                parts[number : number + 1] = [part]
                if before is None:
                    _append(manifest, part)
                elif part != before:
                    _write_lines(manifest, [made_of, *parts])
    totals = {name: sum(part[name] for part in parts) for name in ("images", "errors", "detections")}
    return totals | {"parts": len(parts)}


def _detect(detector: Detector, images: ImageBatches, batch_size: int, progress: tqdm) -> list[dict[str, Any]]:
    """Return the rows of a part, in the order of its images: no batch depends on what is in other parts."""
    rows = {}
    with contextlib.closing(detector.detect(images, batch_size=batch_size)) as batches:
        for item, found in itertools.chain.from_iterable(batches):
            rows[item.index] = row_of(item, found)
            progress.update()
            if isinstance(item, Skipped):
                tqdm.write(printable(f"skipped {item.name}: {item.reason}"), file=sys.stderr)
    return [rows[index] for index in sorted(rows)]


def _read_parts(manifest: Path, made_of: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts that a manifest has; an error where the folder has parts that are made of something else."""
    # Those of other shards agree with each other; Parquet files without any are none of ours.
    files = (manifest, *manifest.parent.glob("*manifest.jsonl"), *manifest.parent.glob("*.parquet"))
    path = next((path for path in files if path.exists()), None)
    if path is None:
        return []
    try:
        text = path.read_text("utf-8")
        # A killed process may have written a part of the last line.
        before, *parts = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
        check_same(path, before, made_of)
        # Two jobs that wrote the same output have a line each.
        return list({part["file"]: part for part in parts}.values()) if path == manifest else []
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"output has {path}, and no readable manifest of parts: choose another one") from error


def _write_lines(manifest: Path, contents: Sequence[dict[str, Any]]) -> None:
    with atomic_write(manifest) as partial:
        partial.write_text("".join(json.dumps(one) + "\n" for one in contents))


def _append(manifest: Path, part: dict[str, Any]) -> None:
    try:
        with open(manifest, "a") as file:
            file.write(json.dumps(part) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"{manifest} cannot be written: {error.strerror}") from error
