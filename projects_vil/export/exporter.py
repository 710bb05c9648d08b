"""Export a trained detector with its metadata, and check the exported file against the detector.

:class:`projects_vil.export.traceable.ExportableDetector` defines the inputs and outputs. The caller resizes images; the
exported model normalizes them and applies the score threshold and non-maximum suppression.
"""

import copy
import datetime
import importlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torchvision
from detectron2.config import CfgNode
from torch import Tensor, nn

from backbones import ConfigError
from backbones.errors import check_choice, check_packages, check_replaceable, check_whole, package_version
from projects_vil.checkpoint import load_detector, versions
from projects_vil.config import detector_name, head_of, with_overrides
from projects_vil.data import Categories, load_dataset, register_datasets
from projects_vil.export.formats import FORMATS, OPSET, check_format, log_step
from projects_vil.export.parity import check_export, example_image, parity_images
from projects_vil.export.quantization import FLOAT_LAYERS, calibration_files, quantize
from projects_vil.export.runtime import ExportedModel, check_sides, metadata_path
from projects_vil.export.traceable import ExportableDetector, make_exportable
from projects_vil.files import atomic_folder, content_hash
from projects_vil.modeling import LARGEST_BATCH, export_sides
from projects_vil.utils import deferred_signals
from vil.choices import INPUT_DTYPES

# The dtypes of the network. An int8 file is quantized from fp32.
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float32}
# The size of the tracing example. The parity check uses other sizes.
EXAMPLE_SIZE = (160, 224)


def export_detector(
    cfg: CfgNode,
    weights: str | Path,
    output: str | Path,
    *,
    file_format: str = "torchscript",
    precision: str = "fp32",
    input_dtype: str = "uint8",
    batched: bool = False,
    fixed_detections: bool = False,
    size: Sequence[int] | None = None,
    images: Sequence[str | Path] = (),
    evaluate: bool = False,
    calibration_images: int = 100,
    accept_drop: bool = False,
    opset: int | None = None,
) -> tuple[Path, dict]:
    """Export a detector, load the file in its own runtime, and compare it with the detector in float32.

    The files are written atomically: an export that fails leaves older files unchanged.

    Args:
        cfg: The config of the detector.
        weights: The path of its checkpoint.
        output: The folder for the model, its metadata and its report.
        file_format: A key of ``FORMATS``.
        precision: A precision of the format. For int8, average precision on ``DATASETS.TEST`` decides about parity.
        input_dtype: ``uint8`` or ``float32``. TorchScript files accept both.
        batched: Whether the model takes a batch (B, 3, H, W).
        fixed_detections: Whether to return ``TEST.DETECTIONS_PER_IMAGE`` rows per image, padded with zeros, and the
            number of detections.
        size: Height and width of all images; ``None`` for any size.
        images: Image files for the parity check, see :func:`projects_vil.export.parity.parity_images`.
        evaluate: Whether to compare average precision on ``DATASETS.TEST`` too.
        calibration_images: The maximum number of images of ``DATASETS.TRAIN`` that calibrate int8.
        accept_drop: Whether int8 may lose more than ``AP_DROP`` points.
        opset: The opset of an ONNX file, 18 or newer; ``None`` for 20.

    Returns:
        The path of the model, and the report of :func:`projects_vil.export.parity.check_export`.

    Raises:
        ConfigError: If the detector, the weights or an option do not fit, or a package is missing.

    Example:
        >>> cfg = load_config("output/vil_tiny/config.yaml")
        >>> path, report = export_detector(cfg, "output/vil_tiny/model_final.pth", "export", file_format="onnx")
    """
    check_format(file_format)
    entry, is_int8 = FORMATS[file_format], precision == "int8"
    check_choice("input_dtype", input_dtype, INPUT_DTYPES)
    check_choice(f"precision of format {file_format}", precision, entry.precisions)
    check_whole("opset", opset or 18, least=18)
    if opset is not None and file_format != "onnx":
        raise ConfigError(f"opset has no effect on {file_format}. Leave it out, or use format onnx.")
    if opset is not None and opset > (newest := importlib.import_module("onnx").defs.onnx_opset_version()):
        raise ConfigError(f"opset is {opset}, but the installed onnx ends with {newest}. Use a lower opset.")
    evaluate = evaluate or is_int8
    if size is not None and evaluate:
        reason = "because images of DATASETS.TEST have other sizes"
        raise ConfigError(f"image_size has no effect with precision int8 or evaluate, {reason}. Leave out one of them.")
    if evaluate:
        register_datasets(cfg)
        load_dataset(cfg, cfg.DATASETS.TEST, train=False)
    if cfg.TEST.TILE_SIZE:
        message = "The exported file does not divide images into tiles. Give it tiles of %d pixels."
        logging.getLogger(__name__).warning(message, cfg.TEST.TILE_SIZE)
    if is_int8:
        check_packages("Precision int8", "nncf")
    calibration = calibration_files(cfg, calibration_images) if is_int8 else []
    if Path(output).exists() and not Path(output).is_dir():
        raise ConfigError(f"Output '{output}' is a file. Choose a folder.")
    on_cpu = with_overrides(cfg, {"MODEL.DEVICE": "cpu", "MODEL.TRANSFORMER.COMPILE": False})
    reference, categories = load_detector(on_cpu, weights)
    network = cast_network(copy.deepcopy(reference), precision)
    fixed_number = cfg.TEST.DETECTIONS_PER_IMAGE if fixed_detections else None
    exportable = make_exportable(network, batched=batched, fixed_number=fixed_number, size=size)
    described = {"precision": precision, "input_dtype": input_dtype, "weights": weights, "opset": opset}
    metadata = describe_model(cfg, exportable, categories, file_format, **described)
    compared = parity_images(cfg, images, fixed=size, sides=metadata["input"]["sides"])

    def as_input(image: Tensor) -> Tensor:
        image = image.to(getattr(torch, input_dtype))
        return image[None] if batched else image

    def read(file: str) -> Tensor:
        return as_input(parity_images(cfg, [file])[0][1])

    # Find unreadable calibration images now, before minutes of export.
    for file in calibration:
        read(file)
    example = as_input(example_image(*(size or EXAMPLE_SIZE)))
    if batched:
        example = example.repeat(2, 1, 1, 1)

    # Files with different inputs or outputs have different names.
    parts = ["model", batched and "batched", precision != "fp32" and precision, fixed_detections and "fixed"]
    parts += [input_dtype != "uint8" and input_dtype, size and f"{size[0]}x{size[1]}", opset and f"opset{opset}"]
    path = Path(output) / ("_".join(filter(None, parts)) + entry.suffix)
    if not metadata_path(path).exists():
        check_replaceable(path, advice="Choose another output directory.")
    options = {"quantizes": is_int8} if "int8" in entry.precisions else {}
    options |= {"opset": opset} if opset else {}

    def write(new: Path, **checks: bool) -> dict:
        """Write a file and its metadata, and return the report of its parity check."""
        source = new.with_name(f"float{entry.suffix}") if is_int8 else new
        entry.write(exportable, example, source, **options)
        if is_int8:
            quantize(source, new, file_format, calibration, read)
            metadata["quantization"] = {"calibration_images": len(calibration), "float_layers": FLOAT_LAYERS}
        entry.embed(new, metadata)
        main, *others = entry.files(new)
        digests = {"sha256": content_hash(main), "other_files": {file.name: content_hash(file) for file in others}}
        metadata_path(new).write_text(json.dumps(metadata | digests, indent=2) + "\n")
        with log_step("parity check"):
            return check_export(cfg, reference, ExportedModel(new), compared, **checks)

    with atomic_folder(path.parent) as unfinished:
        report = write(unfinished / path.name, evaluate=evaluate, accept_drop=accept_drop)
        has_detections = any(row["detections"] + row["detections_exported"] for row in report["images"])
        if not (has_detections or is_int8) and metadata["thresholds"]["score"] > 0:
            # Without detections, compare the candidates of a second file that has no score threshold.
            metadata["thresholds"]["score"] = 0.0
            for module in (*reference.modules(), *network.modules()):
                if hasattr(module, "test_score_thresh"):
                    module.test_score_thresh = 0.0
            low = write(unfinished / f"candidates{entry.suffix}")
            report |= {"images": low["images"], "score_threshold": 0.0}
            report["ok"] = low["ok"] and all(row["ok"] for row in report.get("evaluation", ()))
        report_file = path.with_name(f"{path.name}.report.json")
        (unfinished / report_file.name).write_text(json.dumps(report, indent=2) + "\n")
        with deferred_signals():
            for file in (*entry.files(path), metadata_path(path), report_file):
                os.replace(unfinished / file.name, file)
    return path, report


def cast_network(detector: nn.Module, precision: str) -> nn.Module:
    """Cast a detector to a precision. Anchors, pixel mean and pixel standard deviation stay float32."""
    kept = {name: buffer for name, buffer in detector.named_buffers() if name.startswith("pixel_") or "anchor" in name}
    detector.to(_DTYPES[precision])
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        setattr(detector.get_submodule(owner), leaf, buffer)
    return detector


# -- metadata --------------------------------------------------------------------------------------


def describe_model(
    cfg: CfgNode,
    exportable: ExportableDetector,
    categories: Categories,
    file_format: str,
    *,
    precision: str,
    input_dtype: str,
    weights: str | Path,
    opset: int | None = None,
) -> dict:
    """Return the metadata of an exported detector, for JSON.

    Args:
        cfg: The config of the detector.
        exportable: The exported detector.
        categories: The classes of the model.
        file_format: A key of ``FORMATS``.
        precision: The precision of the weights.
        input_dtype: The dtype of the input images.
        weights: The path of the checkpoint.
        opset: The opset of an ONNX file; ``None`` for ``OPSET``.

    Raises:
        ConfigError: If the detector or the format does not accept ``exportable.size``.
    """
    entry = FORMATS[file_format]
    shortest, longest = export_sides(exportable.detector)
    sides = [entry.shortest_side or shortest, longest]
    if exportable.size:
        check_sides(sides, exportable.size, what="size")
    short, longest = 0 if exportable.size else cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST
    backbone = getattr(getattr(exportable.detector.backbone, "bottom_up", None), "variant", cfg.MODEL.BACKBONE.NAME)
    head, number = cfg.MODEL[head_of(cfg)], cfg.TEST.DETECTIONS_PER_IMAGE
    thresholds = {"score": head.SCORE_THRESH_TEST, "nms": head.NMS_THRESH_TEST, "detections_per_image": number}
    return {
        "metadata_version": 1,
        "format": file_format,
        "opset": (opset or OPSET) if file_format == "onnx" else None,
        "precision": precision,
        "runtime_options": dict(entry.options),
        "detector": detector_name(cfg),
        "backbone": backbone,
        "input": {
            "name": exportable.input_names[0],
            "shape": [*(["batch"] if exportable.batched else []), 3, *(exportable.size or ("height", "width"))],
            "size": exportable.size and list(exportable.size),
            "batched": exportable.batched,
            "dtype": input_dtype,
            "range": [0, 255],
            "stride": exportable.detector.backbone.size_divisibility,
            "sides": sorted(exportable.size or sides),
            "batch": [1, LARGEST_BATCH] if exportable.batched else None,
            "color_order": cfg.INPUT.FORMAT,
        },
        "resizing": {
            "short_side": short or None,
            "longest_side": longest if short else None,
            "interpolation": "bilinear, antialiased (Pillow's BILINEAR)",
            "rule": _FIXED_RULE if exportable.size else _RULE,
        },
        "normalization": {
            "inside_the_model": True,
            "mean": list(cfg.MODEL.PIXEL_MEAN),
            "std": list(cfg.MODEL.PIXEL_STD),
        },
        # The mask head upsamples the pooled features by 2.
        "outputs": _describe_outputs(exportable, 2 * cfg.MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION),
        "fixed_detections": exportable.fixed_number,
        "classes": list(categories.names),
        "category_ids": list(categories.ids),
        "thresholds": thresholds | ({"mask": 0.5} if "masks" in exportable.output_names else {}),
        "weights": Path(weights).name,
        "versions": versions()
        | {"torchvision": torchvision.__version__}
        | {name: package_version(name, f"{name}-gpu") for name in entry.packages},
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


_RULE = (
    "the shorter side becomes short_side, and the longer side is multiplied by short_side / shorter side. If it then "
    "exceeds longest_side, both sides are multiplied by longest_side / longer side. Each side is int(side + 0.5). "
    "null: images are not resized."
)
_FIXED_RULE = (
    "both sides are multiplied by min(input.size[0] / height, input.size[1] / width), and each is int(side + 0.5). "
    "Then the image is padded to input.size at the bottom and on the right with the rounded mean. Clip boxes to the "
    "unpadded image."
)
_MASKS = "probability that a pixel of the box belongs to the object: resize to the box, then threshold"
_COUNT = "number of detections: the first rows of the other outputs. All other rows are zero."


def _describe_outputs(exportable: ExportableDetector, mask_side: int) -> list[dict]:
    images = ["batch"] if exportable.batched else []
    rows = ["detections"] if exportable.fixed_number is None else [*images, exportable.fixed_number]
    descriptions = {
        "boxes": ([*rows, 4], "float32", "left, top, right, bottom in pixels of the input image"),
        "scores": (rows, "float32", "probability, highest first"),
        "classes": (rows, "int64", "index into classes"),
        "masks": ([*rows, 1, mask_side, mask_side], "float32", _MASKS),
        "image_index": (rows, "int64", "index of the image in the batch"),
        "count": (images or [1], "int64", _COUNT),
    }
    keys = ("name", "shape", "dtype", "meaning")
    return [dict(zip(keys, (name, *descriptions[name]), strict=True)) for name in exportable.output_names]
