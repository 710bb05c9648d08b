"""A cascade's heads move boxes one after the other, and its scores are their mean, as detectron2's are."""

import copy

import pytest
import torch

from projects_vil.export.images import example_image
from projects_vil.export.proof.report import eager_detections
from tests.projects_vil.export.exportable.helpers import assert_equals_eager, detector, run

NAME = "cascade_mask_rcnn"
VARIATIONS = {
    "class-agnostic masks": ("MODEL.ROI_MASK_HEAD.CLS_AGNOSTIC_MASK", "True"),
    "sigmoid": ("MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE", "True"),
    "no masks": ("MODEL.MASK_ON", "False"),
    "two heads": (
        *("MODEL.ROI_BOX_CASCADE_HEAD.IOUS", "(0.5, 0.8)"),
        *("MODEL.ROI_BOX_CASCADE_HEAD.BBOX_REG_WEIGHTS", "((5.0, 6.0, 3.0, 4.0), (9.0, 8.0, 7.0, 6.0))"),
    ),
    "80 classes": ("MODEL.ROI_HEADS.NUM_CLASSES", "80"),
}


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("size", [(64, 97), (160, 128)])
def test_equals_other_cascades(variation, size):
    found = assert_equals_eager(detector(NAME, *VARIATIONS[variation]), size)
    assert ("masks" in found) == (variation != "no masks")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_head_counts(stage):
    model, image = detector(NAME), example_image(96, 130, seed=3)
    other = copy.deepcopy(model)
    predictor = other.roi_heads.box_predictor[stage]
    with torch.no_grad():
        predictor.cls_score.bias += torch.arange(4.0)
        predictor.bbox_pred.bias += 0.3
    before, after = run(model, image), run(other, image)
    assert before["scores"][:5].tolist() != after["scores"][:5].tolist()
    assert before["boxes"][:5].tolist() != after["boxes"][:5].tolist()
    theirs = eager_detections(other, image)
    assert all(torch.equal(after[name], value) for name, value in theirs.items())


def test_no_proposal_at_all():
    model = copy.deepcopy(detector(NAME))
    model.proposal_generator.min_box_size = 1e4
    found = run(model, example_image(64, 97))
    assert [tuple(value.shape) for value in found.values()] == [(0, 4), (0,), (0,), (0, 1, 28, 28)]
