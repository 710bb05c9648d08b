"""The metadata of a checkpoint: variant, classes, input format and versions."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import detectron2
import torch
from detectron2.config import CfgNode
from torch import nn

from backbones import ConfigError
from backbones.build import get_variant
from backbones.checkpoint_files import digest_of_tensors
from backbones.errors import package_version
from backbones.vil import ViLVariant

METADATA_KEY = "vil_detectron2"


@dataclasses.dataclass(frozen=True)
class InputFormat:
    """Channel order, ``"RGB"`` or ``"BGR"``, and mean and standard deviation of each channel, in 0..255."""

    format: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def matches(self, other: "InputFormat") -> bool:
        pairs = zip((*self.mean, *self.std), (*other.mean, *other.std), strict=False)
        return self.format == other.format and all(math.isclose(a, b, rel_tol=1e-3) for a, b in pairs)

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"{self.format} with mean [{mean}] and std [{std}]"


# The input format of all official classifiers and detectors
OFFICIAL_INPUT = InputFormat("RGB", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375))


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
    """Metadata of a checkpoint, stored under ``METADATA_KEY``. Unknown values are None.

    Attributes:
        variant: Variant of the backbone.
        options: Options of the variant that differ from its defaults.
        classes: Class names, in the order of the predictors' rows.
        category_ids: COCO category ids of the classes, in the same order.
        input: Input format during training.
    """

    variant: str | None = None
    options: Mapping[str, object] | None = None
    classes: tuple[str, ...] | None = None
    category_ids: tuple[int, ...] | None = None
    input: InputFormat | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the metadata and the library versions as plain values, for JSON and ``weights_only`` loading."""
        return dataclasses.asdict(self) | {"versions": versions()}

    @classmethod
    def from_contents(cls, contents: Mapping[str, Any]) -> "CheckpointMetadata":
        """Return the metadata in the contents of a checkpoint; all values are None if there is none."""
        saved = contents.get(METADATA_KEY)
        if not isinstance(saved, Mapping):
            return cls()
        classes, ids, image = saved.get("classes"), saved.get("category_ids"), saved.get("input")
        return cls(
            variant=saved.get("variant"),
            options=saved.get("options"),
            classes=classes and tuple(classes),
            category_ids=ids and tuple(ids),
            input=image and InputFormat(image["format"], tuple(image["mean"]), tuple(image["std"])),
        )


def differing_options(variant: str, theirs: Mapping[str, object], ours: Mapping[str, object]) -> dict[str, tuple]:
    """Return the options in which two models of a variant differ: config key -> (their value, our value).

    The result is empty if one of the models cannot be built. ``norm`` is ignored, because its implementations give the
    same outputs in a trained model.
    """
    try:
        their_values, our_values = (_option_values(variant, options) for options in (theirs, ours))
    except (ConfigError, TypeError, ValueError):
        return {}
    return {
        f"MODEL.TRANSFORMER.{option.upper()}": (their_values[option], value)
        for option, value in our_values.items()
        if option in their_values and their_values[option] != value
    }


def versions() -> dict[str, str | None]:
    """Return the versions of this project (None if it is not installed), torch and detectron2."""
    own = package_version("vil-detectron2")
    return {"vil-detectron2": own, "torch": str(torch.__version__), "detectron2": str(detectron2.__version__)}


def fingerprint(cfg: CfgNode, model: nn.Module) -> str:
    """Return the SHA-256 of a model's tensors and of all config keys that change its output at test time.

    Parquet files of predictions store it, so that they cannot be confused with results of other weights, or of the same
    weights with another threshold or image size.
    """
    test = {key: cfg.INPUT[key] for key in ("FORMAT", "MIN_SIZE_TEST", "MAX_SIZE_TEST")}
    test["DETECTIONS_PER_IMAGE"] = cfg.TEST.DETECTIONS_PER_IMAGE
    model_cfg = {key: value for key, value in cfg.MODEL.items() if key not in ("WEIGHTS", "DEVICE")}
    return digest_of_tensors(model.state_dict(), json.dumps([model_cfg, test], sort_keys=True))


def _option_values(variant: str, options: Mapping[str, object]) -> dict[str, object]:
    """Return the value of each option of a variant: one value, or a list with one value for each stage."""
    sizes = get_variant(variant, options)
    values: dict[str, object] = {}
    for option in sizes.options:
        shared = hasattr(sizes, option)
        values[option] = getattr(sizes, option) if shared else [getattr(stage, option) for stage in sizes.stages]
    values.pop("norm", None)
    if isinstance(sizes, ViLVariant):
        values["position_interpolation"] = "once" if sizes.has_fixed_input_size else "per_feature_map"
    return values
