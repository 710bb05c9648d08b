"""Test-time augmentation of RetinaNet and Mask R-CNN."""

import pytest
import torch
from detectron2.structures import Boxes, Instances
from torchvision.ops import box_iou

from projects_vil.data import size_for_testing
from projects_vil.export import example_image
from projects_vil.modeling import add_tta
from tests.projects_vil.helpers import assert_same_detections, message, small_config, untrained_detector

HEIGHT, WIDTH = 80, 116
DETECTORS = ("retinanet", "mask_rcnn")


def config(detector: str, *overrides: str):
    few = ["MODEL.RETINANET.SCORE_THRESH_TEST", "0.3", "TEST.DETECTIONS_PER_IMAGE", "30"]
    return small_config(detector, *few, *overrides)


def image(height: int = HEIGHT, width: int = WIDTH) -> torch.Tensor:
    return example_image(height, width, seed=3).to(torch.uint8)


def detect(model, pixels: torch.Tensor):
    """Return the instances in pixels of the image."""
    return model([{"image": pixels, "height": pixels.shape[1], "width": pixels.shape[2]}])[0]["instances"]


def mirrored(found: Instances) -> Instances:
    left, top, right, bottom = found.pred_boxes.tensor.unbind(1)
    found = Instances(found.image_size, **found.get_fields())
    found.pred_boxes = Boxes(torch.stack([WIDTH - right, top, WIDTH - left, bottom], dim=1))
    if found.has("pred_masks"):
        found.pred_masks = found.pred_masks.flip(2)
    return found


@pytest.mark.parametrize("detector", DETECTORS)
def test_one_size_without_flip_changes_nothing(detector):
    cfg = config(detector, "TEST.AUG.MIN_SIZES", "(64,)", "TEST.AUG.FLIP", "False")
    model = untrained_detector(cfg)
    pixels = image(*size_for_testing(cfg, HEIGHT, WIDTH))
    with torch.no_grad():
        plain, augmented = detect(model, pixels), detect(add_tta(cfg, model), pixels)
    assert len(plain) > 5
    assert_same_detections(augmented, plain)


@pytest.mark.parametrize("detector", DETECTORS)
def test_mirrored_images_have_mirrored_detections(detector):
    cfg = config(detector, "TEST.AUG.MIN_SIZES", "(64, 96)")
    model = untrained_detector(cfg)
    augmented = add_tta(cfg, model)
    with torch.no_grad():
        ours, theirs = detect(augmented, image()), detect(augmented, image().flip(2))
        plain, plain_mirrored = detect(model, image()), detect(model, image().flip(2))
    assert_same_detections(mirrored(ours), theirs)
    with pytest.raises(AssertionError):
        assert_same_detections(mirrored(plain), plain_mirrored)


def test_boxes_are_clipped_and_merged():
    cfg = config("retinanet", "TEST.AUG.MIN_SIZES", "(48, 64, 96)")
    found = detect(add_tta(cfg, untrained_detector(cfg)), image())
    boxes = found.pred_boxes.tensor
    assert found.image_size == (HEIGHT, WIDTH) and 5 < len(found) <= 30
    assert (boxes >= 0).all() and (boxes[:, 2] <= WIDTH).all() and (boxes[:, 3] <= HEIGHT).all()
    assert boxes[:, 2].max() > WIDTH / 2 and (found.scores.diff() <= 0).all()
    others = ~torch.eye(len(found), dtype=torch.bool) & (found.pred_classes[:, None] == found.pred_classes)
    assert others.any() and box_iou(boxes, boxes)[others].max() <= cfg.MODEL.RETINANET.NMS_THRESH_TEST


def test_default_sizes_are_scaled_to_the_test_size():
    model = untrained_detector(config("retinanet"))
    for key, value, expected in (
        ("INPUT.MIN_SIZE_TEST", "800", range(400, 1300, 100)),
        ("INPUT.MIN_SIZE_TEST", "128", range(64, 208, 16)),
        ("TEST.AUG.MIN_SIZES", "(70, 90)", (70, 90)),
    ):
        assert add_tta(config("retinanet", key, value), model).tta_mapper.min_sizes == tuple(expected)


def test_absolute_positions_limit_the_sizes():
    tables = ["MODEL.TRANSFORMER.VARIANT", "vil_tiny", "MODEL.TRANSFORMER.MAX_IMG_SIZE", "96"]
    cfg = config("retinanet", *tables)
    augmented = add_tta(cfg, untrained_detector(cfg))
    assert augmented.tta_mapper.max_size == 96 and augmented.tta_mapper.min_sizes[-1] == 96
    assert len(detect(augmented, image())) > 0
    cfg = config("retinanet", *tables, "TEST.AUG.MIN_SIZES", "(64, 128)")
    assert "TEST.AUG.MIN_SIZES" in message(add_tta, cfg, untrained_detector(cfg))
