"""The folder of a shared detector: what is written, and what is never written over."""

import json
import shutil
from pathlib import Path

import pytest

from backbones import InputError
from projects_vil import Detector

FILES = {
    *("README.md", "config.yaml", "detector.json", "evaluation.json", "evaluation.model.json"),
    *("model.safetensors", "model.ts.report.json"),
}


@pytest.fixture
def own(saved, tmp_path):
    """A copy of what was saved, to be spoiled."""
    return Path(shutil.copytree(saved, tmp_path / "saved"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(detector: Detector, folder: Path, match: str) -> None:
    """Saving raises one line, and nothing in the folder is another."""
    before = contents(folder) if folder.is_dir() else folder.read_bytes()
    with pytest.raises(InputError, match=match) as error:
        detector.save_pretrained(folder)
    assert "\n" not in str(error.value)
    assert (contents(folder) if folder.is_dir() else folder.read_bytes()) == before


def test_the_files(saved, run):
    assert {path.name for path in saved.iterdir()} == FILES
    for path in saved.iterdir():
        for private in (b"secret", b"/home", str(run).encode(), str(run.parent).encode()):
            assert private not in path.read_bytes(), path


def test_an_earlier_save_is_replaced_and_other_files_stay(detector, own, tmp_path):
    (own / "notes.txt").write_text("mine")
    (own / ".git").mkdir()
    detector.save_pretrained(own, license="mit")
    assert {path.name for path in own.iterdir()} == FILES | {"notes.txt", ".git"}
    assert "license: mit" in (own / "README.md").read_text() and (own / "notes.txt").read_text() == "mine"
    # Figures of the earlier weights do not stay beside others.
    other = Detector.load(own, score_threshold=0.25)
    other.save_pretrained(own)
    assert {path.name for path in own.iterdir()} - {"notes.txt", ".git"} == FILES - {
        *("evaluation.json", "evaluation.model.json", "model.ts.report.json"),
    }


@pytest.mark.parametrize("name", ["README.md", "config.yaml", "model.safetensors"])
def test_files_of_others_are_not_written_over(name, detector, tmp_path):
    (tmp_path / name).write_text("mine")
    refused(detector, tmp_path, f"{name} is there, and no earlier save wrote it")


@pytest.mark.parametrize("name", ["README.md", "config.yaml", "evaluation.json"])
def test_files_that_were_changed_are_not_written_over(name, detector, own):
    with (own / name).open("a") as file:
        file.write("\nmine\n")
    refused(detector, own, f"{name} was changed since it was saved")


def test_a_run_is_not_written_over(detector, own_run):
    shutil.rmtree(own_run / "export")
    refused(detector, own_run, "config.yaml is there, and no earlier save wrote it")


@pytest.mark.parametrize("text", ["", "[]", '{"files": 1}', '{"files": {"../mine": "0"}}', '{"files": {"..": "0"}}'])
def test_a_manifest_of_others(text, detector, tmp_path):
    (tmp_path / "detector.json").write_text(text)
    refused(detector, tmp_path, "detector.json is not of an earlier save")


def test_a_file_for_a_folder(detector, tmp_path):
    (tmp_path / "file").write_text("mine")
    refused(detector, tmp_path / "file", "is a file: name a folder")
    with pytest.raises(InputError, match="cannot write into .*Not a directory"):
        detector.save_pretrained(tmp_path / "file/below")


def test_the_manifest_has_the_sums(saved):
    manifest = json.loads((saved / "detector.json").read_text())
    assert set(manifest["files"]) == FILES - {"detector.json"} and manifest["format"] == 1
