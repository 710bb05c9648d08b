"""The examples with other libraries: they give the detector's detections, and a mistake is one line."""

import contextlib
import io
import json
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from projects_vil import Detector
from projects_vil.checkpoint import Checkpointer
from tests.projects_vil.helpers import ROOT, small_config, untrained_detector

NEEDED = {"export_coco": (), "sliced_sahi": ("sahi",), "track_supervision": ("supervision", "trackers")}
SUFFIXES = {"export_coco": ".json", "sliced_sahi": ".png", "track_supervision": ".mp4"}
LENGTH = 60


@pytest.fixture(scope="module")
def detectors(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a small detector, with masks or without, that has many detections in noise."""
    folder = tmp_path_factory.mktemp("detectors")

    def make(name: str) -> Path:
        run = folder / name
        if not run.exists():
            run.mkdir()
            cfg = small_config(name)
            (run / "config.yaml").write_text(cfg.dump())
            Checkpointer(untrained_detector(cfg), str(run), cfg=cfg).save("model_final")
        return run

    return make


@pytest.fixture
def run(monkeypatch):
    """An example in this process, which has imported what takes time -> the lines that it prints."""

    def start(name: str, *args: object) -> list[str]:
        for library in NEEDED[name]:
            pytest.importorskip(library, reason=f"{library} is not installed: pip install -e '.[examples]'")
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(ROOT / f"examples/{name}.py"), run_name="__main__")
        return printed.getvalue().splitlines()

    return start


def photo(path: Path, height: int = 90, width: int = 150) -> Path:
    """Bright rectangles on black."""
    path.parent.mkdir(exist_ok=True)
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[10:40, 20:50] = (250, 30, 30)
    pixels[50:85, 90:140] = (30, 250, 30)
    Image.fromarray(pixels).save(path)
    return path


def threshold_of(found) -> float:
    """A threshold that some pass and some do not."""
    assert len(found) > 3
    return round(float(np.sort(found.scores)[-3]) - 1e-4, 6)


@pytest.mark.parametrize("name", NEEDED)
def test_an_example_is_short(name):
    assert len((ROOT / f"examples/{name}.py").read_text().splitlines()) < LENGTH


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn"])
def test_a_coco_file_has_the_detections_of_the_detector(name, run, detectors, tmp_path):
    files = [photo(tmp_path / f"photos/{letter}.png", 90 + 10 * index) for index, letter in enumerate("ba")]
    (tmp_path / "photos/notes.txt").write_text("no photo")
    detector = Detector.load(detectors(name))
    threshold = threshold_of(detector(files[0]))
    output = tmp_path / "found.json"
    [line] = run("export_coco", detectors(name), tmp_path / "photos", output, "--threshold", threshold)

    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(output))
    assert [image["file_name"] for image in coco.loadImgs(coco.getImgIds())] == ["a.png", "b.png"]
    assert line.startswith(f"{len(coco.anns)} objects in 2 photos")
    assert [category["name"] for category in coco.loadCats(coco.getCatIds())] == list(detector.names)
    found = detector(files[0])
    expected = [item for item in found.to_coco(2) if item["score"] >= threshold]
    written = coco.loadAnns(coco.getAnnIds(imgIds=[2]))
    assert 0 < len(expected) == len(written)
    for item, annotation in zip(expected, written, strict=True):
        assert item == {key: annotation[key] for key in item}
        if name == "mask_rcnn":
            mask = coco.annToMask(annotation)
            assert mask.shape == (90, 150) and mask.sum() == annotation["area"]
        else:
            assert annotation["area"] == pytest.approx(item["bbox"][2] * item["bbox"][3])


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn"])
def test_slices_come_together(name, run, detectors, tmp_path):
    path, output = photo(tmp_path / "photo.png"), tmp_path / "found.png"
    lines = run("sliced_sahi", detectors(name), path, output, "--slice", 64, "--threshold", 0.01)
    assert lines
    for line in lines:
        *_, score, left, top, right, bottom = line.split()
        assert float(score) >= 0.01
        assert 0 <= float(left) < float(right) <= 150 and 0 <= float(top) < float(bottom) <= 90
    # Slices begin at 0 and 51 or more: detections beyond the first slice have been shifted by their slice's position.
    assert max(float(line.split()[-2]) for line in lines) > 64
    before, after = cv2.imread(str(path)), cv2.imread(str(output))
    assert before.shape == after.shape and (before != after).any()


def test_one_slice_is_the_detector(run, detectors, tmp_path):
    path = photo(tmp_path / "photo.png")
    best = Detector.load(detectors("retinanet"))(path)
    lines = run("sliced_sahi", detectors("retinanet"), path, tmp_path / "a.png", "--threshold", best.scores[0] - 1e-5)
    *_, score, left, top, right, bottom = lines[0].split()
    assert float(score) == pytest.approx(best.scores[0], abs=0.006)
    clipped = np.clip(best.boxes[0], 0, (150, 90, 150, 90))
    assert [float(edge) for edge in (left, top, right, bottom)] == pytest.approx(clipped, abs=1)


def test_a_track_goes_on(run, detectors, tmp_path):
    # The same picture in all frames gives one set of tracks.
    for index in range(4):
        photo(tmp_path / f"frames/{index}.png")
    (tmp_path / "frames/notes.txt").write_text("no frame")
    threshold = threshold_of(Detector.load(detectors("retinanet"))(tmp_path / "frames/0.png"))
    video, again = tmp_path / "tracked.mp4", tmp_path / "again.mp4"
    options = ("--threshold", threshold)
    [line] = run("track_supervision", detectors("retinanet"), tmp_path / "frames", video, *options, "--fps", 5)
    assert 1 <= int(line.split()[0]) <= 3 and line.endswith(f"tracks in {video}")
    capture = cv2.VideoCapture(str(video))
    assert capture.get(cv2.CAP_PROP_FPS) == 5 and capture.get(cv2.CAP_PROP_FRAME_COUNT) == 4
    frames = [capture.read()[1].astype(int) for _ in range(4)]
    # ByteTrack confirms a track with its second frame.
    assert np.abs(frames[3] - cv2.imread(str(tmp_path / "frames/3.png"))).max() > 100
    [line] = run("track_supervision", detectors("retinanet"), video, again, *options)
    assert line.endswith(f"tracks in {again}")
    assert cv2.VideoCapture(str(again)).get(cv2.CAP_PROP_FRAME_COUNT) == 4


MISTAKES = {
    "no detector": "there is no file or folder ",
    "another input": "README.md",
    "no output": "absent/out",
}
NO_INPUT = {
    "export_coco": "there is no folder ",
    "sliced_sahi": "cannot read the image ",
    "track_supervision": "cannot read a video from ",
}


@pytest.mark.parametrize("mistake", [*MISTAKES, "no input"])
@pytest.mark.parametrize("name", NEEDED)
def test_a_mistake_is_one_line(name, mistake, run, detectors, tmp_path):
    source, output = photo(tmp_path / "photos/photo.png"), tmp_path / f"found{SUFFIXES[name]}"
    arguments = {
        "detector": detectors("retinanet"),
        "source": source if name == "sliced_sahi" else source.parent,
        "output": output,
    }
    changed = {
        "no detector": {"detector": tmp_path / "absent"},
        "no input": {"source": tmp_path / "absent"},
        "another input": {"source": ROOT / "README.md"},
        "no output": {"output": tmp_path / f"absent/out{output.suffix}"},
    }[mistake]
    with pytest.raises(SystemExit) as end:
        run(name, *(arguments | changed).values())
    message = NO_INPUT[name] + str(tmp_path / "absent") if mistake == "no input" else MISTAKES[mistake]
    assert end.value.code.startswith("error: ") and message in end.value.code and "\n" not in end.value.code
    assert not output.exists()


@pytest.mark.parametrize("name", NEEDED)
def test_photos_are_never_overwritten(name, run, detectors, tmp_path):
    path = photo(tmp_path / "photos/photo.png")
    before = path.read_bytes()
    with pytest.raises(SystemExit, match="^error: .*output"):
        # The same file by another name.
        (tmp_path / "link").symlink_to(path.parent)
        output = tmp_path / "link" / path.name
        run(name, detectors("retinanet"), path if name == "sliced_sahi" else path.parent, output)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("threshold", [-0.1, 2, "nan"])
def test_a_threshold_out_of_range(name, threshold, run, detectors, tmp_path):
    path, output = photo(tmp_path / "photos/photo.png"), tmp_path / f"found{SUFFIXES[name]}"
    source = path if name == "sliced_sahi" else path.parent
    with pytest.raises(SystemExit, match=f"error: .*{threshold}") as end:
        run(name, detectors("retinanet"), source, output, "--threshold", threshold)
    assert "threshold" in end.value.code and not output.exists()


def test_a_lower_threshold_than_the_detector_has(run, detectors, tmp_path):
    """The detector's own threshold leaves out all but the best; the argument replaces it."""
    path, few = photo(tmp_path / "photo.png"), tmp_path / "few"
    best = Detector.load(detectors("retinanet"))(path).scores[0]
    Detector.load(detectors("retinanet"), score_threshold=best - 1e-5).save_pretrained(few)
    lines = run("sliced_sahi", few, path, tmp_path / "found.png", "--threshold", best / 2)
    assert lines == run("sliced_sahi", detectors("retinanet"), path, tmp_path / "same.png", "--threshold", best / 2)
    assert len(lines) > 1


@pytest.mark.parametrize("name", ["notes.pdf", "film.mpg", "table.h5"])
def test_other_files_among_the_photos_are_ignored(name, run, detectors, tmp_path):
    photo(tmp_path / "photos/a.png")
    (tmp_path / "photos" / name).write_text("no photo")
    [line] = run("export_coco", detectors("retinanet"), tmp_path / "photos", tmp_path / "found.json")
    assert "in 1 photos" in line


def test_a_photo_that_cannot_be_read_is_skipped(run, detectors, tmp_path, capsys):
    whole, broken = photo(tmp_path / "photos/b.png"), tmp_path / "photos/a.png"
    broken.write_bytes(whole.read_bytes()[:60])
    output = tmp_path / "found.json"
    with pytest.raises(SystemExit) as end:
        run("export_coco", detectors("retinanet"), tmp_path / "photos", output)
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"skipped {broken}: ")
    content = json.loads(output.read_text())
    assert [image["file_name"] for image in content["images"]] == ["b.png"] and content["annotations"]
    whole.unlink()
    output.unlink()
    with pytest.raises(SystemExit, match="^error: .*photos$"):
        run("export_coco", detectors("retinanet"), tmp_path / "photos", output)
    assert not output.exists()


@pytest.mark.parametrize("name, library", [(name, library) for name in NEEDED for library in NEEDED[name]])
def test_a_library_that_is_missing(name, library, monkeypatch):
    for needed in NEEDED[name]:
        monkeypatch.setitem(sys.modules, needed, None if needed == library else types.ModuleType(needed))
    with pytest.raises(SystemExit, match=f"^error: .*{library}.*: docs/hub.md"):
        runpy.run_path(str(ROOT / f"examples/{name}.py"), run_name="__main__")


@pytest.mark.parametrize("fps", [0, -3])
def test_frame_rates_below_1(fps, run, detectors, tmp_path):
    photo(tmp_path / "frames/0.png")
    with pytest.raises(SystemExit, match=f"error: .*--fps.* {fps}"):
        run("track_supervision", detectors("retinanet"), tmp_path / "frames", tmp_path / "out.mp4", "--fps", fps)


@pytest.mark.parametrize("damaged, message", [(0, "frames"), (1, "frame 2")])
def test_a_frame_that_is_cut_off(damaged, message, run, detectors, tmp_path):
    """The header of the file is complete, so OpenCV has a reader for it."""
    for number in range(2):
        path = photo(tmp_path / f"frames/{number}.png")
        if number == damaged:
            path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run("track_supervision", detectors("retinanet"), tmp_path / "frames", tmp_path / "out.mp4")


def test_frames_of_another_size(run, detectors, tmp_path):
    photo(tmp_path / "frames/0.png")
    photo(tmp_path / "frames/1.png", 100)
    with pytest.raises(SystemExit, match="frame 2"):
        run("track_supervision", detectors("retinanet"), tmp_path / "frames", tmp_path / "out.mp4")


@pytest.mark.parametrize("side", [0, -5, 31])
def test_slices_that_are_too_small(side, run, detectors, tmp_path):
    path = photo(tmp_path / "photo.png")
    with pytest.raises(SystemExit, match=f"--slice {side} "):
        run("sliced_sahi", detectors("retinanet"), path, tmp_path / "out.png", "--slice", side)
