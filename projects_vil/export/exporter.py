"""Export a trained detector, and check the file against detectron2's detector.

:class:`projects_vil.export.traceable.ExportableDetector` defines the inputs and outputs of an exported detector; for
someone without this repository, the metadata next to the file do. Resizing is the caller's; normalisation, score
threshold, non-maximum suppression and the choice of the best are inside.
"""

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from backbones import ConfigError
from backbones.errors import check_choice, check_replaceable
from projects_vil.checkpoint import load_detector
from projects_vil.config import with_overrides
from projects_vil.data import load_dataset, register_datasets
from projects_vil.export.formats import FORMATS, check_format
from projects_vil.export.images import comparison_images, example_image
from projects_vil.export.metadata import check_sides, describe_model, digests_of, metadata_path, with_digest
from projects_vil.export.parity import check_export
from projects_vil.export.quantization import calibration_files, quantize
from projects_vil.export.runtime import ExportedModel
from projects_vil.export.traceable import make_exportable
from projects_vil.utils import atomic_folder, check_output_folder, deferred_signals

# The types that the network is cast to; an int8 file is made from one in fp32.
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PRECISIONS = (*_DTYPES, "int8")
# The image that a model is traced with; it is compared on others.
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
    size: tuple[int, int] | None = None,
    images: Sequence[str | Path] = (),
    evaluate: bool = False,
    calibration_images: int = 100,
    accept_drop: bool = False,
    opset: int | None = None,
) -> tuple[Path, dict]:
    """Export, load the file again in its own runtime, and compare it with detectron2's detector in float32.

    Files are written whole or not at all: an export that fails leaves older ones as they were.

    Args:
        cfg: the detector's config.
        weights: its checkpoint.
        output: folder for the model, its metadata and its report.
        file_format: one of ``FORMATS``.
        precision: one of ``PRECISIONS``. int8 is evaluated on ``DATASETS.TEST``, which decides.
        input_dtype: uint8 or float32; TorchScript takes both.
        batched: whether the model takes (B, 3, H, W).
        fixed_detections: whether to return ``TEST.DETECTIONS_PER_IMAGE`` rows for each image, padded with zeros, and
            how many of them are detections.
        size: height and width of all images; None for any.
        images: image files to compare on; by default four synthetic images, other than the one used for tracing.
        evaluate: whether to evaluate both on ``DATASETS.TEST`` too.
        calibration_images: how many of ``DATASETS.TRAIN`` int8 is calibrated on, at most.
        accept_drop: whether int8 may lose more than ``AP_DROP``.
        opset: that of an ONNX file, 18 or more; None for 20.

    Returns:
        The model's path and the report of :func:`check_export`, which is next to it.

    Raises:
        ConfigError: for a format, precision or detector that cannot be exported or run here, or weights that do not
            fit.
    """
    is_int8 = precision == "int8"
    for name, is_given in (("calibration_images", calibration_images != 100), ("accept_drop", accept_drop)):
        if is_given and not is_int8:
            raise ConfigError(f"{name} is for precision int8 only: leave it out, or export int8")
    evaluate = evaluate or is_int8
    check_format(file_format)
    if precision not in FORMATS[file_format].precisions:
        raise ConfigError(f"precision {precision}: {file_format} supports {', '.join(FORMATS[file_format].precisions)}")
    if opset is not None:
        _check_opset(opset, file_format)
    check_choice("input_dtype", input_dtype, ("uint8", "float32"))
    if size is not None and file_format == "torchscript":
        raise ConfigError("size: a TorchScript file takes any size; leave it out, or take another format")
    if size is not None and evaluate:
        raise ConfigError("size: int8 and evaluate need images of DATASETS.TEST, which have other sizes: leave it out")
    if evaluate:
        register_datasets(cfg)
        load_dataset(cfg, cfg.DATASETS.TEST, train=False)
    calibration = calibration_files(cfg, calibration_images) if is_int8 else []
    fixed_number = cfg.TEST.DETECTIONS_PER_IMAGE if fixed_detections else None
    if fixed_number is not None and fixed_number < 1:
        raise ConfigError(f"TEST.DETECTIONS_PER_IMAGE is {fixed_number}: fixed_detections needs 1 or more")
    check_output_folder(output)
    compared = comparison_images(cfg, images, fixed=size)
    reference, categories = load_detector(with_overrides(cfg, {"MODEL.TRANSFORMER.COMPILE": False}), weights)
    network = cast_network(copy.deepcopy(reference), "fp32" if is_int8 else precision)
    exportable = make_exportable(network, batched=batched, fixed_number=fixed_number, size=size)
    facts = {"precision": precision, "input_dtype": input_dtype, "weights": weights, "opset": opset}
    metadata = describe_model(cfg, exportable, categories, file_format, **facts)
    for image, file in zip(compared, images or ["INPUT.MIN_SIZE_TEST"] * len(compared), strict=True):
        check_sides(metadata["input"]["sides"], image.shape[-2:], what=str(file))

    def read(file: str) -> Tensor:
        """Return an image of the calibration as the exported model takes it."""
        (image,) = comparison_images(cfg, [file])
        check_sides(metadata["input"]["sides"], image.shape[-2:], what=file)
        image = image.to(getattr(torch, input_dtype))
        return image[None] if batched else image

    for file in calibration:  # so that a mistake is found before the export, which takes minutes
        read(file)
    example = example_image(*(size or EXAMPLE_SIZE)).to(getattr(torch, input_dtype))
    if batched:
        example = torch.stack([example] * 2)

    # Files with different inputs or outputs have different names.
    parts = ["model", batched and "batched", precision != "fp32" and precision, fixed_detections and "fixed"]
    parts += [input_dtype != "uint8" and input_dtype, size and f"{size[0]}x{size[1]}", opset and f"opset{opset}"]
    entry = FORMATS[file_format]
    path = Path(output) / ("_".join(filter(None, parts)) + entry.suffix)
    if not metadata_path(path).exists():
        check_replaceable(path, advice="Choose another output directory.")
    with atomic_folder(path.parent) as unfinished:
        new = unfinished / path.name
        source = new.with_name(f"float{entry.suffix}") if is_int8 else new
        try:
            options = {"opset": opset} if opset else {}
            if file_format == "openvino":
                options["quantizes"] = is_int8
            entry.write(exportable, example, source, **options)
            if is_int8:
                metadata["quantization"] = quantize(source, new, file_format, calibration, read)
            metadata = with_digest(metadata)
            entry.embed(new, metadata)
            metadata_path(new).write_text(json.dumps(metadata | digests_of(new, file_format), indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
        model = ExportedModel(new)
        report = check_export(cfg, reference, model, compared, evaluate=evaluate, accept_drop=accept_drop)
        report_path(new).write_text(json.dumps(report, indent=2) + "\n")
        with deferred_signals():
            for file in (*entry.files(path), metadata_path(path), report_path(path)):
                os.replace(unfinished / file.name, file)
    return path, report


def _check_opset(opset: int, file_format: str) -> None:
    if file_format != "onnx":
        raise ConfigError(f"opset: {file_format} has none; leave it out, or export to onnx")
    import onnx

    # For any other torch writes opset 18, with no more than a warning.
    newest = onnx.defs.onnx_opset_version()
    if not 18 <= opset <= newest:
        raise ConfigError(f"opset {opset}: choose one of 18 to {newest}")


def cast_network(detector: nn.Module, precision: str) -> nn.Module:
    """Cast the network; anchors and the mean and standard deviation of pixels stay float32.

    Args:
        precision: fp32, fp16 or bf16.
    """
    kept = {name: buffer for name, buffer in detector.named_buffers() if name.startswith("pixel_") or "anchor" in name}
    detector.to(_DTYPES[precision])
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        setattr(detector.get_submodule(owner), leaf, buffer)
    return detector


def report_path(path: str | Path) -> Path:
    """Return the path of the report of an exported file."""
    return Path(f"{path}.report.json")
