"""int8: float layers, calibration images, and the decision by average precision."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from backbones import ConfigError
from projects_vil.data import load_dataset
from projects_vil.export import ExportedModel, export_detector, parity
from projects_vil.export.formats import import_openvino
from projects_vil.export.quantization import FLOAT_LAYERS, calibration_files, quantize, stays_float
from tests.projects_vil.export.exporting import FEW_LEVELS, demo_detector, onnx_file, shallow_variants, skip_without
from tests.projects_vil.helpers import small_config, untrained_detector


def test_layers_that_stay_float_exist():
    """A renamed layer would be quantized without a warning."""
    names = [name for detector in ("retinanet", "mask_rcnn") for name, _ in demo_detector(detector).named_parameters()]
    for layer in FLOAT_LAYERS[1:]:  # the first is LIT's
        assert any(layer in name for name in names), layer


# Operations that output quantized values as floats.
SCALED = ("DequantizeLinear", "FakeQuantize")


def operations(path: Path, file_format: str) -> list[tuple[str, set[str], set[str]]]:
    """Return the type, inputs and outputs of all operations of a file in topological order."""
    if file_format == "onnx":
        import onnx

        return [(node.op_type, set(node.input), set(node.output)) for node in onnx.load(path).graph.node]
    names = lambda values: {value.get_node().get_friendly_name() for value in values}  # noqa: E731
    nodes = import_openvino().Core().read_model(path).get_ordered_ops()
    return [(node.get_type_name(), names(node.input_values()), names(node.outputs())) for node in nodes]


@pytest.mark.slow
@pytest.mark.parametrize(("file_format", "accept_drop"), [("onnx", True), ("openvino", False)])
def test_int8(shapes, tmp_path, monkeypatch, file_format, accept_drop):
    """Average precision decides. The allowed drop is set so low that no export passes."""
    skip_without(file_format)
    pytest.importorskip("nncf")
    monkeypatch.setattr(parity, "AP_DROP", -200.0)
    monkeypatch.setattr("projects_vil.export.formats._WINOGRAD_CHANNELS", 16)
    options = {"file_format": file_format, "precision": "int8", "calibration_images": 3, "accept_drop": accept_drop}
    cfg = small_config("retinanet", "MODEL.FPN.IN_FEATURES", "['stage2', 'stage3']", *FEW_LEVELS["retinanet"].split())
    with shallow_variants(depth=1):
        detector = untrained_detector(cfg)
        torch.save({"model": detector.state_dict()}, tmp_path / "shallow.pth")
        path, report = export_detector(cfg, tmp_path / "shallow.pth", tmp_path / "export", **options)
    assert path.stem == "model_int8" and [row["ok"] for row in report["evaluation"]] == [False]
    assert {row["ok"] for row in report["images"]} == {None} and report["ok"] is report["accept_drop"] is accept_drop
    assert {file.name.partition(".")[0] for file in path.parent.iterdir()} == {"model_int8"}
    model = ExportedModel(path)
    assert model.metadata["precision"] == "int8" and model.metadata["quantization"]["calibration_images"] == 3
    assert model.metadata["quantization"]["float_layers"] == list(FLOAT_LAYERS)
    found = operations(path, file_format)
    assert not any(kind == "Einsum" for kind, _, _ in found)  # of Winograd's filtering
    scaled = [one for one in found if one[0] in SCALED]
    names = set().union(*(inputs | outputs for _, inputs, outputs in scaled))
    assert len(names) > 50 and not any(map(stays_float, names))
    # Most detections equal detectron2's.
    rows = report["images"]
    assert sum(row["changed"] + row["unmatched"] for row in rows) < 0.5 * sum(row["detections"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name, file_format", [("retinanet", "onnx"), ("mask_rcnn", "openvino")])
def test_predictions_of_the_heads_are_not_quantized(written, tmp_path, name, file_format):
    """A quantized score could not exceed its maximum on the calibration images, which are gray here."""
    pytest.importorskip("nncf")
    model = written(name, file_format, batched=True, dtype="float32")
    path, images = tmp_path / model.path.name, [torch.full((1, 3, 96, 128), value) for value in (0.0, 100.0, 200.0)]
    quantize(model.path, path, file_format, images, lambda image: image)
    predicted, quantized = set(), 0
    for kind, inputs, outputs in operations(path, file_format):
        # These use shapes and positions, not values.
        if kind in ("NonZero", "Shape", "ShapeOf", "RoiAlign", "ROIAlign"):
            continue
        quantized += kind in SCALED
        assert not (predicted & inputs and kind in SCALED), inputs
        if predicted & inputs or any(layer in value for layer in FLOAT_LAYERS for value in inputs | outputs):
            predicted |= outputs
    assert quantized > 5 and len(predicted) > 50


def random_input(seed: int) -> Tensor:
    return torch.rand(4, 4, generator=torch.Generator().manual_seed(seed))


def test_products_without_weights_stay_float_in_onnx(tmp_path):
    pytest.importorskip("nncf")
    onnx = pytest.importorskip("onnx")
    nodes, eye = "[linear] a = MatMul(x, weight) [product] y = MatMul(x, a)", np.eye(4, dtype=int).ravel()
    source = onnx_file(tmp_path, nodes, weights=f"float[4, 4] weight = {{{', '.join(map(str, eye))}}}")
    path = source.with_stem("int8")
    quantize(source, path, "onnx", range(8), random_input)
    found = operations(path, "onnx")
    scaled = set().union(*(outputs for kind, _, outputs in found if kind in SCALED))
    linear, product = (inputs for kind, inputs, _ in found if kind == "MatMul")
    assert linear & scaled and not product & scaled
    # CPUs without VNNI add two products of an unsigned and a signed byte in 16 bits.
    weights = map(onnx.numpy_helper.to_array, onnx.load(path).graph.initializer)
    assert max(abs(weight.astype(int)).max() for weight in weights if weight.ndim == 2) in (63, 64)


def test_calibration_images(shapes, weights, tmp_path, monkeypatch):
    """They are evenly spaced in the training set, and are read before the export, which takes minutes."""
    pytest.importorskip("nncf")
    skip_without("onnx")
    cfg = small_config()
    files = [record["file_name"] for record in load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)]
    assert [calibration_files(cfg, number) for number in (4, 100)] == [files[::4], files] and len(files) == 16
    shutil.copytree(shapes, tmp_path / "shapes")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    for path in (tmp_path / "shapes/train").iterdir():
        path.write_text("not an image")
    with pytest.raises(ConfigError, match=str(tmp_path / "shapes/train")):
        export_detector(cfg, weights(), tmp_path / "export", file_format="onnx", precision="int8")
    assert not (tmp_path / "export").exists()
