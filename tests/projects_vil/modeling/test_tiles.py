"""Test detection in tiles: each object is found once, at its place, and an untiled image gives the same detections."""

import cv2
import numpy as np
import pytest
import torch
from detectron2.structures import Boxes, Instances
from torch import nn

from projects_vil.modeling.tiles import TiledDetector
from tests.projects_vil.helpers import message, small_config


class FindBlobs(nn.Module):
    """A perfect detector of bright objects. It finds the visible part of an object that a tile cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = []

    def forward(self, batched_inputs):
        [inputs] = batched_inputs
        self.sizes.append(tuple(inputs["image"].shape[1:]))
        bright = (inputs["image"][0].float() > 127).numpy().astype(np.uint8)
        height, width = inputs["height"], inputs["width"]
        scale = torch.tensor([width / bright.shape[1], height / bright.shape[0]]).repeat(2)
        _, labels, stats, _ = cv2.connectedComponentsWithStats(bright)
        # Objects that are too small for the detector
        visible = [label for label in range(1, len(stats)) if stats[label, 2:4].min() >= 8]
        left, top, widths, heights = torch.from_numpy(stats[visible, :4]).float().unbind(1)
        masks = [cv2.resize((labels == label).astype(np.uint8), (width, height), interpolation=0) for label in visible]
        instances = Instances((height, width))
        instances.pred_boxes = Boxes(torch.stack([left, top, left + widths, top + heights], 1) * scale)
        # A larger object in pixels of the tile has a higher score.
        instances.scores = (widths * heights).sqrt() / 1000
        instances.pred_classes = torch.zeros(len(visible), dtype=torch.int64)
        instances.pred_masks = torch.from_numpy(np.array(masks).reshape(-1, height, width)).bool()
        return [{"instances": instances}]


def config(**keys):
    pairs = {"TEST.TILE_SIZE": 128, **keys}
    return small_config("retinanet", *(str(word) for pair in pairs.items() for word in pair))


@pytest.mark.parametrize("height, width", [(300, 701), (701, 300), (90, 120), (128, 129)])
def test_each_object_is_found_once(height, width):
    """Objects of all sizes, on a grid that the tiles cut in different places."""
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    expected = []
    for top, left, side in [(3, 5, 9), (40, 75, 30), (60, 10, 17), (100, 130, 20), (150, 40, 120), (20, 260, 150)]:
        if top + side < height and left + side < width:
            image[:, top : top + side, left : left + side] = 255
            expected.append([left, top, left + side, top + side])
    model = FindBlobs()
    [output] = TiledDetector(config(), model.eval())([{"image": image, "height": height, "width": width}])
    found = output["instances"]
    order = found.pred_boxes.area().argsort()
    expected.sort(key=lambda box: box[2] - box[0])
    assert len(found) == len(expected) > 1 and found.image_size == (height, width)
    # Objects larger than the overlap are found at a lower resolution.
    torch.testing.assert_close(found.pred_boxes.tensor[order], torch.tensor(expected).float(), atol=4, rtol=0)
    small = found[found.pred_boxes.area() < 32**2]
    assert small.pred_boxes.tensor.tolist() == small.pred_boxes.tensor.round().tolist()
    for mask, box in zip(small.pred_masks, small.pred_boxes.tensor.int().tolist(), strict=True):
        left, top, right, bottom = box
        assert mask.sum() == (right - left) * (bottom - top) == mask[top:bottom, left:right].sum()
    assert max(max(size) for size in model.sizes) <= 128


def test_an_image_of_one_tile_is_not_changed():
    image = torch.zeros(3, 90, 120, dtype=torch.uint8)
    image[:, 0:40, 80:120] = 255
    model = FindBlobs()
    [output] = TiledDetector(config(), model.eval())([{"image": image, "height": 90, "width": 120}])
    assert model.sizes == [(90, 120)]
    assert output["instances"].pred_boxes.tensor.tolist() == [[80, 0, 120, 40]]


def test_invalid_keys():
    segmentor = small_config("semantic_fpn", "TEST.TILE_SIZE", "128")
    assert "RetinaNet" in message(TiledDetector, segmentor, FindBlobs())
    overlap = message(TiledDetector, config(**{"TEST.TILE_OVERLAP": 1.0}), FindBlobs())
    assert "TEST.TILE_OVERLAP" in overlap
