"""COCO annotations of any number of images, drawn by lot, to time what reads them."""

import json
import os
from pathlib import Path

import cv2
import numpy as np

# As many as COCO has, about as many objects in an image, and the polygons' usual number of points.
NUM_CLASSES, NUM_OBJECTS = 80, 7
SIZE = (480, 640)
_NUM_POINTS = 24
# Links to one file are limited in number.
_NUM_PHOTOS = 16


def draw_boxes(generator: np.random.Generator, number: int) -> np.ndarray:
    """``(number, 4)``: left, top, width and height in pixels, within an image of ``SIZE``."""
    height, width = SIZE
    sizes = np.exp(generator.uniform(np.log(8), np.log(300), (number, 2)))
    return np.concatenate([generator.random((number, 2)) * (np.array([width, height]) - sizes), sizes], axis=1)


def draw_objects(generator: np.random.Generator, num_images: int) -> tuple[np.ndarray, np.ndarray]:
    """Boxes ``(images, NUM_OBJECTS, 4)``, and class indices ``(images, NUM_OBJECTS)``."""
    boxes = draw_boxes(generator, num_images * NUM_OBJECTS).reshape(num_images, NUM_OBJECTS, 4)
    return boxes, generator.integers(NUM_CLASSES, size=(num_images, NUM_OBJECTS))


def write_annotations(path: Path, boxes: np.ndarray, classes: np.ndarray, *, masks: bool = False) -> None:
    """A COCO file of :func:`draw_objects`; with ``masks`` each object has the ellipse in its box as a polygon."""
    height, width = SIZE
    angles = np.linspace(0, 2 * np.pi, _NUM_POINTS, endpoint=False)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1) / 2 + 0.5
    annotations = []
    for index, (own_boxes, own_classes) in enumerate(zip(boxes, classes, strict=True)):
        for box, label in zip(own_boxes, own_classes.tolist(), strict=True):
            item = {"id": len(annotations) + 1, "image_id": index + 1, "category_id": label + 1, "iscrowd": 0}
            item |= {"bbox": box.round(2).tolist(), "area": round(float(box[2] * box[3]), 2)}
            if masks:
                item["segmentation"] = [(box[:2] + circle * box[2:]).round(2).ravel().tolist()]
            annotations.append(item)
    content = {
        "images": [
            {"id": index + 1, "file_name": f"{index + 1:012d}.jpg", "height": height, "width": width}
            for index in range(len(boxes))
        ],
        "annotations": annotations,
        "categories": [{"id": index + 1, "name": str(index)} for index in range(NUM_CLASSES)],
    }
    path.write_text(json.dumps(content))


def write_images(folder: Path, generator: np.random.Generator, num_images: int) -> None:
    """Files for :func:`write_annotations`, links to a few noisy pictures."""
    folder.mkdir()
    photos = []
    for number in range(_NUM_PHOTOS):
        photos.append(folder.with_name(f"photo_{number}.jpg"))
        cv2.imwrite(str(photos[-1]), generator.integers(256, size=(*SIZE, 3), dtype=np.uint8))
    for index in range(num_images):
        os.link(photos[index % _NUM_PHOTOS], folder / f"{index + 1:012d}.jpg")
