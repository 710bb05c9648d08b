"""A trained classifier from the files that there are: timm's runs, converted and official ones, plain state dicts."""

import dataclasses
import importlib
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from backbones import InputError
from backbones.convert import recognise
from backbones.utils.files import read_checkpoint, state_dict_of
from backbones.variants import get_variant
from projects_vil.checkpoint.origins.conversion import convert_official
from projects_vil.checkpoint.origins.pretrained import is_classifier, named_variant
from projects_vil.checkpoint.provenance import PROVENANCE_KEY

# Under which timm's train.py saves the average of its weights.
_AVERAGED = "state_dict_ema"


@dataclasses.dataclass(frozen=True)
class LoadedClassifier:
    """A classifier with its weights.

    Attributes:
        model: timm's model of the variant, in eval mode: (B, 3, H, W) -> (B, ``num_classes``).
        variant: of ``backbones.list_variants()``.
        img_size: height and width in pixels of its images.
        table_img_size: those that its tables of positions are made for; a run of timm may see smaller images.
        num_classes: of its head.
        source: what the file is, in words.
        preparation: of images, where the file says it, by the keys of timm's data config: ``mean`` and ``std``, each
            three numbers for RGB in 0..1, ``interpolation`` and ``crop_pct``.
    """

    model: nn.Module
    variant: str
    img_size: tuple[int, int]
    table_img_size: tuple[int, int]
    num_classes: int
    source: str
    preparation: dict[str, object] = dataclasses.field(default_factory=dict)


def load_classifier(
    path: str | Path, variant: str | None = None, *, img_size: int | None = None, averaged: bool = False
) -> LoadedClassifier:
    """The classifier of a checkpoint: what it says of itself counts, and what it does not say is the variant's own.

    Tables of positions stay as they were trained, also for images of another size, unless ``img_size`` is given.

    Args:
        path: ``.pth``, ``.pth.tar`` or ``.safetensors``: of timm's ``train.py``, of ``tools/convert_checkpoint.py
            --classifier``, an official classifier, or a state dict of ``create_classifier``.
        variant: its name; None where the file says it.
        img_size: a side in pixels that tables of positions are resized to, and that of its images; None for the sizes
            that the file says, or else those of its tables, and last the variant's own.
        averaged: take the averaged weights that ``train.py --model-ema`` saves beside the others.

    Raises:
        InputError: for a file that is no classifier's, and for one that does not fit the variant or the size.
    """
    if variant is not None:
        get_variant(variant)
    contents = read_checkpoint(path)
    try:
        said = _said(contents)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if variant is not None and said.variant not in (None, variant):
        raise InputError(f"{path} says that it is of {said.variant}, and --model is {variant}: leave --model out")
    variant = variant or said.variant
    if variant is None:
        raise InputError(f"{path} does not say which variant it is of: add --model, such as --model vil_small_rpb")
    given = None if img_size is None else (img_size, img_size)
    try:
        state_dict, options, source = _weights(contents, variant, given or said.img_size or said.tables, averaged)
        options = said.options | options
        converted = _pair(options.pop("img_size", None))
        tables = given or converted or _tables(state_dict, variant) or said.tables or _own_size(variant)
        model = _create(variant, state_dict, tables, options)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    images, num_classes = given or said.img_size or tables, len(state_dict["head.weight"])
    return LoadedClassifier(model.eval(), variant, images, tables, num_classes, source, said.preparation)


@dataclasses.dataclass(frozen=True)
class _Said:
    """What a file says of itself: of its sizes, those of images and those that tables are made for."""

    variant: str | None = None
    img_size: tuple[int, int] | None = None
    tables: tuple[int, int] | None = None
    options: dict[str, object] = dataclasses.field(default_factory=dict)
    preparation: dict[str, object] = dataclasses.field(default_factory=dict)


def _said(contents: Mapping[str, Any]) -> _Said:
    ours = contents.get(PROVENANCE_KEY)
    if isinstance(ours, Mapping) and isinstance(ours.get("variant"), str):
        return _Said(ours["variant"], tables=_pair(ours.get("img_size")), options=dict(ours.get("options") or {}))
    variant = named_variant(contents)
    if variant is None:
        return _Said()
    # timm's arguments: of images --input-size before --img-size, and the variant's own without; of tables img_size
    # among --model-kwargs.
    args = contents["args"]
    kwargs = getattr(args, "model_kwargs", None) or {}
    input_size = getattr(args, "input_size", None)
    # DeiT's, and so LIT-Ti's, is one number, timm's has the channels first.
    input_size = input_size[1:] if isinstance(input_size, (list, tuple)) else input_size
    img_size = _pair(input_size) or _pair(getattr(args, "img_size", None)) or _own_size(variant)
    own = get_variant(variant).options
    options = {key: value for key, value in kwargs.items() if key in own}
    return _Said(variant, img_size, _pair(kwargs.get("img_size")), options, _preparation(args))


def _preparation(args: object) -> dict[str, object]:
    """What timm's arguments say of images; it takes one number of ``--mean`` and ``--std`` for each channel."""
    found = {}
    for key, (is_right, meaning) in _PREPARATION.items():
        value = getattr(args, key, None)
        if value is None or value == "":
            continue
        if not is_right(value):
            raise InputError(f"args.{key} is {value!r} in it: it is {meaning}")
        found[key] = tuple(value) * (3 // len(value)) if isinstance(value, (list, tuple)) else value
    return found


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _are_colors(value: object) -> bool:
    is_list = isinstance(value, (list, tuple)) and len(value) in (1, 3)
    return is_list and all(isinstance(number, (int, float)) and math.isfinite(number) for number in value)


_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
_PREPARATION: dict[str, tuple[Callable[[object], bool], str]] = {
    "mean": (_are_colors, "three numbers, or one"),
    "std": (lambda value: _are_colors(value) and all(map(_is_positive, value)), "three numbers above 0, or one"),
    "interpolation": (lambda value: value in _INTERPOLATIONS, f"one of {', '.join(_INTERPOLATIONS)}"),
    "crop_pct": (_is_positive, "a number above 0"),
}


def _pair(size: object) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    return tuple(size) if isinstance(size, (list, tuple)) and len(size) == 2 else None


def _own_size(variant: str) -> tuple[int, int]:
    side = get_variant(variant).classifier_img_size
    return side, side


def _tables(state_dict: Mapping[str, Tensor], variant: str) -> tuple[int, int] | None:
    """What the absolute positions of ViL's first stage are for, in whole patches; None where there are none.

    Newer scripts of timm make the tables for ``--img-size``, older ones for the variant's own size: the tables tell.
    """
    step = get_variant(variant).steps[0]
    sides = [state_dict.get(f"backbone.stages.0.positions.{leaf}") for leaf in ("rows", "cols")]
    if any(side is None for side in sides):
        return None
    return len(sides[0]) * step, len(sides[1]) * step


def _weights(
    contents: Mapping[str, Any], variant: str, size: tuple[int, int] | None, averaged: bool
) -> tuple[dict[str, Tensor], dict[str, object], str]:
    """The state dict of timm's model, the options that an official file asks for, and what the file is."""
    official = recognise(contents)
    if averaged and _AVERAGED not in contents:
        raise InputError("it has no averaged weights (--averaged): timm's train.py saves some with --model-ema")
    if official is not None:
        if not official.classifier:
            raise InputError(f"it is of {official.kind} and has no classification head: take a classifier's")
        conversion = convert_official(official, variant, img_size=size, classifier=True)
        options = {key: value for key, value in conversion.options.items() if key != "num_classes"}
        return conversion.contents["model"], options, f"official, {official.kind}"
    state_dict = contents[_AVERAGED] if averaged else state_dict_of(contents)
    state_dict = {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}
    head = state_dict.get("head.weight")
    if not is_classifier(state_dict) or not isinstance(head, Tensor) or head.ndim != 2:
        raise InputError("it is of no classifier: it has no backbone.stages with head.weight, classes by channels")
    for name, tensor in state_dict.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} is no tensor")
    if not averaged and _AVERAGED in contents:
        logging.getLogger(__name__).info("the weights, not their average, which --averaged takes")
    return state_dict, {}, "averaged weights" if averaged else "weights"


def _create(
    variant: str, state_dict: dict[str, Tensor], size: tuple[int, int], options: Mapping[str, object]
) -> nn.Module:
    # Here, so that a name that timm has too is an error of this call.
    importlib.import_module("backbones.timm_models")
    num_classes, dim = len(state_dict["head.weight"]), get_variant(variant).stages[-1].dim
    for name, shape in {"head.weight": (num_classes, dim), "head.bias": (num_classes,)}.items():
        if name not in state_dict or tuple(state_dict[name].shape) != shape:
            raise InputError(f"{name} is missing, or its shape is not {shape}, as it is for {variant}")
    # With the same number of classes timm loads strictly, through this project's filter, which resizes tables.
    overlay = {"state_dict": state_dict, "num_classes": num_classes}
    return timm.create_model(
        variant, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=num_classes, img_size=size, **options
    )
