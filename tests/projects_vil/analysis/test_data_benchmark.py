"""Synthetic COCO annotations pass the check, and both libraries have the same metrics on them."""

import numpy as np
import pytest

from backbones import ConfigError
from projects_vil.analysis import compare_coco_apis, format_predictions, measure_predictions
from projects_vil.analysis.data_benchmark import NUM_OBJECTS, write_annotations, write_images
from projects_vil.data import CocoFile
from tests.projects_vil.inference.helpers import save_run


def test_synthetic_annotations_pass_the_check(tmp_path):
    write_annotations(tmp_path / "annotations.json", np.random.default_rng(0), 20)
    write_images(tmp_path / "images", 20)
    file = CocoFile(tmp_path / "annotations.json", tmp_path / "images", pixels=True)
    assert len(file.images) == 20 and len(file.annotations) == 20 * NUM_OBJECTS and file.masks
    assert not file.findings("error", "fixed")


@pytest.mark.slow
def test_both_apis_have_the_same_metrics():
    pytest.importorskip("faster_coco_eval")
    metrics = compare_coco_apis(num_images=6, num_detections=20)["metrics"]
    first, second = metrics["pycocotools"], metrics["faster_coco_eval"]
    assert first == pytest.approx(second, abs=1e-9, nan_ok=True) and first["AP"] > 10


@pytest.mark.slow
def test_ways_of_predicting_are_measured(tmp_path, short_ray_folder):
    pytest.importorskip("pyarrow")
    save_run(tmp_path, "retinanet")
    rows = measure_predictions(str(tmp_path), num_images=60, batch_size=4, runs=1, overrides=["SEED", "1"])
    names = [row["name"] for row in rows]
    assert names[:3] == ["one image at a time", "batches of 4", "batches of 4, bfloat16"] and len(set(names)) >= 4
    # On a busy machine the start of a way may take longer with few images than with all.
    assert any(row["images_per_second"] for row in rows) and all(row["memory"] > 1e7 for row in rows)
    assert all(name in format_predictions(rows) for name in names)
    with pytest.raises(ConfigError, match="does not exist"):
        measure_predictions(str(tmp_path / "none"), num_images=10, batch_size=1, runs=1)
