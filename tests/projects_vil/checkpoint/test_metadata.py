"""Metadata of a checkpoint, options that differ, input formats and the fingerprint of a model."""

import json

import pytest
import torch

from projects_vil.checkpoint import METADATA_KEY, CheckpointMetadata, fingerprint
from projects_vil.checkpoint.metadata import OFFICIAL_INPUT, InputFormat, differing_options, input_format
from tests.projects_vil.helpers import small_config, untrained_detector

OPTION = "MODEL.TRANSFORMER."


def test_round_trip():
    metadata = CheckpointMetadata("lit_s", {"token_merging": "uniform"}, ("a", "b"), (7, 3), OFFICIAL_INPUT)
    assert CheckpointMetadata.from_contents({METADATA_KEY: json.loads(json.dumps(metadata.to_dict()))}) == metadata
    for saved in (None, 3, [], {}):
        assert CheckpointMetadata.from_contents({METADATA_KEY: saved}) == CheckpointMetadata()


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


def test_input_formats():
    ours = input_format(small_config())
    assert ours == OFFICIAL_INPUT and ours.matches(InputFormat("RGB", (123.68, 116.28, 103.53), ours.std))
    for other in (("BGR", ours.mean, ours.std), ("RGB", ours.mean[::-1], ours.std), ("RGB", ours.mean[:1], ours.std)):
        assert not ours.matches(InputFormat(*other))


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
