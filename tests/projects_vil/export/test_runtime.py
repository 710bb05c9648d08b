"""Exported files in their own runtimes: inputs, detectron2's interface, and damaged or malicious files."""

import io
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from backbones import ConfigError
from projects_vil.export import FORMATS, ExportedModel, example_image, pad_image, paste_masks
from projects_vil.export.formats import load_model
from projects_vil.export.runtime import letterbox_size, metadata_path
from projects_vil.files import content_hash
from tests.backbones.test_checkpoint_files import Malicious
from tests.projects_vil.export.exporting import demo_detector
from tests.projects_vil.helpers import ROOT, assert_same_detections, message
from tests.selection import slow_except
from tests.tolerances import FLOAT32


def copy_of(model: ExportedModel, folder: Path, **metadata) -> Path:
    """Copy the files of a model, with other metadata."""
    path = folder / model.path.name
    for file in FORMATS[model.file_format].files(model.path):
        shutil.copy(file, folder)
    metadata_path(path).write_text(json.dumps(model.metadata | metadata))
    return path


def test_inputs(written):
    model, image = written("retinanet", "torchscript"), example_image(70, 90)
    traced = torch.jit.load(model.path)
    for ours, theirs in zip(traced(image), traced(image.float()), strict=True):
        torch.testing.assert_close(ours, theirs, **FLOAT32)
    # Casting to uint8 would truncate fractions.
    assert "float32" in message(model, image.float())
    assert "1 to 8192" in message(model, torch.zeros(3, 4, 8193, dtype=torch.uint8))


def test_a_fixed_size_is_checked(written, tmp_path):
    """Not all runtimes check it."""
    model = written("retinanet", "torchscript")
    model = ExportedModel(copy_of(model, tmp_path, input=model.metadata["input"] | {"size": [64, 96]}))
    assert model(example_image(64, 96))
    assert "64 x 96 pixels, not 96 x 64" in message(model, example_image(96, 64))


def test_letterboxing():
    assert letterbox_size(480, 640, (800, 1333)) == (800, 1067)
    size = letterbox_size(300, 201, (96, 128))
    assert size == (96, 64)
    image = torch.full((3, *size), 7, dtype=torch.uint8)
    canvas = pad_image(image, (96, 128), [123.675, 116.28, 103.53])
    assert canvas.shape == (3, 96, 128) and torch.equal(canvas[:, : size[0], : size[1]], image)
    mean = torch.tensor([124, 116, 104], dtype=torch.uint8)[:, None, None]
    assert (canvas[:, size[0] :] == mean).all() and (canvas[:, :, size[1] :] == mean).all()


@pytest.mark.parametrize("name", ["retinanet", pytest.param("mask_rcnn", marks=pytest.mark.slow)])
def test_detectron2s_interface(exported, name):
    """Boxes are scaled to the original size, and masks pasted, as in detectron2."""
    model = ExportedModel(exported(name)[0])
    inputs = {"image": example_image(64, 90), "height": 200, "width": 281}
    for _ in range(2):  # the first call must not change outputs that the runtime reuses
        (ours,) = model.as_detectron2([inputs])
    with torch.no_grad():
        (theirs,) = demo_detector(name)([inputs])
    ours, theirs = ours["instances"], theirs["instances"]
    assert ours.image_size == theirs.image_size == (200, 281) and len(ours) == len(theirs) > 0
    assert_same_detections(ours, theirs)
    assert name == "retinanet" or (ours.pred_masks.shape == (len(ours), 200, 281) and ours.pred_masks.any())
    none = paste_masks(torch.zeros(0, 1, 28, 28), torch.zeros(0, 4), (64, 90))
    assert none.shape == (0, 64, 90) and none.dtype == torch.bool


# -- damaged files ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_weights_file_of_openvino(written, tmp_path):
    model = written("retinanet", "openvino", fixed_number=100)
    weights = model.path.with_suffix(".bin")
    path = copy_of(model, tmp_path, sha256=content_hash(model.path), other_files={weights.name: content_hash(weights)})
    weights = path.with_suffix(".bin")
    assert ExportedModel(path).metadata["other_files"].keys() == {weights.name}
    weights.write_bytes(weights.read_bytes()[::-1])
    for _ in range(2):
        assert weights.name in message(ExportedModel, path)
        weights.unlink(missing_ok=True)


def test_metadata_of_another_file(written, tmp_path):
    """The metadata file comes first. Without it, the metadata in the model are used."""
    model = written("retinanet", "torchscript")
    path = copy_of(model, tmp_path, backbone="renamed")
    assert ExportedModel(path).metadata == model.metadata | {"backbone": "renamed"}
    file = metadata_path(path)
    file.write_text(json.dumps(model.metadata | {"sha256": "of another file"}))
    assert f"SHA-256 of '{path}'" in message(ExportedModel, path)
    file.write_text("{")
    assert file.name in message(ExportedModel, path)
    file.unlink()
    assert ExportedModel(path).metadata == model.metadata


@pytest.mark.parametrize(
    ("file_format", "options"),
    slow_except(
        [
            ("torchscript", {}),
            ("openvino", {"fixed_number": 100}),
            ("onnx", {"batched": True, "fixed_number": 100}),
            ("torch_export", {}),
        ],
        ["torchscript"],
    ),
)
def test_no_file_contains_a_path_of_this_machine(written, file_format, options):
    paths = [str(path).encode() for path in (ROOT, Path.home(), "site-packages", "dist-packages")]
    for file in FORMATS[file_format].files(written("retinanet", file_format, **options).path):
        contents = [file.read_bytes()]
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                contents += map(archive.read, archive.namelist())
        assert not [path for path in paths for content in contents if path in content], file


@pytest.mark.parametrize("record", ["sample_inputs/model.pt", "weights/model.pt", "constants/opaque_obj_0"])
def test_a_pickle_in_a_torch_export_archive_is_not_run(tmp_path, record):
    path, created = tmp_path / "model.pt2", tmp_path / "created"
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),)), path)
    reader, buffer, pickled = torch._C.PyTorchFileReader(str(path)), io.BytesIO(), io.BytesIO()
    torch.save(Malicious(created), pickled)
    writer = torch._C.PyTorchFileWriter(buffer)
    records = {name: reader.get_record(name) for name in reader.get_all_records()}
    for name, content in (records | {f"data/{record}": pickled.getvalue()}).items():
        if name not in ("version", ".data/serialization_id"):
            writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ConfigError, match=r"model\.pt2") as caught:
        load_model(path)
    assert not created.exists() and "can still be loaded" not in str(caught.value)
