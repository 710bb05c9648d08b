"""Checkpoint files: round trips, files of other projects, damaged and malicious files, atomic writes."""

import argparse

import pytest
import torch
from safetensors.torch import save_file
from yacs.config import CfgNode

from backbones import ConfigError
from backbones.checkpoint_files import SUFFIXES, check_writable, read_checkpoint, write_checkpoint
from backbones.files import atomic_write

suffixes = pytest.mark.parametrize("suffix", SUFFIXES)


def contents() -> dict:
    joined = torch.randn(6, 4)
    model = {"a.weight": joined[:2], "a.shared": joined, "transposed": torch.randn(3, 5).T}
    model |= {"half": torch.randn(3).half(), "count": torch.tensor(7), "parameter": torch.nn.Parameter(torch.randn(2))}
    return {"model": model, "vil_detectron2": {"variant": "lit_s", "classes": ["é", "b"]}, "iteration": 3}


def assert_unreadable(path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@suffixes
def test_round_trip(tmp_path, suffix):
    written, path = contents(), tmp_path / f"checkpoint{suffix}"
    path.write_text("old")
    (tmp_path / "other").touch()
    write_checkpoint(path, written)
    read = read_checkpoint(str(path))
    assert read.keys() == written.keys() and read["model"].keys() == written["model"].keys()
    for name, tensor in written["model"].items():
        assert torch.equal(read["model"][name], tensor) and read["model"][name].dtype == tensor.dtype, name
    assert read["vil_detectron2"] == written["vil_detectron2"] and read["iteration"] == 3
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, "other"]
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("key", ["model", "net", "state_dict", None])
def test_checkpoints_of_other_projects(tmp_path, key):
    """The state dict is under any known key, or bare. Training settings are read as data."""
    state_dict = {"weight": torch.ones(1)}
    for settings in (CfgNode({"A": {"B": (1, 2)}}), argparse.Namespace(lr=0.1, name="x")):
        torch.save({key: state_dict, "config": settings, "epoch": 3} if key else state_dict, tmp_path / "a.pth")
        read = read_checkpoint(tmp_path / "a.pth")
        assert read[key or "model"] == state_dict and read.get("epoch") == (3 if key else None)
    save_file(state_dict, tmp_path / "a.safetensors", metadata={"sha256": "of something else"})
    assert read_checkpoint(tmp_path / "a.safetensors") == {"model": state_dict}


class Malicious:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_code_is_not_run(tmp_path):
    torch.save({"model": {"a": torch.ones(1)}, "x": Malicious(tmp_path / "executed")}, tmp_path / "a.pth")
    with pytest.raises(ConfigError, match="io.open"):
        read_checkpoint(tmp_path / "a.pth")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".pkl"])
def test_files_that_are_not_checkpoints(tmp_path, suffix):
    path = tmp_path / f"checkpoint{suffix}"
    assert_unreadable(path)
    for content in (b"", b"some text\n", b"\x80\x02", b"\x80\x04garbage", b"PK\x03\x04" + b"0" * 40):
        path.write_bytes(content)
        assert_unreadable(path)
    for content in ([1], {"model": 3}, {"model": {}}, {"net": {"a": 1}}, {}, {3: torch.ones(1)}):
        torch.save(content, path)
        assert_unreadable(path)


@suffixes
def test_damaged_files(tmp_path, suffix):
    written, path = contents(), tmp_path / f"a{suffix}"
    write_checkpoint(path, written)
    whole = path.read_bytes()
    for share in (0.1, 0.5, 0.99):
        path.write_bytes(whole[: int(share * len(whole))])
        assert_unreadable(path)
    for name in ("a.weight", "a.shared", "transposed"):
        flipped = bytearray(whole)
        flipped[whole.index(written["model"][name].contiguous().numpy().tobytes())] ^= 1
        path.write_bytes(flipped)
        assert_unreadable(path)


@pytest.mark.parametrize("name", ["a.txt", "absent/a.pth", "folder.pth", "file/a.pth"])
def test_paths_that_cannot_be_written(tmp_path, name):
    (tmp_path / "folder.pth").mkdir()
    (tmp_path / "file").touch()
    for attempt in (check_writable, lambda path: write_checkpoint(path, contents())):
        with pytest.raises(ConfigError, match=name):
            attempt(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.pth"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("x"), KeyboardInterrupt()])
def test_failed_write_keeps_the_old_file(tmp_path, error):
    path = tmp_path / f"{'a' * 240}.txt"
    path.write_text("old")
    with pytest.raises(ConfigError if isinstance(error, OSError) else type(error)), atomic_write(path) as partial:
        partial.write_text("half")
        raise error
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    with atomic_write(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "new" and len(list(tmp_path.iterdir())) == 1
