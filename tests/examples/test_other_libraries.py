"""The examples with other libraries give the detections of the detector, and report a mistake in one line."""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from projects_vil import Detector
from projects_vil.inference import predict
from tests.projects_vil.helpers import Result, contents_of, message, run_tool
from tests.projects_vil.inference.helpers import save_run
from tests.selection import slow_except


@pytest.fixture
def detectors(made_once) -> Callable[[str], Path]:
    """Return the folder of a small detector, with or without masks, with many detections in noise."""
    return lambda name: made_once(f"untrained_{name}", lambda folder: save_run(folder, name))


def run(name: str, *args: object) -> Result:
    """Run an example."""
    if name == "sliced_sahi":
        pytest.importorskip("sahi", reason="sahi is not installed: pip install -e '.[examples]'")
    return run_tool(f"../examples/{name}.py", *args)


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
def test_a_coco_file_has_the_detections_of_the_detector(name, detectors, tmp_path):
    files = [photo(tmp_path / f"photos/{letter}.png", 90 + 10 * index) for index, letter in enumerate("ba")]
    (tmp_path / "photos/notes.txt").write_text("no photo")
    detector = Detector.load(detectors(name))
    threshold = threshold_of(detector(files[0]))
    output = tmp_path / "found.json"
    _, out, _ = run("export_coco", detectors(name), tmp_path / "photos", output, "--threshold", threshold)
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(output))
    assert [image["file_name"] for image in coco.loadImgs(coco.getImgIds())] == ["a.png", "b.png"]
    assert out.startswith(f"{len(coco.anns)} objects in 2 photos")
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
def test_detections_of_slices_are_merged(name, detectors, tmp_path):
    path, output = photo(tmp_path / "photo.png"), tmp_path / "found.png"
    lines = run("sliced_sahi", detectors(name), path, output, "--slice", 64, "--threshold", 0.01)[1].splitlines()
    for line in lines:
        *_, score, left, top, right, bottom = line.split()
        assert float(score) >= 0.01
        assert 0 <= float(left) < float(right) <= 150 and 0 <= float(top) < float(bottom) <= 90
    # Slices begin at 0 and 51 or more: detections beyond the first slice have been shifted by their slice's position.
    assert max(float(line.split()[-2]) for line in lines) > 64
    before, after = cv2.imread(str(path)), cv2.imread(str(output))
    assert before.shape == after.shape and (before != after).any()


def test_tracks(detectors, tmp_path):
    for library in ("supervision", "trackers"):
        pytest.importorskip(library, reason=f"{library} is not installed: pip install -e '.[track]'")
    # All frames are the same picture, so the tracks are the same too. A track has an id from its second frame on.
    for index in range(4):
        photo(tmp_path / f"frames/{index}.png")
        photo(tmp_path / f"sizes/{index}.png", 90 + 60 * (index % 2))
    detector = Detector.load(detectors("retinanet"))
    options = {"track": True, "score_threshold": threshold_of(detector(tmp_path / "frames/0.png")), "batch_size": 3}
    summary = predict(detector, tmp_path / "frames", tmp_path / "out", **options)
    tracks = [set() for _ in range(4)]
    for result in json.loads((tmp_path / "out/results.json").read_text()):
        if "track_id" in result:
            tracks[result["image_id"] - 1].add(result["track_id"])
    assert not tracks[0] and tracks[1] == tracks[2] == tracks[3] and len(tracks[3]) >= 1
    assert f", {len(tracks[3])} track" in summary.lines[0]
    frame, second = (cv2.imread(str(tmp_path / f"out/drawings/{index}.png")) for index in range(2))
    assert (frame != second).any()
    assert "1.png' has another size" in message(predict, detector, tmp_path / "sizes", tmp_path / "other", **options)


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
]


@pytest.mark.parametrize(("name", "arguments", "options", "named"), MISTAKES)
def test_a_mistake_is_one_line_and_changes_no_photo(name, arguments, options, named, detectors, tmp_path):
    path = photo(tmp_path / "photos/a.png")
    (tmp_path / "link").symlink_to(path.parent)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/a.png").write_bytes(path.read_bytes()[:60])
    before = contents_of(tmp_path)
    detector, *files = arguments
    detector = detectors("retinanet") if detector == "DETECTOR" else tmp_path / detector
    error, _, _ = run(name, detector, *(tmp_path / file for file in files), *options)
    assert error.startswith("error: ") and named in error and "\n" not in error and contents_of(tmp_path) == before


def test_a_lower_threshold_than_the_detector_has(detectors, tmp_path):
    """The threshold of the detector keeps only the best detections. The argument replaces it."""
    path, few = photo(tmp_path / "photo.png"), tmp_path / "few"
    best = Detector.load(detectors("retinanet"))(path).scores[0]
    Detector.load(detectors("retinanet"), score_threshold=best - 1e-5).save_pretrained(few)
    words = path, tmp_path / "found.png", "--threshold", best / 2
    _, printed, _ = run("sliced_sahi", few, *words)
    assert printed.count("\n") > 1 and run("sliced_sahi", detectors("retinanet"), *words)[1] == printed


def test_a_photo_that_cannot_be_read_is_skipped(detectors, tmp_path):
    """Files that are not photos are ignored."""
    whole, broken = photo(tmp_path / "photos/b.png"), tmp_path / "photos/a.png"
    broken.write_bytes(whole.read_bytes()[:60])
    for name in ("notes.pdf", "film.mpg", "table.h5"):
        (tmp_path / "photos" / name).write_text("no photo")
    status, _, err = run("export_coco", detectors("retinanet"), tmp_path / "photos", tmp_path / "found.json")
    assert status == 2 and str(broken) in err and err.count("\n") == 1
    content = json.loads((tmp_path / "found.json").read_text())
    assert [image["file_name"] for image in content["images"]] == ["b.png"] and content["annotations"]


def test_a_library_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "sahi", None)
    error, _, _ = run_tool("../examples/sliced_sahi.py")
    assert error.startswith("error: ") and "sahi" in error and "docs/hub.md" in error
