"""Each format gives eager's answers in its own runtime, for sizes that it was not recorded with."""

import functools
import importlib.machinery
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from detectron2.modeling import GeneralizedRCNN
from torch import Tensor, nn

from projects_vil.export import ExportedModel, export_detector, make_exportable
from projects_vil.export.formats import FORMATS as KNOWN
from projects_vil.export.formats import OPSET, check_format, compiler, format_of, load_model, write_model
from projects_vil.export.formats.openvino import import_openvino
from projects_vil.export.images import example_image
from projects_vil.export.metadata import describe_model, metadata_path
from projects_vil.export.onnx_graph.standard import inferred
from projects_vil.export.onnx_graph.tensorrt_operators import undocumented
from projects_vil.export.proof.parity import TOLERANCES, compare_detections
from projects_vil.export.proof.report import eager_detections
from projects_vil.export.stages import Stages
from projects_vil.modeling import SMALLEST_SIDE, largest_side
from tests.gpu import on_gpu
from tests.projects_vil.export.exporting import ALONE, IN_BATCHES, config, detector, mistake, skip_without
from tests.selection import slow_except

BOTH = ("retinanet", "mask_rcnn")

FORMATS = tuple(ALONE)

SIZES = [(64, 64), (64, 97), (101, 64), (33, 47), (150, 203), (257, 96), (224, 320)]


def assert_equal(found: dict[str, Tensor], image: Tensor, eager: nn.Module, score_threshold: float) -> None:
    """What an exported model found in an image is what eager finds, and that is something."""
    theirs = eager_detections(eager, image)
    assert len(theirs["scores"]) >= 3 and found.keys() == theirs.keys()
    thresholds = {"score_threshold": score_threshold, "max_detections": 100}
    row = compare_detections(theirs, found, tolerances=TOLERANCES["fp32"], **thresholds)
    assert row["ok"] and row["borderline"] <= 1, (image.shape, row)


def grey(height: int, width: int) -> Tensor:
    return torch.full((3, height, width), 128, dtype=torch.uint8)


# -- answers ---------------------------------------------------------------------------------------


def check_answers(model: ExportedModel, eager: nn.Module) -> None:
    names = ["boxes", "scores", "classes", *(["masks"] if isinstance(eager, GeneralizedRCNN) else [])]
    for size in SIZES:
        image = example_image(*size, seed=sum(size))
        # Turned, it is another image.
        for one in (image, image.transpose(1, 2).contiguous()):
            found = model(one)
            assert list(found) == names
            assert found["boxes"].dtype == found["scores"].dtype == torch.float32
            assert found["classes"].dtype == torch.int64
            assert_equal(found, one, eager, model.metadata["thresholds"]["score"])
        nothing = model(grey(*size))
        shapes = {"boxes": (0, 4), "scores": (0,), "classes": (0,), "masks": (0, 1, 28, 28)}
        assert {key: tuple(value.shape) for key, value in nothing.items()} == {key: shapes[key] for key in names}
        assert len(eager_detections(eager, grey(*size))["scores"]) == 0


@pytest.mark.parametrize("file_format", slow_except(FORMATS, ["torchscript", "openvino"]))
def test_equals_eager_at_any_size(plain, file_format):
    model = plain(file_format)
    assert (model.file_format, model.batched, model.dtype) == (file_format, False, torch.uint8)
    check_answers(model, detector(ALONE[file_format]))


def check_batches(model: ExportedModel, eager: nn.Module) -> None:
    threshold = model.metadata["thresholds"]["score"]
    for number, size in ((1, (64, 97)), (2, (101, 64)), (3, (150, 203)), (3, (64, 64)), (5, (33, 47))):
        images = torch.stack([example_image(*size, seed=number + i) for i in range(number)])
        # One of several has nothing in it.
        empty = 1 if number == 3 else None
        if empty is not None:
            images[empty] = grey(*size)
        found = model(images)
        index = found.pop("image_index")
        assert index.dtype == torch.int64 and set(index.tolist()) == set(range(number)) - {empty}
        for i in set(index.tolist()):
            assert_equal({key: value[index == i] for key, value in found.items()}, images[i], eager, threshold)
    assert {len(value) for value in model(torch.stack([grey(70, 90)] * 2)).values()} == {0}


@pytest.mark.parametrize("file_format", slow_except(FORMATS, ["torchscript"]))
def test_batches(batched, file_format):
    model = batched(file_format)
    assert (model.batched, model.dtype) == (True, torch.float32)
    masks = ("masks",) if IN_BATCHES[file_format] == "mask_rcnn" else ()
    assert model.output_names == ("boxes", "scores", "classes", *masks, "image_index")
    check_batches(model, detector(IN_BATCHES[file_format]))


@pytest.mark.slow
@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("name", BOTH)
def test_all_levels(written, file_format, name):
    eager = detector(name, all_levels=True)
    check_answers(written(name, file_format, all_levels=True), eager)
    check_batches(written(name, file_format, all_levels=True, batched=True, dtype="float32"), eager)


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["torch_export", "onnx"])
def test_the_other_way_round(written, file_format):
    check_answers(written(IN_BATCHES[file_format], file_format), detector(IN_BATCHES[file_format]))
    check_batches(written(ALONE[file_format], file_format, batched=True), detector(ALONE[file_format]))


@pytest.mark.parametrize("file_format", slow_except(FORMATS, ["torchscript"]))
def test_a_cascade(written, file_format):
    check_answers(written("cascade_mask_rcnn", file_format), detector("cascade_mask_rcnn"))


@pytest.mark.slow
@pytest.mark.parametrize("name, is_batched", [("retinanet", False), ("mask_rcnn", True)])
def test_a_fixed_number_of_detections_in_onnxruntime(written, name, is_batched):
    onnx = pytest.importorskip("onnx")
    model = written(name, "onnx", batched=is_batched, fixed_number=100)
    assert model.metadata["fixed_detections"] == 100 and model.output_names[-1] == "count"
    (check_batches if is_batched else check_answers)(model, detector(name))
    # Which is what TensorRT takes, and knows the shapes of.
    assert undocumented(inferred(model.path)) == []
    shapes = {value.name: shape_of(value)[is_batched:] for value in onnx.load(model.path).graph.output}
    masks = {"masks": [100, 1, 28, 28]} if name == "mask_rcnn" else {}
    assert shapes == {"boxes": [100, 4], "scores": [100], "classes": [100], "count": [] if is_batched else [1]} | masks


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("is_batched", [False, True])
def test_a_fixed_number_of_detections(written, name, is_batched):
    model = written(name, "torchscript", batched=is_batched, fixed_number=100)
    image = grey(40, 50)
    rows = load_model(model.path)(image[None] if is_batched else image)
    rows = dict(zip(model.output_names, rows, strict=True))
    assert rows["count"].tolist() == [0] and all((value == 0).all() for value in rows.values())
    described = {output["name"]: output["shape"] for output in model.metadata["outputs"]}
    for output, value in rows.items():
        expected = ["images", *value.shape[1:]] if is_batched else list(value.shape)
        assert described[output] == expected
    (check_batches if is_batched else check_answers)(model, detector(name))


@on_gpu
@pytest.mark.parametrize("name", BOTH)
def test_an_engine_of_tensorrt(file_of, name):
    pytest.importorskip("tensorrt")
    model = ExportedModel(file_of(name, "tensorrt"))
    check_answers(model, detector(name))


@pytest.mark.compiled
@pytest.mark.skipif(compiler() is None, reason="AOTInductor compiles C++")
@pytest.mark.parametrize("name", BOTH)
def test_a_compiled_package(written, name):
    check_answers(written(name, "aot_inductor", all_levels=True), detector(name, all_levels=True))


# -- files -----------------------------------------------------------------------------------------


def shape_of(value) -> list[int | str]:
    return [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]


@pytest.mark.slow
@pytest.mark.parametrize("is_batched", [False, True])
def test_an_onnx_file(plain, batched, is_batched):
    onnx = pytest.importorskip("onnx")
    model, name, dtype, first = plain("onnx"), "image", onnx.TensorProto.UINT8, []
    if is_batched:
        model, name, dtype, first = batched("onnx"), "images", onnx.TensorProto.FLOAT, ["batch"]
    contents = onnx.load(model.path, load_external_data=False)
    facts = KNOWN["onnx"].describe(model.path)["onnx"]
    assert "CPUExecutionProvider" in facts["providers"] and facts["tensorrt"]["undocumented"] == []
    assert [(entry.domain, entry.version) for entry in contents.opset_import if not entry.domain] == [("", OPSET)]
    assert OPSET == 20
    (image,) = contents.graph.input
    assert image.name == name and image.type.tensor_type.elem_type == dtype
    *batch, channels, height, width = shape_of(image)
    assert channels == 3 and len({height, width, *batch}) == 2 + len(first)
    assert all(isinstance(axis, str) for axis in (height, width, *batch))
    assert [value.name for value in contents.graph.output] == list(model.output_names)
    for output in contents.graph.output:
        number, *rest = shape_of(output)
        assert isinstance(number, str)
        assert rest == {"boxes": [4], "masks": [1, 28, 28]}.get(output.name, [])
    tensors = contents.graph.initializer
    assert not any(tensor.external_data for tensor in tensors)
    weights = detector("mask_rcnn" if first else "retinanet").parameters()
    assert model.path.stat().st_size > 4 * sum(parameter.numel() for parameter in weights)
    assert not [path for path in model.path.parent.iterdir() if path.suffix == ".data"]


@pytest.mark.slow
def test_onnx_moves_whole_tokens(plain):
    """Transposes of single numbers took a third of a ViL's time: only keys are turned, in front of their product."""
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(plain("onnx").path).graph
    used_by = {name: node for node in graph.node for name in node.input}
    moving = []
    for node in graph.node:
        if node.op_type != "Transpose":
            continue
        (perm,) = (list(attribute.ints) for attribute in node.attribute if attribute.name == "perm")
        # Maps, of four axes or, with anchors, five, go in and out of convolutions with their channels first.
        if len(perm) > 5 and perm[-1] != len(perm) - 1:
            moving.append((node.name, perm))
        if perm == [0, 1, 3, 2]:
            assert used_by[node.output[0]].op_type == "MatMul", node.name
    assert not moving


@pytest.mark.slow
def test_an_exported_program_needs_torch_and_torchvision_only(batched, tmp_path):
    model, image = batched("torch_export"), example_image(75, 110, seed=4)
    torch.save(image[None].float(), tmp_path / "image.pt")
    code = """
import sys, torch, torchvision
program = torch.export.load(sys.argv[1]).module()
outputs = program(torch.load(sys.argv[2]))
assert not {"detectron2", "backbones", "projects_vil", "timm"} & set(sys.modules)
torch.save(list(outputs), sys.argv[3])
"""
    command = [sys.executable, "-c", code, model.path, tmp_path / "image.pt", tmp_path / "outputs.pt"]
    # Elsewhere, without this repository in reach.
    result = subprocess.run(
        list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    found = dict(zip(model.output_names, torch.load(tmp_path / "outputs.pt"), strict=True))
    assert found.pop("image_index").tolist() == [0] * len(found["scores"])
    assert_equal(found, image, detector("mask_rcnn"), model.metadata["thresholds"]["score"])


def test_formats_by_name():
    names = {"model.ts": "torchscript", "a/b.onnx": "onnx", "x.pt2": "torch_export", "x.aoti.pt2": "aot_inductor"}
    names["model.engine"] = "tensorrt"
    assert {name: format_of(name) for name in names} == names
    assert format_of(Path("my.onnx.pt2")) == "torch_export"
    assert metadata_path("a/model.onnx") == Path("a/model.onnx.metadata.json")


def test_an_unknown_format(tmp_path):
    exportable = make_exportable(detector("retinanet"))
    text = mistake(write_model, exportable, example_image(64, 96), tmp_path / "model.onnx", "onnxx")
    assert text.startswith("unknown format 'onnxx'") and "onnx" in text.removeprefix("unknown format 'onnxx'")
    assert not (tmp_path / "model.onnx").exists()


def test_openvino_says_nothing_of_its_use():
    """Its package of telemetry would send that it was imported, and leaves a folder in the user's home."""
    skip_without("openvino")
    import_openvino()
    from openvino.tools.ovc import convert_impl

    assert sys.modules["openvino_telemetry"] is None
    assert convert_impl.tm.__name__ == "openvino.tools.ovc.telemetry_stub"


def test_openvino_in_its_own_terms(plain):
    model = plain("openvino")
    openvino = import_openvino()
    read = openvino.Core().read_model(model.path)
    assert [port.get_any_name() for port in read.inputs + read.outputs] == ["image", *model.output_names]
    sides = openvino.Dimension(SMALLEST_SIDE, largest_side(detector("retinanet")))
    assert read.input().get_partial_shape() == openvino.PartialShape([3, sides, sides])
    assert model.metadata["runtime_options"] == {"INFERENCE_PRECISION_HINT": "f32"}


LET_GO = """
import os, signal, sys
from projects_vil.export.formats.openvino import OPENVINO

first, second = (OPENVINO.load(sys.argv[1]) for _ in range(2))
del first
del second
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_after_openvino_models_were_let_go(plain):
    """OpenVINO 2026.4 leaves a process that loads its CPU plugin twice without a stack for signals."""
    model = plain("openvino")
    result = subprocess.run([sys.executable, "-c", LET_GO, str(model.path)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "interrupted\n"), result.stderr


class Interrupting(Stages):
    """Sends Ctrl-C shortly after the conversion has begun."""

    def __call__(self, name: str, remark: str = ""):
        if name == "converting":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return super().__call__(name, remark)


@pytest.mark.slow
def test_ctrl_c_while_openvino_converts(tmp_path):
    """OpenVINO would take what it raises for an operator that cannot be converted."""
    skip_without("openvino")
    exportable = make_exportable(detector("retinanet"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        KNOWN["openvino"].write(exportable, example_image(64, 96), tmp_path / "model.xml", Interrupting())
    signal.signal(signal.SIGINT, before)
    assert not list(tmp_path.iterdir())


# -- the machine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", FORMATS)
def test_formats_without_a_compiler(monkeypatch, tmp_path, file_format):
    skip_without(file_format)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    check_format(file_format)


def test_the_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert compiler() is None
    text = mistake(check_format, "aot_inductor")
    assert text.startswith("AOTInductor needs a C++ compiler") and "CXX" in text
    for name in ("g++", "my-compiler"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert compiler() == str(tmp_path / "g++")
    monkeypatch.setenv("CXX", "my-compiler")
    assert compiler() == str(tmp_path / "my-compiler")
    check_format("aot_inductor")
    monkeypatch.setenv("CXX", "absent-compiler")
    assert compiler() is None


def test_tensorrt_says_all_that_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    text = mistake(check_format, "tensorrt")
    assert text.startswith("--format tensorrt needs what is not here: an NVIDIA GPU that torch can use; the package ")
    assert mistake(load_model, Path("model.engine")) == text
    for precision in ("fp32", "int8"):
        export = functools.partial(export_detector, file_format="tensorrt", precision=precision)
        assert mistake(export, config("retinanet"), "absent.pth", tmp_path / "export") == text


def test_an_engine_of_another_tensorrt_or_gpu(monkeypatch, plain, tmp_path):
    """Neither can be had here; an engine's metadata are read before it is."""
    fake = types.ModuleType("tensorrt")
    fake.__spec__, fake.__version__ = importlib.machinery.ModuleSpec("tensorrt", None), "10.13.0"
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    path = tmp_path / "model.engine"
    path.write_bytes(b"engine")
    exportable = make_exportable(detector("retinanet"), fixed_number=100)
    facts = {"classes": ("a", "b", "c"), "precision": "fp32", "input_dtype": "uint8", "weights": "x.pth"}
    metadata = describe_model(config("retinanet"), exportable, file_format="tensorrt", **facts)
    assert metadata["built_for"] == {"TensorRT": "10.13.0", "GPU": "NVIDIA L4"}
    metadata_path(path).write_text(json.dumps(metadata))
    for built_for in ({"TensorRT": "10.14.1", "GPU": "NVIDIA L4"}, {"TensorRT": "10.13.0", "GPU": "NVIDIA A10G"}):
        metadata_path(path).write_text(json.dumps(metadata | {"built_for": built_for}))
        theirs = f"TensorRT {built_for['TensorRT']}, GPU {built_for['GPU']}"
        here = "TensorRT 10.13.0, GPU NVIDIA L4"
        assert (
            mistake(ExportedModel, path) == f"{path} was built for {theirs}, and here is {here}: export it again here"
        )
    assert plain("torchscript").metadata["built_for"] == {}


@pytest.mark.parametrize("missing", ["onnxruntime", "onnxscript"])
def test_running_onnx_takes_onnxruntime_alone(monkeypatch, tmp_path, missing):
    pytest.importorskip("onnxruntime")
    from tests.projects_vil.export.onnx_graph import graphs

    path, version = graphs.saved(tmp_path, graphs.node("Relu", "x", "y")), importlib.metadata.version

    def found(name: str) -> str:
        if name in (missing, "onnxscript"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", found)
    assert mistake(check_format, "onnx").startswith("--format onnx needs onnxscript: pip install onnx ")
    if missing == "onnxruntime":
        assert mistake(load_model, path) == f"{path} needs onnxruntime: pip install onnxruntime"
    else:
        assert load_model(path)(torch.tensor([[-1.0, 0.0, 1.0, 2.0]]))[0].tolist() == [[0.0, 0.0, 1.0, 2.0]]


def test_an_older_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1+cpu")
    check_format("torchscript")
    for file_format in ("onnx", "torch_export", "aot_inductor"):
        text = mistake(check_format, file_format)
        assert text == f"--format {file_format} needs torch 2.8 or newer, and this is 2.7.1+cpu"
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    check_format("torch_export")
