"""Slim checkpoints: the same detector, without what only resuming needs."""

import re
import runpy

import pytest
import torch

from backbones import InputError
from backbones.utils.files import read_checkpoint, write_checkpoint
from projects_vil import load_config
from projects_vil.checkpoint import PROVENANCE_KEY, build_detector, check_weights, slim_checkpoint
from tests.projects_vil.helpers import ROOT

SUFFIXES = ["pth", "safetensors"]

LEFT_OUT = ("finished", "iteration", "loss_normalizers", "seed", "trainer")


def detections(cfg, weights):
    detector = build_detector(cfg, weights)
    image = torch.arange(3 * 70 * 101).remainder(251).view(3, 70, 101).float()
    with torch.no_grad():
        instances = detector([{"image": image}])[0]["instances"]
    return instances.pred_boxes.tensor, instances.scores, instances.pred_classes


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_detector_in_a_third_of_the_size(trained_run, tmp_path, suffix):
    source, output = trained_run / "model_final.pth", tmp_path / f"slim.{suffix}"
    slimmed = slim_checkpoint(source, output)
    assert (slimmed.source_bytes, slimmed.output_bytes) == (source.stat().st_size, output.stat().st_size)
    assert slimmed.output_bytes < 0.4 * slimmed.source_bytes
    assert slimmed.left_out == LEFT_OUT and slimmed.has_provenance
    before, after = read_checkpoint(source), read_checkpoint(output)
    assert after.keys() == {"model", PROVENANCE_KEY}
    assert after[PROVENANCE_KEY] == before[PROVENANCE_KEY]
    assert after["model"].keys() == before["model"].keys()
    assert slimmed.values == sum(tensor.numel() for tensor in before["model"].values())
    cfg = load_config(trained_run / "config.yaml", ["MODEL.RETINANET.SCORE_THRESH_TEST", "0.0"])
    # As --eval-only and export load it, and as MODEL.WEIGHTS to train from.
    check_weights(cfg, str(output), complete=True)
    check_weights(cfg, str(output))
    ours, theirs = detections(cfg, output), detections(cfg, source)
    assert len(ours[0])
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_what_is_slim_stays_so(trained_run, tmp_path):
    slim_checkpoint(trained_run / "model_final.pth", tmp_path / "a.safetensors")
    again = slim_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.pth")
    assert again.left_out == ()
    assert "left out: nothing, there was only the model" in again.lines()[0]


def test_a_file_without_provenance_is_said_to_have_none(tmp_path):
    torch.save({"model": {"backbone.x": torch.zeros(3)}, "optimizer": {}}, tmp_path / "other.pth")
    slimmed = slim_checkpoint(tmp_path / "other.pth", tmp_path / "slim.pth")
    assert slimmed.left_out == ("optimizer",)
    assert "does not say its variant" in slimmed.lines()[1]


def test_the_tool_prints_both_sizes(trained_run, tmp_path, capsys, monkeypatch):
    output = tmp_path / "slim.safetensors"
    monkeypatch.setattr("sys.argv", ["slim_checkpoint.py", str(trained_run / "model_final.pth"), str(output)])
    runpy.run_path(str(ROOT / "tools/slim_checkpoint.py"))["main"]()
    first, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"[\d.]+ MB before, [\d.]+ MB now: [\d.]+ M values; left out: " + ", ".join(LEFT_OUT), first)
    assert last == f"wrote {output}"


@pytest.mark.parametrize("output", ["model.pth", "link.pth"])
def test_the_source_is_never_overwritten(tmp_path, output):
    source = tmp_path / "model.pth"
    write_checkpoint(source, {"model": {"backbone.x": torch.zeros(3)}})
    (tmp_path / "link.pth").symlink_to(source)
    before = source.read_bytes()
    with pytest.raises(InputError, match="is the source"):
        slim_checkpoint(source, tmp_path / output)
    assert source.read_bytes() == before


@pytest.mark.parametrize(
    "contents, output, message",
    [
        (None, "slim.pth", "there is no file"),
        ({"state_dict": {"a": torch.zeros(3)}}, "slim.pth", "it has no model of tensors only"),
        ({"model": {"a": torch.zeros(3), "b": 3}}, "slim.pth", "it has no model of tensors only"),
        ({"model": {"a": torch.zeros(3)}}, "slim.onnx", "a checkpoint's name ends in .pth or .safetensors"),
        ({"model": {"a": torch.zeros(3)}}, "none/slim.pth", "there is no folder"),
    ],
)
def test_mistakes(tmp_path, contents, output, message):
    if contents is not None:
        torch.save(contents, tmp_path / "model.pth")
    with pytest.raises(InputError, match=message):
        slim_checkpoint(tmp_path / "model.pth", tmp_path / output)
