"""An image that cannot be read, or is not what its record says, is named."""

import cv2
import numpy as np
import pytest
import torch

from projects_vil.data import Mapper
from tests.projects_vil.data.own import config, edit, first_image, load, message, truncate
from tests.projects_vil.helpers import small_config

SPOILT = {
    "truncated": truncate,
    "empty": lambda path: path.write_bytes(b""),
    "header only": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "text": lambda path: path.write_text("this is no image"),
    "truncated PNG": lambda path: path.write_bytes(cv2.imencode(".png", cv2.imread(str(path)))[1].tobytes()[:900]),
}


@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize("train", [True, False])
def test_unreadable_image_is_named(copy, kind, train):
    SPOILT[kind](first_image(copy))
    records = load(copy)
    mapper = Mapper(config(), is_train=train)
    text = message(mapper, records[0])
    assert text.startswith(f"cannot read the image {first_image(copy)}: ")
    assert mapper(records[1])["image"].shape[0] == 3


def test_image_that_vanished_after_loading(copy):
    records = load(copy)
    first_image(copy).unlink()
    assert str(first_image(copy)) in message(Mapper(config(), is_train=True), records[0])


def test_image_of_another_size_than_its_annotation_says(copy):
    record = load(copy)[0]
    height, width = record["height"], record["width"]
    cv2.imwrite(str(first_image(copy)), np.zeros((height + 3, width, 3), np.uint8))
    text = message(Mapper(config(), is_train=False), record)
    assert str(first_image(copy)) in text and str((width, height)) in text and str((width, height + 3)) in text


@pytest.mark.parametrize("number", [1, None])
def test_objects_without_the_masks_that_others_have(copy, number):
    """With ``DATASETS.CHECK`` off nobody has looked at them: one object of an image, or all of it."""

    def spoil(content):
        first = content["images"][0]["id"]
        for annotation in [one for one in content["annotations"] if one["image_id"] == first][:number]:
            del annotation["segmentation"]

    edit(copy, spoil)
    keys = ["MODEL.META_ARCHITECTURE", "GeneralizedRCNN", "MODEL.ROI_HEADS.NUM_CLASSES", "3", "MODEL.MASK_ON", "True"]
    records = load(copy, "DATASETS.CHECK", "off", *keys)
    text = message(Mapper(small_config("mask_rcnn"), is_train=True), records[0])
    assert text.startswith(f"{first_image(copy)} has an object without the mask that is to be learned: DATASETS.CHECK")
    boxes_alone = Mapper(config(), is_train=True)(records[0])["instances"]
    assert len(boxes_alone) and not boxes_alone.has("gt_masks")


@pytest.mark.parametrize("box", [[1.0, 2.0], "a box", None])
def test_box_that_is_none(copy, box):
    edit(copy, lambda content: [a.update(bbox=box) for a in content["annotations"]])

    def load_and_map():
        return Mapper(config(), is_train=True)(load(copy)[0])

    text = message(load_and_map)
    assert str(copy) in text


def test_colours_of_a_detectors_images_change_too(copy):
    record = load(copy)[0]
    images = []
    for distort in ("False", "True"):
        cfg = config(overrides=["INPUT.RANDOM_FLIP", "none", "INPUT.PHOTOMETRIC_DISTORTION", distort])
        np.random.seed(2)
        images.append(Mapper(cfg, is_train=True)(record)["image"])
    assert images[0].shape == images[1].shape and not torch.equal(*images)
    testing = Mapper(cfg, is_train=False)(record)["image"]
    assert torch.equal(testing, Mapper(config(), is_train=False)(record)["image"])
