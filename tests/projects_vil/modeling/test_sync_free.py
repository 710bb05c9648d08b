"""Sync-free anchors, matches and box deltas equal detectron2's."""

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher

from projects_vil.modeling import use_sync_free_parts
from projects_vil.modeling.sync_free import SyncFreeBoxTransform, SyncFreeMatcher
from tests.projects_vil.helpers import small_config
from tests.tolerances import FLOAT32


@pytest.mark.parametrize(("detector", "offset"), [("retinanet", 0.0), ("mask_rcnn", 0.5)])
def test_anchors_and_replaced_parts(detector, offset):
    ours, theirs = (build_model(small_config(detector, "MODEL.ANCHOR_GENERATOR.OFFSET", str(offset))) for _ in range(2))
    use_sync_free_parts(ours)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    first, second = (getattr(model, "proposal_generator", model) for model in (ours, theirs))
    for name in ("anchor_generator", "anchor_matcher", "box2box_transform"):
        assert type(getattr(first, name)) is not type(getattr(second, name))
    features = [torch.zeros(1, 1, 2 + 3 * level, 7 - level) for level in range(5)]
    anchors = zip(first.anchor_generator(features), second.anchor_generator(features), strict=True)
    for found, expected in anchors:
        torch.testing.assert_close(found.tensor, expected.tensor, **FLOAT32)


@pytest.mark.parametrize("low_quality", [True, False])
@pytest.mark.parametrize("objects", [0, 1, 6])
def test_matches(low_quality, objects):
    """Rounded IoUs have ties."""
    matcher = Matcher([0.3, 0.7], [0, -1, 1], low_quality)
    ious = (torch.rand(objects, 500, generator=torch.Generator().manual_seed(0)) * 10).round() / 10
    ious[:1] *= 0.2
    for found, expected in zip(SyncFreeMatcher(matcher)(ious), matcher(ious), strict=True):
        assert torch.equal(found, expected) and found.dtype == expected.dtype


def test_deltas():
    transform = Box2BoxTransform((10.0, 10.0, 5.0, 3.0))
    corners = torch.rand(2, 50, 2, generator=torch.Generator().manual_seed(0)) * 60
    boxes = torch.cat([corners, corners + torch.rand(2, 50, 2) * 40 + 1], dim=2)
    ours = SyncFreeBoxTransform(transform).get_deltas(*boxes)
    torch.testing.assert_close(ours, transform.get_deltas(*boxes), **FLOAT32)
