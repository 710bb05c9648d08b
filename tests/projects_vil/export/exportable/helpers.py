"""Detectors and their exportable equivalents at work, and random boxes."""

import copy
import functools

import torch
from detectron2.modeling import GeneralizedRCNN
from torch import Tensor, nn

from projects_vil.export import make_exportable
from projects_vil.export.images import example_image
from projects_vil.export.proof.report import eager_detections
from tests.projects_vil.helpers import lively_detector, small_config

ALL = ("retinanet", "mask_rcnn", "cascade_mask_rcnn")


@functools.cache
def detector(name: str, *overrides: str) -> nn.Module:
    return lively_detector(small_config(name, *overrides))


def with_threshold(model: nn.Module, threshold: float) -> nn.Module:
    """A copy that reports what has a higher score."""
    model = copy.deepcopy(model)
    owner = model.roi_heads.box_predictor if isinstance(model, GeneralizedRCNN) else model
    # The last of a cascade has the threshold that counts.
    owner = owner[-1] if isinstance(owner, nn.ModuleList) else owner
    assert hasattr(owner, "test_score_thresh")
    owner.test_score_thresh = threshold
    return model


def run(model: nn.Module, image: Tensor, *, batched: bool = False) -> dict[str, Tensor]:
    exportable = make_exportable(model, batched=batched)
    with torch.no_grad():
        return dict(zip(exportable.output_names, exportable(image), strict=True))


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], *, tolerance: float = 0) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def assert_equals_eager(model: nn.Module, size: tuple[int, int]) -> dict[str, Tensor]:
    """On an image in which there is something; what was found."""
    image = example_image(*size, seed=7)
    theirs, ours = eager_detections(model, image), run(model, image)
    assert len(theirs["scores"]) >= 3
    assert_equal(ours, theirs)
    return ours


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def random_boxes(number: int, *, side: float = 100, seed: int = 0) -> Tensor:
    """(number, 4) within a square, from points to most of it."""
    corners = random(number, 2, 2, seed=seed).sort(dim=1).values * side
    return corners.flatten(1)
