"""What a checkpoint says of itself: variant, classes, input format and versions, under one key of the file."""

import dataclasses
import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from typing import Any

import detectron2
import torch
from detectron2.config import CfgNode

from backbones import InputError
from backbones.variants import ViLVariant, get_variant
from projects_vil.checkpoint.categories import Categories, checked_ids, dataset_categories
from projects_vil.config import is_segmentor, number_of_classes

PROVENANCE_KEY = "vil_detectron2"
_DISTRIBUTION = "vil-detectron2"


@dataclasses.dataclass(frozen=True)
class InputFormat:
    """Order of channels, ``"RGB"`` or ``"BGR"``, and their mean and standard deviation in 0..255, in that order."""

    channels: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def matches(self, other: "InputFormat") -> bool:
        ours, theirs = (*self.mean, *self.std), (*other.mean, *other.std)
        if len(ours) != len(theirs) or self.channels != other.channels:
            return False
        return all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(ours, theirs, strict=True))

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"{self.channels} with mean [{mean}] and std [{std}]"


# What all official projects train with, classifiers and detectors.
OFFICIAL_INPUT = InputFormat("RGB", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375))


@dataclasses.dataclass(frozen=True)
class Provenance:
    """What is known of a checkpoint; None for what is not.

    Attributes:
        variant: of the backbone.
        options: of the variant, where they are not its own; empty where all are.
        classes: their names, in the order of the predictors' rows.
        input_format: that it was trained on.
        category_ids: of the classes in COCO files, in the same order.
    """

    variant: str | None = None
    options: Mapping[str, object] | None = None
    classes: tuple[str, ...] | None = None
    input_format: InputFormat | None = None
    category_ids: tuple[int, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As it is saved, with the versions of what saved it: plain values, which ``weights_only`` and JSON take."""
        image = self.input_format
        return {
            "variant": self.variant,
            "options": None if self.options is None else dict(self.options),
            "classes": None if self.classes is None else list(self.classes),
            "category_ids": None if self.category_ids is None else list(self.category_ids),
            "input": image and {"format": image.channels, "mean": list(image.mean), "std": list(image.std)},
            "versions": versions(),
        }

    @classmethod
    def of(cls, contents: Mapping[str, Any]) -> "Provenance":
        """What the contents of a file say; a file without the key, or with something else there, says nothing."""
        saved = contents.get(PROVENANCE_KEY)
        saved = saved if isinstance(saved, Mapping) else {}
        variant, classes, image = saved.get("variant"), saved.get("classes"), saved.get("input")
        classes = tuple(map(str, classes)) if isinstance(classes, (list, tuple)) else None
        try:
            input_format = InputFormat(str(image["format"]), _numbers(image["mean"]), _numbers(image["std"]))
        except (KeyError, TypeError, ValueError):
            input_format = None
        return cls(
            variant=variant if isinstance(variant, str) else None,
            options=saved["options"] if isinstance(saved.get("options"), Mapping) else None,
            classes=classes,
            input_format=input_format,
            category_ids=checked_ids(saved.get("category_ids"), classes),
        )


def effective_options(variant: str, options: Mapping[str, object]) -> dict[str, object] | None:
    """What a model has, given or not: one value, or a list of one a stage; None for options that cannot be.

    Without ``batch_norm``, whose kinds compute the same once trained, and ``position_resizing`` where there are no
    tables to resize.
    """
    try:
        sizes = get_variant(variant, options)
    except (InputError, TypeError, ValueError):
        return None
    values: dict[str, object] = {}
    for option in sizes.options:
        of_all = hasattr(sizes, option)
        values[option] = getattr(sizes, option) if of_all else [getattr(stage, option) for stage in sizes.stages]
    values.pop("batch_norm", None)
    if isinstance(sizes, ViLVariant):
        values["position_resizing"] = sizes.position_resizing or ("map" if sizes.relative_bias else "load")
        if sizes.relative_bias and not any(stage.attention == "dense" for stage in sizes.stages):
            del values["position_resizing"]
    return values


def differing_options(
    variant: str, theirs: Mapping[str, object], ours: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Config key -> (their value, our value), for two models of a variant; empty where one side cannot be."""
    their_values, our_values = effective_options(variant, theirs), effective_options(variant, ours)
    if their_values is None or our_values is None:
        return {}
    return {
        f"MODEL.TRANSFORMER.{option.upper()}": (their_values[option], value)
        for option, value in our_values.items()
        if option in their_values and their_values[option] != value
    }


def versions() -> dict[str, str | None]:
    """Of this project (None where it is not installed), torch and detectron2."""
    try:
        own = importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        own = None
    return {_DISTRIBUTION: own, "torch": str(torch.__version__), "detectron2": str(detectron2.__version__)}


def input_format(cfg: CfgNode) -> InputFormat:
    return InputFormat(cfg.INPUT.FORMAT, _numbers(cfg.MODEL.PIXEL_MEAN), _numbers(cfg.MODEL.PIXEL_STD))


def model_categories(cfg: CfgNode, datasets: Sequence[str]) -> Categories | None:
    """Those of the first of some datasets that has as many classes as the model."""
    _, number = number_of_classes(cfg)
    return dataset_categories(datasets, number, kind="stuff" if is_segmentor(cfg) else "thing")


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
