"""Fixtures for the tests of inference."""

import contextlib
import functools
import http.server
import threading
from collections import Counter

import cv2
import pytest

from projects_vil import load_config
from projects_vil.export import export_detector
from tests.projects_vil.inference.helpers import picture


@pytest.fixture(scope="session")
def exported_run(trained_run, made_once):
    """A folder with ``model.ts`` and ``model_batched.ts``, exported from the trained detector."""

    def write(folder) -> None:
        cfg = load_config(trained_run / "config.yaml")
        for batched in (False, True):
            assert export_detector(cfg, trained_run / "model_final.pth", folder, batched=batched)[1]["ok"]

    return made_once("exported_run", write)


class Server(http.server.SimpleHTTPRequestHandler):
    """A server of files, and of an endless stream of JPEG images as sent by an IP camera.

    The first request for each file in ``flaky/`` fails, a request for a file in ``slow/`` waits until 16 requests have
    arrived, and a request for a file in ``silent/`` gets no answer. ``requests`` counts the requests by path.
    """

    requests: Counter = Counter()
    arrived = threading.Barrier(16)

    def __init__(self, *args, failed: set[str], **options) -> None:
        self.failed = failed
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        self.requests[self.path] += 1
        if self.path.startswith("/slow/"):
            self.arrived.wait(30)
        if self.path.startswith("/silent/"):
            self.rfile.read()  # until the client closes the connection
            return
        if self.path.startswith("/flaky/") and self.path not in self.failed:
            self.failed.add(self.path)
            self.send_error(503)
            return
        if self.path != "/camera":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace;boundary=frame")
        self.end_headers()
        jpeg = cv2.imencode(".jpg", picture(40, 60)[..., ::-1])[1].tobytes()
        part = b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%b\r\n" % (len(jpeg), jpeg)
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path):
    """The URL of a folder."""
    handler = functools.partial(Server, directory=tmp_path, failed=set())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://me:my@secret@127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
