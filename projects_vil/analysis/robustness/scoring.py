"""The arithmetic: predictions among a set's classes, how many are right, and the corruption errors of ImageNet-C."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

# What mCE divides by (Hendrycks & Dietterich, "Benchmarking Neural Network Robustness", 2019): AlexNet's error on each
# of the 15 corruptions, the mean over its 5 severities, in 0..1. Source: ALEXNET_ERR in imagenet.py of
# https://github.com/google-research/augmix, "Raw AlexNet errors taken from https://github.com/hendrycks/robustness",
# whose own figures are in a spreadsheet that its README names.
ALEXNET_ERRORS = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
CORRUPTIONS = tuple(ALEXNET_ERRORS)
SEVERITIES = (1, 2, 3, 4, 5)
TOP = 5


@dataclasses.dataclass(frozen=True)
class Score:
    """Of a folder of images.

    Attributes:
        num_files: in the folder.
        num_images: of them, those that have a label.
        top1: percentage of the labelled whose first prediction is right.
        top5: the same of any of the first five.
    """

    num_files: int
    num_images: int
    top1: float
    top5: float


def top_classes(logits: Tensor, classes: Sequence[int] | None = None) -> Tensor:
    """The five most probable classes of each image, the best first.

    Args:
        logits: (B, K).
        classes: the only ones of 0..K-1 that may be predicted; None for all.

    Returns:
        (B, 5) numbers in 0..K-1, also where ``classes`` are given.
    """
    if classes is None:
        return logits.topk(TOP, dim=1).indices
    allowed = torch.as_tensor(classes, device=logits.device)
    return allowed[logits[:, allowed].topk(TOP, dim=1).indices]


def score(predictions: Tensor, labels: Sequence[Collection[int]]) -> Score:
    """How many predictions are right; an image without a label is left out.

    Args:
        predictions: (N, 5), of :func:`top_classes`.
        labels: for each image the classes that are right.

    Raises:
        ValueError: where their numbers differ, or no image has a label.
    """
    judged = [
        [number in right for number in predicted]
        for predicted, right in zip(predictions.tolist(), labels, strict=True)
        if right
    ]
    if not judged:
        raise ValueError("no image has a label")
    first = sum(hits[0] for hits in judged)
    among_five = sum(any(hits) for hits in judged)
    return Score(len(predictions), len(judged), 100 * first / len(judged), 100 * among_five / len(judged))


def corruption_error(corruption: str, errors: Sequence[float]) -> float:
    """CE in per cent: the sum of a classifier's errors over the severities by AlexNet's.

    Args:
        corruption: of ``CORRUPTIONS``.
        errors: of the first prediction, in 0..1, one a severity.

    Raises:
        ValueError: for another number of severities.
    """
    if len(errors) != len(SEVERITIES):
        raise ValueError(f"{len(errors)} errors: a corruption has {len(SEVERITIES)} severities")
    return 100 * sum(errors) / (ALEXNET_ERRORS[corruption] * len(SEVERITIES))


def mean_corruption_error(errors: Mapping[str, Sequence[float]]) -> float:
    """mCE in per cent: the mean of :func:`corruption_error` over all 15 corruptions.

    Args:
        errors: corruption -> errors in 0..1, one a severity.

    Raises:
        ValueError: where a corruption or a severity is missing, since a mean over others is another figure.
    """
    if set(errors) != set(CORRUPTIONS):
        raise ValueError(f"mCE is of all {len(CORRUPTIONS)} corruptions, and these are {', '.join(sorted(errors))}")
    return sum(corruption_error(name, errors[name]) for name in CORRUPTIONS) / len(CORRUPTIONS)
