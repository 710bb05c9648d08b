"""Runs of PointRend on our backbone."""

import json

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.projects.point_rend import PointRendMaskHead
from detectron2.utils.events import EventStorage

from projects_vil import load_config
from tests.projects_vil.engine.test_train_step import images_of
from tests.projects_vil.helpers import ROOT, run_tool
from tests.projects_vil.panoptic import SMALL_PROJECT

CONFIG = ROOT / "configs/projects/point_rend_vil_tiny_rpb_1x.yaml"
# A small PointRend detector for the synthetic shapes.
SMALL_POINTS = [
    *(*SMALL_PROJECT, "MODEL.POINT_HEAD.NUM_CLASSES", "3", "MODEL.ROI_MASK_HEAD.FC_DIM", "32"),
    *("MODEL.POINT_HEAD.FC_DIM", "32", "DATASETS.TRAIN", "('shapes_train',)", "DATASETS.TEST", "('shapes_val',)"),
]


def test_the_mask_loss_of_a_batch_without_objects_is_zero_and_others_equal_detectron2():
    """It has a gradient for every weight of the head."""
    model = build_model(load_config(CONFIG, SMALL_POINTS)).train()
    with EventStorage():
        losses = model(images_of(2, objects=0))
        assert losses["loss_mask"] == losses["loss_mask_point"] == 0
        sum(losses.values()).backward()
        assert all(parameter.grad is not None for parameter in model.roi_heads.mask_head.parameters())
    theirs = build_model(load_config(CONFIG, [*SMALL_POINTS, "MODEL.ROI_MASK_HEAD.NAME", "PointRendMaskHead"])).train()
    assert type(theirs.roi_heads.mask_head) is PointRendMaskHead
    theirs.load_state_dict(model.state_dict())
    images, losses = images_of(3), []
    for each in (model, theirs):
        torch.manual_seed(0)
        with EventStorage():
            losses.append({name: value.item() for name, value in each(images).items()})
    assert losses[0] == losses[1] and losses[0]["loss_mask_point"] > 0


@pytest.mark.slow
def test_a_run(datasets_root, tmp_path):
    run = tmp_path / "run"
    overrides = [*SMALL_POINTS, "OUTPUT_DIR", run, "SOLVER.MAX_ITER", 4, "TEST.VALIDATION_LOSS", True]
    result = run_tool("train_net.py", "--config-file", CONFIG, *overrides, datasets_root=datasets_root)
    assert result.returncode == 0, result.stderr
    evaluation = json.loads((run / "evaluation.json").read_text())["shapes_val"]
    assert {"bbox", "segm", "validation_loss"} == evaluation.keys()
    assert {"loss_mask", "loss_mask_point"} < evaluation["validation_loss"].keys()
    found = json.loads((run / "inference/coco_instances_results.json").read_text())
    assert found and all("segmentation" in one for one in found)
    options = ["--config-file", run / "config.yaml", "--weights", run / "model_final.pth", "--output", tmp_path / "out"]
    refused = run_tool("export_model.py", *options, "--format", "torchscript")
    assert refused.returncode == 1
    assert "AnyBatchPointRendMaskHead" in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
