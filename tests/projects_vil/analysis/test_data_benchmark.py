"""Synthetic COCO annotations pass the check, and both libraries have the same metrics on them."""

import numpy as np
import pytest

from projects_vil.analysis import compare_coco_apis
from projects_vil.analysis.data_benchmark import NUM_OBJECTS, write_annotations, write_images
from projects_vil.data import CocoFile


def test_synthetic_annotations_pass_the_check(tmp_path):
    write_annotations(tmp_path / "annotations.json", np.random.default_rng(0), 20)
    write_images(tmp_path / "images", 20)
    file = CocoFile(tmp_path / "annotations.json", tmp_path / "images", pixels=True)
    assert len(file.images) == 20 and len(file.annotations) == 20 * NUM_OBJECTS and file.masks
    assert not file.findings("error", "fixed")


def test_both_apis_have_the_same_metrics():
    pytest.importorskip("faster_coco_eval")
    metrics = compare_coco_apis(num_images=6, num_detections=20)["metrics"]
    first, second = metrics["pycocotools"], metrics["faster_coco_eval"]
    assert first == pytest.approx(second, abs=1e-9, nan_ok=True) and first["AP"] > 10
