"""COCO's segmentations, checked without calling pycocotools, which some malformed ones crash."""

import math
from typing import Any

import numpy as np
from pycocotools import mask as mask_util

# Coordinates farther from the image than this many of its longer sides are not labels.
FAR = 10


def check_segmentation(segmentation: Any, height: int, width: int) -> tuple[list[str], Any]:
    """Return what is wrong with an object's segmentation, as names of ``CHECKS``, and what of it is usable.

    Args:
        segmentation: polygons, or RLE with or without compression; not empty.
        height, width: size of the image.

    Returns:
        The names, and the valid polygons or the RLE; None if nothing is usable.
    """
    if isinstance(segmentation, dict):
        problem = _rle_problem(segmentation, height, width)
        return ([problem], None) if problem else ([], segmentation)
    if not isinstance(segmentation, list):
        return ["invalid_segmentation"], None
    found = [_polygon_problem(polygon, height, width) for polygon in segmentation]
    if not any(found):
        return [], segmentation
    problems = [problem for problem in dict.fromkeys(found) if problem]
    usable = [polygon for polygon, problem in zip(segmentation, found, strict=True) if problem is None]
    if not usable:
        return ["empty_mask" if problem == "empty_polygon" else problem for problem in problems], None
    return problems, usable


def rle_of(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Return a usable segmentation as compressed RLE."""
    if isinstance(segmentation, list):
        return mask_util.merge(mask_util.frPyObjects(segmentation, height, width))
    is_compressed = not isinstance(segmentation["counts"], list)
    return segmentation if is_compressed else mask_util.frPyObjects(segmentation, height, width)


def box_of(segmentation: Any, height: int, width: int) -> list[float] | None:
    """Return [left, top, width, height] of a usable segmentation, clipped to the image; None if that is empty."""
    if isinstance(segmentation, list):
        columns = [number for polygon in segmentation for number in polygon[::2]]
        rows = [number for polygon in segmentation for number in polygon[1::2]]
        left, top = max(min(columns), 0), max(min(rows), 0)
        box = [left, top, min(max(columns), width) - left, min(max(rows), height) - top]
    else:
        box = mask_util.toBbox(rle_of(segmentation, height, width)).tolist()
    return [float(number) for number in box] if box[2] > 0 and box[3] > 0 else None


def _polygon_problem(polygon: Any, height: int, width: int) -> str | None:
    if _is_plain(polygon, height, width):
        return None
    if not isinstance(polygon, list) or not all(type(n) in (int, float) and abs(n) < math.inf for n in polygon):
        return "invalid_segmentation"
    if len(polygon) < 6 or len(polygon) % 2:
        return "empty_polygon"
    left, right, top, bottom = min(polygon[::2]), max(polygon[::2]), min(polygon[1::2]), max(polygon[1::2])
    far = FAR * max(height, width)
    if min(left, top) < -far or right > width + far or bottom > height + far:
        return "polygon_far_outside_image"
    return "empty_polygon" if right < 0 or bottom < 0 or left > width or top > height else None


def _is_plain(polygon: Any, height: int, width: int) -> bool:
    """Accept quickly what almost all polygons are: three or more points, finite and within the image."""
    try:
        total = sum(polygon)
        # The sum is finite only if all numbers are, and only then its difference from itself is 0.
        if len(polygon) < 6 or len(polygon) % 2 or total - total != 0 or min(polygon) < 0:
            return False
        return max(polygon) <= min(height, width) or (max(polygon[::2]) <= width and max(polygon[1::2]) <= height)
    except (TypeError, OverflowError):
        return False


def _rle_problem(rle: dict[str, Any], height: int, width: int) -> str | None:
    size, counts = rle.get("size"), rle.get("counts")
    if size != [height, width] or not all(type(side) is int for side in size):
        return "invalid_rle"
    if isinstance(counts, str):
        counts = _run_lengths(counts)
    elif not isinstance(counts, list) or not set(map(type, counts)) <= {int}:
        return "invalid_rle"
    is_whole = len(counts) > 0 and min(counts) >= 0 and sum(counts) == height * width
    return None if is_whole else "invalid_rle"


def _run_lengths(counts: str) -> list[int]:
    """Decode compressed RLE counts; empty for a string that is not one.

    Each character has six bits, from code 48 on: five of the number, the lowest first, and one that is set where more
    follow. The numbers are signed, and from the third run on the difference from the run before the last.
    """
    try:
        codes = np.frombuffer(counts.encode("ascii"), np.uint8).astype(np.int64) - 48
    except UnicodeEncodeError:
        return []
    if not len(codes) or codes.min() < 0 or codes.max() > 63 or codes[-1] & 32:
        return []
    starts = np.concatenate([[0], np.flatnonzero(codes & 32 == 0)[:-1] + 1])
    lengths = np.diff(starts, append=len(codes))
    if lengths.max() > 7:
        return []
    shifts = 5 * (np.arange(len(codes)) - np.repeat(starts, lengths))
    numbers = np.add.reduceat((codes & 31) << shifts, starts)
    numbers -= np.where(codes[starts + lengths - 1] & 16, np.int64(1) << (5 * lengths), 0)
    # Two chains of differences: the runs 1, 3, 5, ... and 2, 4, 6, ...; the first run is in neither.
    numbers[1::2] = np.cumsum(numbers[1::2])
    numbers[2::2] = np.cumsum(numbers[2::2])
    return numbers.tolist()
