"""Metadata of a checkpoint, options that differ, input formats and the fingerprint of a model."""

import pytest
import torch

from projects_vil.checkpoint import fingerprint
from projects_vil.checkpoint.metadata import differing_options
from tests.projects_vil.helpers import small_config, untrained_detector

OPTION = "MODEL.TRANSFORMER."


@pytest.mark.parametrize(
    "variant, theirs, ours, differ",
    [
        ("vil_tiny", {}, {"position_interpolation": "once"}, {}),
        (
            "vil_tiny",
            {"position_interpolation": "per_feature_map"},
            {},
            {"POSITION_INTERPOLATION": ("per_feature_map", "once")},
        ),
        ("ls_tiny", {"position_interpolation": "once"}, {}, {"POSITION_INTERPOLATION": ("once", "per_feature_map")}),
        # Relative tables are not resized, and all implementations of BatchNorm evaluate alike.
        ("vil_tiny_rpb", {"position_interpolation": "once"}, {}, {}),
        ("lit_s", {"norm": "FrozenBN"}, {}, {}),
        ("lit_s", {"token_merging": "uniform"}, {}, {"TOKEN_MERGING": ("uniform", "deformable")}),
    ],
)
def test_differing_options(variant, theirs, ours, differ):
    expected = {f"{OPTION}{key}": values for key, values in differ.items()}
    assert differing_options(variant, theirs, ours) == expected


def test_the_fingerprint_depends_on_all_that_changes_the_output():
    detector, cfg = untrained_detector(small_config()), small_config()
    ours = fingerprint(cfg, detector)
    others = ["MODEL.WEIGHTS", "other.pth", "MODEL.DEVICE", "cuda", "OUTPUT_DIR", "elsewhere", "SOLVER.MAX_ITER", "9"]
    assert fingerprint(small_config("retinanet", *others), detector) == ours
    for key, value in (
        ("MODEL.RETINANET.SCORE_THRESH_TEST", "0.5"),
        ("INPUT.MIN_SIZE_TEST", "80"),
        ("INPUT.FORMAT", "BGR"),
        ("TEST.DETECTIONS_PER_IMAGE", "7"),
    ):
        assert fingerprint(small_config("retinanet", key, value), detector) != ours, key
    with torch.no_grad():
        bias = detector.head.cls_score.bias
        bias[0] = torch.nextafter(bias[0], torch.tensor(1.0))
    assert fingerprint(cfg, detector) != ours
