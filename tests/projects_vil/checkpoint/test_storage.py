"""Which checkpoint a run resumes from, whatever has become of the others."""

import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backbones import InputError
from backbones.utils.files import read_checkpoint, written_whole
from projects_vil.checkpoint import find_checkpoint, remove_old, remove_partial, remove_run
from projects_vil.checkpoint.storage import tag_checkpoint
from tests.projects_vil.helpers import ROOT


def save(folder: Path, name: str, *, age: int = 0, value: float = 1.0) -> Path:
    path = folder / name
    torch.save({"model": {"weight": torch.full((64,), value)}, "trainer": {"iteration": 3}}, path)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


@pytest.fixture
def run(tmp_path):
    """Three checkpoints, of which ``last_checkpoint`` names the second, by time."""
    for age, name in enumerate(("model_0000029.pth", "model_0000019.pth", "model_0000009.pth")):
        save(tmp_path, name, age=age)
    tag_checkpoint(tmp_path, "model_0000019.pth")
    return tmp_path


def test_what_last_checkpoint_names_comes_first(run):
    assert find_checkpoint(run).name == "model_0000019.pth"


@pytest.mark.parametrize("content", [None, "", "model_0000099.pth", "../elsewhere.pth", "x" * 300])
def test_without_a_good_last_checkpoint_the_newest_is_taken_and_said(run, content, caplog):
    (run / "last_checkpoint").unlink()
    if content is not None:
        (run / "last_checkpoint").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(run).name == "model_0000029.pth"
    assert "last_checkpoint" in caplog.text


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    content = bytearray(path.read_bytes())
    place = content.index(torch.ones(2).numpy().tobytes())
    content[place] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def forget_the_run(path):
    torch.save({"model": {"weight": torch.ones(3)}}, path)


@pytest.mark.parametrize("harm", [cut, flip, empty, forget_the_run])
def test_a_damaged_one_is_passed_over_by_name(run, harm, caplog):
    harm(run / "model_0000019.pth")
    os.utime(run / "model_0000019.pth", (1e9, 1e9))
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(run).name == "model_0000029.pth"
    assert "passed over" in caplog.text and "model_0000019.pth" in caplog.text


def test_none_that_is_whole_is_an_error_and_none_at_all_is_none(run):
    assert find_checkpoint(run / "elsewhere") is None
    for path in run.glob("model_*.pth"):
        cut(path)
    with pytest.raises(InputError, match="none of the 3 checkpoints .* can be resumed"):
        find_checkpoint(run)


def test_a_flipped_byte_is_named_wherever_weights_are_read(tmp_path):
    path = save(tmp_path, "model_final.pth")
    read_checkpoint(path)
    flip(path)
    with pytest.raises(InputError, match="model_final.pth is damaged .the checksum of .*data/0"):
        read_checkpoint(path)


def test_old_ones_are_removed_and_the_final_stays(run):
    save(run, "model_final.pth")
    remove_old(run, keep=1)
    assert sorted(path.name for path in run.glob("*.pth")) == ["model_0000029.pth", "model_final.pth"]


def test_the_newest_stay_whatever_their_numbers(run):
    """A run that was begun anew, or went back, counts from lower numbers."""
    save(run, "model_0000004.pth", age=-5)
    save(run, "model_best.pth", age=-9)
    remove_old(run, keep=2)
    assert {path.name for path in run.glob("*.pth")} == {"model_0000004.pth", "model_0000029.pth", "model_best.pth"}
    (run / "last_checkpoint").unlink()
    # A copy of a folder may have any times.
    assert find_checkpoint(run).name == "model_0000029.pth"
    remove_run(run)
    assert not list(run.iterdir())


def test_what_a_killed_process_left_is_removed(run):
    (run / ".model_0000039.pth.77.partial").write_bytes(b"half")
    remove_partial(run)
    assert not list(run.glob(".*"))


def test_a_checkpoint_that_is_named_and_gone_is_no_new_start(tmp_path):
    tag_checkpoint(tmp_path, "model_0000009.pth")
    with pytest.raises(InputError, match="names model_0000009.pth, and .* has no checkpoint: remove"):
        find_checkpoint(tmp_path)


def test_a_long_name_and_a_folder_that_is_a_file(tmp_path):
    path = tmp_path / f"{'a' * 240}.txt"
    with written_whole(path) as partial:
        partial.write_text("whole")
    assert path.read_text() == "whole"
    with pytest.raises(InputError, match="cannot be written: Not a directory"), written_whole(path / "x") as partial:
        partial.write_text("")


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path):
    path = save(tmp_path, "model_final.pth")
    before = path.read_bytes()
    with pytest.raises(InputError, match="cannot be written"), written_whole(path) as partial:
        partial.write_bytes(b"half")
        raise OSError(28, "No space left on device")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model_final.pth"]


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_no_torso(tmp_path):
    """A limit on the size of files is what a test can have of a full disk without a disk of its own."""
    code = """
import sys, torch
from backbones import InputError
from backbones.utils.files import write_checkpoint
try:
    write_checkpoint(sys.argv[1], {"model": {"weight": torch.ones(100_000)}})
except InputError as error:
    print(f"error: {error}")
"""
    path = save(tmp_path, "model_final.pth")
    before = path.read_bytes()
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert result.stdout.startswith(f"error: {path} cannot be written: "), result.stderr
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model_final.pth"]
