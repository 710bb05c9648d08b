"""What timm's users are told of a variant's stages, and how they name them."""

import itertools
import operator
from collections.abc import Sequence

from timm.models import FeatureInfo
from torch import nn

from backbones.utils.errors import InputError
from backbones.variants import CvTVariant, LITVariant, Variant


def stage_info(variant: Variant, chosen: Sequence[int]) -> FeatureInfo:
    """Channels, stride and module of all stages, in timm's form; ``chosen`` are those that are returned."""
    strides = itertools.accumulate(variant.steps, operator.mul)
    infos = [
        {"num_chs": stage.dim, "reduction": stride, "module": f"backbone.stages.{index}"}
        for index, (stage, stride) in enumerate(zip(variant.stages, strides, strict=True))
    ]
    return FeatureInfo(infos, tuple(chosen))


def chosen_stages(argument: str, chosen: int | Sequence[int] | None, number: int, name: str) -> list[int]:
    """Stages as timm's users name them, in their order: all, the last so many, or these.

    Args:
        argument: what ``chosen`` is called.
        chosen: numbers from 0, or from the end where negative; a number n for the last n; None for all.
        number: of stages.
        name: of the model that has them.

    Raises:
        InputError: for a stage that there is not, and for none.
    """
    if chosen is None:
        stages = range(number)
    elif isinstance(chosen, Sequence) and not isinstance(chosen, str):
        stages = [_whole(index) for index in chosen]
    else:
        last = _whole(chosen)
        stages = [] if last is None else range(-last, 0)
    if not stages or not all(index is not None and -number <= index < number for index in stages):
        raise InputError(f"{argument}={chosen!r}: {name} has the stages 0 to {number - 1}")
    return sorted({index % number for index in stages})


def _whole(value: object) -> int | None:
    """Of any kind of whole number, NumPy's among them; None for another value."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def has_fixed_input_size(variant: Variant) -> bool:
    """Whether a classifier takes no image larger than those that it is made for; Linformer takes no smaller either."""
    if isinstance(variant, CvTVariant):
        return False
    if isinstance(variant, LITVariant):
        return variant.position_resizing == "load"
    mechanisms = [stage.attention for stage in variant.stages]
    if "linformer" in mechanisms:
        return True
    if variant.relative_bias:
        return variant.position_resizing == "load" and "dense" in mechanisms
    return variant.position_resizing != "map"


def check_in_chans(name: str, in_chans: int) -> None:
    """Raise an :class:`InputError` for images of other than 3 channels."""
    if in_chans != 3:
        raise InputError(f"in_chans={in_chans}: {name} takes images of 3 channels")


def set_checkpointing(backbone: nn.Module, enable: bool) -> None:
    """Compute the activations of all blocks again in the backward pass, or keep them."""
    for stage in backbone.stages:
        stage.activation_checkpointing = enable
