"""Prediction on a local Ray cluster with two workers: the rows are the same as without Ray, also after failures."""

import functools
import http.server
import os
import re
import signal
import subprocess
import tarfile
import threading

import numpy as np
import pytest

from backbones import ConfigError
from projects_vil.inference import predict
from tests.projects_vil.helpers import PATIENCE, message, start_tool, wait_for
from tests.projects_vil.inference.helpers import assert_same, results_of, save

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.slow
OPTIONS, ONE_WORKER = {"num_workers": (1, 2), "part_size": 8, "batch_size": 2}, {"num_workers": (1, 1)}


@pytest.fixture(scope="module")
def cluster(short_ray_folder, request):
    """Two CPUs for workers, and one for reading and writing, unless a test sets other resources."""
    ray = pytest.importorskip("ray", reason="needs ray: pip install -e '.[ray]'")
    options = {"object_store_memory": 100 * 2**20, "include_dashboard": False, "log_to_driver": False}
    yield ray.init(**getattr(request, "param", {"num_cpus": 3}), **options)
    ray.shutdown()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder of 60 photos, one of which is broken, and lists, tables and tar files of them."""
    root, random = tmp_path_factory.mktemp("inputs"), np.random.default_rng(0)
    listed = [f"photos/{number:02}.png" for number in range(60)]
    for name in listed:
        save(root / name, random.integers(0, 255, (*random.integers(40, 90, 2), 3), dtype=np.uint8))
    (root / listed[7]).write_text("broken")
    # With a byte order mark, as some editors on Windows write it.
    (root / "list.txt").write_text("\n\n".join(listed), "utf-8-sig")
    parquet.write_table(pa.table({"photo": listed}), root / "table.parquet")
    for number in range(3):
        with tarfile.open(root / f"shard-{number}.tar", "w") as tar:
            for name in listed[number::3]:
                tar.add(root / name, name)
    return root


def rows_of(folder) -> dict[str, dict]:
    """Return the rows by name. Each name has one row."""
    rows = [row for path in folder.glob("*.parquet") for row in parquet.read_table(path).to_pylist()]
    named = {row["file_name"]: row for row in rows}
    assert len(named) == len(rows)
    return named


def assert_same_rows(found, expected):
    found, expected = rows_of(found), rows_of(expected)
    assert found.keys() == expected.keys() and len(found) == 60
    for name, row in expected.items():
        assert all(found[name][key] == row[key] for key in ("height", "width", "error"))
    assert_same(results_of(found.values()), results_of(expected.values()))


def predict_on_ray(*args, **changes):
    from projects_vil.inference.on_ray import predict_on_ray

    return predict_on_ray(*args, **OPTIONS | changes)


def predict_here(model, source, output, **options):
    return predict(model, source, output, file_format="parquet", overrides=["MODEL.DEVICE", "cpu"], **options)


def test_rows_with_and_without_ray_are_equal(inputs, cluster, trained_run, tmp_path):
    here = predict_here(trained_run, inputs / "table.parquet", tmp_path / "here", column="photo")
    there = predict_on_ray(trained_run, inputs / "table.parquet", tmp_path / "there", column="photo")
    for name in ("num_images", "num_skipped", "num_detections"):
        assert getattr(there, name) == getattr(here, name) > 0
    assert there.num_skipped == 1
    assert_same_rows(tmp_path / "there", tmp_path / "here")
    (first, second) = (parquet.read_schema(next((tmp_path / name).glob("*.parquet"))) for name in ("here", "there"))
    assert first.metadata[b"categories"] == second.metadata[b"categories"]


def worker_processes() -> list[int]:
    """Return the child processes whose title says that they run a detector."""
    below, listed = {os.getpid()}, subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout
    processes = [line.split(None, 2) for line in listed.splitlines()[1:]]
    for _ in range(4):
        below |= {int(pid) for pid, parent, _ in processes if int(parent) in below}
    return [int(pid) for pid, _, title in processes if int(pid) in below and "_Worker" in title]


def test_resume_after_failures(inputs, cluster, trained_run, tmp_path, monkeypatch):
    """A command is killed, then a worker; one output file is deleted, and another one is truncated."""
    here, there = tmp_path / "here", tmp_path / "there"
    predict_here(trained_run, inputs / "photos", here)
    words = ["predict", trained_run, inputs / "photos", "--ray", "--output", there]
    words += ["--ray-workers", "1", "1", "--part-size", "4"]
    monkeypatch.setenv("RAY_ADDRESS", cluster.address_info["gcs_address"])

    def start_and_wait_for_a_file():
        number = len(list(there.glob("*.parquet")))
        process = start_tool("../vil/__main__.py", *words, folder=tmp_path)
        wait_for(lambda: len(list(there.glob("*.parquet"))) > number or not process.is_alive())
        return process

    process = start_and_wait_for_a_file()
    process.kill()
    process.join()
    process = start_and_wait_for_a_file()
    assert len(list(there.glob("*.parquet"))) < 15
    os.kill(wait_for(worker_processes)[-1], signal.SIGKILL)
    process.join(PATIENCE)
    # The exit status for an image that could not be read.
    assert process.exitcode == 2, (tmp_path / "stderr").read_text()
    assert_same_rows(there, here)

    lost, broken, *kept = sorted(there.glob("*.parquet"))
    lost.unlink()
    broken.write_bytes(broken.read_bytes()[:-20])
    before = [path.read_bytes() for path in kept]
    monkeypatch.setattr("projects_vil.inference.on_ray.ROWS_PER_TASK", 16)  # the finished images are read in tasks
    predict_on_ray(trained_run, inputs / "photos", there)
    assert_same_rows(there, here)
    assert [path.read_bytes() for path in kept] == before
    with pytest.raises(ConfigError, match="dtype was torch.float32, and now it is torch.bfloat16"):
        predict_on_ray(trained_run, inputs / "photos", there, dtype="bfloat16")
    assert "part-000000.parquet" in message(predict_on_ray, trained_run, inputs / "photos", here)


@pytest.mark.parametrize("error", [ConfigError("No a.pt. Add it."), FileNotFoundError(2, "No file", "a.pt")])
def test_errors_of_a_worker(error, inputs, cluster, trained_run, tmp_path, monkeypatch):
    """A ConfigError is not repeated. Other errors are repeated twice."""

    class Worker:
        def __init__(self, *args) -> None: ...

        def __call__(self, table):
            (tmp_path / f"attempt-{os.urandom(4).hex()}").touch()
            raise error

    monkeypatch.setattr("projects_vil.inference.on_ray._Worker", Worker)
    text = message(predict_on_ray, trained_run, [str(inputs / "photos/00.png")], tmp_path / "out")
    failed = f"A Ray task failed (FileNotFoundError: {error}). Fix the cause and repeat the command."
    num_attempts = len(list(tmp_path.glob("attempt-*")))
    assert (text, num_attempts) == ((str(error), 1) if isinstance(error, ConfigError) else (failed, 3))


def test_tasks_have_at_most_512_rows(cluster, trained_run, tmp_path, monkeypatch):
    """The images do not exist, so that each one is a row with an error. The second run has several partitions."""
    from ray.data import Dataset

    statistics, write = [], Dataset.write_parquet

    def written(dataset, *args, **options) -> None:
        write(dataset, *args, **options)
        statistics.append(dataset.stats())

    monkeypatch.setattr(Dataset, "write_parquet", written)
    monkeypatch.setattr("projects_vil.inference.on_ray.ROWS_PER_TASK", 1024)
    for run in range(2):
        (tmp_path / "list.txt").write_text("\n".join(f"{run}/{number}.png" for number in range(3000)))
        predict_on_ray(trained_run, tmp_path / "list.txt", tmp_path / "out", part_size=1024, **ONE_WORKER)
        found = re.search(r"_Worker\).*?rows per task: \d+ min, (\d+) max", statistics[run], re.DOTALL)
        assert 0 < int(found[1]) <= 512


@pytest.mark.parametrize("cluster", [{"num_cpus": 1, "num_gpus": 2}], indirect=True)
@pytest.mark.parametrize("name", ["list.txt", "shard-{0..2}.tar"])
def test_workers_take_the_gpus_of_a_cluster(name, inputs, cluster, trained_run, tmp_path, monkeypatch):
    """The GPUs exist only for Ray. The detectors run on the CPU of this machine."""
    predict_here(trained_run, inputs / name, tmp_path / "here")
    only_on_gpus = ["MODEL.TRANSFORMER.ATTENTION_BACKEND", "triton"]
    options = {"num_workers": None, "workers_per_gpu": 2 if name == "list.txt" else 1}
    predict_on_ray(trained_run, inputs / name, tmp_path / "there", overrides=only_on_gpus, **options)
    assert_same_rows(tmp_path / "there", tmp_path / "here")
    next((tmp_path / "there").glob("*.parquet")).unlink()
    monkeypatch.setattr("projects_vil.inference.on_ray.ROWS_PER_TASK", 16)
    monkeypatch.setattr("projects_vil.inference.image_listing.PART_BYTES", 200)
    monkeypatch.setattr("projects_vil.inference.on_ray.PARTS_PER_RUN", 2)
    predict_on_ray(trained_run, inputs / name, tmp_path / "there", overrides=only_on_gpus)
    assert_same_rows(tmp_path / "there", tmp_path / "here")
    shared = {"num_workers": (5, 5), "workers_per_gpu": 2}
    for options, named in (({"num_workers": (3, 3)}, "for 2"), (shared, "for 4"), ({"device": "cpu"}, "for 0")):
        with pytest.raises(ConfigError, match=f"room {named} workers"):
            predict_on_ray(trained_run, inputs / name, tmp_path / "other", **options)


def test_temporary_errors_are_predicted_again(inputs, cluster, trained_run, tmp_path):
    """The server is down in the first run."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=inputs)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler, bind_and_activate=False)
    server.server_bind()
    paths = [str(inputs / "photos/00.png"), f"http://127.0.0.1:{server.server_address[1]}/photos/01.png"]
    assert predict_on_ray(trained_run, paths, tmp_path / "out", **ONE_WORKER).num_skipped == 1
    assert "temporary error" in rows_of(tmp_path / "out")[paths[1]]["error"]
    server.server_activate()
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert predict_on_ray(trained_run, paths, tmp_path / "out", **ONE_WORKER).num_images == 2
        server.shutdown()
    assert rows_of(tmp_path / "out").keys() == {"00.png", paths[1]}
    with tarfile.open(tmp_path / "empty.tar", "w") as tar:
        tar.add(inputs / "list.txt", "list.txt")
    assert "has no images" in message(predict_on_ray, trained_run, tmp_path / "empty.tar", tmp_path / "other")
    os.utime(tmp_path / "empty.tar", (0, 0))
    assert "empty.tar changed" in message(predict_on_ray, trained_run, tmp_path / "empty.tar", tmp_path / "other")
