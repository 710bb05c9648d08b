"""Boxes, masks and labels on an image."""

from pathlib import Path

import cv2
import numpy as np
from detectron2.structures import BoxMode
from detectron2.utils.colormap import colormap
from detectron2.utils.visualizer import Visualizer

from backbones.errors import InputError

LABEL_POINTS = 9
LABEL_HEIGHT, CHARACTER_WIDTH = 17, 7.6  # pixels of a label at LABEL_POINTS, roughly


def draw_instances(
    image: np.ndarray, instances: list[dict], metadata, *, scale: float = 1, label_size: float = 1
) -> np.ndarray:
    """An image (H, W, 3) uint8 RGB with its instances: (round(H * scale), round(W * scale), 3), perhaps a pixel less.

    Args:
        instances: annotations of a detectron2 record or COCO results, with class indices as ``category_id``.
        metadata: detectron2's, with ``thing_classes`` and perhaps ``thing_colors``.
        scale: of the drawing; labels stay as large as they are.
        label_size: of the labels, as a multiple of their usual size.
    """
    visualizer = Visualizer(image, metadata, scale=scale)
    boxes = np.array([_corners(item) for item in instances]).reshape(-1, 4)
    colors = [_class_color(item["category_id"], metadata) for item in instances]
    masks = [item.get("segmentation") or [] for item in instances]
    visualizer.overlay_instances(boxes=boxes, masks=masks, assigned_colors=colors, alpha=0.3)
    for item, box, color in zip(instances, boxes, colors, strict=True):
        _draw_label(visualizer, _label(item, metadata.thing_classes), box, color, label_size)
    return visualizer.output.get_image()


def _corners(item: dict) -> list[float]:
    """Box as left, top, right, bottom in pixels; COCO results carry no ``bbox_mode``."""
    return BoxMode.convert(item["bbox"], item.get("bbox_mode", BoxMode.XYWH_ABS), BoxMode.XYXY_ABS)


def _draw_label(visualizer: Visualizer, label: str, box: np.ndarray, color: np.ndarray, size: float) -> None:
    """Draw over the box's top left corner, inside the image, at one size whatever the image's scale.

    detectron2's own labels shrink with the box and with the image, too far to read on small images.
    """
    unit = size / visualizer.output.scale
    left = min(box[0], visualizer.output.width - len(label) * CHARACTER_WIDTH * unit)
    position = max(left, 0), max(box[1] - LABEL_HEIGHT * unit, 0)
    light = (1 + color) / 2
    visualizer.draw_text(label, position, font_size=LABEL_POINTS * unit, color=light, horizontal_alignment="left")


def _label(item: dict, class_names: list[str]) -> str:
    label = class_names[item["category_id"]]
    if item.get("iscrowd"):
        label += " (crowd)"
    return f"{label} {item['score']:.0%}" if "score" in item else label


def _class_color(class_index: int, metadata) -> np.ndarray:
    """RGB (3,) in [0, 1], the same in all panels: the dataset's ``thing_colors`` if it has them."""
    colors = np.array(metadata.get("thing_colors", colormap(rgb=True, maximum=255))) / 255
    return colors[class_index % len(colors)]


def write_image(path: Path, image: np.ndarray) -> None:
    """Write (H, W, 3) uint8 RGB as JPEG where the path's suffix is that, or else as PNG; its folder is created.

    Raises:
        InputError: where the file cannot be written.
    """
    kind = ".jpg" if path.suffix.lower() in (".jpg", ".jpeg") else ".png"
    encoded, buffer = cv2.imencode(kind, image[..., ::-1])
    if not encoded:
        raise RuntimeError(f"OpenCV could not encode {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(buffer.tobytes())
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror}); choose another --output") from error
