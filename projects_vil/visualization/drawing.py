"""Draw boxes, masks and labels on an image, and arrange images in a grid."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import cycle, groupby, product
from pathlib import Path
from typing import Any

import cv2
import matplotlib
import numpy as np
from detectron2.structures import BoxMode
from detectron2.utils.colormap import colormap
from detectron2.utils.logger import log_first_n
from detectron2.utils.visualizer import GenericMask
from matplotlib.font_manager import findSystemFonts
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from backbones.errors import GENERATOR, check_replaceable, printable
from backbones.files import atomic_write

LABEL_HEIGHT, FONT_SIZE, MARGIN = 17, 12.5, 2  # pixels
MASK_ALPHA, LABEL_ALPHA = 0.3, 0.6  # opacity of the color of a class
FINDING_COLOR = (255, 0, 0)  # of annotations with findings of the dataset check
# Lighter and darker shades of a color for objects of one class: a gray value, and its share.
SHADES = ((0, 0), (255, 0.55), (0, 0.4))
PANEL_WIDTH, PANEL_HEIGHT = 480, 560  # pixels of one image in a grid
HEADER, GAP = 28, 8  # pixels of a title, and between images
# Matplotlib's font has Latin, Greek, Cyrillic, Hebrew and Arabic letters. Installed fonts are used for other letters.
FONT_FILE = f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf"


class Canvas:
    """An image with masks, boxes and labels. It is faster than detectron2's ``Visualizer``, which uses Matplotlib.

    Coordinates are in pixels of the image before scaling, and colors are RGB from 0 to 255.

    Args:
        image: (H, W, 3) uint8 RGB.
        scale: Scale of the image. The size of the labels does not depend on it.
        label_size: Size of the labels, as a multiple of 17 pixels.

    Attributes:
        image: The drawing, about (H * scale, W * scale, 3).
    """

    def __init__(self, image: np.ndarray, *, scale: float = 1, label_size: float = 1) -> None:
        size = [max(1, round(side * scale)) for side in image.shape[1::-1]]
        self.image = cv2.resize(image, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
        self.scale, self.line = scale, max(2, round(max(size) / 350))
        self.label_size, self.label_height = label_size, round(LABEL_HEIGHT * label_size)
        self.has_label = np.zeros(self.image.shape[:2], bool)

    def draw_mask(self, mask: np.ndarray, color: Sequence[int], *, alpha: float = MASK_ALPHA) -> None:
        """Draw a mask (H, W) with its outline and its holes."""
        mask = cv2.resize(mask.astype(np.uint8), self.image.shape[1::-1], interpolation=cv2.INTER_NEAREST)
        left, top, width, height = cv2.boundingRect(mask)
        part = self.image[top : top + height, left : left + width]
        inside = mask[top : top + height, left : left + width] > 0
        part[inside] = part[inside] * (1 - alpha) + np.array(color) * alpha
        outlines, _ = cv2.findContours(mask, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
        cv2.drawContours(self.image, outlines, -1, color, max(1, self.line // 2), cv2.LINE_AA)

    def draw_box(self, box: Sequence[float], color: Sequence[int], *, dashed: bool = False) -> None:
        """Draw a box of left, top, right and bottom."""
        left, top, right, bottom = self._pixels(box)
        drawn = self.image.copy() if dashed else self.image
        cv2.rectangle(drawn, (left, top), (right, bottom), color, self.line)
        if dashed:
            stripes = np.indices(drawn.shape[:2]).sum(axis=0) // (4 * self.line) % 2 == 0
            self.image[stripes] = drawn[stripes]

    def draw_label(self, text: str, box: Sequence[float], color: Sequence[int], *, below: bool = False) -> None:
        """Write a label above a box or below it, in a lighter color.

        The label is inside the image, and does not cover earlier labels if there is a free place around the box.
        """
        (rows, cols), height = self.image.shape[:2], self.label_height
        text = shorten(printable(text), self.label_size, cols - 2 * MARGIN)
        width = round(text_width(text, self.label_size)) + 2 * MARGIN
        left, top, right, bottom = self._pixels(box)
        tops = (top - height, top, bottom - height, bottom)
        corners = list(product((left, right - width), tops[::-1] if below else tops))
        corners = np.clip(corners, 0, np.maximum((cols - width, rows - height), 0))
        areas = [np.s_[y : y + height, x : x + width] for x, y in corners]
        area = next((area for area in areas if not self.has_label[area].any()), areas[0])
        part, self.has_label[area] = self.image[area], True
        background = Image.fromarray((part * 0.2).astype(np.uint8))
        light = tuple((value + 255) // 2 for value in color)
        draw_text(background, text, MARGIN, self.label_size, fill=light)
        part[:] = background

    def _pixels(self, box: Sequence[float]) -> list[int]:
        # A box may be far outside the image.
        return np.nan_to_num(np.asarray(box) * self.scale).clip(-(2**20), 2**20).round().astype(int).tolist()


@cache
def _letters(font_file: str) -> np.ndarray:
    """Return the code points of the letters of a font (N,)."""
    # A file may be damaged, or have only bitmaps. The Last Resort font of macOS has a symbol for each script.
    with suppress(OSError, RuntimeError):
        return np.array([*FT2Font(font_file).get_charmap()] if "LastResort" not in font_file else [], np.int32)
    return np.empty(0, np.int32)


@cache
def _installed_fonts() -> list[str]:
    """Return the font files of the system, sans-serif fonts of regular weight first."""
    return sorted(findSystemFonts(), key=lambda path: ("Regular" not in path, "Sans" not in path, path))


@cache
def _font_with(letter: str) -> str | None:
    """Return the font file for a letter, or None if no font has it."""
    if ord(letter) in _letters(FONT_FILE):
        return FONT_FILE
    return next((path for path in _installed_fonts() if ord(letter) in _letters(path)), None)


_load_font = cache(ImageFont.truetype)


@lru_cache(1024)
def _runs(text: str, size: float) -> list[tuple[str, ImageFont.FreeTypeFont]]:
    """Split a text into parts with the same font. A warning is logged once if no font has a letter."""
    if missing := "".join(letter for letter in dict.fromkeys(text) if _font_with(letter) is None):
        advice = "Install fonts with these letters, such as Noto Sans CJK for Chinese, Japanese and Korean."
        warning = f"No installed font has some letters, such as {missing!r} of {text!r}. Squares replace them. {advice}"
        log_first_n(logging.WARNING, warning, name=__name__)
    runs = groupby(text, key=lambda letter: _font_with(letter) or FONT_FILE)
    return [("".join(letters), _load_font(path, FONT_SIZE * size)) for path, letters in runs]


def text_width(text: str, size: float = 1) -> float:
    """Return the width in pixels of a text with labels of this size."""
    return sum(font.getlength(run) for run, font in _runs(text, size))


def draw_text(image: Image.Image, text: str, left: float, size: float = 1, *, fill: str | tuple[int, ...]) -> None:
    """Write a text in the vertical center of an image. Each letter has a font that supports it, if there is one."""
    ascent, descent = _load_font(FONT_FILE, FONT_SIZE * size).getmetrics()
    for run, font in _runs(text, size):
        # All fonts have the same baseline.
        baseline = (image.height + ascent - descent) / 2
        ImageDraw.Draw(image).text((left, baseline), run, fill=fill, font=font, anchor="ls")
        left += font.getlength(run)


def shorten(text: str, size: float, width: float) -> str:
    """Replace the middle of a text by an ellipsis if the text is wider than ``width`` pixels."""
    half = len(text) // 2
    while half > 1 and text_width(text, size) > width:
        half -= 1
        text = f"{text[:half]}…{text[-half:]}"
    return text


def draw_instances(
    image: np.ndarray, instances: Sequence[dict], metadata, *, scale: float = 1, label_size: float = 1
) -> np.ndarray:
    """Draw annotations or detections: (H, W, 3) uint8 RGB -> about (H * scale, W * scale, 3).

    In contrast to ``Visualizer.draw_dataset_dict``, holes in masks are kept, and labels are legible on small images. A
    class has the same color in every image. Its objects have shades of this color, so that overlapping boxes differ.

    Args:
        image: (H, W, 3) uint8 RGB.
        instances: Annotations of detectron2's dataset dicts, or COCO results. ``category_id`` is the class index, and
            ``segmentation`` may also be a mask (H, W). ``track_id`` is written on the label and sets the color. An
            object with ``finding`` is red and dashed, and this text is its label.
        metadata: The metadata of the dataset: ``thing_classes``, and optionally ``thing_colors``.
        scale, label_size: See :class:`Canvas`.
    """
    canvas = Canvas(image, scale=scale, label_size=label_size)
    palette, drawn, shades = _colors(metadata, "thing_colors"), [], defaultdict(lambda: cycle(SHADES))
    for item in instances:
        # COCO results have no bbox_mode.
        box = BoxMode.convert(list(item["bbox"]), item.get("bbox_mode", BoxMode.XYWH_ABS), BoxMode.XYXY_ABS)
        index = item.get("track_id", item["category_id"])
        gray, share = next(shades[index])
        color = [round(value + (gray - value) * share) for value in palette[index % len(palette)]]
        drawn.append((item, box, FINDING_COLOR if item.get("finding") else color))
    # Large boxes first, so that they do not cover small ones
    for item, box, color in sorted(drawn, key=lambda one: -(one[1][2] - one[1][0]) * (one[1][3] - one[1][1])):
        if item.get("segmentation") is not None and len(item["segmentation"]):
            canvas.draw_mask(GenericMask(item["segmentation"], *image.shape[:2]).mask, color)
        canvas.draw_box(box, color, dashed=bool(item.get("finding")))
    for item, box, color in drawn:
        label = item.get("finding") or metadata.thing_classes[item["category_id"]]
        label += " (crowd)" if item.get("iscrowd") else ""
        label = f"{label} {item['score']:.0%}" if "score" in item else label
        label = f"#{item['track_id']} {label}" if "track_id" in item else label
        canvas.draw_label(label, box, color)
    return canvas.image


def draw_labels(image: np.ndarray, labels: np.ndarray, metadata, *, scale: float = 1) -> np.ndarray:
    """Draw semantic segmentation labels: (H, W, 3) uint8 RGB -> about (H * scale, W * scale, 3).

    Args:
        image: (H, W, 3) uint8 RGB.
        labels: (H, W) class indices. Indices without a class, such as ``IGNORED_LABEL``, are not drawn.
        metadata: The metadata of the dataset: ``stuff_classes``, and optionally ``stuff_colors``.
        scale: Scale of the image.
    """
    canvas, colors, names = Canvas(image, scale=scale), _colors(metadata, "stuff_colors"), metadata.stuff_classes
    present = [index for index in np.unique(labels).tolist() if index < len(names)]
    for index in present:
        canvas.draw_mask(labels == index, colors[index % len(colors)], alpha=LABEL_ALPHA)
    for index in present:
        # The label is on the largest part of the class.
        _, parts, sizes, _ = cv2.connectedComponentsWithStats((labels == index).astype(np.uint8))
        y, x = np.median(np.nonzero(parts == 1 + sizes[1:, cv2.CC_STAT_AREA].argmax()), axis=1)
        canvas.draw_label(names[index].partition(",")[0], (x, y, x, y), colors[index % len(colors)])
    return canvas.image


def sheet(title: str, rows: Sequence[Sequence[tuple[str, np.ndarray]]]) -> np.ndarray:
    """Arrange rows of (title, image) in a grid with a common title: (height, width, 3) uint8 RGB."""
    drawn = []
    for row in rows:
        panels = [titled(text, panel) for text, panel in row]
        height = max(map(len, panels))
        drawn.append(np.hstack([_pad(panel, height + GAP, panel.shape[1] + GAP) for panel in panels]))
    width = max(row.shape[1] for row in drawn)
    return titled(title, np.vstack([_pad(row, len(row), width) for row in drawn]))


def write_image(path: Path, image: np.ndarray) -> None:
    """Write (H, W, 3) uint8 RGB as a JPEG or PNG file, depending on the suffix. The folder is created.

    Raises:
        ConfigError: If the file cannot be written, or if it exists and was not written by this function.
    """
    check_replaceable(path, advice="Choose another output directory.")
    # The comment lets a later command replace the file.
    info = PngInfo()
    info.add_text("Description", GENERATOR)
    options: dict[str, Any] = {"pnginfo": info, "compress_level": 1, "comment": GENERATOR, "quality": 95}
    file_format = "JPEG" if path.suffix.lower() in (".jpg", ".jpeg") else "PNG"
    with atomic_write(path, sync=False) as partial:
        Image.fromarray(image).save(partial, file_format, **options)


def _colors(metadata, key: str) -> list[tuple[int, ...]]:
    colors = metadata.get(key)
    return [tuple(map(int, color)) for color in (colormap(rgb=True, maximum=255) if colors is None else colors)]


def titled(title: str, image: np.ndarray) -> np.ndarray:
    """Return an image (H, W, 3) with a title above it."""
    width = max(PANEL_WIDTH, image.shape[1])
    header = Image.new("RGB", (width, HEADER), "white")
    draw_text(header, shorten(printable(title), 1, width - 8), 4, fill="black")
    return np.vstack([header, _pad(image, len(image), width)])


def _pad(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.pad(image, ((0, height - image.shape[0]), (0, width - image.shape[1]), (0, 0)), constant_values=255)
