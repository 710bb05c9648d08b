"""Write detections to Parquet part files, with one row per image, and resume after the last complete part."""

import dataclasses
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from backbones import ConfigError
from backbones.errors import counted, first_of
from backbones.files import atomic_write
from projects_vil.checkpoint import fingerprint
from projects_vil.data import Categories
from projects_vil.files import content_hash
from projects_vil.inference import image_loading
from projects_vil.inference.detector import Detections, Detector
from projects_vil.inference.image_listing import Listed, archives_of_shard, common_folder, load_listed, split_listed
from projects_vil.inference.predict import Summary, progress_bar, report_skipped
from projects_vil.inference.runners import Runner

with image_loading.os_errors("Parquet files"):
    import pyarrow as pa
    from pyarrow import compute, parquet

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


def to_row(item: image_loading.Loaded | image_loading.Skipped, detections: Detections | None) -> dict[str, Any]:
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


def schema_of(categories: Categories, made_of: Mapping[str, Any]) -> pa.Schema:
    """Return ``SCHEMA`` with the classes in COCO's format, and what the rows were made of, as JSON in its metadata."""
    return SCHEMA.with_metadata({"categories": json.dumps(categories.to_coco()), "made_of": json.dumps(made_of)})


def describe_runner(runner: Runner) -> dict[str, str]:
    """Return everything about a runner that changes its detections: a fingerprint of the model, and options."""
    model = fingerprint(runner.cfg, runner.detector) if hasattr(runner, "cfg") else content_hash(runner.weights)
    return {"model": model} | {name: str(getattr(runner, name, None)) for name in ("dtype", "tta", "score_threshold")}


def read_part(path: Path, made_of: Mapping[str, Any], *, columns: Sequence[str] | None = None) -> pa.Table | None:
    """Return the rows of a file in the output directory, or None if the file is missing or damaged.

    Args:
        path: The file.
        made_of: What the rows must be made of, see :func:`schema_of`.
        columns: The columns to read and verify; by default all.

    Raises:
        ConfigError: If the file was made of something else, or has other columns. The message lists the differences.
        OSError: If the file cannot be read.
    """
    try:
        table = parquet.read_table(path, columns=columns, page_checksum_verification=True)
        before = dict(json.loads((table.schema.metadata or {}).get(b"made_of", "{}")))
    except (OSError, TypeError, ValueError, pa.ArrowException) as error:
        # For damaged content, such as a wrong checksum, pyarrow raises an OSError without errno.
        if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) is None:
            return None
        raise
    names = [name for name in {**before, **made_of} if before.get(name) != made_of.get(name)]
    if names:
        changed = "; ".join(f"{name} was {before.get(name)}, and now it is {made_of.get(name)}" for name in names)
        raise ConfigError(f"Cannot resume from '{path}': {changed}. Choose another output directory.")
    if columns is None and not table.schema.equals(SCHEMA):
        raise ConfigError(f"Cannot resume from '{path}': it has other columns. Choose another output directory.")
    return table


def failed_rows(table: pa.Table) -> list[int]:
    """Return the positions of the rows whose URL failed for a reason that may be temporary."""
    errors = [error or "" for error in table["error"].to_pylist()]
    return [row for row, error in enumerate(errors) if error.startswith(image_loading.TEMPORARY_ERROR)]


def write_part(path: Path, table: pa.Table) -> pa.Table:
    """Write a Parquet file to an existing folder, atomically, and return its table."""
    if not path.parent.is_dir():
        raise ConfigError(f"'{path.parent}' was deleted, and its files are lost. Repeat the command.")
    with atomic_write(path) as partial:
        parquet.write_table(table, partial, write_page_checksum=True)
    return table


def write_parts(
    detector: Detector,
    paths: Listed,
    output: Path,
    *,
    source: str | Sequence[str],
    part_size: int,
    batch_size: int = 1,
    column: str | None = None,
    shard: tuple[int, int] | None = None,
) -> Summary:
    """Run a detector on any number of images, and write Parquet files with ``part_size`` rows of ``SCHEMA``.

    The output directory gets the part files ``part-000000.parquet`` and so on. With a shard, their names begin with
    ``shard-0003-of-0016-``. The metadata of each file describes the model and the input. Part files are written
    atomically. Complete part files are not written again, except for URLs with a temporary error, which are requested
    again. Otherwise the result is identical to an uninterrupted run, byte for byte, with the same batch size and on the
    same machine. Memory use does not depend on the number of images.

    Each tar file has its own part files, whose names begin with ``tar-`` and a hash of its name. A tar file is not read
    again if its parts are complete, unless its size, its ETag or its modification time has changed.

    Args:
        detector: The detector.
        paths: The names and paths of ``source`` from :func:`~projects_vil.inference.image_listing.list_paths`.
        output: The output directory, for one model and one input.
        source, column: The arguments with which the images were listed.
        shard: (i, n) for the images of shard i, counted from 0, of n.
        part_size: Number of rows in a part file.
        batch_size: Maximum number of images in a batch.

    Returns:
        The totals over all part files of this job, and a line with the incomplete tar files of all jobs.

    Raises:
        ConfigError: If the output is of another model, input, ``part_size`` or number of shards, or if the images of a
            part have changed. The images of a tar file may change.
        OSError: If the size of a tar file is unknown for a reason that may be temporary, and there are several shards.
    """
    described = f"files in {common_folder(source)}"
    if isinstance(source, str):
        described = image_loading.without_password(source) if "://" in source else os.path.realpath(source)
    made_of = describe_runner(detector.runner) | {"input": described, "column": column, "part_size": part_size}
    made_of["number of shards"] = shard and shard[1]
    prefix = "" if shard is None else f"shard-{shard[0]:04}-of-{shard[1]:04}-"
    schema, archives, versions = schema_of(detector.categories, made_of), {}, {}
    output.mkdir(parents=True, exist_ok=True)
    # The files of other shards must agree too.
    for path in sorted(output.glob("*.parquet"))[:1]:
        read_part(path, made_of)

    def convert(item: image_loading.Loaded | image_loading.Skipped, detections: Detections | None) -> dict[str, Any]:
        progress.update()
        if detections is None:
            report_skipped(item)
        return to_row(item, detections)

    def predicted(images: Iterable[image_loading.ImageSource]) -> list[dict[str, Any]]:
        # No batch contains images of two parts, so that a part is the same after a resume.
        return list(detector.detect(image_loading.ImageBatches(images), convert, batch_size=batch_size))

    def parts_of(
        stem: str, images: Iterator[image_loading.ImageSource], archive: str | None = None
    ) -> Iterator[pa.Table]:
        version, before = versions.get(archive), 0
        for number in itertools.count():
            path = output / f"{stem}{number:06}.parquet"
            table = read_part(path, made_of)
            entry = _manifest_entry(table)
            if version not in (None, entry.get("version", version)):
                # The tar file was replaced. Its last part is deleted first, so that a resume deletes the others.
                for part in sorted(output.glob(f"{stem}*"), reverse=True)[: -number or None]:
                    part.unlink(missing_ok=True)
                table = None
            if table is None or entry.get("status") == "damaged":
                rows, before = predicted(itertools.islice(images, before, before + part_size)), 0
                if not rows and archive is None:
                    return
                # The error of a damaged tar file has its name.
                is_damaged = [row["file_name"] for row in rows[-1:]] == [archive]
                status = "damaged" if is_damaged else "complete" if len(rows) < part_size else "continued"
                entry = {"name": archive, "version": version, "status": status}
                entry["images"] = number * part_size + len(rows)
                metadata = schema.metadata | ({"archive": json.dumps(entry)} if archive else {})
                table = write_part(path, pa.Table.from_pylist(rows, schema.with_metadata(metadata)))
            elif archive is None:
                failed, part_images = failed_rows(table), itertools.islice(images, part_size)
                part = [(image.name, image if row in failed else None) for row, image in enumerate(part_images)]
                if [name for name, _ in part] != table["file_name"].to_pylist():
                    raise ConfigError(f"The images of '{path}' have changed. Choose another output directory.")
                progress.update(len(table) - len(failed))
                if failed:
                    rows, again = table.to_pylist(), predicted(image for _, image in part if image)
                    for row, new in zip(failed, again, strict=True):
                        rows[row] = new
                    table = write_part(path, pa.Table.from_pylist(rows, schema))
            else:
                before += len(table)
                progress.update(len(table))
            yield table
            if archive and entry["status"] != "continued":
                return

    def parts() -> Iterator[pa.Table]:
        yield from parts_of(f"{prefix}part-", load_listed(split_listed(paths, archives, shard)))
        # Several jobs must agree on the sizes of all tar files.
        versions.update(image_loading.file_versions(archives, strict=shard is not None))
        for name in archives_of_shard({name: (one or [0])[0] for name, one in versions.items()}, shard or (0, 1)):
            yield from parts_of(_stem(name), load_listed([(name, archives[name])]), name)

    with progress_bar("image") as progress:
        summary = summarize(output, count_rows(parts()))
    if not archives:
        return summary
    # The tar files of other jobs too.
    counts = Counter(path.name[: len(_stem(""))] for path in output.glob("tar-*.parquet"))
    incomplete = []
    for name, version in versions.items():
        path = output / f"{_stem(name)}{counts[_stem(name)] - 1:06}.parquet"
        entry = _manifest_entry(read_part(path, made_of, columns=[]))
        if entry.get("status") != "complete" or version not in (None, entry["version"]):
            incomplete.append(name)
    line = f"{output}: {len(archives) - len(incomplete)} of {counted(len(archives), 'tar file')} complete"
    line += f"; incomplete: {first_of(incomplete, 10)}" if incomplete else ""
    return dataclasses.replace(summary, lines=(*summary.lines, line))


def _stem(archive: str) -> str:
    """Return the start of the file names of a tar file's parts."""
    return f"tar-{hashlib.sha256(archive.encode()).hexdigest()[:16]}-"


def _manifest_entry(table: pa.Table | None) -> dict[str, Any]:
    """Return what the metadata of a part describes about its tar file; empty for other parts."""
    return {} if table is None else json.loads(table.schema.metadata.get(b"archive", "{}"))


def count_rows(tables: Iterable[pa.Table]) -> Counter:
    """Return the numbers of images, errors, detections and parts in the tables of Parquet files."""
    counts = Counter()
    for table in tables:
        counts.update(image=len(table), error=len(table) - table["error"].null_count, part=1)
        counts["detection"] += compute.sum(compute.list_value_length(table["scores"])).as_py() or 0
    return counts


def summarize(output: Path, counts: Counter) -> Summary:
    """Return the totals of an output directory from :func:`count_rows`."""
    units = ("image", "error", "detection", "part")
    line = f"{output}: {', '.join(counted(counts[unit], unit) for unit in units)}"
    return Summary(counts["image"] - counts["error"], counts["detection"], counts["error"], (line,))
