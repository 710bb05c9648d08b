"""The page of examples/web in headless Chromium: it shows the detector's detections, and sends nothing anywhere."""

import base64
import functools
import http.server
import io
import json
import shutil
import subprocess
import threading

import numpy as np
import pytest
from PIL import ExifTags, Image

from projects_vil import Detector
from projects_vil.export import example_image, metadata_path
from tests.projects_vil.helpers import ROOT

WEB = ROOT / "examples/web"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(not (WEB / "node_modules").exists(), reason="run npm install in examples/web"),
]
# Opens a page, gives it files (["input" or "drop", file, ...]), and prints what it shows after each.
DRIVER = """
import { chromium } from "playwright-core";
const { url, steps, executablePath } = JSON.parse(process.argv[1]);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const page = await browser.newPage(), requests = [], shown = [];
page.on("request", (request) => requests.push(`${request.method()} ${request.url()}`));
async function look() {
  await page.waitForFunction(() => /^error| s$|^Drop/.test(document.getElementById("status").textContent));
  await page.fill("#threshold", "0.01");
  const drawing = await page.evaluate(() => document.getElementById("drawing").toDataURL());
  shown.push({ status: await page.textContent("#status"), found: await page.textContent("#found"), drawing });
}
await page.goto(url);
await look();
for (const [how, ...files] of steps) {
  await page.evaluate((how) => {
    document.getElementById("status").textContent = "";
    addEventListener("change", (event) => {
      if (how === "input") return;
      event.stopImmediatePropagation();
      const dataTransfer = new DataTransfer();
      for (const file of event.target.files) dataTransfer.items.add(file);
      dispatchEvent(new DragEvent("drop", { dataTransfer }));
    }, { capture: true, once: true });
  }, how);
  await page.setInputFiles("#files", files);
  await look();
}
const send = (url) => fetch(url, { mode: "no-cors" }).then(() => true, () => false);
const sent = await page.evaluate(send, url.replace("127.0.0.1", "localhost"));
console.log(JSON.stringify({ shown, requests, sent }));
await browser.close();
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the page, for a server."""
    for file in WEB.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def visit(folder, query: str = "", *steps) -> list[dict]:
    """Open the page with files, as ``DRIVER`` says, and return what it shows first, and after each step."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    handler.func.log_message = lambda *args: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        steps = [[how, *map(str, files)] for how, *files in steps]
        arguments = json.dumps({"url": f"{url}index.html{query}", "steps": steps, "executablePath": CHROMIUM})
        command = ["node", "--input-type=module", "-e", DRIVER, arguments]
        result = subprocess.run(command, cwd=WEB, capture_output=True, text=True, timeout=300, check=False)
        server.shutdown()
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert all(request.startswith((f"GET {url}", "GET data:", "GET blob:")) for request in answer["requests"])
    assert answer["sent"] is False
    return answer["shown"]


def photo(path, height: int, width: int, *, turned: bool = False):
    """An image file, upright only by its EXIF orientation if ``turned``."""
    exif, image = Image.Exif(), Image.fromarray(example_image(height, width, seed=4).permute(1, 2, 0).numpy())
    if turned:
        exif[ExifTags.Base.Orientation] = 6
        image = image.transpose(Image.Transpose.ROTATE_90)
    image.save(path, quality=95, exif=exif)
    return path


@pytest.mark.parametrize(
    ("name", "options", "color_order"),
    [("mask_rcnn", {}, "BGR"), ("retinanet", {"batched": True, "dtype": "float32", "fixed_number": 100}, "RGB")],
)
def test_the_page_shows_the_detections_of_the_detector(name, options, color_order, file_of, folder):
    original = file_of(name, "onnx", **options)
    shutil.copy(original, folder / "model.onnx")
    metadata = json.loads(metadata_path(original).read_text())
    metadata["input"]["color_order"] = color_order
    metadata_path(folder / "model.onnx").write_text(json.dumps(metadata))
    files = [
        photo(folder / "turned.jpg", 150, 222, turned=True),
        photo(folder / "large.png", 701, 480),
        photo(folder / "small.png", 50, 61),
    ]
    shown = visit(folder, "?model=model.onnx&photo=turned.jpg", ("input", files[1]), ("drop", files[2]))
    detector = Detector.load(folder / "model.onnx")
    for file, page in zip(files, shown, strict=True):
        found, lines = detector(file), [line.split("\t") for line in page["found"].splitlines()]
        assert len(lines) == len(found) > 3
        numbers = np.array([line[1:] for line in lines], float)
        # Those of nearly equal scores may come in another order.
        distances = np.abs(numbers[:, None, 1:5] - found.boxes).max(2)
        distances += 1000 * (np.array([line[:1] for line in lines]) != found.names)
        order = distances.argmin(1)
        assert len(set(order)) == len(lines) and distances.min(1).max() < 0.1
        assert numbers[:, 0] == pytest.approx(found.scores[order], abs=0.002)
        if found.masks is not None:
            assert numbers[:, 5] == pytest.approx(found.masks.sum((1, 2))[order], rel=0.02, abs=2)

    pixels = [Image.open(files[1]), Image.open(io.BytesIO(base64.b64decode(shown[1]["drawing"].split(",")[1])))]
    changed = np.not_equal(*(np.asarray(image.convert("RGB")) for image in pixels)).any(2)
    found = detector(files[1])
    left, top, right, bottom = found.boxes[0].round().astype(int)
    assert changed[top:bottom, left].mean() > 0.9 and changed[top, left:right].mean() > 0.9 and not changed.all()
    assert found.masks is None or changed[found.masks.any(0)].mean() > 0.95


def test_mistakes_are_named_and_other_files_go_on(file_of, folder):
    model = shutil.copy(file_of("retinanet", "onnx"), folder / "model.onnx")
    metadata = metadata_path(model)
    shutil.copy(metadata_path(file_of("retinanet", "onnx")), metadata)
    other = folder / "other.json"
    other.write_text(json.dumps(json.loads(metadata.read_text()) | {"format": "openvino"}))
    (folder / "text.jpg").write_text("no image")
    good = photo(folder / "small.png", 50, 61)
    steps = [("input", model), ("drop", model, other), ("input", model, metadata), ("drop", folder / "text.jpg")]
    shown = visit(folder, "", *steps, ("input", good))
    starts = [
        "Drop model",
        "error: drop model",
        "error: this page runs ONNX",
        "Drop a photo",
        "error: text.jpg",
        "RetinaNet",
    ]
    for page, start in zip(shown, starts, strict=True):
        assert page["status"].startswith(start)
    assert shown[-1]["found"] and not shown[-2]["found"]
    assert visit(folder, "?model=absent.onnx")[0]["status"].startswith("error: absent.onnx: 404")
