"""URLs are fetched at the same time, with a timeout, and again after an error that may be temporary."""

import tarfile

import numpy as np
import pytest

from projects_vil import Detector
from projects_vil.inference import image_loading, predict
from projects_vil.inference.image_loading import ImageBatches, ImageSource, Skipped
from tests.projects_vil.inference.conftest import Server
from tests.projects_vil.inference.helpers import HalfRunner, picture, save

pytest.importorskip("aiohttp", reason="fsspec reads HTTP by aiohttp")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Wait for a few milliseconds between attempts."""
    monkeypatch.setattr(image_loading.random, "uniform", lambda low, high: 0.01)


def load(served: str, *names: str) -> list:
    sources = [ImageSource(f"{served}/{name}", name, number) for number, name in enumerate(names, start=1)]
    return [item for batch in ImageBatches(sources).batches(HalfRunner(), 4) for item in batch]


def test_requests_run_at_the_same_time(served, tmp_path):
    """The server answers none of the 16 requests before all have arrived."""
    names = [f"slow/{number}.png" for number in range(16)]
    for name in names:
        save(tmp_path / name, picture(40, 60))
    assert [item.entry["file_name"] for item in load(served, *names)] == names


def test_only_errors_that_may_be_temporary_are_tried_again(served, tmp_path, monkeypatch):
    monkeypatch.setattr(image_loading, "REQUEST_TIMEOUT", 0.5)
    save(tmp_path / "flaky/a.png", picture(40, 60))
    Server.requests.clear()
    names = ["flaky/a.png", "missing.png", "flaky/missing.png", "silent/a.png"]
    items = sorted(load(served, *names), key=lambda item: item.index)
    assert [isinstance(item, Skipped) for item in items] == [False, True, True, True]
    assert (items[0].image.permute(1, 2, 0).numpy().mean() - np.mean(picture(40, 60))) < 8
    assert [Server.requests[f"/{name}"] for name in names] == [2, 1, 2, image_loading.NUM_ATTEMPTS]
    assert "missing.png" in items[1].reason and "Timeout" in items[3].reason
    assert not any("secret" in item.reason for item in items[1:])


def test_a_resume_reads_tar_files_with_an_error_again(served, tmp_path):
    """Several jobs would leave tar files out if a server were down for some of them."""
    pytest.importorskip("pyarrow")
    save(tmp_path / "a.png", picture(40, 60))
    for name in ("0.tar", "flaky/1.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with tarfile.open(tmp_path / name, "w") as tar:
            tar.add(tmp_path / "a.png", "a.png")
    urls = [f"{served}/0.tar", f"{served}/flaky/1.tar", "http://127.0.0.1:9/2.tar"]
    for number in (1, 2):
        runner = HalfRunner()
        summary = predict(Detector(runner), urls, tmp_path / "out", file_format="parquet")
        assert (summary.num_images, summary.num_skipped, sum(map(len, runner.batches))) == (number, 3 - number, 1)
        assert f"{number} of 3 tar files complete; incomplete: " in summary.lines[1]
    with pytest.raises(OSError, match="temporary error"):
        predict(Detector(runner), urls, tmp_path / "other", file_format="parquet", shard=(0, 2))


def test_a_resume_predicts_urls_with_a_temporary_error_again(served, tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(image_loading, "NUM_ATTEMPTS", 1)
    names = ["a.png", "flaky/b.png", "missing.png"]
    for name in names[:2]:
        save(tmp_path / name, picture(40, 60))
    (tmp_path / "list.txt").write_text("\n".join(f"{served}/{name}" for name in names))
    runs = []
    for _ in range(3):
        runner = HalfRunner()
        predict(Detector(runner), tmp_path / "list.txt", tmp_path / "out", file_format="parquet", part_size=4)
        (path,) = tmp_path.glob("out/*.parquet")
        rows = parquet.read_table(path).to_pylist()
        runs.append((sum(map(len, runner.batches)), [(row["error"] or "ok").split(":")[0] for row in rows]))
        assert [row["file_name"].rpartition("/")[2] for row in rows] == ["a.png", "b.png", "missing.png"]
    lost = runs[0][1][2]
    assert runs == [(1, ["ok", "temporary error", lost]), (1, ["ok", "ok", lost]), (0, ["ok", "ok", lost])]
