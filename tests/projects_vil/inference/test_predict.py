"""predict: results, batches, drawings, videos, and invalid files and arguments."""

import gc
import json
import signal
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from backbones import ConfigError
from backbones.errors import GENERATOR
from projects_vil import Detector
from projects_vil.engine import Trainer
from projects_vil.export import metadata_path
from projects_vil.inference import image_loading, predict
from projects_vil.inference.image_loading import ImageBatches, ImageSource, Video
from tests.projects_vil.export.exporting import write
from tests.projects_vil.helpers import assert_same_detections, message
from tests.projects_vil.inference.helpers import HalfRunner, assert_same, picture, read, run_on, save, save_run
from tests.selection import slow_except


def write_video(path: Path, frames: int, *, size: tuple[int, int] = (40, 60)) -> None:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 8, size[::-1])
    assert writer.isOpened()
    for number in range(frames):
        writer.write(np.ascontiguousarray(picture(*size, bright="left" if number % 3 else "right")[..., ::-1]))
    writer.release()


# Results


@pytest.mark.parametrize("name, channels", slow_except([("retinanet", "RGB"), ("mask_rcnn", "BGR")], ["retinanet"]))
def test_results_equal_an_evaluation(shapes, tmp_path, name, channels):
    annotations = shapes / "annotations/instances_val.json"
    Trainer.test(*save_run(tmp_path, name, "INPUT.FORMAT", channels, "TEST.DETECTIONS_PER_IMAGE", "10"))
    options = {"annotations": annotations, "batch_size": 3}
    summary = predict(Detector.load(tmp_path), shapes / "val", tmp_path / "out", **options)
    results, images = read(tmp_path / "out")
    assert_same(results, json.loads((tmp_path / "inference/coco_instances_results.json").read_text()))
    assert all(("segmentation" in result) == (name == "mask_rcnn") for result in results)
    truth = json.loads(annotations.read_text())
    assert [image["id"] for image in images["images"]] == [image["id"] for image in truth["images"]]
    assert [(c["id"], c["name"]) for c in images["categories"]] == [(c["id"], c["name"]) for c in truth["categories"]]
    assert (summary.num_images, summary.num_detections, summary.num_skipped) == (8, len(results), 0)
    drawn = {path.name for path in (tmp_path / "out/drawings").iterdir()}
    assert drawn == {path.name for path in (shapes / "val").iterdir()}


def annotations_of(path: Path, images: dict[str, tuple[int, int]], names: list[str]) -> Path:
    """Write a COCO file without objects: images with their sizes, from id 40, and categories from id 10."""
    files = enumerate(images.items(), start=40)
    images = [{"id": index, "file_name": name, "height": h, "width": w} for index, (name, (h, w)) in files]
    categories = [{"id": index, "name": name} for index, name in enumerate(names, start=10)]
    path.write_text(json.dumps({"images": images, "annotations": [], "categories": categories}))
    return path


def test_ids_of_annotations(tmp_path):
    """Classes match by name; an image of another size than in the annotations is skipped."""
    for name, bright in (("a.png", "left"), ("b.png", "right"), ("c.png", "left")):
        save(tmp_path / "in" / name, picture(40, 60, bright=bright))
    sizes = {"b.png": (40, 60), "a.png": (40, 60), "c.png": (40, 61)}
    annotations = annotations_of(tmp_path / "a.json", sizes, ["right", "left"])
    summary = run_on(tmp_path / "in", tmp_path / "out", annotations=annotations)
    results, images = read(tmp_path / "out")
    assert [(r["image_id"], r["category_id"]) for r in results] == [(40, 10), (41, 11)]
    assert [(c["id"], c["name"]) for c in images["categories"]] == [(11, "left"), (10, "right")]
    assert summary.num_images == 2 and [item["file_name"] for item in images["skipped"]] == ["c.png"]
    more = annotations_of(tmp_path / "b.json", sizes, ["left", "right", "star"])
    assert "3 classes" in message(run_on, tmp_path / "in", tmp_path / "out", annotations=more)
    for source in (tmp_path / "in/a.png", [tmp_path / "in", tmp_path / "in/a.png"]):
        assert "needs the folder" in message(run_on, source, tmp_path / "out", annotations=annotations)


@pytest.mark.parametrize(
    "name, change, named",
    [
        ("images", {"height": None}, "'height'"),
        ("images", {"file_name": None}, "'file_name'"),
        ("images", {"id": 41}, "images with the same id"),
        ("categories", {"name": None}, "'name'"),
    ],
)
def test_invalid_annotations(tmp_path, name, change, named):
    save(tmp_path / "in/a.png", picture(40, 60))
    path = annotations_of(tmp_path / "a.json", {"a.png": (40, 60), "b.png": (40, 60)}, ["left", "right"])
    content = json.loads(path.read_text())
    content[name][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"a\.json.*{named}"):
        run_on(tmp_path / "in", tmp_path / "out", annotations=path)


def test_a_run_is_no_output_directory(tmp_path):
    save_run(tmp_path / "run", "retinanet")
    save(tmp_path / "a.png", picture(40, 60))
    before = sorted((tmp_path / "run").iterdir())
    for file_format in ("coco", "parquet"):
        text = message(run_on, tmp_path / "a.png", tmp_path / "run", file_format=file_format)
        assert "run' has the config and the weights of a detector" in text
    assert sorted((tmp_path / "run").iterdir()) == before
    assert run_on(tmp_path / "a.png", tmp_path / "run/predictions").num_images == 1


# Files


def test_batches_of_one_padded_size(tmp_path):
    sizes = [(40, 60), (64, 50), (80, 120), (20, 30), (64, 50), (40, 61), (160, 240)]
    for number, size in enumerate(sizes):
        save(tmp_path / f"in/{number}.png", picture(*size, bright="left" if number % 2 else "right"))
    runner = HalfRunner()
    run_on(tmp_path / "in", tmp_path / "out", runner=runner, batch_size=4)
    assert sorted(map(len, runner.batches)) == [1, 2, 4]
    results, images = read(tmp_path / "out")
    assert [result["image_id"] for result in results] == [1, 2, 3, 4, 5, 6, 7]
    assert [result["category_id"] for result in results] == [7, 3, 7, 3, 7, 3, 7]
    assert [(image["height"], image["width"]) for image in images["images"]] == sizes
    assert results[0]["bbox"] == [30, 0, 30, 40] and results[1]["bbox"] == [0, 0, 25, 64]


def test_batches_stay_within_a_window(monkeypatch):
    """At most one window is read ahead, and the batches of a window do not depend on other windows."""
    monkeypatch.setattr(image_loading, "BATCHING_WINDOW", 4)
    sizes, taken = [(40, 60), (64, 50), (41, 60), (40, 61)] * 3, []

    def images(first):
        for index in range(first, len(sizes)):
            taken.append(index)
            yield ImageSource(np.zeros((*sizes[index], 3), np.uint8), str(index), index)

    def batches(first):
        for batch in ImageBatches(images(first)).batches(HalfRunner(), 2):
            yield [item.entry["id"] for item in batch]

    assert ImageBatches(images(0)).total == 0 and ImageBatches(list(images(0))).total == 12
    taken.clear()
    whole = batches(0)
    assert next(whole) == [0, 2] and len(taken) in (4, 8)
    assert list(whole)[-3:] == list(batches(8)) == [[8, 10], [9], [11]]


@pytest.mark.parametrize("name", slow_except(["retinanet", "mask_rcnn"], ["mask_rcnn"]))
@pytest.mark.parametrize("padding", [{}, {"square_size": 160}])
def test_detections_do_not_depend_on_the_batch(tmp_path, monkeypatch, name, padding):
    save_run(tmp_path, name, "TEST.DETECTIONS_PER_IMAGE", "20")
    detector, random = Detector.load(tmp_path), np.random.default_rng(0)
    monkeypatch.setattr(type(detector.runner.detector.backbone), "padding_constraints", padding)
    sizes, batches = [(40, 60), (64, 50), (41, 63), (96, 140), (64, 54), (40, 80)], []
    images = [random.integers(0, 255, (*size, 3), np.uint8) for size in sizes]
    detector.runner.model.register_forward_pre_hook(lambda module, inputs: batches.append(inputs[0]))
    together = detector(images, batch_size=8)
    assert sorted(map(len, batches)) == ([6] if padding else [2, 2, 2])
    for image, found in zip(images, together, strict=True):
        alone = detector(image)
        assert_same_detections(alone.instances, found.instances)


@pytest.mark.slow
def test_batches_are_split_if_the_size_of_an_image_was_unknown(tmp_path, served):
    """The first request for each URL fails."""
    pytest.importorskip("aiohttp", reason="fsspec reads HTTP by aiohttp")
    save_run(tmp_path, "retinanet", "TEST.DETECTIONS_PER_IMAGE", "20")
    random, sizes = np.random.default_rng(0), [(40, 60), (64, 50), (96, 140), (41, 60), (60, 40), (40, 60)]
    names = [f"flaky/{number}.png" for number in range(len(sizes))]
    for name, shape in zip(names, sizes, strict=True):
        save(tmp_path / name, random.integers(0, 255, (*shape, 3), np.uint8))
    detector, results = Detector.load(tmp_path, device="cpu"), []
    for folder, batch_size in ((served, 8), (tmp_path, 1)):
        (tmp_path / "list.txt").write_text("\n".join(f"{folder}/{name}" for name in names))
        summary = predict(detector, tmp_path / "list.txt", tmp_path / "out", drawings=False, batch_size=batch_size)
        assert (summary.num_images, summary.num_skipped) == (len(sizes), 0)
        results.append(sorted(read(tmp_path / "out")[0], key=lambda one: (one["image_id"], -one["score"])))
    assert_same(*results)


def test_frames_of_a_stream_that_changes_its_size(tmp_path, monkeypatch):
    """All frames of a batch have the same size, and frames keep their order."""
    sizes = [(40, 60), (40, 60), (64, 50), (40, 60), (40, 60), (40, 60)]
    frames = iter([*((True, np.zeros((*size, 3), np.uint8)) for size in sizes), (False, None)])
    opened = SimpleNamespace(isOpened=lambda: True, get=lambda _: 0, read=lambda: next(frames), release=lambda: None)
    monkeypatch.setattr(cv2, "VideoCapture", lambda _: opened)
    batches = Video("0").batches(HalfRunner(), 2)
    assert [[item.index for item in batch] for batch in batches] == [[0, 1], [2], [3, 4], [5]]


def test_unreadable_files_are_skipped_and_damaged_ones_are_used(tmp_path, capsys, caplog):
    source = tmp_path / "in"
    save(source / "b.png", picture(40, 60))
    save(source / "below/deep.png", picture(40, 60, bright="right")[..., 0].astype(np.uint16) * 257)
    save(source / "cut.jpg", np.random.default_rng(0).integers(0, 255, (90, 70, 3), np.uint8))
    (source / "cut.jpg").write_bytes((source / "cut.jpg").read_bytes()[:-1500])
    (source / "empty.PNG").write_bytes(b"")
    for name in ("text.jpeg", "notes.txt", "._hidden.jpg"):
        (source / name).write_text("not an image")
    save(source / "thin.png", picture(1, 4000))
    for _ in range(2):  # the output folder is not an input
        summary = run_on(source, source / "out", drawings=True, batch_size=2)
        results, images = read(source / "out")
        assert [image["file_name"] for image in images["images"]] == ["b.png", "below/deep.png", "cut.jpg"]
        assert ["truncated" in image.get("damaged", "") for image in images["images"]] == [False, False, True]
    assert "cut.jpg' is damaged: image file is truncated" in caplog.text
    assert [(r["image_id"], r["category_id"]) for r in results][:2] == [(1, 3), (2, 7)]
    assert results[1]["score"] == pytest.approx(200 / 255, abs=0.01)
    names, errors = [item["file_name"] for item in images["skipped"]], capsys.readouterr().err
    assert names == ["empty.PNG", "text.jpeg", "thin.png"] and "read, such as 'empty.PNG'" in summary.lines[-1]
    assert run_on(str(source / "[bc]*.*"), tmp_path / "two").num_images == 2
    assert all(f"skipped {item['file_name']}: {item['reason']}" in errors for item in images["skipped"])


def test_drawings(tmp_path):
    """Each drawing has its own file, and shows the detections above the threshold."""
    for name in ("a.bmp", "a.bmp.png", "a.jpg", "b.JPG", "below/a.png", "c.tif"):
        save(tmp_path / "in" / name, picture(40, 60))
    drawings, drawn = tmp_path / "out/drawings", []
    for threshold in (0.3, 0.5):
        summary = run_on(tmp_path / "in", tmp_path / "out", drawings=True, score_threshold=threshold)
        drawn.append(cv2.imread(str(drawings / "below/a.png")).astype(int))
        assert len(read(tmp_path / "out")[0]) == 6
        # The mean of a bright half is 100 of 255.
        number, highest = (6, "") if threshold == 0.3 else (0, "; the highest score is 0.39")
        assert f"{number} of 6 detections drawn (score >= {threshold}){highest}" in summary.lines[1]
    names = {path.relative_to(drawings).as_posix() for path in drawings.rglob("*") if path.is_file()}
    assert names == {"a.bmp.png.png", "a.bmp.png", "a.jpg", "b.JPG", "below/a.png", "c.tif.png"}
    # The bright half is (200, 100, 0) in RGB. The label is in the upper left corner.
    with_box, without = drawn
    assert with_box.shape == without.shape == (320, 480, 3)
    for drawing in drawn:
        assert np.abs(drawing[250, 100] - [0, 100, 200]).max() < 5
    assert with_box[:20, :60].min(axis=-1).max() > 100 > without[:20, :60].min(axis=-1).max()
    assert (with_box[:, 300:] == without[:, 300:]).all()


@pytest.mark.parametrize("is_url", [False, True])
def test_video(tmp_path, request, is_url):
    """A file, or a URL whose password is not in the output."""
    write_video(tmp_path / "clip.avi", 7)
    runner, output = HalfRunner(), tmp_path / "out"
    source = f"{request.getfixturevalue('served')}/clip.avi" if is_url else tmp_path / "clip.avi"
    summary = run_on(source, output, runner=runner, batch_size=3, drawings=True)
    results, images = read(output)
    assert (summary.lines[0], summary.num_skipped) == ("7 frames, 7 detections", 0)
    assert [len(batch) for batch in runner.batches] == [3, 3, 1]
    assert [result["category_id"] for result in results] == [7, 3, 3, 7, 3, 3, 7]
    frame = {"id": 4, "file_name": "clip.avi", "frame": 3, "seconds": 0.375, "height": 40, "width": 60}
    assert images["images"][3] == frame and "secret" not in str(images)
    assert results[3]["score"] == pytest.approx(100 / 255, abs=0.02)
    assert [path.name for path in (output / "drawings").iterdir()] == ["clip.mp4"]
    video = cv2.VideoCapture(str(output / "drawings/clip.mp4"))
    assert video.get(cv2.CAP_PROP_FRAME_COUNT) == 7 and video.get(cv2.CAP_PROP_FPS) == 8


def test_damaged_videos(tmp_path):
    write_video(tmp_path / "clip.avi", 30)
    content = (tmp_path / "clip.avi").read_bytes()
    (tmp_path / "cut.avi").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.avi").write_text("not a video")
    number = run_on(tmp_path / "cut.avi", tmp_path / "out").num_images
    before = results, images = read(tmp_path / "out")
    assert 5 < len(results) == number < 25 and f"{number} of its 30 frames" in images["skipped"][0]["reason"]
    # The results of another input are kept.
    assert "text.avi" in message(run_on, tmp_path / "text.avi", tmp_path / "out")
    assert read(tmp_path / "out") == before


@pytest.mark.slow
def test_a_camera_is_read_until_it_is_interrupted(served, tmp_path):
    """The results of earlier frames are not in memory."""

    class InterruptedRunner(HalfRunner):
        num_in_memory = ()

        def __call__(self, images, sizes):
            if len(self.batches) in (30, 60):
                known = [one for one in gc.get_objects() if type(one) is dict]
                self.num_in_memory += (sum("image_id" in one or "file_name" in one for one in known),)
            if len(self.batches) == 60:
                signal.raise_signal(signal.SIGINT)
            return super().__call__(images, sizes)

    runner, before = InterruptedRunner(), signal.getsignal(signal.SIGINT)
    summary = run_on(f"{served}/camera", tmp_path / "out", runner=runner, drawings=True)
    results, images = read(tmp_path / "out")
    assert summary.num_images == len(results) == len(images["images"]) == len(runner.batches) == 61
    assert [image["id"] for image in images["images"]] == list(range(1, 62))
    assert runner.num_in_memory[1] < runner.num_in_memory[0] + 10
    assert cv2.VideoCapture(str(tmp_path / "out/drawings/camera.mp4")).get(cv2.CAP_PROP_FRAME_COUNT) == 61
    assert signal.getsignal(signal.SIGINT) == before


def test_streams_that_cannot_be_opened_or_written(tmp_path):
    assert "Cannot write to the URL 's3://bucket/out'" in message(run_on, "in", "s3://bucket/out")
    for source in ("97", "http://127.0.0.1:9/clip.avi"):
        assert source in message(run_on, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Invalid images and arguments


def test_images_of_an_unsupported_size_are_skipped_by_an_exported_model(tmp_path, caplog):
    for name, size in (("a", (48, 64)), ("b", (16, 64)), ("c", (48, 300))):
        save(tmp_path / f"in/{name}.png", picture(*size))
    path = write(tmp_path, "retinanet", "torchscript")
    metadata = json.loads(metadata_path(path).read_text())
    metadata["input"]["sides"], metadata["resizing"]["short_side"] = [32, 256], None
    metadata_path(path).write_text(json.dumps(metadata))
    detector = Detector.load(path)
    summary = predict(detector, tmp_path / "in", tmp_path / "out", drawings=False, batch_size=3)
    skipped = read(tmp_path / "out")[1]["skipped"]
    assert summary.num_images == 1 and [item["file_name"] for item in skipped] == ["b.png", "c.png"]
    assert "16 x 64" in skipped[0]["reason"] and "32 to 256" in skipped[0]["reason"]
    assert "batch_size" in caplog.text
    for content in ("[]", '{"other_files": []}', json.dumps(metadata | {"thresholds": {}, "sha256": None})):
        metadata_path(path).write_text(content)
        assert "damaged metadata" in message(Detector.load, path)
    write_video(tmp_path / "clip.avi", 2, size=(16, 64))
    assert "clip.avi" in message(predict, detector, tmp_path / "clip.avi", tmp_path / "video", drawings=False)


@pytest.mark.parametrize(
    "source, output, options, named",
    [
        ("in", "out", {"batch_size": 0}, "batch_size"),
        ("in", "out", {"score_threshold": 1.5}, "score_threshold"),
        ("in", "out", {"file_format": "parquet", "score_threshold": 0.5}, "score_threshold .* --format coco"),
        ("in", "out", {"part_size": 3}, "part_size .* --format parquet"),
        ("in", "out", {"ray": True, "file_format": "coco"}, "--ray"),
        ("in", "out", {"file_format": "csv"}, "csv"),
        ("in", "out", {"ray": True, "column": "url"}, "column is 'url', but .*in' is not a table"),
        ("absent", "out", {}, "Input .*absent"),
        ("absent", "out", {"file_format": "parquet"}, "Input .*absent"),
        ("empty", "out", {}, "Input .*empty"),
        ("in", "in", {}, "Output .*in"),
        ("in", "other", {}, r"other/results\.json"),
        ("in", "foreign", {}, r"foreign/images\.json.* exists"),
        ("out/drawings", "out", {}, "Output .*out"),
        ("in", "out", {"annotations": "absent.json"}, r"absent\.json"),
        ("in", "out", {"annotations": "file"}, "file"),
        ("in", "out", {"annotations": "in/../out/results.json"}, r"results\.json"),
    ],
)
def test_invalid_arguments(tmp_path, source, output, options, named):
    """The errors come before the model is loaded."""
    for name in ("in/a.png", "out/drawings/a.png"):
        save(tmp_path / name, picture(40, 60))
    (tmp_path / "empty").mkdir()
    for name in ("file", "out/results.json", "out/images.json", "other/results.json", "foreign/images.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(GENERATOR * (name == "out/images.json"))
    before = sorted(tmp_path.rglob("*"))
    options = {key: tmp_path / value if key == "annotations" else value for key, value in options.items()}
    with pytest.raises(ConfigError, match=named) as caught:
        predict("absent", tmp_path / source, tmp_path / output, **options)
    assert "\n" not in str(caught.value) and sorted(tmp_path.rglob("*")) == before
