"""An ExportedProgram of torch.export: ``model.pt2``."""

import zipfile
from pathlib import Path

import torch
from torch import Tensor

from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.formats.format import Format, Run, damaged
from projects_vil.export.formats.recording import check_recording, quiet, record, write_buffered
from projects_vil.export.stages import Stages


def _check() -> None:
    check_recording("torch_export")


def _write(exportable: ExportableDetector, example: Tensor, path: Path, stages: Stages) -> None:
    with stages("recording"):
        program = record(exportable, example)
    with stages("writing"), quiet():
        write_buffered(lambda buffer: torch.export.save(program, buffer), path)


def _load(path: Path) -> Run:
    with damaged(path, RuntimeError, ValueError, OSError, zipfile.BadZipFile), quiet():
        return torch.export.load(str(path)).module()


TORCH_EXPORT = Format(".pt2", _check, _write, _load)
