"""OpenVINO's own representation: ``model.xml``, with its weights in ``model.bin``."""

import contextlib
import copy
import functools
import io
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from backbones.execution.overlap import copied_windows
from backbones.execution.tracing import static_size
from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.formats.format import Format, Run, check_packages, damaged
from projects_vil.export.formats.quantizing import stays_float
from projects_vil.export.formats.recording import quiet, trace
from projects_vil.export.stages import Stages
from projects_vil.modeling import LARGEST_BATCH, SMALLEST_SIDE, largest_side
from projects_vil.utils import held_signals

# On a CPU that has it, OpenVINO computes in bfloat16 where it is not told otherwise.
OPTIONS = {"INFERENCE_PRECISION_HINT": "f32"}


def import_openvino():
    """The package ``openvino``, which sends nothing about its use: without ``openvino_telemetry`` it cannot."""
    sys.modules.setdefault("openvino_telemetry", None)
    import openvino

    return openvino


@functools.cache
def core():
    """The one ``openvino.Core`` of this process, with its CPU plugin.

    Each plugin gives the thread that loads it another stack for signals, and takes it away with itself: of two that do
    not end in the order of their beginning, as 2026.4 has it, the stack that is left is no memory, and the next signal,
    be it Ctrl-C or a child's end, is a segmentation fault. This one begins first and stays.
    """
    core = import_openvino().Core()
    core.get_versions("CPU")
    return core


def _check() -> None:
    check_packages("--format openvino", OPENVINO.packages)


def _write(exportable: ExportableDetector, example: Tensor, path: Path, stages: Stages) -> None:
    openvino = import_openvino()
    halved = next(exportable.parameters()).dtype == torch.float16
    with stages("recording"):
        # Half precision is that of the weights in the file; what computes is float32.
        with _AttentionByProducts(), copied_windows():
            traced = trace(copy.deepcopy(exportable).float() if halved else exportable, example)
    # What a signal raises in its calls of Python, the converter would take for an operator that it cannot convert.
    with stages("converting"), quiet(), held_signals():
        # OpenVINO 2026.4 does not read the ONNX file; its front end for PyTorch makes of the trace what it should be.
        model = openvino.convert_model(traced, example_input=(example,), input=[_input_shape(exportable, example)])
    for ports, names in ((model.inputs, exportable.input_names), (model.outputs, exportable.output_names)):
        for port, name in zip(ports, names, strict=True):
            port.get_tensor().set_names({name})
    with stages("writing"):
        openvino.save_model(model, path, compress_to_fp16=halved)


class _AttentionByProducts(TorchFunctionMode):
    """``scaled_dot_product_attention``, with a mask that is added or none, is recorded as two products and a softmax.

    OpenVINO's own turn of it copies the keys, transposed, where a product takes them as they are.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, scale: float | None = None
) -> Tensor:
    scale = static_size(query.shape[-1]) ** -0.5 if scale is None else scale
    if attn_mask is not None and attn_mask.dtype != query.dtype:
        raise NotImplementedError("attention with a mask of another type")
    scores = (query * scale) @ key.transpose(-2, -1)
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


def _input_shape(exportable: ExportableDetector, example: Tensor):
    """What a model takes: its size or any between the bounds, and any number of images if it is batched."""
    openvino = import_openvino()
    sides = exportable.size or [openvino.Dimension(SMALLEST_SIDE, largest_side(exportable.detector))] * 2
    batch = [openvino.Dimension(1, LARGEST_BATCH)] if exportable.batched else []
    return openvino.PartialShape([*batch, 3, *sides])


def _quantize(source: Path, path: Path, images: Sequence[Tensor], stages: Stages) -> None:
    openvino = import_openvino()
    import nncf

    nncf.set_log_level(logging.ERROR)
    model = core().read_model(source)
    kept = [
        node.get_friendly_name()
        for node in model.get_ops()
        if node.get_type_name() not in ("Convolution", "MatMul")
        or stays_float(node.get_friendly_name())
        or not any(_is_weight(value.get_node()) for value in node.input_values())
    ]
    # Constants and results, which are among these, are nothing that nncf could leave out.
    scope = nncf.IgnoredScope(names=kept, validate=False)
    # SmoothQuant of nncf 3.4 gave a Transformer-LS ranges of about 0 in every second run, and files that find nothing.
    off = nncf.AdvancedSmoothQuantParameters(convolution=-1, matmul=-1)
    with stages("quantising", f"{len(images)} images"), contextlib.redirect_stdout(io.StringIO()):
        quantized = nncf.quantize(
            model,
            nncf.Dataset(images, lambda image: image.numpy()),
            subset_size=len(images),
            model_type=nncf.ModelType.TRANSFORMER,
            ignored_scope=scope,
            advanced_parameters=nncf.AdvancedQuantizationParameters(smooth_quant_alphas=off),
        )
    with stages("writing"):
        openvino.save_model(quantized, path, compress_to_fp16=False)


def _is_weight(node) -> bool:
    """Whether an input of an operation is a constant, as it is not in the products of attention."""
    while node.get_type_name() in ("Convert", "Reshape", "Transpose"):
        node = node.input_value(0).get_node()
    return node.get_type_name() == "Constant"


def _load(path: Path) -> Run:
    _check()
    options = OPTIONS | {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    runtime = core()
    with damaged(path, RuntimeError, reason_last=True):
        compiled = runtime.compile_model(path, "CPU", options)

    def run(images: Tensor) -> tuple[Tensor, ...]:
        found = compiled(images.cpu().numpy())
        return tuple(torch.from_numpy(found[output]) for output in compiled.outputs)

    return run


OPENVINO = Format(
    ".xml",
    _check,
    _write,
    _load,
    ("openvino",),
    beside=(".bin",),
    options=OPTIONS,
    quantize=_quantize,
    quantizing_packages=("openvino", "nncf"),
    refused={"bf16": "a file of OpenVINO holds weights in fp32 or fp16; take one of these, or a .pt2"},
)
