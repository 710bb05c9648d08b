"""Files to results: the answers of an evaluation, in any batch, and clear words for mistakes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from backbones import InputError
from projects_vil import load_config
from projects_vil.engine import Trainer
from projects_vil.export import export_detector
from projects_vil.inference import predict
from tests.projects_vil.helpers import lively_detector, run_tool, small_config
from tests.projects_vil.inference.helpers import assert_same, picture, read, save


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


def test_masks_equal_those_of_an_evaluation_in_every_batch(shapes, tmp_path):
    options = ["OUTPUT_DIR", str(tmp_path / "evaluated"), "INPUT.FORMAT", "BGR", "TEST.DETECTIONS_PER_IMAGE", "10"]
    cfg = small_config("mask_rcnn", *options)
    detector = lively_detector(cfg)
    torch.save({"model": detector.state_dict()}, tmp_path / "weights.pth")
    Path(cfg.OUTPUT_DIR).mkdir()
    Trainer.test(cfg, detector)
    expected = json.loads((tmp_path / "evaluated/inference/coco_instances_results.json").read_text())
    assert all("segmentation" in result for result in expected)
    for batch_size in (1, 5):
        output = tmp_path / f"batches_of_{batch_size}"
        options = {"annotations": shapes / "annotations/instances_val.json", "batch_size": batch_size}
        options |= {"drawings": batch_size > 1}
        predict(cfg, tmp_path / "weights.pth", shapes / "val", output, **options)
        assert_same(read(output)[0], expected)
    drawn = sorted(path.name for path in (output / "drawings").iterdir())
    assert drawn == sorted(path.name for path in (shapes / "val").iterdir())


@pytest.mark.parametrize("batched", [False, True])
def test_an_exported_model_predicts_as_its_checkpoint(trained_run, shapes, tmp_path, batched):
    cfg, weights = load_config(trained_run / "config.yaml"), trained_run / "model_final.pth"
    path, report = export_detector(cfg, weights, tmp_path / "export", batched=batched, runs=1)
    assert report["ok"]
    # What it was exported with counts, not the config.
    other = load_config(trained_run / "config.yaml", ["INPUT.MIN_SIZE_TEST", "96"])
    for output, settings, source in (("eager", cfg, weights), ("exported", other, path)):
        predict(settings, source, shapes / "val", tmp_path / output, batch_size=3, drawings=False)
    results, images = read(tmp_path / "exported")
    assert_same(results, read(tmp_path / "eager")[0])
    assert len(results) > 50 and images == read(tmp_path / "eager")[1]


def test_results_without_annotations_count_files_by_name(trained_run, shapes, tmp_path):
    cfg = load_config(trained_run / "config.yaml")
    predict(cfg, trained_run / "model_final.pth", shapes / "val", tmp_path / "out", drawings=False)
    results, images = read(tmp_path / "out")
    assert [image["file_name"] for image in images["images"]] == sorted(p.name for p in (shapes / "val").iterdir())
    assert [image["id"] for image in images["images"]] == list(range(1, 9))
    assert {result["category_id"] for result in results} <= {1, 2, 3}
    assert images["categories"][0]["name"] == "circle"


def test_augmented_results_are_for_the_files_too(trained_run, shapes, tmp_path):
    cfg = load_config(trained_run / "config.yaml", ["TEST.AUG.MIN_SIZES", "(64,)", "TEST.AUG.FLIP", "False"])
    for tta in (False, True):
        folder = tmp_path / str(tta)
        predict(cfg, trained_run / "model_final.pth", shapes / "val", folder, tta=tta, drawings=False, batch_size=2)
    augmented, plain = read(tmp_path / "True")[0], read(tmp_path / "False")[0]
    # Some boxes are merged that overlap once they are cut at the image's border.
    assert 0.8 * len(plain) < len(augmented) <= len(plain)
    places = np.array([[one["image_id"] * 1e4, one["category_id"] * 1e4, *one["bbox"]] for one in plain])
    for one in augmented:
        place = [one["image_id"] * 1e4, one["category_id"] * 1e4, *one["bbox"]]
        distance = np.abs(places - place).max(axis=1)
        assert distance.min() < 1e-2
        assert plain[distance.argmin()]["score"] == pytest.approx(one["score"], abs=1e-4)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"batch_size": 0}, "--batch-size is 0: it is 1 or more"),
        ({"score_threshold": 1.5}, "--score-threshold is 1.5: it is 0 to 1"),
        ({"source": "absent"}, "--input .*absent: there is no such file or folder"),
        ({"source": "empty"}, "--input .*empty: there is no image in it"),
        ({"output": "weights.pth"}, "--output .*weights.pth: it is a file, and a folder is needed"),
        ({"output": "weights.pth/out"}, "--output .*out: .*weights.pth cannot be written to"),
        ({"output": "in"}, "--output .*in: it is the --input folder; choose another"),
        ({"weights": "absent.pth"}, "there is no weights file .*absent.pth"),
        ({"annotations": "absent.json"}, "--annotations .*absent.json: there is no such file"),
        ({"annotations": "absent.json", "source": "in/a.png"}, "--annotations are for the images of a folder"),
    ],
)
def test_mistakes(files, changes, expected):
    paths = {"weights": "weights.pth", "source": "in", "output": "out"}
    paths |= {key: value for key, value in changes.items() if isinstance(value, str)}
    arguments = changes | {key: files / value for key, value in paths.items()}
    with pytest.raises(InputError, match=expected) as caught:
        predict(small_config(), **arguments)
    assert "\n" not in str(caught.value) and not (files / "out").exists()


@pytest.mark.parametrize("name", ["images.json", "results.json"])
def test_annotations_are_not_written_over(files, name):
    (files / "out").mkdir()
    (files / "out" / name).write_text("{}")
    with pytest.raises(InputError, match=f"--annotations .*{name}: results would be written over it"):
        arguments = files / "weights.pth", files / "in", files / "out"
        predict(small_config(), *arguments, annotations=files / "in/../out" / name)
    assert (files / "out" / name).read_text() == "{}"


def test_drawings_would_be_written_over_the_input(files):
    save(files / "out/drawings/a.png", picture(40, 60))
    for source in ("out/drawings", "out/drawings/a.png"):
        with pytest.raises(InputError, match="drawings of it would be written over it"):
            predict(small_config(), files / "weights.pth", files / source, files / "out")


@pytest.mark.parametrize("name", ["../a.png", "{}/elsewhere.png"])
def test_annotated_images_outside_the_folder(shapes, files, name):
    content = json.loads((shapes / "annotations/instances_val.json").read_text())
    path = files / name.format(files)
    content["images"], content["annotations"] = content["images"][:1], []
    content["images"][0]["file_name"] = name.format(files)
    (files / "annotations.json").write_text(json.dumps(content))
    save((files / "in" / path).resolve() if name.startswith("..") else path, picture(40, 60))
    save(files / "a.png", picture(40, 60))
    with pytest.raises(InputError, match="outside the folder"):
        arguments = files / "weights.pth", files / "in", files / "out"
        predict(small_config(), *arguments, annotations=files / "annotations.json")


def test_an_annotated_image_of_another_size_is_skipped(shapes, trained_run, tmp_path):
    shutil.copytree(shapes / "val", tmp_path / "in")
    first = min((tmp_path / "in").iterdir())
    save(first, picture(40, 60))
    cfg = load_config(trained_run / "config.yaml")
    options = {"annotations": shapes / "annotations/instances_val.json", "drawings": False}
    summary = predict(cfg, trained_run / "model_final.pth", tmp_path / "in", tmp_path / "out", **options)
    assert summary.done == 7 and [item.name for item in summary.skipped] == [first.name]
    assert summary.skipped[0].reason.startswith("it is 40 x 60 pixels, and its annotations say ")


def test_tool(trained_run, shapes, tmp_path):
    shutil.copytree(shapes / "val", tmp_path / "in")
    (tmp_path / "in/text.jpg").write_text("this is no image")
    arguments = ["--config-file", trained_run / "config.yaml", "--weights", trained_run / "model_final.pth"]
    arguments += ["--input", tmp_path / "in", "--output", tmp_path / "out", "--batch-size", 2]
    result = run_tool("predict.py", *arguments, datasets_root=shapes.parent)
    assert result.returncode == 2, result.stderr
    assert "skipped text.jpg: it is no image of a known format" in result.stderr.splitlines()
    results, images = read(tmp_path / "out")
    out = tmp_path / "out"
    assert result.stdout.splitlines() == [
        f"8 images, {len(results)} detections",
        f"wrote {out}/results.json, {out}/images.json, {out}/drawings",
        "skipped 1 file that could not be read",
    ]
    assert len(images["images"]) == len(list((tmp_path / "out/drawings").iterdir())) == 8
