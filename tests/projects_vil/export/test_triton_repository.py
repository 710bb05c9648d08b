"""The folder of a model in a model repository of Triton Inference Server, as far as it can be checked without one."""

import re

import pytest

from projects_vil import Detector
from projects_vil.export import example_image
from tests.projects_vil.export.exporting import skip_without
from tests.projects_vil.helpers import CONFIGS, SMALL, run_tool

FLAGS = ("--format", "onnx", "--batched", "--fixed-detections")
TYPES = {"tensor(float)": "TYPE_FP32", "tensor(int64)": "TYPE_INT64", "tensor(uint8)": "TYPE_UINT8"}


@pytest.fixture
def run(weights, tmp_path):
    """``tools/export_model.py`` with options."""
    checkpoint = ("--config-file", CONFIGS["mask_rcnn"], "--weights", weights("mask_rcnn"), *SMALL["mask_rcnn"])
    return lambda *options: run_tool("export_model.py", *checkpoint, "--output", tmp_path / "export", *options)


@pytest.mark.slow
def test_the_folder_of_a_model(run, tmp_path):
    skip_without("onnx")
    folder = tmp_path / "models/shapes"
    assert run(*FLAGS, "--triton", folder).returncode == 0
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.*")}
    assert files.keys() == {"config.pbtxt", "1/model.onnx", "1/model.onnx.metadata.json"}
    assert len(Detector.load(folder / "1/model.onnx")(example_image(96, 150).permute(1, 2, 0).numpy())) > 0
    result = run(*FLAGS, "--triton", folder)
    assert result.returncode != 0 and str(folder) in result.stderr.splitlines()[-1]
    assert files == {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.*")}

    # Triton compares the configuration with what onnxruntime tells.
    session = pytest.importorskip("onnxruntime").InferenceSession(files["1/model.onnx"])
    config, expected = files["config.pbtxt"].decode(), {}
    for tensor in (*session.get_inputs(), *session.get_outputs()):
        batch, *sizes = (size if isinstance(size, int) else -1 for size in tensor.shape)
        assert batch == -1  # else Triton refuses to form batches
        expected[tensor.name] = TYPES[tensor.type], ", ".join(map(str, sizes))
    assert len(expected) == 6 and expected.pop("count") == ("TYPE_INT64", "")
    tensors = re.findall(r'put { name: "(\w+)" data_type: (\w+) dims: \[ ([-0-9, ]+) \] }', config)
    assert {name: (kind, sizes) for name, kind, sizes in tensors} == expected

    definition = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    from google.protobuf import text_format

    parsed = text_format.Parse(config, definition.ModelConfig())
    assert parsed.backend == "onnxruntime" and parsed.max_batch_size > 1 and parsed.HasField("dynamic_batching")
    count = parsed.output[len(expected) - 1]
    assert count.name == "count" and list(count.dims) == [1] and count.HasField("reshape")


@pytest.mark.parametrize("flags", [FLAGS[2:], (*FLAGS[:2], FLAGS[3]), FLAGS[:3]])
def test_a_model_that_triton_cannot_serve(run, tmp_path, flags):
    result = run(*flags, "--triton", tmp_path / "models/shapes")
    [line] = result.stderr.splitlines()
    assert result.returncode != 0 and "--triton" in line and not any(tmp_path.iterdir())
