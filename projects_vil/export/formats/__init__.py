"""The formats that a detector is exported in, a file each, by name.

Beside a model stands its metadata, a JSON file: :mod:`projects_vil.export.metadata`.
"""

from pathlib import Path

from torch import Tensor

from backbones import InputError
from backbones.utils.errors import check_choice
from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.formats.format import Format, Run
from projects_vil.export.formats.onnx import ONNX, OPSET
from projects_vil.export.formats.openvino import OPENVINO
from projects_vil.export.formats.pytorch.aot_inductor import AOT_INDUCTOR, compiler
from projects_vil.export.formats.pytorch.torch_export import TORCH_EXPORT
from projects_vil.export.formats.pytorch.torchscript import TORCHSCRIPT
from projects_vil.export.formats.tensorrt import TENSORRT_ENGINE
from projects_vil.export.stages import Stages

FORMATS: dict[str, Format] = {
    "torchscript": TORCHSCRIPT,
    "onnx": ONNX,
    "torch_export": TORCH_EXPORT,
    "aot_inductor": AOT_INDUCTOR,
    "openvino": OPENVINO,
    "tensorrt": TENSORRT_ENGINE,
}

__all__ = [
    "FORMATS",
    "OPSET",
    "Format",
    "check_format",
    "compiler",
    "format_of",
    "is_exported",
    "load_model",
    "write_model",
]


def write_model(
    exportable: ExportableDetector, example: Tensor, path: Path, file_format: str, *, stages: Stages | None = None
) -> None:
    """Write a detector that takes images of any size.

    Args:
        exportable: in eval mode.
        example: an input of it; its type, uint8 or float32, is what an ONNX or .pt2 file takes.
        path: the file.
        file_format: a key of ``FORMATS``.
        stages: what says and times the parts of the work.

    Raises:
        InputError: for an unknown format, or where this machine lacks what it needs.
    """
    check_choice("format", file_format, FORMATS)
    check_format(file_format)
    FORMATS[file_format].write(exportable, example, path, stages or Stages())


def load_model(path: Path) -> Run:
    """A file in its runtime: an image, or a batch, of the type that it takes -> its outputs in order.

    Raises:
        InputError: for a file that is damaged or of no known format, or where the runtime is not there.
    """
    return FORMATS[format_of(path)].load(path)


def check_format(file_format: str) -> None:
    """Raise an :class:`InputError` where this machine cannot write and run a format."""
    FORMATS[file_format].check()


def format_of(path: str | Path) -> str:
    """The format that the end of a file's name says.

    Raises:
        InputError: where it says none.
    """
    # The longest first: .aoti.pt2 ends with .pt2.
    for name, known in sorted(FORMATS.items(), key=lambda item: -len(item[1].suffix)):
        if str(path).endswith(known.suffix):
            return name
    suffixes = ", ".join(known.suffix for known in FORMATS.values())
    raise InputError(f"{path} is no exported model: its name ends with {suffixes}")


def is_exported(path: str | Path) -> bool:
    """Whether the end of a file's name is that of an exported model."""
    return str(path).endswith(tuple(known.suffix for known in FORMATS.values()))
