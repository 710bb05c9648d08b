"""The formats that a detector is exported in, and how each is written.

A model is ``model.ts`` (TorchScript), ``model.onnx``, ``model.pt2`` (an ExportedProgram of torch.export) or
``model.aoti.pt2`` (a package of AOTInductor, compiled for this machine). Beside it stands its metadata, a JSON file.
"""

import contextlib
import importlib.metadata
import io
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torchvision  # noqa: F401  its operators are in every exported detector
from torch import Tensor

from backbones import InputError
from backbones.errors import check_choice
from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.stages import Stages
from projects_vil.modeling import LARGEST_BATCH, SMALLEST_SIDE, largest_side

SUFFIXES = {"torchscript": ".ts", "onnx": ".onnx", "torch_export": ".pt2", "aot_inductor": ".aoti.pt2"}
OPSET = 20
# torch.export's handling of sizes that data decide, which the records here need, is of this version.
RECORDING_TORCH = (2, 8)


def write_model(
    exportable: ExportableDetector, example: Tensor, path: Path, file_format: str, *, stages: Stages | None = None
) -> None:
    """Write a detector that takes images of any size.

    Args:
        exportable: in eval mode.
        example: an input of it; its type, uint8 or float32, is what an ONNX or .pt2 file takes.
        path: the file.
        file_format: a key of ``SUFFIXES``.
        stages: what says and times the parts of the work.

    Raises:
        InputError: for an unknown format, or where this machine lacks what it needs.
    """
    check_choice("format", file_format, SUFFIXES)
    check_format(file_format)
    _WRITERS[file_format](exportable, example, path, stages or Stages())


def check_format(file_format: str) -> None:
    """Raise an :class:`InputError` where this machine cannot write and run a format."""
    if file_format != "torchscript" and _torch_version() < RECORDING_TORCH:
        needed = ".".join(map(str, RECORDING_TORCH))
        raise InputError(f"--format {file_format} needs torch {needed} or newer, and this is {torch.__version__}")
    if file_format == "onnx":
        for name in ("onnx", "onnxscript", "onnxruntime"):
            try:
                importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError as error:
                raise InputError(f"--format onnx needs {name}: pip install onnx onnxscript onnxruntime") from error
    if file_format == "aot_inductor" and compiler() is None:
        raise InputError("AOTInductor needs a C++ compiler, g++ or the one that CXX names, and there is none")


def compiler() -> str | None:
    """The C++ compiler that AOTInductor would call, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def record(exportable: ExportableDetector, example: Tensor) -> torch.export.ExportedProgram:
    """torch.export's program of a detector, for images of any height and width, and any number if it is batched."""
    import torch.fx.experimental._config as symbolic

    # With bounds, what does not hold for all of these sizes is an error here, and not where the file runs.
    sides = {"min": SMALLEST_SIDE, "max": largest_side(exportable.detector)}
    height, width = torch.export.Dim("height", **sides), torch.export.Dim("width", **sides)
    dynamic = {example.ndim - 2: height, example.ndim - 1: width}
    if exportable.batched:
        dynamic[0] = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
    with (
        torch.no_grad(),
        # A convolution asks for the number of images and the width to choose its kernel, here and where the file runs.
        torch.backends.mkldnn.flags(enabled=False),
        # What holds for nearly all sizes must not be decided for the example's alone.
        symbolic.patch(backed_size_oblivious=True),
        quiet(),
    ):
        return torch.export.export(exportable, (example,), dynamic_shapes=(dynamic,), strict=False)


def trace(exportable: ExportableDetector, example: Tensor) -> torch.jit.ScriptModule:
    """TorchScript of a detector, for images of any height and width."""
    with torch.no_grad(), quiet():
        return torch.jit.trace(exportable, (example,), check_trace=False)


def _write_torchscript(exportable: ExportableDetector, example: Tensor, path: Path, stages: Stages) -> None:
    with stages("recording"):
        traced = trace(exportable, example)
    with stages("writing"), quiet():
        _write_buffered(lambda buffer: torch.jit.save(traced, buffer), path)


def _write_onnx(exportable: ExportableDetector, example: Tensor, path: Path, stages: Stages) -> None:
    with stages("recording"):
        program = record(exportable, example)
    with stages("converting"), quiet():
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(exportable.input_names),
            output_names=list(exportable.output_names),
            verbose=False,
            custom_translation_table={torch.ops.aten.scaled_dot_product_attention.default: _attention_for_onnx},
            # A stage of its own, which takes as long.
            optimize=False,
        )
    with stages("optimising"), quiet():
        onnx_program.optimize()
    with stages("writing"), quiet():
        onnx_program.save(str(path), external_data=False)


def _attention_for_onnx(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
):
    """``scaled_dot_product_attention`` of four axes, with a mask that is added or none, in operators of ONNX.

    The exporter's own turns the keys in three axes, and onnxruntime, which would leave that to the product, does not
    find it: their copy took as long as the product.
    """
    import onnxscript

    op = getattr(onnxscript, f"opset{OPSET}")
    if dropout_p or is_causal or enable_gqa or (attn_mask is not None and attn_mask.dtype != query.dtype):
        raise NotImplementedError("attention with dropout, causal or grouped, or with a mask of another type")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    query = op.Mul(query, op.CastLike(op.Constant(value_float=scale), query))
    scores = op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2]))
    if attn_mask is not None:
        scores = op.Add(scores, attn_mask)
    return op.MatMul(op.Softmax(scores, axis=-1), value)


def _write_torch_export(exportable: ExportableDetector, example: Tensor, path: Path, stages: Stages) -> None:
    with stages("recording"):
        program = record(exportable, example)
    with stages("writing"), quiet():
        _write_buffered(lambda buffer: torch.export.save(program, buffer), path)


def _write_aot_inductor(exportable: ExportableDetector, example: Tensor, path: Path, stages: Stages) -> None:
    with stages("recording"):
        program = record(exportable, example)
    with stages("compiling", f"AOTInductor calls {compiler()} for minutes"), quiet():
        # Of convolutions on as many boxes as were found, torch 2.15 believes on a CPU that the outputs lie
        # channels-last, and they do not: all masks are wrong, without an error.
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={"layout_optimization": False}
        )


def _write_buffered(save: Callable[[io.BytesIO], object], path: Path) -> None:
    """What ``save`` writes: torch's own writers end the process where the disk is full."""
    buffer = io.BytesIO()
    save(buffer)
    path.write_bytes(buffer.getbuffer())


_WRITERS: dict[str, Callable[[ExportableDetector, Tensor, Path, Stages], None]] = {
    "torchscript": _write_torchscript,
    "onnx": _write_onnx,
    "torch_export": _write_torch_export,
    "aot_inductor": _write_aot_inductor,
}


def format_of(path: str | Path) -> str:
    """The format that the end of a file's name says.

    Raises:
        InputError: where it says none.
    """
    # The longest first: .aoti.pt2 ends with .pt2.
    for name, suffix in sorted(SUFFIXES.items(), key=lambda item: -len(item[1])):
        if str(path).endswith(suffix):
            return name
    raise InputError(f"{path} is no exported model: its name ends with {', '.join(SUFFIXES.values())}")


def is_exported(path: str | Path) -> bool:
    """Whether the end of a file's name is that of an exported model."""
    return str(path).endswith(tuple(SUFFIXES.values()))


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
