"""The evaluators of each dataset type, with the ground truth as predictions."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import PascalVOCDetectionEvaluator, SemSegEvaluator
from detectron2.structures import Boxes, BoxMode, Instances

from projects_vil import register_datasets
from projects_vil.data import IGNORED_LABEL, build_test_loader, label_reader, load_dataset, read_datasets
from projects_vil.engine.checks import check_setup
from projects_vil.evaluation import build_evaluator
from projects_vil.evaluation.evaluators import COCOEvaluator, metric_names
from tests.projects_vil.helpers import message, small_config
from tests.projects_vil.panoptic import VAL, panoptic_config


def evaluate(cfg, folder, predict, *, name: str = "shapes_val") -> dict:
    """Return the metrics. ``predict`` maps a record to boxes (N, 4), scores (N,), classes (N,) and optionally masks."""
    evaluator = build_evaluator(cfg, name, str(folder))
    evaluator.reset()
    for record in load_dataset(cfg, [name], train=False):
        instances = Instances((record["height"], record["width"]))
        boxes, instances.scores, instances.pred_classes, *masks = predict(record)
        instances.pred_boxes = Boxes(boxes)
        if masks:
            instances.pred_masks = masks[0]
        evaluator.process([record], [{"instances": instances}])
    return evaluator.evaluate()


@pytest.mark.parametrize("limit, num_wrong", [(100, 0), (2, 0), (100, 150), (200, 150)])
def test_perfect_predictions_below_wrong_ones(shapes, tmp_path, caplog, limit, num_wrong):
    def predict(record):
        objects = record["annotations"]
        boxes = [BoxMode.convert(one["bbox"], one["bbox_mode"], BoxMode.XYXY_ABS) for one in objects]
        classes = torch.tensor([0] * num_wrong + [one["category_id"] for one in objects])
        scores = torch.tensor([0.9] * num_wrong + [0.5] * len(boxes))
        return [[0.0, 0.0, 1.0, 1.0]] * num_wrong + boxes, scores, classes

    cfg = small_config("retinanet", "TEST.DETECTIONS_PER_IMAGE", str(limit))
    metrics = evaluate(cfg, tmp_path, predict)["bbox"]
    assert ("TEST.DETECTIONS_PER_IMAGE is 2, so recall can be at most" in caplog.text) == (limit == 2)
    if not num_wrong and limit == 100:
        assert metrics["AP"] == metrics["AP-triangle"] == pytest.approx(100)
    assert (metrics["AP-circle"] > 0) == (limit > num_wrong)
    assert (tmp_path / "coco_instances_results.json").is_file()


def test_the_ap_without_detections_is_zero(shapes, tmp_path, caplog):
    cfg = small_config("mask_rcnn")
    results = evaluate(cfg, tmp_path, lambda _: ([], torch.zeros(0), torch.zeros(0, dtype=int)))
    assert results["segm"]["AP"] == results["bbox"]["AP-triangle"] == 0 and "no detections. Train longer" in caplog.text


@pytest.mark.parametrize("classes", ["triangle circle square", "triangle circle", "circle square", "circle Square"])
def test_classes_of_a_validation_file_are_matched_by_name(shapes, tmp_path, request, classes):
    """The ids may have another order than in the training file, and classes may be missing."""
    dataset = json.loads((shapes / "annotations/instances_val.json").read_text())
    names = {one["id"]: one["name"] for one in dataset["categories"]}
    ids = {label: number for number, label in enumerate(classes.split(), start=7)}
    dataset["categories"] = [{"id": number, "name": label} for label, number in ids.items()]
    objects = [one for one in dataset["annotations"] if names[one["category_id"]] in ids]
    dataset["annotations"] = [one | {"category_id": ids[names[one["category_id"]]]} for one in objects]
    (tmp_path / "val.json").write_text(json.dumps(dataset))
    own = ["DATASETS.COCO", repr([["own", str(tmp_path / "val.json"), str(shapes / "val")]])]
    cfg = small_config("retinanet", *own, "DATASETS.TEST", "('own',)")
    request.addfinalizer(lambda: (DatasetCatalog.remove("own"), MetadataCatalog.remove("own")))
    if "Square" in classes:
        for check in (check_setup, read_datasets):
            text = message(check, cfg)
            assert all(part in text for part in ("'own'", "'Square'", "'shapes_train'", "Did you mean 'square'?"))
        return
    check_setup(cfg)
    truth = {record["image_id"]: record for record in load_dataset(cfg, ["shapes_val"], train=False)}

    def predict(record):
        objects = truth[record["image_id"]]["annotations"]
        boxes = [BoxMode.convert(one["bbox"], one["bbox_mode"], BoxMode.XYXY_ABS) for one in objects]
        return boxes, torch.full([len(boxes)], 0.5), torch.tensor([one["category_id"] for one in objects])

    metrics = evaluate(cfg, tmp_path / "out", predict, name="own")["bbox"]
    names = ["AP", *(f"AP-{label}" for label in ids)]
    assert [metrics[name] for name in names] == pytest.approx([100] * len(names))
    results = json.loads((tmp_path / "out/coco_instances_results.json").read_text())
    found = Counter((one["image_id"], one["category_id"]) for one in results)
    assert found == Counter((one["image_id"], one["category_id"]) for one in dataset["annotations"])


def test_stuff_is_evaluated_for_panoptic_models(panoptic_root, tmp_path, monkeypatch):
    """For Mask R-CNN on the same dataset, only things are evaluated."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(panoptic_root))
    register_datasets(panoptic_config())
    stuff = (panoptic_config(), [COCOEvaluator, SemSegEvaluator])
    for cfg, types in ((small_config("mask_rcnn"), [COCOEvaluator]), stuff):
        assert list(map(type, build_evaluator(cfg, VAL, str(tmp_path))._evaluators)) == types


@pytest.mark.parametrize("index, name", [(None, "triangle"), (0, "background"), (2, "square")])
def test_perfect_and_constant_labels(shapes_sem_seg, tmp_path, index, name):
    dataset, cfg = "shapes_sem_seg_val", small_config("semantic_fpn")
    evaluator, read, counts = build_evaluator(cfg, dataset, str(tmp_path)), label_reader(dataset), np.zeros(256)
    evaluator.reset()
    files = {one["file_name"]: one["sem_seg_file_name"] for one in load_dataset(cfg, [dataset], train=False)}
    for inputs in build_test_loader(cfg, dataset):
        labels = read(files[inputs[0]["file_name"]], dtype=int)
        counts += np.bincount(labels.ravel(), minlength=256)
        predicted = np.where(labels == IGNORED_LABEL, 3, labels) if index is None else np.full_like(labels, index)
        evaluator.process(inputs, [{"sem_seg": F.one_hot(torch.from_numpy(predicted), 4).permute(2, 0, 1)}])
    metrics = evaluator.evaluate()["sem_seg"]
    assert {f"sem_seg/{name}" for name in metrics} | {"validation_loss/total_loss"} == set(metric_names(cfg, dataset))
    written = json.loads((tmp_path / "sem_seg_predictions.json").read_text())
    assert {one["category_id"] for one in written} == ({1, 2, 3, 4} if index is None else {index + 1})
    share = 100 if index is None else 100 * counts[index] / counts[:4].sum()
    assert metrics[f"IoU-{name}"] == metrics["pACC"] == pytest.approx(share)
    assert metrics["mIoU"] == pytest.approx(share if index is None else share / 4)


@pytest.mark.parametrize("evaluator_type", ["pascal_voc", "cityscapes_instance", None])
def test_other_dataset_types(tmp_path, evaluator_type):
    name, facts = "evaluation_test_other", {"dirname": str(tmp_path), "split": "val", "year": 2007}
    MetadataCatalog.get(name).set(evaluator_type=evaluator_type, thing_classes=["circle"], **facts)
    cfg = small_config("retinanet", "MODEL.RETINANET.NUM_CLASSES", "1")
    try:
        if evaluator_type == "pascal_voc":
            assert isinstance(build_evaluator(cfg, name, "")._evaluators[0], PascalVOCDetectionEvaluator)
        else:
            assert name in message(build_evaluator, cfg, name, "")
    finally:
        MetadataCatalog.remove(name)


@pytest.mark.parametrize("kind", ["coco", "pascal_voc"])
def test_non_finite_detections(shapes, tmp_path, request, kind):
    name, facts = "shapes_val", {"dirname": str(tmp_path), "split": "val", "year": 2007}
    if kind == "pascal_voc":
        name = "evaluation_test_other"
        MetadataCatalog.get(name).set(evaluator_type=kind, thing_classes=["circle", "square", "triangle"], **facts)
        request.addfinalizer(lambda: MetadataCatalog.remove(name))
    cfg = small_config("retinanet")
    for box, score in (([0, math.nan, 8, 8], 0.5), ([0, 0, math.inf, 8], 0.5), ([0, 0, 8, 8], math.nan)):
        instances = Instances((64, 64), pred_boxes=Boxes(torch.tensor([[0.0, 0, 9, 9], box])))
        instances.scores, instances.pred_classes = torch.tensor([0.9, score]), torch.tensor([0, 1])
        evaluator = build_evaluator(cfg, name, str(tmp_path))
        evaluator.reset()
        inputs = [{"file_name": "a.jpg", "image_id": 1}]
        assert "a.jpg" in message(evaluator.process, inputs, [{"instances": instances}])
