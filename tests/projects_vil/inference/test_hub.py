"""Save and load detectors, model cards, and requests to a mock of the Hub."""

import json
import os
import shutil
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
from projects_vil.checkpoint import METADATA_KEY, Categories, fingerprint
from projects_vil.evaluation import write_results
from projects_vil.inference import hub
from projects_vil.visualization import DRAW_THRESHOLD
from tests.projects_vil.helpers import assert_same_detections, small_config
from tests.projects_vil.inference.helpers import BrightHalfRunner, picture, save_run
from tests.selection import slow_except

CLASSES = Categories((3, 7, 9), ("round | flat", "square", "triangle"))
EVALUATION = {"bbox": {"AP": 12.345, "AP50": 20.0, "APl": float("nan"), "AP-square": 1.0}}
REPORTS = {"evaluation.json", "evaluation.model.json", "model.ts.report.json"}
FILES = {"README.md", "config.yaml", "model.safetensors", *REPORTS}
PRIVATE = (
    *("DATASETS.COCO", '[["mine", "/home/me/secret/a.json", "/home/me/secret/photos"]]'),
    *("DATASETS.TRAIN", '("mine", "/home/me/secret/a.json for /home/me/secret/photos")'),
    *("DATASETS.TEST", '("mine",)', "LOGGING.WANDB_PROJECT", "secret", "LOGGING.MLFLOW_EXPERIMENT", "secret"),
    *("MODEL.WEIGHTS", "/home/me/secret/pretrained.pth"),
)


def make_run(folder: Path, name: str = "retinanet") -> Path:
    """Create the folder of an untrained run: config, weights, evaluation and export report."""
    cfg, detector = save_run(folder, name, *PRIVATE, "INPUT.MIN_SIZE_TEST", "80")
    model = fingerprint(cfg, detector)
    write_results(cfg, dict(EVALUATION), model=model)
    row = {"height": 40, "width": 60, "detections": 3, "detections_exported": 3, "pairs": 3, "ok": True}
    row |= {"boxes": 1e-5, "scores": 1e-7, "unmatched": 0, "changed": 0, "borderline": 0}
    report = {"fingerprint": model, "file": "model.ts", "images": [row], "tolerances": {"boxes": 0.1, "scores": 0.1}}
    report |= {"bytes": 1234567, "opset": None, "precision": "fp32"}
    report["latency"] = {"eager_ms": 2.0, "exported_ms": 1.0, "ratio": 2.0, "height": 40, "width": 60, "threads": 1}
    (folder / "export").mkdir()
    (folder / "export/model.ts.report.json").write_text(json.dumps(report))
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
        (tmp_path / "run").mkdir()
        before, folder = Detector(Detector.load(make_run(tmp_path / "run", name)).runner, categories=CLASSES), tmp_path
        before.save_pretrained(folder)
    expected = before(picture(70, 110))
    assert len(expected)
    theirs = before.runner.detector.state_dict()
    for after in (
        Detector.from_pretrained(str(folder)),
        Detector.load(folder),
        Detector.load(folder / "config.yaml"),
        Detector.load(folder / "model.safetensors"),
    ):
        ours = after.runner.detector.state_dict()
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in theirs)
        assert after.categories == CLASSES
        found = after(picture(70, 110))
        assert_same_detections(found.instances, expected.instances)


def test_the_files(saved, run, tmp_path):
    """The files contain no path of this machine, and a second save writes the same files."""
    assert {path.name for path in saved.iterdir()} == FILES
    for path in saved.iterdir():
        for private in (b"secret", b"/home", str(run).encode(), str(run.parent).encode()):
            assert private not in path.read_bytes(), path
    metadata = read_checkpoint(saved / "model.safetensors")[METADATA_KEY]
    assert (tuple(metadata["classes"]), tuple(metadata["category_ids"])) == (CLASSES.names, CLASSES.ids)
    Detector.from_pretrained(saved).save_pretrained(tmp_path)
    for name in FILES - {"model.safetensors"}:
        assert (tmp_path / name).read_bytes() == (saved / name).read_bytes(), name


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_reports_are_skipped(tmp_path, caplog, content):
    (tmp_path / "a.onnx.report.json").write_text(content)
    assert hub.find_reports(tmp_path, "model") == (None, {}) and "a.onnx.report.json" in caplog.text


def test_a_second_save_with_other_options(saved, tmp_path, caplog):
    """The files are replaced, except for an edited card and other files. Reports for other settings are deleted."""
    folder = Path(shutil.copytree(saved, tmp_path / "saved"))
    (folder / "notes.txt").write_text("mine")
    (folder / "README.md").write_text("edited")
    loaded = Detector.load(folder, score_threshold=0.25, tta=True, overrides=["INPUT.MIN_SIZE_TEST", 96])
    loaded.save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} == FILES - REPORTS | {"notes.txt"}
    assert (folder / "README.md").read_text() == "edited" and "README.md" in caplog.text
    again = Detector.from_pretrained(folder)
    assert again.runner.cfg.MODEL.RETINANET.SCORE_THRESH_TEST == 0.25 and again.runner.cfg.INPUT.MIN_SIZE_TEST == 96
    assert again.runner.tta is False and again.draw_threshold == DRAW_THRESHOLD
    assert Detector.from_pretrained(folder, tta=True, score_threshold=0.2, device="cpu").draw_threshold == 0.2


def test_folders_that_are_not_written(detector, run, tmp_path):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (tmp_path / "file").write_text("")
    for folder in (run, tmp_path / "file"):
        with pytest.raises((ConfigError, OSError), match=str(folder)):
            detector.save_pretrained(folder)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    for call in (Detector(BrightHalfRunner()).save_pretrained, Detector(BrightHalfRunner()).push_to_hub):
        with pytest.raises(ConfigError, match="exported"):
            call("folder")
    assert not os.path.exists("folder")


def test_configs_with_paths():
    assert hub.published_config(small_config("retinanet", *PRIVATE)).DATASETS.TRAIN == ("mine",)
    with pytest.raises(ConfigError, match="VARIANT"):
        hub.published_config(small_config("retinanet", "MODEL.TRANSFORMER.VARIANT", "/home/me/model"))


# Cards


def test_the_card(detector, saved, tmp_path):
    detector.save_pretrained(tmp_path, license="cc-by-4.0", repo_id="me/shapes")
    card = ModelCard.load(tmp_path / "README.md")
    data = card.data.to_dict()
    assert (data["license"], data["pipeline_tag"]) == ("cc-by-4.0", "object-detection")
    [result] = data["model-index"][0]["results"]
    assert result["dataset"]["name"] == "mine"
    # An undefined AP is left out.
    assert result["metrics"] == [{"type": "AP", "value": 12.345}, {"type": "AP50", "value": 20.0}]
    parts = ["# RetinaNet, vil_tiny", "| 3 | round \\| flat |\n| 7 | square |\n| 9 | triangle |\n", "`cc-by-4.0`"]
    parts += ["| bbox | 12.35 | 20.00 |", "model.ts: 1.2 MB, fp32", 'from_pretrained("me/shapes")']
    parts += ["resized to 80 pixels", "score threshold is 0.001"]
    for part in parts:
        assert part in card.text, part
    card = ModelCard.load(saved / "README.md")
    assert "license" not in card.data.to_dict() and "No license is stated" in card.text


def test_the_card_of_a_detector_with_masks(tmp_path):
    save_run(tmp_path, "cascade_mask_rcnn", "INPUT.MIN_SIZE_TEST", "0")
    Detector.load(tmp_path).save_pretrained(tmp_path / "saved")
    card = ModelCard.load(tmp_path / "saved/README.md")
    assert card.data.pipeline_tag == "image-segmentation" and card.data.eval_results is None
    assert "# Cascade Mask R-CNN, vil_tiny" in card.text and "detections.masks" in card.text
    assert card.text.count("Not available.") == 2 and "Images keep their size" in card.text


# The hub


@pytest.fixture
def requests(monkeypatch, saved):
    """The requests to a Hub with the repository ``me/mine``: (request, options)."""
    asked = []

    class Api:
        def __init__(self, token: str | None) -> None:
            assert token == "secret"

        def create_repo(self, **options):
            asked.append(("create", options))
            return types.SimpleNamespace(repo_id=options["repo_id"])

        def upload_folder(self, *, folder_path: Path, **options) -> str:
            files = {path.name: path.read_bytes() for path in folder_path.iterdir()}
            asked.append(("upload", {"delete_patterns": None} | options | {"files": files}))
            return "https://huggingface.co/me/mine/commit/1"

    def download(repo_id: str, **options) -> str:
        asked.append(("download", options | {"repo_id": repo_id}))
        return str(saved)

    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr(ModelCard, "validate", lambda card: asked.append(("validate", card.data.to_dict())))
    return asked


def test_paths_and_invalid_names_are_not_requested_from_the_hub(detector, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("./absent", "/absent", "a/b/c", "../a", "~/a", r"a\b", "C:/a", "a--b", tmp_path / "absent"):
        with pytest.raises((ConfigError, HFValidationError)):
            Detector.from_pretrained(name)
    for name in ("./me", "a/b/c", "a b"):
        with pytest.raises(HFValidationError):
            detector.push_to_hub(name)


def test_a_detector_of_the_hub(requests):
    options = {"revision": "v1", "cache_dir": "cache"}
    assert Detector.from_pretrained("me/mine", **options).categories == CLASSES
    [(_, asked)] = requests
    assert asked.items() >= (options | {"repo_id": "me/mine"}).items()
    # A pickle in the repository is not downloaded.
    patterns = asked["allow_patterns"]
    assert [*filter_repo_objects([*FILES, "model_final.pth"], allow_patterns=patterns)] == [*FILES]


def test_an_upload(requests, detector, saved):
    """The card is validated first. The reports of earlier weights are deleted."""
    options = {"token": "secret", "ignore_patterns": "*.report.json"}
    detector.push_to_hub("me/mine", private=True, license="mit", revision="v1", **options)
    (_, card), (_, created), (_, uploaded) = requests
    assert [request for request, _ in requests] == ["validate", "create", "upload"]
    assert card["license"] == "mit" and created["private"] is True
    assert uploaded["files"].keys() == FILES and uploaded["ignore_patterns"] == options["ignore_patterns"]
    assert uploaded["revision"] == "v1" and b'from_pretrained("me/mine")' in uploaded["files"]["README.md"]
    assert uploaded["files"]["config.yaml"] == (saved / "config.yaml").read_bytes()
    there = ["README.md", "evaluation.json", "older.onnx.report.json", "notes.txt"]
    assert [*filter_repo_objects(there, allow_patterns=uploaded["delete_patterns"])] == there[1:3]
    detector.push_to_hub("me/mine", token="secret", allow_patterns="README.md")
    assert requests[-1][1]["delete_patterns"] is None
    detector.push_to_hub("me/mine", token="secret", delete_patterns=[])
    assert requests[-1][1]["delete_patterns"] == []
