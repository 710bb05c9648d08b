"""The ImageNet sets, their published folders, and the accuracy of predictions.

A folder of data has ``val`` (ImageNet's validation images, sorted into a folder for each class), ``real.json``
(ImageNet-Real's labels for ``val``), the three of ImageNet-V2, ``imagenet-a``, ``imagenet-r`` and ``sketch`` as they
unpack, ``imagenet-c/CORRUPTION/SEVERITY``, and ``bg_challenge`` with ``in_to_in9.json`` (ImageNet-9).
"""

import dataclasses
import functools
import importlib.resources
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageNetInfo
from torch import Tensor
from torchvision.datasets import ImageFolder

from backbones import ConfigError

# The denominators of mCE (Hendrycks & Dietterich, "Benchmarking Neural Network Robustness", 2019): AlexNet's error on
# each of the 15 corruptions, the mean over its 5 severities, in 0..1. Source: ALEXNET_ERR in imagenet.py of
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
SEVERITIES = (1, 2, 3, 4, 5)

REAL_LABELS = "real.json"
# From MadryLab/backgrounds_challenge: class 0 to 999 -> index of a class below, or -1.
IN9_LABELS = "in_to_in9.json"
IN9_CLASSES = (
    *("00_dog", "01_bird", "02_wheeled vehicle", "03_reptile", "04_carnivore", "05_insect", "06_musical instrument"),
    *("07_primate", "08_fish"),
)
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG", re.IGNORECASE)
_NUM_CLASSES, _NUM_VAL = 1000, 50_000


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """A published set.

    Attributes:
        title: Its name in tables.
        folder: Folder of the images.
        num_images: The published number of images. For ImageNet-C, the number of each severity.
        classes: ``"wordnet"`` for folders named by WordNet ids, ``"number"`` for folders 0 to 999, ``"in9"`` for
            ``IN9_CLASSES``.
        subset: timm's list of the 200 classes that ImageNet-A and -R have; None for all 1000.
        labels: A file with the correct classes. None if the folders are the classes.
        cropped: Whether its images are cropped. False for images that are already crops of 224 pixels.
    """

    title: str
    folder: str
    num_images: int
    classes: str = "wordnet"
    subset: str | None = None
    labels: str | None = None
    cropped: bool = True


def _in9(title: str, folder: str) -> ImageSet:
    path = f"bg_challenge/{folder}/val"
    return ImageSet(f"ImageNet-9 {title}", path, 4_050, "in9", labels=IN9_LABELS, cropped=False)


# Numbers of images: results/README.md of timm (val, V2), LS appendix D (A), README.md of hendrycks/robustness
# (R), the dataset card of imagenet_sketch in huggingface/datasets (Sketch), whose own README says 50,000, and "Noise or
# Signal", Xiao et al. 2021, whose test sets these of ImageNet-9 are.
ROBUSTNESS_SETS = {
    "val": ImageSet("ImageNet val", "val", _NUM_VAL),
    # After val, because both use the same predictions.
    "real": ImageSet("ImageNet-Real", "val", _NUM_VAL, labels=REAL_LABELS),
    "v2": ImageSet("ImageNet-V2 matched frequency", "imagenetv2-matched-frequency-format-val", 10_000, "number"),
    "v2-threshold": ImageSet("ImageNet-V2 threshold 0.7", "imagenetv2-threshold0.7-format-val", 10_000, "number"),
    "v2-top": ImageSet("ImageNet-V2 top images", "imagenetv2-top-images-format-val", 10_000, "number"),
    "a": ImageSet("ImageNet-A", "imagenet-a", 7_500, subset="imagenet_a"),
    "r": ImageSet("ImageNet-R", "imagenet-r", 30_000, subset="imagenet_r"),
    "sketch": ImageSet("ImageNet-Sketch", "sketch", 50_889),
    "in9": _in9("Original", "original"),
    "in9-same": _in9("Mixed-same", "mixed_same"),
    "in9-rand": _in9("Mixed-rand", "mixed_rand"),
    "c": ImageSet("ImageNet-C", "imagenet-c", _NUM_VAL, cropped=False),
}


class LabeledImages(ImageFolder):
    """The images of a set, or of a folder ``inside`` it, such as a corruption and a severity of ImageNet-C.

    Raises:
        ConfigError: If a folder is not one of the classes of the set.
        FileNotFoundError: If a folder is empty.
    """

    def __init__(self, data: Path, name: str, *inside: str, transform: Callable[[Any], Tensor] | None = None) -> None:
        image_set = ROBUSTNESS_SETS[name]
        self._numbers = {
            "number": {str(number): number for number in range(_NUM_CLASSES)},
            "in9": {name: number for number, name in enumerate(IN9_CLASSES)},
            "wordnet": wordnet_classes(),
        }[image_set.classes]
        self.subset: list[int] | None = None
        if image_set.subset is not None:
            text = (importlib.resources.files("timm.data") / "_info" / f"{image_set.subset}_synsets.txt").read_text()
            self._numbers = {wordnet_id: self._numbers[wordnet_id] for wordnet_id in text.split()}
            self.subset = sorted(self._numbers.values())
        super().__init__(str(Path(data, image_set.folder, *inside)), transform=transform)

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
        unknown = [name for name in names if name not in self._numbers]
        if unknown or not names:
            example = next(iter(self._numbers))
            reason = f"{unknown[0]} is not a class of the set" if unknown else "it has no folders of classes"
            raise ConfigError(f"'{directory}': {reason}. Put the images of each class in a folder, such as {example}.")
        return names, {name: self._numbers[name] for name in names}

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            return super().__getitem__(index)
        except OSError as error:
            raise ConfigError(f"Cannot read '{self.samples[index][0]}': {error}. Replace it.") from error


@functools.cache
def wordnet_classes() -> dict[str, int]:
    """Return WordNet id -> class 0 to 999, its index in the sorted list."""
    return {wordnet_id: number for number, wordnet_id in enumerate(sorted(ImageNetInfo().label_names()))}


def correct_classes(data: Path, name: str, samples: Sequence[tuple[str, int]]) -> list[Collection[int]]:
    """Return the correct classes, 0 to 999, of each (path, class of its folder); none for an image without a label.

    Raises:
        ConfigError: If the file of labels is not the published one, or if an image does not have its published name.
    """
    image_set = ROBUSTNESS_SETS[name]
    if image_set.labels is None:
        return [{number} for _, number in samples]
    path = data / image_set.labels
    labels = json.loads(path.read_text())
    if image_set.labels == IN9_LABELS:
        if not isinstance(labels, dict) or labels.keys() != {str(number) for number in range(_NUM_CLASSES)}:
            raise ConfigError(f"'{path}' has other keys than 0 to 999. Use the file of MadryLab/backgrounds_challenge.")
        correct = [{int(key) for key, value in labels.items() if value == number} for number in range(len(IN9_CLASSES))]
        return [correct[number] for _, number in samples]
    if not isinstance(labels, list) or len(labels) != _NUM_VAL:
        raise ConfigError(f"'{path}' does not have labels of {_NUM_VAL} images. Use the file of ImageNet-Real.")
    numbers = [_VAL_IMAGE.fullmatch(Path(sample).name) for sample, _ in samples]
    for (sample, _), number in zip(samples, numbers, strict=True):
        if number is None or not 1 <= int(number[1]) <= _NUM_VAL:
            raise ConfigError(f"'{path}' has no '{sample}'. Use the published names, ILSVRC2012_val_*.JPEG.")
    return [set(labels[int(number[1]) - 1]) for number in numbers]


def top_classes(logits: Tensor, subset: Sequence[int] | None = None) -> Tensor:
    """Return the five most probable classes of each image, (B, 5), from logits (B, K).

    Args:
        subset: The only classes that may be predicted; None for all.
    """
    if subset is None:
        return logits.topk(5, dim=1).indices
    allowed = torch.as_tensor(subset, device=logits.device)
    return allowed[logits[:, allowed].topk(5, dim=1).indices]


def accuracy(predictions: Tensor, correct: Sequence[Collection[int]]) -> dict[str, float]:
    """Compare predictions (N, 5) with the correct classes of each image; images without a label do not count.

    Returns:
        num_files: N; ``num_images`` of them have a label.
        top1, top5: percent of the labeled images whose first prediction, or one of five, is correct.

    Raises:
        ConfigError: If no image has a label.
    """
    hits = [
        [number in classes for number in row]
        for row, classes in zip(predictions.tolist(), correct, strict=True)
        if classes
    ]
    if not hits:
        raise ConfigError("No image has a label. Use the file of ImageNet-Real.")
    top1, top5 = (100 * sum(any(row[:top]) for row in hits) / len(hits) for top in (1, 5))
    return {"num_files": len(predictions), "num_images": len(hits), "top1": top1, "top5": top5}


def corruption_error(corruption: str, errors: Sequence[float]) -> float:
    """Return CE in percent: the sum of the errors (0..1) of the five severities, divided by the sum for AlexNet."""
    return 100 * sum(errors) / (ALEXNET_ERRORS[corruption] * len(SEVERITIES))
