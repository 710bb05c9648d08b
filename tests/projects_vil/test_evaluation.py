"""The evaluator that a dataset asks for, judging ground truth itself."""

import pytest
import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation import COCOEvaluator, PascalVOCDetectionEvaluator
from detectron2.structures import Boxes, BoxMode, Instances

from backbones import InputError
from projects_vil.data import build_test_loader, load_dataset
from projects_vil.evaluation import build_evaluator
from tests.projects_vil.helpers import small_config


def judge(cfg, folder, *, num_wrong: int = 0) -> dict:
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
    metrics = judge(small_config(), tmp_path)
    assert metrics["AP"] == metrics["AP-triangle"] == pytest.approx(100)
    assert (tmp_path / "coco_instances_results.json").is_file()


@pytest.mark.parametrize("limit, found", [("100", False), ("200", True)])
def test_number_of_detections_arrives(shapes, tmp_path, limit, found):
    cfg = small_config("retinanet", "TEST.DETECTIONS_PER_IMAGE", limit)
    assert (judge(cfg, tmp_path, num_wrong=150)["AP-circle"] > 0) == found


def test_pascal_voc(tmp_path):
    name = "evaluation_test_voc"
    MetadataCatalog.get(name).set(
        evaluator_type="pascal_voc", dirname=str(tmp_path), split="val", year=2007, thing_classes=["circle"]
    )
    try:
        assert isinstance(build_evaluator(small_config(), name, ""), PascalVOCDetectionEvaluator)
    finally:
        MetadataCatalog.remove(name)


@pytest.mark.parametrize("kind", ["cityscapes_instance", None])
def test_other_kinds_of_dataset(tmp_path, kind):
    name = "evaluation_test_other"
    MetadataCatalog.get(name).set(**{} if kind is None else {"evaluator_type": kind})
    try:
        with pytest.raises(
            InputError, match=f"{name} has the evaluator type {kind!r}: it is coco, lvis, pascal_voc or sem_seg"
        ):
            build_evaluator(small_config(), name, "")
    finally:
        MetadataCatalog.remove(name)
