"""The examples with other libraries give the detections of the detector, and report a mistake in one line."""

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
from tests.projects_vil.helpers import ROOT
from tests.projects_vil.inference.helpers import save_run
from tests.selection import slow_except

NEEDED = {"export_coco": (), "sliced_sahi": ("sahi",), "track_supervision": ("supervision", "trackers")}


@pytest.fixture
def detectors(made_once) -> Callable[[str], Path]:
    """Return the folder of a small detector, with or without masks, with many detections in noise."""
    return lambda name: made_once(f"untrained_{name}", lambda folder: save_run(folder, name))


@pytest.fixture
def run(monkeypatch):
    """Run an example in this process, which has imported the slow packages, and return the printed lines."""

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
    """Return bright rectangles on black."""
    path.parent.mkdir(exist_ok=True)
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[10:40, 20:50] = (250, 30, 30)
    pixels[50:85, 90:140] = (30, 250, 30)
    Image.fromarray(pixels).save(path)
    return path


def threshold_of(found) -> float:
    """Return a threshold between the scores."""
    assert len(found) > 3
    return round(float(np.sort(found.scores)[-3]) - 1e-4, 6)


@pytest.mark.parametrize("name", slow_except(["retinanet", "mask_rcnn"], ["mask_rcnn"]))
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
    # If all frames are the same picture, there is one set of tracks.
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
    # ByteTrack confirms a track in its second frame.
    assert np.abs(frames[3] - cv2.imread(str(tmp_path / "frames/3.png"))).max() > 100
    [line] = run("track_supervision", detectors("retinanet"), video, again, *options)
    assert line.endswith(f"tracks in {again}")
    assert cv2.VideoCapture(str(again)).get(cv2.CAP_PROP_FRAME_COUNT) == 4


MISTAKES = [
    # The example, its three arguments, further arguments, and text in the error.
    ("export_coco", ("absent", "photos", "found.json"), (), "absent"),
    ("export_coco", ("DETECTOR", "absent", "found.json"), (), "absent"),
    ("export_coco", ("DETECTOR", "broken", "found.json"), (), "broken"),
    ("export_coco", ("DETECTOR", "photos", "link/a.png"), (), "link/a.png"),
    ("export_coco", ("DETECTOR", "photos", "found.json"), ("--threshold", "nan"), "threshold"),
    ("sliced_sahi", ("DETECTOR", "broken/a.png", "found.png"), (), "broken/a.png"),
    ("sliced_sahi", ("DETECTOR", "photos/a.png", "found.png"), ("--threshold", 2), "threshold"),
    ("sliced_sahi", ("DETECTOR", "photos/a.png", "link/a.png"), (), "output"),
    ("sliced_sahi", ("DETECTOR", "photos/a.png", "found.png"), ("--slice", 31), "--slice 31"),
    ("track_supervision", ("DETECTOR", "absent", "found.mp4"), (), "absent"),
    ("track_supervision", ("DETECTOR", "photos", "link/a.png"), (), "link/a.png"),
    ("track_supervision", ("DETECTOR", "photos", "found.mp4"), ("--threshold", -0.1), "-0.1"),
    # The first frame is truncated. The header is complete, so OpenCV can open the file.
    ("track_supervision", ("DETECTOR", "broken", "found.mp4"), (), "broken"),
    ("track_supervision", ("DETECTOR", "sizes", "found.mp4"), (), "frame 2"),
]


@pytest.mark.parametrize(("name", "arguments", "options", "named"), MISTAKES)
def test_a_mistake_is_one_line_and_changes_no_photo(name, arguments, options, named, run, detectors, tmp_path):
    path = photo(tmp_path / "photos/a.png")
    (tmp_path / "link").symlink_to(path.parent)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/a.png").write_bytes(path.read_bytes()[:60])
    for index in range(2):
        photo(tmp_path / f"sizes/{index}.png", 90 + 10 * index)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*")}
    detector, *files = arguments
    detector = detectors("retinanet") if detector == "DETECTOR" else tmp_path / detector
    with pytest.raises(SystemExit) as end:
        run(name, detector, *(tmp_path / file for file in files), *options)
    assert end.value.code.startswith("error: ") and named in end.value.code and "\n" not in end.value.code
    if name != "track_supervision":  # the tracks of the frames before a damaged one stay
        assert {file: file.read_bytes() for file in tmp_path.rglob("*.*")} == before
    assert path.read_bytes() == before[path]


def test_a_lower_threshold_than_the_detector_has(run, detectors, tmp_path):
    """The threshold of the detector keeps only the best detections. The argument replaces it."""
    path, few = photo(tmp_path / "photo.png"), tmp_path / "few"
    best = Detector.load(detectors("retinanet"))(path).scores[0]
    Detector.load(detectors("retinanet"), score_threshold=best - 1e-5).save_pretrained(few)
    lines = run("sliced_sahi", few, path, tmp_path / "found.png", "--threshold", best / 2)
    assert lines == run("sliced_sahi", detectors("retinanet"), path, tmp_path / "same.png", "--threshold", best / 2)
    assert len(lines) > 1


def test_a_photo_that_cannot_be_read_is_skipped(run, detectors, tmp_path, capsys):
    """Files that are not photos are ignored."""
    whole, broken = photo(tmp_path / "photos/b.png"), tmp_path / "photos/a.png"
    broken.write_bytes(whole.read_bytes()[:60])
    for name in ("notes.pdf", "film.mpg", "table.h5"):
        (tmp_path / "photos" / name).write_text("no photo")
    with pytest.raises(SystemExit) as end:
        run("export_coco", detectors("retinanet"), tmp_path / "photos", tmp_path / "found.json")
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(broken) in line
    content = json.loads((tmp_path / "found.json").read_text())
    assert [image["file_name"] for image in content["images"]] == ["b.png"] and content["annotations"]


@pytest.mark.parametrize("name, library", [(name, library) for name in NEEDED for library in NEEDED[name]])
def test_a_library_that_is_missing(name, library, monkeypatch):
    for needed in NEEDED[name]:
        monkeypatch.setitem(sys.modules, needed, None if needed == library else types.ModuleType(needed))
    with pytest.raises(SystemExit, match=f"^error: .*{library}.*: docs/hub.md"):
        runpy.run_path(str(ROOT / f"examples/{name}.py"), run_name="__main__")
