"""Export a trained detector, and check the exported file against the detector.

:class:`projects_vil.export.traceable.ExportableDetector` defines the inputs and outputs. The caller resizes images; the
exported model normalizes them and applies the score threshold and non-maximum suppression.
"""

import copy
import importlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from backbones import ConfigError
from backbones.errors import check_choice, check_output_folder, check_packages, check_replaceable, check_whole
from projects_vil.checkpoint import load_detector
from projects_vil.config import SCORE_THRESHOLDS, with_overrides
from projects_vil.data import load_dataset, register_datasets
from projects_vil.export.formats import FORMATS, check_format, log_step
from projects_vil.export.metadata import describe_model, metadata_path
from projects_vil.export.parity import check_export, example_image, parity_images
from projects_vil.export.quantization import FLOAT_LAYERS, calibration_files, quantize
from projects_vil.export.runtime import ExportedModel
from projects_vil.export.traceable import make_exportable
from projects_vil.files import atomic_folder, content_hash
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
    check_output_folder(output)
    on_cpu = with_overrides(cfg, {"MODEL.DEVICE": "cpu", "MODEL.TRANSFORMER.COMPILE": False})
    reference, categories = load_detector(on_cpu, weights)
    network = cast_network(copy.deepcopy(reference), precision)
    fixed_number = cfg.TEST.DETECTIONS_PER_IMAGE if fixed_detections else None
    exportable = make_exportable(network, batched=batched, fixed_number=fixed_number, size=size)
    described = {"file_format": file_format, "precision": precision, "input_dtype": input_dtype, "opset": opset}
    metadata = describe_model(cfg, exportable, categories, weights=weights, **described)
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
    with atomic_folder(path.parent) as unfinished:
        new = unfinished / path.name
        source = new.with_name(f"float{entry.suffix}") if is_int8 else new
        options = {"quantizes": is_int8} if "int8" in entry.precisions else {}
        options |= {"opset": opset} if opset else {}
        entry.write(exportable, example, source, **options)
        if is_int8:
            quantize(source, new, file_format, calibration, read)
            metadata["quantization"] = {"calibration_images": len(calibration), "float_layers": FLOAT_LAYERS}
        entry.embed(new, metadata)
        main, *others = entry.files(new)
        digests = {"sha256": content_hash(main), "other_files": {file.name: content_hash(file) for file in others}}
        metadata_path(new).write_text(json.dumps(metadata | digests, indent=2) + "\n")
        options = {"evaluate": evaluate, "accept_drop": accept_drop}
        with log_step("parity check"):
            report = check_export(cfg, reference, ExportedModel(new), compared, **options)
        low_threshold = with_overrides(cfg, dict.fromkeys(SCORE_THRESHOLDS, 0.0))
        has_detections = any(row["detections"] + row["detections_exported"] for row in report["images"])
        if not (has_detections or is_int8 or low_threshold == cfg):
            # Without detections, compare the candidates of a second file that has no score threshold.
            options = {"batched": batched, "fixed_detections": fixed_detections, "size": size, "images": images}
            with tempfile.TemporaryDirectory() as folder:
                _, low = export_detector(low_threshold, weights, folder, **described, **options)
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
