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

from detectron2.config import CfgNode
from torch import Tensor, nn

from backbones import InputError
from backbones.utils.errors import check_choice
from projects_vil.checkpoint import load_detector
from projects_vil.export.exportable.build import make_exportable
from projects_vil.export.formats import write_model
from projects_vil.export.images import comparison_images
from projects_vil.export.int8 import CalibrationImages, write_int8
from projects_vil.export.metadata import check_sides, describe_model, digests_of, metadata_path
from projects_vil.export.proof.report import check_export, report_path
from projects_vil.export.request import PRECISIONS, ExportRequest
from projects_vil.export.runtime import ExportedModel
from projects_vil.export.stages import Stages
from projects_vil.utils import check_output_folder, unfinished_folder


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
    request = ExportRequest(
        file_format=file_format,
        precision=precision,
        input_dtype=input_dtype,
        batched=batched,
        fixed_detections=fixed_detections,
        size=size,
        evaluate=evaluate,
        calibration_images=calibration_images,
        accept_drop=accept_drop,
    )
    request.check(cfg)
    check_output_folder(output)
    path = Path(output) / request.file_name
    compared = comparison_images(cfg, images, fixed=size)
    reference, categories = load_detector(cfg, weights)
    network = in_precision(copy.deepcopy(reference), request.network_precision)
    exportable = make_exportable(network, batched=batched, fixed_number=request.fixed_number(cfg), size=size)
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
    calibration = None
    if request.is_int8:
        calibration = CalibrationImages(cfg, request.num_calibration_images, metadata["input"])
        calibration.check()
    stages = Stages()
    with unfinished_folder(path.parent) as unfinished:
        new = unfinished / path.name
        with _writing(path):
            if calibration is None:
                write_model(exportable, request.example(), new, file_format, stages=stages)
            else:
                metadata |= write_int8(exportable, request.example(), new, file_format, calibration, stages)
            metadata_path(new).write_text(json.dumps(metadata | digests_of(new, file_format), indent=2) + "\n")
        report = _check(cfg, request, reference, new, compared, runs=runs, stages=stages)
        with _writing(report_path(path)):
            report_path(new).write_text(json.dumps(report, indent=2) + "\n")
        for file in (*request.format.files(path), metadata_path(path), report_path(path)):
            with _writing(file):
                os.replace(unfinished / file.name, file)
    return path, report


def _check(
    cfg: CfgNode,
    request: ExportRequest,
    reference: nn.Module,
    path: Path,
    images: Sequence[Tensor],
    *,
    runs: int,
    stages: Stages,
) -> dict:
    """The report of the file, loaded in its own runtime."""
    with stages("loading"):
        model = ExportedModel(path)
    with stages("comparing", f"{len(images)} images, and DATASETS.TEST" if request.is_evaluated else ""):
        report = check_export(
            cfg,
            reference,
            model,
            images,
            runs=runs,
            evaluate=request.is_evaluated,
            accept_drop=request.accept_drop,
        )
    return report | {"seconds": stages.seconds, "accept_drop": request.accept_drop}


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
