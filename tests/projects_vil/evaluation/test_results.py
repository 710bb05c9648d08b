"""evaluation.json, and explanations of metrics."""

import json
import math

import pytest
from detectron2.data import MetadataCatalog

from projects_vil.evaluation import explain_results, write_results
from tests.projects_vil.helpers import small_config


def test_results_of_two_datasets_and_per_class(tmp_path):
    cfg = small_config("retinanet", "OUTPUT_DIR", str(tmp_path), "DATASETS.TEST", "('a', 'b')")
    metrics = {"AP": 1.5, "AP-big dog": 3.0, "AP-cat": float("nan")}
    labels = {"mIoU": 2.0, "IoU-road": 2.0, "ACC-road": 7.0}
    write_results(cfg, {"a": {"bbox": metrics, "sem_seg": labels}, "b": {"bbox": {"AP": float("nan"), "AP50": 2}}})
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert content["a"]["bbox"].pop("per_class") == {"big dog": {"AP": 3.0}, "cat": {"AP": None}}
    assert content["a"]["bbox"] == {"AP": 1.5, "AP-big dog": 3.0, "AP-cat": None}
    assert content["a"]["sem_seg"]["per_class"] == {"road": {"IoU": 2.0, "ACC": 7.0}}
    assert content["b"] == {"bbox": {"AP": None, "AP50": 2}}


@pytest.mark.parametrize(("classes", "ap", "expected"), [(["dog"], 4.5, 4.5), (["dog", "cat"], float("nan"), None)])
def test_classes_that_detectron2_omits(tmp_path, classes, ap, expected):
    name = f"left_out_{len(classes)}"
    MetadataCatalog.get(name).thing_classes = classes
    cfg = small_config("retinanet", "OUTPUT_DIR", str(tmp_path), "DATASETS.TEST", f"('{name}',)")
    write_results(cfg, {"bbox": {"AP": ap}})
    per_class = json.loads((tmp_path / "evaluation.json").read_text())[name]["bbox"]["per_class"]
    assert per_class == {each: {"AP": expected} for each in classes}


NAN = float("nan")
GOOD = {"AP": 30.0, "AP50": 50.0, "AP75": 31.0, "APs": 10.0, "APm": 20.0, "APl": 40.0}


@pytest.mark.parametrize(
    ("task", "metrics", "named"),
    [
        ("bbox", GOOD | {"APl": NAN}, ["APl is"]),
        ("bbox", GOOD | {"AP-dog": 1.0, "AP-cat": NAN}, ["cat"]),
        ("bbox", GOOD | {"AP": 0.0}, ["0.000"]),
        ("bbox", GOOD | {"AP": NAN, "AP50": NAN, "APs": NAN}, ["AP"]),
        ("segm", GOOD | {f"AP-class {number}": NAN for number in range(60)}, ["AP-class 4", "55 more"]),
        ("sem_seg", {"mIoU": 3.0, "IoU-road": 4.0, "IoU-sky": NAN}, ["IoU-sky"]),
    ],
)
def test_each_undefined_or_low_metric_is_explained_in_a_line(task, metrics, named):
    (line,) = explain_results({task: metrics, "other": {"mIoU": 40.0, "IoU-road": 80.0}})
    assert line.startswith(f"{task}: ") and all(text in line for text in named)
    assert ("undefined (nan, or -1 in COCO's table): no ground truth" in line) == any(map(math.isnan, metrics.values()))
