"""The report of an export: it says what differs."""

import copy

import pytest
import torch

from projects_vil.export import ExportedModel, describe_report
from projects_vil.export.images import comparison_images
from projects_vil.export.proof.report import check_export
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
