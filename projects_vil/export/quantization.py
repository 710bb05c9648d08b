"""Post-training quantization to int8 with nncf."""

import contextlib
import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from torch import Tensor

from projects_vil.data import load_dataset, register_datasets
from projects_vil.export.formats import import_openvino, log_step, openvino_core

# Parts of the names of layers that stay float. Rounding in them moves boxes, clips scores or, in LIT's offsets, moves
# sampling positions.
FLOAT_LAYERS = (
    "patch_embed.offset",
    "cls_score",
    "bbox_pred",
    "objectness_logits",
    "anchor_deltas",
    "mask_head.predictor",
)


def stays_float(name: str) -> bool:
    """Return whether the name of a parameter or an operation contains one of ``FLOAT_LAYERS``."""
    return any(layer in name for layer in FLOAT_LAYERS)


def calibration_files(cfg: CfgNode, number: int) -> list[str]:
    """Return up to ``number`` image files of ``DATASETS.TRAIN``, evenly spaced.

    Raises:
        ConfigError: If the dataset or an image is missing.
    """
    register_datasets(cfg)
    records = load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)
    number = min(number, len(records))
    return [records[i * len(records) // number]["file_name"] for i in range(number)]


def quantize(source: Path, path: Path, file_format: str, files: Sequence[Any], read: Callable[[Any], Tensor]) -> None:
    """Quantize the float file ``source`` and write the result to ``path``.

    Args:
        source: The float file.
        path: The int8 file to write.
        file_format: ``"onnx"`` or ``"openvino"``.
        files: The calibration images.
        read: A function from one of ``files`` to an input of the model.
    """
    with log_step(f"nncf.quantize on {len(files)} images"), contextlib.redirect_stdout(io.StringIO()):
        if file_format == "onnx":
            import onnx

            model = onnx.load(source)
            fold_transposes(model.graph)
            name, kept = model.graph.input[0].name, _float_nodes(model.graph)
            quantized = _nncf_quantize(model, kept, files, lambda file: {name: read(file).numpy()})
            onnx.save(quantized, path)
        else:
            openvino = import_openvino()
            model = openvino_core().read_model(source)
            quantized = _nncf_quantize(model, _float_operations(model), files, lambda file: read(file).numpy())
            openvino.save_model(quantized, path, compress_to_fp16=False)


def _nncf_quantize(model, float_operations: Sequence[str], files: Sequence[Any], as_input: Callable[[Any], Any]):
    import nncf

    # nncf.set_log_level would also change handlers of the application.
    logging.getLogger("nncf").setLevel(logging.ERROR)
    # With SmoothQuant of nncf 3.4, every second Transformer-LS had ranges of about 0 and no detections.
    off = nncf.AdvancedSmoothQuantParameters(convolution=-1, matmul=-1)
    return nncf.quantize(
        model,
        nncf.Dataset(files, as_input),
        subset_size=len(files),
        model_type=nncf.ModelType.TRANSFORMER,
        # The names include constants and outputs, which nncf cannot ignore.
        ignored_scope=nncf.IgnoredScope(names=list(float_operations), validate=False),
        advanced_parameters=nncf.AdvancedQuantizationParameters(
            # Use half the weight range. Otherwise 16-bit sums saturate on CPUs without VNNI.
            overflow_fix=nncf.OverflowFix.ENABLE,
            smooth_quant_alphas=off,
        ),
    )


def _float_nodes(graph) -> list[str]:
    """Return the names of the float nodes of an ``onnx.GraphProto``."""
    weights = {tensor.name for tensor in graph.initializer}
    # Matrix products of attention have no weights.
    return [
        node.name
        for node in graph.node
        if node.op_type not in ("Conv", "MatMul", "Gemm")
        or not weights.intersection(node.input)
        or any(map(stays_float, node.input))
    ]


def fold_transposes(graph) -> None:
    """Replace each Transpose of a weight in an ``onnx.GraphProto`` by a transposed weight.

    nncf recognizes weights as constants, but the optimizer of the exporter keeps the Transpose of a large weight that
    is used more than once. The new name starts with the name of the weight.
    """
    from onnx import numpy_helper

    weights = {tensor.name: tensor for tensor in graph.initializer}
    new_names = {}
    for node in [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights]:
        name = f"{node.input[0]}.{node.output[0]}"
        perm = next((list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"), None)
        folded = np.transpose(numpy_helper.to_array(weights[node.input[0]]), perm)
        graph.initializer.append(numpy_helper.from_array(folded, name))
        new_names[node.output[0]] = name
        graph.node.remove(node)
    for node in graph.node:
        node.input[:] = [new_names.get(name, name) for name in node.input]
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for tensor in weights.values():
        if tensor.name not in used:
            graph.initializer.remove(tensor)


def _float_operations(model) -> list[str]:
    """Return the names of the float operations of an ``openvino.Model``."""
    return [
        node.get_friendly_name()
        for node in model.get_ops()
        if node.get_type_name() not in ("Convolution", "MatMul")
        or stays_float(node.get_friendly_name())
        or not any(_is_weight(value.get_node()) for value in node.input_values())
    ]


def _is_weight(node) -> bool:
    """Return whether an input of an operation is a constant. Matrix products of attention have none."""
    while node.get_type_name() in ("Convert", "Reshape", "Transpose"):
        node = node.input_value(0).get_node()
    return node.get_type_name() == "Constant"
