"""Distribute the images of an input over a Ray cluster, with one detector per worker, and write Parquet files.

Ray Data schedules, retries, applies backpressure and scales. The finished images are read from the output files. Ray's
own checkpoint (``ray.data.checkpoint``) is not used, because it does not notice if an output file is lost.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import zlib
from collections import ChainMap, Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from backbones import ConfigError
from backbones.errors import first_of, one_line, pip_install
from backbones.files import write_text
from projects_vil.config import combine_overrides
from projects_vil.files import read_json
from projects_vil.inference import image_listing, parquet_writer
from projects_vil.inference.detector import Detector
from projects_vil.inference.image_loading import BATCHING_WINDOW, ImageBatches, ImageSource, file_versions
from projects_vil.inference.predict import Summary
from vil.choices import EXPORT_SUFFIXES

try:
    import pyarrow as pa
    import ray.data
    from pyarrow import parquet
except ImportError as missing:
    raise ConfigError(f"Ray Data is not installed. {pip_install('ray', 'pyarrow')}") from missing

# The versions of the tar files of an output. Readers of Parquet folders skip names that begin with "_".
VERSIONS_FILES = "_tar_files*.json"
ROWS_PER_TASK = 2**22  # rows of output files that one task reads; their keys take 64 MiB
PARTS_PER_RUN = 64  # parts of lists, about 20 million images, after which the command frees its 5 kB per task
# The end of a tar file's name in the name of its images. It may be the name of a folder too.
_ARCHIVE = re.compile(rf"(?:{'|'.join(map(re.escape, image_listing.ARCHIVES))})(?:[/?]|\Z)", re.IGNORECASE)


@contextlib.contextmanager
def _explained_error() -> Iterator[None]:
    """Raise the error of a Ray task as a :class:`ConfigError`."""
    try:
        yield
    except ray.exceptions.RayError as error:
        cause = error
        while isinstance(cause, ray.exceptions.RayTaskError) and cause.cause is not cause:
            cause = cause.cause
        # Ray Data appends a line of advice about retries.
        if isinstance(cause, ConfigError):
            raise ConfigError(str(cause).partition("\n")[0]) from error
        # The advice replaces the file name of an OSError, but not at the end of the traceback.
        reason = re.split(r"(?m)^[ \x1b].*\n", str(error))[-1].partition("\nFailed to ")[0]
        raise ConfigError(f"A Ray task failed ({one_line(reason)}). Fix the cause and repeat the command.") from error


@_explained_error()
def predict_on_ray(
    model: str | os.PathLike,
    source: str | Path | Sequence[str],
    output: str | os.PathLike,
    *,
    part_size: int,
    num_workers: tuple[int, int] | None = None,
    workers_per_gpu: int = 1,
    batch_size: int = 1,
    column: str | None = None,
    **options: Any,
) -> Summary:
    """Detect objects in any number of images on the Ray cluster at ``RAY_ADDRESS``, or on a local cluster.

    The output directory gets Parquet files with the same rows as without Ray, in any order. Images that already have a
    row are skipped. To resume an interrupted run, run the same command again.

    Args:
        model: A name or path for :meth:`Detector.load`. The model and the images must be at the same path or URL on all
            machines.
        source: See :func:`~projects_vil.inference.image_listing.find_images`. One worker reads a whole tar file.
        output: A folder that all machines share, for one model.
        part_size: Minimum number of rows in a file if there are enough, and the number of images in a task of a worker,
            which is at most 256.
        num_workers: Minimum and maximum number of detectors. A worker reserves a GPU, or a share of it, if the cluster
            has GPUs and the model can use one, otherwise one CPU. By default 1 to all GPUs, or to all CPUs but one,
            which reads and writes.
        workers_per_gpu: Number of detectors that share a GPU. It has no effect without GPUs.
        batch_size: Maximum number of images in a batch.
        column: The column of a table of paths or URLs.
        options: Further arguments of :meth:`Detector.load`.

    Returns:
        The totals over all files of the output directory.

    Raises:
        ConfigError: If an argument is invalid, the input has no images, the output is of another model, a tar file was
            replaced, or a Ray task fails several times.
    """
    if isinstance(model, Detector):
        raise ConfigError("With Ray each worker loads the model. Pass a name or path, not a Detector.")
    model, output = os.fspath(model), Path(output).absolute()
    if isinstance(source, (str, os.PathLike)) and "://" not in str(source):
        source = os.path.abspath(source)  # workers may run in another folder
    next(image_listing.list_paths(source, exclude=output, column=column))  # checks the input
    given = combine_overrides(options.pop("overrides", {}))
    device = options.get("device") or given.get("MODEL.DEVICE", "cuda")
    can_use_gpu = str(device) != "cpu" and not str(options.get("weights") or model).endswith(EXPORT_SUFFIXES)
    # This process leaves the GPUs to the workers, and some attention backends need a GPU.
    on_cpu = given | {"MODEL.DEVICE": "cpu"} | ({"MODEL.TRANSFORMER.ATTENTION_BACKEND": "auto"} if can_use_gpu else {})
    detector = Detector.load(model, **options | {"device": None, "overrides": on_cpu})
    # An error of a task is raised once, and not printed for each of its results too.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    ray.init(ignore_reinit_error=True)
    unit = "GPU" if can_use_gpu and ray.cluster_resources().get("GPU") else "CPU"
    made_of = parquet_writer.describe_runner(detector.runner)
    if unit == "GPU" and detector.runner.cfg.INFERENCE.DTYPE == "auto":
        made_of["dtype"] = "auto"  # the workers choose it for their GPU
    # Reading and writing need a CPU too.
    available = int(ray.cluster_resources()[unit])
    free = available * workers_per_gpu if unit == "GPU" else available - 1
    smallest, largest = num_workers or (1, free)
    if not 0 < smallest <= min(largest, free):
        text = f"Ray has room for {free} workers on {available} {unit}s, but ray_workers is {smallest} {largest}."
        raise ConfigError(f"{text} Use fewer workers or a larger cluster.")
    output.mkdir(parents=True, exist_ok=True)
    files = output_files(output, part_size)
    finished = finished_keys(files, made_of)
    # Ray would also reserve a CPU for each GPU worker, and might have none left for reading.
    reserved = {"num_gpus": 1 / workers_per_gpu, "num_cpus": 0} if unit == "GPU" else {"num_cpus": 1}
    arguments = {"fn_constructor_args": (model, options | {"overrides": given}, batch_size, finished), **reserved}
    pool = ray.data.ActorPoolStrategy(min_size=smallest, max_size=largest)
    schema = parquet_writer.schema_of(detector.categories, made_of)
    all_parts = image_listing.list_parts(source, exclude=output, column=column)
    for first in range(0, len(all_parts), PARTS_PER_RUN):
        parts = all_parts[first : first + PARTS_PER_RUN]
        listed = ray.data.from_items([*range(len(parts))], override_num_blocks=len(parts))
        # The context of this dataset only. A ConfigError would be the same in each attempt.
        context = listed.context
        context.raise_original_map_exception = True
        context.retried_map_errors, context.max_map_retries = [r"^(?!\S*ConfigError)"], 2
        listing = partial(_list_part, parts, output, min(part_size, BATCHING_WINDOW), len(files))
        compute = ray.data.TaskPoolStrategy(size=min(largest, len(parts)))
        # Listing reserves no CPU, so that splitting and writing share the free one.
        listed = listed.map_batches(listing, batch_size=1, num_cpus=0, compute=compute)
        # One row is one block, and one block is one task. Ray does not accept GPU workers without a batch size.
        tasks = listed.repartition(target_num_rows_per_block=1)
        detected = tasks.map_batches(_Worker, compute=pool, batch_size=1, batch_format="pyarrow", **arguments)
        detected.write_parquet(str(output), schema=schema, min_rows_per_file=part_size)
    files = output_files(output, part_size)
    tasks = [ray.remote(_count).remote(paths) for paths in files[1:]]
    summary = parquet_writer.summarize(output, sum(ray.get(tasks), _count(files[0])))
    if not summary.num_images + summary.num_skipped:
        raise ConfigError(f"Input '{source}' has no images. {image_listing.FORMATS}")
    return summary


def _list_part(
    parts: list[partial], output: Path, size: int, num_partitions: int, batch: dict[str, np.ndarray]
) -> Iterator[pa.Table]:
    """Yield tables of one row: the names and paths of up to ``size`` images of one partition, or of one tar file."""
    pending, archives = defaultdict(list), {}
    for name, path in image_listing.split_listed(parts[batch["item"][0]](), archives):
        partition = _partition(name, num_partitions)
        pending[partition].append((name, path))
        if len(pending[partition]) == size:
            yield _table_of(pending.pop(partition))
    _check_versions(output, file_versions(archives, strict=False))
    yield from map(_table_of, [*pending.values(), *([archive] for archive in archives.items())])


def _table_of(listed: list[tuple[str, str]]) -> pa.Table:
    # Bytes, because not all file names are UTF-8.
    return pa.table([[[os.fsencode(text) for text in texts]] for texts in zip(*listed, strict=True)], ["name", "path"])


class _Worker:
    """A detector that converts tables of names and paths to tables of rows."""

    def __init__(self, model: str, options: dict[str, Any], batch_size: int, finished: "list[ray.ObjectRef]") -> None:
        # Ray does not resolve references in a list. The workers of a machine share one copy of a partition.
        self.detector, self.batch_size, self.finished = Detector.load(model, **options), batch_size, finished

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        images = self._unfinished(table)
        while window := list(itertools.islice(images, BATCHING_WINDOW)):
            rows = list(self.detector.detect(ImageBatches(window), parquet_writer.to_row, batch_size=self.batch_size))
            yield pa.Table.from_pylist(rows, parquet_writer.SCHEMA)

    def _unfinished(self, table: pa.Table) -> Iterator[ImageSource]:
        names, paths = (list(map(os.fsdecode, table[column][0].as_py())) for column in ("name", "path"))
        finished = ray.get(self.finished[_partition(names[0], len(self.finished))])
        for image in image_listing.load_listed(zip(names, paths, strict=True)):
            key = _keys([image.name])
            if np.searchsorted(finished, key) == np.searchsorted(finished, key, "right"):
                yield image


def _check_versions(output: Path, versions: dict[str, list | None]) -> None:
    """Write the versions of new tar files to the output directory.

    Raises:
        ConfigError: If a tar file was replaced since its images were predicted.
    """
    before = ChainMap(*map(read_json, output.glob(VERSIONS_FILES)))
    if changed := [name for name, version in versions.items() if version and version != before.get(name, version)]:
        text = f"{first_of(changed, 5)} changed after the prediction to '{output}' began"
        raise ConfigError(f"{text}, and its rows may describe the old images. Choose another output directory.")
    if new := {name: version for name, version in versions.items() if version and name not in before}:
        # Several tasks may write at the same time.
        text = json.dumps(new)
        write_text(output / VERSIONS_FILES.replace("*", f"-{zlib.crc32(text.encode()):08x}"), text)


def output_files(output: Path, part_size: int) -> list[list[Path]]:
    """Return groups of the output files, each with about ``ROWS_PER_TASK`` rows. One group may be empty."""
    paths, number = sorted(output.glob("*.parquet")), max(ROWS_PER_TASK // part_size, 1)
    return [paths[first : first + number] for first in range(0, len(paths), number)] or [[]]


def _count(paths: list[Path]) -> Counter:
    return parquet_writer.count_rows(parquet.read_table(path, columns=["scores", "error"]) for path in paths)


def finished_keys(files: list[list[Path]], made_of: dict[str, str]) -> "list[ray.ObjectRef]":
    """Return the sorted keys of the finished images in each partition. Ray tasks read and sort them.

    Args:
        files: Groups of output files. There are as many partitions.
        made_of: What the rows must be made of.

    Raises:
        ConfigError: If a file was made of something else, cannot be read, or is damaged and Ray has not named it.
    """
    if len(files) == 1:  # to start a task would take longer
        return [ray.put(np.sort(_read_keys(files[0], made_of, 1)[1]))]
    read = ray.remote(_read_keys).options(num_returns=1 + len(files))
    checked, *keys = zip(*(read.remote(paths, made_of, len(files)) for paths in files), strict=True)
    ray.get(list(checked))
    sort = ray.remote(lambda *parts: np.sort(np.concatenate(parts)))
    return [sort.remote(*parts) for parts in keys]


def _read_keys(paths: list[Path], made_of: dict[str, str], num_partitions: int) -> list:
    """Return None, and the keys of the images in output files by partition.

    Rows with a temporary error and incomplete files are deleted.
    """
    keys, partitions = [], []
    for path in paths:
        table = parquet_writer.read_part(path, made_of, columns=["file_name", "error"])
        if table is None:
            # Delete only files that Ray has named.
            if not re.fullmatch(r"\w+_\d{6}-\d+\.parquet", path.name):
                raise ConfigError(f"'{path}' is not a complete Parquet file. Choose another output directory.")
            path.unlink(missing_ok=True)  # Ray may repeat a task
            continue
        if failed := parquet_writer.failed_rows(table):
            others = np.setdiff1d(np.arange(len(table)), failed)
            table = parquet_writer.write_part(path, parquet_writer.read_part(path, made_of).take(others))
        names = table["file_name"].to_pylist()
        keys.append(_keys(names))
        partitions += [_partition(name, num_partitions) for name in names]
    keys, partitions = np.concatenate([_keys([]), *keys]), np.array(partitions)
    return [None, *(keys[partitions == number] for number in range(num_partitions))]


def _partition(name: str, num_partitions: int) -> int:
    """Return the partition of the finished images in which an image is looked up, the same for a whole tar file."""
    return zlib.crc32(_ARCHIVE.split(image_listing.shown_name(name), maxsplit=1)[0].encode()) % num_partitions


def _keys(names: list[str]) -> np.ndarray:
    """Return a 16-byte hash of each name."""
    return np.array([hashlib.blake2b(name.encode(), digest_size=16).digest() for name in names], "S16")
