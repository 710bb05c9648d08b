"""Anchors and boxes are detectron2's."""

import pytest
import torch
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.meta_arch.dense_detector import permute_to_N_HWA_K
from detectron2.structures import Boxes

from projects_vil.export.exportable.boxes import clip, decode, grid_anchors, has_area, per_anchor
from tests.projects_vil.export.exportable.helpers import random, random_boxes


@pytest.mark.parametrize("channels", [1, 4, 3])
@pytest.mark.parametrize("shape", [(5, 7), (1, 9), (6, 1)])
def test_predictions_per_anchor(channels, shape):
    predictions = random(2, 6 * channels, *shape)
    assert torch.equal(per_anchor(predictions, channels), permute_to_N_HWA_K(predictions, channels))


@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_anchors(offset):
    generator = DefaultAnchorGenerator(
        sizes=[[16.0, 20.2], [32.0, 40.3], [64.0, 80.6]],
        aspect_ratios=[[0.5, 1.0, 2.0]],
        strides=[8, 16, 32],
        offset=offset,
    )
    maps = [torch.zeros(2, 3, *size) for size in ((9, 13), (5, 7), (1, 2))]
    for ours, theirs in zip(grid_anchors(generator, maps), generator(maps), strict=True):
        torch.testing.assert_close(ours, theirs.tensor, rtol=0, atol=0)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (10.0, 10.0, 5.0, 5.0)])
def test_decoding(weights):
    transform = Box2BoxTransform(weights=weights)
    deltas, anchors = (random(300, 4, seed=1) - 0.5) * 10 * torch.tensor(weights), random_boxes(300, seed=2)
    # Some sides grow beyond what the transform allows.
    assert ((deltas / torch.tensor(weights))[:, 2:] > transform.scale_clamp).any()
    ours = decode(transform, deltas, anchors)
    torch.testing.assert_close(ours, transform.apply_deltas(deltas, anchors), rtol=0, atol=0)
    # (P, K, 4) of (P, 1, 4)
    several = torch.stack([deltas, -deltas, 0 * deltas], dim=1)
    ours = decode(transform, several, anchors[:, None])
    assert ours.shape == (300, 3, 4)
    torch.testing.assert_close(ours.flatten(1), transform.apply_deltas(several.flatten(1), anchors), rtol=0, atol=0)


def test_decoding_of_half_precision_is_in_float32():
    transform, deltas = Box2BoxTransform(weights=(1.0, 1.0, 1.0, 1.0)), random(50, 4).half()
    ours = decode(transform, deltas, random_boxes(50, side=1333))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(
        ours, transform.apply_deltas(deltas.float(), random_boxes(50, side=1333)), rtol=0, atol=0
    )


def test_clipping_and_areas():
    boxes = (random_boxes(400, side=200) - 50).round()
    boxes[0] = torch.tensor([-5.0, -7.0, -1.0, -1.0])
    theirs = Boxes(boxes.clone())
    theirs.clip((60, 90))
    assert torch.equal(clip(boxes, (60, 90)), theirs.tensor)
    for least in (0.0, 12.0):
        kept = has_area(theirs.tensor, least)
        assert torch.equal(kept, theirs.nonempty(threshold=least)) and 0 < kept.sum() < len(boxes)
