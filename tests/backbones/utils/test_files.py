"""Checkpoint files: what was written is read again; what is no checkpoint is one line, and runs nothing."""

import argparse
import pickle

import pytest
import torch
from safetensors.torch import save_file
from yacs.config import CfgNode

from backbones import InputError
from backbones.utils.files import SUFFIXES, check_writable, read_checkpoint, state_dict_of, write_checkpoint

suffixes = pytest.mark.parametrize("suffix", SUFFIXES)


def contents() -> dict:
    joined = torch.randn(6, 4)
    model = {
        "a.weight": joined[:2],
        "a.shared": joined,
        "transposed": torch.randn(3, 5).T,
        "half": torch.randn(3).half(),
        "count": torch.tensor(7),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    return {
        "model": model,
        "vil_detectron2": {"variant": "lit_s", "classes": ["é", "b"]},
        "iteration": 3,
    }


def mistake(path) -> str:
    with pytest.raises(InputError) as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


@suffixes
def test_round_trip(tmp_path, suffix):
    written, path = contents(), tmp_path / f"checkpoint{suffix}"
    write_checkpoint(path, written)
    read = read_checkpoint(str(path))
    assert read.keys() == written.keys() and read["model"].keys() == written["model"].keys()
    for name, tensor in written["model"].items():
        assert torch.equal(read["model"][name], tensor) and read["model"][name].dtype == tensor.dtype, name
    assert read["vil_detectron2"] == written["vil_detectron2"] and read["iteration"] == 3
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@suffixes
def test_a_part_of_a_tensor_does_not_bring_the_whole(tmp_path, suffix):
    path = tmp_path / f"checkpoint{suffix}"
    write_checkpoint(path, {"model": {"part": torch.zeros(100_000)[:2]}})
    assert path.stat().st_size < 10_000


@suffixes
def test_versions_of_modules_stay(tmp_path, suffix):
    """Which torch gives to each module that is loaded; 1, which none differs from, is not kept."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    path = tmp_path / f"file{suffix}"
    write_checkpoint(path, {"model": model.state_dict(), "iteration": 3})
    read = read_checkpoint(path)
    assert read.keys() == {"model", "iteration"} and read["model"]._metadata == {"1": {"version": 2}}
    write_checkpoint(path, {"model": dict(model.state_dict())})
    assert read_checkpoint(path)["model"]._metadata == {}


@suffixes
@pytest.mark.parametrize("versions", [None, {"": None}])
def test_a_state_dict_that_tells_no_versions(tmp_path, suffix, versions):
    state_dict = torch.nn.Linear(2, 2).state_dict()
    state_dict._metadata = versions
    write_checkpoint(tmp_path / f"file{suffix}", {"model": state_dict})
    assert read_checkpoint(tmp_path / f"file{suffix}")["model"].keys() == state_dict.keys()


@pytest.mark.parametrize("versions", ["3", "[1]", "null", '{"0": "x"}'])
def test_versions_that_are_none(tmp_path, versions):
    path = tmp_path / "a.safetensors"
    said = f'{{"module_versions": {versions}}}'
    save_file({"weight": torch.ones(2)}, path, metadata={"vil-detectron2": said})
    with pytest.raises(InputError, match="module_versions in its header are no whole numbers"):
        read_checkpoint(path)


def test_an_older_file_is_replaced(tmp_path):
    path = tmp_path / "checkpoint.pth"
    path.write_text("old")
    write_checkpoint(path, contents())
    assert "model" in read_checkpoint(path)


@pytest.mark.parametrize("key", ["model", "net", "state_dict"])
def test_the_state_dict_is_found(tmp_path, key):
    torch.save({key: {"weight": torch.ones(1)}, "epoch": 3}, tmp_path / "a.pth")
    read = read_checkpoint(tmp_path / "a.pth")
    assert read["epoch"] == 3 and state_dict_of(read) == {"weight": torch.ones(1)}


def test_a_bare_state_dict_comes_below_model(tmp_path):
    torch.save({"weight": torch.ones(1)}, tmp_path / "a.pth")
    assert read_checkpoint(tmp_path / "a.pth") == {"model": {"weight": torch.ones(1)}}


@pytest.mark.parametrize("settings", [CfgNode({"A": {"B": (1, 2)}}), argparse.Namespace(lr=0.1, name="x")])
def test_settings_of_a_training_run_are_data(tmp_path, settings):
    torch.save({"model": {"weight": torch.ones(1)}, "config": settings}, tmp_path / "a.pth")
    assert torch.equal(read_checkpoint(tmp_path / "a.pth")["model"]["weight"], torch.ones(1))
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "a.pth", weights_only=True)


# -- what cannot be read ---------------------------------------------------------------------------


class Malicious:
    """Writes a file where it is unpickled."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_code_is_refused_and_named(tmp_path):
    torch.save({"model": {"a": torch.ones(1)}, "x": Malicious(tmp_path / "executed")}, tmp_path / "a.pth")
    assert "io.open, which would run code" in mistake(tmp_path / "a.pth")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".pkl", ""])
@pytest.mark.parametrize("content", [b"", b"some text\n", b"\x80\x02", b"\x80\x04garbage", b"PK\x03\x04" + b"0" * 40])
def test_no_checkpoint_at_all(tmp_path, suffix, content):
    path = tmp_path / f"checkpoint{suffix}"
    path.write_bytes(content)
    assert "weights_only" not in mistake(path)


@suffixes
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_a_truncated_file(tmp_path, suffix, kept):
    path = tmp_path / f"checkpoint{suffix}"
    write_checkpoint(path, contents())
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    mistake(path)


@suffixes
@pytest.mark.parametrize("name", ["a.weight", "a.shared", "transposed"])
def test_a_flipped_bit_is_found(tmp_path, suffix, name):
    written, path = contents(), tmp_path / f"a{suffix}"
    write_checkpoint(path, written)
    content = bytearray(path.read_bytes())
    place = content.find(written["model"][name].contiguous().numpy().tobytes())
    assert place >= 0
    content[place] ^= 1
    path.write_bytes(content)
    assert "is damaged (" in mistake(path)


@suffixes
def test_a_file_can_be_read_by_whom_others_can(suffix, tmp_path):
    (tmp_path / "other").touch()
    path = tmp_path / f"a{suffix}"
    write_checkpoint(path, {"model": {"w": torch.zeros(3)}})
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_safetensors_of_others_and_older_ones_have_no_digest(tmp_path):
    path = tmp_path / "a.safetensors"
    for metadata in (None, {"format": "pt"}, {"vil-detectron2": '{"iteration": 3}'}, {"sha256": "of something else"}):
        save_file({"weight": torch.ones(2)}, path, metadata=metadata)
        assert torch.equal(read_checkpoint(path)["model"]["weight"], torch.ones(2))


@suffixes
def test_a_folder_and_nothing(tmp_path, suffix):
    (tmp_path / f"folder{suffix}").mkdir()
    assert "is a folder" in mistake(tmp_path / f"folder{suffix}")
    assert "there is no file" in mistake(tmp_path / f"absent{suffix}")


@pytest.mark.parametrize("content", [[1], {"model": 3}, {"model": {}}, {"net": {"a": 1}}, {}, {"epoch": 3}])
def test_no_state_dict(tmp_path, content):
    torch.save(content, tmp_path / "a.pth")
    assert "state dict" in mistake(tmp_path / "a.pth")


# -- what cannot be written ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "a", "a.pth.zip", "absent/a.pth", "folder.pth", "file/a.pth"])
def test_a_place_that_cannot_be_written_to(tmp_path, name):
    (tmp_path / "folder.pth").mkdir()
    (tmp_path / "file").touch()
    for attempt in (check_writable, lambda path: write_checkpoint(path, contents())):
        with pytest.raises(InputError) as caught:
            attempt(tmp_path / name)
        assert "\n" not in str(caught.value) and name in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.pth"]


@pytest.mark.parametrize("path", ["/proc/a.pth", "/proc/a.safetensors"])
def test_a_system_that_refuses(path):
    with pytest.raises(InputError, match="cannot be written"):
        write_checkpoint(path, contents())


def test_nothing_half_written_stays(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_text("old")
    with pytest.raises(InputError, match="cannot be written"):
        write_checkpoint(path, contents() | {"no_json": object()})
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
