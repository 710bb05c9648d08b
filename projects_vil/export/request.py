"""What can be asked of an export, and what is checked before anything is loaded."""

import torch
from detectron2.config import CfgNode

from backbones import InputError
from projects_vil.export.formats import FORMATS
from projects_vil.export.formats.format import check_packages

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Of what computes; int8 is made of a file in fp32.
ALL_PRECISIONS = (*PRECISIONS, "int8")
INPUT_DTYPES = ("uint8", "float32")


def check_precision(file_format: str, precision: str) -> None:
    """Raise an :class:`InputError` where a format does not have a precision."""
    known = FORMATS[file_format]
    if precision in known.refused:
        raise InputError(f"--precision {precision}: {known.refused[precision]}")
    if precision == "int8" and known.quantize is None:
        able = " or ".join(name for name, other in FORMATS.items() if other.quantize)
        raise InputError(f"--precision int8: {file_format} has none; take --format {able}")
    if precision == "int8":
        check_packages("--precision int8", known.quantizing_packages)


def fixed_number(cfg: CfgNode) -> int:
    number = cfg.TEST.DETECTIONS_PER_IMAGE
    if number < 1:
        raise InputError(f"TEST.DETECTIONS_PER_IMAGE is {number}: a fixed number of detections is 1 or more")
    return number


def check_size(size: tuple[int, int] | None, file_format: str, *, evaluate: bool) -> None:
    if size is None:
        return
    if file_format == "torchscript":
        raise InputError("--size: a trace takes any size all the same; leave it out, or take another --format")
    shortest, longest = FORMATS[file_format].sides
    if min(size) < shortest or max(size) > longest:
        raise InputError(f"--size {size[0]} {size[1]}: sides are {shortest} to {longest} pixels")
    if evaluate:
        raise InputError(
            "--evaluate, and --precision int8, which is judged by it: images of DATASETS.TEST have sizes of their own; "
            "leave it out, or --size"
        )
