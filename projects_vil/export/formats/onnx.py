"""ONNX, and onnxruntime: ``model.onnx``."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.formats.format import Format, Run, check_packages, damaged
from projects_vil.export.formats.quantizing import stays_float
from projects_vil.export.formats.recording import check_recording, quiet, record
from projects_vil.export.onnx_graph.standard import describe_onnx, inferred
from projects_vil.export.onnx_graph.tensorrt_operators import TENSORRT, undocumented
from projects_vil.export.onnx_graph.turned_weights import turn_weights
from projects_vil.export.stages import Stages

OPSET = 20
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_QUANTIZED = ["Conv", "MatMul", "Gemm"]
# For TensorRT: zero is zero, biases stay float, and so does what a layer gives (NVIDIA's "Q/DQ Layer-Placement
# Recommendations": its inputs are quantised, and by default not its outputs).
_SYMMETRIC = {
    "ActivationSymmetric": True,
    "WeightSymmetric": True,
    "QuantizeBias": False,
    "OpTypesToExcludeOutputQuantization": _QUANTIZED,
}


def _check() -> None:
    check_recording("onnx")
    check_packages("--format onnx", PACKAGES)


def _write(exportable: ExportableDetector, example: Tensor, path: Path, stages: Stages) -> None:
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
            custom_translation_table={torch.ops.aten.scaled_dot_product_attention.default: _attention},
            # A stage of its own, which takes as long.
            optimize=False,
        )
    with stages("optimising"), quiet():
        onnx_program.optimize()
    _ask_floats_for_sizes(onnx_program.model.graph)
    with stages("writing"), quiet():
        onnx_program.save(str(path), external_data=False)


def _ask_floats_for_sizes(graph) -> None:
    """Take the sizes of a uint8 image from its floats, in an ``onnx_ir.Graph``: TensorRT only takes uint8 in."""
    users = [node for node, _ in graph.inputs[0].uses()]
    casts = [node for node in users if node.op_type == "Cast"]
    for node in users if casts else ():
        if node.op_type == "Shape":
            node.replace_input_with(0, casts[0].outputs[0])
    graph.sort()


def _attention(
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


def quantize_onnx(
    source: Path, path: Path, images: Sequence[Tensor], stages: Stages, *, symmetric: bool = False
) -> None:
    """Write an ONNX file in int8, with QuantizeLinear and DequantizeLinear round its convolutions and linear layers.

    Args:
        source: the file in float32.
        path: the one to be written.
        images: as the model takes them, which ranges are measured on.
        symmetric: whether it is for TensorRT: int8 with zero points 0, and no bias and no output quantised. Without,
            values are uint8 with zero points of their own, which is finer.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    model = onnx.load(source)
    graph = model.graph
    turn_weights(graph)
    weights = {tensor.name for tensor in graph.initializer}
    # Products of attention have no weights.
    kept = [
        node.name for node in graph.node if not weights.intersection(node.input) or any(map(stays_float, node.input))
    ]
    name, left = graph.input[0].name, iter(images)

    class Images(CalibrationDataReader):
        def get_next(self) -> dict | None:
            image = next(left, None)
            return None if image is None else {name: image.numpy()}

    with stages("quantising", f"{len(images)} images"), quiet():
        quantize_static(
            model,
            path,
            Images(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_QUANTIZED,
            nodes_to_exclude=kept,
            per_channel=True,
            activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options=_SYMMETRIC if symmetric else {},
        )


def _load(path: Path) -> Run:
    # Nothing that only writing needs.
    check_packages(str(path), ("onnxruntime",))
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as states

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    kinds = (states.Fail, states.InvalidArgument, states.InvalidProtobuf, states.InvalidGraph, states.NotImplemented)
    with damaged(path, *kinds):
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, session.run(None, {name: images.cpu().numpy()})))

    return run


def _describe(path: Path) -> dict:
    model = inferred(path)
    tensorrt = {"version": TENSORRT, "undocumented": undocumented(model)}
    return {"onnx": describe_onnx(model, path) | {"tensorrt": tensorrt}}


ONNX = Format(
    ".onnx",
    _check,
    _write,
    _load,
    PACKAGES,
    describe=_describe,
    quantize=quantize_onnx,
    quantizing_packages=("onnx", "onnxruntime"),
    refused={"bf16": f"ONNX has no bfloat16 convolutions in opset {OPSET}; take fp16, or a .pt2"},
)
