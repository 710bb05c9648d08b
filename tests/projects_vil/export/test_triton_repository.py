"""The folder of a model in a model repository of Triton Inference Server, as far as it can be checked without one."""

import re

import pytest

from projects_vil import Detector
from projects_vil.export import example_image
from tests.projects_vil.export.exporting import skip_without
from tests.projects_vil.helpers import CONFIGS, SMALL, run_tool

FLAGS = ("--format", "onnx", "--batched", "--fixed-detections")
TYPES = {"FLOAT": "TYPE_FP32", "INT64": "TYPE_INT64", "UINT8": "TYPE_UINT8"}


@pytest.fixture(scope="module")
def run(weights):
    """``tools/export_model.py`` with options."""
    checkpoint = ("--config-file", CONFIGS["mask_rcnn"], "--weights", weights("mask_rcnn"), *SMALL["mask_rcnn"])
    return lambda folder, *options: run_tool("export_model.py", "--output", folder / "export", *options, *checkpoint)


@pytest.fixture(scope="module")
def repository(run, made_once):
    skip_without("onnx")

    def fill(folder):
        result = run(folder, *FLAGS, "--triton", folder / "models/shapes")
        assert result.returncode == 0, result.stderr

    return made_once("triton", fill) / "models"


def as_text(config: str) -> dict[str, tuple[str, list[int]]]:
    """The name of each input and output -> its type, and its shape without the batch."""
    tensors = re.findall(r'^(?:in|out)put { name: "(\w+)" data_type: (\w+) dims: \[ (.*?) \](.*) }$', config, re.M)
    assert config.count("put {") == len(tensors)
    return {
        name: (kind, [] if "reshape: { }" in rest else [*map(int, dims.split(", "))])
        for name, kind, dims, rest in tensors
    }


def as_protobuf(config: str) -> dict[str, tuple[str, list[int]]]:
    """The same by Triton's own definition of the file."""
    reason = "tritonclient[grpc] is not installed"
    definition = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason=reason)
    from google.protobuf import text_format

    model = text_format.Parse(config, definition.ModelConfig())
    assert model.backend == "onnxruntime" and model.max_batch_size > 1 and model.HasField("dynamic_batching")
    return {
        tensor.name: (
            definition.DataType.Name(tensor.data_type),
            list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims),
        )
        for tensor in (*model.input, *model.output)
    }


@pytest.mark.slow
@pytest.mark.parametrize("read", [as_text, as_protobuf])
def test_the_configuration_is_that_of_the_file(repository, read):
    onnx = pytest.importorskip("onnx")
    expected = {}
    graph = onnx.load(repository / "shapes/1/model.onnx").graph
    for value in (*graph.input, *graph.output):
        batch, *sizes = value.type.tensor_type.shape.dim
        assert batch.dim_param  # else Triton refuses to form batches
        kind = TYPES[onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)]
        expected[value.name] = kind, [-1 if size.dim_param else size.dim_value for size in sizes]
    assert expected["images"] == ("TYPE_UINT8", [3, -1, -1]) and expected["boxes"] == ("TYPE_FP32", [100, 4])
    assert expected["count"] == ("TYPE_INT64", []) and len(expected) == 6
    assert read((repository / "shapes/config.pbtxt").read_text()) == expected


@pytest.mark.slow
def test_the_folder_is_complete_and_stays_as_it_is(repository, run, tmp_path):
    files = {file.relative_to(repository): file.read_bytes() for file in repository.rglob("*") if file.is_file()}
    assert {str(file) for file in files} == {
        f"shapes/{name}" for name in ("config.pbtxt", "1/model.onnx", "1/model.onnx.metadata.json")
    }
    assert len(Detector.load(repository / "shapes/1/model.onnx")(example_image(96, 150).permute(1, 2, 0).numpy())) > 0
    result = run(tmp_path, *FLAGS, "--triton", repository / "shapes")
    assert result.returncode != 0 and str(repository / "shapes") in result.stderr.splitlines()[-1]
    assert files == {
        file.relative_to(repository): file.read_bytes() for file in repository.rglob("*") if file.is_file()
    }


@pytest.mark.parametrize("flags", [FLAGS[2:], (*FLAGS[:2], FLAGS[3]), FLAGS[:3]])
def test_a_model_that_triton_cannot_serve(run, tmp_path, flags):
    result = run(tmp_path, *flags, "--triton", tmp_path / "models/shapes")
    [line] = result.stderr.splitlines()
    assert result.returncode != 0 and "--triton" in line and not any(tmp_path.iterdir())
