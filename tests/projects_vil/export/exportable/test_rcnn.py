"""Mask R-CNN's own steps are detectron2's, also where there is nothing to do."""

import copy

import pytest
import torch
from detectron2.modeling.poolers import ROIPooler, assign_boxes_to_levels
from detectron2.modeling.roi_heads.mask_head import mask_rcnn_inference
from detectron2.structures import Boxes, Instances
from torch import Tensor

from projects_vil.export.exportable.rcnn import of_class, pool
from projects_vil.export.images import example_image
from projects_vil.export.proof.report import eager_detections
from tests.projects_vil.export.exportable.helpers import (
    assert_equal,
    assert_equals_eager,
    detector,
    random,
    run,
    with_threshold,
)

VARIATIONS = {
    "class-agnostic boxes": ("MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", "True"),
    "class-agnostic masks": ("MODEL.ROI_MASK_HEAD.CLS_AGNOSTIC_MASK", "True"),
    "sigmoid": ("MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE", "True"),
    "no masks": ("MODEL.MASK_ON", "False"),
    "one level": (
        *("MODEL.ROI_HEADS.IN_FEATURES", "['p4']", "MODEL.RPN.IN_FEATURES", "['p4']"),
        *("MODEL.ANCHOR_GENERATOR.SIZES", "[[16, 32]]"),
    ),
    "old pooling": ("MODEL.ROI_BOX_HEAD.POOLER_TYPE", "ROIAlign"),
    "large boxes only": ("MODEL.PROPOSAL_GENERATOR.MIN_SIZE", "12"),
    "all detections": ("TEST.DETECTIONS_PER_IMAGE", "-1", "MODEL.RPN.POST_NMS_TOPK_TEST", "100"),
    "80 classes": ("MODEL.ROI_HEADS.NUM_CLASSES", "80"),
}


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("size", [(64, 97), (160, 128)])
def test_equals_other_detectors(variation, size):
    found = assert_equals_eager(detector("mask_rcnn", *VARIATIONS[variation]), size)
    assert ("masks" in found) == (variation != "no masks")
    if (variation, size) == ("all detections", (160, 128)):
        assert len(found["scores"]) > 100


def test_no_proposal_at_all():
    model = copy.deepcopy(detector("mask_rcnn"))
    model.proposal_generator.min_box_size = 1e4
    image = example_image(64, 97)
    assert_equal(run(model, image), eager_detections(model, image))
    assert len(run(model, image)["boxes"]) == 0


def test_a_batch_without_any_detection():
    found = run(with_threshold(detector("mask_rcnn"), 1.1), torch.zeros(2, 3, 64, 70), batched=True)
    assert list(found) == ["boxes", "scores", "classes", "masks", "image_index"]
    assert {len(value) for value in found.values()} == {0}


# -- steps -----------------------------------------------------------------------------------------


def pooler_of(*strides: int, output_size: int = 7, kind: str = "ROIAlignV2") -> ROIPooler:
    return ROIPooler(output_size, [1 / stride for stride in strides], sampling_ratio=0, pooler_type=kind)


def pyramid(*strides: int, side: int = 1024) -> list[Tensor]:
    return [random(2, 3, side // stride, side * 3 // 4 // stride, seed=stride) for stride in strides]


def detectron2_pooled(pooler: ROIPooler, maps: list[Tensor], boxes: Tensor, image: Tensor) -> Tensor:
    """Its pooler takes the boxes image by image: in the order of ``boxes`` again."""
    rows = [(image == index).nonzero()[:, 0] for index in range(len(maps[0]))]
    pooled = pooler(maps, [Boxes(boxes[mine]) for mine in rows])
    return torch.empty_like(pooled).index_copy(0, torch.cat(rows), pooled)


def boxes_of_sides(*sides: float) -> tuple[Tensor, Tensor]:
    """A landscape and a portrait box of each side (root of the area), by turns in two images."""
    boxes = [(10.3, 20.7, 10.3 + side * wide, 20.7 + side / wide) for side in sides for wide in (1.25, 0.8)]
    return torch.tensor(boxes), torch.arange(len(boxes)) % 2


@pytest.mark.parametrize("kind", ["ROIAlignV2", "ROIAlign"])
@pytest.mark.parametrize("sides", [(12, 56, 100, 112, 200, 223.9, 224, 447, 448, 600), (130,), (30, 500)])
def test_pooling(kind, sides):
    strides = (4, 8, 16, 32)
    boxes, image = boxes_of_sides(*sides)
    pooler, maps = pooler_of(*strides, kind=kind), pyramid(*strides)
    levels = assign_boxes_to_levels([Boxes(boxes)], pooler.min_level, pooler.max_level, 224, 4)
    assert len(levels.unique()) == {10: 4, 1: 1, 2: 2}[len(sides)]
    theirs = detectron2_pooled(pooler, maps, boxes, image)
    assert theirs.std() > 0.01
    torch.testing.assert_close(pool(pooler, maps, boxes, image), theirs, rtol=0, atol=0)


def test_pooling_from_one_level_and_of_no_box():
    boxes, image = boxes_of_sides(12, 100, 600)
    pooler, maps = pooler_of(16, output_size=14), pyramid(16)
    ours = pool(pooler, maps, boxes, image)
    torch.testing.assert_close(ours, detectron2_pooled(pooler, maps, boxes, image), rtol=0, atol=0)
    assert pool(pooler_of(4, 8), pyramid(4, 8), boxes[:0], image[:0]).shape == (0, 3, 7, 7)


def test_pooling_of_half_precision():
    boxes, image = boxes_of_sides(12, 100, 600)
    maps = [level.half() for level in pyramid(4, 8, 16, 32)]
    ours = pool(pooler_of(4, 8, 16, 32), maps, boxes, image)
    theirs = detectron2_pooled(pooler_of(4, 8, 16, 32), [level.float() for level in maps], boxes, image)
    assert ours.dtype == torch.float16
    torch.testing.assert_close(ours, theirs.half(), rtol=0, atol=0)


@pytest.mark.parametrize("classes", [1, 5])
def test_the_mask_of_a_class(classes):
    logits, wanted = random(9, classes, 14, 28) - 0.5, torch.arange(9) % 5
    instances = Instances((50, 60), pred_classes=wanted)
    mask_rcnn_inference(logits, [instances])
    assert torch.equal(of_class(logits, wanted).sigmoid(), instances.pred_masks)
    assert of_class(logits[:0], wanted[:0]).shape == (0, 1, 14, 28)
