"""Throughput and memory of ``vil predict``: single images, batches, bfloat16, shards and Ray workers."""

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import torch
from detectron2.structures import Boxes, Instances
from tabulate import tabulate
from torch import Tensor

from backbones import ConfigError
from examples.make_shapes_dataset import write_shapes_dataset
from projects_vil.data import Categories
from projects_vil.inference import Detector
from projects_vil.inference import predict as run_prediction
from projects_vil.inference.image_listing import archives_of_shard, find_images
from projects_vil.inference.image_loading import ImageBatches, ImageSource, Loaded
from projects_vil.utils import call_in_new_process, memory_of
from vil.choices import PART_SIZE

_RAY = "two Ray workers"
_INTERVAL = 0.2  # seconds between two memory samples


def measure_predictions(
    model: str, *, num_images: int, batch_size: int, runs: int, overrides: Sequence[str] = ()
) -> list[dict[str, object]]:
    """Run ``vil predict --format parquet`` on synthetic images in each mode, with one thread per CPU.

    Each mode also runs on a tenth of the images. The rate is computed from the difference, so that it excludes the
    start of the processes and the loading of the model.

    Args:
        model: A model that ``vil predict`` accepts.
        num_images: Number of images, at least 10.
        batch_size: Images per batch, for the modes with batches.
        runs: Runs of each mode. The result is the median.
        overrides: Config keys and values.

    Returns:
        One row per mode: ``name``; ``images_per_second`` (``None`` if the images took no longer than the start
        varies); ``start`` in seconds; and ``memory``, the peak of all processes together in bytes, which counts shared
        memory once (PSS, ``None`` without /proc). The Ray mode needs Ray.

    Raises:
        ConfigError: If a prediction fails, or ``num_images`` is too small.
    """
    if num_images < 10:
        raise ConfigError(f"--images is {num_images}. Use 10 or more.")
    few, batches = num_images // 10, ("--batch", str(batch_size))
    modes: dict[str, list[tuple[str, ...]]] = {
        "one image at a time": [()],
        f"batches of {batch_size}": [batches],
        f"batches of {batch_size}, bfloat16": [(*batches, "INFERENCE.DTYPE", "bfloat16")],
        "two shards on this machine": [(*batches, "--shard", f"{shard}/2") for shard in range(2)],
    }
    if find_spec("ray"):
        modes[_RAY] = [(*batches, "--ray", "--ray-workers", "2", "2")]
    seconds: dict[str, list[tuple[float, float]]] = {}
    peaks: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_shapes_dataset(folder, num_train=num_images, num_val=few)
        for run in range(runs):
            for name, commands in modes.items():
                measured = []
                for split in ("val", "train"):
                    started = ("predict", model, f"{folder}/{split}", "--output", f"{folder}/{name}-{split}-{run}")
                    with _ray_cluster() if name == _RAY else nullcontext({}) as env:
                        measured.append(
                            _run([(*started, "--format", "parquet", *flags, *overrides) for flags in commands], env)
                        )
                seconds.setdefault(name, []).append((measured[0][0], measured[1][0]))
                peaks.setdefault(name, []).append(measured[1][1])
    rows = []
    for name, pairs in seconds.items():
        of_few, of_all = (median(column) for column in zip(*pairs, strict=True))
        # With few images, the start can vary by more than the images take.
        rate = (num_images - few) / (of_all - of_few) if of_all > of_few else None
        start, memory = max(of_few - few / rate, 0.0) if rate else of_few, median(peaks[name])
        rows.append({"name": name, "images_per_second": rate, "start": start, "memory": memory or None})
    return rows


def format_predictions(rows: Sequence[dict]) -> str:
    """Format the rows of :func:`measure_predictions` as a Markdown table, with rates relative to the first row."""
    rates = [row["images_per_second"] for row in rows]
    first = rates[0]
    table = [
        [
            row["name"],
            f"{rate:.2f}" if rate else "not measured (use more images)",
            f"{rate / first:.2f}" if rate and first else "",
            f"{row['start']:.0f}",
            "not measured (no /proc)" if row["memory"] is None else f"{row['memory'] / 1e9:.2f}",
        ]
        for row, rate in zip(rows, rates, strict=True)
    ]
    return tabulate(table, ["mode", "images/s", "ratio", "start (s)", "memory (GB)"], "github", disable_numparse=True)


def rate_of_urls(num_images: int, *, latency: float = 0.05) -> float:
    """Return the images per second that are loaded from a local server, for small images and without a model.

    Args:
        num_images: Number of images.
        latency: Seconds before the server answers a request.
    """
    image = cv2.imencode(".jpg", np.zeros((48, 64, 3), np.uint8))[1].tobytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(latency)
            self.send_response(200)
            self.send_header("Content-Length", str(len(image)))
            self.end_headers()
            self.wfile.write(image)

        def log_message(self, *_: object) -> None:
            pass

    runner = SimpleNamespace(
        channels="RGB", sides=(1, None), input_size=lambda *size: size, padded_size=lambda *size: size
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket.listen(256)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        names = (f"http://127.0.0.1:{server.server_port}/{number}.jpg" for number in range(num_images))
        start = time.monotonic()
        batches = ImageBatches(ImageSource(name, name, 1) for name in names).batches(runner, 8)
        loaded = sum(isinstance(item, Loaded) for batch in batches for item in batch)
        rate = loaded / (time.monotonic() - start)
        server.shutdown()
    return rate


class _EmptyRunner:
    """A runner without a model. It returns no detections."""

    channels, sides, score_threshold, weights = "RGB", (1, None), 0.0, __file__
    categories = Categories((1,), ("thing",))

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        return height, width

    padded_size = input_size

    def __call__(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        empty = {"pred_boxes": Boxes(torch.zeros(0, 4)), "scores": torch.zeros(0), "pred_classes": torch.zeros(0).int()}
        return [Instances(size, **empty) for size in sizes]


class _ErrorRows:
    """A worker without a detector, for :func:`measure_ray_command`."""

    def __init__(self, *args: Any) -> None: ...

    def __call__(self, table: Any) -> Iterator[Any]:
        import pyarrow as pa

        from projects_vil.inference.parquet_writer import SCHEMA

        rows = [{"file_name": name.decode(), "error": "not read"} for name in table["name"][0].as_py()]
        yield pa.Table.from_pylist(rows, SCHEMA)


def measure_tar_files(num_images: int, *, num_files: int = 128, num_jobs: int = 16) -> dict[str, float]:
    """Predict on tar files of log-normal sizes without a model, and repeat the finished command.

    Args:
        num_images: Number of images, of 60 kB each.
        num_files: Number of tar files.
        num_jobs: Number of jobs, whose shares are computed.

    Returns:
        ``bytes`` of the tar files; seconds to ``predict``, to ``resume``, and to ``read`` all files; and the bytes of
        the largest job relative to the mean, ``by_size`` and ``by_hash`` of the name.
    """
    random = np.random.default_rng(0)
    image = cv2.imencode(".jpg", random.integers(0, 255, (240, 320, 3), np.uint8))[1].tobytes()
    shares = random.lognormal(0, 1, num_files)
    counts = (shares / shares.sum() * num_images).astype(int) + 1
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for file, count in enumerate(counts):
            with tarfile.open(f"{folder}/{file:03}.tar", "w") as tar:
                for number in range(count):
                    member = tarfile.TarInfo(f"{number:06}.jpg")
                    member.size = len(image)
                    tar.addfile(member, io.BytesIO(image))
        source, output = f"{folder}/{{000..{num_files - 1:03}}}.tar", f"{folder}/found"
        for name in ("predict", "resume"):
            start = time.monotonic()
            run_prediction(Detector(_EmptyRunner()), source, output, file_format="parquet")
            seconds[name] = time.monotonic() - start
        start = time.monotonic()
        for _ in find_images(source, exclude=output):
            pass
        seconds["read"] = time.monotonic() - start
        sizes = {path.name: path.stat().st_size for path in Path(folder).glob("*.tar")}
    mean, hashed = sum(sizes.values()) / num_jobs, [0] * num_jobs
    for name, size in sizes.items():
        hashed[int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % num_jobs] += size
    by_size = [sum(sizes[name] for name in archives_of_shard(sizes, (job, num_jobs))) for job in range(num_jobs)]
    shares = {"by_size": max(by_size) / mean, "by_hash": max(hashed) / mean}
    return {"bytes": sum(sizes.values())} | seconds | shares


def measure_finished_images(num_images: int, num_tasks: int = 4) -> dict[str, float]:
    """Read the names of finished images from synthetic output files, as ``vil predict --ray`` does.

    Returns:
        ``seconds`` and ``processor_seconds`` of the command without Ray's start, and ``bytes``, the growth of its peak
        memory, which is not in the result on systems without /proc.
    """
    import pyarrow as pa
    from pyarrow import parquet

    with tempfile.TemporaryDirectory() as folder, _ray_cluster() as env:
        for first in range(0, num_images, PART_SIZE):
            names = [f"photos/{number:012}.jpg" for number in range(first, min(first + PART_SIZE, num_images))]
            table = pa.table({"file_name": names, "error": pa.nulls(len(names), pa.string())})
            parquet.write_table(table, f"{folder}/{first:012}.parquet")
        return call_in_new_process(_read_finished, folder, num_images // num_tasks, env["RAY_ADDRESS"])


def _read_finished(folder: str, rows_per_task: int, address: str) -> dict[str, float]:
    import ray

    from projects_vil.inference import on_ray

    on_ray.ROWS_PER_TASK = rows_per_task
    ray.init(address)
    before, start, processor = memory_of(), time.monotonic(), time.process_time()
    keys = on_ray.finished_keys(on_ray.output_files(Path(folder), PART_SIZE), {})
    ray.wait(keys, num_returns=len(keys), fetch_local=False)
    found = {"seconds": time.monotonic() - start, "processor_seconds": time.process_time() - processor}
    return found | ({"bytes": memory_of(peak=True) - before} if before else {})


def measure_ray_command(num_images: int) -> dict[str, tuple[float, int]]:
    """Run ``vil predict --ray`` on a list of images that do not exist, with workers that only write error rows.

    Returns:
        The processor time of the command in seconds, and the growth of its peak memory in bytes, ``planned`` before the
        first task, and ``finished``. Both are without Ray's start. The memory is 0 on systems without /proc.
    """
    with tempfile.TemporaryDirectory() as folder, _ray_cluster() as env:
        with open(f"{folder}/list.txt", "w") as file:
            file.writelines(f"photos/{number // 1000:06}/{number:012}.jpg\n" for number in range(num_images))
        return call_in_new_process(_predict_on_ray, folder, env["RAY_ADDRESS"])


def _predict_on_ray(folder: str, address: str) -> dict[str, tuple[float, int]]:
    import ray.data

    from projects_vil.inference import on_ray

    def write_parquet(dataset: ray.data.Dataset, *args: Any, **options: Any) -> None:
        costs["planned"] = cost()
        write(dataset, *args, **options)

    def cost() -> tuple[float, int]:
        return time.process_time() - processor, (memory_of(peak=True) or 0) - (before or 0)

    ray.init(address, log_to_driver=False)
    costs: dict[str, tuple[float, int]] = {}
    write, ray.data.Dataset.write_parquet = ray.data.Dataset.write_parquet, write_parquet
    on_ray._Worker = _ErrorRows
    on_ray.Detector.load = lambda *args, **options: Detector(_EmptyRunner())
    before, processor = memory_of(), time.process_time()
    on_ray.predict_on_ray("model", f"{folder}/list.txt", f"{folder}/found", part_size=PART_SIZE)
    return costs | {"finished": cost()}


@contextmanager
def _ray_cluster() -> Iterator[dict[str, str]]:
    """Start Ray with three CPUs: two for the workers and one for reading and writing."""
    import ray

    context = ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        yield {"RAY_ADDRESS": context.address_info["gcs_address"]}
    finally:
        ray.shutdown()


def _run(commands: Sequence[tuple[str, ...]], env: dict[str, str]) -> tuple[float, int]:
    """Run commands in parallel. Return the seconds and the peak memory of all child processes in bytes."""
    threads = str(max((os.cpu_count() or 1) // len(commands), 1))
    env = os.environ | {"OMP_NUM_THREADS": threads} | env
    start, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as log:
        processes = [
            subprocess.Popen([sys.executable, "-m", "vil", *command], env=env, stdout=log, stderr=log)
            for command in commands
        ]
        while any(process.poll() is None for process in processes):
            peak = max(peak, sum(map(_proportional_memory, _descendants(os.getpid()))))
            time.sleep(_INTERVAL)
        if any(process.returncode for process in processes):
            log.seek(0)
            raise ConfigError(f"'vil {' '.join(commands[0])}' failed: {log.read().strip().splitlines()[-1:]}")
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
        match = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return 0
    return int(match[1]) * 1024 if match else 0
