"""Anchors, matches and deltas on the device are detectron2's."""

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher

from projects_vil.modeling import avoid_waits
from tests.projects_vil.helpers import small_config
from tests.tolerances import FLOAT32


@pytest.mark.parametrize(("detector", "offset"), [("retinanet", 0.0), ("mask_rcnn", 0.5)])
def test_anchors(detector, offset):
    ours, theirs = (build_model(small_config(detector, "MODEL.ANCHOR_GENERATOR.OFFSET", str(offset))) for _ in range(2))
    avoid_waits(ours)
    generators = [getattr(model, "proposal_generator", model).anchor_generator for model in (ours, theirs)]
    assert type(generators[0]) is not type(generators[1])
    maps = [torch.zeros(1, 1, 2 + 3 * level, 7 - level) for level in range(5)]
    for anchors, expected in zip(*(generator(maps) for generator in generators), strict=True):
        torch.testing.assert_close(anchors.tensor, expected.tensor, **FLOAT32)


@pytest.mark.parametrize("low_quality", [True, False])
@pytest.mark.parametrize("objects", [0, 1, 6])
def test_matches(low_quality, objects):
    """Ties among them, as IoUs are rounded."""
    detector = torch.nn.Module()
    detector.matcher, theirs = (Matcher([0.3, 0.7], [0, -1, 1], low_quality) for _ in range(2))
    avoid_waits(detector)
    assert type(detector.matcher) is not Matcher
    ious = (torch.rand(objects, 500, generator=torch.Generator().manual_seed(0)) * 10).round() / 10
    ious[:1] *= 0.2
    for found, expected in zip(detector.matcher(ious), theirs(ious), strict=True):
        assert torch.equal(found, expected) and found.dtype == expected.dtype


def test_deltas():
    detector = torch.nn.Module()
    detector.transform, theirs = (Box2BoxTransform((10.0, 10.0, 5.0, 3.0)) for _ in range(2))
    avoid_waits(detector)
    assert type(detector.transform) is not Box2BoxTransform
    corners = torch.rand(2, 50, 2, generator=torch.Generator().manual_seed(0)) * 60
    boxes = torch.cat([corners, corners + torch.rand(2, 50, 2) * 40 + 1], dim=2)
    torch.testing.assert_close(detector.transform.get_deltas(*boxes), theirs.get_deltas(*boxes), **FLOAT32)
