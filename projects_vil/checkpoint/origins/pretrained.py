"""Classifiers of this project, as ``create_classifier`` and timm's scripts save them, as the start of a detector."""

import shlex
from collections.abc import Mapping

import torch
from torch import Tensor

from backbones import InputError
from backbones.backbone import Backbone
from backbones.convert import describe_mismatch
from backbones.layers.position import fit_table
from backbones.variants import VARIANTS, get_variant

_CLASSIFIERS_OWN = {f"{layer}.{leaf}" for layer in ("norm", "head") for leaf in ("weight", "bias")}


def is_classifier(state_dict: Mapping[str, object]) -> bool:
    """Whether these are the names of :class:`backbones.backbone.Classifier`."""
    return any(name.removeprefix("module.").startswith("backbone.stages.") for name in state_dict)


def named_variant(contents: Mapping[str, object]) -> str | None:
    """The variant that the arguments of timm's training script name, where the file holds them."""
    # What stands for a Namespace has its values as attributes (backbones.utils.files).
    name = getattr(contents.get("args"), "model", None)
    return name if isinstance(name, str) and name in VARIANTS else None


def backbone_of_classifier(
    state_dict: Mapping[str, Tensor], name: str, backbone: Backbone
) -> tuple[dict[str, Tensor], list[str]]:
    """The state dict of ``backbone``, a model of the variant ``name``, from a classifier's, and a report in lines.

    Tables of positions are resized as those of official classifiers are. Norms of maps that a classifier lacks, LIT's,
    start as ones and zeros. Dropped are a classifier's head and its norm, and the global token of LIT-Ti.

    Raises:
        InputError: for a name that has no place, a parameter that stays unfilled, or a shape that does not fit.
    """
    target = backbone.state_dict()
    only_classifiers = _only_classifiers(name)
    other_tokens = _other_global_tokens(state_dict, name, target)
    converted: dict[str, Tensor] = {}
    dropped, unexplained, resized = [], [], []
    for full_name, tensor in state_dict.items():
        key = full_name.removeprefix("module.")
        inside = key.startswith("backbone.")
        key = key.removeprefix("backbone.")
        if inside and key in target:
            try:
                converted[key] = _fitted(backbone, key, tensor, tuple(target[key].shape))
            except InputError as error:
                raise InputError(f"{error}{other_tokens}") from error
            if converted[key].shape != tensor.shape:
                resized.append(f"resized: {key} {tuple(tensor.shape)} to {tuple(converted[key].shape)}")
        elif full_name.removeprefix("module.") in only_classifiers:
            dropped.append(key)
        else:
            unexplained.append(full_name)
    norms = [key for key in target if key.startswith("output_norms.") and key not in converted]
    for key in norms:
        converted[key] = (torch.ones if key.endswith("weight") else torch.zeros)(target[key].shape)
    unfilled = [key for key in target if key not in converted]
    if unexplained or unfilled:
        raise InputError(f"{describe_mismatch(name, unexplained, unfilled)}{other_tokens}")
    lines = [f"a classifier of this project: {len(converted) - len(norms)} mapped, {len(resized)} resized", *resized]
    lines += [f"dropped: {', '.join(dropped)}: only a classifier has them"] if dropped else []
    lines += [f"initialised: {', '.join(norms)}: a classifier has no norms of output maps"] if norms else []
    return converted, lines


def _only_classifiers(name: str) -> set[str]:
    """Names that a classifier of the variant has, and no backbone."""
    variant = get_variant(name)
    if variant.pool != "global_token":
        return _CLASSIFIERS_OWN
    last = f"backbone.stages.{len(variant.stages) - 1}"
    return _CLASSIFIERS_OWN | {f"{last}.global_tokens", f"{last}.positions.global_tokens"}


def _other_global_tokens(state_dict: Mapping[str, Tensor], name: str, target: Mapping[str, Tensor]) -> str:
    """What to say of a file with other numbers of global tokens than the model; nothing where they are the same."""
    if get_variant(name).pool == "global_token":
        return ""
    names = {key.removeprefix("module.").removeprefix("backbone."): tensor for key, tensor in state_dict.items()}
    theirs, ours = [], []
    for index in range(len(get_variant(name).stages)):
        stage = f"stages.{index}."
        theirs.append(_number_of_tokens(names.get(f"{stage}global_tokens")))
        here = any(key.startswith(stage) for key in target)
        ours.append(_number_of_tokens(target.get(f"{stage}global_tokens")) if here else theirs[-1])
        if not any(key.startswith(stage) for key in names):
            theirs[-1] = ours[-1]
    if theirs == ours:
        return ""
    return f"; it has the global tokens of MODEL.TRANSFORMER.GLOBAL_TOKENS {shlex.quote(str(theirs))}"


def _number_of_tokens(tokens: Tensor | None) -> int:
    """Of a stage's parameter (1, G, C)."""
    return tokens.shape[1] if tokens is not None and tokens.ndim == 3 else 0


def _fitted(backbone: Backbone, key: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    path, _, leaf = key.rpartition(".")
    fitted = fit_table(tensor, backbone.get_submodule(path), leaf)
    if tuple(fitted.shape) == shape:
        return fitted
    raise InputError(f"{key} is {tuple(tensor.shape)} there and {shape} here")
