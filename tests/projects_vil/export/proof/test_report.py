"""The report of an export: it says what differs, on images that say something."""

import copy

import cv2
import pytest
import torch

from projects_vil.export import ExportedModel, describe_report
from projects_vil.export.proof.report import check_export, comparison_images, example_image
from tests.projects_vil.export.exporting import demo_detector
from tests.projects_vil.helpers import small_config


def test_a_report_as_text(exported):
    path, report = exported("retinanet")
    *rows, last = describe_report(report).splitlines()
    assert len(rows) == 4 and all(row.endswith("; equal") for row in rows)
    assert last.startswith(f"model.ts: {path.stat().st_size / 1e6:.1f} MB, fp32; 64 x 96: ")
    assert last.endswith(" threads)") and "times as fast" in last
    latency = {"eager_ms": 30.04, "exported_ms": 20.4, "ratio": 1.473}
    last = describe_report(report | {"latency": report["latency"] | latency}).splitlines()[-1]
    assert "64 x 96: 20.4 ms, eager 30.0 ms, medians: 1.47 times as fast" in last
    row = {"dataset": "mine", "task": "bbox", "AP": 31.2, "AP_exported": 30.9, "ok": False}
    text = describe_report(report | {"evaluation": [row, row | {"ok": True}], "opset": 20})
    assert "mine, bbox: AP 31.2, exported 30.9; NOT EQUAL to 0.1" in text.splitlines()
    assert "mine, bbox: AP 31.2, exported 30.9; equal to 0.1" in text.splitlines()
    assert ", opset 20, fp32" in text.splitlines()[-1]
    facts = {"operators": {"Conv": 3, "Relu": 2}, "types": {"FLOAT": 5}, "providers": ["A", "B"]}
    facts["tensorrt"] = {"version": "11.0", "undocumented": []}
    line = describe_report(report | {"onnx": facts}).splitlines()[-2]
    assert line == "5 nodes of 2 standard operators, valid to the last shape; loads with A, B"
    facts["tensorrt"]["undocumented"] = ["Clip of INT64", "Unique of FLOAT"]
    line = describe_report(report | {"onnx": facts}).splitlines()[-2]
    assert line == "not documented by TensorRT 11.0: Clip of INT64, Unique of FLOAT"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layer, change",
    [
        ("retinanet", "head.bbox_pred.bias", 0.01),
        ("retinanet", "head.cls_score.bias", 0.003),
        ("mask_rcnn", "mask_head.predictor.bias", 0.05),
        ("mask_rcnn", "box_predictor.bbox_pred.bias", 0.02),
    ],
)
def test_an_export_of_slightly_other_weights_is_not_ok(exported, name, layer, change):
    path, _ = exported(name)
    other = copy.deepcopy(demo_detector(name))
    with torch.no_grad():
        (parameter,) = (parameter for key, parameter in other.named_parameters() if key.endswith(layer))
        parameter += change
    images = comparison_images(small_config(name))[:2]
    report = check_export(small_config(name), other, ExportedModel(path), images, runs=1)
    assert report["ok"] is False and "NOT EQUAL" in describe_report(report)


@pytest.mark.slow
def test_another_average_precision_is_not_ok(shapes, exported, monkeypatch):
    cfg, model = small_config(), ExportedModel(exported("retinanet")[0])
    monkeypatch.setattr("projects_vil.export.proof.report.AP_TOLERANCE", -1.0)
    report = check_export(cfg, demo_detector("retinanet"), model, comparison_images(cfg)[:1], runs=1, evaluate=True)
    assert all(row["ok"] for row in report["images"]) and not report["evaluation"][0]["ok"]
    assert report["ok"] is False and "; NOT EQUAL to" in describe_report(report)


# -- images ----------------------------------------------------------------------------------------


def test_example_images_differ_and_have_something_on_them():
    image = example_image(40, 70, seed=1)
    assert image.shape == (3, 40, 70) and image.dtype == torch.uint8 and 100 < image.max() <= 255
    assert torch.equal(image, example_image(40, 70, seed=1))
    assert not torch.equal(image, example_image(40, 70, seed=2))


def test_images_to_compare_on(shapes):
    drawn = comparison_images(small_config())
    assert [tuple(image.shape[1:]) for image in drawn] == [(64, 96), (85, 64), (64, 107), (35, 35)]
    files = sorted((shapes / "val").iterdir())[:2]
    for channels in ("RGB", "BGR"):
        cfg = small_config("retinanet", "INPUT.MIN_SIZE_TEST", "48", "INPUT.FORMAT", channels)
        images = comparison_images(cfg, files)
        assert [(len(image), min(image.shape[1:]), image.dtype) for image in images] == [(3, 48, torch.uint8)] * 2
        means = cv2.imread(str(files[0])).mean(axis=(0, 1))
        expected = torch.from_numpy(means if channels == "BGR" else means[::-1].copy()).float()
        torch.testing.assert_close(images[0].float().mean(dim=(1, 2)), expected, atol=2, rtol=0)
