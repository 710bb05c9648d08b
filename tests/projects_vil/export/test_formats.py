"""Each format gives eager's detections in its own runtime, for sizes that it was not traced with."""

import importlib.metadata
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from detectron2.modeling import GeneralizedRCNN
from torch import Tensor, nn

from backbones import ConfigError
from projects_vil.export import (
    FORMATS,
    ExportedModel,
    check_format,
    eager_detections,
    example_image,
    make_exportable,
    metadata_path,
    write_model,
)
from projects_vil.export.formats import OPSET, compiler, describe_onnx, format_of, import_openvino, load_model
from projects_vil.export.parity import TOLERANCES, compare_detections
from projects_vil.modeling import SMALLEST_SIDE, largest_side
from tests.projects_vil.export.exporting import detector, skip_without
from tests.projects_vil.export.onnx_files import node, saved

BATCHES = {"batched": True, "dtype": "float32"}
SIZES = [(64, 64), (33, 47), (101, 64), (150, 203)]
# Pairwise: format, detector, options of :func:`.exporting.write`.
CASES = [
    ("torchscript", "retinanet", {}),
    ("torchscript", "mask_rcnn", BATCHES),
    ("torchscript", "cascade_mask_rcnn", {"fixed_number": 100}),
    ("torchscript", "retinanet", {"batched": True, "fixed_number": 100}),
    ("openvino", "retinanet", {}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("openvino", "mask_rcnn", BATCHES | {"all_levels": True}),
            ("openvino", "cascade_mask_rcnn", {}),
            ("torch_export", "retinanet", {}),
            ("torch_export", "mask_rcnn", BATCHES | {"all_levels": True}),
            ("torch_export", "cascade_mask_rcnn", {"batched": True}),
            ("onnx", "retinanet", {"all_levels": True}),
            ("onnx", "mask_rcnn", BATCHES),
            ("onnx", "cascade_mask_rcnn", {"fixed_number": 100}),
            ("onnx", "retinanet", {"batched": True, "fixed_number": 100}),
        )
    ),
    *(
        pytest.param("aot_inductor", name, {"all_levels": True}, marks=pytest.mark.compiled)
        for name in ("retinanet", "mask_rcnn")
    ),
]


def assert_equal(found: dict[str, Tensor], image: Tensor, eager: nn.Module, score_threshold: float) -> None:
    """The detections in an image are those that eager finds, and there are some."""
    theirs = eager_detections(eager, image)
    assert len(theirs["scores"]) >= 3 and found.keys() == theirs.keys()
    thresholds = {"score_threshold": score_threshold, "max_detections": 100}
    row = compare_detections(theirs, found, tolerances=TOLERANCES["fp32"], **thresholds)
    assert row["ok"] and row["borderline"] <= 1, (image.shape, row)


def grey(height: int, width: int) -> Tensor:
    return torch.full((3, height, width), 128, dtype=torch.uint8)


def check_images(model: ExportedModel, eager: nn.Module) -> None:
    names = ["boxes", "scores", "classes", *(["masks"] if isinstance(eager, GeneralizedRCNN) else [])]
    for size in SIZES:
        image = example_image(*size, seed=sum(size))
        for one in (image, image.transpose(1, 2).contiguous()):
            found = model(one)
            assert list(found) == names and found["classes"].dtype == torch.int64
            assert found["boxes"].dtype == found["scores"].dtype == torch.float32
            assert_equal(found, one, eager, model.metadata["thresholds"]["score"])
        shapes = {"boxes": (0, 4), "scores": (0,), "classes": (0,), "masks": (0, 1, 28, 28)}
        nothing = {key: tuple(value.shape) for key, value in model(grey(*size)).items()}
        assert nothing == {key: shapes[key] for key in names}


def check_batches(model: ExportedModel, eager: nn.Module) -> None:
    for number, size in ((1, (64, 97)), (2, (101, 64)), (3, (150, 203)), (5, (33, 47))):
        images = torch.stack([example_image(*size, seed=number + i) for i in range(number)])
        # One image of the batch has no object.
        empty = {1} if number == 3 else set()
        for index in empty:
            images[index] = grey(*size)
        found = model(images)
        index = found.pop("image_index")
        assert index.dtype == torch.int64 and set(index.tolist()) == set(range(number)) - empty
        for i in set(index.tolist()):
            one = {key: value[index == i] for key, value in found.items()}
            assert_equal(one, images[i], eager, model.metadata["thresholds"]["score"])
    assert {len(value) for value in model(torch.stack([grey(70, 90)] * 2)).values()} == {0}


@pytest.mark.parametrize(("file_format", "name", "options"), CASES)
def test_equals_eager_at_any_size(written, file_format, name, options):
    if file_format == "aot_inductor" and compiler() is None:
        pytest.skip("AOTInductor needs a C++ compiler")
    model = written(name, file_format, **options)
    assert (model.file_format, model.batched) == (file_format, options.get("batched", False))
    check = check_batches if model.batched else check_images
    check(model, detector(name, all_levels=options.get("all_levels", False)))
    if "fixed_number" in options:
        image = grey(40, 50).to(model.dtype)
        rows = load_model(model.path)(image[None] if model.batched else image)
        rows = dict(zip(model.output_names, rows, strict=True))
        assert rows["count"].tolist() == [0] and not any(value.any() for value in rows.values())
        shapes = {output["name"]: output["shape"] for output in model.metadata["outputs"]}
        for output, value in rows.items():
            assert shapes[output] == (["images", *value.shape[1:]] if model.batched else list(value.shape))
            assert 100 in value.shape or output == "count"
    if file_format == "onnx":
        check_onnx_file(model)


def check_onnx_file(model: ExportedModel) -> None:
    import onnx

    assert "CPUExecutionProvider" in describe_onnx(model.path)["providers"]
    contents = onnx.load(model.path, load_external_data=False)
    assert [(entry.domain, entry.version) for entry in contents.opset_import if not entry.domain] == [("", OPSET)]
    assert not any(tensor.external_data for tensor in contents.graph.initializer)
    shapes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*contents.graph.input, *contents.graph.output)
    }
    image = shapes.pop(contents.graph.input[0].name)
    assert len(image) == 3 + model.batched and image[-3] == 3
    assert all(isinstance(axis, str) for index, axis in enumerate(image) if index != len(image) - 3)
    assert list(shapes) == list(model.output_names)
    fixed = model.metadata["fixed_detections"]
    shapes = {name: shape[model.batched :] if fixed else shape for name, shape in shapes.items() if name != "count"}
    for name, (number, *rest) in shapes.items():
        assert rest == {"boxes": [4], "masks": [1, 28, 28]}.get(name, [])
        assert number == fixed if fixed else isinstance(number, str)


@pytest.mark.slow
def test_an_exported_program_needs_torch_and_torchvision_only(written, tmp_path):
    model, image = written("retinanet", "torch_export"), example_image(75, 110, seed=4)
    torch.save(image, tmp_path / "image.pt")
    code = """
import sys, torch, torchvision
program = torch.export.load(sys.argv[1]).module()
outputs = program(torch.load(sys.argv[2]))
assert not {"detectron2", "backbones", "projects_vil", "timm"} & set(sys.modules)
torch.save(list(outputs), sys.argv[3])
"""
    command = [sys.executable, "-c", code, model.path, tmp_path / "image.pt", tmp_path / "outputs.pt"]
    # In another folder, from which this repository cannot be imported.
    result = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = dict(zip(model.output_names, torch.load(tmp_path / "outputs.pt"), strict=True))
    assert_equal(found, image, detector("retinanet"), model.metadata["thresholds"]["score"])


# -- ONNX ------------------------------------------------------------------------------------------


def test_the_description_of_an_onnx_file(tmp_path):
    onnx = pytest.importorskip("onnx")
    nodes = node("Relu", "x", "a"), node("Relu", "a", "b"), node("Cast", "b", "y", to=onnx.TensorProto.INT64)
    found = describe_onnx(saved(tmp_path, *nodes, given="INT64"))
    assert list(found["operators"].items()) == [("Relu", 2), ("Cast", 1)]
    assert found["types"] == {"FLOAT": 3, "INT64": 1} and "CPUExecutionProvider" in found["providers"]


@pytest.mark.parametrize(
    "nodes",
    [
        [("Gelu", ("x", "y"), {"domain": "com.microsoft"})],
        [("NoSuchOperator", ("x", "y"), {})],
        [("Relu", ("absent", "y"), {})],
        # Errors that only shape inference finds: an axis that does not exist, and y is not int64.
        [("Transpose", ("x", "y"), {"perm": [0, 2, 1]})],
        [("Cast", ("x", "y"), {"to": 7})],
    ],
)
def test_an_onnx_file_that_others_would_refuse(tmp_path, nodes):
    pytest.importorskip("onnx")
    path = saved(tmp_path, *(node(operator, *names, **attributes) for operator, names, attributes in nodes))
    with pytest.raises(ConfigError, match=path.name):
        describe_onnx(path)


@pytest.mark.parametrize("missing", ["onnxruntime", "onnxscript"])
def test_running_onnx_needs_onnxruntime_alone(monkeypatch, tmp_path, missing):
    pytest.importorskip("onnxruntime")
    path, version = saved(tmp_path, node("Relu", "x", "y")), importlib.metadata.version

    def found(name: str) -> str:
        if name == missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", found)
    with pytest.raises(ConfigError, match=missing):
        check_format("onnx")
    if missing == "onnxruntime":
        with pytest.raises(ConfigError, match=missing):
            load_model(path)
    else:
        assert load_model(path)(torch.tensor([[-1.0, 0.0, 1.0, 2.0]]))[0].tolist() == [[0.0, 0.0, 1.0, 2.0]]


# -- OpenVINO --------------------------------------------------------------------------------------


def test_an_openvino_file(written):
    model = written("retinanet", "openvino")
    openvino = import_openvino()
    read = openvino.Core().read_model(model.path)
    assert [port.get_any_name() for port in read.inputs + read.outputs] == ["image", *model.output_names]
    sides = openvino.Dimension(SMALLEST_SIDE, largest_side(detector("retinanet")))
    assert read.input().get_partial_shape() == openvino.PartialShape([3, sides, sides])
    assert model.metadata["runtime_options"] == {"INFERENCE_PRECISION_HINT": "f32"}
    # Its telemetry would report the import, and leaves a folder in the user's home.
    assert sys.modules["openvino_telemetry"] is None


def test_ctrl_c_after_openvino_models_were_deleted(written):
    """OpenVINO 2026.4 leaves a process that loads its CPU plugin twice without a stack for signals."""
    code = """
import pathlib, signal, sys
from projects_vil.export.formats import load_model
signal.signal(signal.SIGINT, signal.default_int_handler)
first, second = (load_model(pathlib.Path(sys.argv[1])) for _ in range(2))
del first
del second
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    path = written("retinanet", "openvino").path
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "interrupted\n"), result.stderr


@pytest.mark.slow
def test_ctrl_c_while_openvino_converts(tmp_path, monkeypatch):
    """OpenVINO would take the exception for an operator that cannot be converted."""
    skip_without("openvino")
    openvino = import_openvino()
    convert = openvino.convert_model

    def interrupted(*args, **options):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return convert(*args, **options)

    monkeypatch.setattr(openvino, "convert_model", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            write_model(
                make_exportable(detector("retinanet")), example_image(64, 96), tmp_path / "model.xml", "openvino"
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list(tmp_path.iterdir())


# -- files and machines ----------------------------------------------------------------------------


def test_formats_by_name():
    names = {"model.ts": "torchscript", "a/b.onnx": "onnx", "x.pt2": "torch_export", "x.aoti.pt2": "aot_inductor"}
    names |= {"my.onnx.pt2": "torch_export", "model.xml": "openvino"}
    assert {name: format_of(name) for name in names} == names
    assert FORMATS["openvino"].files(Path("a/model.xml")) == [Path("a/model.xml"), Path("a/model.bin")]
    assert metadata_path("a/model.onnx") == Path("a/model.onnx.metadata.json")
    with pytest.raises(ConfigError, match=r"model\.pth"):
        format_of("model.pth")
    with pytest.raises(ConfigError, match="onnxx"):
        check_format("onnxx")


@pytest.mark.parametrize("file_format", ["torchscript", "onnx", "torch_export", "openvino"])
def test_damaged_files(written, tmp_path, file_format):
    skip_without(file_format)
    whole = written("retinanet", "torchscript").path.read_bytes()
    contents = [b"", b"not a model" * 50, whole[: len(whole) // 2]]
    for damaged in contents if file_format == "torchscript" else [*contents, whole]:
        path = tmp_path / f"model{FORMATS[file_format].suffix}"
        path.write_bytes(damaged)
        with pytest.raises(ConfigError) as caught:
            load_model(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_the_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    check_format("torchscript")
    with pytest.raises(ConfigError, match="CXX"):
        check_format("aot_inductor")
    (tmp_path / "my-compiler").write_text("#!/bin/sh\n")
    (tmp_path / "my-compiler").chmod(0o755)
    monkeypatch.setenv("CXX", "my-compiler")
    assert compiler() == str(tmp_path / "my-compiler")
    check_format("aot_inductor")


def test_an_older_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1+cpu")
    check_format("torchscript")
    for file_format in ("onnx", "torch_export", "aot_inductor"):
        with pytest.raises(ConfigError, match=r"2\.7\.1\+cpu"):
            check_format(file_format)
