"""The checkpoint to resume from, the weights of a run, removal of old ones, and checkpoints without training state."""

import os

import pytest
import torch

from backbones import ConfigError
from backbones.checkpoint_files import read_checkpoint
from examples.slim_checkpoint import slim_checkpoint
from projects_vil import load_config
from projects_vil.checkpoint import METADATA_KEY, check_weights, load_detector, weights_of
from projects_vil.checkpoint.checkpointer import read_last_checkpoint, remove_old, remove_run
from tests.projects_vil.helpers import message
from tests.selection import slow_except


def save(path, *, age: int = 0) -> None:
    torch.save({"model": {"weight": torch.ones(64)}, "trainer": {"iteration": 3}}, path)
    os.utime(path, (1e9 - age, 1e9 - age))


@pytest.fixture
def run(tmp_path):
    """Return a folder with three checkpoints. ``last_checkpoint`` names the second newest."""
    for age, iteration in enumerate((29, 19, 9)):
        save(tmp_path / f"model_{iteration:07d}.pth", age=age)
    (tmp_path / "last_checkpoint").write_text("model_0000019.pth")
    return tmp_path


@pytest.mark.parametrize("tag", ["model_0000019.pth", None, "", "model_0000099.pth", "../elsewhere.pth", "x" * 300])
def test_the_last_checkpoint(run, tag, caplog):
    """The file in ``last_checkpoint``, or else the file with the most iterations, as in a copied folder."""
    (run / "last_checkpoint").unlink()
    if tag is not None:
        (run / "last_checkpoint").write_text(tag)
    expected = "model_0000019.pth" if tag == "model_0000019.pth" else "model_0000029.pth"
    os.utime(run / "model_0000009.pth", (2e9, 2e9))
    path, contents = read_last_checkpoint(run)
    assert path.name == weights_of(run).name == expected and contents["trainer"] == {"iteration": 3}
    (run / "model_best.pth").touch()
    assert weights_of(run) == run / "model_best.pth"
    # The best checkpoint needs no last one.
    assert caplog.text.count("names no checkpoint") == 2 * (expected == "model_0000029.pth")


@pytest.mark.parametrize("training_state", [None, {}, {"trainer": {}}])
def test_a_checkpoint_that_cannot_be_resumed_from_is_skipped(run, training_state, caplog):
    path = run / "model_0000019.pth"
    if training_state is None:
        path.write_bytes(path.read_bytes()[:-100])
    else:
        torch.save({"model": {"weight": torch.ones(3)}} | training_state, path)
    os.utime(path, (1e9, 1e9))
    assert read_last_checkpoint(run)[0].name == "model_0000029.pth" and path.name in caplog.text


def test_no_checkpoint_to_resume_from(run, caplog):
    assert read_last_checkpoint(run / "elsewhere") is None and weights_of(run / "elsewhere") is None
    for path in run.glob("model_*.pth"):
        path.write_bytes(path.read_bytes()[:-100])
    assert str(run) in message(read_last_checkpoint, run) and "or use model_0000009.pth, " in caplog.text
    for path in run.glob("model_*.pth"):
        path.unlink()
    assert "last_checkpoint" in message(read_last_checkpoint, run)


def test_removing_checkpoints(run):
    """The newest files have the latest modification time, because a restarted run has lower numbers."""
    for age, name in ((-5, "model_0000004.pth"), (9, "model_final.pth"), (-9, "model_best.pth")):
        save(run / name, age=age)
    remove_old(run, keep=2)
    kept = {"model_0000004.pth", "model_0000029.pth", "model_best.pth", "model_final.pth"}
    assert {path.name for path in run.glob("*.pth")} == kept
    remove_run(run)
    assert not list(run.iterdir())


@pytest.mark.parametrize("suffix", slow_except(["pth", "safetensors"], ["safetensors"]))
def test_a_slim_checkpoint_is_the_same_detector(trained_run, tmp_path, suffix):
    source, output = trained_run / "model_final.pth", tmp_path / f"slim.{suffix}"
    slim_checkpoint(source, output)
    before, after = read_checkpoint(source), read_checkpoint(output)
    assert after.keys() == {"model", METADATA_KEY} and after["model"].keys() == before["model"].keys()
    cfg = load_config(trained_run / "config.yaml")
    for complete in (False, True):
        check_weights(cfg, str(output), complete=complete)
    ours, theirs = (load_detector(cfg, path)[0].state_dict() for path in (output, source))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    "contents, output",
    [({"model": {"a": torch.zeros(3), "b": 3}}, "slim.pth"), ({"model": {"a": torch.zeros(3)}}, "link.pth")],
)
def test_files_that_cannot_be_slimmed(tmp_path, contents, output):
    source = tmp_path / "model.pth"
    (tmp_path / "link.pth").symlink_to(source)
    torch.save(contents, source)
    before = source.read_bytes()
    with pytest.raises(ConfigError, match="model.pth" if output == "slim.pth" else output):
        slim_checkpoint(source, tmp_path / output)
    assert source.read_bytes() == before and not (tmp_path / "slim.pth").exists()
