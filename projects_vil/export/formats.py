"""The formats that a detector is exported in: how each is written, and how its own runtime reads and runs it.

A model is ``model.ts`` (TorchScript), ``model.onnx``, ``model.pt2`` (an ExportedProgram of torch.export) or
``model.aoti.pt2`` (a package of AOTInductor, compiled for this machine). Beside it stands its metadata, a JSON file.
"""

import contextlib
import importlib.metadata
import json
import logging
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torchvision  # noqa: F401  its operators are in every exported detector
from torch import Tensor, nn

from backbones import InputError
from backbones.errors import check_choice
from projects_vil.export.exportable.rcnn import ExportableDetector

SUFFIXES = {"torchscript": ".ts", "onnx": ".onnx", "torch_export": ".pt2", "aot_inductor": ".aoti.pt2"}
OPSET = 20
# Of the images that torch.export's programs, and what is made of them, take: pixels, and images of a batch.
SMALLEST_SIDE, LARGEST_SIDE, LARGEST_BATCH = 32, 8192, 1024
# torch.export's handling of sizes that data decide, which the records here need, is of this version.
RECORDING_TORCH = (2, 8)


def write_model(exportable: ExportableDetector, example: Tensor, path: Path, file_format: str) -> None:
    """Write a detector that takes images of any size.

    Args:
        exportable: in eval mode.
        example: an input of it; its type, uint8 or float32, is what an ONNX or .pt2 file takes.
        path: the file.
        file_format: a key of ``SUFFIXES``.

    Raises:
        InputError: for an unknown format, or where this machine lacks what it needs.
    """
    check_choice("format", file_format, SUFFIXES)
    check_format(file_format)
    _WRITERS[file_format](exportable, example, path)


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
        _quiet(),
    ):
        return torch.export.export(exportable, (example,), dynamic_shapes=(dynamic,), strict=False)


def largest_side(detector: nn.Module) -> int:
    """The longest side, in pixels, of an image that a recorded detector takes: absolute positions have an end."""
    options = getattr(getattr(detector.backbone, "bottom_up", None), "options", {})
    has_tables = any(getattr(module, "resizing", None) == "load" for module in detector.modules())
    return options["max_img_size"] if has_tables else LARGEST_SIDE


def sides_of(detector: nn.Module, file_format: str) -> list[int]:
    """The shortest and the longest side, in pixels, of an image that a file takes."""
    return [1 if file_format == "torchscript" else SMALLEST_SIDE, largest_side(detector)]


def check_sides(sides: Sequence[int], size: Sequence[int], *, what: str) -> None:
    """Raise an :class:`InputError` where an image of ``size`` (height, width) is not for a model with these sides."""
    if min(size) < sides[0] or max(size) > sides[1]:
        raise InputError(f"{what}: {size[0]} x {size[1]} pixels, and the model takes sides of {sides[0]} to {sides[1]}")


def trace(exportable: ExportableDetector, example: Tensor) -> torch.jit.ScriptModule:
    """TorchScript of a detector, for images of any height and width."""
    with torch.no_grad(), _quiet():
        return torch.jit.trace(exportable, (example,), check_trace=False)


def _write_torchscript(exportable: ExportableDetector, example: Tensor, path: Path) -> None:
    traced = trace(exportable, example)
    with _quiet():
        traced.save(str(path))


def _write_onnx(exportable: ExportableDetector, example: Tensor, path: Path) -> None:
    program = record(exportable, example)
    with _quiet():
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(exportable.input_names),
            output_names=list(exportable.output_names),
            verbose=False,
        )
        onnx_program.save(str(path), external_data=False)


def _write_torch_export(exportable: ExportableDetector, example: Tensor, path: Path) -> None:
    with _quiet():
        torch.export.save(record(exportable, example), str(path))


def _write_aot_inductor(exportable: ExportableDetector, example: Tensor, path: Path) -> None:
    program = record(exportable, example)
    with _quiet():
        # Of convolutions on as many boxes as were found, torch 2.15 believes on a CPU that the outputs lie
        # channels-last, and they do not: all masks are wrong, without an error.
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={"layout_optimization": False}
        )


_WRITERS: dict[str, Callable[[ExportableDetector, Tensor, Path], None]] = {
    "torchscript": _write_torchscript,
    "onnx": _write_onnx,
    "torch_export": _write_torch_export,
    "aot_inductor": _write_aot_inductor,
}


# -- running ---------------------------------------------------------------------------------------


class ExportedModel:
    """An exported file in its own runtime, with the metadata beside it.

    Attributes:
        path: of the file.
        metadata: see :func:`projects_vil.export.api.describe_model`.

    Raises:
        InputError: for a file that is missing, damaged or of no known format, or one without metadata.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.file_format = format_of(self.path)
        self.metadata = read_metadata(self.path)
        self.output_names = tuple(output["name"] for output in self.metadata["outputs"])
        self.batched = self.metadata["input"]["batched"]
        self.dtype = getattr(torch, self.metadata["input"]["dtype"])
        self._run = _LOADERS[self.file_format](self.path)

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """(3, H, W), or (B, 3, H, W) for a batched model, 0 to 255 -> the outputs by name.

        Raises:
            InputError: for an image smaller or larger than the model takes, and for floating-point images where it
                takes uint8; other types are cast.
        """
        if images.is_floating_point() and not self.dtype.is_floating_point:
            raise InputError(f"{self.path} takes {self.dtype} images: export it with --input-dtype float32 for others")
        check_sides(self.metadata["input"]["sides"], images.shape[-2:], what=str(self.path))
        with torch.no_grad():
            return dict(zip(self.output_names, self._run(images.to(self.dtype)), strict=True))


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


def metadata_path(path: str | Path) -> Path:
    """Where the metadata of an exported file stands."""
    return Path(f"{path}.metadata.json")


def read_metadata(path: str | Path) -> dict:
    """The metadata of an exported file.

    Raises:
        InputError: where it is missing or is no such thing.
    """
    beside = metadata_path(path)
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}")
    try:
        metadata = json.loads(beside.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {beside} ({error.strerror}): an exported model needs it beside it") from error
    except ValueError as error:
        raise InputError(f"{beside} is not JSON: {error}") from error
    if not _is_metadata(metadata):
        raise InputError(f"{beside} is not the metadata of an exported model")
    return metadata


def _is_metadata(metadata: object) -> bool:
    if not isinstance(metadata, dict) or not {"input", "outputs", "classes", "resizing"} <= metadata.keys():
        return False
    taken, given, resizing = metadata["input"], metadata["outputs"], metadata["resizing"]
    return (
        isinstance(taken, dict)
        and {"batched", "dtype", "color_order", "sides"} <= taken.keys()
        and isinstance(resizing, dict)
        and {"short_side", "longest_side"} <= resizing.keys()
        and isinstance(given, list)
        and all(isinstance(output, dict) and "name" in output for output in given)
    )


Runner = Callable[[Tensor], "tuple[Tensor, ...]"]


def _load_torchscript(path: Path) -> Runner:
    with _damaged(path, RuntimeError, ValueError):
        return torch.jit.load(str(path))


def _load_onnx(path: Path) -> Runner:
    check_format("onnx")
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as states

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    kinds = (states.Fail, states.InvalidArgument, states.InvalidProtobuf, states.InvalidGraph, states.NotImplemented)
    with _damaged(path, *kinds):
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, session.run(None, {name: images.cpu().numpy()})))

    return run


def _load_torch_export(path: Path) -> Runner:
    with _damaged(path, RuntimeError, ValueError, OSError, zipfile.BadZipFile), _quiet():
        return torch.export.load(str(path)).module()


def _load_aot_inductor(path: Path) -> Runner:
    with _damaged(path, RuntimeError, ValueError, OSError):
        return torch._inductor.aoti_load_package(str(path))


_LOADERS: dict[str, Callable[[Path], Runner]] = {
    "torchscript": _load_torchscript,
    "onnx": _load_onnx,
    "torch_export": _load_torch_export,
    "aot_inductor": _load_aot_inductor,
}


@contextlib.contextmanager
def _damaged(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"cannot load {path}: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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
