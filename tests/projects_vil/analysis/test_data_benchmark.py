"""Synthetic COCO annotations are sound, both libraries have the same metrics on them, and the check accepts them."""

import numpy as np
import pytest
from detectron2.data import DatasetCatalog

from projects_vil.analysis import compare_coco_apis, time_dataset_check
from projects_vil.analysis.data_benchmark import NUM_OBJECTS, sample_objects, write_annotations, write_images
from projects_vil.data import CocoFile
from tests.projects_vil.helpers import ROOT


def test_synthetic_annotations_are_sound(tmp_path):
    generator = np.random.default_rng(0)
    write_annotations(tmp_path / "annotations.json", *sample_objects(generator, 20), masks=True)
    write_images(tmp_path / "images", generator, 20)
    file = CocoFile(tmp_path / "annotations.json", tmp_path / "images", pixels=True)
    assert len(file.images) == 20 and len(file.annotations) == 20 * NUM_OBJECTS and file.masks
    assert not file.findings("error", "fixed")


def test_both_apis_have_the_same_metrics():
    pytest.importorskip("faster_coco_eval")
    before = DatasetCatalog.list()
    _, metrics = compare_coco_apis(num_images=6, num_detections=20, runs=1)
    first, second = (metrics[api] for api in ("pycocotools", "faster_coco_eval"))
    assert first == pytest.approx(second, abs=1e-9, nan_ok=True) and first["AP"] > 10
    assert DatasetCatalog.list() == before


@pytest.mark.slow
def test_the_check_of_synthetic_annotations():
    cost = time_dataset_check(ROOT / "tools/check_dataset.py", num_images=20)
    assert cost.file_size > 20 * NUM_OBJECTS * 100 and cost.seconds > 0
