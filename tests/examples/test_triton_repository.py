"""The model repository of Triton Inference Server, checked without a server."""

import json
import re
from pathlib import Path

import pytest

from projects_vil.export import ExportedModel, example_image, metadata_path
from tests.projects_vil.export.exporting import skip_without
from tests.projects_vil.helpers import Result, run_tool

TYPES = {"tensor(float)": "TYPE_FP32", "tensor(int64)": "TYPE_INT64", "tensor(uint8)": "TYPE_UINT8"}


def run(model: Path, folder: Path) -> Result:
    return run_tool("../examples/triton_repository.py", model, folder)


@pytest.mark.slow
def test_the_folder_of_a_model(file_of, tmp_path):
    skip_without("onnx")
    original = file_of("mask_rcnn", "onnx", batched=True, fixed_number=100)
    folder = tmp_path / "models/shapes"
    assert run(original, folder).returncode == 0
    config, model = (folder / "config.pbtxt").read_text(), folder / "1/model.onnx"
    names = ["config.pbtxt", "model.onnx", "model.onnx.metadata.json"]
    assert sorted(file.name for file in folder.rglob("*.*")) == names
    assert len(ExportedModel(model)(example_image(96, 150)[None])["scores"]) > 0

    # Triton compares the config with the shapes in onnxruntime, where a variable batch size is -1.
    session, expected = pytest.importorskip("onnxruntime").InferenceSession(model), {}
    for tensor in (*session.get_inputs(), *session.get_outputs()):
        sizes = ", ".join(str(size) if isinstance(size, int) else "-1" for size in tensor.shape)
        expected[tensor.name] = TYPES[tensor.type], sizes
    assert len(expected) == 6 and expected.pop("count") == ("TYPE_INT64", "-1")
    tensors = re.findall(r'put { name: "(\w+)" data_type: (\w+) dims: \[ ([-0-9, ]+) \] }', config)
    assert {name: (kind, f"-1, {sizes}") for name, kind, sizes in tensors} == expected

    metadata = json.loads(metadata_path(model).read_text())
    for change in ({"fixed_detections": None}, {"input": metadata["input"] | {"batched": False}}):
        metadata_path(model).write_text(json.dumps(metadata | change))
        assert "--batched --fixed-detections" in run(model, tmp_path / "models/other").stderr

    definition = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    parsed = pytest.importorskip("google.protobuf.text_format").Parse(config, definition.ModelConfig())
    assert parsed.max_batch_size > 1 and parsed.HasField("dynamic_batching") and parsed.output[-1].HasField("reshape")


def test_a_model_that_triton_cannot_serve_and_an_existing_folder(file_of, tmp_path):
    model = file_of("retinanet", "torchscript")
    assert "Export with --format onnx --batched --fixed-detections" in str(run(model, tmp_path / "models/new"))
    assert f"'{tmp_path}' already exists" in str(run(model, tmp_path))
    assert not any(tmp_path.iterdir())
