"""The formats that a detector is exported to: how each file is written and run, in one table, :data:`FORMATS`.

``torch_export``, ``onnx`` and ``aot_inductor`` are made from the program that ``torch.export`` captures,
``torchscript`` and ``openvino`` from a trace.
"""

import contextlib
import copy
import functools
import importlib.metadata
import io
import json
import logging
import os
import pickle
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TypeVar
from unittest.mock import patch

import torch
import torch.fx.config
import torch.nn.functional as F
import torchvision  # noqa: F401  its operators are in every exported detector
from torch import Tensor
from torch.overrides import TorchFunctionMode

from backbones import ConfigError
from backbones.attention.chunks import copied_windows
from backbones.errors import check_choice
from backbones.layers.tracing import padding_to_multiple, static_size
from projects_vil.export.traceable import ExportableDetector
from projects_vil.modeling import LARGEST_BATCH, export_sides
from projects_vil.utils import deferred_signals, handling_signals, terminate

OPSET = 20
_METADATA_KEY = "vil_metadata"  # in files of ONNX and OpenVINO
_METADATA_RECORD = "extra/metadata.json"
RunFn = Callable[[Tensor], "tuple[Tensor, ...]"]
# They name files of this machine, and take a seventh of the time; torch before 2.12 has no such switch.
_no_stack_traces = functools.partial(patch.object, torch.fx.config, "do_not_emit_stack_traces", True, create=True)
T = TypeVar("T")
_logger = logging.getLogger(__name__)


def _embed_in_archive(path: Path, metadata: dict) -> None:
    """Copy torch's archive without the source code's places (debug_pkl), and with the metadata."""
    reader = torch._C.PyTorchFileReader(str(path))
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    # The writer has its own id, and torch chooses the meaning of operators by the version.
    writer.set_min_version(int(reader.get_record("version" if reader.has_record("version") else ".data/version")))
    for name in reader.get_all_records():
        if not name.endswith(".debug_pkl") and name not in ("version", ".data/version", ".data/serialization_id"):
            contents = reader.get_record(name)
            writer.write_record(name, contents, len(contents))
    contents = json.dumps(metadata).encode()
    writer.write_record(_METADATA_RECORD, contents, len(contents))
    writer.write_end_of_file()
    path.write_bytes(buffer.getbuffer())


def _embedded_in_archive(path: Path) -> str | None:
    reader = torch._C.PyTorchFileReader(str(path))
    return reader.get_record(_METADATA_RECORD).decode() if reader.has_record(_METADATA_RECORD) else None


@dataclass(frozen=True)
class Format:
    """A format that a detector is exported to.

    Attributes:
        suffix: file name suffix.
        write: a detector, an example of its input and the file; the type of the example, uint8 or float32, is what the
            file takes.
        load: a file -> what runs it: an input to the outputs, in the order of the detector's.
        embed: write a model's metadata into its file, and remove what the exporter says about its own machine.
        embedded: read the metadata in a file, as JSON, without running any of it; None if there is none.
        precisions: the supported precisions.
        packages: the packages that writing needs; the metadata has their versions.
        uses_torch_export: whether ``torch.export`` makes its program.
        shortest_side: the shortest image side that a file takes, in pixels; None for that of ``export_sides``.
        extra_suffixes: suffixes of further files that belong to a model; they replace ``suffix``.
        options: runtime options for running a file.
    """

    suffix: str
    write: Callable[[ExportableDetector, Tensor, Path], None]
    load: Callable[[Path], RunFn]
    embed: Callable[[Path, dict], None] = _embed_in_archive
    embedded: Callable[[Path], str | None] = _embedded_in_archive
    precisions: tuple[str, ...] = ("fp32", "fp16", "bf16")
    packages: tuple[str, ...] = ()
    uses_torch_export: bool = False
    shortest_side: int | None = None
    extra_suffixes: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    def files(self, path: Path) -> list[Path]:
        """Return the files of a model, first the one that names it."""
        stem = str(path).removesuffix(self.suffix)
        return [path, *(Path(stem + suffix) for suffix in self.extra_suffixes)]


# -- tracing ---------------------------------------------------------------------------------------


def export_program(exportable: ExportableDetector, example: Tensor) -> torch.export.ExportedProgram:
    """Return torch.export's program of a detector, for any height and width, and any number of images if batched.

    For a detector with a size, height and width are those of the example.
    """
    import torch.fx.experimental._config as symbolic

    # With bounds, a condition that does not hold for all of these sizes is an error here, and not when the file runs.
    sides = dict(zip(("min", "max"), export_sides(exportable.detector), strict=True))
    height, width = torch.export.Dim("height", **sides), torch.export.Dim("width", **sides)
    dynamic = {} if exportable.size else {example.ndim - 2: height, example.ndim - 1: width}
    if exportable.batched:
        dynamic[0] = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
    with (
        log_step("torch.export"),
        _no_stack_traces(),
        torch.no_grad(),
        # oneDNN's convolutions choose their kernel by the number of images and the width, here and in the file.
        torch.backends.mkldnn.flags(enabled=False),
        # A condition that holds for nearly all sizes must not be specialised to the example's size.
        symbolic.patch(backed_size_oblivious=True),
    ):
        try:
            program = torch.export.export(exportable, (example,), dynamic_shapes=(dynamic,), strict=False)
        except torch._dynamo.exc.UserError as error:
            if exportable.size:
                raise
            other = "give one with --size, or use torchscript"
            raise ConfigError(f"this model cannot be exported for images of any size: {other}") from error
    # Those of torch before 2.12 name files of this machine.
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def trace(exportable: ExportableDetector, example: Tensor) -> torch.jit.ScriptModule:
    """Return the TorchScript of a detector, for images of any height and width."""
    with log_step("torch.jit.trace"), torch.no_grad():
        return torch.jit.trace(exportable, (example,), check_trace=False)


@contextlib.contextmanager
def log_step(name: str) -> Iterator[None]:
    """Log the start and the duration of a part of the export, silence torch's warnings, and end where a signal asks."""
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        terminate(number)

    _logger.info("%s ...", name)
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(), handling_signals(stop):
            warnings.simplefilter("ignore")
            yield
    finally:
        # torch may swallow the exception, or raise another: the signal is raised again for the caller's handler.
        if received:
            if signal.getsignal(received[0]) == signal.SIG_DFL:
                terminate(received[0])  # so that the caller removes its files
            signal.raise_signal(received[0])
    _logger.info("%s: %.1f s", name, time.perf_counter() - start)


def _save(save: Callable[[io.BytesIO], object], path: Path) -> None:
    # Through memory: torch's own writers abort the process if the disk is full.
    buffer = io.BytesIO()
    save(buffer)
    path.write_bytes(buffer.getbuffer())


class _Replacing(TorchFunctionMode):
    """Trace functions of torch as others that give the same and that a runtime computes faster."""

    def __init__(self, replacements: Mapping[Callable, Callable]) -> None:
        super().__init__()
        self.replacements = replacements

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.replacements.get(func, func)(*args, **(kwargs or {}))


def _attention_as_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    scale: float | None = None,
) -> Tensor:
    """``scaled_dot_product_attention``, with an additive mask or none, as two products and a softmax.

    The exporters to ONNX and OpenVINO copy the keys, transposed, where a product takes them as they are: with
    onnxruntime that copy took as long as the product.
    """
    scale = static_size(query.shape[-1]) ** -0.5 if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


_WINOGRAD_CHANNELS = 128


def _winograd_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride=1, padding=0, dilation=1, groups: int = 1
) -> Tensor:
    """``conv2d``, with half the multiplications where it is 3 x 3 with stride 1 and takes 128 channels or more.

    Four rows of the output are sums of six convolutions of 1 x 3 instead of twelve: F(4, 3) of Winograd's minimal
    filtering along the height. Source: Lavin and Gray 2016, "Fast Algorithms for Convolutional Neural Networks".
    """
    kind = (*weight.shape[2:], stride, padding, dilation, groups)
    if weight.shape[1] < _WINOGRAD_CHANNELS or kind != (3, 3, (1, 1), (1, 1), (1, 1), 1):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    height, more = x.shape[2], padding_to_multiple(x.shape[2], 4)
    x = F.pad(x, (0, 0, 1, more + 1))
    x0, x1, x2, x3, x4, x5 = (x[:, :, row : row + height + more - 3 : 4] for row in range(6))
    even, odd, even2, odd2 = x4 - 4 * x2, x3 - 4 * x1, x4 - x2, 2 * (x3 - x1)
    rows = [4 * (x0 - x2) + even2, even + odd, even - odd, even2 + odd2, even2 - odd2, (x5 - x3) / 2 - odd2]
    # In this form the file has the weights, and OpenVINO computes the kernels when it loads them.
    kernels = [[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 48]]
    kernels = torch.einsum("gk,ockw->gocw", weight.new_tensor(kernels) / 24, weight).flatten(0, 1)[:, :, None]
    # The second convolution is in every row of the output once.
    biases = None if bias is None else F.pad(bias, (len(bias), 4 * len(bias)))
    y = F.conv2d(torch.cat(rows, 1), kernels, biases, padding=(0, 1), groups=6)
    y0, y1, y2, y3, y4, y5 = y.unflatten(1, (6, static_size(weight.shape[0]))).unbind(1)
    even, odd, even2, odd2 = y1 + y2, y1 - y2, y3 + y4, 2 * (y3 - y4)
    y = torch.stack([y0 + even + even2, odd + odd2, even + 4 * even2, odd + 4 * odd2 + y5], 3)
    return y.flatten(2, 3).narrow(2, 0, height)


# -- TorchScript, torch.export, AOTInductor --------------------------------------------------------


def _write_torchscript(exportable: ExportableDetector, example: Tensor, path: Path) -> None:
    traced = trace(exportable, example)
    _save(lambda buffer: torch.jit.save(traced, buffer), path)


def _write_torch_export(exportable: ExportableDetector, example: Tensor, path: Path) -> None:
    program = export_program(exportable, example)
    with log_step("torch.export.save"):
        _save(lambda buffer: torch.export.save(program, buffer), path)


def _load_torch_export(path: Path) -> RunFn:
    # Of one reading, so that what is checked is what is loaded.
    buffer = io.BytesIO(path.read_bytes())
    names = torch._C.PyTorchFileReader(buffer).get_all_records()
    # torch runs pickles and native code in these members, and no export of a detector has them.
    if programs := [name for name in names if "_obj_" in name or name.startswith("data/aotinductor/")]:
        raise ConfigError(f"its member {programs[0]} is a program")
    buffer.seek(0)
    # For sample inputs that are not only tensors torch falls back to running their pickle.
    with warnings.catch_warnings(), patch.dict(os.environ, TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"):
        warnings.simplefilter("ignore")
        try:
            return torch.export.load(buffer).module()
        except pickle.UnpicklingError as error:  # its advice is to run it
            raise ConfigError("it has a pickle, which would be run, and no export of a detector has one") from error


def _write_aot_inductor(exportable: ExportableDetector, example: Tensor, path: Path) -> None:
    program = export_program(exportable, example)
    with log_step("AOTInductor, which compiles for minutes"):
        # With layout optimisation torch 2.15 assumes that convolutions of a data-dependent number of boxes give
        # channels-last outputs on a CPU, which they do not: all masks are wrong, without an error.
        options = {"layout_optimization": False}
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


# -- ONNX ------------------------------------------------------------------------------------------


def _write_onnx(exportable: ExportableDetector, example: Tensor, path: Path, *, opset: int = OPSET) -> None:
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass

    with _Replacing({F.scaled_dot_product_attention: _attention_as_products}):
        program = export_program(exportable, example)
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    with log_step("torch.onnx.export"), _no_stack_traces():
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            input_names=list(exportable.input_names),
            output_names=list(exportable.output_names),
            verbose=False,
            optimize=False,
        )
        # The optimiser's time grows with the square of the number of nodes, most of which compute the same size again.
        CommonSubexpressionEliminationPass()(onnx_program.model)
        onnx_program.optimize()
    # torch writes another one where it cannot convert.
    if (written := onnx_program.model.opset_imports[""]) != opset:
        raise ConfigError(f"opset {opset}: torch wrote this model in opset {written}; choose that")
    with log_step("writing ONNX"):
        onnx_program.save(str(path), external_data=False)


def _onnx_session(path: Path, providers: Sequence[str]):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=list(providers))


def _load_onnx(path: Path) -> RunFn:
    session = _onnx_session(path, ["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, session.run(None, {name: images.cpu().numpy()})))

    return run


def _embed_in_onnx(path: Path, metadata: dict) -> None:
    import onnx

    model = onnx.load(path)
    # Stack traces of the exporter, and names such as s62 for sizes.
    for entry in (model.graph, *model.graph.node, *model.graph.input, *model.graph.output, *model.graph.initializer):
        entry.ClearField("metadata_props")
        entry.ClearField("doc_string")
    del model.graph.value_info[:]
    described = [metadata["input"], *metadata["outputs"]]
    for value, entry in zip((*model.graph.input, *model.graph.output), described, strict=True):
        shape = value.type.tensor_type.shape
        shape.ClearField("dim")
        for side in entry["shape"]:
            shape.dim.add(**{"dim_value" if isinstance(side, int) else "dim_param": side})
    onnx.helper.set_model_props(model, _properties(metadata))
    onnx.save(model, path)


def _embedded_in_onnx(path: Path) -> str | None:
    return _onnx_session(path, ["CPUExecutionProvider"]).get_modelmeta().custom_metadata_map.get(_METADATA_KEY)


def _properties(metadata: dict) -> dict[str, str]:
    """Return the metadata by the keys that runtimes of ultralytics read, and whole, as JSON."""
    size = metadata["input"]["size"] or [metadata["resizing"]["short_side"] or metadata["input"]["sides"][0]] * 2
    known = {
        "description": f"{metadata['detector']} with {metadata['backbone']}",
        "task": "segment" if "mask" in metadata["thresholds"] else "detect",
        "names": dict(enumerate(metadata["classes"])),
        "imgsz": size,
        "stride": metadata["input"]["stride"],
        "channels": 3,
        "batch": 1,
        "color_order": metadata["input"]["color_order"],
    }
    return {key: str(value) for key, value in known.items()} | {_METADATA_KEY: json.dumps(metadata)}


def check_onnx(path: Path) -> dict:
    """Check an ONNX file beyond its outputs, and describe it for the report of an export.

    Returns:
        ``operators`` and ``types`` (of values, as ONNX names them), each with how many there are, most frequent first;
        ``providers`` of onnxruntime on this machine with which the file loads.

    Raises:
        ConfigError: for operators outside of ONNX's own domain, and where ``onnx.checker`` or strict shape inference
            finds a mistake.
    """
    import onnx
    import onnxruntime

    model = onnx.load(path)
    other = {f"{node.domain}.{node.op_type}" for node in model.graph.node if node.domain not in ("", "ai.onnx")}
    other |= {f"{function.domain}.{function.name}" for function in model.functions}
    if other:
        raise ConfigError(f"{path.name} has operators that are not in ONNX's standard set: {', '.join(sorted(other))}")
    try:
        onnx.checker.check_model(model, full_check=True)
        graph = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True).graph
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ConfigError(f"{path.name} is not valid ONNX: {' '.join(str(error).split())}") from error
    values = {
        value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output, *graph.value_info)
    }
    values |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    available = onnxruntime.get_available_providers()
    return {
        "operators": dict(Counter(node.op_type for node in graph.node).most_common()),
        "types": dict(Counter(map(onnx.TensorProto.DataType.Name, values.values())).most_common()),
        "providers": [name for name in available if name in _onnx_session(path, [name]).get_providers()],
    }


# -- OpenVINO --------------------------------------------------------------------------------------

# On a CPU that has bfloat16, OpenVINO computes in it by default.
_OPENVINO_OPTIONS = {"INFERENCE_PRECISION_HINT": "f32"}


def import_openvino():
    """Import ``openvino`` so that it sends no telemetry: without the package ``openvino_telemetry`` it cannot."""
    sys.modules.setdefault("openvino_telemetry", None)
    import openvino

    return openvino


@functools.cache
def openvino_core():
    """Return the one ``openvino.Core`` of this process, with its CPU plugin.

    Each CPU plugin installs a signal stack in the thread that loads it, and removes the stack when it is unloaded. With
    2026.4, if two plugins are not unloaded in reverse order, the thread keeps a stack in freed memory, and the next
    signal (Ctrl-C, or the end of a child process) crashes the process. This plugin is the first one and stays loaded.
    """
    core = import_openvino().Core()
    core.get_versions("CPU")
    return core


def _write_openvino(exportable: ExportableDetector, example: Tensor, path: Path, *, quantizes: bool = False) -> None:
    openvino = import_openvino()
    is_half = next(exportable.parameters()).dtype == torch.float16
    replacements = {F.scaled_dot_product_attention: _attention_as_products}
    if not (is_half or quantizes):  # Winograd triples rounding errors.
        replacements[F.conv2d] = _winograd_conv2d
    # Half precision is that of the weights in the file; the computation is in float32.
    with _Replacing(replacements), copied_windows():
        traced = trace(copy.deepcopy(exportable).float() if is_half else exportable, example)
    sides = exportable.size or [openvino.Dimension(*export_sides(exportable.detector))] * 2
    batch = [openvino.Dimension(1, LARGEST_BATCH)] if exportable.batched else []
    shape = openvino.PartialShape([*batch, 3, *sides])
    # The converter takes an exception of a signal handler, in its calls of Python, for an operator that it cannot
    # convert.
    with log_step("openvino.convert_model"), deferred_signals():
        # OpenVINO 2026.4 does not read the ONNX file.
        model = openvino.convert_model(traced, example_input=(example,), input=[shape])
    for ports, names in ((model.inputs, exportable.input_names), (model.outputs, exportable.output_names)):
        for port, name in zip(ports, names, strict=True):
            port.get_tensor().set_names({name})
    openvino.save_model(model, path, compress_to_fp16=is_half)


def _embed_in_openvino(path: Path, metadata: dict) -> None:
    openvino = import_openvino()
    # Not memory-mapped, since the file is written again.
    model = openvino_core().read_model(path.read_bytes(), path.with_suffix(".bin").read_bytes())
    for key, value in _properties(metadata).items():
        model.set_rt_info(value, ["model_info", key])
    openvino.save_model(model, path, compress_to_fp16=False)


def _embedded_in_openvino(path: Path) -> str | None:
    model = openvino_core().read_model(path)
    keys = ["model_info", _METADATA_KEY]
    return model.get_rt_info(keys).astype(str) if model.has_rt_info(keys) else None


def _load_openvino(path: Path) -> RunFn:
    options = _OPENVINO_OPTIONS | {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino_core().compile_model(path, "CPU", options)

    def run(images: Tensor) -> tuple[Tensor, ...]:
        outputs = compiled(images.cpu().numpy())
        return tuple(torch.from_numpy(outputs[output]) for output in compiled.outputs)

    return run


# -- the table -------------------------------------------------------------------------------------

# The first whose suffix a file has is its format, so that .aoti.pt2 comes before .pt2.
FORMATS: dict[str, Format] = {
    "torchscript": Format(".ts", _write_torchscript, lambda path: torch.jit.load(str(path)), shortest_side=1),
    "onnx": Format(
        ".onnx",
        _write_onnx,
        _load_onnx,
        _embed_in_onnx,
        _embedded_in_onnx,
        # This opset has no bfloat16 convolutions.
        precisions=("fp32", "fp16", "int8"),
        packages=("onnx", "onnxscript", "onnxruntime"),
        uses_torch_export=True,
    ),
    "aot_inductor": Format(
        ".aoti.pt2",
        _write_aot_inductor,
        lambda path: torch._inductor.aoti_load_package(str(path)),
        embed=lambda path, metadata: None,  # its archive is left as the compiler wrote it
        uses_torch_export=True,
    ),
    "torch_export": Format(".pt2", _write_torch_export, _load_torch_export, uses_torch_export=True),
    "openvino": Format(
        ".xml",
        _write_openvino,
        _load_openvino,
        _embed_in_openvino,
        _embedded_in_openvino,
        precisions=("fp32", "fp16", "int8"),
        packages=("openvino",),
        extra_suffixes=(".bin",),
        options=_OPENVINO_OPTIONS,
    ),
}


def check_format(file_format: str) -> None:
    """Raise a :class:`ConfigError` where this machine cannot write and run a format."""
    check_choice("format", file_format, FORMATS)
    entry = FORMATS[file_format]
    # The first version with torch.export's support for sizes that depend on the data, which detectors need.
    if entry.uses_torch_export and torch.__version__ < (2, 8):
        raise ConfigError(f"format {file_format} needs torch 2.8 or newer, and this is {torch.__version__}")
    if file_format == "aot_inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise ConfigError("format aot_inductor needs a C++ compiler, g++ or the one that CXX names")
    check_packages(f"format {file_format}", entry.packages)


def check_packages(what: str, packages: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` where one of the packages that ``what`` needs is missing."""
    for name in packages:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigError(f"{what} needs {name}: pip install {' '.join(packages)}") from error


def load_model(path: Path) -> RunFn:
    """Load a file in its runtime: an image, or a batch, of the type that it takes -> its outputs in order.

    Raises:
        ConfigError: for a file that is damaged or has an unknown suffix, or where the runtime is missing.
    """
    return _read(path, FORMATS[format_of(path)].load)


def embedded_metadata(path: Path) -> str | None:
    """Return the metadata in a file, as JSON, without running any of it; None if there is none. Raises: as above."""
    return _read(path, FORMATS[format_of(path)].embedded)


def _read(path: Path, read: Callable[[Path], T]) -> T:
    entry = FORMATS[format_of(path)]
    try:
        return read(path)
    except ImportError as error:
        packages = " ".join(entry.packages) or error.name
        raise ConfigError(f"cannot load {path} without {error.name}: pip install {packages}") from error
    # onnxruntime's exceptions have no base class of their own.
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # OpenVINO's first lines name its source files.
        raise ConfigError(f"cannot load {path}: {lines[-1 if path.suffix == '.xml' else 0]}") from error


def format_of(path: str | Path) -> str:
    """Return the format that the suffix of a file names.

    Raises:
        ConfigError: for any other suffix.
    """
    for name, entry in FORMATS.items():
        if str(path).endswith(entry.suffix):
            return name
    suffixes = ", ".join(entry.suffix for entry in FORMATS.values())
    raise ConfigError(f"{path} is not an exported model: its suffix is not one of {suffixes}")


def is_exported(path: str | Path) -> bool:
    """Return whether a file has the suffix of an exported model."""
    return str(path).endswith(tuple(entry.suffix for entry in FORMATS.values()))
