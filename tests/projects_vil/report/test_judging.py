"""Judging: equal to what the evaluation of a run says, and to what can be counted by hand."""

import json

import numpy as np
import pytest

from backbones import InputError
from projects_vil.report.judging import confusions, judge


def test_figures_equal_those_of_the_run(trained_run, datasets_root):
    annotations = datasets_root / "shapes/annotations/instances_val.json"
    judged = judge(annotations, trained_run / "inference/coco_instances_results.json", max_detections=100)
    written = json.loads((trained_run / "evaluation.json").read_text())["shapes_val"]["bbox"]
    precision = judged.by_task["bbox"]
    assert [precision.ap(), precision.ap(iou=0.5), precision.ap(iou=0.75), precision.ap(size=1)] == pytest.approx(
        [written[name] for name in ("AP", "AP50", "AP75", "APs")]
    )
    assert np.isnan(precision.ap(size=3)) and written["APl"] is None
    classes = [precision.class_ap(row) for row in range(3)]
    assert classes == pytest.approx([written["per_class"][name]["AP"] for name in judged.classes])
    assert sum(judged.objects_by_class) == sum(judged.objects_by_size.values())


def test_confusions_by_hand(findings):
    judged = judge(*findings, max_detections=100)
    assert judged.classes == ["<cat> & co", "dog"] and judged.objects_by_class == [1, 2]
    # Two of three found objects are right at 0.7: precision 2/3, recall 2/3.
    assert (judged.threshold, judged.f1) == (0.7, pytest.approx(2 / 3))
    assert confusions(judged).tolist() == [[0, 1, 0], [0, 2, 0], [0, 0, 0]]
    assert judged.images[1].in_crowd.tolist() == [False, True, False]


def test_where_nothing_hits_as_many_detections_count_as_there_are_objects(findings):
    annotations, results = findings
    found = [item | {"bbox": [0, 60, 5, 5]} for item in json.loads(results.read_text())]
    results.write_text(json.dumps(found))
    judged = judge(annotations, results, max_detections=100)
    assert (judged.threshold, judged.f1) == (0.7, 0.0)
    assert confusions(judged).tolist() == [[0, 0, 1], [0, 0, 2], [0, 3, 0]]


ODD = '[{"image_id": 9, "category_id": 7, "bbox": 1, "score": 1}]'


@pytest.mark.parametrize("content", ["[]", "{}", "[1]", "[", ODD])
def test_results_that_are_none_are_named(findings, content):
    annotations, results = findings
    results.write_text(content)
    with pytest.raises(InputError, match="results.json"):
        judge(annotations, results, max_detections=100)


def test_results_of_other_images_are_named(findings):
    annotations, results = findings
    results.write_text(results.read_text().replace('"image_id": 2', '"image_id": 5'))
    with pytest.raises(InputError, match="do not belong together"):
        judge(annotations, results, max_detections=100)
