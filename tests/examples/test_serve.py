"""examples/serve_fastapi.py as a process that real clients ask."""

import http.client
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest

from projects_vil import Detector
from projects_vil.export import example_image
from tests.projects_vil.helpers import ROOT
from tests.projects_vil.inference.helpers import save_run

LIMITS = "--bytes 100000 --pixels 40000 --seconds 15 --requests 2 --port 0".split()


def encoded(height: int, width: int, suffix: str = ".png") -> bytes:
    return cv2.imencode(suffix, example_image(height, width).permute(1, 2, 0).numpy())[1].tobytes()


def begin(port: str, body: bytes, number: int | None = None) -> http.client.HTTPConnection:
    """Send a photo, or its first bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
    connection.putrequest("POST", "/detect")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body[:number])
    return connection


def end(connection: http.client.HTTPConnection) -> tuple[int, dict]:
    response = connection.getresponse()
    return response.status, json.loads(response.read())


@pytest.mark.slow
def test_photos_and_limits(tmp_path):
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package)
    save_run(tmp_path, "mask_rcnn")
    command = [sys.executable, ROOT / "examples/serve_fastapi.py", tmp_path, *LIMITS]
    photo, bmp = encoded(96, 150), encoded(96, 150, ".bmp")
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            port = next(found[1] for line in server.stderr if (found := re.search(r"http://127.0.0.1:(\d+)", line)))
            status, found = end(begin(port, photo))
            expected = Detector.load(tmp_path)(cv2.imdecode(np.frombuffer(photo, np.uint8), cv2.IMREAD_COLOR_RGB))
            assert status == 200 and (found["height"], found["width"]) == (96, 150)
            assert [item.pop("name") for item in found["detections"]] == expected.names != []
            for item, other in zip(found["detections"], expected.to_coco(0), strict=True):
                assert item.keys() == other.keys() and item["bbox"] == pytest.approx(other["bbox"], abs=0.01)
            bad = {
                b"": 415,
                b"no image": 415,
                bmp: 415,
                photo[:-2000]: 422,
                encoded(201, 200): 413,
                bytes(100_001): 413,
            }
            assert {body: end(begin(port, body))[0] for body in bad} == bad
            begin(port, photo, 100).close()

            # While the photos of two do not arrive, others are refused. One arrives after all, the other is given up.
            late = [begin(port, photo, 100) for _ in range(2)]
            assert any(end(begin(port, photo))[0] == 503 for _ in range(50))
            late[0].send(photo[100:])
            assert end(late[0])[0] == 200 and end(late[1])[0] == 503
            with ThreadPoolExecutor(12) as clients:
                statuses = list(clients.map(lambda _: end(begin(port, photo))[0], range(24)))
            assert set(statuses) == {200, 503} and end(begin(port, photo))[0] == 200
        finally:
            server.terminate()
            written = server.stderr.read()
        assert "Traceback" not in written, written
