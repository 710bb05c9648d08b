"""Float32 islands: parts of a model that half precision would spoil."""

import contextlib

import torch
from torch import Tensor


def autocast_off(device: torch.device) -> contextlib.AbstractContextManager:
    """A region where autocast does not choose the types, also on devices that have none."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def at_least_float32(x: Tensor) -> Tensor:
    """Half-precision tensors as float32, others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
