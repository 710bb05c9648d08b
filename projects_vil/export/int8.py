"""int8: what it needs, the images that its ranges are measured on, and the file."""

from collections.abc import Sequence
from pathlib import Path

import torch
from detectron2.config import CfgNode
from torch import Tensor

from backbones import InputError
from projects_vil.data import load_dataset, register_datasets
from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.formats import FORMATS
from projects_vil.export.formats.format import check_packages
from projects_vil.export.formats.quantizing import FLOAT_PARTS
from projects_vil.export.images import comparison_images
from projects_vil.export.metadata import check_sides
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
    """Raise an :class:`InputError` where :class:`CalibrationImages` finds none."""
    if number < 1:
        raise InputError(f"--calibration-images {number}: it is 1 or more")
    register_datasets(cfg)
    load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)


class CalibrationImages(Sequence[Tensor]):
    """Images from all over ``DATASETS.TRAIN``, prepared as for testing, each when it is asked for: one is in memory.

    Args:
        cfg: the detector's config.
        number: of images, or all that there are.
        taken: ``input`` of the metadata of what is exported, whose type and number of axes an image gets.

    An item is (3, H, W), or (1, 3, H, W) if batched.

    Raises:
        InputError: where one is asked for that cannot be read, or whose sides are not for the model.
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
        """Ask for each once: what is wrong with one is found before the detector is recorded, which takes minutes."""
        for _ in self:
            pass


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
        images: which ranges are measured on, as the model takes them.

    Returns:
        What its metadata say of it.
    """
    known = FORMATS[file_format]
    source = known.source or known
    plain, quantized = path.with_name(f"float{source.suffix}"), path.with_name(f"int8{source.suffix}")
    source.write(exportable, example, plain, stages)
    known.quantize(plain, quantized if known.build else path, images, stages)
    if known.build:
        known.build(exportable, quantized, path, stages)
    return {"quantization": {"calibration_images": len(images), "float_parts": FLOAT_PARTS}}
