"""What is looked at before a model on sequences is made, and before it runs."""

import torch
from torch import Tensor

from backbones.execution.tracing import is_tracing
from backbones.utils.errors import InputError


def check_whole(name: str, value: object, *, least: int = 1) -> None:
    """Raise an :class:`InputError` where ``value`` is no whole number, or below ``least``."""
    if type(value) is not int or value < least:
        raise InputError(f"{name}={value!r}: it is a whole number, {least} or more")


def check_rate(name: str, value: object) -> None:
    """Raise an :class:`InputError` where ``value`` is no number, below 0, or 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InputError(f"{name}={value!r}: it is at least 0 and below 1")


def check_heads(dim: int, num_heads: int) -> None:
    """Raise an :class:`InputError` where the channels cannot be shared out among the heads."""
    if dim % num_heads:
        raise InputError(f"num_heads={num_heads} does not divide dim={dim}: choose a divisor")


def check_ids(ids: Tensor, *, vocab_size: int) -> None:
    """Raise an :class:`InputError` where ``ids`` are no token ids (B, N) of at least one token.

    Their values are looked at on a CPU alone: a GPU would have to be waited for.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"the ids are {ids.dtype}: they are torch.int64")
    if ids.ndim != 2 or not ids.shape[1]:
        raise InputError(f"the ids have shape {tuple(ids.shape)}: it is (batch, length), of one token or more")
    if ids.device.type != "cpu" or not len(ids) or is_tracing() or torch.compiler.is_compiling():
        return
    least, largest = (int(value) for value in ids.aminmax())
    if least < 0 or largest >= vocab_size:
        wrong = least if least < 0 else largest
        raise InputError(f"the id {wrong} is none of 0 to {vocab_size - 1}: vocab_size={vocab_size} is another text's")
