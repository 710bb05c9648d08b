"""The model repository of Triton Inference Server, checked without a server."""

import re

import pytest
import torch

from projects_vil import Detector
from projects_vil.export import check_triton, example_image
from tests.projects_vil.export.exporting import FEW_LEVELS, skip_without
from tests.projects_vil.helpers import CONFIGS, SMALL, message, run_tool, small_config, untrained_detector

OVERRIDES = ("MODEL.TRANSFORMER.VARIANT", "timm:resnet10t", "MODEL.FPN.IN_FEATURES", "['stage2', 'stage3']")
OVERRIDES += (*FEW_LEVELS["mask_rcnn"].split(), "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.001")
FLAGS = ("--format", "onnx", "--batched", "--fixed-detections")
TYPES = {"tensor(float)": "TYPE_FP32", "tensor(int64)": "TYPE_INT64", "tensor(uint8)": "TYPE_UINT8"}


@pytest.fixture
def run(tmp_path):
    """Run ``tools/export_model.py`` with options, on a small convolutional backbone."""
    cfg = small_config("mask_rcnn", *OVERRIDES)
    torch.save({"model": untrained_detector(cfg).state_dict()}, tmp_path / "random.pth")
    checkpoint = ("--config-file", CONFIGS["mask_rcnn"], "--weights", tmp_path / "random.pth")
    checkpoint += (*SMALL["mask_rcnn"], *OVERRIDES, "--output", tmp_path / "export")
    return lambda *options: run_tool("export_model.py", *checkpoint, *options)


@pytest.mark.slow
def test_the_folder_of_a_model(run, tmp_path):
    skip_without("onnx")
    folder = tmp_path / "models/shapes"
    assert run(*FLAGS, "--triton", folder).returncode == 0
    config, model = (folder / "config.pbtxt").read_text(), folder / "1/model.onnx"
    names = ["config.pbtxt", "model.onnx", "model.onnx.metadata.json"]
    assert sorted(file.name for file in folder.rglob("*.*")) == names
    assert len(Detector.load(model)(example_image(96, 150).permute(1, 2, 0).numpy())) > 0
    (folder / "config.pbtxt").write_text("mine")
    assert str(folder) in run(*FLAGS, "--triton", folder).stderr and (folder / "config.pbtxt").read_text() == "mine"

    # Triton compares the config with the shapes in onnxruntime, where a variable batch size is -1.
    session, expected = pytest.importorskip("onnxruntime").InferenceSession(model), {}
    for tensor in (*session.get_inputs(), *session.get_outputs()):
        sizes = ", ".join(str(size) if isinstance(size, int) else "-1" for size in tensor.shape)
        expected[tensor.name] = TYPES[tensor.type], sizes
    assert len(expected) == 6 and expected.pop("count") == ("TYPE_INT64", "-1")
    tensors = re.findall(r'put { name: "(\w+)" data_type: (\w+) dims: \[ ([-0-9, ]+) \] }', config)
    assert {name: (kind, f"-1, {sizes}") for name, kind, sizes in tensors} == expected

    definition = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    parsed = pytest.importorskip("google.protobuf.text_format").Parse(config, definition.ModelConfig())
    assert parsed.max_batch_size > 1 and parsed.HasField("dynamic_batching") and parsed.output[-1].HasField("reshape")


@pytest.mark.parametrize("change", [{"file_format": "torchscript"}, {"batched": False}, {"fixed_detections": False}])
def test_a_model_that_triton_cannot_serve(tmp_path, change):
    options = {"file_format": "onnx", "batched": True, "fixed_detections": True}
    check_triton(tmp_path / "new", **options)
    assert "triton needs" in message(check_triton, tmp_path / "new", **options | change)
