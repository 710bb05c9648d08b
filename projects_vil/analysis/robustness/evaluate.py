"""A classifier on the sets that are there."""

import dataclasses
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from backbones import InputError
from backbones.utils.errors import check_file
from projects_vil.analysis.robustness.predicting import Predictor
from projects_vil.analysis.robustness.published import PaperFigure, paper_figures
from projects_vil.analysis.robustness.scoring import (
    CORRUPTIONS,
    SEVERITIES,
    Score,
    corruption_error,
    mean_corruption_error,
    score,
)
from projects_vil.analysis.robustness.sets import (
    REAL_LABELS,
    ROBUSTNESS_SETS,
    check_sets,
    corruption_folders,
    in9_labels,
    labelled_folder,
    missing_parts,
    real_labels,
)
from projects_vil.checkpoint import LoadedClassifier, load_classifier

_NUM_CLASSES = 1000
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CorruptionResult:
    """Of one corruption of ImageNet-C.

    Attributes:
        scores: severity -> its score.
        error: CE in per cent; None where severities are missing.
    """

    scores: dict[int, Score]
    error: float | None

    @property
    def errors(self) -> list[float]:
        """Of the first prediction, in 0..1, one a severity."""
        return [1 - found.top1 / 100 for found in self.scores.values()]


@dataclasses.dataclass(frozen=True)
class SetResult:
    """Of one set.

    Attributes:
        missing: what of it is not in the folder of data. ImageNet-C is evaluated on the rest; another set is left out.
        score: None for ImageNet-C, and for a set that was left out.
        corruptions: of ImageNet-C, by name; empty otherwise.
        error: mCE in per cent; None but for ImageNet-C with all corruptions and severities.
        paper: what the paper prints; None where it prints nothing.
    """

    missing: tuple[str, ...] = ()
    score: Score | None = None
    corruptions: dict[str, CorruptionResult] = dataclasses.field(default_factory=dict)
    error: float | None = None
    paper: PaperFigure | None = None


class Evaluation(NamedTuple):
    """A classifier, timm's data config by which images were prepared, and set -> result."""

    classifier: LoadedClassifier
    data_config: dict[str, object]
    sets: dict[str, SetResult]


def evaluate_robustness(
    weights: str | Path,
    data: str | Path,
    sets: Sequence[str],
    *,
    variant: str | None = None,
    img_size: int | None = None,
    averaged: bool = False,
    crop_pct: float | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    device: str = "cpu",
) -> Evaluation:
    """Top-1 and top-5 on each set that is there, and mCE on ImageNet-C.

    Images of ImageNet-C and ImageNet-9, which are crops of 224 pixels, are not cropped again. All folders are looked
    through before the first image is read.

    Args:
        weights: as :func:`.load_classifier` takes it, with ``variant``, ``img_size`` and ``averaged``.
        data: the folder that the sets' folders are in.
        sets: of ``ROBUSTNESS_SETS``.
        crop_pct: as for :class:`.Predictor`, with ``batch_size``, ``num_workers`` and ``device``.

    Raises:
        InputError: for an unknown set, where none is there, a folder that is not as published, a broken image, and a
            checkpoint that is no classifier's or has no head of ImageNet's 1000 classes.
    """
    names, data = check_sets(sets), Path(data)
    _check_any(data, names)
    check_file(weights, "checkpoint", named_by="--weights")
    missing = _look_through(data, names)
    classifier = load_classifier(weights, variant, img_size=img_size, averaged=averaged)
    if classifier.num_classes != _NUM_CLASSES:
        raise InputError(
            f"{weights} has a head of {classifier.num_classes} classes: these sets are for ImageNet's {_NUM_CLASSES}"
        )
    predictor = Predictor(classifier, crop_pct=crop_pct, batch_size=batch_size, num_workers=num_workers, device=device)
    height, width = classifier.img_size
    _logger.info("%s at %d x %d, %s, on %s", classifier.variant, height, width, classifier.source, device)
    papers = paper_figures(classifier.variant, classifier.img_size)
    results = {}
    for name in names:
        if missing_parts(data, name):
            result = SetResult(missing[name])
        elif name == "c":
            result = _evaluate_corruptions(predictor, data, missing[name])
        else:
            result = _evaluate(predictor, data, name)
        results[name] = dataclasses.replace(result, paper=papers.get(name))
    return Evaluation(classifier, predictor.data_config, results)


def _check_any(data: Path, names: Sequence[str]) -> None:
    if not data.is_dir():
        raise InputError(f"there is no folder {data} (--data)")
    missing = [missing_parts(data, name) for name in names]
    if all(missing):
        needed = ", ".join(dict.fromkeys(part for parts in missing for part in parts))
        raise InputError(f"{data} has none of the sets {', '.join(names)} (--sets): there is no {needed}")


def _look_through(data: Path, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Set -> what of it is missing; all folders are listed, so that what is wrong is said before the work."""
    found = {}
    for name in names:
        the_set, missing = ROBUSTNESS_SETS[name], missing_parts(data, name)
        if missing:
            _logger.warning("%s is left out: %s is not in %s", the_set.title, ", ".join(missing), data)
        elif name == "c":
            missing = _look_through_corruptions(data)
        else:
            paths, classes = labelled_folder(data, name).images()
            if not any(_labels(data, name, paths, classes)):
                raise InputError(f"{data / the_set.labels} has no labels for the images of {data / the_set.folder}")
            if len(paths) != the_set.num_images:
                _logger.warning("%s: %d of the %d images are here", the_set.title, len(paths), the_set.num_images)
        found[name] = tuple(missing)
    return found


def _look_through_corruptions(data: Path) -> list[str]:
    the_set, missing, num_partial = ROBUSTNESS_SETS["c"], [], 0
    there = corruption_folders(data)
    for corruption in CORRUPTIONS:
        for severity in SEVERITIES:
            inside = (corruption, str(severity))
            if severity in there[corruption]:
                num_partial += len(labelled_folder(data, "c", *inside).images()[0]) != the_set.num_images
            else:
                missing.append("/".join((the_set.folder, *inside)))
    if missing:
        _logger.warning("%s: no mCE without %s", the_set.title, ", ".join(missing))
    if num_partial:
        _logger.warning("%s: %d folders do not have %d images", the_set.title, num_partial, the_set.num_images)
    return missing


def _evaluate(predictor: Predictor, data: Path, name: str) -> SetResult:
    the_set = ROBUSTNESS_SETS[name]
    folder = labelled_folder(data, name)
    predictions, paths, classes = predictor(folder, the_set.title, cropped=the_set.cropped)
    return SetResult(score=_scored(the_set.title, predictions, _labels(data, name, paths, classes)))


def _labels(data: Path, name: str, paths: Sequence[Path], classes: Sequence[int]) -> list[Collection[int]]:
    """What is right for each image of a set, by its name or by the folder that it lies in."""
    the_set = ROBUSTNESS_SETS[name]
    if the_set.labels == REAL_LABELS:
        return real_labels(data, paths)
    if the_set.classes == "in9":
        right = in9_labels(data)
        return [right[number] for number in classes]
    return [{number} for number in classes]


def _evaluate_corruptions(predictor: Predictor, data: Path, missing: tuple[str, ...]) -> SetResult:
    results = {}
    for corruption, severities in corruption_folders(data).items():
        scores = {}
        for severity in severities:
            title = f"{ROBUSTNESS_SETS['c'].title} {corruption} {severity}"
            folder = labelled_folder(data, "c", corruption, str(severity))
            predictions, _, classes = predictor(folder, title, cropped=ROBUSTNESS_SETS["c"].cropped)
            scores[severity] = _scored(title, predictions, [{number} for number in classes])
        result = CorruptionResult(scores, None)
        if len(scores) == len(SEVERITIES):
            result = dataclasses.replace(result, error=corruption_error(corruption, result.errors))
        results[corruption] = result
    error = None if missing else mean_corruption_error({name: result.errors for name, result in results.items()})
    return SetResult(missing, corruptions=results, error=error)


def _scored(title: str, predictions: Tensor, labels: Sequence[Collection[int]]) -> Score:
    found = score(predictions, labels)
    _logger.info("%s: %d images, top-1 %.2f, top-5 %.2f", title, found.num_images, found.top1, found.top5)
    return found
