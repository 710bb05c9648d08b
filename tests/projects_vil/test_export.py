"""TorchScript gives eager's answers on sizes it was not traced with, and a difference does not go unseen."""

import copy
import functools
import json
import runpy

import cv2
import pytest
import torch

from backbones import InputError
from projects_vil.export import (
    REPORT_FILE,
    TOLERANCES,
    ExportableDetector,
    build_detector,
    compare,
    comparison_images,
    describe,
    example_image,
    export_detector,
    trace_detector,
)
from tests.projects_vil.helpers import CONFIGS, ROOT, SMALL, lively_detector, small_config

TRACED_SIZE = (64, 80)
OTHER_SIZES = [(64, 80), (96, 64), (64, 129), (33, 47), (150, 203)]


@functools.cache
def detector(name: str) -> torch.nn.Module:
    return lively_detector(small_config(name))


@functools.cache
def traced(name: str) -> torch.jit.ScriptModule:
    return trace_detector(detector(name), size=TRACED_SIZE)


def assert_same(ours: tuple, theirs: tuple) -> None:
    for name, a, b in zip(("boxes", "scores", "classes", "masks"), ours, theirs, strict=False):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCES.get(name, 0))
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn"])
@pytest.mark.parametrize("size", OTHER_SIZES)
def test_traced_equals_eager(name, size):
    image = example_image(*size, seed=3)
    ours = ExportableDetector(detector(name))(image)
    assert len(ours) == (4 if name == "mask_rcnn" else 3)
    assert len(ours[1]) >= 10 and ours[1].std() > 0.01
    assert_same(ours, traced(name)(image))


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn"])
def test_image_without_any_detection(name):
    model, black = copy.deepcopy(detector(name)), torch.zeros(3, 90, 64)
    owner = model if name == "retinanet" else model.roi_heads.box_predictor
    owner.test_score_thresh = ExportableDetector(model)(black)[1].max().item() + 1e-3
    image = example_image(*TRACED_SIZE)
    assert len(ExportableDetector(model)(image)[1]) > 0
    exported = trace_detector(model, size=TRACED_SIZE)
    for nothing in (ExportableDetector(model)(black), exported(black)):
        assert [len(output) for output in nothing] == [0] * len(nothing)
    assert_same(ExportableDetector(model)(image), exported(image))


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn"])
def test_an_exported_detector_gives_what_the_detector_gives(name):
    image = example_image(70, 90)
    boxes, scores, classes, *masks = ExportableDetector(detector(name))(image)
    with torch.no_grad():
        instances = detector(name)([{"image": image}])[0]["instances"]
    # The detector itself also drops boxes without area.
    kept = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    torch.testing.assert_close(instances.pred_boxes.tensor, boxes[kept])
    torch.testing.assert_close(instances.scores, scores[kept])
    assert instances.pred_classes.tolist() == classes[kept].tolist()
    assert [mask.shape for mask in masks] == ([(len(boxes), 1, 28, 28)] if name == "mask_rcnn" else [])


def test_example_images_differ_and_have_something_on_them():
    image = example_image(40, 70, seed=1)
    assert image.shape == (3, 40, 70) and image.min() >= 0 and 100 < image.max() <= 255
    assert torch.equal(image, example_image(40, 70, seed=1))
    assert not torch.equal(image, example_image(40, 70, seed=2))


# -- comparing -------------------------------------------------------------------------------------


def perturbed(name: str, layer: str, change) -> ExportableDetector:
    model = copy.deepcopy(detector(name))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if layer in parameter_name:
                change(parameter)
    return ExportableDetector(model)


def test_equal_models_compare_equal():
    images = [example_image(64, 90, seed=1), example_image(80, 50, seed=2)]
    rows = compare(detector("mask_rcnn"), ExportableDetector(detector("mask_rcnn")), images)
    assert [(row["height"], row["width"], row["ok"]) for row in rows] == [(64, 90, True), (80, 50, True)]
    assert all(row["detections"] == row["detections_exported"] > 0 for row in rows)
    assert all(row[name] == 0 for row in rows for name in ("boxes", "scores", "masks"))


@pytest.mark.parametrize(
    "name, layer, change, measure",
    [
        ("retinanet", "head.bbox_pred.bias", lambda p: p.add_(0.002), "boxes"),
        ("mask_rcnn", "mask_head.predictor.bias", lambda p: p.add_(0.05), "masks"),
        ("retinanet", "head.cls_score.bias", lambda p: p.add_(0.003), "scores"),
    ],
)
def test_a_small_difference_is_found(name, layer, change, measure):
    row = compare(detector(name), perturbed(name, layer, change), [example_image(64, 90, seed=1)])[0]
    assert not row["ok"]
    assert row["detections"] != row["detections_exported"] or row[measure] > TOLERANCES[measure]


def test_another_number_of_detections_is_found():
    fewer = ExportableDetector(copy.deepcopy(detector("retinanet")))
    fewer.detector.max_detections_per_image = 7
    row = compare(detector("retinanet"), fewer, [example_image(64, 90, seed=1)])[0]
    assert (row["ok"], row["detections_exported"]) == (False, 7)
    assert row["detections"] > 7 and "boxes" not in row


def test_other_classes_are_found():
    class Renamed(torch.nn.Module):
        def forward(self, image):
            boxes, scores, classes = ExportableDetector(detector("retinanet"))(image)
            return boxes, scores, (classes + 1) % 3

    row = compare(detector("retinanet"), Renamed(), [example_image(64, 90, seed=1)])[0]
    assert (row["ok"], row["classes_equal"], row["scores"]) == (False, False, 0)


def test_nan_is_a_difference():
    class Broken(torch.nn.Module):
        def forward(self, image):
            boxes, scores, classes = ExportableDetector(detector("retinanet"))(image)
            return boxes * float("nan"), scores, classes

    assert not compare(detector("retinanet"), Broken(), [example_image(64, 90, seed=1)])[0]["ok"]


def row(detections: int, ok: bool) -> dict:
    return {
        "height": 64,
        "width": 90,
        "detections": detections,
        "detections_exported": 3,
        "ok": ok,
        "boxes": 0.5,
    }


def test_rows_as_text():
    text, proven = describe([row(3, True), row(4, False)])
    assert text.splitlines() == [
        "64 x 90: 3 detections, 3 exported; largest difference: boxes 5.0e-01; equal",
        "64 x 90: 4 detections, 3 exported; largest difference: boxes 5.0e-01; NOT EQUAL",
    ]
    assert not proven
    assert describe([row(3, True), row(0, True)])[1]


def test_no_detection_proves_nothing():
    text, proven = describe([row(0, True), row(0, True)])
    assert not proven and "NOT PROVEN" in text and "--images" in text


def test_images_to_compare_on(shapes):
    drawn = comparison_images(small_config())
    assert [tuple(image.shape[1:]) for image in drawn] == [(64, 96), (85, 64)]
    files = sorted((shapes / "val").iterdir())[:2]
    images = comparison_images(small_config("retinanet", "INPUT.MIN_SIZE_TEST", "48"), files)
    assert [(len(image), min(image.shape[1:]), image.dtype) for image in images] == [
        (3, 48, torch.float32)
    ] * 2
    bgr = cv2.imread(str(files[0]))
    rgb_mean = torch.from_numpy(bgr[..., ::-1].mean(axis=(0, 1))).float()
    torch.testing.assert_close(images[0].mean(dim=(1, 2)), rgb_mean, atol=2, rtol=0)


def test_unreadable_image_to_compare_on(tmp_path):
    with pytest.raises(InputError, match="cannot read the image .*absent.jpg"):
        comparison_images(small_config(), [tmp_path / "absent.jpg"])


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "lively.pth"
    torch.save({"model": detector("retinanet").state_dict()}, path)
    return path


def test_export_writes_the_model_and_the_report(weights, tmp_path):
    path, rows = export_detector(small_config(), weights, tmp_path / "new" / "export")
    assert path.parent == tmp_path / "new" / "export"
    report = json.loads((path.parent / REPORT_FILE).read_text())
    assert report == {"format": "torchscript", "file": path.name, "tolerances": TOLERANCES, "images": rows}
    assert len(rows) >= 2
    assert any(row["height"] > row["width"] for row in rows) and any(
        row["height"] < row["width"] for row in rows
    )
    for row in rows:
        assert row["ok"] and row["classes_equal"] and row["detections"] == row["detections_exported"] > 0
        assert (row["height"], row["width"]) != (64, 80)
    image = example_image(50, 70)
    assert_same(ExportableDetector(detector("retinanet"))(image), torch.jit.load(path)(image))


def test_export_tool_fails_where_the_answers_differ(weights, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TOLERANCES, "scores", -1.0)
    arguments = [
        "--config-file",
        CONFIGS["retinanet"],
        "--weights",
        weights,
        "--output",
        tmp_path,
        "--opts",
        *SMALL["retinanet"],
    ]
    monkeypatch.setattr("sys.argv", ["export_model.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "tools/export_model.py"), run_name="__main__")
    assert caught.value.code == 1
    assert capsys.readouterr().out.count("NOT EQUAL") == 2
    assert not any(row["ok"] for row in json.loads((tmp_path / REPORT_FILE).read_text())["images"])


def test_unknown_format(tmp_path):
    with pytest.raises(InputError, match="unknown format 'onnxx'.*torchscript"):
        export_detector(small_config(), "absent.pth", tmp_path / "export", file_format="onnxx")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("path", ["absent.pth", ""])
def test_missing_weights(tmp_path, path):
    with pytest.raises(InputError, match="MODEL.WEIGHTS"):
        export_detector(small_config(), path, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_weights_of_another_detector(weights):
    with pytest.raises(InputError, match="of another model"):
        build_detector(small_config("mask_rcnn"), weights)


def test_unwritable_output(weights, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        export_detector(small_config(), weights, tmp_path / "file" / "export")
