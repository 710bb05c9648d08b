"""int8: what it needs, the images that its ranges are measured on, and the file."""

from collections.abc import Sequence
from pathlib import Path

from detectron2.config import CfgNode
from torch import Tensor

from backbones import InputError
from projects_vil.data import load_dataset, register_datasets
from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.formats import FORMATS
from projects_vil.export.formats.format import check_packages
from projects_vil.export.formats.quantizing import FLOAT_PARTS
from projects_vil.export.report import comparison_images
from projects_vil.export.stages import Stages

CALIBRATION_IMAGES = 100


def check_int8(file_format: str) -> None:
    """Raise an :class:`InputError` where a format has no int8, or what makes it is not here."""
    known = FORMATS[file_format]
    if known.quantize is None:
        able = " or ".join(name for name, other in FORMATS.items() if other.quantize)
        raise InputError(f"--precision int8: {file_format} has none; take --format {able}")
    check_packages("--precision int8", known.quantizing_packages)


def check_calibration(cfg: CfgNode, number: int) -> None:
    """Raise an :class:`InputError` where :func:`calibrating_images` finds none."""
    if number < 1:
        raise InputError(f"--calibration-images {number}: it is 1 or more")
    register_datasets(cfg)
    load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)


def calibrating_images(cfg: CfgNode, number: int) -> list[Tensor]:
    """Images (3, H, W) uint8 from all over ``DATASETS.TRAIN``, prepared as for testing: ``number`` of them, or all."""
    records = load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)
    number = min(number, len(records))
    return comparison_images(cfg, [records[i * len(records) // number]["file_name"] for i in range(number)])


def write_int8(
    exportable: ExportableDetector,
    example: Tensor,
    path: Path,
    file_format: str,
    images: Sequence[Tensor],
    stages: Stages,
) -> dict:
    """Write a detector in float32 beside ``path``, and of that file one in int8; what is built of another, of that.

    Args:
        exportable, example, file_format, stages: see :func:`projects_vil.export.formats.write_model`.
        images: of :func:`calibrating_images`.

    Returns:
        What its metadata say of it.
    """
    known = FORMATS[file_format]
    source = known.source or known
    plain, quantized = path.with_name(f"float{source.suffix}"), path.with_name(f"int8{source.suffix}")
    source.write(exportable, example, plain, stages)
    inputs = [image[None] if exportable.batched else image for image in images]
    known.quantize(plain, quantized if known.build else path, [image.to(example.dtype) for image in inputs], stages)
    if known.build:
        known.build(exportable, quantized, path, stages)
    return {"quantization": {"calibration_images": len(images), "float_parts": FLOAT_PARTS}}
