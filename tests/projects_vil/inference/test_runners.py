"""What detects, eager or exported: which images it takes, and what it refuses."""

import json

import pytest
import torch

from backbones import InputError
from projects_vil import Detector
from projects_vil.export.metadata import metadata_path
from projects_vil.inference import config_of_export, predict
from tests.projects_vil.export.exporting import write
from tests.projects_vil.helpers import lively_detector, run_tool, small_config
from tests.projects_vil.inference.helpers import EIGHTY, picture, save, write_video


def test_an_exported_model_is_not_augmented(tmp_path):
    with pytest.raises(InputError, match="--tta .*model.onnx is an exported one"):
        predict(small_config(), tmp_path / "model.onnx", tmp_path, tmp_path / "output", tta=True)


def test_images_that_an_exported_model_cannot_take_are_skipped(tmp_path):
    for name, size in (("a", (48, 64)), ("b", (16, 64)), ("c", (48, 300))):
        save(tmp_path / f"in/{name}.png", picture(*size))
    path, resizing = write(tmp_path, "retinanet", "torchscript"), {"short_side": None, "longest_side": None}
    metadata = json.loads(metadata_path(path).read_text())
    metadata["input"]["sides"], metadata["resizing"] = [32, 256], metadata["resizing"] | resizing
    metadata_path(path).write_text(json.dumps(metadata))
    cfg = small_config()
    summary = predict(None, path, tmp_path / "in", tmp_path / "out", drawings=False, batch_size=3)
    assert summary.done == 1 and [item.name for item in summary.skipped] == ["b.png", "c.png"]
    assert summary.skipped[0].reason == "16 x 64 pixels: resized to 16 x 64, and the model takes sides of 32 to 256"
    write_video(tmp_path / "clip.avi", 2, size=(16, 64))
    with pytest.raises(InputError, match="clip.avi: frames of 16 x 64 pixels: .* sides of 32 to 256"):
        predict(cfg, path, tmp_path / "clip.avi", tmp_path / "video", drawings=False)
    with pytest.raises(InputError, match="NUM_CLASSES is 80, and the weights know 3 classes"):
        predict(small_config("retinanet", *EIGHTY), path, tmp_path / "in", tmp_path / "eighty")
    assert not (tmp_path / "eighty").exists()


@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_images_too_thin_to_augment_are_skipped(tmp_path, detector):
    cfg = small_config(detector, "TEST.AUG.MIN_SIZES", "(48, 64)", "TEST.AUG.MAX_SIZE", "96", "DATASETS.TEST", "()")
    torch.save({"model": lively_detector(cfg).state_dict()}, tmp_path / "weights.pth")
    save(tmp_path / "in/a.png", picture(40, 60))
    save(tmp_path / "in/thin.png", picture(1, 20000))
    summary = predict(cfg, tmp_path / "weights.pth", tmp_path / "in", tmp_path / "out", tta=True, drawings=False)
    assert summary.done == 1 and [item.name for item in summary.skipped] == ["thin.png"]
    assert summary.skipped[0].reason == "1 x 20000 pixels: resized, nothing would be left of it"


def test_mistakes_in_the_config(files):
    arguments = files / "weights.pth", files / "in", files / "out"
    with pytest.raises(InputError, match="a SemanticSegmentor cannot predict here: only RetinaNet and Gen"):
        predict(small_config("semantic_fpn"), *arguments)
    with pytest.raises(InputError, match="INPUT.FORMAT is L: it is RGB or BGR"):
        predict(small_config("retinanet", "INPUT.FORMAT", "L"), *arguments)
    with pytest.raises(InputError, match="weights.pth is no exported model: name its config with --config-file"):
        predict(None, *arguments)
    with pytest.raises(InputError, match="no weights were given"):
        predict(small_config(), "", files / "in", files / "out")
    with pytest.raises(InputError, match="TEST.AUG.MIN_SIZES"):
        predict(small_config("retinanet", "TEST.AUG.MIN_SIZES", "(0,)"), *arguments, tta=True)


def test_an_exported_model_needs_no_config(exported_run, shapes, tmp_path):
    model, arguments = exported_run / "one.ts", ["--input", shapes / "val", "--output", tmp_path / "out"]
    result = run_tool("predict.py", "--weights", model, "--device", "cpu", "--no-drawings", *arguments)
    assert result.returncode == 0, result.stderr
    number = len(list((shapes / "val").iterdir()))
    assert len(json.loads((tmp_path / "out/images.json").read_text())["images"]) == number
    assert result.stdout.startswith(f"{number} images, ")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["DATASETS.TEST", "('mine',)"], "DATASETS.TEST is read from a config alone: name one with --config-file"),
        (["MODEL.DEVICE", "cuda"], "{} is an exported model, which runs on the CPU here, not on cuda"),
        (["INPUT.FORMAT", "BGR"], "INPUT.FORMAT changes nothing here: it is inside {}; export the model again with it"),
    ],
)
def test_keys_without_a_config(exported_run, overrides, expected):
    model = exported_run / "one.ts"
    with pytest.raises(InputError) as caught:
        config_of_export(model, ["MODEL.WEIGHTS", str(model), *overrides])
    assert str(caught.value) == expected.format(model)


@pytest.mark.parametrize("named", ["model.bin", ""])
def test_the_exported_model_beside_another_file_is_named(named, tmp_path):
    """OpenVINO's weights, and the folder of the export."""
    for name in ("model.xml", "model.bin", "other.txt"):
        (tmp_path / name).touch()
    with pytest.raises(InputError) as caught:
        config_of_export(tmp_path / named)
    assert str(caught.value) == (
        f"{tmp_path / named} is no exported model, and {tmp_path / 'model.xml'} is: name that, or a config with "
        "--config-file"
    )
    with pytest.raises(InputError, match="other.txt is no exported model: name its config with --config-file$"):
        config_of_export(tmp_path / "other.txt")
    with pytest.raises(InputError, match=f"; .*{tmp_path / 'model.xml'}.* can be loaded by itself$"):
        Detector.load(tmp_path / named)


@pytest.mark.parametrize("batched", [False, True])
def test_one_image_at_a_time_is_said(batched, tmp_path, caplog):
    save(tmp_path / "in/a.png", picture(48, 64))
    path = write(tmp_path, "retinanet", "torchscript", batched=batched)
    for batch_size in (1, 4):
        predict(None, path, tmp_path / "in", tmp_path / f"{batch_size}", drawings=False, batch_size=batch_size)
    said = [record.getMessage() for record in caplog.records if "--batch-size" in record.getMessage()]
    assert said == ([] if batched else [f"--batch-size 4 has no effect: {path} takes one image at a time"])


def test_neither_a_config_nor_an_exported_model(tmp_path):
    result = run_tool("predict.py", "--input", tmp_path, "--output", tmp_path / "out")
    expected = "error: name a config with --config-file, or an exported model, which needs none, with --weights"
    assert (result.returncode, result.stderr.strip()) == (1, expected)
