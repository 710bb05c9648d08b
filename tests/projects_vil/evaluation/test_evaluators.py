"""The evaluators of the dataset types, on the ground truth itself."""

import importlib.util

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from detectron2.data import MetadataCatalog
from detectron2.evaluation import COCOEvaluator, PascalVOCDetectionEvaluator, SemSegEvaluator
from detectron2.structures import Boxes, BoxMode, Instances

from backbones import ConfigError
from projects_vil.data import IGNORED_LABEL, build_test_loader, label_reader, load_dataset, register_datasets
from projects_vil.evaluation import build_evaluator
from projects_vil.evaluation.evaluators import metric_names
from tests.projects_vil.helpers import small_config
from tests.projects_vil.panoptic import VAL, panoptic_config


def evaluate(cfg, folder, *, num_wrong: int = 0) -> dict:
    """The metrics of predictions that equal the ground truth, below ``num_wrong`` confident wrong ones."""
    evaluator = build_evaluator(cfg, "shapes_val", str(folder))
    assert isinstance(evaluator, COCOEvaluator)
    truth = {record["image_id"]: record for record in load_dataset(cfg, ["shapes_val"], train=False)}
    evaluator.reset()
    for inputs in build_test_loader(cfg, "shapes_val"):
        record = truth[inputs[0]["image_id"]]
        annotations = record["annotations"]
        boxes = [BoxMode.convert(a["bbox"], a["bbox_mode"], BoxMode.XYXY_ABS) for a in annotations]
        instances = Instances((record["height"], record["width"]))
        instances.pred_boxes = Boxes([[0.0, 0.0, 1.0, 1.0]] * num_wrong + boxes)
        instances.scores = torch.tensor([0.9] * num_wrong + [0.5] * len(boxes))
        instances.pred_classes = torch.tensor([0] * num_wrong + [a["category_id"] for a in annotations])
        evaluator.process(inputs, [{"instances": instances}])
    return evaluator.evaluate()["bbox"]


def test_perfect_predictions_on_a_coco_dataset(shapes, tmp_path):
    metrics = evaluate(small_config(), tmp_path)
    assert metrics["AP"] == metrics["AP-triangle"] == pytest.approx(100)
    assert (tmp_path / "coco_instances_results.json").is_file()


def test_stuff_is_evaluated_for_panoptic_models(panoptic_root, tmp_path, monkeypatch):
    """A Mask R-CNN on the same dataset is evaluated on things alone."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(panoptic_root))
    register_datasets(panoptic_config())
    assert isinstance(build_evaluator(small_config("mask_rcnn"), VAL, str(tmp_path)), COCOEvaluator)
    both = build_evaluator(panoptic_config(), VAL, str(tmp_path))
    assert list(map(type, both._evaluators)) == [COCOEvaluator, SemSegEvaluator]


@pytest.mark.parametrize("limit, found", [("100", False), ("200", True)])
def test_number_of_detections_arrives(shapes, tmp_path, limit, found):
    cfg = small_config("retinanet", "TEST.DETECTIONS_PER_IMAGE", limit)
    assert (evaluate(cfg, tmp_path, num_wrong=150)["AP-circle"] > 0) == found


def evaluate_labels(folder, predict) -> dict:
    """The metrics of ``predict``, from labels (H, W), where 255 is ignored, to predicted classes (H, W)."""
    name, cfg = "shapes_sem_seg_val", small_config("semantic_fpn")
    evaluator = build_evaluator(cfg, name, str(folder))
    assert isinstance(evaluator, SemSegEvaluator)
    evaluator.reset()
    read = label_reader(name)
    files = {record["file_name"]: record["sem_seg_file_name"] for record in load_dataset(cfg, [name], train=False)}
    for inputs in build_test_loader(cfg, name):
        labels = predict(read(files[inputs[0]["file_name"]], dtype=int))
        logits = F.one_hot(torch.from_numpy(labels), 4).permute(2, 0, 1)
        evaluator.process(inputs, [{"sem_seg": logits}])
    return evaluator.evaluate()["sem_seg"]


def test_perfect_labels(shapes_sem_seg, tmp_path):
    metrics = evaluate_labels(tmp_path, lambda labels: np.where(labels == IGNORED_LABEL, 3, labels))
    assert metrics["mIoU"] == metrics["pACC"] == metrics["IoU-triangle"] == pytest.approx(100)
    of_all, of_classes = metric_names(small_config("semantic_fpn"), "shapes_sem_seg_val", "sem_seg")
    assert metrics.keys() == {*of_all, *of_classes}
    assert (tmp_path / "sem_seg_predictions.json").is_file()


@pytest.mark.parametrize("index, name", [(0, "background"), (2, "square")])
def test_one_class_everywhere(shapes_sem_seg, tmp_path, index, name):
    read = label_reader("shapes_sem_seg_val")
    files = (shapes_sem_seg / "annotations/validation").iterdir()
    counts = sum(np.bincount(read(file).ravel(), minlength=256) for file in files)[:4]
    metrics = evaluate_labels(tmp_path, lambda labels: np.full_like(labels, index))
    share = 100 * counts[index] / counts.sum()
    assert metrics[f"IoU-{name}"] == metrics["pACC"] == pytest.approx(share)
    assert metrics["mIoU"] == pytest.approx(share / 4)


def test_pascal_voc(tmp_path):
    name = "evaluation_test_voc"
    MetadataCatalog.get(name).set(
        evaluator_type="pascal_voc", dirname=str(tmp_path), split="val", year=2007, thing_classes=["circle"]
    )
    try:
        assert isinstance(build_evaluator(small_config(), name, ""), PascalVOCDetectionEvaluator)
    finally:
        MetadataCatalog.remove(name)


@pytest.mark.parametrize("evaluator_type", ["cityscapes_instance", None])
def test_other_types_of_datasets(tmp_path, evaluator_type):
    name = "evaluation_test_other"
    MetadataCatalog.get(name).set(**{} if evaluator_type is None else {"evaluator_type": evaluator_type})
    try:
        with pytest.raises(ConfigError, match=name):
            build_evaluator(small_config(), name, "")
    finally:
        MetadataCatalog.remove(name)


def _near(box, generator):
    """A box (left, top, width, height) with each side moved by up to a quarter."""
    return [value + size * float(generator.uniform(-0.25, 0.25)) for value, size in zip(box, box[2:] * 2, strict=True)]


@pytest.mark.parametrize("limit", ["100", "200"])
def test_faster_coco_eval_has_the_numbers_of_pycocotools(shapes, tmp_path, limit):
    pytest.importorskip("faster_coco_eval")
    results = {}
    for api in ("pycocotools", "faster_coco_eval"):
        cfg = small_config("mask_rcnn", "TEST.COCO_API", api, "TEST.DETECTIONS_PER_IMAGE", limit)
        generator = np.random.default_rng(0)
        evaluator = build_evaluator(cfg, "shapes_val", str(tmp_path / api))
        evaluator.reset()
        for record in load_dataset(cfg, ["shapes_val"], train=False):
            instances = Instances((record["height"], record["width"]))
            annotations = record["annotations"] * 40
            boxes = [_near(a["bbox"], generator) for a in annotations]
            instances.pred_boxes = Boxes([[x, y, x + width, y + height] for x, y, width, height in boxes])
            instances.scores = torch.from_numpy(generator.random(len(boxes)).round(2))
            instances.pred_classes = torch.tensor([a["category_id"] for a in annotations])
            masks = torch.zeros(len(boxes), record["height"], record["width"], dtype=torch.bool)
            for mask, (x, y, width, height) in zip(masks, boxes, strict=True):
                mask[max(int(y), 0) : int(y + height) + 1, max(int(x), 0) : int(x + width) + 1] = True
            instances.pred_masks = masks
            evaluator.process([record], [{"instances": instances}])
        results[api] = evaluator.evaluate()
    first, second = results.values()
    assert first.keys() == second.keys() == {"bbox", "segm"}
    for task, metrics in first.items():
        assert metrics == pytest.approx(second[task], abs=1e-9, nan_ok=True)
    files = [(tmp_path / api / "coco_instances_results.json").read_text() for api in results]
    assert files[0] == files[1]


def test_a_coco_api_that_is_none_or_not_installed(shapes):
    with pytest.raises(ConfigError, match="TEST.COCO_API"):
        build_evaluator(small_config("retinanet", "TEST.COCO_API", "pycoco"), "shapes_val", "")
    if importlib.util.find_spec("faster_coco_eval") is None:
        with pytest.raises(ConfigError, match="faster_coco_eval"):
            build_evaluator(small_config("retinanet", "TEST.COCO_API", "faster_coco_eval"), "shapes_val", "")
