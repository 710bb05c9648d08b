"""The checkpoint to resume from, removal of old ones, and checkpoints without training state."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write, read_checkpoint, write_checkpoint
from projects_vil import load_config
from projects_vil.checkpoint import (
    METADATA_KEY,
    build_detector,
    check_weights,
    read_last_checkpoint,
    remove_old,
    remove_partial,
    remove_run,
    slim_checkpoint,
)
from projects_vil.checkpoint.storage import tag_checkpoint
from tests.projects_vil.helpers import ROOT


def save(folder: Path, name: str, *, age: int = 0) -> Path:
    path = folder / name
    torch.save({"model": {"weight": torch.ones(64)}, "trainer": {"iteration": 3}}, path)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


@pytest.fixture
def run(tmp_path):
    """Three checkpoints, of which ``last_checkpoint`` names the second newest."""
    for age, name in enumerate(("model_0000029.pth", "model_0000019.pth", "model_0000009.pth")):
        save(tmp_path, name, age=age)
    tag_checkpoint(tmp_path, "model_0000019.pth")
    return tmp_path


def test_last_checkpoint_names_the_file(run):
    path, contents = read_last_checkpoint(run)
    assert path.name == "model_0000019.pth" and contents["trainer"] == {"iteration": 3}


@pytest.mark.parametrize("content", [None, "", "model_0000099.pth", "../elsewhere.pth", "x" * 300])
def test_without_a_valid_last_checkpoint_the_newest_is_used(run, content, caplog):
    (run / "last_checkpoint").unlink()
    if content is not None:
        (run / "last_checkpoint").write_text(content)
    assert read_last_checkpoint(run)[0].name == "model_0000029.pth"
    assert "last_checkpoint" in caplog.text


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    content = bytearray(path.read_bytes())
    content[content.index(torch.ones(2).numpy().tobytes())] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def without_trainer(path):
    torch.save({"model": {"weight": torch.ones(3)}}, path)


@pytest.mark.parametrize("damage", [cut, flip, empty, without_trainer])
def test_a_damaged_checkpoint_is_skipped(run, damage, caplog):
    damage(run / "model_0000019.pth")
    os.utime(run / "model_0000019.pth", (1e9, 1e9))
    assert read_last_checkpoint(run)[0].name == "model_0000029.pth"
    assert "skipped" in caplog.text and "model_0000019.pth" in caplog.text


def test_no_checkpoint_to_resume_from(run):
    assert read_last_checkpoint(run / "elsewhere") is None
    for path in run.glob("model_*.pth"):
        cut(path)
    with pytest.raises(ConfigError, match=str(run)):
        read_last_checkpoint(run)
    for path in run.glob("model_*.pth"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"model_0000019\.pth"):
        read_last_checkpoint(run)


def test_a_flipped_byte_is_found(tmp_path):
    path = save(tmp_path, "model_final.pth")
    read_checkpoint(path)
    flip(path)
    with pytest.raises(ConfigError, match=r"model_final\.pth"):
        read_checkpoint(path)


def test_the_newest_numbered_checkpoints_are_kept(run):
    """The newest are those by modification time: a run that started again counts from lower numbers."""
    for age, name in ((-5, "model_0000004.pth"), (9, "model_final.pth"), (-9, "model_best.pth")):
        save(run, name, age=age)
    remove_old(run, keep=2)
    kept = {"model_0000004.pth", "model_0000029.pth", "model_best.pth", "model_final.pth"}
    assert {path.name for path in run.glob("*.pth")} == kept
    (run / "last_checkpoint").unlink()
    assert read_last_checkpoint(run)[0].name == "model_0000029.pth"
    (run / ".model_0000039.pth.77.partial").write_bytes(b"half")
    remove_partial(run)
    remove_run(run)
    assert not list(run.iterdir())


def test_a_failed_write_keeps_the_file_before(tmp_path):
    path = save(tmp_path, "model_final.pth")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=str(path)), atomic_write(path) as partial:
        partial.write_bytes(b"half")
        raise OSError(28, "No space left on device")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model_final.pth"]
    long = tmp_path / f"{'a' * 240}.txt"
    with atomic_write(long) as partial:
        partial.write_text("whole")
    assert long.read_text() == "whole"


@pytest.mark.slow
def test_a_full_disk_keeps_the_file_before(tmp_path):
    """A limit on file sizes imitates a full disk."""
    resource = pytest.importorskip("resource")
    code = """
import sys, torch
from backbones import ConfigError
from backbones.checkpoint_files import write_checkpoint
try:
    write_checkpoint(sys.argv[1], {"model": {"weight": torch.ones(100_000)}})
except ConfigError as error:
    print(f"error: {error}")
"""
    path = save(tmp_path, "model_final.pth")
    before = path.read_bytes()
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert result.stdout.startswith(f"error: {path}"), result.stderr
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model_final.pth"]


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_slim_checkpoint_is_the_same_detector(trained_run, tmp_path, suffix):
    source, output = trained_run / "model_final.pth", tmp_path / f"slim.{suffix}"
    lines = slim_checkpoint(source, output)
    assert len(lines) == 1 and "finished, iteration, loss_normalizers, seed, trainer" in lines[0]
    before, after = read_checkpoint(source), read_checkpoint(output)
    assert after.keys() == {"model", METADATA_KEY} and after["model"].keys() == before["model"].keys()
    cfg = load_config(trained_run / "config.yaml", ["MODEL.RETINANET.SCORE_THRESH_TEST", "0.0"])
    for complete in (False, True):
        check_weights(cfg, str(output), complete=complete)
    image = torch.arange(3 * 70 * 101).remainder(251).view(3, 70, 101).float()
    with torch.no_grad():
        ours, theirs = (build_detector(cfg, path)([{"image": image}])[0]["instances"] for path in (output, source))
    assert len(ours) and torch.equal(ours.pred_boxes.tensor, theirs.pred_boxes.tensor)
    assert torch.equal(ours.scores, theirs.scores) and torch.equal(ours.pred_classes, theirs.pred_classes)
    assert "nothing" in slim_checkpoint(output, tmp_path / "again.pth")[0]


def test_slimming_a_file_of_detectron2(tmp_path):
    torch.save({"model": {"backbone.x": torch.zeros(3)}, "optimizer": {}}, tmp_path / "other.pth")
    lines = slim_checkpoint(tmp_path / "other.pth", tmp_path / "slim.pth")
    assert "optimizer" in lines[0] and "metadata" in lines[1]


@pytest.mark.parametrize(
    "contents, output",
    [
        (None, "slim.pth"),
        ({"state_dict": {"a": torch.zeros(3)}}, "slim.pth"),
        ({"model": {"a": torch.zeros(3), "b": 3}}, "slim.pth"),
        ({"model": {"a": torch.zeros(3)}}, "slim.onnx"),
        ({"model": {"a": torch.zeros(3)}}, "none/slim.pth"),
        ({"model": {"a": torch.zeros(3)}}, "model.pth"),
        ({"model": {"a": torch.zeros(3)}}, "link.pth"),
    ],
)
def test_files_that_cannot_be_slimmed(tmp_path, contents, output):
    source = tmp_path / "model.pth"
    (tmp_path / "link.pth").symlink_to(source)
    if contents is not None:
        torch.save(contents, source)
    before = source.read_bytes() if contents else None
    with pytest.raises(ConfigError, match=output if output != "slim.pth" else "model.pth"):
        slim_checkpoint(source, tmp_path / output)
    assert before is None or source.read_bytes() == before


def test_module_versions_stay_with_the_state_dict(tmp_path):
    state = torch.nn.Sequential(torch.nn.BatchNorm2d(3)).state_dict()
    for suffix in ("pth", "safetensors"):
        write_checkpoint(tmp_path / f"a.{suffix}", {"model": state})
        loaded = read_checkpoint(tmp_path / f"a.{suffix}")["model"]
        assert loaded._metadata["0"]["version"] == state._metadata["0"]["version"] != 1
