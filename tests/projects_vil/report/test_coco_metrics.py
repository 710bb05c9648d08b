"""Metrics equal the evaluation of the run, and the confusion matrix of synthetic detections is correct."""

import json

import pytest

from projects_vil.report.coco_metrics import confusion_matrix, evaluate_detections
from tests.projects_vil.helpers import message


def test_metrics_equal_the_evaluation_of_the_run(trained_run, datasets_root):
    results = trained_run / "inference/coco_instances_results.json"
    annotations = json.loads((datasets_root / "shapes/annotations/instances_val.json").read_text())
    metrics = evaluate_detections(annotations, results, max_detections=100)
    logged = json.loads((trained_run / "evaluation.json").read_text())["shapes_val"]["bbox"]
    for iou, name in ((None, "AP"), (0.5, "AP50"), (0.75, "AP75")):
        assert 100 * metrics.curve("bbox", iou=iou)[:, 1].mean() == pytest.approx(logged[name])
    for row, category in enumerate(metrics.categories):
        ap = 100 * metrics.curve("bbox", category=row)[:, 1].mean()
        assert ap == pytest.approx(logged["per_class"][category["name"]]["AP"])


def test_confusion_matrix(synthetic_results):
    metrics = evaluate_detections(*synthetic_results, max_detections=100)
    assert [category["name"] for category in metrics.categories] == ["<cat> & co", "dog"]
    assert metrics.num_objects.tolist() == [[1, 1, 0, 0], [2, 2, 0, 0]]
    # With threshold 0.7, two of three detections are true positives, and there are three objects.
    assert (metrics.threshold, metrics.f1) == (0.7, pytest.approx(2 / 3))
    assert confusion_matrix(metrics).tolist() == [[0, 1, 0], [0, 2, 0], [0, 0, 0]]


@pytest.mark.parametrize("category, false_positives", [(7, 0), (3, 1)])
def test_only_detections_of_the_same_class_can_match_a_crowd(synthetic_results, category, false_positives):
    """COCOeval evaluates each category separately, so that a cat in a crowd of dogs is a false positive."""
    annotations, results = synthetic_results
    detections = json.loads(results.read_text())
    detections.append({"image_id": 2, "category_id": category, "bbox": [62, 40, 20, 20], "score": 0.95})
    results.write_text(json.dumps(detections))
    metrics = evaluate_detections(annotations, results, max_detections=100)
    (matches,) = [matches for image, matches in metrics.images if image["id"] == 2]
    assert [found["score"] for found, target in matches if target is None] == [0.95] * false_positives
    assert sum(found is not None for found, _ in matches) == 1 + false_positives
    assert confusion_matrix(metrics)[-1].tolist() == [false_positives, 0, 0]


def test_the_threshold_without_true_positives(synthetic_results):
    annotations, results = synthetic_results
    moved = [item | {"bbox": [0, 60, 5, 5]} for item in json.loads(results.read_text())]
    results.write_text(json.dumps(moved))
    metrics = evaluate_detections(annotations, results, max_detections=100)
    assert (metrics.threshold, metrics.f1) == (0.7, 0.0)
    assert confusion_matrix(metrics).tolist() == [[0, 0, 1], [0, 0, 2], [0, 3, 0]]


ODD = '[{"image_id": 1, "category_id": 7, "bbox": 1, "score": 1}]'
NOT_FINITE = '[{"image_id": 1, "category_id": 7, "bbox": [1, NaN, 3, 4], "score": 1}]'
OTHER = '[{"image_id": 9, "category_id": 7, "bbox": [1, 2, 3, 4], "score": 1}]'


@pytest.mark.parametrize("content", ["[]", "{}", "[1]", "[", ODD, OTHER, NOT_FINITE])
def test_damaged_results_and_results_of_another_dataset(synthetic_results, content):
    annotations, results = synthetic_results
    results.write_text(content)
    assert "results.json" in message(evaluate_detections, annotations, results, max_detections=100)
