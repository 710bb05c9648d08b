"""The comparison on small datasets: equal data for both programs, and rows that are trained once."""

import json
import sys

import numpy as np
import pytest

from research.small_data.datasets import prepare_dataset
from tests.projects_vil.helpers import run_tool

# Stands for the program `yolo`: trains nothing, and predicts the ground truth.
YOLO = """#!{python}
import json, sys, time
from pathlib import Path
options = dict(word.split("=", 1) for word in sys.argv[3:])
folder = Path(options["project"], options.get("name", "predict"))
folder.mkdir(parents=True, exist_ok=True)
print("Starting training")
if sys.argv[2] == "train":
    end = time.process_time() + 0.05 * int(options["epochs"])
    while time.process_time() < end:
        pass
    (folder / "results.csv").write_text("epoch\\n" * (1 + int(options["epochs"])))
elif sys.argv[2] == "val":
    truth = json.loads((Path(options["data"]).parent / "../coco/val.json").read_text())["annotations"]
    (folder / "predictions.json").write_text(json.dumps([one | {{"score": 0.9}} for one in truth]))
"""


def test_coco_and_yolo_files_are_equal(datasets_root, tmp_path):
    prepare_dataset(datasets_root / "shapes", tmp_path, 2)
    for split in ("train", "val"):
        coco = json.loads((tmp_path / f"coco/{split}.json").read_text())
        assert [one["id"] for one in coco["categories"]] == [1, 2] and coco["images"]
        for image in coco["images"]:
            assert (tmp_path / "coco" / image["file_name"]).is_file()
            objects = [one for one in coco["annotations"] if one["image_id"] == image["id"]]
            labels = np.loadtxt(tmp_path / f"yolo/labels/{split}/{image['id']:06d}.txt", ndmin=2)
            assert objects and [one["category_id"] - 1 for one in objects] == labels[:, 0].tolist()
            boxes = labels[:, 1:] * np.tile([image["width"], image["height"]], 2)
            boxes[:, :2] -= boxes[:, 2:] / 2
            np.testing.assert_allclose(boxes, [one["bbox"] for one in objects], atol=1e-6)


def test_rows_are_trained_once_and_for_the_time_of_the_default(datasets_root, tmp_path):
    program, default = tmp_path / "bin/yolo", tmp_path / "out/shapes/default_0/result.json"
    for path in (program, default):
        path.parent.mkdir(parents=True)
    program.write_text(YOLO.format(python=sys.executable))
    program.chmod(0o755)
    values = {"AP": 50.0, "AP50": 80.0, "epochs": 6, "images_per_cpu_second": 3.0, "start_cpu_seconds": 9.0}
    values |= {"cpu_seconds": 2.0, "peak_gb": 1.5, "inference_cpu_ms": 70.0}
    default.write_text(json.dumps(values | {"dataset": "shapes", "row": "default", "seed": 0}))
    words = [datasets_root / "shapes", "--output", tmp_path / "out", "--rows", "default", "yolov8n_320"]
    words = ["../research/small_data/__main__.py", *words, "--ultralytics-python", program.with_name("python")]
    _, table, _ = run_tool(*words)
    best, second = json.loads((tmp_path / "out/table.json").read_text())
    assert best["row"] == "yolov8n_320" and best["AP"] == pytest.approx(100) and second["row"] == "default"
    assert best["epochs"] > 4 and "| yolov8n_320 |" in table
    program.write_text("#!/bin/false")
    assert "| yolov8n_320 |" in run_tool(*words)[1]
