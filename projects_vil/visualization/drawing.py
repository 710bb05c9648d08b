"""Boxes, masks and labels on an image."""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from detectron2.structures import BoxMode
from detectron2.utils.colormap import colormap
from detectron2.utils.visualizer import Visualizer

from backbones.utils.errors import InputError
from projects_vil.data import IGNORED_LABEL

LABEL_POINTS = 9
LABEL_HEIGHT, CHARACTER_WIDTH = 17, 7.6  # pixels of a label at LABEL_POINTS, roughly
LABEL_OPACITY = 0.6  # of a class's colour over the image
MIN_NAMED = 0.01  # of the image that a class covers, to be named
MASK_OPACITY = 0.35  # of a class's colour inside of an object


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


def draw_labels(image: np.ndarray, labels: np.ndarray, metadata, *, scale: float = 1) -> np.ndarray:
    """An image (H, W, 3) uint8 RGB with its labels (H, W) in colour, and the names of the classes; as large as by
    :func:`draw_instances`.

    Args:
        labels: class indices, or ``IGNORED_LABEL``.
        metadata: detectron2's, with ``stuff_classes`` and perhaps ``stuff_colors``.
        scale: of the drawing; names stay as large as they are.
    """
    present = [int(label) for label in np.unique(labels) if label != IGNORED_LABEL]
    for label in present:
        image = tint(image, labels == label, _label_color(label, metadata), opacity=LABEL_OPACITY)
    visualizer = Visualizer(image, metadata, scale=scale)
    for label in present:
        mask = labels == label
        if mask.mean() >= MIN_NAMED:
            _draw_name(visualizer, metadata.stuff_classes[label].partition(",")[0], mask, _label_color(label, metadata))
    return visualizer.output.get_image()


def draw_masks(image: np.ndarray, masks: np.ndarray, classes: Sequence[int], metadata) -> np.ndarray:
    """An image (H, W, 3) uint8 RGB with masks (N, H, W) bool in their classes' colours, each with its edge.

    detectron2 draws masks as polygons, and so fills the holes that other objects leave in them.
    """
    for mask, class_index in zip(masks, classes, strict=True):
        color = _class_color(class_index, metadata)
        inside = cv2.erode(mask.astype(np.uint8), np.ones((3, 3), np.uint8)).astype(bool)
        image = tint(tint(image, inside, color, opacity=MASK_OPACITY), mask & ~inside, color, opacity=1)
    return image


def tint(image: np.ndarray, mask: np.ndarray, color: np.ndarray, *, opacity: float) -> np.ndarray:
    """A copy of an image (H, W, 3) uint8 with a colour, RGB in [0, 1], over the pixels of a mask (H, W) bool."""
    tinted = image.copy()
    tinted[mask] = (image[mask] + opacity * (255 * color - image[mask])).round()
    return tinted


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


def _draw_name(visualizer: Visualizer, name: str, mask: np.ndarray, color: np.ndarray) -> None:
    """Write where the mask (H, W) is widest, inside the image."""
    height, width = mask.shape
    scale = visualizer.output.scale
    row, column = _inside(mask.astype(np.uint8))
    margin = min(len(name) * CHARACTER_WIDTH / 2 / scale, width / 2)
    position = min(max(column, margin), width - margin), max(min(row, height - LABEL_HEIGHT / scale), 0)
    visualizer.draw_text(name, position, font_size=LABEL_POINTS / scale, color=(1 + color) / 2)


def _label_color(label: int, metadata) -> np.ndarray:
    """RGB (3,) in [0, 1]: the dataset's ``stuff_colors`` if it has them."""
    colors = np.array(metadata.get("stuff_colors", colormap(rgb=True, maximum=255))) / 255
    return colors[label % len(colors)]


def _inside(mask: np.ndarray) -> tuple[int, int]:
    """Row and column of the pixel of a mask (H, W) uint8 that is farthest from its outside."""
    distance = cv2.distanceTransform(np.pad(mask, 1), cv2.DIST_L2, 3)[1:-1, 1:-1]
    return np.unravel_index(distance.argmax(), mask.shape)
