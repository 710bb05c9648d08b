"""By what one model is known from another."""

import pytest
import torch

from projects_vil.checkpoint import fingerprint
from tests.projects_vil.helpers import lively_detector, small_config


@pytest.fixture(scope="module")
def detector():
    return lively_detector(small_config())


def test_it_is_of_the_answers_alone(detector):
    ours = fingerprint(small_config(), detector)
    elsewhere = (
        "MODEL.WEIGHTS",
        "other.pth",
        "MODEL.DEVICE",
        "cuda",
        "OUTPUT_DIR",
        "elsewhere",
        "SOLVER.MAX_ITER",
        "9",
    )
    assert fingerprint(small_config("retinanet", *elsewhere), detector) == ours
    for key, value in (
        ("MODEL.RETINANET.SCORE_THRESH_TEST", "0.5"),
        ("INPUT.MIN_SIZE_TEST", "80"),
        ("INPUT.FORMAT", "BGR"),
        ("TEST.DETECTIONS_PER_IMAGE", "7"),
    ):
        assert fingerprint(small_config("retinanet", key, value), detector) != ours, key


def test_every_tensor_counts_to_the_bit(detector):
    ours, cfg = fingerprint(small_config(), detector), small_config()
    bias = detector.head.cls_score.bias
    with torch.no_grad():
        before = bias[0].item()
        bias[0] = torch.nextafter(bias[0], torch.tensor(1.0))
        assert fingerprint(cfg, detector) != ours
        bias[0] = before
    assert fingerprint(cfg, detector) == ours
