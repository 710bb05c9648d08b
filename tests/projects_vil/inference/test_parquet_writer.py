"""Parquet part files: rows equal COCO results, and a resumed run writes the same files."""

import errno
import json
import os
import shutil
import signal
import tarfile
import time
from unittest.mock import Mock

import numpy as np
import pytest

from projects_vil import Detector
from projects_vil.inference import predict
from tests.projects_vil.helpers import contents_of, message, start_tool
from tests.projects_vil.inference.helpers import HalfRunner, assert_same, picture, read, results_of, save, save_run

pytest.importorskip("pyarrow")

from pyarrow import parquet

from projects_vil.inference.parquet_writer import SCHEMA, write_part
from tests.selection import slow_except

NUM_IMAGES = int(os.environ.get("NUM_IMAGES", "300"))  # of the slow test


@pytest.fixture
def photos(tmp_path):
    """13 images of three sizes, and an invalid file in the third of five parts."""
    for number in range(13):
        save(tmp_path / f"in/{number:02}.png", picture(40 + 8 * (number % 3), 60, bright=("left", "right")[number % 2]))
    (tmp_path / "in/06x.png").write_text("not an image")
    return tmp_path / "in"


def run(photos, output, runner=None, **options) -> str:
    """Predict and return the lines of the summary."""
    options = {"part_size": 3, "batch_size": 2, "file_format": "parquet"} | options
    summary = predict(Detector(runner or HalfRunner()), photos, output, **options)
    return "; ".join(line.removeprefix(f"{output}: ") for line in summary.lines)


@pytest.mark.parametrize("name", slow_except(["retinanet", "mask_rcnn"], ["mask_rcnn"]))
def test_rows_equal_coco_results(photos, tmp_path, name):
    (tmp_path / "run").mkdir()
    save_run(tmp_path / "run", name, "TEST.DETECTIONS_PER_IMAGE", "5")
    detector = Detector.load(tmp_path / "run", device="cpu")
    predict(detector, photos, tmp_path / "coco", drawings=False)
    results, images = read(tmp_path / "coco")
    summary = predict(detector, photos, tmp_path / "out", file_format="parquet", part_size=8)
    assert (summary.num_images, summary.num_skipped, summary.num_detections) == (13, 1, len(results))
    assert summary.lines[0].endswith(f"out: 14 images, 1 error, {len(results)} detections, 2 parts")
    tables = [parquet.read_table(path) for path in sorted((tmp_path / "out").glob("part-*.parquet"))]
    assert len(tables) == 2 and all(table.schema.equals(SCHEMA) for table in tables)
    assert json.loads(tables[0].schema.metadata[b"categories"]) == images["categories"]
    rows = [row for table in tables for row in table.to_pylist()]
    images_by_id = {image["id"]: image["file_name"] for image in images["images"]}
    sizes = [(image["height"], image["width"]) for image in images["images"]]
    assert sizes == [(row["height"], row["width"]) for row in rows if not row["error"]]
    (bad,) = (row for row in rows if row["error"])
    assert (bad["file_name"], bad["error"], bad["height"]) == ("06x.png", images["skipped"][0]["reason"], None)
    assert_same(results_of(rows), [result | {"image_id": images_by_id[result["image_id"]]} for result in results])


def test_only_incomplete_parts_are_written_again(photos, tmp_path):
    run(photos, tmp_path / "out")
    expected = contents_of(tmp_path / "out")
    (tmp_path / "out/part-000001.parquet").unlink()
    (tmp_path / "out/part-000003.parquet").write_bytes(expected["part-000003.parquet"][:-1])
    # One bit of the scores
    changed, column = bytearray(expected["part-000002.parquet"]), SCHEMA.names.index("scores")
    scores = parquet.read_metadata(tmp_path / "out/part-000002.parquet").row_group(0).column(column)
    changed[scores.dictionary_page_offset + scores.total_compressed_size - 1] ^= 1
    (tmp_path / "out/part-000002.parquet").write_bytes(changed)
    for num_images in (8, 0):
        runner = HalfRunner()
        assert run(photos, tmp_path / "out", runner) == "14 images, 1 error, 13 detections, 5 parts"
        assert sum(map(len, runner.batches)) == num_images
        assert contents_of(tmp_path / "out") == expected


def test_parts_that_cannot_be_read_are_kept(photos, tmp_path, monkeypatch):
    run(photos, tmp_path / "out")
    path = tmp_path / "out/part-000001.parquet"
    parquet.write_table(parquet.read_table(path).drop_columns("masks"), path)
    before = contents_of(tmp_path / "out")
    assert "part-000001.parquet': it has other columns" in message(run, photos, tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(PermissionError):
        patch.setattr(parquet, "read_table", Mock(side_effect=PermissionError(errno.EACCES, "denied")))
        run(photos, tmp_path / "out")
    assert contents_of(tmp_path / "out") == before
    # The third part has an invalid image.
    monkeypatch.setattr(f"{write_part.__module__}.report_skipped", lambda item: shutil.rmtree(tmp_path / "new"))
    assert "new' was deleted" in message(run, photos, tmp_path / "new")


def test_shards_share_an_output(photos, tmp_path):
    for number in range(3):
        run(photos, tmp_path / "out", shard=(number, 3))
    rows = [row for path in (tmp_path / "out").glob("*.parquet") for row in parquet.read_table(path).to_pylist()]
    assert sorted(row["file_name"] for row in rows) == sorted(path.name for path in photos.iterdir())
    assert "shards" in message(run, photos, tmp_path / "out")
    assert "3/3" in message(run, photos, tmp_path / "out", shard=(3, 3))


TARS = {"0.tar": 4, "1.tar": 6, "2.tar": 0, "3.tar": 1}
ALL_TARS = "11 images, 0 errors, 11 detections, 7 parts; 4 of 4 tar files complete"


@pytest.fixture
def tars(photos, tmp_path):
    """Tar files with an incomplete part, with two full parts, without images, and with one image."""
    for name, number in TARS.items():
        pack(photos, tmp_path / name, number)
    return tmp_path / "{0..3}.tar"


def pack(photos, path, number, *, first=0):
    with tarfile.open(path, "w") as tar:
        for image in sorted(photos.glob("*[0-9].png"))[first : first + number]:
            tar.add(image, image.name)
        tar.add(photos / "06x.png", "text.txt")


def entries_of(output) -> dict:
    """Return the manifest entry of each part of a tar file."""
    paths = output.glob("tar-*.parquet")
    return {path: json.loads(parquet.read_schema(path).metadata[b"archive"]) for path in paths}


def test_shards_of_tar_files_share_an_output(tars, tmp_path):
    first = run(tars, tmp_path / "out", shard=(0, 2))
    assert any(f"{number} of 4 tar files complete; incomplete: " in first for number in (1, 2, 3))
    assert run(tars, tmp_path / "out", shard=(1, 2)).endswith("; 4 of 4 tar files complete")
    entries = entries_of(tmp_path / "out")
    assert {one["name"]: one["images"] for one in entries.values() if one["status"] == "complete"} == TARS
    names = [name for path in entries for name in parquet.read_table(path)["file_name"].to_pylist()]
    assert len(names) == len(set(names)) == 11
    next(path for path, one in entries.items() if (one["name"], one["images"]) == ("1.tar", 3)).unlink()
    assert run(tars, tmp_path / "out", shard=(0, 2)).endswith("; 3 of 4 tar files complete; incomplete: 1.tar")
    assert run(tars, tmp_path / "out", shard=(1, 2)).endswith("; 4 of 4 tar files complete")


@pytest.mark.parametrize("is_remote", [False, True])
def test_finished_tar_files_are_not_read_again(tars, tmp_path, request, is_remote):
    source = tars
    if is_remote:
        pytest.importorskip("aiohttp", reason="fsspec reads HTTP by aiohttp")
        source = f"{request.getfixturevalue('served')}/{tars.name}"
    assert run(source, tmp_path / "out") == ALL_TARS
    expected = contents_of(tmp_path / "out")
    for name in TARS:
        before = (tmp_path / name).stat()
        (tmp_path / name).write_bytes(bytes(before.st_size))
        os.utime(tmp_path / name, ns=(before.st_mtime_ns, before.st_mtime_ns))
    runner = HalfRunner()
    assert run(source, tmp_path / "out", runner) == ALL_TARS
    assert not runner.batches and contents_of(tmp_path / "out") == expected


@pytest.mark.parametrize("before", ["cut", "missing", "shorter", "longer"])
def test_a_tar_file_that_has_changed_is_predicted_again(tars, photos, tmp_path, before):
    """The output is as if it were new. Complete parts of other tar files are not predicted again."""
    path = tmp_path / "1.tar"
    content = path.read_bytes()
    pack(photos, path, {"shorter": 1, "longer": 9}.get(before, 6), first=1)
    if before == "cut":
        path.write_bytes(content[: len(content) // 3])
    elif before == "missing":
        path.unlink()
    for _ in range(2):
        is_damaged = before in ("cut", "missing")
        line = run(tars, tmp_path / "out")
        assert line.endswith("3 of 4 tar files complete; incomplete: 1.tar" if is_damaged else "4 tar files complete")
        assert is_damaged == ("1 error" in line)
    entries, runner = entries_of(tmp_path / "out"), HalfRunner()
    next(part for part, one in entries.items() if (one["name"], one["images"]) == ("0.tar", 4)).unlink()
    path.write_bytes(content)
    assert run(tars, tmp_path / "out", runner) == run(tars, tmp_path / "new") == ALL_TARS
    assert sum(map(len, runner.batches)) == 6 + 1
    assert contents_of(tmp_path / "out") == contents_of(tmp_path / "new")


CHANGED = "dtype was None, and now it is bfloat16; score_threshold was 0.0, and now it is 0.5"


@pytest.mark.parametrize(
    "options, changed, content, named",
    [
        ({"part_size": 4}, "in/00.png", None, "part_size"),
        ({"weights": np.__file__}, "in/00.png", None, "model"),
        ({"score_threshold": 0.5, "dtype": "bfloat16"}, "in/00.png", None, CHANGED),
        ({}, "in/04.png", None, "part-000001.parquet"),
        ({}, "in/99.png", "", "part-000004.parquet"),
    ],
)
def test_parts_of_another_model_or_input_are_not_changed(photos, tmp_path, options, changed, content, named):
    run(photos, tmp_path / "out")
    (tmp_path / changed).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / changed).write_text(content)
    before, runner = contents_of(tmp_path / "out"), HalfRunner()
    vars(runner).update(options)
    assert named in message(run, photos, tmp_path / "out", runner, part_size=options.get("part_size", 3))
    assert contents_of(tmp_path / "out") == before


def test_files_of_the_same_names_in_another_folder(photos, tmp_path):
    run([photos / "00.png"], tmp_path / "out")
    other = photos.rename(tmp_path / "other")
    assert f"input was files in {photos}, and" in message(run, [other / "00.png"], tmp_path / "out")


@pytest.mark.slow
def test_a_run_that_is_killed_three_times(tmp_path):
    """NUM_IMAGES=100000 pytest -m slow -k killed_three_times tests/projects_vil/inference/test_parquet_writer.py"""
    (tmp_path / "run").mkdir()
    save_run(tmp_path / "run", "retinanet", "TEST.DETECTIONS_PER_IMAGE", "10")
    rng = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        pixels = rng.integers(0, 255, (8, 6 + number % 3, 3), np.uint8).repeat(8, 0).repeat(8, 1)
        save(tmp_path / f"in/{number // 1000}/{number:06}.png", pixels)
    (tmp_path / "in/0/000007.png").write_text("not an image")
    with tarfile.open(tmp_path / "in/images.tar", "w") as tar:
        for path in sorted(tmp_path.glob("in/*/*.png"))[::2]:
            tar.add(path, path.name)
            path.unlink()

    def start(output):
        arguments = ["--config-file", tmp_path / "run/config.yaml", "--weights", tmp_path / "run/model_final.pth"]
        arguments += ["--input", tmp_path / "in", "--output", output, "--batch", 4, "--device", "cpu"]
        arguments += ["--format", "parquet", "--part-size", NUM_IMAGES // 20]
        return start_tool("predict.py", *arguments, folder=tmp_path)

    for num_parts in (3, 8, 14):
        process = start(tmp_path / "killed")
        while len(list((tmp_path / "killed").glob("*.parquet"))) < num_parts:
            assert process.is_alive(), (tmp_path / "stderr").read_text()
            time.sleep(0.01)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    for output in ("killed", "uninterrupted"):
        process = start(tmp_path / output)
        process.join()
        assert process.exitcode == 2, (tmp_path / "stderr").read_text()
    killed, uninterrupted = contents_of(tmp_path / "killed"), contents_of(tmp_path / "uninterrupted")
    # A killed process leaves its temporary file.
    assert {name: killed[name] for name in killed if not name.endswith(".partial")} == uninterrupted
