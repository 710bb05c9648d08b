"""What is asked of an export, checked before anything is loaded, and said in the name of the file."""

from dataclasses import dataclass

import torch
from detectron2.config import CfgNode
from torch import Tensor

from backbones import InputError
from backbones.utils.errors import check_choice
from projects_vil.config import DETECTORS
from projects_vil.data import load_dataset, register_datasets
from projects_vil.export.formats import FORMATS, check_format
from projects_vil.export.formats.format import Format
from projects_vil.export.images import example_image
from projects_vil.export.int8 import CALIBRATION_IMAGES, check_calibration, check_int8

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Of what computes; int8 is made of a file in fp32.
ALL_PRECISIONS = (*PRECISIONS, "int8")
INPUT_DTYPES = ("uint8", "float32")
# Of the image that a model is recorded with; comparisons take others.
EXAMPLE_SIZE = (160, 224)


def check_precision(file_format: str, precision: str) -> None:
    """Raise an :class:`InputError` where a format does not have a precision."""
    known = FORMATS[file_format]
    if precision in known.refused:
        raise InputError(f"--precision {precision}: {known.refused[precision]}")
    if precision == "int8":
        check_int8(file_format)


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """The options of one export, as :func:`projects_vil.export.api.export_detector` has them."""

    file_format: str
    precision: str
    input_dtype: str
    batched: bool
    fixed_detections: bool
    size: tuple[int, int] | None
    evaluate: bool
    calibration_images: int | None
    accept_drop: bool

    def check(self, cfg: CfgNode) -> None:
        """Raise an :class:`InputError` for what cannot be had of such a detector, of these datasets or here."""
        architecture = cfg.MODEL.META_ARCHITECTURE
        if architecture not in DETECTORS:
            raise InputError(f"a {architecture} cannot be exported yet: only {' and '.join(DETECTORS)} can")
        check_choice("format", self.file_format, FORMATS)
        check_choice("precision", self.precision, ALL_PRECISIONS)
        check_choice("type of the input", self.input_dtype, INPUT_DTYPES)
        check_format(self.file_format)
        check_precision(self.file_format, self.precision)
        self._check_size()
        self._check_calibration(cfg)
        if self.is_evaluated:
            register_datasets(cfg)
            load_dataset(cfg, cfg.DATASETS.TEST, train=False)
        self.fixed_number(cfg)

    @property
    def format(self) -> Format:
        """That the file is to have."""
        return FORMATS[self.file_format]

    @property
    def is_int8(self) -> bool:
        """Whether the file is quantised."""
        return self.precision == "int8"

    @property
    def is_evaluated(self) -> bool:
        """Whether both are evaluated on ``DATASETS.TEST``, by which int8 is judged."""
        return self.evaluate or self.is_int8

    @property
    def network_precision(self) -> str:
        """What the network is cast to: a key of ``PRECISIONS``."""
        return "fp32" if self.is_int8 else self.precision

    @property
    def num_calibration_images(self) -> int:
        """How many images int8's ranges are measured on, at most."""
        return CALIBRATION_IMAGES if self.calibration_images is None else self.calibration_images

    @property
    def file_name(self) -> str:
        """Of the file: no two that take or give something else have the same."""
        special = ["batched"] if self.batched else []
        special += [self.precision] if self.precision != "fp32" else []
        special += ["fixed"] if self.fixed_detections else []
        special += [self.input_dtype] if self.input_dtype != "uint8" else []
        special += [f"{self.size[0]}x{self.size[1]}"] if self.size else []
        return "_".join(["model", *special]) + self.format.suffix

    def fixed_number(self, cfg: CfgNode) -> int | None:
        """How many detections come out for each image; None for as many as there are.

        Raises:
            InputError: where ``TEST.DETECTIONS_PER_IMAGE`` is no such number.
        """
        if not (self.fixed_detections or self.format.needs_fixed_detections):
            return None
        number = cfg.TEST.DETECTIONS_PER_IMAGE
        if number < 1:
            raise InputError(f"TEST.DETECTIONS_PER_IMAGE is {number}: a fixed number of detections is 1 or more")
        return number

    def example(self) -> Tensor:
        """What the detector is recorded with: (3, H, W), or two of them, (2, 3, H, W), if batched."""
        example = example_image(*(self.size or EXAMPLE_SIZE)).to(getattr(torch, self.input_dtype))
        return torch.stack([example] * 2) if self.batched else example

    def _check_calibration(self, cfg: CfgNode) -> None:
        if self.is_int8:
            check_calibration(cfg, self.num_calibration_images)
        elif self.calibration_images is not None or self.accept_drop:
            key = "--accept-drop" if self.calibration_images is None else "--calibration-images"
            raise InputError(f"{key} has no effect with --precision {self.precision}: leave it out, or take int8")

    def _check_size(self) -> None:
        if self.size is None:
            return
        if self.file_format == "torchscript":
            raise InputError("--size: a trace takes any size all the same; leave it out, or take another --format")
        shortest, longest = self.format.sides
        if min(self.size) < shortest or max(self.size) > longest:
            raise InputError(f"--size {self.size[0]} {self.size[1]}: sides are {shortest} to {longest} pixels")
        if self.is_evaluated:
            asked = "--precision int8, which AP judges" if self.is_int8 else "--evaluate"
            raise InputError(f"{asked}: images of DATASETS.TEST have sizes of their own; leave it out, or --size")
