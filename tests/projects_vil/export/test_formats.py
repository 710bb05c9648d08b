"""Each format gives the detections of the detector in its own runtime, for sizes that it was not traced with."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from backbones import ConfigError
from projects_vil.export import FORMATS, ExportedModel, check_format, eager_detections, example_image, make_exportable
from projects_vil.export.formats import OPSET, check_onnx, format_of, import_openvino, load_model
from projects_vil.export.parity import compare_detections
from projects_vil.modeling import export_sides
from tests.projects_vil.export.exporting import detector, onnx_file, skip_without
from tests.projects_vil.helpers import message

BATCHES = {"batched": True, "dtype": "float32"}
SIZES = [(64, 64), (33, 47), (101, 64), (150, 203)]
# Format, detector, options of :func:`.exporting.write`: each pair of values is in one case.
CASES = [
    ("torchscript", "retinanet", {}),
    ("torchscript", "mask_rcnn", BATCHES),
    ("torchscript", "retinanet", {"batched": True, "fixed_number": 100}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("openvino", "retinanet", {"fixed_number": 100}),
            ("torchscript", "cascade_mask_rcnn", {"fixed_number": 100}),
            ("openvino", "mask_rcnn", BATCHES),
            ("openvino", "cascade_mask_rcnn", {}),
            ("torch_export", "retinanet", {}),
            ("torch_export", "cascade_mask_rcnn", BATCHES),
            ("onnx", "mask_rcnn", BATCHES),
            ("onnx", "cascade_mask_rcnn", {}),
            ("onnx", "retinanet", {"batched": True, "fixed_number": 100}),
        )
    ),
    *(pytest.param("aot_inductor", name, {}, marks=pytest.mark.compiled) for name in ("retinanet", "mask_rcnn")),
]


def assert_equal(found: dict[str, Tensor], image: Tensor, eager: nn.Module, model: ExportedModel) -> None:
    """The detections of an image equal detectron2's, and there are at least three."""
    theirs = eager_detections(eager, image)
    assert len(theirs["scores"]) >= 3 and found.keys() == theirs.keys()
    row = compare_detections(theirs, found, "fp32", model.metadata["thresholds"])
    assert row["ok"] and row["borderline"] <= 1, (image.shape, row)


def gray(height: int, width: int) -> Tensor:
    return torch.full((3, height, width), 128, dtype=torch.uint8)


def check_images(model: ExportedModel, eager: nn.Module) -> None:
    for size in SIZES:
        image = example_image(*size, seed=sum(size))
        for one in (image, image.transpose(1, 2).contiguous()):
            found = model(one)
            assert found["classes"].dtype == torch.int64
            assert found["boxes"].dtype == found["scores"].dtype == torch.float32
            assert_equal(found, one, eager, model)
        shapes = {"boxes": (0, 4), "masks": (0, 1, 28, 28)}
        assert all(tuple(value.shape) == shapes.get(key, (0,)) for key, value in model(gray(*size)).items())


def check_batches(model: ExportedModel, eager: nn.Module) -> None:
    for number, size in ((1, (64, 97)), (2, (101, 64)), (3, (150, 203)), (5, (33, 47))):
        images = torch.stack([example_image(*size, seed=number + i) for i in range(number)])
        # One image of the batch has no detections.
        empty = {1} if number == 3 else set()
        for index in empty:
            images[index] = gray(*size)
        found = model(images)
        assert found["image_index"].dtype == torch.int64 and (found["scores"].diff() <= 0).all()
        assert set(found["image_index"].tolist()) == set(range(number)) - empty
        each = model.run_each(images)
        for index in set(range(number)) - empty:
            assert_equal(each[index], images[index], eager, model)
    assert {len(value) for value in model(torch.stack([gray(70, 90)] * 2)).values()} == {0}


@pytest.mark.parametrize(("file_format", "name", "options"), CASES)
def test_equals_eager_at_any_size(written, file_format, name, options):
    model = written(name, file_format, **options)
    assert (model.file_format, model.batched) == (file_format, options.get("batched", False))
    check = check_batches if model.batched else check_images
    check(model, detector(name))
    if "fixed_number" in options:
        image = gray(40, 50).to(model.dtype)
        rows = load_model(model.path)[0](image[None] if model.batched else image)
        assert rows[-1].tolist() == [0] and not any(value.any() for value in rows)
        for output, value in zip(model.metadata["outputs"], rows, strict=True):
            assert output["shape"] == (["batch", *value.shape[1:]] if model.batched else list(value.shape))
            assert 100 in value.shape or output["name"] == "count"
    if file_format == "onnx":
        check_onnx_file(model)


def check_onnx_file(model: ExportedModel) -> None:
    import onnx

    assert check_onnx(model.path)["Conv"] >= 4
    contents = onnx.load(model.path, load_external_data=False)
    assert [(entry.domain, entry.version) for entry in contents.opset_import if not entry.domain] == [("", OPSET)]
    assert not any(tensor.external_data for tensor in contents.graph.initializer)
    # The other files use direct convolutions, see :func:`.exporting.write`.
    kernels = [entry.ints for node in contents.graph.node for entry in node.attribute if entry.name == "kernel_shape"]
    assert ([1, 3] in kernels) is (not model.batched or model.metadata["fixed_detections"] is not None)
    assert str(dict(enumerate(model.metadata["classes"]))) in [entry.value for entry in contents.metadata_props]
    described = [model.metadata["input"], *model.metadata["outputs"]]
    for value, entry in zip((*contents.graph.input, *contents.graph.output), described, strict=True):
        assert value.name == entry["name"]
        assert [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim] == entry["shape"]


# -- ONNX ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nodes",
    [
        "y = com.microsoft.Gelu(x)",
        "y = NoSuchOperator(x)",
        "y = Relu(absent)",
        # Only shape inference finds an axis that does not exist, and a wrong output type.
        "y = Transpose<perm = [0, 2, 1]>(x)",
        "y = Cast<to = 7>(x)",
    ],
)
def test_an_onnx_file_that_is_not_portable(tmp_path, nodes):
    onnx = pytest.importorskip("onnx")
    with pytest.raises((RuntimeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError)):
        check_onnx(onnx_file(tmp_path, nodes))


def test_devices_of_onnx_files(tmp_path, monkeypatch, caplog):
    """A GPU is used if onnxruntime has a provider for it. Otherwise onnxruntime would run on the CPU."""
    onnxruntime, asked = pytest.importorskip("onnxruntime"), []
    path = onnx_file(tmp_path, "y = Relu(x)")
    with caplog.at_level("INFO"):
        (ones,) = load_model(path)[0](torch.ones(1, 4))
    assert (ones == 1).all() and f"onnxruntime {onnxruntime.__version__} with CPUExecutionProvider" in caplog.text
    for device, named in (("gpu", "device gpu"), *([] if torch.cuda.is_available() else [("cuda", "onnxruntime-gpu")])):
        with pytest.raises(ConfigError, match=named):
            load_model(path, device=device)

    class Session(onnxruntime.InferenceSession):
        def __init__(self, path, options, providers):
            asked.extend(providers)
            super().__init__(path, options, providers=["CPUExecutionProvider"])

        def get_providers(self):
            return [asked[0][0], "CPUExecutionProvider"]

    available = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    with caplog.at_level("INFO"):
        load_model(path, device="cuda:1")
    assert asked == [(name, {"device_id": "1"}) for name in ("CUDAExecutionProvider", "TensorrtExecutionProvider")]
    assert "with CUDAExecutionProvider" in caplog.text


# -- OpenVINO --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_openvino_file(written):
    model = written("retinanet", "openvino", fixed_number=100)
    openvino = import_openvino()
    read = openvino.Core().read_model(model.path)
    assert [port.get_any_name() for port in read.inputs + read.outputs] == ["image", *model.output_names]
    sides = openvino.Dimension(*export_sides(detector("retinanet")))
    assert read.input().get_partial_shape() == openvino.PartialShape([3, sides, sides])
    assert model.metadata["runtime_options"] == {"INFERENCE_PRECISION_HINT": "f32"}
    assert "GroupConvolution" in {operator.get_type_name() for operator in read.get_ops()}  # of Winograd's filtering


@pytest.mark.slow
def test_ctrl_c_after_openvino_models_were_deleted(written):
    """In OpenVINO 2026.4, a process that loads the CPU plugin twice loses its signal stack."""
    code = """
import pathlib, signal, sys
from projects_vil.export.formats import load_model
from tests.projects_vil.helpers import message
signal.signal(signal.SIGINT, signal.default_int_handler)
first, second = (load_model(pathlib.Path(sys.argv[1]))[0] for _ in range(2))
# Telemetry would report the import, and create a folder in the user's home. In pytest, nncf may have imported it.
assert sys.modules["openvino_telemetry"] is None
del first
del second
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    path = written("retinanet", "openvino", fixed_number=100).path
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "interrupted\n"), result.stderr


@pytest.mark.slow
def test_ctrl_c_while_openvino_converts(tmp_path, monkeypatch):
    """OpenVINO would report the exception as an unsupported operator."""
    skip_without("openvino")
    openvino = import_openvino()
    convert = openvino.convert_model

    def interrupted(*args, **options):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return convert(*args, **options)

    monkeypatch.setattr(openvino, "convert_model", interrupted)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exportable = make_exportable(detector("retinanet"))
    with pytest.raises(KeyboardInterrupt):
        FORMATS["openvino"].write(exportable, example_image(64, 96), tmp_path / "model.xml")
    assert not list(tmp_path.iterdir())


# -- files and machines ----------------------------------------------------------------------------


def test_formats_by_name():
    names = {"model.ts": "torchscript", "a/b.onnx": "onnx", "x.pt2": "torch_export", "x.aoti.pt2": "aot_inductor"}
    names |= {"my.onnx.pt2": "torch_export", "model.xml": "openvino"}
    assert {name: format_of(name) for name in names} == names
    assert FORMATS["openvino"].files(Path("a/model.xml")) == [Path("a/model.xml"), Path("a/model.bin")]
    assert "model.pth" in message(format_of, "model.pth")


@pytest.mark.parametrize("file_format", ["torchscript", "onnx", "torch_export", "openvino"])
def test_damaged_files(written, tmp_path, file_format):
    skip_without(file_format)
    whole = written("retinanet", "torchscript").path.read_bytes()
    for damaged in (b"", b"not a model" * 50, whole[: len(whole) // 2]):
        path = tmp_path / f"model{FORMATS[file_format].suffix}"
        path.write_bytes(damaged)
        with pytest.raises(ConfigError) as caught:
            load_model(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_packages_and_compilers(monkeypatch, tmp_path):
    path = onnx_file(tmp_path, "y = Relu(x)")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "CXX" in message(check_format, "aot_inductor")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        assert "onnxruntime" in message(load_model, path)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.7.1+cpu"))
    assert "2.7.1+cpu" in message(check_format, "torch_export")
