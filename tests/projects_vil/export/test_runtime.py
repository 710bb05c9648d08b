"""Exported files in their own runtimes: what they take, detectron2's interface over them, and damaged ones."""

import json
from pathlib import Path

import pytest
import torch
from detectron2.modeling.postprocessing import detector_postprocess
from detectron2.structures import Boxes, Instances

from backbones import InputError
from projects_vil.export import ExportedDetector, ExportedModel, paste_masks, to_instances
from projects_vil.export.formats import FORMATS as KNOWN
from projects_vil.export.images import example_image
from projects_vil.export.metadata import digests_of, metadata_path, read_metadata
from projects_vil.export.proof.report import eager_detections
from tests.projects_vil.export.exporting import BOTH, FORMATS, demo_detector, mistake


def test_traced_models_take_both_types(plain):
    model = torch.jit.load(plain("torchscript").path)
    image = example_image(70, 90)
    for ours, theirs in zip(model(image), model(image.float()), strict=True):
        assert torch.equal(ours, theirs)


def test_images_between_whole_numbers_are_not_cut_off(plain):
    with pytest.raises(InputError, match="takes torch.uint8 images: export it with --input-dtype float32"):
        plain("torchscript")(example_image(64, 80).float())


@pytest.mark.slow
def test_a_batch_that_is_too_large(written, tmp_path):
    path = copy_of(written("retinanet", "torchscript", batched=True), tmp_path)
    metadata = json.loads(metadata_path(path).read_bytes())
    assert metadata["input"]["batch"] == [1, 1024]
    metadata["input"]["batch"] = [1, 2]
    metadata_path(path).write_text(json.dumps(metadata))
    images = torch.stack([example_image(40, 50)] * 3)
    assert mistake(ExportedModel(path), images) == f"{path}: a batch of 3 images, and the model takes 1 to 2"
    # As files have it that were exported before it was written.
    del metadata["input"]["batch"]
    metadata_path(path).write_text(json.dumps(metadata))
    assert set(ExportedModel(path)(images)["image_index"].tolist()) == {0, 1, 2}


# -- detectron2's interface ------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_an_exported_model_behind_detectron2s_interface(exported, name):
    """Boxes are scaled to the size of the file, and masks pasted, as detectron2 does it."""
    model = ExportedDetector(ExportedModel(exported(name)[0])).eval()
    inputs = {"image": example_image(64, 90), "height": 200, "width": 281}
    (ours,) = model([inputs])
    with torch.no_grad():
        (theirs,) = demo_detector(name)([inputs])
    ours, theirs = ours["instances"], theirs["instances"]
    assert ours.image_size == theirs.image_size == (200, 281) and len(ours) == len(theirs) > 0
    torch.testing.assert_close(ours.pred_boxes.tensor, theirs.pred_boxes.tensor, rtol=0, atol=1e-2)
    torch.testing.assert_close(ours.scores, theirs.scores, rtol=0, atol=1e-4)
    assert ours.pred_classes.tolist() == theirs.pred_classes.tolist()
    if name == "mask_rcnn":
        assert ours.pred_masks.shape == (len(ours), 200, 281) and ours.pred_masks.any()
        assert (ours.pred_masks != theirs.pred_masks).float().mean() < 1e-4


def test_pasted_masks():
    found = eager_detections(demo_detector("mask_rcnn"), example_image(64, 90))
    instances = Instances((64, 90), pred_boxes=Boxes(found["boxes"].clone()), pred_masks=found["masks"])
    expected = detector_postprocess(instances, 64, 90).pred_masks
    pasted = paste_masks(found["masks"], found["boxes"], (64, 90))
    assert pasted.shape == (len(found["boxes"]), 64, 90) and pasted.dtype == torch.bool and pasted.any()
    assert torch.equal(pasted, expected)
    none = paste_masks(found["masks"][:0], found["boxes"][:0], (64, 90))
    assert none.shape == (0, 64, 90)
    assert paste_masks(found["masks"], found["boxes"], (64, 90), threshold=0.9).sum() < pasted.sum()


def test_instances_do_not_change_what_was_found():
    found = eager_detections(demo_detector("retinanet"), example_image(64, 90))
    before = found["boxes"].clone()
    to_instances(found, (64, 90), (640, 900))
    assert torch.equal(found["boxes"], before)


# -- mistakes --------------------------------------------------------------------------------------


def copy_of(model: ExportedModel, folder: Path) -> Path:
    path = folder / model.path.name
    for file in (*KNOWN[model.file_format].files(model.path), metadata_path(model.path)):
        (folder / file.name).write_bytes(file.read_bytes())
    return path


def test_no_file(tmp_path):
    assert mistake(ExportedModel, tmp_path / "model.onnx") == f"there is no file {tmp_path}/model.onnx"
    (tmp_path / "folder.pt2").mkdir()
    assert mistake(ExportedModel, tmp_path / "folder.pt2").startswith(f"{tmp_path}/folder.pt2 is a folder")


def test_no_metadata(plain, tmp_path):
    path = copy_of(plain("torchscript"), tmp_path)
    metadata_path(path).unlink()
    text = mistake(ExportedModel, path)
    assert text.startswith(f"cannot read {path}.metadata.json (No such file or directory)")


@pytest.mark.parametrize("machine", ["x", [1], None, {"GPU": None}])
def test_a_machine_that_is_none(plain, tmp_path, machine):
    path = copy_of(plain("torchscript"), tmp_path)
    metadata_path(path).write_text(json.dumps(json.loads(metadata_path(path).read_bytes()) | {"built_for": machine}))
    assert mistake(ExportedModel, path) == f"{path}.metadata.json is not the metadata of an exported model"


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
    assert text.startswith(f"{other} is no exported model: ") and all(known.suffix in text for known in KNOWN.values())
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
    text = mistake(ExportedModel, path)
    assert text.startswith(f"cannot load {path}: ") and "Exception from" not in text


@pytest.mark.parametrize("damage", ["missing", "another"])
def test_the_weights_beside_a_file(plain, tmp_path, damage):
    path = copy_of(plain("openvino"), tmp_path)
    weights = path.with_suffix(".bin")
    digests = digests_of(path, "openvino")
    metadata_path(path).write_text(json.dumps(read_metadata(path) | digests))
    assert list(digests["beside"]) == [weights.name] and ExportedModel(path)(example_image(64, 80))
    if damage == "missing":
        weights.unlink()
        assert mistake(ExportedModel, path) == f"there is no file {weights} (which belongs to {path})"
    else:
        weights.write_bytes(weights.read_bytes()[::-1])
        assert mistake(ExportedModel, path).startswith(f"{weights} is damaged, or not the file that {path.name}")


def test_a_flipped_bit_is_found(exported, tmp_path):
    """By the file's digest; whoever has changed it on purpose takes the digest out."""
    path = copy_of(ExportedModel(exported("retinanet")[0]), tmp_path)
    contents = bytearray(path.read_bytes())
    # In the middle, among the weights.
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)
    assert mistake(ExportedModel, path).startswith(f"{path} is damaged, or not the file that ")
    metadata = json.loads(metadata_path(path).read_bytes())
    del metadata["sha256"]
    metadata_path(path).write_text(json.dumps(metadata))
    assert ExportedModel(path).metadata == metadata
