"""Detection on a Ray cluster: images are spread over workers with a detector each, and their rows written as Parquet.

Ray Data schedules, retries, holds back and scales. What is finished is read from the output itself: Ray's own
checkpoint (``ray.data.checkpoint``) keeps a list beside it, and does not notice a file of rows that is lost.
"""

import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from backbones import ConfigError
from projects_vil.export import is_exported
from projects_vil.inference import image_listing
from projects_vil.inference.detector import Detector
from projects_vil.inference.image_loading import LOOKAHEAD_IMAGES, ImageBatches
from projects_vil.inference.parquet_writer import check_same, identity_of, row_of, table_of

try:
    import pyarrow as pa
    import ray.data
    from pyarrow import compute, parquet
except ImportError as missing:
    raise ConfigError("Ray Data is not installed: pip install 'vil-detectron2[ray]'") from missing


def predict_on_ray(
    model: str | Path,
    source: str | Path,
    output: str | Path,
    *,
    part_size: int,
    workers: tuple[int, int] | None = None,
    batch_size: int = 1,
    column: str | None = None,
    **options: Any,
) -> dict[str, int]:
    """Detect objects in any number of images on the Ray cluster at ``RAY_ADDRESS``, or on one that is started here.

    ``output`` gets Parquet files with the rows of :func:`~projects_vil.inference.parquet_writer.predict_parts`, in any
    order. Images that have a row there are skipped: run the same command again to complete an interrupted run.

    Args:
        model: what ``Detector.load`` takes; all machines must have it, and the images, at the same path or URL.
        source: as for ``predict_parts``. A tar file is the work of one worker.
        output: a folder that all machines share, for one model.
        workers: smallest and largest number of detectors. Each reserves a GPU if the cluster has GPUs and the model can
            use one. Otherwise each reserves a CPU. None for 1 to all GPUs, or to all CPUs but one, which reads and
            writes.
        batch_size: maximum number of images at once.
        part_size: number of images in a task of a worker, at most 512, and smallest number of rows in a file as far as
            there are enough.
        column: the column of a table of paths or URLs.
        options: for ``Detector.load``.

    Returns:
        The numbers of ``images``, ``errors`` (images that cannot be read), ``detections`` and ``parts`` in all files.

    Raises:
        ConfigError: for invalid arguments, an input without images, and an output of another model.
    """
    model, source, output = str(model), str(source), Path(output).absolute()
    next(image_listing.find_images(source, exclude=output, column=column))
    given = list(options.pop("overrides", ()))
    device = options.get("device") or dict(zip(given[::2], given[1::2], strict=False)).get("MODEL.DEVICE", "cuda")
    can_use_gpu = str(device) != "cpu" and not is_exported(options.get("weights") or model)
    # Some attention backends run on GPUs only, which this process leaves to the workers.
    here = [*given, "MODEL.TRANSFORMER.ATTENTION_BACKEND", "auto"] if can_use_gpu else given
    detector = Detector.load(model, **options | {"device": "cpu", "overrides": here})
    made_of, schema = identity_of(detector.runner), table_of([], detector.categories).schema
    schema = schema.with_metadata({**schema.metadata, "made_of": json.dumps(made_of)})
    keys = [_finished(path, made_of) for path in sorted(output.glob("*.parquet"))]
    ray.init(ignore_reinit_error=True)
    unit = "GPU" if can_use_gpu and ray.cluster_resources().get("GPU") else "CPU"
    # Reading and writing need a CPU too.
    free = int(ray.cluster_resources()[unit]) - (unit == "CPU")
    smallest, largest = workers or (1, free)
    if not 0 < smallest <= min(largest, free):
        raise ConfigError(f"ray_workers {smallest} {largest}: Ray has room for {free} now, one a {unit}, beside I/O")
    finished = ray.put(np.unique(np.concatenate([_keys([]), *keys])))
    places, rows = _places(source, output, column, rows=min(part_size, LOOKAHEAD_IMAGES))
    # Ray would reserve a CPU for each worker on a GPU too, and may have none left for reading.
    reserved = {"num_gpus": 1, "num_cpus": 0} if unit == "GPU" else {"num_cpus": 1}
    arguments = {"fn_constructor_args": (model, options | {"overrides": given}, batch_size, [finished]), **reserved}
    pool = ray.data.ActorPoolStrategy(min_size=smallest, max_size=largest)
    # Ray takes no workers on GPUs without a batch size.
    detected = places.map_batches(_Worker, compute=pool, batch_size=rows, batch_format="pyarrow", **arguments)
    output.mkdir(parents=True, exist_ok=True)
    detected.write_parquet(str(output), schema=schema, min_rows_per_file=part_size)
    counts = [_counts(path) for path in output.glob("*.parquet")]
    return {name: sum(count[name] for count in counts) for name in counts[0]} | {"parts": len(counts)}


class _Worker:
    """A detector, for tables of names and places."""

    def __init__(self, model: str, options: dict[str, Any], batch_size: int, finished: "list[ray.ObjectRef]") -> None:
        self.detector, self.batch_size = Detector.load(model, **options), batch_size
        # In a list the reference arrives as such: the workers of a machine share what it refers to.
        self.finished = ray.get(finished[0])

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        named = zip(*(map(os.fsdecode, table[name].to_pylist()) for name in ("name", "place")), strict=True)
        images = (image for image in image_listing.images_of(named) if not self._is_finished(image.name))
        while window := list(itertools.islice(images, LOOKAHEAD_IMAGES)):
            batches = self.detector.detect(ImageBatches(window), batch_size=self.batch_size)
            rows = {item.index: row_of(item, found) for batch in batches for item, found in batch}
            yield table_of([rows[index] for index in sorted(rows)], self.detector.categories)

    def _is_finished(self, name: str) -> bool:
        key = _keys([name])
        position = np.searchsorted(self.finished, key)[0]
        return key[0] in self.finished[position : position + 1]


def _places(source: str, output: Path, column: str | None, *, rows: int) -> "tuple[ray.data.Dataset, int]":
    """Return names and places of images in blocks of so many, or of tar files in blocks of one, and the number."""
    named = image_listing.named_places(source, os.path.realpath(output), column)
    first = next(named)
    if image_listing.suffix_of(source) in image_listing.LISTS:
        lists = (_listed(place, column) for place in image_listing.expand_braces(source))
        dataset = functools.reduce(ray.data.Dataset.union, lists)
    else:
        dataset = ray.data.from_arrow(_table([first, *named]))
    rows = 1 if image_listing.suffix_of(first[1]) == image_listing.TAR else rows
    return dataset.repartition(target_num_rows_per_block=rows), rows


def _listed(place: str, column: str | None) -> "ray.data.Dataset":
    readers, suffix = {".txt": ray.data.read_text, ".csv": ray.data.read_csv}, image_listing.suffix_of(place)
    listed, folder = readers.get(suffix, ray.data.read_parquet)(place), os.path.dirname(place)
    first = (name for name in image_listing.COLUMNS if name in listed.columns())
    column = "text" if suffix == ".txt" else column or next(first)

    def to_places(batch: pa.Table) -> pa.Table:
        texts = [str(one or "") for one in batch[column].to_pylist()]
        if suffix == ".txt":
            # An empty line names nothing; the row of a table without a name will have an error.
            texts = list(filter(None, (text.removeprefix("\ufeff").strip() for text in texts)))
        return _table([(text, text if "://" in text else os.path.join(folder, text)) for text in texts])

    return listed.select_columns([column]).map_batches(to_places, batch_format="pyarrow")


def _table(named: list[tuple[str, str]]) -> pa.Table:
    # Bytes, since not all names of files are UTF-8.
    columns = (pa.array([os.fsencode(pair[index]) for pair in named], pa.binary()) for index in (0, 1))
    return pa.Table.from_arrays(list(columns), ["name", "place"])


def _finished(path: Path, made_of: dict[str, str]) -> np.ndarray:
    """Return the keys of the images in a file of the output; one that was not written to its end is removed."""
    try:
        table = parquet.read_table(path, columns=["file_name"])
    except pa.ArrowInvalid as error:
        # As Ray names it.
        if not re.fullmatch(r"\w+_\d{6}-\d+\.parquet", path.name):
            raise ConfigError(f"output has {path}, which is not a whole Parquet file: choose another one") from error
        path.unlink()
        return _keys([])
    before = (table.schema.metadata or {}).get(b"made_of")
    if before is None:
        raise ConfigError(f"output has {path}, which --ray has not written: choose another one")
    check_same(path, json.loads(before), made_of)
    return _keys(table["file_name"].to_pylist())


def _keys(names: list[str]) -> np.ndarray:
    """Return 16 bytes for a name, however long: 16 GB for 10^9 images."""
    return np.array([hashlib.blake2b(name.encode(), digest_size=16).digest() for name in names], "S16")


def _counts(path: Path) -> dict[str, int]:
    table = parquet.read_table(path, columns=["category_ids", "error"])
    detections = compute.sum(compute.list_value_length(table["category_ids"])).as_py()
    return {"images": len(table), "errors": len(table) - table["error"].null_count, "detections": detections}
