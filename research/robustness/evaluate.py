"""Evaluate a classifier on the ImageNet sets in a folder."""

import itertools
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
from research.robustness.classifier import load_classifier
from research.robustness.published import paper_figures
from research.robustness.sets import (
    ALEXNET_ERRORS,
    ROBUSTNESS_SETS,
    SEVERITIES,
    LabeledImages,
    accuracy,
    correct_classes,
    corruption_error,
    top_classes,
)

_logger = logging.getLogger(__name__)


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
) -> dict[str, Any]:
    """Compute top-1 and top-5 on each available set, and mCE on ImageNet-C.

    Images of ImageNet-C and ImageNet-9, which are crops of 224 pixels, are not cropped again.

    Args:
        weights: See ``path`` of :func:`.load_classifier`, also for ``variant``, ``img_size`` and ``averaged``.
        data: The folder that contains the sets' folders.
        sets: Keys of ``ROBUSTNESS_SETS``.
        crop_pct: Crop side / shorter image side. None for the value in the checkpoint, or the value of the variant.

    Returns:
        ``variant``, ``source`` (a description of the file), ``data_config`` (timm's, for the images) and ``sets``, for
        each set:

        missing: missing folders and files. A set without its folder is skipped.
        accuracies: corruption -> results of :func:`.accuracy`, one per severity. Sets other than ImageNet-C have the
            corruption "".
        errors: corruption -> CE in percent, if all severities are available.
        mean_error: mCE in percent, if all corruptions are available.
        paper: the result in the paper, top-1 or for ImageNet-C mCE, and its table.

    Raises:
        ConfigError: If a set is unknown, no set is available, a folder differs from the published one, an image is
            damaged, or the checkpoint has no head with ImageNet's 1000 classes.
    """
    data = Path(data)
    for name in sets:
        check_choice("set", name, ROBUSTNESS_SETS)
    sets = [name for name in ROBUSTNESS_SETS if name in sets]
    missing: dict[str, list[str]] = {}
    for name in sets:
        needed = (ROBUSTNESS_SETS[name].folder, ROBUSTNESS_SETS[name].labels)
        missing[name] = [part for part in needed if part is not None and not (data / part).exists()]
    if all(missing.values()):
        names = ", ".join(sorted({*sum(missing.values(), [])}))
        raise ConfigError(f"'{data}' contains none of {names}. Unpack one of the sets there.")
    # All folders are listed before the first image is read.
    folders = {name: _list_folders(data, name, missing[name]) for name in sets}
    classifier = load_classifier(weights, variant, img_size=img_size, averaged=averaged)
    if classifier.num_classes != 1000:
        raise ConfigError(f"'{weights}' has {classifier.num_classes} classes. Use a classifier of ImageNet's 1000.")
    model = classifier.model.to(device)
    given = {**classifier.preparation, "input_size": (3, *classifier.img_size)}
    given |= {} if crop_pct is None else {"crop_pct": crop_pct}
    config = resolve_model_data_config(model, args=given)
    _logger.info("%s at %d x %d, %s, on %s", classifier.variant, *classifier.img_size, classifier.source, device)
    papers = paper_figures(classifier.variant, classifier.img_size)
    results: dict[str, dict[str, Any]] = {}
    predicted: dict[str, Tensor] = {}
    for name in sets:
        image_set = ROBUSTNESS_SETS[name]
        accuracies: dict[str, list[dict[str, float]]] = {}
        for corruption, images in folders[name]:
            images.transform = create_transform(**config | ({} if image_set.cropped else {"crop_pct": 1.0}))
            if images.root not in predicted:
                # Only the last predictions are kept, because sets with the same folder are next to each other.
                predicted = {images.root: _predict(model, images, batch_size, num_workers, device)}
            result = accuracy(predicted[images.root], correct_classes(data, name, images.samples))
            _logger.info("%s %s: top-1 %.2f, top-5 %.2f", image_set.title, corruption, result["top1"], result["top5"])
            accuracies.setdefault(corruption, []).append(result)
        errors = {
            corruption: corruption_error(corruption, [1 - row["top1"] / 100 for row in rows])
            for corruption, rows in accuracies.items()
            if name == "c" and len(rows) == len(SEVERITIES)
        }
        mean_error = statistics.fmean(errors.values()) if errors and not missing[name] else None
        results[name] = {"missing": missing[name], "accuracies": accuracies, "errors": errors}
        results[name] |= {"mean_error": mean_error, "paper": papers.get(name)}
    return {"variant": classifier.variant, "source": classifier.source, "data_config": config, "sets": results}


def _list_folders(data: Path, name: str, missing: list[str]) -> list[tuple[str, LabeledImages]]:
    """Return the image folders of a set with their corruption. Add missing folders of ImageNet-C to ``missing``."""
    image_set = ROBUSTNESS_SETS[name]
    if missing:
        _logger.warning("%s is skipped: %s is not in %s", image_set.title, ", ".join(missing), data)
        return []
    folders = []
    if name != "c":
        folders.append(("", LabeledImages(data, name)))
        correct_classes(data, name, folders[0][1].samples)
    else:
        for corruption, level in itertools.product(ALEXNET_ERRORS, map(str, SEVERITIES)):
            if (data / image_set.folder / corruption / level).is_dir():
                folders.append((corruption, LabeledImages(data, name, corruption, level)))
            else:
                missing.append(f"{image_set.folder}/{corruption}/{level}")
    for _, images in folders:
        if len(images) != image_set.num_images:
            _logger.warning("%s has %d of %d images", images.root, len(images), image_set.num_images)
    return folders


@torch.inference_mode()
def _predict(model: torch.nn.Module, images: LabeledImages, batch_size: int, num_workers: int, device: str) -> Tensor:
    """Return the five most probable classes of each image, (N, 5)."""
    loader = DataLoader(images, batch_size=batch_size, num_workers=num_workers, pin_memory=device != "cpu")
    classes = []
    for batch, _ in loader:
        logits = model(batch.to(device, non_blocking=True)).float()
        if not logits.isfinite().all():
            raise ConfigError(f"{images.root}: the outputs are not finite. Use other weights.")
        classes.append(top_classes(logits, images.subset).cpu())
    return torch.cat(classes)


def format_results(results: dict[str, Any]) -> str:
    """Return a Markdown table with a row for each set. ImageNet-C has a row for each corruption and one for mCE.

    For an incomplete set, the row also has the number of files.
    """
    rows = [("set", "images", "top-1 %", "top-5 %", "CE %", "paper %"), ("---",) * 6]
    for name, result in results["sets"].items():
        image_set = ROBUSTNESS_SETS[name]
        paper = "{} ({})".format(*result["paper"]) if result["paper"] else "-"
        accuracies, errors = result["accuracies"], result["errors"]
        if not accuracies:
            rows.append((image_set.title, f"missing: {', '.join(result['missing'])}", "-", "-", "-", paper))
        for corruption, by_severity in accuracies.items():
            error = f"{errors[corruption]:.2f}" if corruption in errors else "-"
            row = (f"{image_set.title} {corruption}".strip(), *_cells(by_severity, image_set.num_images), error)
            rows.append((*row, "-" if corruption else paper))
        if name == "c" and accuracies:
            error = "-" if result["mean_error"] is None else f"{result['mean_error']:.2f}"
            cells = _cells(sum(accuracies.values(), []), image_set.num_images)
            rows.append((f"{image_set.title} mCE", *cells, error, paper))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(folders: Sequence[dict[str, float]], published: int) -> tuple[str, str, str]:
    """Return the number of images in some folders, and the means of top-1 and top-5 over the folders."""
    images, files = (sum(folder[key] for folder in folders) for key in ("num_images", "num_files"))
    total = published * len(folders)
    number = str(images) if files == total else f"{images} ({files} of {total} files)"
    return number, *(f"{statistics.fmean(folder[key] for folder in folders):.2f}" for key in ("top1", "top5"))
