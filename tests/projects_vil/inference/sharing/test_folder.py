"""The folder of a shared detector: what is written, and what is never written over."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from backbones import InputError
from projects_vil import Detector

PROOFS = ("evaluation.json", "evaluation.model.json", "model.ts.report.json")
FILES = {"README.md", "config.yaml", "detector.json", "model.safetensors", *PROOFS}


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
    assert {path.name for path in own.iterdir()} - {"notes.txt", ".git"} == FILES - set(PROOFS)


def test_the_licence_of_an_earlier_save_is_kept(detector, own, caplog):
    detector.save_pretrained(own)
    assert "license:" not in (own / "README.md").read_text()
    detector.save_pretrained(own, license="cc-by-4.0")
    detector.save_pretrained(own)
    assert f"the licence of the earlier save in {own} is kept: cc-by-4.0" in caplog.text
    card = (own / "README.md").read_text()
    assert "license: cc-by-4.0\n" in card and "Of the weights: `cc-by-4.0`." in card
    detector.save_pretrained(own, license="mit")
    assert "license: mit\n" in (own / "README.md").read_text()


def test_the_text_of_a_licence_that_is_on_no_list(detector, own, caplog):
    detector.save_pretrained(own, license="other")
    assert "the card says license: other: its text belongs beside it, in a file LICENSE" in caplog.text
    caplog.clear()
    (own / "LICENSE").write_text("mine")
    detector.save_pretrained(own, license="other")
    assert "in a file LICENSE" not in caplog.text


@pytest.mark.parametrize("front_matter", ["a: [", "1: x", "license: [mit, apache-2.0]", "license: my-own"])
def test_a_licence_of_a_card_that_was_changed_is_not_read(detector, own, front_matter):
    detector.save_pretrained(own, license="mit")
    (own / "README.md").write_text(f"---\n{front_matter}\n---\nmine\n")
    with pytest.raises(InputError, match="README.md was changed since it was saved"):
        detector.save_pretrained(own)


def test_a_licence_that_is_none_changes_nothing(detector, own):
    before = contents(own)
    with pytest.raises(InputError, match="^license is 'my-own-licence'"):
        detector.save_pretrained(own, license="my-own-licence")
    assert contents(own) == before


@pytest.mark.parametrize("name", ["README.md", "config.yaml", "model.safetensors"])
def test_files_of_others_are_not_written_over(name, detector, tmp_path):
    (tmp_path / name).write_text("mine")
    refused(detector, tmp_path, f"{name} is there, and no earlier save wrote it")


@pytest.mark.parametrize("name", ["README.md", "config.yaml", "evaluation.json"])
def test_files_that_were_changed_are_not_written_over(name, detector, own):
    with (own / name).open("a") as file:
        file.write("\nmine\n")
    refused(detector, own, f"{name} was changed since it was saved")


class Killed(BaseException):
    """What no code handles."""


@pytest.fixture
def at_rename(monkeypatch):
    """Have something happen in place of, or before, the Nth rename into a folder."""

    def arrange(folder: Path, number: int, happens) -> None:
        real, count = os.replace, iter(range(1, 100))

        def replace(old, new):
            if Path(new).parent == folder and next(count) == number:
                happens()
            real(old, new)

        monkeypatch.setattr(os, "replace", replace)

    yield arrange


def kill():
    raise Killed


@pytest.fixture
def other(own_run):
    """A detector of other weights and settings than what was saved."""
    detector = Detector.load(own_run, overrides=["INPUT.MIN_SIZE_TEST", 96])
    with torch.no_grad():
        next(detector.runner.detector.parameters()).mul_(2)
    return detector


class Interrupted(Exception):
    """What Ctrl-C raises here, whoever else handles that in this process."""


def test_a_signal_waits_for_files_that_are_replaced(other, own, at_rename, monkeypatch):
    def interrupt(number, frame) -> None:
        raise Interrupted

    at_rename(own, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    # The handler is put back with all others.
    signal.signal(signal.SIGINT, interrupt)
    with pytest.raises(Interrupted):
        other.save_pretrained(own)
    saved = Detector.from_pretrained(own)
    assert saved.runner.cfg.INPUT.MIN_SIZE_TEST == 96
    pairs = zip(saved.runner.detector.parameters(), other.runner.detector.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert {path.name for path in own.iterdir()} == FILES - set(PROOFS)


@pytest.mark.parametrize("number", [3, 5])
def test_a_save_that_was_killed_is_named_and_can_be_done_again(number, detector, other, own, at_rename, monkeypatch):
    for one in (other, detector):
        at_rename(own, number, kill)
        with pytest.raises(Killed):
            one.save_pretrained(own)
        monkeypatch.undo()
        for load in (Detector.from_pretrained, Detector.load):
            with pytest.raises(InputError, match="was not saved to its end, .*: save into it again"):
                load(own)
    other.save_pretrained(own)
    assert Detector.from_pretrained(own).runner.cfg.INPUT.MIN_SIZE_TEST == 96
    assert {path.name for path in own.iterdir()} == FILES - set(PROOFS)
    (own / "README.md").write_text("mine")
    refused(detector, own, "README.md was changed since it was saved")


@pytest.mark.parametrize("number", [2, 5])
def test_a_first_save_that_was_killed_can_be_done_again(number, detector, tmp_path, at_rename, monkeypatch):
    at_rename(tmp_path / "new", number, kill)
    with pytest.raises(Killed):
        detector.save_pretrained(tmp_path / "new")
    monkeypatch.undo()
    detector.save_pretrained(tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == FILES


def test_a_run_is_not_written_over(detector, own_run):
    shutil.rmtree(own_run / "export")
    refused(detector, own_run, "config.yaml is there, and no earlier save wrote it")


MANIFESTS = ["", "[]", '{"files": 1}', '{"files": {"../mine": "0"}}', '{"files": {"..": "0"}}']
MANIFESTS += [f'{{"files": {{}}, "replaced": {text}}}' for text in ("1", '{"a": 1}', '{"../mine": ["0"]}')]


@pytest.mark.parametrize("text", MANIFESTS)
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
