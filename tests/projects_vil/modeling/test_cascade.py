"""What the keys of Cascade R-CNN's heads have to be together."""

import pytest

from backbones import InputError
from projects_vil.engine import check_setup
from projects_vil.modeling import check_cascade
from tests.projects_vil.helpers import small_config


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("ROI_BOX_CASCADE_HEAD.IOUS", "(0.5, 'a', 0.7)", "IOUS is .*'a'.*: it has an overlap above 0 and below 1"),
        ("ROI_BOX_CASCADE_HEAD.IOUS", "(0.5, 1.6, 0.7)", "IOUS is .*1.6.*: it has an overlap above 0 and below 1"),
        ("ROI_BOX_CASCADE_HEAD.IOUS", "()", "IOUS is ().*: it has an overlap above 0 and below 1"),
        ("ROI_BOX_CASCADE_HEAD.IOUS", "(0.5, 0.6)", "IOUS has 2 heads, and MODEL.ROI_BOX_CASCADE_HEAD.BBOX_REG_WEI"),
        ("ROI_BOX_CASCADE_HEAD.IOUS", "(0.6, 0.7, 0.8)", "IOUS begins with 0.6, and MODEL.ROI_HEADS.IOU_THRESHOL"),
        ("ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", "False", "CascadeROIHeads move boxes of no class: add"),
    ],
)
def test_keys_that_do_not_go_together(shapes, key, value, message):
    with pytest.raises(InputError, match=message):
        check_setup(small_config("cascade_mask_rcnn", f"MODEL.{key}", value))


def test_other_heads_do_not_ask_for_its_keys():
    check_cascade(small_config("cascade_mask_rcnn"))
    check_cascade(small_config("mask_rcnn", "MODEL.ROI_BOX_CASCADE_HEAD.IOUS", "()"))
