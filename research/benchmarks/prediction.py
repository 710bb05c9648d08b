"""Images a second and memory of whole predictions, by the ways that ``vil predict`` has for many images."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from tabulate import tabulate

from backbones import ConfigError
from projects_vil.data import write_shapes_dataset

_RAY = "two Ray workers"
_TICK = 0.2  # seconds between two looks at the memory


def measure_predictions(
    model: str, *, num_images: int, batch_size: int, runs: int, overrides: Sequence[str] = ()
) -> list[dict[str, object]]:
    """Run ``vil predict --format parquet`` on drawn photos, in turn each way, by as many threads as there are CPUs.

    Each way has a run with a tenth of the images too: the rate is of the difference, so that it leaves out the start
    of processes and the loading of the model, which are given apart.

    Args:
        model: what ``vil predict`` takes.
        num_images: number of images, at least 10.
        runs: runs of each way; figures are medians.
        overrides: config keys and values.

    Returns:
        For each way its ``name``, ``images_per_second`` (None where the images took no longer than the start varies),
        seconds of the ``start``, and ``memory``, the largest sum over its processes in bytes, in which shared memory
        counts once (PSS); None on systems without /proc. Without Ray installed there is no row for it.

    Raises:
        ConfigError: where a prediction fails, with its last line, and for too few images.
    """
    if num_images < 10:
        raise ConfigError(f"images is {num_images}: at least 10 are needed")
    few, batches = num_images // 10, ("--batch-size", str(batch_size))
    ways: dict[str, list[tuple[str, ...]]] = {
        "one image at a time": [()],
        f"batches of {batch_size}": [batches],
        f"batches of {batch_size}, bfloat16": [(*batches, "INFERENCE.DTYPE", "bfloat16")],
        "two shards on this machine": [(*batches, "--shard", f"{shard}/2") for shard in range(2)],
    }
    if find_spec("ray"):
        ways[_RAY] = [(*batches, "--ray", "--ray-workers", "2", "2")]
    seconds: dict[str, list[tuple[float, float]]] = {}
    peaks: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_shapes_dataset(folder, num_train=num_images, num_val=few)
        for run in range(runs):
            for name, commands in ways.items():
                measured = []
                for split in ("val", "train"):
                    started = ("predict", model, f"{folder}/{split}", "--output", f"{folder}/{name}-{split}-{run}")
                    with _ray_cluster() if name == _RAY else nullcontext({}) as env:
                        measured.append(
                            _run([(*started, "--format", "parquet", *own, *overrides) for own in commands], env)
                        )
                seconds.setdefault(name, []).append((measured[0][0], measured[1][0]))
                peaks.setdefault(name, []).append(measured[1][1])
    rows = []
    for name, pairs in seconds.items():
        of_few, of_all = (median(column) for column in zip(*pairs, strict=True))
        # The start may vary by more than the images take.
        rate = (num_images - few) / (of_all - of_few) if of_all > of_few else None
        start, memory = max(of_few - few / rate, 0.0) if rate else of_few, median(peaks[name])
        rows.append({"name": name, "images_per_second": rate, "start": start, "memory": memory or None})
    return rows


def format_predictions(rows: Sequence[dict]) -> str:
    """Return the rows of :func:`measure_predictions` as a table in Markdown, rates also as ratios to the first."""
    rates = [row["images_per_second"] for row in rows]
    first = rates[0]
    table = [
        [
            row["name"],
            f"{rate:.2f}" if rate else "not measured (give more images)",
            f"{rate / first:.2f}" if rate and first else "",
            f"{row['start']:.0f}",
            "not measured (no /proc)" if row["memory"] is None else f"{row['memory'] / 1e9:.2f}",
        ]
        for row, rate in zip(rows, rates, strict=True)
    ]
    return tabulate(table, ["way", "images/s", "ratio", "start (s)", "memory (GB)"], "github", disable_numparse=True)


@contextmanager
def _ray_cluster() -> Iterator[dict[str, str]]:
    """Start Ray with two CPUs for workers, and one for reading and writing, whatever this machine has."""
    import ray

    context = ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        yield {"RAY_ADDRESS": context.address_info["gcs_address"]}
    finally:
        ray.shutdown()


def _run(commands: Sequence[tuple[str, ...]], env: dict[str, str]) -> tuple[float, int]:
    """Run commands at once; return seconds and the peak of the bytes of this process's descendants."""
    threads = str(max((os.cpu_count() or 1) // len(commands), 1))
    env = os.environ | {"OMP_NUM_THREADS": threads} | env
    start, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as log:
        processes = [
            subprocess.Popen([sys.executable, "-m", "vil.cli", *command], env=env, stdout=log, stderr=log)
            for command in commands
        ]
        while any(process.poll() is None for process in processes):
            peak = max(peak, sum(map(_proportional_memory, _descendants(os.getpid()))))
            time.sleep(_TICK)
        if any(process.returncode for process in processes):
            log.seek(0)
            raise ConfigError(f"vil {' '.join(commands[0])} failed: {log.read().strip().splitlines()[-1:]}")
    return time.perf_counter() - start, peak


def _descendants(process: int) -> Iterator[int]:
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            numbers = children.read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
        for child in map(int, numbers):
            yield child
            yield from _descendants(child)


def _proportional_memory(process: int) -> int:
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return 0
    return int(found[1]) * 1024 if found else 0
