"""A detector as a program: traced, or recorded by torch.export; what formats are made of."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torchvision  # noqa: F401  its operators are in every exported detector
from torch import Tensor

from backbones import InputError
from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.modeling import LARGEST_BATCH, SMALLEST_SIDE, largest_side

# torch.export's handling of sizes that data decide, which the records here need, is of this version.
RECORDING_TORCH = (2, 8)


def check_recording(file_format: str) -> None:
    """Raise an :class:`InputError` where torch is too old for :func:`record`."""
    if _torch_version() < RECORDING_TORCH:
        needed = ".".join(map(str, RECORDING_TORCH))
        raise InputError(f"--format {file_format} needs torch {needed} or newer, and this is {torch.__version__}")


def record(exportable: ExportableDetector, example: Tensor) -> torch.export.ExportedProgram:
    """torch.export's program of a detector, for images of any height and width, and any number if it is batched.

    Of a detector with a size the height and width are that of the example.
    """
    import torch.fx.experimental._config as symbolic

    # With bounds, what does not hold for all of these sizes is an error here, and not where the file runs.
    sides = {"min": SMALLEST_SIDE, "max": largest_side(exportable.detector)}
    height, width = torch.export.Dim("height", **sides), torch.export.Dim("width", **sides)
    dynamic = {} if exportable.size else {example.ndim - 2: height, example.ndim - 1: width}
    if exportable.batched:
        dynamic[0] = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
    with (
        quiet(),
        torch.no_grad(),
        # A convolution asks for the number of images and the width to choose its kernel, here and where the file runs.
        torch.backends.mkldnn.flags(enabled=False),
        # What holds for nearly all sizes must not be decided for the example's alone.
        symbolic.patch(backed_size_oblivious=True),
    ):
        return torch.export.export(exportable, (example,), dynamic_shapes=(dynamic,), strict=False)


def trace(exportable: ExportableDetector, example: Tensor) -> torch.jit.ScriptModule:
    """TorchScript of a detector, for images of any height and width."""
    with torch.no_grad(), quiet():
        return torch.jit.trace(exportable, (example,), check_trace=False)


def write_buffered(save: Callable[[io.BytesIO], object], path: Path) -> None:
    """What ``save`` writes: torch's own writers end the process where the disk is full."""
    buffer = io.BytesIO()
    save(buffer)
    path.write_bytes(buffer.getbuffer())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch says much about its own parts while it records a model, and onnxscript what it does not optimise."""
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
