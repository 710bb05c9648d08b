"""examples/serve_fastapi.py as a server process with real clients."""

import http.client
import json
import re
import subprocess
import sys

import cv2
import pytest

from projects_vil import Detector
from projects_vil.export import example_image
from tests.projects_vil.helpers import ROOT, wait_for
from tests.projects_vil.inference.helpers import save_run

LIMITS = "--bytes 100000 --pixels 40000 --seconds 15 --requests 2 --port 0".split()


def encoded(height: int, width: int, suffix: str = ".png") -> bytes:
    return cv2.imencode(suffix, example_image(height, width).permute(1, 2, 0).numpy()[..., ::-1])[1].tobytes()


def begin(port: str, body: bytes, number: int | None = None) -> http.client.HTTPConnection:
    """Send a photo, or only its first bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
    connection.request("POST", "/detect", body[:number], {"Content-Length": str(len(body))})
    return connection


@pytest.mark.slow
def test_photos_and_limits(tmp_path):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    save_run(tmp_path, "mask_rcnn")
    command = [sys.executable, ROOT / "examples/serve_fastapi.py", tmp_path, *LIMITS]
    photo, bmp = encoded(96, 150), encoded(96, 150, ".bmp")
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            port = next(found[1] for line in server.stderr if (found := re.search(r"http://127.0.0.1:(\d+)", line)))
            found = json.load(begin(port, photo).getresponse())["detections"]
            expected = Detector.load(tmp_path)(example_image(96, 150).permute(1, 2, 0).numpy())
            assert [item["name"] for item in found] == expected.names != []
            for item, other in zip(found, expected.to_coco(0), strict=True):
                assert item.keys() > other.keys() and item["bbox"] == pytest.approx(other["bbox"], abs=0.01)
            bad = {b"": 415, b"text": 415, bmp: 415, photo[:-2000]: 422, encoded(201, 200): 413, bytes(100_001): 413}
            assert {body: begin(port, body).getresponse().status for body in bad} == bad

            # Two clients do not finish their requests, so the server rejects others. One finishes later, one times out.
            late = [begin(port, photo, 100) for _ in range(2)]
            assert any(begin(port, photo).getresponse().status == 503 for _ in range(50))
            late[0].send(photo[100:])
            assert late[0].getresponse().status == 200 and late[1].getresponse().status == 503
            assert {sent.getresponse().status for sent in [begin(port, photo) for _ in range(24)]} == {200, 503}
            for _ in range(2):
                begin(port, photo, 100).close()
            wait_for(lambda: begin(port, photo).getresponse().status == 200)
        finally:
            server.terminate()
            assert "Traceback" not in server.stderr.read()
