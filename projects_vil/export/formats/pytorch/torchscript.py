"""TorchScript: ``model.ts``."""

from pathlib import Path

import torch
from torch import Tensor

from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.formats.format import Format, Run, damaged
from projects_vil.export.formats.recording import quiet, trace, write_buffered
from projects_vil.export.stages import Stages
from projects_vil.modeling import LARGEST_SIDE


def _check() -> None:
    """Every torch has it."""


def _write(exportable: ExportableDetector, example: Tensor, path: Path, stages: Stages) -> None:
    with stages("recording"):
        traced = trace(exportable, example)
    with stages("writing"), quiet():
        write_buffered(lambda buffer: torch.jit.save(traced, buffer), path)


def _load(path: Path) -> Run:
    with damaged(path, RuntimeError, ValueError):
        return torch.jit.load(str(path))


TORCHSCRIPT = Format(".ts", _check, _write, _load, sides=(1, LARGEST_SIDE))
