"""Detectors saved as folders and loaded again, their cards, and requests to a local hub."""

import base64
import hashlib
import http.server
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from backbones import ConfigError
from backbones.checkpoint_files import read_checkpoint
from projects_vil import Detector
from projects_vil.checkpoint import METADATA_KEY, Categories, Checkpointer, fingerprint
from projects_vil.evaluation import write_results
from projects_vil.inference.hub import published_config
from tests.projects_vil.helpers import small_config, untrained_detector
from tests.projects_vil.inference.helpers import BrightHalfRunner, picture

CLASSES = Categories((3, 7, 9), ("round | flat", "square", "triangle"))
EVALUATION = {"bbox": {"AP": 12.345, "AP50": 20.0, "APl": float("nan"), "AP-square": 1.0}}
EVIDENCE = {"evaluation.json", "evaluation.model.json", "model.ts.report.json"}
FILES = {"README.md", "config.yaml", "model.safetensors", *EVIDENCE}
PRIVATE = (
    *("DATASETS.COCO", '[["mine", "/home/me/secret/a.json", "/home/me/secret/photos"]]'),
    *("DATASETS.TRAIN", '("mine", "/home/me/secret/a.json for /home/me/secret/photos")'),
    *("DATASETS.TEST", '("mine",)', "LOGGING.WANDB", "secret_project", "LOGGING.MLFLOW", "secret_experiment"),
    *("MODEL.WEIGHTS", "/home/me/secret/pretrained.pth"),
)


def make_run(folder: Path, name: str = "retinanet") -> Path:
    """The folder of a run without training: config, weights, evaluation and the report on an export."""
    cfg = small_config(name, *PRIVATE, "OUTPUT_DIR", str(folder), "INPUT.MIN_SIZE_TEST", "80")
    (folder / "config.yaml").write_text(cfg.dump())
    detector = untrained_detector(cfg)
    Checkpointer(detector, str(folder), cfg=cfg).save("model_final")
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
    """A folder from ``save_pretrained``, to be read only."""
    return made_once("saved_for_the_hub", detector.save_pretrained)


# Folders


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn"])
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
        for attribute in ("boxes", "scores", "classes", "masks"):
            np.testing.assert_array_equal(getattr(found, attribute), getattr(expected, attribute))


def test_the_files(saved, run, tmp_path):
    """The files have no path of this machine, and a second save has the same contents."""
    assert {path.name for path in saved.iterdir()} == FILES
    for path in saved.iterdir():
        for private in (b"secret", b"/home", str(run).encode(), str(run.parent).encode()):
            assert private not in path.read_bytes(), path
    metadata = read_checkpoint(saved / "model.safetensors")[METADATA_KEY]
    assert (tuple(metadata["classes"]), tuple(metadata["category_ids"])) == (CLASSES.names, CLASSES.ids)
    Detector.from_pretrained(saved).save_pretrained(tmp_path)
    for name in FILES - {"model.safetensors"}:
        assert (tmp_path / name).read_bytes() == (saved / name).read_bytes(), name


def test_a_second_save_with_other_options(saved, tmp_path, caplog):
    """It replaces a save but not an edited card and other files; evaluations of other settings do not stay."""
    folder = Path(shutil.copytree(saved, tmp_path / "saved"))
    (folder / "notes.txt").write_text("mine")
    (folder / "README.md").write_text("edited")
    loaded = Detector.load(folder, score_threshold=0.25, tta=True, overrides=["INPUT.MIN_SIZE_TEST", 96])
    loaded.save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} == FILES - EVIDENCE | {"notes.txt"}
    assert (folder / "README.md").read_text() == "edited" and "README.md" in caplog.text
    again = Detector.from_pretrained(folder)
    assert again.runner.cfg.MODEL.RETINANET.SCORE_THRESH_TEST == 0.25 and again.runner.cfg.INPUT.MIN_SIZE_TEST == 96
    assert again.runner.tta is False and again.draw_threshold == 0.5
    assert Detector.from_pretrained(folder, tta=True, score_threshold=0.3, device="cpu").draw_threshold == 0.3


def test_folders_that_are_not_written(detector, run, tmp_path):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (tmp_path / "file").write_text("")
    for folder in (run, tmp_path / "file"):
        with pytest.raises(ConfigError, match=str(folder)):
            detector.save_pretrained(folder)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    for call in (Detector(BrightHalfRunner()).save_pretrained, Detector(BrightHalfRunner()).push_to_hub):
        with pytest.raises(ConfigError, match="exported"):
            call("folder")
    assert not os.path.exists("folder")


def test_configs_with_paths_and_unknown_keys():
    published = published_config(small_config("retinanet", *PRIVATE, "OUTPUT_DIR", "/home/me/secret"))
    assert published.DATASETS.TEST == ("mine",) == published.DATASETS.TRAIN
    assert "secret" not in published.dump() and published.MODEL.WEIGHTS == small_config().MODEL.WEIGHTS
    with pytest.raises(ConfigError, match="NAME"):
        published_config(small_config("retinanet", "MODEL.TRANSFORMER.NAME", "/home/me/model"))
    cfg = small_config().clone()
    cfg.defrost()
    cfg.MODEL.OF_ANOTHER_PROJECT = 1
    with pytest.raises(ConfigError, match="OF_ANOTHER_PROJECT"):
        published_config(cfg)


@pytest.mark.parametrize("missing", ["config.yaml", "model.safetensors"])
def test_folders_without_a_detector(missing, saved, tmp_path):
    for name in {"config.yaml", "model.safetensors"} - {missing}:
        (tmp_path / name).symlink_to(saved / name)
    with pytest.raises(ConfigError, match=missing):
        Detector.from_pretrained(tmp_path)


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
    parts += [
        "| bbox | 12.35 | 20.00 |",
        "model.ts: 1.2 MB, fp32",
        'from_pretrained("me/shapes")',
        "80 pixels",
        "0.001",
    ]
    for part in parts:
        assert part in card.text, part
    card = ModelCard.load(saved / "README.md")
    assert "license" not in card.data.to_dict() and "No license is stated" in card.text
    with pytest.raises(HFValidationError):
        detector.save_pretrained(tmp_path / "other", repo_id="a/b/c")


def test_the_card_of_a_detector_with_masks(tmp_path):
    cfg = small_config("cascade_mask_rcnn", "INPUT.MIN_SIZE_TEST", "0")
    torch.save({"model": untrained_detector(cfg).state_dict()}, tmp_path / "model_final.pth")
    (tmp_path / "config.yaml").write_text(cfg.dump())
    Detector.load(tmp_path).save_pretrained(tmp_path / "saved")
    card = ModelCard.load(tmp_path / "saved/README.md")
    assert card.data.pipeline_tag == "image-segmentation" and card.data.eval_results is None
    assert "# Cascade Mask R-CNN, vil_tiny" in card.text and "found.masks" in card.text
    assert card.text.count("Not available.") == 2 and "Images keep their size" in card.text


# The hub


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """Start a local hub that answers by a function of method, path and body: status, headers, content."""
    servers = []

    def start(answer) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, headers, content = answer(self.command, self.path, body)
                text = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(text))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text)

            do_GET = do_HEAD = do_POST = handle_any

            def log_message(self, *args) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        address = f"http://127.0.0.1:{server.server_port}"
        files = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_paths_and_invalid_names_are_not_looked_for_on_the_hub(serve, detector, tmp_path, monkeypatch):
    asked = []
    serve(lambda *request: asked.append(request) or (404, {}, {}))
    monkeypatch.chdir(tmp_path)
    for name in ("./absent", "/absent", "a/b/c", "../a", "~/a", r"a\b", "C:/a", "a--b", tmp_path / "absent"):
        with pytest.raises((ConfigError, HFValidationError)):
            Detector.from_pretrained(name)
    for name in ("./me", "a/b/c", "a b", "a--b"):
        with pytest.raises(HFValidationError):
            detector.push_to_hub(name)
    assert asked == []


def test_a_detector_of_the_hub(serve, saved, tmp_path):
    commit, asked = "0123456789" * 4, []
    files = {path.name: path.read_bytes() for path in saved.iterdir()} | {"model_final.pth": b"a pickle"}
    listed = [{"type": "file", "path": name, "size": len(text), "oid": "1" * 40} for name, text in files.items()]

    def answer(method, path, body):
        asked.append(path)
        if path.startswith("/api/models/me/mine/revision/v1"):
            names = [{"rfilename": name} for name in files]
            return 200, {}, {"id": "me/mine", "modelId": "me/mine", "sha": commit, "siblings": names, "tags": []}
        if "/tree/" in path:
            return 200, {}, listed
        text = files[path.rpartition("/")[2]]
        return 200, {"ETag": f'"{hashlib.sha256(text).hexdigest()}"', "X-Repo-Commit": commit}, text

    serve(answer)
    found = Detector.from_pretrained("me/mine", revision="v1", cache_dir=tmp_path / "mine")
    assert found.categories == CLASSES and len(found(picture(70, 110)))
    assert not any("model_final.pth" in path for path in asked) and not (tmp_path / "cache").exists()
    asked.clear()
    options = {"revision": "v1", "cache_dir": tmp_path / "mine", "local_files_only": True}
    assert Detector.from_pretrained("me/mine", **options).names == CLASSES.names and asked == []


def test_an_upload(serve, detector, saved):
    """The card is validated first; an evaluation and reports of earlier weights are removed with them."""
    posts, uploaded, deleted, errors = [], {}, [], [{"message": "license is unknown"}]
    there = ["README.md", "evaluation.json", "older.onnx.report.json", "notes.txt"]

    def answer(method, path, body):
        if method == "POST":
            posts.append(path)
        if path == "/api/validate-yaml":
            return (400 if errors else 200), {}, {"errors": errors, "warnings": []}
        if path == "/api/repos/create":
            return 200, {}, {"url": "http://127.0.0.1:9/me/mine", "name": "me/mine"}
        if "/preupload/" in path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            return 200, {}, {"files": [file | {"shouldIgnore": False, "oid": None} for file in files]}
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    uploaded[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    deleted.append(line["value"]["path"])
            return 200, {}, {"commitUrl": "http://127.0.0.1:9/me/mine/commit/1", "commitOid": "1", "success": True}
        if "/tree/" in path:
            return 200, {}, [{"type": "file", "path": name, "size": 1, "oid": "1" * 40} for name in there]
        return 404, {"X-Error-Code": "EntryNotFound"}, {"error": path}

    serve(answer)
    with pytest.raises((ValueError, HfHubHTTPError)):
        detector.push_to_hub("me/mine", license="other", token="x")
    assert posts == ["/api/validate-yaml"]
    errors.clear()
    detector.push_to_hub("me/mine", private=True, token="x", license="mit", ignore_patterns="*.report.json")
    assert set(uploaded) == FILES - {"model.ts.report.json"}
    assert uploaded["config.yaml"] == (saved / "config.yaml").read_bytes()
    card = uploaded["README.md"].decode()
    assert "license: mit" in card and 'from_pretrained("me/mine")' in card
    assert deleted == ["older.onnx.report.json"] and posts[1:3] == ["/api/validate-yaml", "/api/repos/create"]
    deleted.clear()
    detector.push_to_hub("me/mine", token="x", allow_patterns="README.md")
    detector.push_to_hub("me/mine", token="x", delete_patterns=[])
    assert deleted == []
    Detector.from_pretrained(saved, score_threshold=0.5).push_to_hub("me/mine", token="x")
    assert sorted(deleted) == ["evaluation.json", "older.onnx.report.json"]
