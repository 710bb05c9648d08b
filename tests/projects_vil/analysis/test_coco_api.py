"""Both APIs on drawn boxes: timed apart, and of one mind."""

import pytest
from detectron2.data import DatasetCatalog

from projects_vil.analysis import compare_coco_apis


def test_both_apis_have_the_same_metrics():
    pytest.importorskip("faster_coco_eval")
    before = DatasetCatalog.list()
    seconds, metrics = compare_coco_apis(num_images=6, num_detections=20, runs=1)
    assert min(seconds.values()) > 0 and DatasetCatalog.list() == before
    first, second = (metrics[api] for api in ("pycocotools", "faster_coco_eval"))
    assert first == pytest.approx(second, abs=1e-9, nan_ok=True) and first["AP"] > 10
