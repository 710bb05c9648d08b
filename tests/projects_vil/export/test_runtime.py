"""Exported files in their own runtimes: what they take, detectron2's interface over them, and damaged ones."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from backbones import ConfigError
from projects_vil.export import FORMATS, ExportedModel, example_image, metadata_path, paste_masks
from projects_vil.export.metadata import digests_of
from tests.projects_vil.export.exporting import demo_detector


def copy_of(model: ExportedModel, folder: Path, **metadata) -> Path:
    """A copy of the files, with other metadata."""
    path = folder / model.path.name
    for file in FORMATS[model.file_format].files(model.path):
        shutil.copy(file, folder)
    metadata_path(path).write_text(json.dumps(model.metadata | metadata))
    return path


def test_traced_models_take_both_types(written):
    model, image = written("retinanet", "torchscript"), example_image(70, 90)
    traced = torch.jit.load(model.path)
    for ours, theirs in zip(traced(image), traced(image.float()), strict=True):
        assert torch.equal(ours, theirs)
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
    torch.testing.assert_close(ours.pred_boxes.tensor, theirs.pred_boxes.tensor, rtol=0, atol=1e-2)
    torch.testing.assert_close(ours.scores, theirs.scores, rtol=0, atol=1e-4)
    assert ours.pred_classes.tolist() == theirs.pred_classes.tolist()
    if name == "mask_rcnn":
        assert ours.pred_masks.shape == (len(ours), 200, 281) and ours.pred_masks.any()
        assert (ours.pred_masks != theirs.pred_masks).float().mean() < 1e-4


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
