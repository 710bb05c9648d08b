"""Detectors saved for others and loaded again, and what the hub answers where it is not there."""

import base64
import hashlib
import http.server
import json
import os
import tempfile
import threading

import numpy as np
import pytest
import torch

from backbones import InputError
from backbones.utils.files import read_checkpoint
from projects_vil import Detector
from projects_vil.checkpoint import PROVENANCE_KEY
from tests.projects_vil.inference.helpers import picture
from tests.projects_vil.inference.sharing.helpers import CLASSES, make_run

CLOSED = "http://127.0.0.1:9"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Point the client at an address, and its cache at an empty folder."""

    def point(address: str) -> None:
        files = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    point(CLOSED)
    return point


@pytest.fixture
def serve(hub):
    """Have a hub of this machine that answers by a function of method, path and body: status, headers, content."""
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
        hub(f"http://127.0.0.1:{server.server_port}")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def one_line(call, match: str) -> None:
    with pytest.raises(InputError, match=match) as error:
        call()
    assert "\n" not in str(error.value)


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn"])
def test_a_detector_comes_back_to_the_bit(name, tmp_path):
    (tmp_path / "run").mkdir()
    before = Detector(Detector.load(make_run(tmp_path / "run", name)).runner, categories=CLASSES)
    before.save_pretrained(tmp_path / "saved")
    image = picture(70, 110)
    expected = before(image)
    assert len(expected)
    for after in (
        Detector.from_pretrained(tmp_path / "saved"),
        Detector.from_pretrained(str(tmp_path / "saved")),
        Detector.load(tmp_path / "saved"),
        Detector.load(tmp_path / "saved/config.yaml"),
        Detector.load(tmp_path / "saved/model.safetensors"),
    ):
        theirs, ours = (found.runner.detector.state_dict() for found in (before, after))
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in theirs)
        assert after.categories == CLASSES
        found = after(image)
        for attribute in ("boxes", "scores", "classes", "masks"):
            np.testing.assert_array_equal(getattr(found, attribute), getattr(expected, attribute))


def test_a_saved_detector_can_be_saved_again(saved, tmp_path):
    Detector.from_pretrained(saved).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in saved.iterdir()}
    for name in ("README.md", "config.yaml", "evaluation.json", "evaluation.model.json", "model.ts.report.json"):
        assert (tmp_path / name).read_bytes() == (saved / name).read_bytes(), name


def test_what_is_kept_of_how_it_was_loaded(run, tmp_path, caplog):
    detector = Detector.load(run, score_threshold=0.25, tta=True, overrides=["INPUT.MIN_SIZE_TEST", 96])
    detector.save_pretrained(tmp_path)
    again = Detector.from_pretrained(tmp_path)
    assert again.runner.cfg.MODEL.RETINANET.SCORE_THRESH_TEST == 0.25 and again.runner.cfg.INPUT.MIN_SIZE_TEST == 96
    assert again.runner.tta is False and again.drawn_from == 0.5
    # The evaluation was without these.
    assert "left out: " in caplog.text and "None is stated." in (tmp_path / "README.md").read_text()
    other = Detector.from_pretrained(tmp_path, tta=True, score_threshold=0.5, device="cpu")
    assert other.runner.tta and other.drawn_from == 0.5


def test_the_weights_say_their_classes(saved):
    said = read_checkpoint(saved / "model.safetensors")[PROVENANCE_KEY]
    assert said["classes"] == list(CLASSES.names) and said["category_ids"] == list(CLASSES.ids)


def test_an_exported_file_has_no_weights(exported_run, tmp_path):
    detector = Detector.load(exported_run / "one.ts")
    for call in (detector.save_pretrained, detector.push_to_hub):
        one_line(lambda call=call: call("folder"), "an exported file has no weights to share")
    assert not os.path.exists("folder")


# -- what is not there -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./absent", "/absent", "a/b/c", "../a", "~/a", "a/", r"a\b", "C:/a", "."])
def test_a_path_is_not_asked_for_on_the_network(name, serve, tmp_path, monkeypatch):
    asked = []
    serve(lambda *request: asked.append(request) or (404, {}, {}))
    monkeypatch.chdir(tmp_path)
    expected = "has no config.yaml: it holds no detector" if name == "." else "there is no folder "
    one_line(lambda: Detector.from_pretrained(name), expected)
    one_line(lambda: Detector.from_pretrained(tmp_path / "absent"), "there is no folder ")
    assert asked == []


@pytest.mark.parametrize("name", ["a b", "a--b", "", "x" * 97, "a/b.git"])
def test_a_name_that_is_none(name, hub, detector):
    one_line(lambda: detector.push_to_hub(name), "is no name on the hub: ")
    if name:
        one_line(lambda: Detector.from_pretrained(name), "is neither a folder nor a name on the hub: ")


@pytest.mark.parametrize("name", ["./me", "../me/mine", "a/b/c"])
def test_nothing_is_uploaded_to_a_path(name, hub, detector):
    one_line(lambda: detector.push_to_hub(name), "is no name on the hub: ")


@pytest.mark.parametrize(
    "name, is_told", [("me/mine", True), ("mine", False), ("a/b/c", False), ("run/model_final.pth", False)]
)
def test_what_loads_a_name_of_the_hub(name, is_told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="^there is no file or folder ") as error:
        Detector.load(name)
    assert ("if that is a name on the hub, Detector.from_pretrained takes it" in str(error.value)) == is_told


def test_a_folder_takes_no_revision_and_a_file_is_none(saved):
    one_line(lambda: Detector.from_pretrained(saved, revision="v1"), "is a folder here, and has no revision v1")
    one_line(lambda: Detector.from_pretrained(saved / "config.yaml"), "is a file: name its folder")


@pytest.mark.parametrize("missing", ["config.yaml", "model.safetensors"])
def test_a_folder_without_a_detector(missing, saved, tmp_path):
    for name in {"config.yaml", "model.safetensors"} - {missing}:
        (tmp_path / name).symlink_to(saved / name)
    one_line(lambda: Detector.from_pretrained(tmp_path), f"has no {missing}: it holds no detector that save_pretrained")


def test_no_network(hub, detector):
    one_line(
        lambda: Detector.from_pretrained("me/absent"),
        "there is no folder me/absent, and it cannot be had from the hub: it is not in the cache",
    )
    one_line(lambda: Detector.from_pretrained("me/absent", local_files_only=True), "it is not in the cache")
    temporary = set(os.listdir(tempfile.gettempdir()))
    one_line(
        lambda: detector.push_to_hub("me/mine", token="x"),
        "^me/mine cannot be uploaded: the hub cannot be reached .*refused",
    )
    assert set(os.listdir(tempfile.gettempdir())) == temporary


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (404, "RepoNotFound", "there is no such repository, or it is private"),
        (404, "RevisionNotFound", "it has no such revision"),
        (403, "GatedRepo", "its owner has to grant access"),
    ],
)
def test_what_the_hub_refuses(status, code, expected, serve):
    serve(lambda *request: (status, {"X-Error-Code": code, "X-Error-Message": "no"}, {"error": "no"}))
    one_line(lambda: Detector.from_pretrained("me/mine", revision="v1"), expected)


def test_who_is_not_logged_in_cannot_upload(serve, detector):
    serve(lambda *request: (401, {}, {"error": "Invalid username or password."}))
    one_line(lambda: detector.push_to_hub("me/mine", token="x"), "you are not logged in, or may not")


# -- from the hub, and to it ----------------------------------------------------------------------


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
    # Nothing but what is of a detector is brought, into the cache that was named.
    assert not any("model_final.pth" in path for path in asked) and not (tmp_path / "cache").exists()
    asked.clear()
    options = {"revision": "v1", "cache_dir": tmp_path / "mine", "local_files_only": True}
    assert Detector.from_pretrained("me/mine", **options).names == CLASSES.names and asked == []


def test_the_upload_is_what_is_saved(serve, detector, saved):
    requests, created, uploaded, deleted = [], [], {}, []
    there = ["README.md", "evaluation.json", "older.onnx.report.json", "notes.txt"]

    def answer(method, path, body):
        requests.append((method, path))
        if path == "/api/validate-yaml":
            return 200, {}, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            created.append(body.decode())
            return 200, {}, {"url": f"{CLOSED}/me/mine", "name": "me/mine"}
        if "/preupload/" in path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            return 200, {}, {"files": [file | {"shouldIgnore": False, "oid": None} for file in files]}
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    uploaded[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    deleted.append(line["value"]["path"])
            return 200, {}, {"commitUrl": f"{CLOSED}/me/mine/commit/1", "commitOid": "1", "success": True}
        if "/tree/" in path:
            return 200, {}, [{"type": "file", "path": name, "size": 1, "oid": "1" * 40} for name in there]
        return 404, {"X-Error-Code": "EntryNotFound"}, {"error": path}

    serve(answer)
    detector.push_to_hub("me/mine", private=True, token="x", license="mit", ignore_patterns="*.report.json")
    assert set(uploaded) == {path.name for path in saved.iterdir()} - {"model.ts.report.json"}
    assert uploaded["config.yaml"] == (saved / "config.yaml").read_bytes()
    card = uploaded["README.md"].decode()
    assert "license: mit" in card and 'from_pretrained("me/mine")' in card
    # Figures of the earlier weights do not stay beside others.
    assert deleted == ["older.onnx.report.json"]
    # What the library asks the hub of its own accord, once in a process, is a GET.
    posts = [path for method, path in requests if method == "POST"]
    assert posts[:2] == ["/api/validate-yaml", "/api/repos/create"]
    # In words that differ from version to version.
    assert "private" in created[0] and '"mine"' in created[0]
    deleted.clear()
    detector.push_to_hub("me/mine", token="x", allow_patterns="README.md")
    detector.push_to_hub("me/mine", token="x", delete_patterns=[])
    assert deleted == []
    Detector.from_pretrained(saved, score_threshold=0.5).push_to_hub("me/mine", token="x")
    assert sorted(deleted) == ["evaluation.json", "older.onnx.report.json"]


def test_nothing_is_made_on_the_hub_where_it_does_not_take_the_card(serve, detector):
    asked = []

    def answer(method, path, body):
        asked.append(path)
        return 400, {}, {"errors": [{"message": "license must be one of [mit]"}], "warnings": []}

    serve(answer)
    one_line(
        lambda: detector.push_to_hub("me/mine", license="other", token="x"),
        "cannot be uploaded: .*license must be one of",
    )
    assert asked == ["/api/validate-yaml"]


def test_nothing_is_made_on_the_hub_where_the_detector_cannot_be_saved(serve, detector):
    asked = []
    serve(lambda *request: asked.append(request) or (200, {}, {}))
    one_line(lambda: detector.push_to_hub("me/mine", license="No Id", token="x"), "license is 'No Id'")
    assert asked == []
