"""The image size and the anchors that fit the objects of a dataset."""

import numpy as np
import pytest
import torch
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.structures import Boxes, pairwise_iou

from projects_vil.config import config_path, load_config
from projects_vil.data.object_sizes import MATCH_IOU, TARGET_SHARE, choose_size, objects_of


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
def test_the_share_is_that_of_detectron2s_anchors(base, fit):
    cfg, objects = load_config(config_path(f"base/{base}_1x")), objects_of(content(side=30))
    assert objects.shape == (40, 6)
    choice = choose_size(cfg, objects, sizes=[192], fit=fit)
    sizes = choice.anchors.get("MODEL.ANCHOR_GENERATOR.SIZES", cfg.MODEL.ANCHOR_GENERATOR.SIZES)
    ratios = choice.anchors.get("MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS", cfg.MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS)
    strides = [8, 16, 32, 64, 128] if base == "retinanet" else [4, 8, 16, 32, 64]
    options = {"strides": strides, "offset": cfg.MODEL.ANCHOR_GENERATOR.OFFSET}
    generator = DefaultAnchorGenerator(sizes=sizes, aspect_ratios=ratios, **options)
    # Twice as large as the image, so that the closest anchor of each object exists.
    anchors = Boxes.cat(generator([torch.zeros(1, 1, 384 // stride + 1, 512 // stride + 1) for stride in strides]))
    boxes = torch.from_numpy(objects[:, :4] * 192 / 300)
    boxes[:, 2:] += boxes[:, :2]
    best = pairwise_iou(Boxes(boxes.float()), anchors).max(dim=1).values
    assert choice.share == pytest.approx((best >= MATCH_IOU).double().mean().item()) and choice.number == 40


def test_the_smallest_size_that_matches_the_objects():
    cfg, sizes = load_config(config_path("base/retinanet_1x")), range(128, 641, 32)
    chosen = []
    for side in (8, 12, 80):
        objects = objects_of(content(side=side))
        choice = choose_size(cfg, objects, sizes=sizes)
        shares = [choose_size(cfg, objects, sizes=[size]).share for size in sizes]
        first = next((size for size, share in zip(sizes, shares, strict=True) if share >= TARGET_SHARE), sizes[-1])
        assert choice.size == first and f"size {first}" in choice.line()
        # Fitted anchors match small objects that the anchors of COCO do not match.
        assert choice.share > choose_size(cfg, objects, sizes=[first], fit=False).share or side == 80
        chosen.append(choice.size)
    assert chosen == sorted(chosen, reverse=True) and chosen[-1] == 128
