"""predict: results equal to an evaluation, batches, drawings, videos, and files that cannot be used."""

import json
import shutil
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from backbones import ConfigError
from projects_vil import Detector, load_config
from projects_vil.checkpoint import METADATA_KEY, Categories
from projects_vil.engine import Trainer
from projects_vil.export import metadata_path
from projects_vil.inference import config_of_export, predict
from projects_vil.inference.predict import categories_as_annotated, write_detections
from projects_vil.inference.sources import Video, read_ahead
from tests.projects_vil.export.exporting import write
from tests.projects_vil.helpers import run_tool, small_config, untrained_detector
from tests.projects_vil.inference.helpers import BrightHalfRunner, assert_same, picture, read, run_on, save, write_video

CLASSES = Categories((1, 2, 3), ("circle", "square", "triangle"))


# Results


@pytest.mark.parametrize("batch_size", [1, 3])
def test_results_equal_those_of_an_evaluation(trained_run, shapes, tmp_path, batch_size):
    cfg = load_config(trained_run / "config.yaml")
    annotations = shapes / "annotations/instances_val.json"
    options = {"annotations": annotations, "batch_size": batch_size, "drawings": False}
    summary = predict(cfg, trained_run / "model_final.pth", shapes / "val", tmp_path / "out", **options)
    results, images = read(tmp_path / "out")
    assert_same(results, json.loads((trained_run / "inference/coco_instances_results.json").read_text()))
    truth = json.loads(annotations.read_text())
    assert [image["id"] for image in images["images"]] == [image["id"] for image in truth["images"]]
    assert [(c["id"], c["name"]) for c in images["categories"]] == [(c["id"], c["name"]) for c in truth["categories"]]
    assert (summary.done, summary.detections, summary.skipped) == (8, len(results), ())


@pytest.mark.slow
def test_masks_equal_those_of_an_evaluation_in_every_batch(shapes, tmp_path):
    options = ["OUTPUT_DIR", str(tmp_path / "evaluated"), "INPUT.FORMAT", "BGR", "TEST.DETECTIONS_PER_IMAGE", "10"]
    cfg = small_config("mask_rcnn", *options)
    detector = untrained_detector(cfg)
    torch.save({"model": detector.state_dict()}, tmp_path / "weights.pth")
    Path(cfg.OUTPUT_DIR).mkdir()
    Trainer.test(cfg, detector)
    expected = json.loads((tmp_path / "evaluated/inference/coco_instances_results.json").read_text())
    assert all("segmentation" in result for result in expected)
    for batch_size in (1, 5):
        output = tmp_path / f"batches_of_{batch_size}"
        options = {"annotations": shapes / "annotations/instances_val.json", "batch_size": batch_size}
        predict(cfg, tmp_path / "weights.pth", shapes / "val", output, drawings=batch_size > 1, **options)
        assert_same(read(output)[0], expected)
    drawn = sorted(path.name for path in (output / "drawings").iterdir())
    assert drawn == sorted(path.name for path in (shapes / "val").iterdir())


@pytest.mark.slow
def test_an_exported_model_predicts_as_its_checkpoint(trained_run, exported_run, shapes, tmp_path):
    cfg, weights = load_config(trained_run / "config.yaml"), trained_run / "model_final.pth"
    (tmp_path / "in").mkdir()
    for path in sorted((shapes / "val").iterdir())[:3]:
        shutil.copy(path, tmp_path / "in")
    predict(cfg, weights, tmp_path / "in", tmp_path / "eager", batch_size=2, drawings=False)
    # The size comes from the export, not from the config.
    other = load_config(trained_run / "config.yaml", ["INPUT.MIN_SIZE_TEST", "96"])
    for settings, name in ((other, "one.ts"), (None, "batch.ts")):
        predict(settings, exported_run / name, tmp_path / "in", tmp_path / name, batch_size=2, drawings=False)
        results, images = read(tmp_path / name)
        assert_same(results, read(tmp_path / "eager")[0])
        assert len(results) > 50 and images == read(tmp_path / "eager")[1]


@pytest.mark.slow
def test_augmented_results_are_in_pixels_of_the_files(trained_run, shapes, tmp_path):
    cfg = load_config(trained_run / "config.yaml", ["TEST.AUG.MIN_SIZES", "(64,)", "TEST.AUG.FLIP", "False"])
    for tta in (False, True):
        folder = tmp_path / str(tta)
        predict(cfg, trained_run / "model_final.pth", shapes / "val", folder, tta=tta, drawings=False, batch_size=2)
    augmented, plain = read(tmp_path / "True")[0], read(tmp_path / "False")[0]
    # Some boxes are merged that overlap once they are clipped to the image.
    assert 0.8 * len(plain) < len(augmented) <= len(plain)
    rows = np.array([[one["image_id"] * 1e4, one["category_id"] * 1e4, *one["bbox"]] for one in plain])
    for one in augmented:
        row = [one["image_id"] * 1e4, one["category_id"] * 1e4, *one["bbox"]]
        distance = np.abs(rows - row).max(axis=1)
        assert distance.min() < 1e-2
        assert plain[distance.argmin()]["score"] == pytest.approx(one["score"], abs=1e-3)


def test_category_ids_are_those_of_the_checkpoint(trained_run, shapes, tmp_path):
    weights = torch.load(trained_run / "model_final.pth", weights_only=True)
    weights[METADATA_KEY] |= {"category_ids": [17, 5, 90]}
    torch.save(weights, tmp_path / "weights.pth")
    found = []
    for datasets in ("('shapes_val',)", "()"):
        cfg = load_config(trained_run / "config.yaml", ["DATASETS.TEST", datasets, "DATASETS.TRAIN", datasets])
        predict(cfg, tmp_path / "weights.pth", min((shapes / "val").iterdir()), tmp_path / "out", drawings=False)
        found.append(read(tmp_path / "out"))
    assert found[0] == found[1]
    results, images = found[0]
    assert {result["category_id"] for result in results} <= {17, 5, 90}
    assert images["categories"][1] == {"id": 5, "name": "square"}


def test_category_ids_of_annotations_in_the_order_of_the_model(exported_run, shapes, tmp_path):
    content = json.loads((shapes / "annotations/instances_val.json").read_text())
    content["images"], content["annotations"] = content["images"][:1], []
    content["categories"] = [category | {"id": 40 - category["id"]} for category in content["categories"]]
    (tmp_path / "other.json").write_text(json.dumps(content))
    options = {"annotations": tmp_path / "other.json", "drawings": False}
    assert predict(None, exported_run / "one.ts", shapes / "val", tmp_path / "out", **options).done == 1
    categories = read(tmp_path / "out")[1]["categories"]
    assert [(c["id"], c["name"]) for c in categories] == [(39, "circle"), (38, "square"), (37, "triangle")]
    content["categories"] += [{"id": 99, "name": "star"}]
    (tmp_path / "more.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="4 classes"):
        predict(None, exported_run / "one.ts", shapes / "val", tmp_path / "more", annotations=tmp_path / "more.json")


def test_categories_as_annotated():
    colors = [(9, 0, 0), (8, 0, 0), (7, 0, 0)]
    found = categories_as_annotated(CLASSES, Categories((10, 20, 30), ("triangle", "circle", "square"), colors))
    assert found == Categories((20, 30, 10), CLASSES.names) and found.colors == [colors[1], colors[2], colors[0]]
    for names in (("a", "b", "c"), ("circle", "b", "c"), ("circle", "circle", "triangle")):
        assert categories_as_annotated(CLASSES, Categories((10, 20, 30), names)).names == names
    for names in (("triangle", "circle", "b"), tuple("abcdef")):
        with pytest.raises(ConfigError, match=names[0]):
            categories_as_annotated(CLASSES, Categories(tuple(range(len(names))), names))


# Files


def test_batches_of_one_resized_size(tmp_path):
    sizes = [(40, 60), (64, 50), (80, 120), (20, 30), (64, 50), (40, 61), (160, 240)]
    for number, size in enumerate(sizes):
        save(tmp_path / f"in/{number}.png", picture(*size, bright="left" if number % 2 else "right"))
    runner = BrightHalfRunner()
    run_on(tmp_path / "in", tmp_path / "out", runner=runner, batch_size=3)
    assert sorted(map(len, runner.batches)) == [1, 1, 2, 3]
    results, images = read(tmp_path / "out")
    assert [result["image_id"] for result in results] == [1, 2, 3, 4, 5, 6, 7]
    assert [result["category_id"] for result in results] == [7, 3, 7, 3, 7, 3, 7]
    assert [(image["height"], image["width"]) for image in images["images"]] == sizes
    assert results[0]["bbox"] == [30, 0, 30, 40] and results[1]["bbox"] == [0, 0, 25, 64]


def test_unreadable_files_are_skipped(tmp_path, capsys):
    source = tmp_path / "in"
    save(source / "b.png", picture(40, 60))
    save(source / "below/deep.png", picture(40, 60, bright="right")[..., 0].astype(np.uint16) * 257)
    save(source / "cut.jpg", np.random.default_rng(0).integers(0, 255, (90, 70, 3), np.uint8))
    (source / "cut.jpg").write_bytes((source / "cut.jpg").read_bytes()[:-1500])
    (source / "empty.PNG").write_bytes(b"")
    for name in ("text.jpeg", "notes.txt", "._hidden.jpg"):
        (source / name).write_text("not an image")
    save(source / "thin.png", picture(1, 4000))
    for _ in range(2):  # the output folder is not read
        summary = run_on(source, source / "out", drawings=True)
        results, images = read(source / "out")
        assert [image["file_name"] for image in images["images"]] == ["b.png", "below/deep.png"]
    assert [(r["image_id"], r["category_id"]) for r in results] == [(1, 3), (2, 7)]
    assert results[1]["score"] == pytest.approx(200 / 255, abs=0.01)
    assert [item.name for item in summary.skipped] == ["cut.jpg", "empty.PNG", "text.jpeg", "thin.png"]
    assert [item["file_name"] for item in images["skipped"]] == [item.name for item in summary.skipped]
    errors = capsys.readouterr().err
    assert all(f"{item.name}: {item.reason}" in errors for item in summary.skipped)


def test_drawings_have_names_of_their_own(tmp_path):
    names = ["a.bmp", "a.bmp.png", "a.jpg", "a.png", "b.JPG", "below/a.png", "c.tif"]
    for name in names:
        save(tmp_path / "in" / name, picture(40, 60))
    run_on(tmp_path / "in", tmp_path / "out", drawings=True, score_threshold=0.3)
    drawings = tmp_path / "out/drawings"
    drawn = {path.relative_to(drawings).as_posix() for path in drawings.rglob("*") if path.is_file()}
    assert drawn == {"a.bmp.png.png", "a.bmp.png", "a.jpg", "a.png", "b.JPG", "below/a.png", "c.tif.png"}


def test_drawings_show_what_is_above_the_threshold(tmp_path):
    save(tmp_path / "a.png", picture(40, 60))
    drawn = []
    for threshold in (0.3, 0.5):
        run_on(tmp_path / "a.png", tmp_path / "out", drawings=True, score_threshold=threshold)
        drawn.append(cv2.imread(str(tmp_path / "out/drawings/a.png")).astype(int))
        assert len(read(tmp_path / "out")[0]) == 1
    # The bright half is 200, 100, 0 in RGB; the label is in its upper left corner, light on black.
    with_box, without = drawn
    assert with_box.shape == without.shape == (320, 480, 3)
    for drawing in drawn:
        assert np.abs(drawing[250, 100] - [0, 100, 200]).max() < 5
    assert with_box[:20, :60].min(axis=-1).max() > 100 > without[:20, :60].min(axis=-1).max()
    assert (with_box[:, 300:] == without[:, 300:]).all()


def test_an_interruption_keeps_the_results_before(tmp_path):
    for number in range(6):
        save(tmp_path / f"in/{number}.png", picture(40, 60))
    run_on(tmp_path / "in", tmp_path / "out")
    before = read(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run_on(tmp_path / "in", tmp_path / "out", runner=BrightHalfRunner(stop_after=2), batch_size=1)
    assert read(tmp_path / "out") == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["images.json", "results.json"]


@pytest.mark.parametrize("codec", ["mp4v", "none"])
def test_video(tmp_path, monkeypatch, codec):
    """An MP4, or a PNG per frame where OpenCV lacks the codec."""
    monkeypatch.setattr(sys.modules[predict.__module__], "VIDEO_CODEC", codec)
    write_video(tmp_path / "clip.avi", 7)
    runner, output = BrightHalfRunner(), tmp_path / "out"
    options = {"batch_size": 3, "drawings": True}
    summary = write_detections(Detector(runner), Video(tmp_path / "clip.avi"), output, **options)
    results, images = read(output)
    assert (summary.unit, summary.done, summary.skipped) == ("frame", 7, ())
    assert [len(batch) for batch in runner.batches] == [3, 3, 1]
    assert [result["category_id"] for result in results] == [7, 3, 3, 7, 3, 3, 7]
    frame = {"id": 4, "file_name": "clip.avi", "frame": 3, "seconds": 0.375, "height": 40, "width": 60}
    assert images["images"][3] == frame
    assert results[3]["score"] == pytest.approx(100 / 255, abs=0.02)
    drawn = sorted(path.relative_to(output / "drawings").as_posix() for path in (output / "drawings").rglob("*.*"))
    if codec == "none":
        assert drawn == [f"clip/{number:06d}.png" for number in range(7)]
    else:
        video = cv2.VideoCapture(str(output / "drawings/clip.mp4"))
        assert video.get(cv2.CAP_PROP_FRAME_COUNT) == 7 and video.get(cv2.CAP_PROP_FPS) == 8 and len(drawn) == 1


def test_damaged_videos(tmp_path):
    write_video(tmp_path / "clip.avi", 30)
    content = (tmp_path / "clip.avi").read_bytes()
    (tmp_path / "cut.avi").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.avi").write_text("not a video")
    summary = write_detections(Detector(BrightHalfRunner()), Video(tmp_path / "cut.avi"), tmp_path)
    assert 5 < summary.done < 25 and f"{summary.done} of its 30 frames" in summary.skipped[0].reason
    assert len(read(tmp_path)[0]) == summary.done
    summary = write_detections(Detector(BrightHalfRunner()), Video(tmp_path / "text.avi"), tmp_path)
    assert summary.done == 0 and summary.skipped[0].name == "text.avi"


def test_reading_ahead_is_bounded_and_raises():
    made, taken = [], []

    def numbers():
        for number in range(20):
            made.append(number)
            yield number
        raise ConfigError("the end")

    with pytest.raises(ConfigError, match="the end"):
        for number in read_ahead(numbers(), depth=2):
            taken.append(number)
            assert len(made) <= len(taken) + 2
    assert taken == list(range(20))


# Images and arguments that cannot work


def test_images_that_an_exported_model_cannot_take_are_skipped(tmp_path, caplog):
    for name, size in (("a", (48, 64)), ("b", (16, 64)), ("c", (48, 300))):
        save(tmp_path / f"in/{name}.png", picture(*size))
    path = write(tmp_path, "retinanet", "torchscript")
    metadata = json.loads(metadata_path(path).read_text())
    metadata["input"]["sides"], metadata["resizing"]["short_side"] = [32, 256], None
    metadata_path(path).write_text(json.dumps(metadata))
    summary = predict(None, path, tmp_path / "in", tmp_path / "out", drawings=False, batch_size=3)
    assert summary.done == 1 and [item.name for item in summary.skipped] == ["b.png", "c.png"]
    assert "16 x 64" in summary.skipped[0].reason and "32 to 256" in summary.skipped[0].reason
    assert "batch_size" in caplog.text
    write_video(tmp_path / "clip.avi", 2, size=(16, 64))
    with pytest.raises(ConfigError, match=r"clip\.avi"):
        predict(small_config(), path, tmp_path / "clip.avi", tmp_path / "video", drawings=False)
    eighty = small_config("retinanet", "MODEL.RETINANET.NUM_CLASSES", "80")
    with pytest.raises(ConfigError, match=r"MODEL\.RETINANET\.NUM_CLASSES"):
        predict(eighty, path, tmp_path / "in", tmp_path / "eighty")
    assert not (tmp_path / "eighty").exists()


@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_images_too_thin_to_augment_are_skipped(tmp_path, detector):
    cfg = small_config(detector, "TEST.AUG.MIN_SIZES", "(48, 64)", "TEST.AUG.MAX_SIZE", "96", "DATASETS.TEST", "()")
    torch.save({"model": untrained_detector(cfg).state_dict()}, tmp_path / "weights.pth")
    save(tmp_path / "in/a.png", picture(40, 60))
    save(tmp_path / "in/thin.png", picture(1, 20000))
    summary = predict(cfg, tmp_path / "weights.pth", tmp_path / "in", tmp_path / "out", tta=True, drawings=False)
    assert summary.done == 1 and [item.name for item in summary.skipped] == ["thin.png"]


def test_an_annotated_image_of_another_size_is_skipped(shapes, trained_run, tmp_path):
    shutil.copytree(shapes / "val", tmp_path / "in")
    first = min((tmp_path / "in").iterdir())
    save(first, picture(40, 60))
    options = {"annotations": shapes / "annotations/instances_val.json", "drawings": False}
    cfg = load_config(trained_run / "config.yaml")
    summary = predict(cfg, trained_run / "model_final.pth", tmp_path / "in", tmp_path / "out", **options)
    assert summary.done == 7 and [item.name for item in summary.skipped] == [first.name]


@pytest.mark.parametrize(
    "changes, overrides, named",
    [
        ({"batch_size": 0}, [], "batch_size"),
        ({"score_threshold": 1.5}, [], "score_threshold"),
        ({"source": "absent"}, [], "source .*absent"),
        ({"source": "empty"}, [], "source .*empty"),
        ({"output": "weights.pth"}, [], r"output .*weights\.pth"),
        ({"output": "weights.pth/out"}, [], r"output .*weights\.pth"),
        ({"output": "in"}, [], "output .*in"),
        ({"weights": "absent.pth"}, [], r"absent\.pth"),
        ({"weights": "model.onnx", "tta": True}, [], r"tta .*model\.onnx"),
        ({"annotations": "absent.json"}, [], r"annotations .*absent\.json"),
        ({"annotations": "weights.pth", "source": "in/a.png"}, [], "annotations"),
        ({}, ["INPUT.FORMAT", "L"], r"INPUT\.FORMAT"),
        ({"tta": True}, ["TEST.AUG.MIN_SIZES", "(0,)"], r"TEST\.AUG\.MIN_SIZES"),
    ],
)
def test_arguments_that_cannot_work(files, changes, overrides, named):
    paths = {"weights": "weights.pth", "source": "in", "output": "out"}
    paths |= {key: value for key, value in changes.items() if isinstance(value, str)}
    arguments = changes | {key: files / value for key, value in paths.items()}
    with pytest.raises(ConfigError, match=named) as caught:
        predict(small_config("retinanet", *overrides), **arguments)
    assert "\n" not in str(caught.value) and not (files / "out").exists()


def test_models_that_cannot_predict(files):
    arguments = files / "weights.pth", files / "in", files / "out"
    with pytest.raises(ConfigError, match="SemanticSegmentor"):
        predict(small_config("semantic_fpn"), *arguments)
    with pytest.raises(ConfigError, match=r"weights\.pth"):
        predict(None, *arguments)
    with pytest.raises(ConfigError, match=r"MODEL\.WEIGHTS"):
        predict(small_config(), "", files / "in", files / "out")


def test_inputs_are_never_overwritten(files, shapes):
    save(files / "out/drawings/a.png", picture(40, 60))
    for source in ("out/drawings", "out/drawings/a.png"):
        with pytest.raises(ConfigError, match="output .*out"):
            predict(small_config(), files / "weights.pth", files / source, files / "out")
    for name in ("images.json", "results.json"):
        (files / "out" / name).write_text("{}")
        options = {"annotations": files / "in/../out" / name}
        with pytest.raises(ConfigError, match=name):
            predict(small_config(), files / "weights.pth", files / "in", files / "out", **options)
        assert (files / "out" / name).read_text() == "{}"


@pytest.mark.parametrize("name", ["../a.png", "{}/elsewhere.png"])
def test_annotated_images_outside_of_the_folder(shapes, files, name):
    content = json.loads((shapes / "annotations/instances_val.json").read_text())
    content["images"], content["annotations"] = content["images"][:1], []
    content["images"][0]["file_name"] = name.format(files)
    (files / "annotations.json").write_text(json.dumps(content))
    save((files / "in" / name.format(files)).resolve(), picture(40, 60))
    options = {"annotations": files / "annotations.json"}
    with pytest.raises(ConfigError, match=r"annotations\.json"):
        predict(small_config(), files / "weights.pth", files / "in", files / "out", **options)


def test_overrides_that_an_export_cannot_follow(exported_run):
    model = exported_run / "one.ts"
    config_of_export(model, ["MODEL.WEIGHTS", str(model), "MODEL.DEVICE", "cpu"])
    for key, value in (("DATASETS.TEST", "('mine',)"), ("MODEL.DEVICE", "cuda"), ("INPUT.FORMAT", "BGR")):
        with pytest.raises(ConfigError, match=key):
            config_of_export(model, ["MODEL.WEIGHTS", str(model), key, value])
    with pytest.raises(ConfigError, match="weights"):
        config_of_export(None)


# The tool


def test_tool(trained_run, exported_run, shapes, tmp_path):
    shutil.copytree(shapes / "val", tmp_path / "in")
    (tmp_path / "in/text.jpg").write_text("not an image")
    arguments = ["--config-file", trained_run / "config.yaml", "--weights", trained_run / "model_final.pth"]
    arguments += ["--input", tmp_path / "in", "--output", tmp_path / "out", "--batch-size", 2]
    result = run_tool("predict.py", *arguments, datasets_root=shapes.parent)
    assert result.returncode == 2, result.stderr
    assert "text.jpg" in result.stderr
    results, images = read(tmp_path / "out")
    assert f"8 images, {len(results)} detections" in result.stdout and f"{tmp_path / 'out/drawings'}" in result.stdout
    assert len(images["images"]) == len(list((tmp_path / "out/drawings").iterdir())) == 8


@pytest.mark.slow
def test_the_tool_needs_no_config_for_an_export(exported_run, shapes, tmp_path):
    arguments = ["--input", shapes / "val", "--output", tmp_path / "out", "--no-drawings"]
    result = run_tool("predict.py", "--weights", exported_run / "one.ts", "--device", "cpu", *arguments)
    assert result.returncode == 0, result.stderr
    assert len(read(tmp_path / "out")[1]["images"]) == len(list((shapes / "val").iterdir()))
    result = run_tool("predict.py", *arguments)
    assert result.returncode == 1 and result.stderr.startswith("error: ")
