"""Segmentations: what is wrong with polygons and RLE, without calling the C code that some of them crash."""

import math
from typing import Any

import numpy as np
from pycocotools import mask as mask_util

# Of the longer image side: what lies farther out is no label.
FAR = 10
_LARGEST_COUNT = 2**31


def segmentation_faults(segmentation: Any, height: int, width: int) -> tuple[list[str], int]:
    """Kinds of what is wrong with the mask of an object.

    Args:
        segmentation: polygons, or RLE with or without compression; not empty.
        height, width: of the image.

    Returns:
        Kinds, none twice, and how many polygons (or RLE) can be used.
    """
    if isinstance(segmentation, dict):
        fault = rle_fault(segmentation, height, width)
        return ([fault], 0) if fault else ([], 1)
    if not isinstance(segmentation, list):
        return ["mask_form"], 0
    faults, usable = [], 0
    for polygon in segmentation:
        if _is_plainly_sound(polygon, height, width):
            usable += 1
            continue
        fault = _polygon_fault(polygon, height, width)
        if fault is None:
            usable += 1
        elif fault not in faults:
            faults.append(fault)
    if not usable:
        faults = [{"polygon_points": "mask_points", "polygon_outside": "mask_outside"}.get(f, f) for f in faults]
    return faults, usable


def _is_plainly_sound(polygon: Any, height: int, width: int) -> bool:
    """Quickly, for almost all polygons: at least three points that are finite and within the image."""
    try:
        total = sum(polygon)
        # The sum of what is not finite is not finite, and then the difference is not 0.
        if len(polygon) < 6 or len(polygon) % 2 or total - total != 0 or min(polygon) < 0:
            return False
        return max(polygon) <= min(height, width) or (max(polygon[::2]) <= width and max(polygon[1::2]) <= height)
    except (TypeError, OverflowError):
        return False


def _polygon_fault(polygon: Any, height: int, width: int) -> str | None:
    if not isinstance(polygon, list) or not all(type(number) in (int, float) for number in polygon):
        return "mask_form"
    if len(polygon) < 6 or len(polygon) % 2:
        return "polygon_points"
    if not all(isinstance(number, int) or math.isfinite(number) for number in polygon):
        return "polygon_not_finite"
    columns, rows = polygon[::2], polygon[1::2]
    left, right, top, bottom = min(columns), max(columns), min(rows), max(rows)
    far = FAR * max(height, width)
    if min(left, top) < -far or right > width + far or bottom > height + far:
        return "polygon_far"
    if right < 0 or bottom < 0 or left > width or top > height:
        return "polygon_outside"
    return None


def rle_fault(rle: dict[str, Any], height: int, width: int) -> str | None:
    """The kind of what is wrong with RLE of an image, or None."""
    size, counts = rle.get("size"), rle.get("counts")
    if not isinstance(size, list) or [type(side) for side in size] != [int, int]:
        return "mask_form"
    if size != [height, width]:
        return "rle_size"
    if isinstance(counts, str):
        runs = _uncompressed(counts)
        return "rle_counts" if runs is None or runs.sum() != height * width else None
    if not isinstance(counts, list) or not set(map(type, counts)) <= {int}:
        return "rle_counts"
    if not counts or min(counts) < 0 or sum(counts) != height * width:
        return "rle_counts"
    return None


def _uncompressed(counts: str) -> np.ndarray | None:
    """The runs of compressed RLE, or None where they are none.

    Six bits a character, from 48 on: five of the number, the lowest first, and one that more follow; the number is
    signed, and from the third run on the difference from the run before the last.
    """
    try:
        codes = np.frombuffer(counts.encode("ascii"), np.uint8).astype(np.int64) - 48
    except UnicodeEncodeError:
        return None
    if not len(codes) or codes.min() < 0 or codes.max() > 63 or codes[-1] & 32:
        return None
    starts = np.concatenate([[0], np.flatnonzero(codes & 32 == 0)[:-1] + 1])
    ends = np.append(starts[1:], len(codes))
    if (ends - starts).max() > 7:
        return None
    places = np.arange(len(codes)) - np.repeat(starts, ends - starts)
    numbers = np.add.reduceat((codes & 31) << (5 * places), starts)
    numbers -= np.where(codes[ends - 1] & 16, np.int64(1) << (5 * (ends - starts)), 0)
    # Chains of every other run: those of index 1, 3, 5, ... and of 2, 4, 6, ...; the first stands alone.
    numbers[1::2] = np.cumsum(numbers[1::2])
    numbers[2::2] = np.cumsum(numbers[2::2])
    return None if numbers.min() < 0 or numbers.max() > _LARGEST_COUNT else numbers


def usable_segmentation(segmentation: Any, height: int, width: int) -> Any:
    """What of a segmentation can be used: its good polygons, or its RLE; None for nothing."""
    if not segmentation:
        return None
    faults, usable = segmentation_faults(segmentation, height, width)
    if not faults:
        return segmentation
    if not usable:
        return None
    return [polygon for polygon in segmentation if _polygon_fault(polygon, height, width) is None]


def as_rle(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Compressed RLE of a usable segmentation."""
    if isinstance(segmentation, list):
        return mask_util.merge(mask_util.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return mask_util.frPyObjects(segmentation, height, width)
    return segmentation


def box_of(segmentation: Any, height: int, width: int) -> list[float] | None:
    """Left, top, width and height of a usable segmentation, within the image; None where nothing is left there."""
    if isinstance(segmentation, list):
        columns = [number for polygon in segmentation for number in polygon[::2]]
        rows = [number for polygon in segmentation for number in polygon[1::2]]
        left, top = max(min(columns), 0), max(min(rows), 0)
        box = [left, top, min(max(columns), width) - left, min(max(rows), height) - top]
    else:
        box = mask_util.toBbox(as_rle(segmentation, height, width)).tolist()
    return [float(number) for number in box] if box[2] > 0 and box[3] > 0 else None
