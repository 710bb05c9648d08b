"""Files to results: the answers of an evaluation, in any batch, and clear words for mistakes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from backbones import InputError
from projects_vil import load_config
from projects_vil.checkpoint import PROVENANCE_KEY
from projects_vil.engine import Trainer
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_exported_model_predicts_as_its_checkpoint(trained_run, exported_run, shapes, tmp_path):
    cfg, weights = load_config(trained_run / "config.yaml"), trained_run / "model_final.pth"
    (tmp_path / "in").mkdir()
    for path in sorted((shapes / "val").iterdir())[:3]:
        shutil.copy(path, tmp_path / "in")
    predict(cfg, weights, tmp_path / "in", tmp_path / "eager", batch_size=2, drawings=False)
    # What it was exported with counts, not the config.
    other = load_config(trained_run / "config.yaml", ["INPUT.MIN_SIZE_TEST", "96"])
    for settings, name in ((other, "one.ts"), (None, "batch.ts")):
        predict(settings, exported_run / name, tmp_path / "in", tmp_path / name, batch_size=2, drawings=False)
        results, images = read(tmp_path / name)
        assert_same(results, read(tmp_path / "eager")[0])
        assert len(results) > 50 and images == read(tmp_path / "eager")[1]


def test_an_exported_model_needs_no_config_for_annotated_images(exported_run, shapes, tmp_path):
    content = json.loads((shapes / "annotations/instances_val.json").read_text())
    content["images"] = content["images"][:1]
    image_id = content["images"][0]["id"]
    content["annotations"] = [item for item in content["annotations"] if item["image_id"] == image_id]
    for item in content["annotations"]:
        item["category_id"] = 40 - item["category_id"]
    content["categories"] = [category | {"id": 40 - category["id"]} for category in content["categories"]]
    (tmp_path / "turned.json").write_text(json.dumps(content))
    options = {"annotations": tmp_path / "turned.json", "drawings": False}
    assert predict(None, exported_run / "one.ts", shapes / "val", tmp_path / "out", **options).done == 1
    categories = read(tmp_path / "out")[1]["categories"]
    # In the order of the model, with the ids of the annotations.
    assert [(category["id"], category["name"]) for category in categories] == [
        *((39, "circle"), (38, "square"), (37, "triangle"))
    ]
    content["categories"] += [{"id": 99, "name": "star"}]
    (tmp_path / "more.json").write_text(json.dumps(content))
    options["annotations"] = tmp_path / "more.json"
    with pytest.raises(InputError, match="has 4 classes"):
        predict(None, exported_run / "one.ts", shapes / "val", tmp_path / "more", **options)


def test_category_ids_do_not_depend_on_the_dataset_at_hand(trained_run, shapes, tmp_path):
    weights = torch.load(trained_run / "model_final.pth", weights_only=True)
    weights[PROVENANCE_KEY] |= {"category_ids": [17, 5, 90]}
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


def test_results_without_annotations_count_files_by_name(trained_run, shapes, tmp_path):
    cfg = load_config(trained_run / "config.yaml")
    predict(cfg, trained_run / "model_final.pth", shapes / "val", tmp_path / "out", drawings=False)
    results, images = read(tmp_path / "out")
    assert [image["file_name"] for image in images["images"]] == sorted(p.name for p in (shapes / "val").iterdir())
    assert [image["id"] for image in images["images"]] == list(range(1, 9))
    assert {result["category_id"] for result in results} <= {1, 2, 3}
    assert images["categories"][0]["name"] == "circle"


@pytest.mark.slow
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
