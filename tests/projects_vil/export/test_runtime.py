"""Exported files in their own runtimes: what they take, detectron2's interface over them, and damaged ones."""

import io
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from backbones import ConfigError
from projects_vil.export import FORMATS, ExportedModel, example_image, metadata_path, paste_masks
from projects_vil.export.formats import load_model
from projects_vil.export.metadata import digests_of, with_digest
from tests.projects_vil.export.exporting import demo_detector
from tests.projects_vil.helpers import ROOT, assert_same_detections
from tests.tolerances import FLOAT32


def copy_of(model: ExportedModel, folder: Path, **metadata) -> Path:
    """A copy of the files, with other metadata."""
    path = folder / model.path.name
    for file in FORMATS[model.file_format].files(model.path):
        shutil.copy(file, folder)
    changed = with_digest(model.metadata | metadata)
    if changed != model.metadata | metadata:
        changed.pop("metadata_sha256")
    metadata_path(path).write_text(json.dumps(changed))
    return path


def test_traced_models_take_both_types(written):
    model, image = written("retinanet", "torchscript"), example_image(70, 90)
    traced = torch.jit.load(model.path)
    for ours, theirs in zip(traced(image), traced(image.float()), strict=True):
        torch.testing.assert_close(ours, theirs, **FLOAT32)
    # Fractions would be cut off for other formats.
    with pytest.raises(ConfigError, match="float32"):
        model(image.float())


def test_a_batch_that_is_too_large(written, tmp_path):
    model = written("mask_rcnn", "torchscript", batched=True, dtype="float32")
    assert model.metadata["input"]["batch"] == [1, 1024]
    small = ExportedModel(copy_of(model, tmp_path, input=model.metadata["input"] | {"batch": [1, 2]}))
    with pytest.raises(ConfigError, match="3 images"):
        small(torch.stack([example_image(40, 50)] * 3))


@pytest.mark.parametrize("name", ["retinanet", pytest.param("mask_rcnn", marks=pytest.mark.slow)])
def test_an_exported_model_with_detectron2s_interface(exported, name):
    """Boxes are scaled to the size of the file, and masks pasted, as detectron2 does it."""
    model = ExportedModel(exported(name)[0])
    inputs = {"image": example_image(64, 90), "height": 200, "width": 281}
    for _ in range(2):  # the second time shows that the first has left its outputs as they were
        (ours,) = model.as_detectron2([inputs])
    with torch.no_grad():
        (theirs,) = demo_detector(name)([inputs])
    ours, theirs = ours["instances"], theirs["instances"]
    assert ours.image_size == theirs.image_size == (200, 281) and len(ours) == len(theirs) > 0
    assert_same_detections(ours, theirs)
    assert name == "retinanet" or (ours.pred_masks.shape == (len(ours), 200, 281) and ours.pred_masks.any())


def test_pasting_no_masks():
    none = paste_masks(torch.zeros(0, 1, 28, 28), torch.zeros(0, 4), (64, 90))
    assert none.shape == (0, 64, 90) and none.dtype == torch.bool


# -- damaged files ---------------------------------------------------------------------------------


def test_the_weights_of_openvino_are_in_a_file_of_their_own(written, tmp_path):
    model = written("retinanet", "openvino", fixed_number=100)
    path = copy_of(model, tmp_path, **digests_of(model.path, "openvino"))
    weights = path.with_suffix(".bin")
    assert ExportedModel(path).metadata["other_files"].keys() == {weights.name}
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(ConfigError, match=weights.name):
        ExportedModel(path)
    weights.unlink()
    with pytest.raises(ConfigError, match=weights.name):
        ExportedModel(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["outputs"].reverse(),
        lambda data: data["input"].update(color_order="BGR"),
        lambda data: data["classes"].pop(),
        lambda data: data.update(category_ids=[1, 1, 1]),
        lambda data: data.update(thresholds=None),
        lambda data: data.update(input=[]),
    ],
)
@pytest.mark.parametrize("keep_digest", [True, False])
def test_changed_metadata(written, tmp_path, change, keep_digest):
    """Of a wrong form, or with a digest of its own that is not the one in the file."""
    model = written("retinanet", "torchscript")
    path = copy_of(model, tmp_path)
    data = json.loads(metadata_path(path).read_text())
    change(data)
    metadata_path(path).write_text(json.dumps(data if keep_digest else with_digest(data)))
    with pytest.raises(ConfigError, match=path.name):
        ExportedModel(path)
    # On purpose, without a digest: not what the model cannot have.
    fewer = {name: model.metadata[name][1:] for name in ("classes", "category_ids")}
    metadata_path(path).write_text(json.dumps({**model.metadata, **fewer, "metadata_sha256": None}))
    with pytest.raises(ConfigError, match="2 classes"):
        ExportedModel(path)
    metadata_path(path).write_text("{")
    with pytest.raises(ConfigError, match="has its own"):
        ExportedModel(path)
    metadata_path(path).unlink()
    assert ExportedModel(path).metadata == model.metadata


def test_no_path_of_this_machine_is_in_a_file(written):
    for file_format in ("torchscript", "openvino"):
        check_paths(written("retinanet", file_format, **({"fixed_number": 100} if file_format == "openvino" else {})))


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["onnx", "torch_export"])
def test_no_path_of_this_machine_is_in_a_slow_file(written, file_format):
    options = {"batched": True, "fixed_number": 100} if file_format == "onnx" else {}
    check_paths(written("retinanet", file_format, **options))


def check_paths(model: ExportedModel) -> None:
    paths = [str(path).encode() for path in (ROOT, Path.home(), "site-packages", "dist-packages")]
    for file in FORMATS[model.file_format].files(model.path):
        contents = [file.read_bytes()]
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                contents += map(archive.read, archive.namelist())
        assert not [path for path in paths for content in contents if path in content], file


class Creates:
    """A pickle that creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    "member", ["data/sample_inputs/model.pt", "data/weights/model.pt", "data/constants/opaque_obj_0"]
)
def test_a_pickle_in_an_archive_of_torch_export(tmp_path, member):
    """It is not run, whether torch would read it or not."""
    path, created = tmp_path / "model.pt2", tmp_path / "created"
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    torch.export.save(exported, path)
    reader, buffer, pickled = torch._C.PyTorchFileReader(str(path)), io.BytesIO(), io.BytesIO()
    torch.save(Creates(created), pickled)
    writer = torch._C.PyTorchFileWriter(buffer)
    members = {name: reader.get_record(name) for name in reader.get_all_records()} | {member: pickled.getvalue()}
    for name, content in members.items():
        if name not in ("version", ".data/serialization_id"):
            writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ConfigError, match=r"model\.pt2") as caught:
        load_model(path)
    assert not created.exists() and "can still be loaded" not in str(caught.value)
