"""The page of examples/web in headless Chromium shows the detections of the detector, and sends no data."""

import functools
import http.server
import json
import shutil
import subprocess
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from projects_vil import Detector
from projects_vil.export import example_image, metadata_path
from tests.projects_vil.helpers import ROOT

WEB = ROOT / "examples/web"
CHROMIUM, NODE = shutil.which("chromium"), shutil.which("node")
IS_COMPLETE = CHROMIUM and NODE and (WEB / "node_modules/playwright-core").exists()
DRIVER = Path(__file__).with_name("browser.mjs").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not IS_COMPLETE, reason="needs Chromium, node, and npm install in examples/web")
@pytest.mark.parametrize("name", ["mask_rcnn", "retinanet"])
def test_the_page_shows_the_detections_of_the_detector(name, file_of, tmp_path):
    options = {} if name == "mask_rcnn" else {"batched": True, "dtype": "float32", "fixed_number": 100}
    model = Path(shutil.copy(original := file_of(name, "onnx", **options), tmp_path / "model.onnx"))
    metadata = json.loads(metadata_path(original).read_text())
    metadata["input"]["color_order"] = "RGB" if options else "BGR"
    metadata_path(model).write_text(json.dumps(metadata))
    (tmp_path / "other.json").write_text(json.dumps(metadata | {"format": "openvino"}))
    photos = {tmp_path / "a.jpg": (150, 222), tmp_path / "b.png": (701, 480), tmp_path / "c.png": (50, 61)}
    for file, size in photos.items():
        exif, pixels = Image.Exif(), example_image(*size, seed=4).permute(1, 2, 0).numpy()
        if file.suffix == ".jpg":  # stored rotated, upright with its EXIF orientation
            exif[ExifTags.Base.Orientation], pixels = 6, np.rot90(pixels)
        Image.fromarray(pixels).save(file, quality=95, exif=exif)
    steps = [("drop", model, metadata_path(model))] if options else []
    steps += [("input", tmp_path / "b.png"), ("drop", tmp_path / "c.png")]
    steps += [("input", model), ("drop", model, tmp_path / "other.json"), ("drop", WEB / "detect.js")]
    (tmp_path / "web").symlink_to(WEB)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        page = f"{url}web/index.html?photo=/a.jpg" + ("" if options else "&model=/model.onnx")
        arguments = json.dumps({"url": page, "steps": steps, "executablePath": CHROMIUM}, default=str)
        command = [NODE, "--input-type=module", "-e", DRIVER, arguments]
        printed = subprocess.run(command, cwd=WEB, stdout=subprocess.PIPE, timeout=300, check=True).stdout
        server.shutdown()
    shown, requests, is_sent = json.loads(printed)
    assert all(request.startswith((f"GET {url}", "GET data:")) for request in requests) and not is_sent
    for page, start in zip(shown[-3:], ("error: drop model", "error: this page", "error: detect.js"), strict=True):
        assert page["status"].startswith(start) and page["found"] == shown[-4]["found"]

    for file, page in zip(photos, shown[-6:-3], strict=True):
        found, lines = Detector.load(model)(file), [line.split("\t") for line in page["found"].splitlines()]
        assert len(lines) == len(found) > 3
        numbers = np.array([line[1:] for line in lines], float)
        # Detections with nearly equal scores may be in another order.
        distances = np.abs(numbers[:, None, 1:5] - found.boxes).max(2)
        distances += 1000 * (np.array([line[:1] for line in lines]) != found.names)
        order = distances.argmin(1)
        assert len(set(order)) == len(lines) and distances.min(1).max() < 0.1
        assert numbers[:, 0] == pytest.approx(found.scores[order], abs=0.002)
        assert found.masks is None or numbers[:, 5] == pytest.approx(found.masks.sum((1, 2))[order], rel=0.02, abs=2)
    images = [Image.open(file), Image.open(urllib.request.urlopen(page["drawing"]))]
    changed = np.not_equal(*(np.asarray(image.convert("RGB")) for image in images)).any(2)
    left, top, right, bottom = found.boxes[0].round().astype(int)
    assert changed[top:bottom, left].mean() > 0.9 and changed[top, left:right].mean() > 0.9 and not changed.all()
    assert found.masks is None or changed[found.masks.any(0)].mean() > 0.95
