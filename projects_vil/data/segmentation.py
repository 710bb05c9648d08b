"""Check COCO segmentations without pycocotools, because some malformed segmentations crash pycocotools."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as mask_util

# Coordinates are invalid if their distance from the image is more than this multiple of its longer side.
FAR = 10


def has_mask(segmentation: Any) -> bool:
    """Return whether a segmentation has content. Some programs write ``[]`` or ``[[]]`` for boxes."""
    return any(segmentation) if isinstance(segmentation, list) else bool(segmentation)


def count_masks(annotations: Iterable[Any]) -> tuple[int, int, int]:
    """Return the number of objects with a mask, the number of all objects except crowds, and the number of crowds.

    A dataset has masks if at least half of its objects have one.
    """
    entries = (one for one in annotations if isinstance(one, dict))
    kinds = Counter("crowd" if one.get("iscrowd") in (1, "1") else has_mask(one.get("segmentation")) for one in entries)
    return kinds[True], kinds[True] + kinds[False], kinds["crowd"]


def rectangle(box: list[float]) -> list[list[float]]:
    """Return a box [left, top, width, height] as a polygon."""
    left, top, right, bottom = box[0], box[1], box[0] + box[2], box[1] + box[3]
    return [[left, top, right, top, right, bottom, left, bottom]]


def check_segmentation(segmentation: Any, height: int, width: int) -> tuple[list[str], Any]:
    """Check the segmentation of an object.

    Args:
        segmentation: Polygons, or RLE with or without compression. It must not be empty.
        height: The height of the image in pixels.
        width: The width of the image in pixels.

    Returns:
        The names of the ``CHECKS`` that found a problem, and the valid part: valid polygons or the RLE. The valid part
        is None if nothing is valid.
    """
    if isinstance(segmentation, dict):
        problem = _rle_problem(segmentation, height, width)
        return ([problem], None) if problem else ([], segmentation)
    if not isinstance(segmentation, list):
        return ["invalid_segmentation"], None
    is_polygon = len(segmentation) >= 6 and all(type(number) in (int, float) for number in segmentation)
    if is_polygon or (len(segmentation) == 1 and isinstance(segmentation[0], dict)):
        other = [segmentation] if is_polygon else segmentation[0]
        problems, valid = check_segmentation(other, height, width)
        return problems if valid is None else ["flat_segmentation", *problems], valid
    found = [_polygon_problem(polygon, height, width) for polygon in segmentation]
    if not any(found):
        return [], segmentation
    problems = [problem for problem in dict.fromkeys(found) if problem]
    valid = [polygon for polygon, problem in zip(segmentation, found, strict=True) if problem is None]
    if not valid:
        return ["empty_mask" if problem == "empty_polygon" else problem for problem in problems], None
    return problems, valid


def rle_of(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Return a valid segmentation as compressed RLE."""
    if isinstance(segmentation, list):
        return mask_util.merge(mask_util.frPyObjects(segmentation, height, width))
    is_compressed = not isinstance(segmentation["counts"], list)
    return segmentation if is_compressed else mask_util.frPyObjects(segmentation, height, width)


def in_image(one: dict[str, Any], size: tuple[int, int] | None) -> dict[str, Any] | None:
    """Return an object with its ``mask`` as RLE of an image (height, width), or None if no pixel is in the image."""
    crop, left, top = one.pop("mask")
    # Height and width are swapped, because RLE counts along columns.
    image = Image.new("L", size or (1, 1))
    image.paste(Image.fromarray(mask_util.decode(crop).T), (top, left))
    rle = mask_util.encode(np.asarray(image).T)
    one |= {"bbox": mask_util.toBbox(rle).tolist(), "area": float(mask_util.area(rle))}
    return one | {"segmentation": rle | {"counts": rle["counts"].decode()}} if one["area"] else None


def box_of(segmentation: Any, height: int, width: int) -> list[float] | None:
    """Return the box [left, top, width, height] of a valid segmentation, clipped to the image. None if it is empty."""
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
    """Return whether a polygon has three or more points, all finite and inside the image.

    Almost all polygons pass this fast check, and the other polygons need the slower checks.
    """
    try:
        total = sum(polygon)
        # The sum is finite only if all numbers are finite. `total - total` is 0 only for a finite sum.
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
    is_valid = len(counts) > 0 and min(counts) >= 0 and sum(counts) == height * width
    return None if is_valid else "invalid_rle"


def _run_lengths(counts: str) -> list[int]:
    """Decode compressed RLE counts. Return an empty list if the string is invalid.

    The code of each character, minus 48, has six bits. Five bits belong to a number, with the lowest bits first. The
    sixth bit is set if the number continues in the next character. Numbers are signed. From the third run on, a number
    is the difference from the run before the previous run.
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
    # Undo the differences of the runs 1, 3, 5, ... and of the runs 2, 4, 6, ... (run 0 has no difference).
    numbers[1::2] = np.cumsum(numbers[1::2])
    numbers[2::2] = np.cumsum(numbers[2::2])
    return numbers.tolist()
