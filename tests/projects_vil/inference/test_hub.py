"""Save and load detectors, model cards, and requests to a mock of the Hub."""

import os
import types
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import filter_repo_objects

from backbones import ConfigError
from backbones.checkpoint_files import read_checkpoint
from projects_vil import Detector
from projects_vil.checkpoint import METADATA_KEY
from projects_vil.evaluation import write_results
from projects_vil.inference import hub
from tests.projects_vil.helpers import assert_same_detections, contents_of, message
from tests.projects_vil.inference.helpers import HalfRunner, picture, save_run
from tests.selection import slow_except
from vil.choices import SCORE_THRESHOLD

CLASSES = hub.Categories((3, 7, 9), ("round | flat", "square", "triangle"))
EVALUATION = {"bbox": {"AP": 12.345, "AP50": 20.0, "APl": float("nan"), "AP-square": 1.0}}
FILES = {"README.md", "config.yaml", "model.safetensors"}
PRIVATE = (
    *("DATASETS.COCO", '[["mine", "/home/me/secret/a.json", "/home/me/secret/photos"]]'),
    *("DATASETS.TRAIN", '("mine", "/home/me/secret/a.json for /home/me/secret/photos")'),
    *("DATASETS.TEST", '("mine", "secret/photos")', "LOGGING.WANDB_PROJECT", "secret"),
    *("MODEL.WEIGHTS", "/home/me/secret/pretrained.pth", "LOGGING.MLFLOW_EXPERIMENT", "secret"),
)


def make_run(folder: Path, name: str = "retinanet") -> Path:
    """Create the folder of an untrained run: config, weights and evaluation."""
    cfg, _ = save_run(folder, name, *PRIVATE, "INPUT.MIN_SIZE_TEST", "80")
    write_results(cfg, {"mine": EVALUATION, "secret/photos": EVALUATION})
    return folder


@pytest.fixture(scope="session")
def run(made_once):
    return made_once("run_for_the_hub", make_run)


@pytest.fixture(scope="session")
def detector(run):
    return Detector(Detector.load(run, device="cpu").runner, categories=CLASSES)


@pytest.fixture(scope="session")
def saved(detector, made_once):
    """A read-only folder written by ``save_pretrained``."""
    return made_once("saved_for_the_hub", detector.save_pretrained)


# Folders


@pytest.mark.parametrize("name", slow_except(["retinanet", "mask_rcnn"], ["retinanet"]))
def test_round_trip(name, detector, saved, tmp_path):
    before, folder = detector, saved
    if name == "mask_rcnn":
        before, folder = Detector(Detector.load(make_run(tmp_path / "run", name)).runner, categories=CLASSES), tmp_path
        before.save_pretrained(folder)
    expected = before(picture(70, 110))
    assert len(expected)
    theirs = before.runner.detector.state_dict()
    for after in (
        Detector.from_pretrained(str(folder)),
        Detector.load(folder / "config.yaml"),
        Detector.load(folder / "model.safetensors"),
    ):
        ours = after.runner.detector.state_dict()
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in theirs)
        assert after.categories == CLASSES
        found = after(picture(70, 110))
        assert_same_detections(found.instances, expected.instances)


def test_the_files_contain_no_path_of_this_machine(saved, run):
    assert {path.name for path in saved.iterdir()} == FILES
    for path in saved.iterdir():
        for private in (b"secret", b"/home", str(run).encode(), str(run.parent).encode()):
            assert private not in path.read_bytes(), path
    metadata = read_checkpoint(saved / "model.safetensors")[METADATA_KEY]
    assert (tuple(metadata["classes"]), tuple(metadata["category_ids"])) == (CLASSES.names, CLASSES.ids)


def test_a_second_save_with_other_options(detector, tmp_path):
    """The files are replaced, except for an edited card and other files."""
    for name in ("notes.txt", "README.md"):
        (tmp_path / name).write_text("mine")
    detector.save_pretrained(tmp_path)
    loaded = Detector.load(tmp_path, score_threshold=0.25, tta=True, overrides=["INPUT.MIN_SIZE_TEST", 96])
    loaded.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"notes.txt"}
    assert (tmp_path / "README.md").read_text() == "mine"
    again = Detector.from_pretrained(tmp_path)
    assert again.runner.cfg.MODEL.RETINANET.SCORE_THRESH_TEST == 0.25 and again.runner.cfg.INPUT.MIN_SIZE_TEST == 96
    assert again.runner.tta is False and again.draw_threshold == SCORE_THRESHOLD
    assert Detector.from_pretrained(tmp_path, tta=True, score_threshold=0.2, device="cpu").draw_threshold == 0.2


def test_folders_that_are_not_written(detector, run):
    before = contents_of(run)
    assert str(run) in message(detector.save_pretrained, run) and contents_of(run) == before
    for call in (Detector(HalfRunner()).save_pretrained, Detector(HalfRunner()).push_to_hub):
        assert "exported" in message(call, "folder")
    assert not os.path.exists("folder")


# Cards


def test_the_model_card(detector, saved, tmp_path):
    detector.save_pretrained(tmp_path, license="cc-by-4.0", repo_id="me/shapes")
    card = ModelCard.load(tmp_path / "README.md")
    data = card.data.to_dict()
    assert (data["license"], data["pipeline_tag"]) == ("cc-by-4.0", "object-detection")
    parts = ["# RetinaNet, vil_tiny", "| 3 | round \\| flat |\n| 7 | square |\n| 9 | triangle |\n", "`cc-by-4.0`"]
    parts += ["On `mine`", "| bbox | 12.35 | 20.00 |  |  |  |  |", 'from_pretrained("me/shapes")']
    parts += ["resized to 80 pixels", "score threshold is 0.001"]
    for part in parts:
        assert part in card.text, part
    card = ModelCard.load(saved / "README.md")
    assert "license" not in card.data.to_dict() and "No license is stated" in card.text


def test_the_model_card_of_a_detector_with_masks(tmp_path):
    save_run(tmp_path, "cascade_mask_rcnn", "INPUT.MIN_SIZE_TEST", "0")
    Detector.load(tmp_path).save_pretrained(tmp_path / "saved")
    card = ModelCard.load(tmp_path / "saved/README.md")
    assert card.data.pipeline_tag == "image-segmentation"
    assert "# Cascade Mask R-CNN, vil_tiny" in card.text and "detections.masks" in card.text
    assert "Not available." in card.text and "Images keep their size" in card.text


# The hub


def test_paths_and_invalid_names_are_not_requested_from_the_hub(detector, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("./absent", "/absent", "a/b/c", "../a", "~/a", r"a\b", "C:/a", "a--b", tmp_path / "absent"):
        with pytest.raises((ConfigError, HFValidationError)):
            Detector.from_pretrained(name)
    with pytest.raises(HFValidationError):
        detector.push_to_hub("a b")


def test_a_detector_of_the_hub(saved, monkeypatch):
    asked = {}

    def download(repo_id: str, **options) -> str:
        asked.update(options, repo_id=repo_id)
        return str(saved)

    monkeypatch.setattr(hub, "snapshot_download", download)
    options = {"revision": "v1", "cache_dir": "cache"}
    assert Detector.from_pretrained("me/mine", **options).categories == CLASSES
    assert asked.items() >= (options | {"repo_id": "me/mine"}).items()
    # A pickle in the repository is not downloaded.
    found = filter_repo_objects([*FILES, "model_final.pth"], allow_patterns=asked["allow_patterns"])
    assert set(found) == FILES


def test_an_upload(detector, saved, monkeypatch):
    created, uploaded = {}, {}

    class Api:
        def __init__(self, token: str) -> None:
            created["token"] = token

        def create_repo(self, repo_id: str, **options):
            created.update(options, repo_id=repo_id)
            return types.SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, *, folder_path: str, **options) -> str:
            uploaded.update(options, files={path.name: path.read_bytes() for path in Path(folder_path).iterdir()})
            return "https://huggingface.co/me/mine/commit/1"

    monkeypatch.setattr(hub, "HfApi", Api)
    url = detector.push_to_hub("me/mine", private=True, license="mit", revision="v1", token="secret")
    assert url.endswith("commit/1")
    assert created == {"token": "secret", "repo_id": "me/mine", "private": True, "exist_ok": True}
    assert uploaded["files"].keys() == FILES and uploaded["revision"] == "v1"
    card = uploaded["files"]["README.md"].decode()
    assert 'from_pretrained("me/mine")' in card and "license: mit" in card
    assert uploaded["files"]["config.yaml"] == (saved / "config.yaml").read_bytes()
