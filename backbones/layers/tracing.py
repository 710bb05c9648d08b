"""What a model must know of ``torch.jit.trace`` to stay right for images of other sizes."""

import warnings

import torch


def is_tracing() -> bool:
    """Whether this run is recorded for images of other sizes: by ``torch.jit.trace`` or ``torch.export``."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()


def static_size(size: int) -> int:
    """A size that does not depend on the image (channels, heads, global tokens) as a plain integer.

    In a trace every size is a tensor; for these it is meant that the trace keeps the value, so its warning is not
    raised.
    """
    if not torch.jit.is_tracing():
        return size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return int(size)


def missing_to(size: int, least: int) -> int:
    """What ``size`` lacks to be ``least``, 0 where it is larger; in a trace a tensor that follows the image."""
    missing = least - size
    return missing.clamp(min=0) if isinstance(missing, torch.Tensor) else max(0, missing)
