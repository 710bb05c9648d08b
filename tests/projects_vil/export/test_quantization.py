"""int8: which layers stay float, which images it is calibrated on, and that average precision decides."""

import contextlib
import dataclasses
import shutil
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from detectron2.config import CfgNode
from torch import Tensor, nn
from torchvision.ops import box_iou

from backbones import ConfigError
from backbones.build import VARIANTS
from projects_vil.data import load_dataset, register_datasets
from projects_vil.export import (
    ExportedModel,
    describe_report,
    eager_detections,
    example_image,
    export_detector,
    parity,
    read_metadata,
)
from projects_vil.export.formats import describe_onnx, import_openvino, load_model
from projects_vil.export.images import comparison_images
from projects_vil.export.parity import check_export
from projects_vil.export.quantization import FLOAT_LAYERS, CalibrationImages, fold_transposes, quantize, stays_float
from tests.projects_vil.export.exporting import FEW_LEVELS, demo_detector, skip_without
from tests.projects_vil.export.onnx_files import node, saved
from tests.projects_vil.helpers import small_config, untrained_detector

TAKEN = {"sides": [32, 8192], "dtype": "uint8", "batched": False}


def test_layers_that_stay_float_exist():
    """The detectors have parameters of these names: a renamed one would be quantised without a warning."""
    names = [name for detector in ("retinanet", "mask_rcnn") for name, _ in demo_detector(detector).named_parameters()]
    for layer in FLOAT_LAYERS[1:]:  # the first is LIT's
        assert any(layer in name for name in names), layer
    assert stays_float("__module.detector.backbone.bottom_up.net.stages.1.patch_embed.offset/aten::_convolution/Add")
    assert not stays_float("detector.head.cls_subnet.0.weight")


# -- files -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def shallow_variants() -> Iterator[CfgNode]:
    """The config of a RetinaNet of few levels on a ViL of one block a stage, which is exported in less time."""
    with pytest.MonkeyPatch.context() as patch:
        for key, variant in list(VARIANTS.items()):
            stages = tuple(dataclasses.replace(stage, depth=1) for stage in variant.stages)
            patch.setitem(VARIANTS, key, dataclasses.replace(variant, stages=stages))
        yield small_config("retinanet", "MODEL.FPN.IN_FEATURES", "['stage2', 'stage3']", *FEW_LEVELS["retinanet"])


@pytest.fixture(scope="session")
def shallow() -> nn.Module:
    with shallow_variants() as cfg:
        return untrained_detector(cfg)


def quantized_weights(path, file_format: str) -> list[str]:
    """Return the names of the int8 layers, with the paths of their modules."""
    if file_format == "openvino":
        model = import_openvino().Core().read_model(path)
        return [node.get_friendly_name() for node in model.get_ops() if node.get_type_name() == "FakeQuantize"]
    import onnx

    graph = onnx.load(str(path)).graph
    return [node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"]


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["onnx", "openvino"])
def test_int8(shapes, shallow, tmp_path, monkeypatch, file_format):
    """Quantise a checkpoint and evaluate it: average precision decides, and here no drop is small enough."""
    skip_without(file_format)
    pytest.importorskip("nncf")
    monkeypatch.setattr(parity, "AP_DROP", -200.0)
    torch.save({"model": shallow.state_dict()}, tmp_path / "shallow.pth")
    options = {"file_format": file_format, "precision": "int8", "calibration_images": 3, "accept_drop": True}
    with shallow_variants() as cfg:
        path, report = export_detector(cfg, tmp_path / "shallow.pth", tmp_path / "export", **options, runs=1)
    assert path.stem == "model_int8" and [row["ok"] for row in report["evaluation"]] == [False]
    assert {row["ok"] for row in report["images"]} == {None} and report["ok"] is report["accept_drop"] is True
    assert "MORE THAN" in describe_report(report)
    metadata, model = read_metadata(path), ExportedModel(path)
    assert metadata["precision"] == "int8" and metadata["quantization"]["calibration_images"] == 3
    assert set(FLOAT_LAYERS) < set(metadata["quantization"]["float_parts"])
    assert {file.name.partition(".")[0] for file in path.parent.iterdir()} == {"model_int8"}
    names = quantized_weights(path, file_format)
    assert len(names) > 20 and not any(map(stays_float, names))
    if file_format == "onnx":
        assert describe_onnx(path)["operators"]["DequantizeLinear"] == len(names)
    with shallow_variants() as cfg:
        report = check_export(cfg, shallow, model, [example_image(64, 96)], runs=1, evaluate=True)
    assert [row["ok"] for row in report["evaluation"]] == [False] and report["ok"] is False
    # The detections are those of the eager detector, with its scores.
    image = example_image(70, 90, seed=5)
    found, theirs = model(image), eager_detections(shallow, image)
    same_class = theirs["classes"][:20, None] == found["classes"]
    overlap, index = (box_iou(theirs["boxes"][:20], found["boxes"]) * same_class).max(1)
    assert overlap.mean() > 0.5 and (theirs["scores"][:20] - found["scores"][index]).abs().mean() < 0.1


class TrackedTensors(Sequence[Tensor]):
    """Eight (4, 4) tensors; ``most`` is how many of them were in memory at once."""

    def __init__(self) -> None:
        self.made: list[weakref.ref] = []
        self.most = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        values = np.random.default_rng(range(len(self))[index]).normal(size=(4, 4)).astype(np.float32)
        self.made.append(weakref.ref(values))
        self.most = max(self.most, sum(one() is not None for one in self.made))
        return torch.from_numpy(values)


def test_products_without_weights_stay_float_in_openvino(tmp_path):
    """Calibration images are read one at a time, too."""
    skip_without("openvino")
    openvino, images = import_openvino(), TrackedTensors()
    operators = openvino.opset13
    image = operators.parameter([4, 4], np.float32)
    weight = operators.convert(operators.constant(np.eye(4, dtype=np.float16)), np.float32)
    linear = operators.matmul(image, weight, False, False, name="linear")
    product = operators.matmul(linear, image, False, True, name="product")
    source, path = tmp_path / "float.xml", tmp_path / "int8.xml"
    openvino.save_model(openvino.Model([product], [image]), source, compress_to_fp16=False)
    quantize(source, path, "openvino", images)
    inputs = {
        node.get_friendly_name(): {value.get_node().get_type_name() for value in node.input_values()}
        for node in openvino.Core().read_model(path).get_ops()
        if node.get_type_name() == "MatMul"
    }
    assert "FakeQuantize" in inputs["linear"] and "FakeQuantize" not in inputs["product"]
    # The one before may still be there while the next is made.
    assert len(images.made) >= len(images) and images.most <= 2


def test_products_without_weights_stay_float_in_onnx(tmp_path):
    """Calibration images are read one at a time, too."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("nncf")
    weight, images = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "weight"), TrackedTensors()
    nodes = node("MatMul", "x", "weight", "a", name="linear"), node("MatMul", "x", "a", "y", name="product")
    quantize(saved(tmp_path, *nodes, constants=[weight]), tmp_path / "int8.onnx", "onnx", images)
    graph = onnx.load(tmp_path / "int8.onnx").graph
    scaled = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    inputs = {node.name: list(node.input) for node in graph.node if node.op_type == "MatMul"}
    assert scaled.issuperset(inputs["linear"]) and scaled.isdisjoint(inputs["product"])
    assert len(images.made) >= len(images) and images.most <= 2


def test_folded_transposes(tmp_path):
    onnx = pytest.importorskip("onnx")
    values = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    nodes = [
        node("Transpose", "a.weight", "t", perm=[1, 0]),
        # A transpose that is used twice, as the exporter's optimiser leaves it; and a weight that is used directly too.
        *(node("MatMul", "x", "t", "c"), node("MatMul", "c", "t", "d")),
        *(node("Transpose", "b.weight", "u"), node("MatMul", "d", "u", "e"), node("MatMul", "e", "b.weight", "f")),
        # The transpose of a value, not of a weight.
        *(node("Transpose", "x", "v", perm=[1, 0]), node("Transpose", "v", "w", perm=[1, 0])),
        node("Add", "w", "f", "y"),
    ]
    weights = [onnx.numpy_helper.from_array(values, name) for name in ("a.weight", "b.weight")]
    path, image = saved(tmp_path, *nodes, constants=weights), torch.rand(3, 4)
    (expected,) = load_model(path)(image)
    model = onnx.load(path)
    fold_transposes(model.graph)
    assert {tensor.name for tensor in model.graph.initializer} == {"a.weight.t", "b.weight", "b.weight.u"}
    assert [one.op_type for one in model.graph.node] == ["MatMul"] * 4 + ["Transpose"] * 2 + ["Add"]
    onnx.save(model, path)
    torch.testing.assert_close(load_model(path)(image)[0], expected)


# -- calibration images ----------------------------------------------------------------------------


def test_calibration_images(shapes, tmp_path, monkeypatch):
    cfg = small_config()
    files = [record["file_name"] for record in load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)]
    images = CalibrationImages(cfg, 4, TAKEN)
    assert len(images) == 4 and len(CalibrationImages(cfg, 100, TAKEN)) == len(files) == 16
    for image, expected in zip(images, comparison_images(cfg, files[::4]), strict=True):
        assert image.dtype == torch.uint8 and torch.equal(image, expected)
    (image,) = CalibrationImages(cfg, 1, TAKEN | {"dtype": "float32", "batched": True})
    assert image.dtype == torch.float32 and torch.equal(image[0].byte(), comparison_images(cfg, files[:1])[0])
    images.check()
    with pytest.raises(ConfigError, match=files[0]):
        CalibrationImages(cfg, 16, TAKEN | {"sides": [32, 64]}).check()
    # Each is read when it is asked for.
    shutil.copytree(shapes, tmp_path / "shapes")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    register_datasets(cfg)
    images = CalibrationImages(cfg, 16, TAKEN)
    for path in (tmp_path / "shapes/train").iterdir():
        path.write_text("not an image")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        images.check()
