"""The page of examples/web in headless Chromium: it shows the detector's detections, and sends nothing anywhere."""

import base64
import functools
import http.server
import io
import json
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from projects_vil import Detector
from projects_vil.export import example_image, metadata_path
from tests.projects_vil.helpers import ROOT

WEB = ROOT / "examples/web"
CHROMIUM, NODE = shutil.which("chromium"), shutil.which("node")
DRIVER = Path(__file__).with_name("browser.mjs").read_text()


def visit(folder: Path, query: str, steps: list) -> list[dict]:
    """Open the page with files, in steps as browser.mjs says, and return what it shows first, and after each."""
    for file in WEB.iterdir():
        (folder / file.name).symlink_to(file)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        page = {"url": f"{url}index.html{query}", "steps": steps, "executablePath": CHROMIUM}
        command = [NODE, "--input-type=module", "-e", DRIVER, json.dumps(page, default=str)]
        result = subprocess.run(command, cwd=WEB, capture_output=True, text=True, timeout=300, check=False)
        server.shutdown()
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert all(request.startswith((f"GET {url}", "GET data:")) for request in answer["requests"])
    assert answer["sent"] is False
    return answer["shown"]


def photo(path: Path, height: int, width: int) -> Path:
    """An image file; a JPEG is stored turned, and upright by its EXIF orientation."""
    exif, image = Image.Exif(), Image.fromarray(example_image(height, width, seed=4).permute(1, 2, 0).numpy())
    if path.suffix == ".jpg":
        exif[ExifTags.Base.Orientation], image = 6, image.transpose(Image.Transpose.ROTATE_90)
    image.save(path, quality=95, exif=exif)
    return path


@pytest.mark.slow
@pytest.mark.skipif(not (CHROMIUM and NODE), reason="Chromium or node is not installed")
@pytest.mark.skipif(not (WEB / "node_modules/playwright-core").exists(), reason="run npm install in examples/web")
@pytest.mark.parametrize("name", ["mask_rcnn", "retinanet"])
def test_the_page_shows_the_detections_of_the_detector(name, file_of, tmp_path):
    options = {} if name == "mask_rcnn" else {"batched": True, "dtype": "float32", "fixed_number": 100}
    model = Path(shutil.copy(original := file_of(name, "onnx", **options), tmp_path / "model.onnx"))
    metadata = json.loads(metadata_path(original).read_text())
    metadata["input"]["color_order"] = "RGB" if options else "BGR"
    metadata_path(model).write_text(json.dumps(metadata))
    (tmp_path / "other.json").write_text(json.dumps(metadata | {"format": "openvino"}))
    (tmp_path / "text.jpg").write_text("no image")
    sizes = {"a.jpg": (150, 222), "b.png": (701, 480), "c.png": (50, 61)}
    photos = [photo(tmp_path / file, *size) for file, size in sizes.items()]
    steps = [("drop", model, metadata_path(model))] if options else []
    steps += [("input", photos[1]), ("drop", photos[2])]
    steps += [("input", model), ("drop", model, tmp_path / "other.json"), ("drop", tmp_path / "text.jpg")]
    shown = visit(tmp_path, "?photo=a.jpg" if options else "?photo=a.jpg&model=model.onnx", steps)
    for page, start in zip(shown[-3:], ("error: drop model", "error: this page", "error: text.jpg"), strict=True):
        assert page["status"].startswith(start) and page["found"] == shown[-4]["found"]

    detector = Detector.load(model)
    for file, page in zip(photos, shown[-6:-3], strict=True):
        found, lines = detector(file), [line.split("\t") for line in page["found"].splitlines()]
        assert len(lines) == len(found) > 3
        numbers = np.array([line[1:] for line in lines], float)
        # Those of nearly equal scores may come in another order.
        distances = np.abs(numbers[:, None, 1:5] - found.boxes).max(2)
        distances += 1000 * (np.array([line[:1] for line in lines]) != found.names)
        order = distances.argmin(1)
        assert len(set(order)) == len(lines) and distances.min(1).max() < 0.1
        assert numbers[:, 0] == pytest.approx(found.scores[order], abs=0.002)
        assert found.masks is None or numbers[:, 5] == pytest.approx(found.masks.sum((1, 2))[order], rel=0.02, abs=2)
    drawing = io.BytesIO(base64.b64decode(page["drawing"].split(",")[1]))
    changed = np.not_equal(*(np.asarray(Image.open(image).convert("RGB")) for image in (file, drawing))).any(2)
    left, top, right, bottom = found.boxes[0].round().astype(int)
    assert changed[top:bottom, left].mean() > 0.9 and changed[top, left:right].mean() > 0.9 and not changed.all()
    assert found.masks is None or changed[found.masks.any(0)].mean() > 0.95
