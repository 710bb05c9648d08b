"""int8: which layers stay float, and that the average precision decides."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.config import CfgNode
from torch import nn
from torchvision.ops import box_iou

from backbones.variants import VARIANTS
from projects_vil.export import FORMATS, ExportedModel, export_detector, make_exportable, read_metadata
from projects_vil.export.formats import load_model, tensorrt
from projects_vil.export.formats.openvino import import_openvino
from projects_vil.export.formats.quantizing import FLOAT_LAYERS, stays_float
from projects_vil.export.images import example_image
from projects_vil.export.int8 import write_int8
from projects_vil.export.onnx_graph.standard import inferred
from projects_vil.export.onnx_graph.tensorrt_operators import undocumented
from projects_vil.export.proof import report as reports
from projects_vil.export.proof.report import eager_detections
from projects_vil.export.stages import Stages
from tests.gpu import on_gpu
from tests.projects_vil.export.exporting import BOTH, FEW_LEVELS, RECORDED, demo_detector, skip_without
from tests.projects_vil.helpers import lively_detector, small_config

CALIBRATION = [example_image(64, 96 + 8 * seed, seed=seed) for seed in range(3)]


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


@contextlib.contextmanager
def shallow_variants() -> Iterator[CfgNode]:
    """The config of a RetinaNet of few levels on a ViL of one block a stage: recorded in a third of the demo's time."""
    with pytest.MonkeyPatch.context() as patch:
        for key, variant in list(VARIANTS.items()):
            stages = tuple(dataclasses.replace(stage, depth=1) for stage in variant.stages)
            patch.setitem(VARIANTS, key, dataclasses.replace(variant, stages=stages))
        yield small_config("retinanet", "MODEL.FPN.IN_FEATURES", "['stage2', 'stage3']", *FEW_LEVELS["retinanet"])


@pytest.fixture(scope="session")
def shallow() -> nn.Module:
    with shallow_variants() as cfg:
        return lively_detector(cfg)


@pytest.fixture(scope="session")
def for_tensorrt(made_once, shallow) -> Path:
    """A folder as ``--format tensorrt --precision int8`` leaves it, without the engine, which takes TensorRT and a GPU.

    In it are ``float.onnx``, and ``int8.onnx``, which the engine is built of.
    """
    pytest.importorskip("onnxruntime")

    def fill(folder: Path) -> None:
        exportable, path = make_exportable(shallow, fixed_number=100), folder / "model.engine"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensorrt, "build_engine", lambda file, *, largest: f"{file.name} {largest}".encode())
            write_int8(exportable, example_image(*RECORDED), path, "tensorrt", CALIBRATION, Stages())

    return made_once("int8_for_tensorrt", fill)


@pytest.mark.slow
def test_the_file_that_an_int8_engine_is_built_of(for_tensorrt):
    """As NVIDIA documents explicit quantisation: every zero point is 0, weights have a scale a channel, biases none."""
    onnx = pytest.importorskip("onnx")
    assert (for_tensorrt / "model.engine").read_text() == f"int8.onnx {tensorrt.LARGEST_SIDE}"
    model = onnx.load(for_tensorrt / "int8.onnx")
    assert undocumented(inferred(for_tensorrt / "int8.onnx")) == []
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    scaling = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    for value, scale, zero in (node.input for node in scaling):
        assert arrays[zero].dtype == np.int8 and not arrays[zero].any() and (arrays[scale] > 0).all()
        if value in arrays:
            assert arrays[value].dtype == np.int8 and arrays[scale].shape > (1,)
        else:
            assert arrays[scale].shape == ()
    scaled = {node.output[0] for node in scaling if node.op_type == "DequantizeLinear"}
    layers = [node for node in model.graph.node if node.op_type in ("Conv", "MatMul", "Gemm")]
    quantized = [node for node in layers if scaled.intersection(node.input)]
    assert len(quantized) > 20
    assert {name for node in quantized for name in node.input[:2]} == scaled
    for node in quantized:
        # A bias is float, and so is what comes out.
        assert all(arrays[name].dtype == np.float32 for name in node.input[2:])
        users = [other.op_type for other in model.graph.node if node.output[0] in other.input]
        assert node.op_type == "Conv" or "QuantizeLinear" not in users
    # What is left are products of attention and the layers that predict.
    for node in layers:
        assert node in quantized or not arrays.keys() & set(node.input) or any(map(stays_float, node.input)), node.name


def check_answers(path, eager) -> None:
    image = example_image(70, 90, seed=5)
    boxes, scores, classes, count = load_model(path)(image)
    theirs = eager_detections(eager, image)
    assert abs(len(theirs["scores"]) - int(count)) <= 10
    same_class = theirs["classes"][:20, None] == classes[None, :]
    overlap, place = (box_iou(theirs["boxes"][:20], boxes) * same_class).max(1)
    assert overlap.mean() > 0.85 and (theirs["scores"][:20] - scores[place]).abs().max() < 0.06


@pytest.mark.slow
def test_int8_for_tensorrt_finds_what_eager_finds(for_tensorrt, shallow):
    check_answers(for_tensorrt / "int8.onnx", shallow)


@on_gpu
def test_an_int8_engine_finds_what_eager_finds(for_tensorrt, shallow, tmp_path):
    pytest.importorskip("tensorrt")
    path = tmp_path / "model.engine"
    path.write_bytes(tensorrt.build_engine(for_tensorrt / "int8.onnx", largest=tensorrt.LARGEST_SIDE))
    check_answers(path, shallow)


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
def test_int8_in_onnx(for_tensorrt, shallow, tmp_path):
    """Of the file in float that is there already: writing another takes most of a minute."""
    source, path = for_tensorrt / "float.onnx", tmp_path / "int8.onnx"
    FORMATS["onnx"].quantize(source, path, CALIBRATION, Stages())
    names = quantized_weights(path, "onnx")
    assert len(names) > 30 and not any(map(stays_float, names)) and not quantized_weights(source, "onnx")
    assert path.stat().st_size < 0.7 * source.stat().st_size
    assert FORMATS["onnx"].describe(path)["onnx"]["operators"]["DequantizeLinear"] == len(names)
    check_answers(path, shallow)


@pytest.mark.slow
def test_int8(shapes, shallow, plain, tmp_path, monkeypatch):
    """From a checkpoint to the judgement: average precision decides, and no drop is small enough here."""
    skip_without("openvino")
    monkeypatch.setattr(reports, "AP_DROP", -200.0)
    torch.save({"model": shallow.state_dict()}, tmp_path / "shallow.pth")
    output = tmp_path / "export"
    options = {"file_format": "openvino", "precision": "int8", "calibration_images": 3, "accept_drop": True}
    with shallow_variants() as cfg:
        path, report = export_detector(cfg, tmp_path / "shallow.pth", output, **options, runs=1)
    assert path.name == "model_int8.xml" and sum(map(len, (report["evaluation"], report["images"]))) == 5
    assert [row["ok"] for row in report["evaluation"]] == [False] and report["ok"] is report["accept_drop"] is True
    assert {row["ok"] for row in report["images"]} == {None}
    assert "MORE THAN" in reports.describe_report(report) and "EQUAL" not in reports.describe_report(report)
    metadata, model = read_metadata(path), ExportedModel(path)
    assert metadata["precision"] == "int8" and metadata["quantization"]["calibration_images"] == 3
    assert set(FLOAT_LAYERS) < set(metadata["quantization"]["float_parts"]) and model.metadata == metadata
    names = quantized_weights(path, "openvino")
    assert len(names) > 20 and not any(map(stays_float, names))
    assert not quantized_weights(plain("openvino").path, "openvino")
    parameters = sum(parameter.numel() for parameter in shallow.parameters())
    assert path.with_suffix(".bin").stat().st_size < 0.6 * 4 * parameters
    assert {file.name.partition(".")[0] for file in output.iterdir()} == {"model_int8"}
    report = reports.check_export(cfg, shallow, model, [example_image(64, 96)], runs=1, evaluate=True)
    assert [row["ok"] for row in report["evaluation"]] == [False] and report["ok"] is False
