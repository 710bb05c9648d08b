"""Whatever the files are: batches of one size, upright, and what cannot be read is named."""

import json
import os

import cv2
import numpy as np
import pytest
from PIL import Image

from backbones import InputError
from projects_vil.inference import Detector
from projects_vil.inference.drawings import VideoDrawings
from projects_vil.inference.predict import run
from projects_vil.inference.sources import Video, read_ahead
from tests.projects_vil.inference.helpers import HalfFinder, picture, read, run_on, save, write_video


def test_only_images_of_one_resized_size_share_a_batch(tmp_path):
    sizes = [(40, 60), (64, 50), (80, 120), (20, 30), (64, 50), (40, 61), (160, 240)]
    for number, size in enumerate(sizes):
        save(tmp_path / f"in/{number}.png", picture(*size, bright="left" if number % 2 else "right"))
    runner = HalfFinder()
    run_on(tmp_path / "in", tmp_path / "out", runner=runner, batch_size=3)
    assert sorted(map(len, runner.batches)) == [1, 1, 2, 3]
    results, images = read(tmp_path / "out")
    assert [result["image_id"] for result in results] == [1, 2, 3, 4, 5, 6, 7]
    assert [result["category_id"] for result in results] == [7, 3, 7, 3, 7, 3, 7]
    assert [(image["height"], image["width"]) for image in images["images"]] == sizes
    assert results[0]["bbox"] == [30, 0, 30, 40] and results[1]["bbox"] == [0, 0, 25, 64]


def test_unreadable_files_are_reported_and_the_others_done(tmp_path, capsys):
    source = tmp_path / "in"
    save(source / "b.png", picture(40, 60))
    save(source / "below/deep.png", picture(40, 60, bright="right")[..., 0].astype(np.uint16) * 257)
    save(source / "cut.jpg", np.random.default_rng(0).integers(0, 255, (90, 70, 3), np.uint8))
    (source / "cut.jpg").write_bytes((source / "cut.jpg").read_bytes()[:-1500])
    (source / "empty.PNG").write_bytes(b"")
    (source / "text.jpeg").write_text("this is no image")
    (source / "notes.txt").write_text("left alone")
    (source / "._hidden.jpg").write_text("left alone")
    save(source / "thin.png", picture(1, 4000))
    summary = run_on(source, tmp_path / "out", draw=True)
    results, images = read(tmp_path / "out")
    assert [image["file_name"] for image in images["images"]] == ["b.png", "below/deep.png"]
    assert [(r["image_id"], r["category_id"]) for r in results] == [(1, 3), (2, 7)]
    assert results[1]["score"] == pytest.approx(200 / 255, abs=0.01)
    assert [item.name for item in summary.skipped] == ["cut.jpg", "empty.PNG", "text.jpeg", "thin.png"]
    assert [item["file_name"] for item in images["skipped"]] == [item.name for item in summary.skipped]
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == sorted(f"skipped {item.name}: {item.reason}" for item in summary.skipped)
    assert "truncated" in summary.skipped[0].reason and summary.skipped[1].reason == "it is empty"
    assert summary.lines()[-1] == "skipped 4 files that could not be read"
    drawn = {path.relative_to(tmp_path / "out/drawings").as_posix() for path in (tmp_path / "out").rglob("*.png")}
    assert drawn == {"b.png", "below/deep.png"}


def test_a_pipe_is_skipped_and_not_waited_for(tmp_path):
    save(tmp_path / "in/a.png", picture(40, 60))
    os.mkfifo(tmp_path / "in/pipe.jpg")
    (tmp_path / "in/nowhere.jpg").symlink_to(tmp_path / "absent.jpg")
    (tmp_path / "in/link.png").symlink_to(tmp_path / "in/a.png")
    summary = run_on(tmp_path / "in", tmp_path / "out")
    assert [(item.name, item.reason) for item in summary.skipped] == [
        ("nowhere.jpg", "No such file or directory"),
        ("pipe.jpg", "it is no regular file"),
    ]
    assert summary.done == 2 and len(read(tmp_path / "out")[0]) == 2
    assert run_on(tmp_path / "in/pipe.jpg", tmp_path / "out").skipped[0].name == "pipe.jpg"


def test_nothing_readable_is_still_a_result(tmp_path):
    (tmp_path / "text.jpg").write_text("this is no image")
    summary = run_on(tmp_path / "text.jpg", tmp_path / "out", draw=True)
    assert read(tmp_path / "out") == ([], json.loads((tmp_path / "out/images.json").read_text()))
    assert (summary.done, len(summary.skipped)) == (0, 1) and not (tmp_path / "out/drawings").exists()


@pytest.mark.parametrize("orientation, bright", [(1, 3), (2, 7), (3, 7), (6, None)])
def test_turned_images_are_predicted_upright(tmp_path, orientation, bright):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(picture(40, 60)).save(tmp_path / "turned.jpg", exif=exif)
    run_on(tmp_path / "turned.jpg", tmp_path / "out")
    results, images = read(tmp_path / "out")
    size = (60, 40) if orientation == 6 else (40, 60)
    assert (images["images"][0]["height"], images["images"][0]["width"]) == size
    assert bright in (None, results[0]["category_id"])
    assert results[0]["bbox"][2:] == [size[1] / 2, size[0]]


def test_the_output_folder_is_not_read_again(tmp_path):
    save(tmp_path / "in/a.png", picture(40, 60))
    for _ in range(2):
        assert run_on(tmp_path / "in", tmp_path / "in/out", draw=True).done == 1
    assert (tmp_path / "in/out/drawings/a.png").exists()


def test_video(tmp_path):
    write_video(tmp_path / "clip.avi", 7)
    video, runner = Video(tmp_path / "clip.avi"), HalfFinder()
    output = tmp_path / "out"
    output.mkdir()
    drawer = VideoDrawings(output / "drawings", "clip.avi", video.frame_rate)
    summary = run(video, Detector(runner), output, drawer, batch_size=3)
    results, images = read(output)
    assert (summary.unit, summary.done, summary.skipped) == ("frame", 7, ())
    assert [len(batch) for batch in runner.batches] == [3, 3, 1]
    assert [result["category_id"] for result in results] == [7, 3, 3, 7, 3, 3, 7]
    assert images["images"][3] == {
        **{"id": 4, "file_name": "clip.avi", "frame": 3, "seconds": 0.375},
        **{"height": 40, "width": 60},
    }
    assert results[3]["score"] == pytest.approx(100 / 255, abs=0.02)
    drawn = cv2.VideoCapture(str(output / "drawings/clip.mp4"))
    assert drawn.get(cv2.CAP_PROP_FRAME_COUNT) == 7 and drawn.get(cv2.CAP_PROP_FPS) == 8
    assert [path.name for path in (output / "drawings").iterdir()] == ["clip.mp4"]


def test_videos_that_end_early_or_are_none(tmp_path):
    write_video(tmp_path / "clip.avi", 30)
    content = (tmp_path / "clip.avi").read_bytes()
    (tmp_path / "cut.avi").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.avi").write_text("this is no video")
    summary = run(Video(tmp_path / "cut.avi"), Detector(HalfFinder()), tmp_path, None)
    assert 5 < summary.done < 25
    assert f"only {summary.done} of its 30 frames can be read" in summary.skipped[0].reason
    assert len(read(tmp_path)[0]) == summary.done
    summary = run(Video(tmp_path / "text.avi"), Detector(HalfFinder()), tmp_path, None)
    assert (summary.done, summary.skipped[0].reason) == (0, "it is no video that OpenCV can read here")


def test_reading_ahead_is_bounded_and_in_order():
    made = []

    def numbers():
        for number in range(20):
            made.append(number)
            yield number

    taken = []
    for number in read_ahead(numbers(), depth=2):
        taken.append(number)
        assert len(made) <= len(taken) + 2
    assert taken == list(range(20))


def test_an_error_while_reading_ahead_arrives():
    def numbers():
        yield 1
        raise InputError("broken")

    ahead = read_ahead(numbers())
    assert next(ahead) == 1
    with pytest.raises(InputError, match="broken"):
        next(ahead)
