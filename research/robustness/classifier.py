"""Load a trained classifier from a checkpoint of timm's train.py, a converted or official one, or a state dict."""

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from backbones import ConfigError
from backbones.build import get_variant
from backbones.checkpoint_files import read_checkpoint, state_dict_of
from backbones.convert import detect_format
from projects_vil.checkpoint import METADATA_KEY, convert_official, is_classifier, named_variant

# The key of the averaged weights in checkpoints of timm's train.py.
_AVERAGED = "state_dict_ema"
# timm's arguments of the image preprocessing.
_PREPARATION = ("mean", "std", "interpolation", "crop_pct")


@dataclasses.dataclass(frozen=True)
class LoadedClassifier:
    """A classifier with its weights.

    Attributes:
        model: timm's model of the variant, in eval mode: (B, 3, H, W) -> (B, ``num_classes``).
        variant: One of ``backbones.list_variants()``.
        img_size: Height and width in pixels of its images.
        table_img_size: Height and width of the images that its position tables are for. timm may train on smaller ones.
        source: A description of the file.
        preparation: The file's values, or None, for keys of timm's data config.
    """

    model: nn.Module
    variant: str
    img_size: tuple[int, int]
    table_img_size: tuple[int, int]
    num_classes: int
    source: str
    preparation: dict[str, Any]


def load_classifier(
    path: str | Path, variant: str | None = None, *, img_size: int | None = None, averaged: bool = False
) -> LoadedClassifier:
    """Load the classifier of a checkpoint. Missing metadata is replaced by the defaults of the variant.

    Position tables keep their size for images of another size, unless ``img_size`` is given.

    Args:
        path: ``.pth``, ``.pth.tar`` or ``.safetensors``: of timm's ``train.py``, of ``tools/convert_checkpoint.py
            --classifier``, an official classifier, or a state dict of ``create_classifier``.
        variant: Name of the variant; None if the file has it.
        img_size: Side in pixels of images and position tables. None for the first available of these: the size in the
            file, the size of its tables, the default size of the variant.
        averaged: Whether to use the averaged weights of ``train.py --model-ema``.

    Raises:
        ConfigError: If the file has no classifier, or does not match the variant or the size.
    """
    contents = read_checkpoint(path)
    try:
        return _load(contents, variant, img_size, averaged)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _load(contents: Mapping[str, Any], variant: str | None, img_size: int | None, averaged: bool) -> LoadedClassifier:
    metadata = contents.get(METADATA_KEY)
    metadata = metadata if isinstance(metadata, Mapping) else {}
    in_file = metadata.get("variant") or named_variant(contents)
    if variant is not None and in_file not in (None, variant):
        raise ConfigError(f"The checkpoint is for {in_file}, not for {variant}. Use --model {in_file}.")
    variant = variant or in_file
    if variant is None:
        raise ConfigError("The checkpoint has no name of a variant. Add it, for example --model vil_small_rpb.")
    spec = get_variant(variant)
    own_size = _pair(spec.classifier_img_size)
    options, preparation = dict(metadata.get("options") or {}), {}
    images, tables = None, _pair(metadata.get("img_size"))
    if not metadata and in_file is not None:
        args = contents["args"]
        arguments = getattr(args, "model_kwargs", None) or {}
        options = {key: value for key, value in arguments.items() if key in spec.options}
        tables = _pair(arguments.get("img_size"))
        # timm saves (channels, height, width). DeiT, and therefore LIT-Ti, saves one number.
        images = _pair(getattr(args, "input_size", None)) or _pair(getattr(args, "img_size", None)) or own_size
        preparation = {key: getattr(args, key, None) for key in _PREPARATION}
    given = _pair(img_size)
    state_dict, converted, source = _weights(contents, variant, given or images or tables, averaged)
    options |= converted
    converted_size = _pair(options.pop("img_size", None))
    tables = given or converted_size or _table_size(state_dict, variant) or tables or own_size
    # The project's models register with timm when they are imported.
    importlib.import_module("research.timm_models")
    num_classes = len(state_dict["head.weight"])
    # With the same number of classes timm loads strictly, through the project's filter, which resizes tables.
    overlay = {"state_dict": state_dict, "num_classes": num_classes}
    model = timm.create_model(
        variant, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=num_classes, img_size=tables, **options
    )
    return LoadedClassifier(model.eval(), variant, given or images or tables, tables, num_classes, source, preparation)


def _pair(size: object) -> tuple[int, int] | None:
    """Return (height, width) of a side, a pair, or (channels, height, width)."""
    if isinstance(size, int):
        return size, size
    return tuple(size[-2:]) if isinstance(size, (list, tuple)) and len(size) >= 2 else None


def _table_size(state_dict: Mapping[str, Tensor], variant: str) -> tuple[int, int] | None:
    """Return the image size that the absolute positions of ViL's first stage are for, or None.

    Newer scripts of timm make the tables for ``--img-size``, older ones for the variant's own size.
    """
    step = get_variant(variant).downsample_factors[0]
    rows, cols = (state_dict.get(f"backbone.stages.0.positions.{leaf}") for leaf in ("rows", "cols"))
    return None if rows is None or cols is None else (len(rows) * step, len(cols) * step)


def _weights(
    contents: Mapping[str, Any], variant: str, size: tuple[int, int] | None, averaged: bool
) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Return the state dict of timm's model, the options that an official file needs, and a description of the file."""
    if averaged and _AVERAGED not in contents:
        raise ConfigError("The checkpoint has no averaged weights. Train with --model-ema of timm's train.py.")
    official = detect_format(contents)
    if official is not None:
        if not official.classifier:
            raise ConfigError(f"The checkpoint of {official.project} has no classification head. Use a classifier.")
        conversion = convert_official(official, variant, img_size=size, classifier=True)
        options = {key: value for key, value in conversion.options.items() if key != "num_classes"}
        return conversion.contents["model"], options, f"official, {official.project}"
    state_dict = contents[_AVERAGED] if averaged else state_dict_of(contents)
    state_dict = {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}
    if not is_classifier(state_dict) or "head.weight" not in state_dict:
        raise ConfigError("The checkpoint has no head.weight. Use a classifier.")
    return state_dict, {}, "averaged weights" if averaged else "weights"
