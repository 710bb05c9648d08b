"""A package of AOTInductor, compiled for this machine: ``model.aoti.pt2``."""

import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from backbones import InputError
from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.formats.format import Format, Run, damaged
from projects_vil.export.formats.recording import check_recording, quiet, record
from projects_vil.export.stages import Stages


def compiler() -> str | None:
    """The C++ compiler that AOTInductor would call, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def _check() -> None:
    check_recording("aot_inductor")
    if compiler() is None:
        raise InputError("AOTInductor needs a C++ compiler, g++ or the one that CXX names, and there is none")


def _write(exportable: ExportableDetector, example: Tensor, path: Path, stages: Stages) -> None:
    with stages("recording"):
        program = record(exportable, example)
    with stages("compiling", f"AOTInductor calls {compiler()} for minutes"), quiet():
        # Of convolutions on as many boxes as were found, torch 2.15 believes on a CPU that the outputs lie
        # channels-last, and they do not: all masks are wrong, without an error.
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={"layout_optimization": False}
        )


def _load(path: Path) -> Run:
    with damaged(path, RuntimeError, ValueError, OSError):
        return torch._inductor.aoti_load_package(str(path))


AOT_INDUCTOR = Format(".aoti.pt2", _check, _write, _load)
