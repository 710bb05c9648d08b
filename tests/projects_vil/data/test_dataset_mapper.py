"""Test the error messages for unreadable images, and for images that differ from their records."""

import cv2
import numpy as np
import pytest

from projects_vil.data import Mapper
from tests.projects_vil.data.custom_dataset import config, edit, first_image, load, truncate
from tests.projects_vil.helpers import message, small_config


@pytest.mark.parametrize("train", [True, False])
def test_damaged_and_unreadable_images_are_named(copy, train):
    records, mapper = load(copy), Mapper(config(), is_train=train)
    truncate(first_image(copy))
    assert mapper(records[0])["damaged"].keys() == {str(first_image(copy))}
    first_image(copy).write_text("text")
    assert str(first_image(copy)) in message(mapper, records[0])
    assert "damaged" not in mapper(records[1])


def test_image_of_another_size_than_its_record(copy):
    record = load(copy)[0]
    height, width = record["height"], record["width"]
    cv2.imwrite(str(first_image(copy)), np.zeros((height + 3, width, 3), np.uint8))
    text = message(Mapper(config(), is_train=False), record)
    assert str(first_image(copy)) in text and str((width, height)) in text and str((width, height + 3)) in text


def test_an_object_without_the_mask_that_others_have(copy):
    edit(copy, lambda content: content["annotations"][0].pop("segmentation"))
    record = load(copy, "DATASETS.CHECK", "off", detector="mask_rcnn")[0]
    text = message(Mapper(small_config("mask_rcnn"), is_train=True), record)
    assert str(first_image(copy)) in text and "MODEL.MASK_ON" in text
    boxes_alone = Mapper(config(), is_train=True)(record)["instances"]
    assert len(boxes_alone) and not boxes_alone.has("gt_masks")
