"""int8: which layers stay float, and that the average precision decides."""

import numpy as np
import pytest
import torch

from projects_vil.export import FORMATS, ExportedModel, export_detector, read_metadata
from projects_vil.export import report as reports
from projects_vil.export.formats.openvino import import_openvino
from projects_vil.export.formats.quantizing import FLOAT_LAYERS, stays_float
from projects_vil.export.stages import Stages
from tests.projects_vil.export.exporting import BOTH, demo_detector, skip_without
from tests.projects_vil.helpers import small_config


def test_layers_that_stay_float_are_there():
    """By the names of the detectors' own parameters: one that was renamed would be quantised without a word."""
    names = [name for detector in BOTH for name, _ in demo_detector(detector).named_parameters()]
    for layer in FLOAT_LAYERS[1:]:  # the first is LIT's
        assert any(layer in name for name in names), layer
    predictors = [name for name, _ in demo_detector("cascade_mask_rcnn").named_parameters() if "box_predictor" in name]
    assert len(predictors) == 12 and all(map(stays_float, predictors))
    assert stays_float("detector.head.bbox_pred.weight") and not stays_float("detector.head.cls_score.weight")
    assert stays_float("__module.detector.backbone.bottom_up.net.stages.1.patch_embed.offset/aten::_convolution/Add")


def quantized_weights(path, file_format: str) -> list[str]:
    """The names of what became int8, with the paths of their modules."""
    if file_format == "openvino":
        model = import_openvino().Core().read_model(path)
        return [node.get_friendly_name() for node in model.get_ops() if node.get_type_name() == "FakeQuantize"]
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(str(path)).graph
    return [node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"]


@pytest.mark.slow
def test_products_without_weights_stay_float(tmp_path):
    skip_without("openvino")
    openvino = import_openvino()
    operators = openvino.opset13
    image = operators.parameter([5, 7], np.float32)
    weight = operators.convert(operators.constant(np.eye(7, dtype=np.float16)), np.float32)
    linear = operators.matmul(image, weight, False, False, name="linear")
    product = operators.matmul(linear, image, False, True, name="product")
    source, path = tmp_path / "float.xml", tmp_path / "int8.xml"
    openvino.save_model(openvino.Model([product], [image]), source, compress_to_fp16=False)
    FORMATS["openvino"].quantize(source, path, [torch.rand(5, 7) for _ in range(2)], Stages())
    model = openvino.Core().read_model(path)
    inputs = {
        node.get_friendly_name(): {value.get_node().get_type_name() for value in node.input_values()}
        for node in model.get_ops()
        if node.get_type_name() == "MatMul"
    }
    assert "FakeQuantize" in inputs["linear"] and "FakeQuantize" not in inputs["product"]


@pytest.mark.slow
@pytest.mark.parametrize(("file_format", "accepted"), [("openvino", False), ("onnx", True)])
def test_int8(shapes, weights, exported, tmp_path, monkeypatch, file_format, accepted):
    skip_without(file_format)
    plain, _ = exported("retinanet", file_format=file_format)
    monkeypatch.setattr(reports, "AP_DROP", -200.0)
    path, report = export_detector(
        small_config(),
        weights(),
        tmp_path,
        file_format=file_format,
        precision="int8",
        calibration_images=3,
        accept_drop=accepted,
        runs=1,
    )
    assert path.name == f"model_int8{path.suffix}" and sum(map(len, (report["evaluation"], report["images"]))) == 5
    # No drop is small enough here, and that decides alone.
    assert [row["ok"] for row in report["evaluation"]] == [False] and report["ok"] is accepted
    assert {row["ok"] for row in report["images"]} == {None}
    assert "MORE THAN" in reports.describe_report(report) and "EQUAL" not in reports.describe_report(report)
    metadata = read_metadata(path)
    assert metadata["precision"] == "int8" and metadata["quantization"]["calibration_images"] == 3
    assert set(FLOAT_LAYERS) < set(metadata["quantization"]["float_parts"])
    names = quantized_weights(path, file_format)
    assert len(names) > 30 and not any(map(stays_float, names)) and not quantized_weights(plain, file_format)
    assert report["bytes"] < sum(file.stat().st_size for file in plain.parent.iterdir() if file.suffix != ".json")
    assert ExportedModel(path).metadata == metadata
    left = {file.name for file in tmp_path.iterdir()}
    assert {name.partition(".")[0] for name in left} == {"model_int8"}
