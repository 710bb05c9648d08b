"""Records of images in which every object is a rectangle of its own colour, so that pixels show the masks."""

from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from detectron2.structures import BoxMode
from pycocotools import mask as mask_util

RED, GREEN, BLUE, YELLOW, CYAN = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255)


@dataclass(frozen=True)
class Rectangle:
    """A rectangle with rows ``top`` to ``bottom`` and columns ``left`` to ``right``, the last ones excluded."""

    top: int
    bottom: int
    left: int
    right: int
    color: tuple[int, int, int] = RED
    category: int = 0
    rle: bool = False
    crowd: bool = False


def write_record(folder: Path, name: str, size: tuple[int, int], *objects: Rectangle) -> dict:
    """Write a black PNG of (height, width) with objects, later ones over earlier ones, and return its record."""
    height, width = size
    image = np.zeros((height, width, 3), np.uint8)
    for one in objects:
        image[one.top : one.bottom, one.left : one.right] = one.color
    path = folder / f"{name}.png"
    cv2.imwrite(str(path), image[..., ::-1])
    annotations = [_annotation(one, height, width) for one in objects]
    return {"file_name": str(path), "height": height, "width": width, "image_id": name, "annotations": annotations}


def _annotation(one: Rectangle, height: int, width: int) -> dict:
    left, top, right, bottom = map(float, (one.left, one.top, one.right, one.bottom))
    polygons = [[left, top, right, top, right, bottom, left, bottom]]
    return {
        "bbox": [left, top, right - left, bottom - top],
        "bbox_mode": BoxMode.XYWH_ABS,
        "category_id": one.category,
        "iscrowd": int(one.crowd),
        "segmentation": mask_util.frPyObjects(polygons, height, width)[0] if one.rle else polygons,
    }


def pixels_of(image: torch.Tensor, color: tuple[int, int, int]) -> torch.Tensor:
    """Return where a color is in an image (3, H, W), as (H, W) bool; blurred edges are halved, grey does not count."""
    return ((image.int() - torch.tensor(color)[:, None, None]).abs() < 128).all(dim=0)


def boxes_of(masks: torch.Tensor) -> list[list[int]]:
    """Return left, top, right and bottom of masks (N, H, W), none of which is empty."""
    boxes = []
    for mask in masks:
        rows, columns = mask.nonzero().T
        boxes.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    return [[int(number) for number in box] for box in boxes]
