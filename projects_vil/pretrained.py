"""Classifiers of this project, as ``create_classifier`` and timm's scripts save them, as the start of a detector."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from backbones import InputError
from backbones.backbone import Backbone
from backbones.convert import describe_mismatch
from backbones.layers.position import GridRelativeBias, WindowRelativeBias, resize_table
from backbones.variants import VARIANTS

_POSITIONS = ("positions.rows", "positions.cols", "positions.table")
_BIAS = "relative_bias.table"


def is_classifier(state_dict: Mapping[str, object]) -> bool:
    """Whether these are the names of :class:`backbones.backbone.Classifier`."""
    return any(name.removeprefix("module.").startswith("backbone.stages.") for name in state_dict)


def named_variant(contents: Mapping[str, object]) -> str | None:
    """The variant that the arguments of timm's training script name, where the file holds them."""
    # What stands for a Namespace has its values as attributes (backbones.files).
    name = getattr(contents.get("args"), "model", None)
    return name if isinstance(name, str) and name in VARIANTS else None


def backbone_of_classifier(
    state_dict: Mapping[str, Tensor], name: str, backbone: Backbone
) -> tuple[dict[str, Tensor], list[str]]:
    """The state dict of ``backbone``, a model of the variant ``name``, from a classifier's, and a report in lines.

    Tables of positions are resized as those of official classifiers are. Norms of maps that a classifier lacks, LIT's,
    start as ones and zeros.

    Raises:
        InputError: for a name that has no place, a parameter that stays unfilled, or a shape that does not fit.
    """
    target = backbone.state_dict()
    converted: dict[str, Tensor] = {}
    dropped, unexplained, resized = [], [], []
    for full_name, tensor in state_dict.items():
        key = full_name.removeprefix("module.")
        inside = key.startswith("backbone.")
        key = key.removeprefix("backbone.")
        if inside and key in target:
            converted[key] = _fitted(backbone, key, tensor, tuple(target[key].shape))
            if converted[key].shape != tensor.shape:
                resized.append(f"resized: {key} {tuple(tensor.shape)} to {tuple(converted[key].shape)}")
        elif not inside and key.startswith(("norm.", "head.")) or inside and "global_tokens" in key:
            dropped.append(key)
        else:
            unexplained.append(full_name)
    norms = [key for key in target if key.startswith("output_norms.") and key not in converted]
    for key in norms:
        converted[key] = (torch.ones if key.endswith("weight") else torch.zeros)(target[key].shape)
    unfilled = [key for key in target if key not in converted]
    if unexplained or unfilled:
        raise InputError(describe_mismatch(name, unexplained, unfilled))
    lines = [f"a classifier of this project: {len(converted) - len(norms)} mapped, {len(resized)} resized", *resized]
    lines += [f"dropped: {', '.join(dropped)}: only a classifier has them"] if dropped else []
    lines += [f"initialised: {', '.join(norms)}: a classifier has no norms of output maps"] if norms else []
    return converted, lines


def _fitted(backbone: Backbone, key: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) == shape:
        return tensor
    owner = backbone.get_submodule(key.rpartition(".")[0])
    if tensor.ndim == len(shape) and tensor.shape[-1:] == shape[-1:]:
        if key.endswith(_POSITIONS):
            return resize_table(tensor, shape[:-1])
        # Offsets share rows of a segment's table, so that it is no grid.
        side = math.isqrt(len(tensor))
        if key.endswith(_BIAS) and side**2 == len(tensor) and isinstance(owner, (GridRelativeBias, WindowRelativeBias)):
            of_map = isinstance(owner, GridRelativeBias)
            grid = (2 * owner.size[0] - 1, 2 * owner.size[1] - 1) if of_map else (math.isqrt(shape[0]),) * 2
            mode = owner.resize_mode if of_map else "linear"
            return resize_table(tensor.unflatten(0, (side, side)), grid, mode=mode).flatten(0, 1)
    raise InputError(f"{key} is {tuple(tensor.shape)} there and {shape} here")
