"""What a config is for."""

import pytest

from projects_vil.config import detector_name, is_segmentor, number_of_classes
from tests.projects_vil.helpers import small_config


@pytest.mark.parametrize(
    "detector, key, number",
    [
        ("retinanet", "MODEL.RETINANET.NUM_CLASSES", 3),
        ("mask_rcnn", "MODEL.ROI_HEADS.NUM_CLASSES", 3),
        ("semantic_fpn", "MODEL.SEM_SEG_HEAD.NUM_CLASSES", 4),
    ],
)
def test_number_of_classes(detector, key, number):
    cfg = small_config(detector)
    assert number_of_classes(cfg) == (key, number)
    assert is_segmentor(cfg) == (detector == "semantic_fpn")


@pytest.mark.parametrize(
    "detector, overrides, name",
    [
        ("retinanet", ["MODEL.MASK_ON", "True"], "RetinaNet"),
        ("mask_rcnn", [], "Mask R-CNN"),
        ("mask_rcnn", ["MODEL.MASK_ON", "False"], "Faster R-CNN"),
        ("cascade_mask_rcnn", [], "Cascade Mask R-CNN"),
        ("cascade_mask_rcnn", ["MODEL.MASK_ON", "False"], "Cascade R-CNN"),
        ("mask_rcnn", ["MODEL.ROI_MASK_HEAD.NAME", "PointRendMaskHead"], "PointRend"),
        ("mask_rcnn", ["MODEL.ROI_MASK_HEAD.NAME", "AnyBatchPointRendMaskHead"], "PointRend"),
        ("semantic_fpn", [], "SemanticSegmentor"),
    ],
)
def test_what_a_detector_is_called(detector, overrides, name):
    assert detector_name(small_config(detector, *overrides)) == name
