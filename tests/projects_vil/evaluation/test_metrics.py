"""Metric names and TEST.BEST_METRIC."""

import json

import pytest

from backbones import ConfigError
from projects_vil.data import register_datasets
from projects_vil.evaluation import check_metric, split_metric_name
from projects_vil.evaluation.evaluators import metric_names
from tests.projects_vil.helpers import small_config
from tests.projects_vil.panoptic import panoptic_config


@pytest.fixture
def config(request, monkeypatch):
    """A function that returns a config for a detector and a metric, and registers its dataset."""

    def make(detector: str, metric: str):
        root = {"panoptic": "panoptic_root", "semantic_fpn": "sem_seg_root"}.get(detector, "datasets_root")
        monkeypatch.setenv("DETECTRON2_DATASETS", str(request.getfixturevalue(root)))
        keys = ("TEST.BEST_METRIC", metric, "TEST.VALIDATION_LOSS", "True")
        cfg = panoptic_config(*keys) if detector == "panoptic" else small_config(detector, *keys)
        register_datasets(cfg)
        return cfg

    return make


@pytest.mark.parametrize(
    "detector, metric, closest",
    [
        ("retinanet", "bbox/AP-triangel", "'bbox/AP-triangle'"),
        ("mask_rcnn", "segm/APx", "'segm/APs'"),
        ("panoptic", "sem_seg/IoU-backgrund", "'sem_seg/IoU-background'"),
        ("semantic_fpn", "sem_seg/miou", "mIoU"),
        ("retinanet", "validation_loss/total", "validation_loss/total_loss"),
    ],
)
def test_unknown_metrics_raise(config, detector, metric, closest):
    with pytest.raises(ConfigError, match=closest) as caught:
        check_metric(config(detector, metric))
    assert metric in str(caught.value)


@pytest.mark.parametrize(
    ("tests", "metric", "parts"),
    [
        (("one",), "bbox/AP-cup/mug", ("one", "bbox/AP-cup/mug")),
        (("one", "two"), "two/bbox/AP-cup/mug", ("two", "bbox/AP-cup/mug")),
        (("one", "two"), "bbox/AP", ("one", "bbox/AP")),
    ],
)
def test_names_of_datasets_and_classes_may_contain_a_slash(tests, metric, parts):
    cfg = small_config("retinanet", "TEST.BEST_METRIC", metric)
    cfg.defrost()
    cfg.DATASETS.TEST = tests
    assert split_metric_name(cfg) == parts


def test_keypoints_have_no_metric_of_small_objects(config):
    cfg = config("mask_rcnn", "")
    cfg.defrost()
    cfg.MODEL.KEYPOINT_ON = True
    names = metric_names(cfg, "shapes_val")
    assert {"segm/APs", "keypoints/APm"} <= set(names) and "keypoints/APs" not in names
    cfg.MODEL.META_ARCHITECTURE = "RetinaNet"
    assert {name.split("/")[0] for name in metric_names(cfg, "shapes_val")} == {"bbox", "validation_loss"}


def test_names_equal_the_metrics_of_an_evaluation(config, trained_run):
    given = json.loads((trained_run / "evaluation.json").read_text())["shapes_val"]["bbox"]
    names = {f"bbox/{name}" for name in given if name != "per_class"}
    assert names | {"validation_loss/total_loss"} == set(metric_names(config("retinanet", ""), "shapes_val"))
