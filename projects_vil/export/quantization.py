"""Post-training quantisation to int8 by nncf: which layers, which calibration images, and the file."""

import contextlib
import io
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from detectron2.config import CfgNode
from torch import Tensor

from backbones import ConfigError
from projects_vil.data import load_dataset, register_datasets
from projects_vil.export.detectors import ExportableDetector
from projects_vil.export.formats import FORMATS, check_packages, import_openvino, openvino_core, stage
from projects_vil.export.images import comparison_images
from projects_vil.export.metadata import check_sides

CALIBRATION_IMAGES = 100
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
# For the metadata of a quantised file.
FLOAT_PARTS = (
    "all but convolutions and linear layers: normalisation of images, layer norms, products and softmax of attention",
    "anchors, decoding of boxes, scores, non-maximum suppression, RoIAlign",
    "the deconvolution of masks; in OpenVINO depthwise convolutions too",
    *FLOAT_LAYERS,
)


def stays_float(name: str) -> bool:
    """Return whether the full name of a parameter or an operation has one of ``FLOAT_LAYERS`` in it."""
    return any(layer in name for layer in FLOAT_LAYERS)


def check_calibration(cfg: CfgNode, number: int) -> None:
    """Raise a :class:`ConfigError` where nncf or the images of :class:`CalibrationImages` are missing."""
    check_packages("precision int8", ["nncf"])
    if number < 1:
        raise ConfigError(f"calibration_images is {number}: it must be 1 or more")
    register_datasets(cfg)
    load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)


class CalibrationImages(Sequence[Tensor]):
    """Images evenly spaced in ``DATASETS.TRAIN``, prepared as for testing, each read when it is indexed.

    Args:
        cfg: the detector's config.
        number: maximum number of images.
        taken: ``input`` of the metadata of the exported model, whose type and number of axes an image gets.

    An item is (3, H, W), or (1, 3, H, W) if batched.

    Raises:
        ConfigError: for an item that cannot be read, or whose sides the model does not take.
    """

    def __init__(self, cfg: CfgNode, number: int, taken: dict) -> None:
        records = load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)
        number = min(number, len(records))
        self._files = [records[i * len(records) // number]["file_name"] for i in range(number)]
        self._cfg = cfg
        self._taken = taken

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Tensor:
        (image,) = comparison_images(self._cfg, [self._files[index]])
        check_sides(self._taken["sides"], image.shape[-2:], what=self._files[index])
        image = image.to(getattr(torch, self._taken["dtype"]))
        return image[None] if self._taken["batched"] else image

    def check(self) -> None:
        """Read each once, so that a mistake is found before the export, which takes minutes."""
        for _ in self:
            pass


def write_int8(
    exportable: ExportableDetector, example: Tensor, path: Path, file_format: str, images: Sequence[Tensor]
) -> dict:
    """Write a detector in float32 next to ``path``, and quantise that file into ``path``.

    Args:
        exportable, example, file_format: see :func:`projects_vil.export.formats.write_model`.
        images: calibration images, as the model takes them.

    Returns:
        The entries about the quantisation for the file's metadata.
    """
    source = path.with_name(f"float{FORMATS[file_format].suffix}")
    FORMATS[file_format].write(exportable, example, source)
    quantize(source, path, file_format, images)
    return {"quantization": {"calibration_images": len(images), "float_parts": FLOAT_PARTS}}


def quantize(source: Path, path: Path, file_format: str, images: Sequence[Tensor]) -> None:
    """Quantise the file ``source`` into ``path``; both of ``file_format``, onnx or openvino.

    Args:
        images: calibration images, as the model takes them.
    """
    with stage(f"nncf.quantize on {len(images)} images"):
        if file_format == "onnx":
            _quantize_onnx(source, path, images)
        else:
            _quantize_openvino(source, path, images)


def _nncf_quantize(model, float_operations: Sequence[str], inputs):
    import nncf

    # Its own set_log_level changes the level of every handler, also of those that an application added.
    logging.getLogger("nncf").setLevel(logging.ERROR)
    # SmoothQuant of nncf 3.4 gave a Transformer-LS ranges of about 0 in every second run, and no detections.
    off = nncf.AdvancedSmoothQuantParameters(convolution=-1, matmul=-1)
    with contextlib.redirect_stdout(io.StringIO()):
        return nncf.quantize(
            model,
            inputs,
            subset_size=inputs.get_length(),
            model_type=nncf.ModelType.TRANSFORMER,
            # Constants and outputs are among the names, and nncf cannot ignore them.
            ignored_scope=nncf.IgnoredScope(names=list(float_operations), validate=False),
            advanced_parameters=nncf.AdvancedQuantizationParameters(smooth_quant_alphas=off),
        )


def _quantize_onnx(source: Path, path: Path, images: Sequence[Tensor]) -> None:
    import nncf
    import onnx

    model = onnx.load(source)
    graph = model.graph
    fold_transposes(graph)
    weights = {tensor.name for tensor in graph.initializer}
    # Products of attention have no weights.
    kept = [
        node.name
        for node in graph.node
        if node.op_type not in ("Conv", "MatMul", "Gemm")
        or not weights.intersection(node.input)
        or any(map(stays_float, node.input))
    ]
    name = graph.input[0].name
    quantized = _nncf_quantize(model, kept, nncf.Dataset(images, lambda image: {name: image.numpy()}))
    onnx.save(quantized, path)


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


def _quantize_openvino(source: Path, path: Path, images: Sequence[Tensor]) -> None:
    openvino = import_openvino()
    import nncf

    model = openvino_core().read_model(source)
    kept = [
        node.get_friendly_name()
        for node in model.get_ops()
        if node.get_type_name() not in ("Convolution", "MatMul")
        or stays_float(node.get_friendly_name())
        or not any(_is_weight(value.get_node()) for value in node.input_values())
    ]
    quantized = _nncf_quantize(model, kept, nncf.Dataset(images, lambda image: image.numpy()))
    openvino.save_model(quantized, path, compress_to_fp16=False)


def _is_weight(node) -> bool:
    """Return whether an input of an operation is a constant, unlike in the products of attention."""
    while node.get_type_name() in ("Convert", "Reshape", "Transpose"):
        node = node.input_value(0).get_node()
    return node.get_type_name() == "Constant"
