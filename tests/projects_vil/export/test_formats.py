"""Each format gives eager's answers in its own runtime, for sizes that it was not recorded with."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling.backbone import FPN, Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool, LastLevelP6P7
from torch import Tensor, nn

from backbones import InputError
from projects_vil.export import ExportedModel, make_exportable, read_metadata
from projects_vil.export.formats import OPSET, SUFFIXES, check_format, compiler, format_of, write_model
from projects_vil.export.metadata import describe_model, metadata_path
from projects_vil.export.parity import TOLERANCES, compare_detections
from projects_vil.export.report import eager_detections, example_image
from tests.projects_vil.helpers import lively_detector, small_config

BOTH = ("retinanet", "mask_rcnn")
# Recording takes long: each format has one detector that takes images, and the other that takes batches of them.
ALONE = {"torchscript": "retinanet", "torch_export": "mask_rcnn", "onnx": "retinanet"}
IN_BATCHES = {"torchscript": "mask_rcnn", "torch_export": "retinanet", "onnx": "mask_rcnn"}
FORMATS = tuple(ALONE)
RECORDED = (96, 128)
SIZES = [(64, 64), (64, 97), (101, 64), (33, 47), (150, 203), (257, 96), (224, 320)]
# A detector reports nothing in a grey image, and something in a drawn one.
OVERRIDES = {
    "retinanet": ("MODEL.RETINANET.SCORE_THRESH_TEST", "0.03"),
    "mask_rcnn": ("MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.6", "MODEL.RPN.POST_NMS_TOPK_TEST", "100"),
}


class Stem(Backbone):
    """Four convolutions, strides 4 to 32: the backbones' own exports are tested beside them, and take longer."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(channels, channels, 3, 2, 1) for _ in range(3)]
        self.layers = nn.ModuleList([nn.Conv2d(3, channels, 4, 4), *convolutions])
        self.channels = channels

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        outputs = {}
        for index, layer in enumerate(self.layers, start=1):
            images = layer(images).relu()
            outputs[f"stage{index}"] = images
        return outputs

    def output_shape(self) -> dict[str, ShapeSpec]:
        return {f"stage{i + 1}": ShapeSpec(channels=self.channels, stride=4 * 2**i) for i in range(4)}


def config(name: str) -> CfgNode:
    return small_config(name, *OVERRIDES[name])


@functools.cache
def detector(name: str) -> nn.Module:
    """detectron2's FPN and heads on a few convolutions."""
    model = lively_detector(config(name))
    torch.manual_seed(0)
    stem, stages, top = Stem(), ["stage1", "stage2", "stage3", "stage4"], LastLevelMaxPool()
    if name == "retinanet":
        stages, top = stages[1:], LastLevelP6P7(32, 32, "p5")
    with torch.no_grad():
        for parameter in stem.parameters():
            parameter *= 1.7
    model.backbone = FPN(stem, stages, 32, top_block=top).eval()
    return model


def write(folder: Path, name: str, file_format: str, *, batched: bool = False, dtype: str = "uint8") -> Path:
    """A model and its metadata."""
    exportable = make_exportable(detector(name), batched=batched)
    example = example_image(*RECORDED).to(getattr(torch, dtype))
    path = folder / f"{name}{'_batched' if batched else ''}_{dtype}{SUFFIXES[file_format]}"
    write_model(exportable, torch.stack([example] * 2) if batched else example, path, file_format)
    metadata = describe_model(
        config(name),
        exportable,
        classes=("circle", "square", "triangle"),
        file_format=file_format,
        precision="fp32",
        input_dtype=dtype,
        weights="lively.pth",
    )
    metadata_path(path).write_text(json.dumps(metadata))
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Writes a file once: detector, format -> the model in its runtime."""
    folder = tmp_path_factory.mktemp("exported")

    @functools.cache
    def load(name: str, file_format: str, batched: bool = False, dtype: str = "uint8") -> ExportedModel:
        return ExportedModel(write(folder, name, file_format, batched=batched, dtype=dtype))

    return load


@pytest.fixture(scope="module")
def plain(exported):
    """Format -> a model that takes one uint8 image."""
    return lambda file_format: exported(ALONE[file_format], file_format)


@pytest.fixture(scope="module")
def batched(exported):
    """Format -> a model that takes float32 batches."""
    return lambda file_format: exported(IN_BATCHES[file_format], file_format, batched=True, dtype="float32")


def assert_equal(found: dict[str, Tensor], image: Tensor, name: str) -> None:
    """What an exported model found in an image is what eager finds, and that is something."""
    theirs = eager_detections(detector(name), image)
    assert len(theirs["scores"]) >= 3 and found.keys() == theirs.keys()
    thresholds = {"score_threshold": float(OVERRIDES[name][1]), "max_detections": 100}
    row = compare_detections(theirs, found, tolerances=TOLERANCES["fp32"], **thresholds)
    assert row["ok"] and row["borderline"] <= 1, (image.shape, row)


def grey(height: int, width: int) -> Tensor:
    return torch.full((3, height, width), 128, dtype=torch.uint8)


# -- answers ---------------------------------------------------------------------------------------


def check_answers(model: ExportedModel, name: str) -> None:
    names = ["boxes", "scores", "classes", *(["masks"] if name == "mask_rcnn" else [])]
    for size in SIZES:
        image = example_image(*size, seed=sum(size))
        # Turned, it is another image.
        for one in (image, image.transpose(1, 2).contiguous()):
            found = model(one)
            assert list(found) == names
            assert found["boxes"].dtype == found["scores"].dtype == torch.float32
            assert found["classes"].dtype == torch.int64
            assert_equal(found, one, name)
        nothing = model(grey(*size))
        shapes = {"boxes": (0, 4), "scores": (0,), "classes": (0,), "masks": (0, 1, 28, 28)}
        assert {key: tuple(value.shape) for key, value in nothing.items()} == {key: shapes[key] for key in names}
        assert len(eager_detections(detector(name), grey(*size))["scores"]) == 0


@pytest.mark.parametrize("file_format", FORMATS)
def test_equals_eager_at_any_size(plain, file_format):
    model = plain(file_format)
    assert (model.file_format, model.batched, model.dtype) == (file_format, False, torch.uint8)
    check_answers(model, ALONE[file_format])


def test_a_traced_mask_rcnn_equals_eager_at_any_size(exported):
    check_answers(exported("mask_rcnn", "torchscript"), "mask_rcnn")


def check_batches(model: ExportedModel, name: str) -> None:
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
            assert_equal({key: value[index == i] for key, value in found.items()}, images[i], name)
    assert {len(value) for value in model(torch.stack([grey(70, 90)] * 2)).values()} == {0}


@pytest.mark.parametrize("file_format", FORMATS)
def test_batches(batched, file_format):
    model = batched(file_format)
    assert (model.batched, model.dtype) == (True, torch.float32)
    masks = ("masks",) if IN_BATCHES[file_format] == "mask_rcnn" else ()
    assert model.output_names == ("boxes", "scores", "classes", *masks, "image_index")
    check_batches(model, IN_BATCHES[file_format])


def test_batches_of_a_traced_retinanet(exported):
    check_batches(exported("retinanet", "torchscript", batched=True), "retinanet")


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["torch_export", "onnx"])
def test_the_other_way_round(exported, file_format):
    check_answers(exported(IN_BATCHES[file_format], file_format), IN_BATCHES[file_format])
    check_batches(exported(ALONE[file_format], file_format, batched=True), ALONE[file_format])


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="AOTInductor compiles C++")
@pytest.mark.parametrize("name", BOTH)
def test_a_compiled_package(exported, name):
    check_answers(exported(name, "aot_inductor"), name)


def test_traced_models_take_both_types(plain):
    model = torch.jit.load(plain("torchscript").path)
    image = example_image(70, 90)
    for ours, theirs in zip(model(image), model(image.float()), strict=True):
        assert torch.equal(ours, theirs)


def test_images_between_whole_numbers_are_not_cut_off(plain):
    with pytest.raises(InputError, match="takes torch.uint8 images: export it with --input-dtype float32"):
        plain("torchscript")(example_image(64, 80).float())


# -- files -----------------------------------------------------------------------------------------


def shape_of(value) -> list[int | str]:
    return [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]


def test_an_onnx_file(plain, batched):
    onnx = pytest.importorskip("onnx")
    for model, name, dtype, first in (
        (plain("onnx"), "image", onnx.TensorProto.UINT8, []),
        (batched("onnx"), "images", onnx.TensorProto.FLOAT, ["batch"]),
    ):
        contents = onnx.load(model.path, load_external_data=False)
        onnx.checker.check_model(contents)
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
    assert not [path for path in plain("onnx").path.parent.iterdir() if path.suffix == ".data"]


def test_an_exported_program_needs_torch_and_torchvision_only(plain, tmp_path):
    model, image = plain("torch_export"), example_image(75, 110, seed=4)
    torch.save(image, tmp_path / "image.pt")
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
    assert_equal(found, image, "mask_rcnn")


def test_formats_by_name():
    names = {"model.ts": "torchscript", "a/b.onnx": "onnx", "x.pt2": "torch_export", "x.aoti.pt2": "aot_inductor"}
    assert {name: format_of(name) for name in names} == names
    assert format_of(Path("my.onnx.pt2")) == "torch_export"
    assert metadata_path("a/model.onnx") == Path("a/model.onnx.metadata.json")


# -- mistakes --------------------------------------------------------------------------------------


def mistake(call, *args) -> str:
    """The one line of it."""
    with pytest.raises(InputError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_format(tmp_path):
    exportable = make_exportable(detector("retinanet"))
    text = mistake(write_model, exportable, example_image(64, 96), tmp_path / "model.onnx", "onnxx")
    assert text.startswith("unknown format 'onnxx'") and "onnx" in text.removeprefix("unknown format 'onnxx'")
    assert not (tmp_path / "model.onnx").exists()


def copy_of(model: ExportedModel, folder: Path) -> Path:
    path = folder / model.path.name
    path.write_bytes(model.path.read_bytes())
    metadata_path(path).write_bytes(metadata_path(model.path).read_bytes())
    return path


def test_no_file(tmp_path):
    assert mistake(ExportedModel, tmp_path / "model.onnx") == f"there is no file {tmp_path}/model.onnx"
    (tmp_path / "folder.pt2").mkdir()
    assert mistake(ExportedModel, tmp_path / "folder.pt2") == f"there is no file {tmp_path}/folder.pt2"


def test_no_metadata(plain, tmp_path):
    path = copy_of(plain("torchscript"), tmp_path)
    metadata_path(path).unlink()
    text = mistake(ExportedModel, path)
    assert text.startswith(f"cannot read {path}.metadata.json (No such file or directory)")


@pytest.mark.parametrize(
    "contents, expected",
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[]", "is not the metadata of an exported model"),
        (b"{}", "is not the metadata of an exported model"),
        (b'{"input": 1, "outputs": 2, "classes": 3, "resizing": 4}', "is not the metadata of an exported model"),
        (
            b'{"input": {}, "outputs": [], "classes": [], "resizing": {}, "thresholds": {}}',
            "is not the metadata of an exported model",
        ),
    ],
)
def test_metadata_that_is_not_ours(plain, tmp_path, contents, expected):
    path = copy_of(plain("torchscript"), tmp_path)
    metadata_path(path).write_bytes(contents)
    assert mistake(ExportedModel, path).startswith(f"{path}.metadata.json {expected}")


def test_an_unknown_suffix(plain, tmp_path):
    path = copy_of(plain("torchscript"), tmp_path)
    other = path.rename(tmp_path / "model.pth")
    metadata_path(path).rename(metadata_path(other))
    text = mistake(ExportedModel, other)
    assert text.startswith(f"{other} is no exported model: ") and all(suffix in text for suffix in SUFFIXES.values())
    # It is no matter of the metadata.
    metadata_path(other).unlink()
    assert mistake(ExportedModel, other) == text


@pytest.mark.parametrize("damage", ["empty", "nonsense", "half", "another format"])
@pytest.mark.parametrize("file_format", FORMATS)
def test_a_damaged_file(plain, tmp_path, file_format, damage):
    path = copy_of(plain(file_format), tmp_path)
    whole, other = path.read_bytes(), "torch_export" if file_format == "torchscript" else "torchscript"
    contents = {
        "empty": b"",
        "nonsense": b"this is no model at all" * 50,
        "half": whole[: len(whole) // 2],
        "another format": plain(other).path.read_bytes(),
    }[damage]
    path.write_bytes(contents)
    assert mistake(ExportedModel, path).startswith(f"cannot load {path}: ")


def test_metadata_is_what_was_written(plain):
    metadata = read_metadata(plain("onnx").path)
    assert metadata["classes"] == ["circle", "square", "triangle"] and metadata["opset"] == OPSET


# -- the machine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", FORMATS)
def test_formats_without_a_compiler(monkeypatch, tmp_path, file_format):
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


def test_an_older_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1+cpu")
    check_format("torchscript")
    for file_format in ("onnx", "torch_export", "aot_inductor"):
        text = mistake(check_format, file_format)
        assert text == f"--format {file_format} needs torch 2.8 or newer, and this is 2.7.1+cpu"
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    check_format("torch_export")
