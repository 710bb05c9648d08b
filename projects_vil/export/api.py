"""Export a trained detector, with the proof that the file gives the same answers.

What an exported detector takes and gives is said in
:class:`projects_vil.export.exportable.detector.ExportableDetector`, and, for someone without this repository, in the
metadata beside the file. Resizing is the caller's; normalisation, score threshold, non-maximum suppression and the
choice of the best are inside.
"""

import contextlib
import copy
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from detectron2.config import CfgNode
from torch import nn

from backbones import InputError
from backbones.errors import check_choice
from projects_vil.checkpoint import load_detector
from projects_vil.config import DETECTORS
from projects_vil.data import load_dataset, register_datasets
from projects_vil.export.calibration import CALIBRATION_IMAGES, calibrating, check_calibration
from projects_vil.export.exportable.build import make_exportable
from projects_vil.export.formats import FORMATS, check_format, write_model
from projects_vil.export.formats.quantizing import FLOAT_PARTS
from projects_vil.export.metadata import check_sides, describe_model, digests_of, metadata_path
from projects_vil.export.report import check_export, comparison_images, example_image, report_path
from projects_vil.export.request import (
    ALL_PRECISIONS,
    INPUT_DTYPES,
    PRECISIONS,
    check_precision,
    check_size,
    fixed_number,
)
from projects_vil.export.runtime import ExportedModel
from projects_vil.export.stages import Stages
from projects_vil.utils import unfinished_folder

# Of the image that a model is recorded with; comparisons take others.
EXAMPLE_SIZE = (160, 224)


def in_precision(detector: nn.Module, precision: str) -> nn.Module:
    """Cast what computes; boxes, anchors and the normalisation of images stay float32.

    Args:
        precision: a key of ``PRECISIONS``.
    """
    check_choice("precision", precision, PRECISIONS)
    kept = {name: buffer for name, buffer in detector.named_buffers() if name.startswith("pixel_") or "anchor" in name}
    detector.to(PRECISIONS[precision])
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        setattr(detector.get_submodule(owner), leaf, buffer)
    return detector


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
    calibration_images: int | None = None,
    accept_drop: bool = False,
    runs: int = 5,
) -> tuple[Path, dict]:
    """Export, load the file again in its own runtime, and compare it with detectron2's detector in float32.

    Args:
        cfg: the detector's config.
        weights: its checkpoint.
        output: folder for the model, its metadata and its report.
        file_format: of ``FORMATS``.
        precision: of ``ALL_PRECISIONS``. In int8 both are evaluated, and that decides.
        input_dtype: of ``INPUT_DTYPES``; TorchScript takes both.
        batched: whether the model takes (B, 3, H, W).
        fixed_detections: whether ``TEST.DETECTIONS_PER_IMAGE`` detections come out for each image, filled up, and how
            many there are; a format that must have it, has it.
        size: height and width of the images that it takes; None for any.
        images: files to compare on; four drawn images where there are none. The model was recorded with another.
        evaluate: whether to evaluate both on ``DATASETS.TEST`` too.
        calibration_images: of ``DATASETS.TRAIN`` that int8's ranges are measured on, at most; by default
            ``CALIBRATION_IMAGES``.
        accept_drop: whether int8 may lose more than ``AP_DROP``.
        runs: of the measurement of latency.

    Returns:
        The model's path and the report, see :func:`describe_report`.

    Raises:
        InputError: for a format, precision or detector that cannot be exported or run here, or weights that do not fit.
    """
    if cfg.MODEL.META_ARCHITECTURE not in DETECTORS:
        raise InputError(f"a {cfg.MODEL.META_ARCHITECTURE} cannot be exported yet: only {' and '.join(DETECTORS)} can")
    for what, value, known in (
        ("format", file_format, FORMATS),
        ("precision", precision, ALL_PRECISIONS),
        ("type of the input", input_dtype, INPUT_DTYPES),
    ):
        check_choice(what, value, known)
    check_format(file_format)
    check_precision(file_format, precision)
    is_int8 = precision == "int8"
    if is_int8:
        calibration_images = CALIBRATION_IMAGES if calibration_images is None else calibration_images
        check_calibration(cfg, calibration_images)
    elif calibration_images is not None or accept_drop:
        key = "--accept-drop" if calibration_images is None else "--calibration-images"
        raise InputError(f"{key} has no effect with --precision {precision}: leave it out, or take int8")
    evaluate = evaluate or is_int8
    if evaluate:
        register_datasets(cfg)
        load_dataset(cfg, cfg.DATASETS.TEST, train=False)
    check_size(size, file_format, evaluate=evaluate)
    special = [name for name, is_so in (("batched", batched), (precision, precision != "fp32")) if is_so]
    special += ["fixed"] if fixed_detections else []
    special += ["float32"] if input_dtype != "uint8" else []
    special += [f"{size[0]}x{size[1]}"] if size else []
    path = Path(output) / ("_".join(["model", *special]) + FORMATS[file_format].suffix)
    number = None
    if fixed_detections or FORMATS[file_format].needs_fixed_detections:
        number = fixed_number(cfg)
    compared = comparison_images(cfg, images, fixed=size)
    reference, categories = load_detector(cfg, weights)
    network = in_precision(copy.deepcopy(reference), "fp32" if is_int8 else precision)
    exportable = make_exportable(network, batched=batched, fixed_number=number, size=size)
    metadata = describe_model(
        cfg,
        exportable,
        classes=categories.names,
        category_ids=categories.ids,
        file_format=file_format,
        precision=precision,
        input_dtype=input_dtype,
        weights=weights,
    )
    for image, file in itertools.zip_longest(compared, images):
        check_sides(metadata["input"]["sides"], image.shape[-2:], what=str(file or "MIN_SIZE_TEST makes images that"))
    example = example_image(*(size or EXAMPLE_SIZE)).to(getattr(torch, input_dtype))
    stages = Stages()
    with unfinished_folder(path.parent) as unfinished:
        new = unfinished / path.name
        with _writing(path):
            written = unfinished / f"float{FORMATS[file_format].suffix}" if is_int8 else new
            example = torch.stack([example] * 2) if batched else example
            write_model(exportable, example, written, file_format, stages=stages)
            if is_int8:
                inputs = [image[None] if batched else image for image in calibrating(cfg, calibration_images)]
                inputs = [image.to(example.dtype) for image in inputs]
                FORMATS[file_format].quantize(written, new, inputs, stages)
                metadata["quantization"] = {"calibration_images": len(inputs), "float_parts": FLOAT_PARTS}
            metadata_path(new).write_text(json.dumps(metadata | digests_of(new, file_format), indent=2) + "\n")
        with stages("loading"):
            model = ExportedModel(new)
        with stages("comparing", f"{len(compared)} images, and DATASETS.TEST" if evaluate else ""):
            report = check_export(
                cfg, reference, model, compared, runs=runs, evaluate=evaluate, accept_drop=accept_drop
            )
        report["seconds"] = stages.seconds
        report["accept_drop"] = accept_drop
        with _writing(report_path(path)):
            report_path(new).write_text(json.dumps(report, indent=2) + "\n")
        for file in (*FORMATS[file_format].files(path), metadata_path(path), report_path(path)):
            with _writing(file):
                os.replace(unfinished / file.name, file)
    return path, report


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
