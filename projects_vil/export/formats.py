"""The export formats: how each file is written and loaded. :data:`FORMATS` lists them.

``torch_export``, ``onnx`` and ``aot_inductor`` start from a ``torch.export`` program, ``torchscript`` and ``openvino``
from a ``torch.jit`` trace.
"""

import contextlib
import copy
import functools
import io
import json
import logging
import os
import pickle
import shutil
import sys
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
import torch.fx.config
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from backbones import ConfigError
from backbones.attention.chunks import copied_windows
from backbones.errors import check_choice, check_packages, one_line, pip_install
from backbones.layers.tracing import static_size, take_first
from projects_vil.export.traceable import ExportableDetector
from projects_vil.modeling import LARGEST_BATCH, export_sides
from projects_vil.utils import deferred_signals

OPSET = 20
# Execution providers of onnxruntime for each device, best first. TensorRT compiles the model for each image size.
_PROVIDERS = {"cpu": ("CPUExecutionProvider",), "cuda": ("CUDAExecutionProvider", "TensorrtExecutionProvider")}
_METADATA_KEY = "vil_metadata"  # in ONNX and OpenVINO files
_METADATA_FILE = "metadata.json"  # below extra/ in TorchScript and .pt2 archives
# A function from an input to the outputs, and the JSON of the embedded metadata.
Loaded = tuple[Callable[[Tensor], "tuple[Tensor, ...]"], str | None]
# Stack traces contain paths of this machine and take a seventh of the time. torch before 2.12 has no such switch.
_no_stack_traces = functools.partial(patch.object, torch.fx.config, "do_not_emit_stack_traces", True, create=True)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Format:
    """An export format.

    Attributes:
        suffix: The file name suffix.
        write: Write a detector to a file: ``write(exportable, example, path)``. The file accepts inputs of the
            example's dtype. Writers of formats with int8 also take ``quantizes``, the ONNX writer ``opset``.
        load: Load a file into its runtime. Returns a function from an input to the tuple of outputs, and the JSON of
            the embedded metadata or ``None``. The ONNX loader also takes ``device``.
        embed: Write metadata into a file, and remove what the exporter stored about this machine.
        precisions: The supported precisions.
        packages: The packages that writing needs, from the extra of the same name as the format. The metadata records
            their versions.
        runtime: The package that runs the file.
        shortest_side: The smallest image side in pixels; ``None`` for the limit of ``export_sides``.
        extra_suffixes: Suffixes of further files of a model, in place of ``suffix``.
        options: Runtime options of the loaded model.
    """

    suffix: str
    write: Callable[..., None]
    load: Callable[..., Loaded]
    embed: Callable[[Path, dict], None]
    precisions: tuple[str, ...] = ("fp32", "fp16", "bf16")
    packages: tuple[str, ...] = ()
    runtime: str = "torch"
    shortest_side: int | None = None
    extra_suffixes: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    def files(self, path: Path) -> list[Path]:
        """Return all files of the model at ``path``; ``path`` is the first."""
        stem = str(path).removesuffix(self.suffix)
        return [path, *(Path(stem + suffix) for suffix in self.extra_suffixes)]


# -- tracing ---------------------------------------------------------------------------------------


def export_program(exportable: ExportableDetector, example: Tensor) -> torch.export.ExportedProgram:
    """Return the ``torch.export`` program of a detector, for any image size unless ``exportable.size`` is set."""
    import torch.fx.experimental._config as symbolic

    # With bounds, a condition that fails for some size is an error at export time instead of at run time.
    sides = dict(zip(("min", "max"), export_sides(exportable.detector), strict=True))
    height, width = torch.export.Dim("height", **sides), torch.export.Dim("width", **sides)
    dynamic = {} if exportable.size else {example.ndim - 2: height, example.ndim - 1: width}
    if exportable.batched:
        dynamic[0] = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
    with (
        log_step("torch.export"),
        _no_stack_traces(),
        torch.no_grad(),
        # oneDNN chooses convolution kernels by batch size and width, which would specialize the program.
        torch.backends.mkldnn.flags(enabled=False),
        # Do not specialize a condition on a size to the example's size.
        symbolic.patch(backed_size_oblivious=True),
    ):
        try:
            program = torch.export.export(exportable, (example,), dynamic_shapes=(dynamic,), strict=False)
        except torch._dynamo.exc.UserError as error:
            if exportable.size:
                raise
            advice = "Set --image-size, or use --format torchscript."
            raise ConfigError(f"This model cannot be exported for variable image sizes. {advice}") from error
    # torch before 2.12 stores paths of this machine here.
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def trace(exportable: ExportableDetector, example: Tensor) -> torch.jit.ScriptModule:
    """Return the TorchScript trace of a detector, for any image size."""
    with log_step("torch.jit.trace"), torch.no_grad():
        return torch.jit.trace(exportable, (example,), check_trace=False)


@contextlib.contextmanager
def log_step(name: str) -> Iterator[None]:
    """Log the start and duration of an export step, and silence warnings."""
    _logger.info("%s ...", name)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    _logger.info("%s: %.1f s", name, time.perf_counter() - start)


def _save(save: Callable[[io.BytesIO], object], path: Path) -> None:
    # Write through memory, because torch's writers abort the process if the disk is full.
    buffer = io.BytesIO()
    save(buffer)
    path.write_bytes(buffer.getbuffer())


def _attention_as_products(
    query: Tensor, key: Tensor, value: Tensor, attn_mask=None, dropout_p: float = 0.0, *, scale: float | None = None
) -> Tensor:
    """Compute ``scaled_dot_product_attention`` as two matrix products and a softmax, with an additive mask or none.

    The ONNX and OpenVINO exporters would transpose a copy of the keys. In onnxruntime the copy takes as long as the
    product.
    """
    scale = static_size(query.shape[-1]) ** -0.5 if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


_WINOGRAD_CHANNELS = 128
# The matrices G and B^T of F(4, 3)
_WINOGRAD_KERNELS = torch.tensor([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]) / 24
_WINOGRAD_SUMS = torch.tensor(
    [[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0]]
    + [[0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1.0]]
)[:, None, None, :, None]


def _winograd_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride=1, padding=0, dilation=1, groups: int = 1
) -> Tensor:
    """Compute ``conv2d``; 3 x 3 convolutions of stride 1 with 128 input channels or more use half the multiplications.

    Four output rows are sums of six 1 x 3 convolutions instead of twelve: Winograd's minimal filtering F(4, 3) along
    the height (Lavin and Gray 2016, "Fast Algorithms for Convolutional Neural Networks").
    """
    kind = (*weight.shape[2:], stride, padding, dilation, groups)
    if weight.shape[1] < _WINOGRAD_CHANNELS or kind != (3, 3, (1, 1), (1, 1), (1, 1), 1):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    (channels, height), x = (static_size(x.shape[1]), x.shape[2]), F.pad(x, (0, 0, 1, 4))
    # Derived from the weights in the graph, so that the file stores only the weights.
    kernels = torch.einsum("gk,ockw->gocw", _WINOGRAD_KERNELS, weight)[:, :, :, None].unbind()
    # Depth-wise convolutions compute sums of rows faster than additions. The zeros are a bias, because ONNX's converter
    # makes four nodes if there is none.
    sums, zeros = _WINOGRAD_SUMS.expand(-1, channels, 1, -1, 1).unbind(), weight.new_zeros(channels)
    rows = [F.conv2d(x, one, zeros, stride=(4, 1), groups=channels) for one in sums]
    # Only the second convolution contributes once to each output row.
    zeros = weight.new_zeros(static_size(weight.shape[0]))
    biases = zeros, zeros if bias is None else bias, zeros, zeros, zeros, zeros
    parts = zip(rows, kernels, biases, strict=True)
    y0, y1, y2, y3, y4, y5 = (F.conv2d(row, kernel, bias, padding=(0, 1)) for row, kernel, bias in parts)
    even, odd, even2, odd2 = y1 + y2, y1 - y2, y3 + y4, 2 * (y3 - y4)
    y = torch.stack([y0 + even + even2, odd + odd2, even + 4 * even2, odd + 4 * odd2 + y5], 3)
    return take_first(y.flatten(2, 3), 2, height)


class _FasterFunctions(TorchFunctionMode):
    """Replace torch functions by faster equivalents while ONNX and OpenVINO files are traced."""

    def __init__(self, exportable: ExportableDetector, quantizes: bool) -> None:
        super().__init__()
        self.replacements = {F.scaled_dot_product_attention: _attention_as_products}
        if not quantizes and next(exportable.parameters()).dtype == torch.float32:
            self.replacements[F.conv2d] = _winograd_conv2d  # triples rounding errors

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.replacements.get(func, func)(*args, **(kwargs or {}))


# -- TorchScript, torch.export, AOTInductor --------------------------------------------------------


def _embed_in_archive(path: Path, metadata: dict) -> None:
    """Rewrite a torch archive with the metadata, and without the source locations (``.debug_pkl``)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(buffer, "w") as new:
        for entry in archive.infolist():
            if not entry.filename.endswith(".debug_pkl"):
                new.writestr(entry, archive.read(entry))
        folder = entry.filename.partition("/")[0]
        new.writestr(f"{folder}/extra/{_METADATA_FILE}", json.dumps(metadata))
    path.write_bytes(buffer.getbuffer())


def _write_torchscript(exportable: ExportableDetector, example: Tensor, path: Path) -> None:
    traced = trace(exportable, example)
    with log_step("torch.jit.save"):
        _save(lambda buffer: torch.jit.save(traced, buffer), path)


def _load_torchscript(path: Path) -> Loaded:
    embedded = {_METADATA_FILE: ""}
    return torch.jit.load(str(path), _extra_files=embedded), embedded[_METADATA_FILE] or None


def _write_torch_export(exportable: ExportableDetector, example: Tensor, path: Path) -> None:
    program = export_program(exportable, example)
    with log_step("torch.export.save"):
        _save(lambda buffer: torch.export.save(program, buffer), path)


def _load_torch_export(path: Path) -> Loaded:
    # Read once, so that the checked bytes are the loaded bytes.
    buffer, embedded = io.BytesIO(path.read_bytes()), {_METADATA_FILE: ""}
    names = torch._C.PyTorchFileReader(buffer).get_all_records()
    # torch runs pickles and native code in these records. No exported detector contains them.
    if programs := [name for name in names if "_obj_" in name or name.startswith("data/aotinductor/")]:
        raise ConfigError(f"'{path}' contains the program '{programs[0]}'. Do not load it: no export has one.")
    # torch would run the pickle of sample inputs that are not only tensors.
    with warnings.catch_warnings(), patch.dict(os.environ, TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"):
        warnings.simplefilter("ignore")
        try:
            buffer.seek(0)
            return torch.export.load(buffer, extra_files=embedded).module(), embedded[_METADATA_FILE] or None
        except pickle.UnpicklingError as error:  # torch's message suggests running the pickle
            raise ConfigError(f"'{path}' contains a pickle. Do not load it: no export has one.") from error


def _write_aot_inductor(exportable: ExportableDetector, example: Tensor, path: Path) -> None:
    program = export_program(exportable, example)
    with log_step("AOTInductor"):
        # With layout optimization, torch 2.15 assumes channels-last outputs of convolutions on a data-dependent number
        # of boxes. On a CPU this is wrong, and all masks are silently wrong.
        options = {"layout_optimization": False}
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


# -- ONNX ------------------------------------------------------------------------------------------


def _write_onnx(
    exportable: ExportableDetector, example: Tensor, path: Path, *, opset: int = OPSET, quantizes: bool = False
) -> None:
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass

    with _FasterFunctions(exportable, quantizes):
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
    with log_step("ONNX optimization"):
        # The optimizer takes time quadratic in the number of nodes, most of which are duplicate size computations.
        CommonSubexpressionEliminationPass()(onnx_program.model)
        onnx_program.optimize()
    # torch falls back to another opset if it cannot convert the model.
    if (written := onnx_program.model.opset_imports[""]) != opset:
        raise ConfigError(f"torch cannot write this model in opset {opset}. Use opset {written}.")
    with log_step("writing ONNX"):
        onnx_program.save(str(path), external_data=False)


def _load_onnx(path: Path, *, device: str = "cpu") -> Loaded:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    kind, _, index = device.partition(":")
    available = onnxruntime.get_available_providers()
    providers = [(name, {"device_id": index} if index else {}) for name in _PROVIDERS[kind] if name in available]
    session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    # onnxruntime runs on the CPU if it cannot use another provider.
    provider = session.get_providers()[0]
    if provider not in _PROVIDERS[kind]:
        advice = "Install onnxruntime-gpu instead, with its CUDA and cuDNN libraries, or use device cpu."
        raise ConfigError(f"Device {device} cannot run '{path}' in this onnxruntime. {advice}")
    _logger.info("%s runs in onnxruntime %s with %s", Path(path).name, onnxruntime.__version__, provider)
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, session.run(None, {name: images.cpu().numpy()})))

    return run, session.get_modelmeta().custom_metadata_map.get(_METADATA_KEY)


def _embed_in_onnx(path: Path, metadata: dict) -> None:
    import onnx

    model = onnx.load(path)
    # The exporter stores stack traces, and names such as s62 for sizes.
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


def _properties(metadata: dict) -> dict[str, str]:
    """Return the metadata under the keys that ultralytics runtimes read, and all metadata as JSON."""
    size = metadata["input"]["size"] or [metadata["resizing"]["short_side"] or metadata["input"]["sides"][0]] * 2
    properties = {
        "description": f"{metadata['detector']} with {metadata['backbone']}",
        "task": "segment" if "mask" in metadata["thresholds"] else "detect",
        "names": dict(enumerate(metadata["classes"])),
        "imgsz": size,
        "stride": metadata["input"]["stride"],
        "channels": 3,
        "batch": 1,
        "color_order": metadata["input"]["color_order"],
        "short_side": metadata["resizing"]["short_side"] or 0,
        "longest_side": metadata["resizing"]["longest_side"] or 0,
    }
    return {key: str(value) for key, value in properties.items()} | {_METADATA_KEY: json.dumps(metadata)}


def check_onnx(path: Path) -> dict[str, int]:
    """Check that an ONNX file is valid and portable, and return the counts of its operators, most frequent first.

    Raises:
        RuntimeError: If the file has operators outside the ONNX standard.
        onnx.checker.ValidationError, onnx.shape_inference.InferenceError: If the file is not valid.
    """
    import onnx

    model = onnx.load(path)
    other = {f"{node.domain}.{node.op_type}" for node in model.graph.node if node.domain not in ("", "ai.onnx")}
    if other or model.functions:
        raise RuntimeError(f"{path.name} has operators outside the ONNX standard: {other or model.functions}")
    onnx.checker.check_model(model, full_check=True)
    return dict(Counter(node.op_type for node in model.graph.node).most_common())


# -- OpenVINO --------------------------------------------------------------------------------------

# By default OpenVINO computes in bfloat16 on CPUs that support it.
_OPENVINO_OPTIONS = {"INFERENCE_PRECISION_HINT": "f32"}


def import_openvino():
    """Import ``openvino`` without its telemetry, which needs the package ``openvino_telemetry``."""
    sys.modules.setdefault("openvino_telemetry", None)
    import openvino

    return openvino


@functools.cache
def openvino_core():
    """Return the ``openvino.Core`` of this process, and keep its CPU plugin loaded.

    Each CPU plugin installs a signal stack in the thread that loads it, and removes the stack when it is unloaded. In
    OpenVINO 2026.4, plugins that are not unloaded in reverse order leave a stack in freed memory, and the next signal
    crashes the process. A plugin that stays loaded prevents this.
    """
    core = import_openvino().Core()
    core.get_versions("CPU")
    return core


def _write_openvino(exportable: ExportableDetector, example: Tensor, path: Path, *, quantizes: bool = False) -> None:
    openvino = import_openvino()
    is_half = next(exportable.parameters()).dtype == torch.float16
    # fp16 files store half-precision weights and compute in float32.
    with _FasterFunctions(exportable, quantizes), copied_windows():
        traced = trace(copy.deepcopy(exportable).float() if is_half else exportable, example)
    sides = exportable.size or [openvino.Dimension(*export_sides(exportable.detector))] * 2
    batch = [openvino.Dimension(1, LARGEST_BATCH)] if exportable.batched else []
    shape = openvino.PartialShape([*batch, 3, *sides])
    # The converter would report an exception from a signal handler as an unsupported operator.
    with log_step("openvino.convert_model"), deferred_signals():
        # From the trace, because OpenVINO 2026.4 cannot read the ONNX file.
        model = openvino.convert_model(traced, example_input=(example,), input=[shape])
    for ports, names in ((model.inputs, exportable.input_names), (model.outputs, exportable.output_names)):
        for port, name in zip(ports, names, strict=True):
            port.get_tensor().set_names({name})
    openvino.save_model(model, path, compress_to_fp16=is_half)


def _embed_in_openvino(path: Path, metadata: dict) -> None:
    openvino = import_openvino()
    # From bytes, because a memory-mapped file could not be overwritten.
    model = openvino_core().read_model(path.read_bytes(), path.with_suffix(".bin").read_bytes())
    for key, value in _properties(metadata).items():
        model.set_rt_info(value, ["model_info", key])
    openvino.save_model(model, path, compress_to_fp16=False)


def _load_openvino(path: Path) -> Loaded:
    model, keys = openvino_core().read_model(path), ["model_info", _METADATA_KEY]
    options = _OPENVINO_OPTIONS | {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino_core().compile_model(model, "CPU", options)

    def run(images: Tensor) -> tuple[Tensor, ...]:
        outputs = compiled(images.cpu().numpy())
        return tuple(torch.from_numpy(outputs[output]) for output in compiled.outputs)

    return run, model.get_rt_info(keys).astype(str) if model.has_rt_info(keys) else None


# -- the table -------------------------------------------------------------------------------------

# The first matching suffix determines the format of a file, so .aoti.pt2 comes before .pt2.
FORMATS: dict[str, Format] = {
    "torchscript": Format(".ts", _write_torchscript, _load_torchscript, _embed_in_archive, shortest_side=1),
    "onnx": Format(
        ".onnx",
        _write_onnx,
        _load_onnx,
        _embed_in_onnx,
        # Opset 20 has no bfloat16 convolutions.
        precisions=("fp32", "fp16", "int8"),
        packages=("onnx", "onnxscript", "onnxruntime"),
        runtime="onnxruntime",
    ),
    "aot_inductor": Format(
        ".aoti.pt2",
        _write_aot_inductor,
        load=lambda path: (torch._inductor.aoti_load_package(str(path)), None),
        embed=lambda path, metadata: None,  # the archive stays as the compiler wrote it
    ),
    "torch_export": Format(".pt2", _write_torch_export, _load_torch_export, _embed_in_archive),
    "openvino": Format(
        ".xml",
        _write_openvino,
        _load_openvino,
        _embed_in_openvino,
        precisions=("fp32", "fp16", "int8"),
        packages=("openvino",),
        runtime="openvino",
        extra_suffixes=(".bin",),
        options=_OPENVINO_OPTIONS,
    ),
}


def check_format(file_format: str) -> None:
    """Raise a :class:`ConfigError` if this machine cannot write or run a format."""
    check_choice("format", file_format, FORMATS)
    # torch 2.8 is the first version whose torch.export supports the data-dependent sizes of detectors.
    if file_format not in ("torchscript", "openvino") and torch.__version__ < (2, 8):
        raise ConfigError(f"Format {file_format} needs torch 2.8 or newer, not {torch.__version__}. Update torch.")
    if file_format == "aot_inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise ConfigError("Format aot_inductor needs a C++ compiler. Install g++, or set CXX to a compiler.")
    check_packages(f"Format {file_format}", *FORMATS[file_format].packages)


def load_model(path: Path, *, device: str | torch.device = "cpu") -> Loaded:
    """Load an exported file in its runtime.

    Args:
        path: The file.
        device: ``"cpu"``, or ``"cuda"`` for an ONNX file.

    Returns:
        A function from an input (an image or a batch, in the dtype of the model) to the tuple of outputs, and the JSON
        of the embedded metadata or ``None``.

    Raises:
        ConfigError: If the file is damaged or has an unknown suffix, or its runtime is not installed or cannot use the
            device.
    """
    entry, options = FORMATS[format_of(path)], {} if str(device) == "cpu" else {"device": str(device)}
    if options and (entry.runtime != "onnxruntime" or str(device).partition(":")[0] not in _PROVIDERS):
        raise ConfigError(f"'{path}' cannot run on device {device}. Use device cpu, or cuda for an ONNX file.")
    try:
        return entry.load(path, **options)
    except ConfigError:
        raise
    except ImportError as error:
        advice = pip_install(*(entry.packages or [error.name]))
        raise ConfigError(f"Cannot load '{path}' without {error.name}. {advice}") from error
    # The exceptions of onnxruntime have no common base class.
    except Exception as error:
        raise ConfigError(f"Cannot load '{path}': {one_line(error)}. Export the model again.") from error


def format_of(path: str | Path) -> str:
    """Return the format of a file by its suffix.

    Raises:
        ConfigError: If no format has the suffix.
    """
    for name, entry in FORMATS.items():
        if str(path).endswith(entry.suffix):
            return name
    suffixes = ", ".join(entry.suffix for entry in FORMATS.values())
    raise ConfigError(f"'{path}' is not an exported model. Its suffix must be one of {suffixes}.")
