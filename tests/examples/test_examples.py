"""The examples import only the packages that they document, and give the detections of the detector."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import pytest
import torch
from PIL import ExifTags, Image
from torch import Tensor

from projects_vil.data import read_image, size_for_testing, to_input
from projects_vil.export import eager_detections, example_image, metadata_path, paste_masks
from tests.projects_vil.export.exporting import config, detector
from tests.projects_vil.helpers import ROOT, run_tool

SCRIPTS = {"onnx": ROOT / "examples/run_onnx.py", "torch_export": ROOT / "examples/run_pt2.py"}
# A model with masks and float32 batches in RGB, and a model with one uint8 image in BGR.
MODELS = {"onnx": ("mask_rcnn", {"batched": True, "dtype": "float32"}), "torch_export": ("retinanet", {})}
COLOR_ORDERS = {"onnx": "RGB", "torch_export": "BGR"}
FORMATS = tuple(SCRIPTS)
REPOSITORY = ("backbones", "projects_vil", "detectron2", "fvcore", "timm")
NOT_NEEDED = {"onnx": (*REPOSITORY, "torch", "torchvision", "PIL"), "torch_export": (*REPOSITORY, "cv2", "onnxruntime")}
# Runs a script in which some packages cannot be imported.
WITHOUT = """
import runpy, sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Because of rounding, height and width are scaled differently.
HEIGHT, WIDTH = 150, 222


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    """Return a JPEG that is stored rotated. With its EXIF orientation it has HEIGHT x WIDTH pixels."""
    path = tmp_path_factory.mktemp("photo") / "photo.jpg"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    upright = Image.fromarray(example_image(HEIGHT, WIDTH, seed=4).permute(1, 2, 0).numpy())
    upright.transpose(Image.Transpose.ROTATE_90).save(path, quality=95, exif=exif)
    return path


@pytest.fixture
def model(file_of, tmp_path):
    """Return the path of a copy by format."""

    def make(file_format: str) -> Path:
        name, options = MODELS[file_format]
        original = file_of(name, file_format, **options)
        (tmp_path / "model").mkdir()
        path = Path(shutil.copy(original, tmp_path / "model"))
        metadata = json.loads(metadata_path(original).read_text())
        metadata["input"]["color_order"] = COLOR_ORDERS[file_format]
        metadata_path(path).write_text(json.dumps(metadata))
        return path

    return make


def run_alone(file_format: str, *args: str | Path) -> list[str]:
    """Return the lines that an example prints if it can import only the packages that it needs."""
    command = [sys.executable, "-c", WITHOUT, ",".join(NOT_NEEDED[file_format]), SCRIPTS[file_format], *args]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def find(file_format: str, photo: Path) -> dict[str, Tensor]:
    """Return the detections in the photo, read as by the test loader. Boxes are in pixels of the photo."""
    name = MODELS[file_format][0]
    pixels = read_image(photo)
    assert pixels.shape[:2] == (HEIGHT, WIDTH)
    height, width = size_for_testing(config(name), HEIGHT, WIDTH)
    found = eager_detections(detector(name), to_input(pixels, (height, width), COLOR_ORDERS[file_format]))
    return found | {"boxes": found["boxes"] * torch.tensor([WIDTH / width, HEIGHT / height] * 2)}


@pytest.mark.slow
@pytest.mark.parametrize("file_format", FORMATS)
def test_an_example_gives_the_detections_of_the_detector(file_format, model, photo, tmp_path):
    path, drawing = model(file_format), tmp_path / "found.png"
    found = find(file_format, photo)
    threshold = found["scores"].median().item() + 1e-3
    lines = run_alone(file_format, path, photo, drawing, "--threshold", threshold)
    chosen = (found["scores"] >= threshold).nonzero()[:, 0]
    assert len(lines) == len(chosen) >= 2 and len(chosen) < len(found["scores"])
    for line, i in zip(lines, chosen, strict=True):
        label, score, *box = line.split()
        assert label == ("circle", "square", "triangle")[found["classes"][i]]
        assert float(score) == pytest.approx(found["scores"][i].item(), abs=0.01)
        assert list(map(float, box)) == pytest.approx(found["boxes"][i].tolist(), abs=0.25)

    before, after = cv2.imread(str(photo)), cv2.imread(str(drawing))
    assert after.shape == before.shape == (HEIGHT, WIDTH, 3)
    changed = torch.from_numpy((after != before).any(2))
    left, top, right, bottom = found["boxes"][chosen[0]].round().int().tolist()
    outline = [changed[top:bottom, left], changed[top, left:right]]
    assert torch.cat(outline).float().mean() > 0.9 and not changed.all()
    if "masks" in found:
        masks = paste_masks(found["masks"][chosen], found["boxes"][chosen], (HEIGHT, WIDTH)).any(0)
        # The example's masks end at whole pixels.
        assert changed[masks].float().mean() > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file_format", "arguments", "changes", "named"),
    [
        # Changed arguments, changed metadata, and text in the error.
        ("onnx", {"model": "absent.onnx"}, {}, "absent.onnx"),
        ("onnx", {"model": "short.onnx"}, {}, "short.onnx"),
        ("onnx", {}, {"format": "openvino"}, ".onnx"),
        ("onnx", {}, {"fixed_detections": 100}, ".onnx"),
        ("onnx", {"photo": "text.jpg"}, {}, "text.jpg"),
        ("onnx", {"output": "photo.jpg"}, {}, "photo.jpg"),
        ("torch_export", {"model": "text.jpg"}, {}, "text.jpg.metadata.json"),
        ("torch_export", {}, {"input": {"size": [96, 128]}}, ".pt2"),
        ("torch_export", {"output": "found.abc"}, {}, "found.abc"),
    ],
)
def test_a_mistake_is_one_line(file_format, arguments, changes, named, model, photo, tmp_path):
    path = model(file_format)
    metadata = json.loads(metadata_path(path).read_text())
    metadata_path(path).write_text(json.dumps(metadata | changes))
    shutil.copy(photo, tmp_path / "photo.jpg")
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "short.onnx").write_bytes(path.read_bytes()[:1000])
    metadata_path(tmp_path / "short.onnx").write_text(json.dumps(metadata))
    names = {"photo": "photo.jpg", "output": "found.png"} | arguments
    files = {"model": path} | {name: tmp_path / file for name, file in names.items()}
    # In this process, which has imported the slow packages.
    error, _, _ = run_tool(SCRIPTS[file_format], *(files[name] for name in ("model", "photo", "output")))
    assert error.startswith("error: ") and named in error and "\n" not in error
