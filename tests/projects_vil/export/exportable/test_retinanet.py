"""RetinaNet with other settings gives detectron2's own answers too."""

import pytest
import torch

from projects_vil.export.images import example_image
from tests.projects_vil.export.exportable.helpers import assert_equals_eager, detector, run

VARIATIONS = {
    "five detections": ("TEST.DETECTIONS_PER_IMAGE", "5"),
    "few candidates": ("MODEL.RETINANET.TOPK_CANDIDATES_TEST", "7"),
    "80 classes": ("MODEL.RETINANET.NUM_CLASSES", "80"),
    "three levels": (
        *("MODEL.RETINANET.IN_FEATURES", "['p3', 'p4', 'p5']"),
        *("MODEL.ANCHOR_GENERATOR.SIZES", "[[16], [32], [64]]", "MODEL.ANCHOR_GENERATOR.OFFSET", "0.5"),
    ),
}


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("size", [(64, 97), (160, 128)])
def test_equals_other_detectors(variation, size):
    found = assert_equals_eager(detector("retinanet", *VARIATIONS[variation]), size)
    assert "masks" not in found


def test_the_variations_reach_their_limits():
    """What the cases above are there for does happen in them."""
    image = example_image(160, 128, seed=7)
    found = {name: run(detector("retinanet", *VARIATIONS[name]), image) for name in VARIATIONS}
    assert len(found["five detections"]["scores"]) == 5
    many = run(detector("retinanet", "TEST.DETECTIONS_PER_IMAGE", "1000"), image)
    assert len(many["scores"]) > 500 > 100 >= len(run(detector("retinanet"), image)["scores"])
    assert 0 < len(found["few candidates"]["scores"]) <= 7 * 5
    assert len(set(found["80 classes"]["classes"].tolist())) > 20
    # At 64 x 64 the upper levels have fewer scores than candidates are asked for, the lowest more.
    head = detector("retinanet")
    with torch.no_grad():
        numbers = [level[0, 0].numel() * 27 for level in head.backbone(torch.zeros(1, 3, 64, 64)).values()]
    assert head.num_classes == 3 and min(numbers) < head.test_topk_candidates < max(numbers)
