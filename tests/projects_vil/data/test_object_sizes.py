"""Test the image size and the anchors that match the objects of a dataset."""

import re

import numpy as np
import pytest
import torch
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.structures import Boxes, pairwise_iou

from projects_vil import load_config
from projects_vil.config import config_path
from projects_vil.data.object_sizes import MATCH_IOU, RETINANET, TARGET_SHARE, choose_size, objects_of
from projects_vil.recipes import anchors_of


def content(*, number: int = 40, side: float, height: int = 300, width: int = 400) -> dict:
    """Return a COCO file with boxes of about ``side`` pixels, and entries that are left out."""
    generator = np.random.default_rng(0)
    sizes = side * generator.uniform(0.6, 1.6, size=(number, 2))
    corners = generator.uniform(0, 1, size=(number, 2)) * ((width, height) - sizes)
    annotations = [{"image_id": 1, "bbox": [*map(float, (*c, *s))]} for c, s in zip(corners, sizes, strict=True)]
    wrong = [{"image_id": 7, "bbox": [0, 0, 5, 5]}, {"image_id": 1, "bbox": [0, 0, -5, 5]}, {"image_id": 1}, None]
    crowd = {"image_id": 1, "bbox": [0, 0, 5, 5], "iscrowd": 1}
    image = {"id": 1, "height": height, "width": width}
    return {"images": [image, "x"], "annotations": [*annotations, *wrong, crowd]}


@pytest.mark.parametrize("base", ["retinanet", "mask_rcnn"])
@pytest.mark.parametrize("fit", [False, True])
def test_the_share_of_matched_objects_equals_detectron2s_anchors(base, fit):
    own, objects = anchors_of(load_config(config_path(f"base/{base}_1x"))), objects_of(content(side=30))
    assert objects.shape == (40, 6) and (own == RETINANET) == (base == "retinanet")
    _, chosen, text = choose_size(own, objects, sizes=[192], fit=fit)
    strides = [8, 16, 32, 64, 128] if base == "retinanet" else [4, 8, 16, 32, 64]
    options = {"strides": strides, "offset": chosen.offset}
    generator = DefaultAnchorGenerator(sizes=chosen.sizes, aspect_ratios=[chosen.ratios], **options)
    # Twice as large as the image, so that the closest anchor of each object exists.
    anchors = Boxes.cat(generator([torch.zeros(1, 1, 384 // stride + 1, 512 // stride + 1) for stride in strides]))
    boxes = torch.from_numpy(objects[:, :4] * 192 / 300)
    boxes[:, 2:] += boxes[:, :2]
    best = pairwise_iou(Boxes(boxes.float()), anchors).max(dim=1).values
    share = (best >= MATCH_IOU).double().mean().item()
    assert (chosen == own) != fit and re.search(rf": 40; .* match {share:.1%} of all", text)


def test_the_smallest_size_that_matches_the_objects():
    sizes, chosen = range(128, 641, 32), []

    def choose(sizes, *, fit=True) -> tuple[float, ...]:
        """Return the size, the median side and the share of matched objects in the text."""
        size, _, text = choose_size(RETINANET, objects, sizes=sizes, fit=fit)
        pattern = rf"\(median (\d+)\) at image size {size}; .* match ([\d.]+)%"
        median, percent = re.search(pattern, text).groups()
        return size, float(median), float(percent) / 100

    for side in (8, 12, 60, 130):
        objects = objects_of(content(side=side))
        size, _, share = choose(sizes)
        each = [choose([one]) for one in sizes]
        fitting = (one for one, median, part in each if part >= TARGET_SHARE and (one > 255 or median >= 50))
        assert size == next(fitting, sizes[-1])
        # Fitted anchors match small objects that the anchors of COCO do not match.
        assert share > choose([size], fit=False)[2] or side > 12
        chosen.append(size)
    assert chosen == sorted(chosen, reverse=True) and chosen[2:] == [256, 128]


def test_elongated_objects_do_not_need_a_large_size_but_small_objects_do():
    objects = objects_of(content(side=130))
    objects[:4, 2:4] = 280, 4
    size, _, text = choose_size(RETINANET, objects, sizes=range(192, 641, 32), fit=True)
    assert size == 192 and "match 90.0% of all" in text and "larger" not in text
    size, _, text = choose_size(RETINANET, objects_of(content(side=3))[:1], sizes=range(192, 641, 32), fit=False)
    assert size == 640 and re.search(r"a side of \d+ pixels .*match 0.0% of all.*A larger", text)
