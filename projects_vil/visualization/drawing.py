"""Draw boxes, masks and labels on an image, and arrange images in a grid."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from detectron2.data.catalog import Metadata
from detectron2.structures import BoxMode
from detectron2.utils.colormap import colormap
from detectron2.utils.visualizer import GenericMask, VisImage, Visualizer
from matplotlib.colors import to_rgb
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from backbones.checkpoint_files import atomic_write
from backbones.errors import GENERATOR, ConfigError, check_replaceable
from vil.choices import SCORE_THRESHOLD

# The default score threshold of all drawings. It is low because RetinaNet's scores are low early in training.
DRAW_THRESHOLD = SCORE_THRESHOLD
LABEL_POINTS = 9
LABEL_HEIGHT, CHARACTER_WIDTH = 17, 7.6  # approximate size in pixels of a label with LABEL_POINTS
MASK_ALPHA, LABEL_ALPHA = 0.3, 0.6  # opacity of the color of a class
PANEL_WIDTH, PANEL_HEIGHT = 480, 560  # pixels of one image in a grid
HEADER, GAP = 28, 8  # pixels of a title, and between images


class Canvas(Visualizer):
    """detectron2's visualizer without math text, because class names may contain ``$``."""

    def draw_text(self, *args: Any, **kwargs: Any) -> VisImage:
        output = super().draw_text(*args, **kwargs)
        output.ax.texts[-1].set_parse_math(False)
        return output


def draw_instances(
    image: np.ndarray, instances: Sequence[dict], metadata, *, scale: float = 1, label_size: float = 1
) -> np.ndarray:
    """Draw annotations or detections: (H, W, 3) uint8 RGB -> about (H * scale, W * scale, 3).

    In contrast to ``Visualizer.draw_dataset_dict``, holes in masks are kept, a class has the same color in every image,
    and labels are legible on small images.

    Args:
        image: (H, W, 3) uint8 RGB.
        instances: annotations of detectron2's dataset dicts, or COCO results. ``category_id`` is the class index, and
            ``segmentation`` may also be a mask (H, W). ``track_id`` is written on the label and sets the color.
        metadata: the metadata of the dataset: ``thing_classes``, and optionally ``thing_colors``.
        scale: scale of the image. The size of the labels does not depend on it.
        label_size: size of the labels, as a multiple of 9 points.
    """
    visualizer = Canvas(image, metadata, scale=scale)
    colors = np.array(metadata.get("thing_colors", colormap(rgb=True, maximum=255))) / 255
    for item in sorted(instances, key=lambda item: -np.prod(np.diff(_corners(item).reshape(2, 2), axis=0))):
        color = colors[item.get("track_id", item["category_id"]) % len(colors)]
        if item.get("segmentation") is not None and len(item["segmentation"]):
            mask = GenericMask(item["segmentation"], *image.shape[:2]).mask
            visualizer.draw_binary_mask(mask, color, alpha=MASK_ALPHA, area_threshold=0)
        visualizer.draw_box(_corners(item), edge_color=color, alpha=1)
    for item in instances:
        label = metadata.thing_classes[item["category_id"]] + (" (crowd)" if item.get("iscrowd") else "")
        label = f"{label} {item['score']:.0%}" if "score" in item else label
        label = f"#{item['track_id']} {label}" if "track_id" in item else label
        color = colors[item.get("track_id", item["category_id"]) % len(colors)]
        draw_label(visualizer, label, _corners(item), color, size=label_size)
    return visualizer.output.get_image()


def draw_label(
    visualizer: Visualizer, label: str, box: Sequence[float], color, *, size: float = 1, below: bool = False
) -> None:
    """Write a label above a box or below it, but inside the image.

    detectron2's labels shrink with the box and the image, and are not legible on small images.

    Args:
        visualizer: the visualizer of the image.
        label: the text.
        box: left, top, right and bottom in pixels of the image before scaling.
        color: a matplotlib color. The label has a lighter shade.
        size: size of the label, as a multiple of 9 points.
        below: whether the label is below the box.
    """
    output, unit = visualizer.output, size / visualizer.output.scale
    left = min(box[0], output.width - len(label) * CHARACTER_WIDTH * unit)
    top = min(box[3] if below else box[1] - LABEL_HEIGHT * unit, output.height - LABEL_HEIGHT * unit)
    light = (1 + np.array(to_rgb(color))) / 2
    position = max(left, 0), max(top, 0)
    visualizer.draw_text(label, position, font_size=LABEL_POINTS * unit, color=light, horizontal_alignment="left")


def draw_labels(image: np.ndarray, labels: np.ndarray, metadata, *, scale: float = 1) -> np.ndarray:
    """Draw semantic segmentation labels: (H, W, 3) uint8 RGB -> about (H * scale, W * scale, 3).

    Args:
        image: (H, W, 3) uint8 RGB.
        labels: (H, W) class indices. Indices without a class, such as ``IGNORED_LABEL``, are not drawn.
        metadata: the metadata of the dataset: ``stuff_classes``, and optionally ``stuff_colors``.
        scale: scale of the image.
    """
    colors = metadata.get("stuff_colors", colormap(rgb=True, maximum=255))
    classes = [name.partition(",")[0] for name in metadata.stuff_classes]
    colors = [colors[index % len(colors)] for index in range(len(classes))]
    visualizer = Canvas(image, Metadata(stuff_classes=classes, stuff_colors=colors), scale=scale)
    return visualizer.draw_sem_seg(labels, alpha=LABEL_ALPHA).get_image()


def sheet(title: str, rows: Sequence[Sequence[tuple[str, np.ndarray]]]) -> np.ndarray:
    """Arrange rows of (title, image) in a grid with a common title: (height, width, 3) uint8 RGB."""
    drawn = []
    for row in rows:
        panels = [_titled(text, panel) for text, panel in row]
        height = max(map(len, panels))
        drawn.append(np.hstack([_pad(panel, height + GAP, panel.shape[1] + GAP) for panel in panels]))
    width = max(row.shape[1] for row in drawn)
    header = _titled(title, np.empty((0, width, 3), np.uint8))
    return np.vstack([header, *(_pad(row, len(row), width) for row in drawn)])


def write_image(path: Path, image: np.ndarray) -> None:
    """Write (H, W, 3) uint8 RGB as a JPEG or PNG file, depending on the suffix. The folder is created.

    Raises:
        ConfigError: if the file cannot be written, or if it exists and was not written by this function.
    """
    check_replaceable(path, advice="Choose another output directory.")
    # The comment lets a later command replace the file.
    info = PngInfo()
    info.add_text("Description", GENERATOR)
    options: dict[str, Any] = {"format": "PNG", "pnginfo": info, "compress_level": 1}
    if path.suffix.lower() in (".jpg", ".jpeg"):
        options = {"format": "JPEG", "comment": GENERATOR, "quality": 95}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot write '{path}': {error.strerror}. Choose another folder.") from error
    with atomic_write(path, sync=False) as partial:
        Image.fromarray(image).save(partial, **options)


def _corners(item: dict) -> np.ndarray:
    """Return left, top, right and bottom in pixels. COCO results have no ``bbox_mode``."""
    return np.array(BoxMode.convert(list(item["bbox"]), item.get("bbox_mode", BoxMode.XYWH_ABS), BoxMode.XYXY_ABS))


def _titled(title: str, image: np.ndarray) -> np.ndarray:
    width = max(PANEL_WIDTH, image.shape[1])
    header = np.full((HEADER, width, 3), 255, np.uint8)
    cv2.putText(header, title, (4, HEADER - 9), cv2.FONT_HERSHEY_SIMPLEX, 0.45, (0, 0, 0), 1, cv2.LINE_AA)
    return np.vstack([header, _pad(image, len(image), width)])


def _pad(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.pad(image, ((0, height - image.shape[0]), (0, width - image.shape[1]), (0, 0)), constant_values=255)
