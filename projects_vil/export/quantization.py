"""Post-training quantisation to int8 by nncf: which layers, which calibration images, and the file."""

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
from projects_vil.export.formats import check_packages, import_openvino, log_step, openvino_core

# Layers that stay float, by a part of their name: rounding in them moves boxes, cuts off scores
# or, in LIT's offsets, moves the sampling positions.
FLOAT_LAYERS = (
    "patch_embed.offset",
    "cls_score",
    "bbox_pred",
    "objectness_logits",
    "anchor_deltas",
    "mask_head.predictor",
)


def stays_float(name: str) -> bool:
    """Return whether the full name of a parameter or an operation has one of ``FLOAT_LAYERS`` in it."""
    return any(layer in name for layer in FLOAT_LAYERS)


def calibration_files(cfg: CfgNode, number: int) -> list[str]:
    """Return at most ``number`` image files of ``DATASETS.TRAIN``, evenly spaced.

    Raises:
        ConfigError: where nncf or the images are missing.
    """
    check_packages("precision int8", ["nncf"])
    register_datasets(cfg)
    records = load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)
    number = min(number, len(records))
    return [records[i * len(records) // number]["file_name"] for i in range(number)]


def quantize(
    source: Path, path: Path, file_format: str, files: Sequence[Any], read: Callable[[Any], Tensor]
) -> dict[str, Any]:
    """Quantise the file ``source`` into ``path``; both of ``file_format``, onnx or openvino.

    Args:
        files: calibration images; each is read when it is used.
        read: one of them -> the image, as the model takes it.

    Returns:
        What the metadata has about it.
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
    return {"calibration_images": len(files), "float_layers": FLOAT_LAYERS}


def _nncf_quantize(model, float_operations: Sequence[str], files: Sequence[Any], as_input: Callable[[Any], Any]):
    import nncf

    # Its own set_log_level changes the level of every handler, also of those that an application added.
    logging.getLogger("nncf").setLevel(logging.ERROR)
    # SmoothQuant of nncf 3.4 gave a Transformer-LS ranges of about 0 in every second run, and no detections.
    off = nncf.AdvancedSmoothQuantParameters(convolution=-1, matmul=-1)
    return nncf.quantize(
        model,
        nncf.Dataset(files, as_input),
        subset_size=len(files),
        model_type=nncf.ModelType.TRANSFORMER,
        # Constants and outputs are among the names, and nncf cannot ignore them.
        ignored_scope=nncf.IgnoredScope(names=list(float_operations), validate=False),
        advanced_parameters=nncf.AdvancedQuantizationParameters(
            # Half the range of weights: with all of it, sums in 16 bits saturate on processors without VNNI.
            overflow_fix=nncf.OverflowFix.ENABLE,
            smooth_quant_alphas=off,
        ),
    )


def _float_nodes(graph) -> list[str]:
    """Return the names of the nodes of an ``onnx.GraphProto`` that stay float."""
    weights = {tensor.name for tensor in graph.initializer}
    # Products of attention have no weights.
    return [
        node.name
        for node in graph.node
        if node.op_type not in ("Conv", "MatMul", "Gemm")
        or not weights.intersection(node.input)
        or any(map(stays_float, node.input))
    ]


def fold_transposes(graph) -> None:
    """Replace each Transpose of a weight by a transposed weight, in an ``onnx.GraphProto`` without branches.

    The exporter's optimiser leaves large weights that are used more than once, as for tokens and global tokens, and
    nncf recognises a weight by its being a constant. The new name begins with the old one, the path of the module.
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
    """Return the names of the operations of an ``openvino.Model`` that stay float."""
    return [
        node.get_friendly_name()
        for node in model.get_ops()
        if node.get_type_name() not in ("Convolution", "MatMul")
        or stays_float(node.get_friendly_name())
        or not any(_is_weight(value.get_node()) for value in node.input_values())
    ]


def _is_weight(node) -> bool:
    """Return whether an input of an operation is a constant, unlike in the products of attention."""
    while node.get_type_name() in ("Convert", "Reshape", "Transpose"):
        node = node.input_value(0).get_node()
    return node.get_type_name() == "Constant"
