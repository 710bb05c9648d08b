"""Evaluate a classifier on the sets that are in a folder."""

import dataclasses
import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor
from torch.utils.data import DataLoader

from backbones import ConfigError
from backbones.errors import check_choice
from research.robustness.classifier import LoadedClassifier, load_classifier
from research.robustness.published import PaperFigure, paper_figures
from research.robustness.sets import (
    ROBUSTNESS_SETS,
    SEVERITIES,
    Accuracy,
    LabelledImages,
    accuracy,
    correct_classes,
    corruption_error,
    corruption_folders,
    mean_corruption_error,
    missing_parts,
    top_classes,
)

_logger = logging.getLogger(__name__)


@dataclasses.dataclass
class SetResult:
    """The result on one set.

    Attributes:
        missing: folders and files that are not there. A set without its folder is left out.
        accuracies: corruption, or "" for a set that is not ImageNet-C -> its accuracies, one for each severity.
        errors: corruption -> CE in percent, where all severities are there.
        mean_error: mCE in percent, where all corruptions are there.
        paper: the paper's figure: top-1, for ImageNet-C mCE.
    """

    missing: list[str] = dataclasses.field(default_factory=list)
    accuracies: dict[str, list[Accuracy]] = dataclasses.field(default_factory=dict)
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    mean_error: float | None = None
    paper: PaperFigure | None = None


@dataclasses.dataclass
class RobustnessResults:
    """A classifier, timm's data config for its images, and set -> result."""

    classifier: LoadedClassifier
    data_config: dict[str, Any]
    sets: dict[str, SetResult]

    def as_json(self) -> dict[str, Any]:
        """Return all figures, unrounded."""
        found = {"variant": self.classifier.variant, "source": self.classifier.source, "data_config": self.data_config}
        return found | {"sets": {name: dataclasses.asdict(result) for name, result in self.sets.items()}}


def evaluate_robustness(
    weights: str | Path,
    data: str | Path,
    sets: Sequence[str] = tuple(ROBUSTNESS_SETS),
    *,
    variant: str | None = None,
    img_size: int | None = None,
    averaged: bool = False,
    crop_pct: float | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    device: str = "cpu",
) -> RobustnessResults:
    """Compute top-1 and top-5 on each set that is there, and mCE on ImageNet-C.

    Images of ImageNet-C and ImageNet-9, which are crops of 224 pixels, are not cropped again.

    Args:
        weights: as :func:`.load_classifier` takes it, with ``variant``, ``img_size`` and ``averaged``.
        data: the folder that contains the sets' folders.
        sets: keys of ``ROBUSTNESS_SETS``.
        crop_pct: share of the shorter side that the crop has; None for that of the checkpoint or else the variant.

    Raises:
        ConfigError: for an unknown set, where none is there, a folder that is not as published, a broken image, and a
            checkpoint without a head of ImageNet's 1000 classes.
    """
    data = Path(data)
    for name in sets:
        check_choice("set", name, ROBUSTNESS_SETS)
    sets = [name for name in ROBUSTNESS_SETS if name in sets]
    results = {name: SetResult(missing_parts(data, name)) for name in sets}
    if all(result.missing for result in results.values()):
        needed = sorted({part for result in results.values() for part in result.missing})
        raise ConfigError(f"data: {data} has none of {', '.join(needed)}")
    # All folders are listed before the first image is read.
    folders = {name: _list_folders(data, name, result) for name, result in results.items()}
    classifier = load_classifier(weights, variant, img_size=img_size, averaged=averaged)
    if classifier.num_classes != 1000:
        raise ConfigError(f"{weights} has a head of {classifier.num_classes} classes: the sets are for ImageNet's 1000")
    model = classifier.model.to(device)
    given = {**classifier.preparation, "input_size": (3, *classifier.img_size)}
    given |= {} if crop_pct is None else {"crop_pct": crop_pct}
    config = resolve_model_data_config(model, args=given)
    _logger.info("%s at %d x %d, %s, on %s", classifier.variant, *classifier.img_size, classifier.source, device)
    papers = paper_figures(classifier.variant, classifier.img_size)
    predicted: dict[str, Tensor] = {}
    for name, result in results.items():
        image_set, result.paper = ROBUSTNESS_SETS[name], papers.get(name)
        for corruption, images in folders[name]:
            images.transform = create_transform(**config | ({} if image_set.cropped else {"crop_pct": 1.0}))
            if images.root not in predicted:
                # Only the last predictions are kept: two sets that share a folder follow each other.
                predicted = {images.root: _predict(model, images, batch_size, num_workers, device)}
            found = accuracy(predicted[images.root], correct_classes(data, name, images.samples))
            _logger.info("%s %s: top-1 %.2f, top-5 %.2f", image_set.title, corruption, found.top1, found.top5)
            result.accuracies.setdefault(corruption, []).append(found)
        if name == "c" and result.accuracies:
            errors = {key: [1 - one.top1 / 100 for one in found] for key, found in result.accuracies.items()}
            whole = {key: values for key, values in errors.items() if len(values) == len(SEVERITIES)}
            result.errors = {key: corruption_error(key, values) for key, values in whole.items()}
            result.mean_error = None if result.missing else mean_corruption_error(errors)
    return RobustnessResults(classifier, config, results)


def _list_folders(data: Path, name: str, result: SetResult) -> list[tuple[str, LabelledImages]]:
    """Return the folders of images of a set, with their corruption; add the missing ones of ImageNet-C."""
    image_set = ROBUSTNESS_SETS[name]
    if result.missing:
        _logger.warning("%s is left out: %s is not in %s", image_set.title, ", ".join(result.missing), data)
        return []
    if name != "c":
        folders = [("", LabelledImages(data, name))]
        correct_classes(data, name, folders[0][1].samples)
    else:
        there = corruption_folders(data)
        folders = [
            (corruption, LabelledImages(data, name, corruption, str(level)))
            for corruption, levels in there.items()
            for level in levels
        ]
        absent = {key: [level for level in SEVERITIES if level not in levels] for key, levels in there.items()}
        result.missing += [f"{image_set.folder}/{key}/{level}" for key, levels in absent.items() for level in levels]
    for _, images in folders:
        if len(images) != image_set.num_images:
            _logger.warning("%s has %d of %d images", images.root, len(images), image_set.num_images)
    return folders


@torch.inference_mode()
def _predict(model: torch.nn.Module, images: LabelledImages, batch_size: int, num_workers: int, device: str) -> Tensor:
    """Return the five most probable classes of each image, (N, 5)."""
    loader = DataLoader(images, batch_size=batch_size, num_workers=num_workers, pin_memory=device != "cpu")
    found = []
    for batch, _ in loader:
        logits = model(batch.to(device, non_blocking=True)).float()
        if not logits.isfinite().all():
            raise ConfigError(f"{images.root}: the outputs of the classifier are not finite")
        found.append(top_classes(logits, images.subset).cpu())
    return torch.cat(found)


def format_results(results: RobustnessResults) -> str:
    """Return a Markdown table: a row for each set, for ImageNet-C for each corruption and for mCE.

    Where a set is incomplete, its number of files is given too.
    """
    rows = [("set", "images", "top-1 %", "top-5 %", "CE %", "paper %"), ("---",) * 6]
    for name, result in results.sets.items():
        image_set, paper = ROBUSTNESS_SETS[name], str(result.paper or "-")
        if not result.accuracies:
            rows.append((image_set.title, f"missing: {', '.join(result.missing)}", "-", "-", "-", paper))
        for corruption, found in result.accuracies.items():
            title = f"{image_set.title} {corruption}".strip()
            error = f"{result.errors[corruption]:.2f}" if corruption in result.errors else "-"
            rows.append((title, *_cells(found, image_set.num_images), error, "-" if corruption else paper))
        if name == "c" and result.accuracies:
            found = [one for accuracies in result.accuracies.values() for one in accuracies]
            error = "-" if result.mean_error is None else f"{result.mean_error:.2f}"
            rows.append((f"{image_set.title} mCE", *_cells(found, image_set.num_images), error, paper))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(found: Sequence[Accuracy], published: int) -> tuple[str, str, str]:
    """Return the number of images in some folders, and the means of top-1 and top-5 over the folders."""
    images, files = sum(one.num_images for one in found), sum(one.num_files for one in found)
    total = published * len(found)
    top1, top5 = (statistics.fmean(values) for values in zip(*((one.top1, one.top5) for one in found), strict=True))
    number = str(images) if files == total else f"{images} ({files} of {total} files)"
    return number, f"{top1:.2f}", f"{top5:.2f}"
