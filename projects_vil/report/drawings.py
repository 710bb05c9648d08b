"""Hits, misses and false alarms on images, as data for a page."""

import base64
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

from backbones.utils.errors import InputError
from projects_vil.data import read_image
from projects_vil.report.judging import Judged, Matched

WIDTH, HEIGHT = 480, 480  # pixels that a drawing fills
QUALITY = 82  # of a JPEG
LETTERS = 11  # pixels
HIT, FALSE, MISSED = "#0f7a45", "#b3400a", "#1d5bbf"
DASH = 6  # pixels


@dataclass(frozen=True)
class DrawnImage:
    """An image of the page."""

    url: str
    name: str
    caption: str


def draw_images(judged: Judged, folder: Path, *, number: int) -> list[DrawnImage]:
    """Draw images that are spread evenly over those with an object or a detection at the threshold.

    Args:
        folder: of the image files.
        number: of images, at most.

    Raises:
        InputError: where one cannot be read.
    """
    worth = [image for image in judged.images if image.objects or image.above(judged.threshold)]
    chosen = [worth[index] for index in np.unique(np.linspace(0, len(worth) - 1, number).round().astype(int))]
    names = dict(zip(judged.class_ids, judged.classes, strict=True))
    return [_draw(image, folder, names, judged.threshold) for image in chosen] if worth and number else []


def _draw(image: Matched, folder: Path, names: dict[int, str], threshold: float) -> DrawnImage:
    name = image.image["file_name"]
    pixels = read_image(str(folder / name), "RGB")
    expected = image.image.get("height"), image.image.get("width")
    if pixels.shape[:2] != expected:
        raise InputError(f"{folder / name} is {pixels.shape[:2]} pixels high and wide, its annotations say {expected}")
    drawing = Image.fromarray(np.ascontiguousarray(pixels))
    scale = min(WIDTH / drawing.width, HEIGHT / drawing.height)
    drawing = drawing.resize((max(1, round(drawing.width * scale)), max(1, round(drawing.height * scale))))
    pen = _Pen(drawing, scale)
    counting = image.above(threshold)
    hits = {int(image.hits[index]): index for index in counting if image.hits[index] >= 0}
    for row, item in enumerate(image.objects):
        if row not in hits:
            pen.frame(item["bbox"], MISSED, names[item["category_id"]], dashed=True)
    for index in reversed(counting):
        item = image.detections[index]
        is_hit = image.hits[index] >= 0
        label = f"{names[item['category_id']]} {item['score']:.0%}"
        pen.frame(item["bbox"], HIT if is_hit else FALSE, label)
    file = io.BytesIO()
    drawing.save(file, "JPEG", quality=QUALITY)
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    missed, wrong = len(image.objects) - len(hits), len(counting) - len(hits)
    return DrawnImage(url, name, f"{len(hits)} found, {missed} missed, {wrong} false")


class _Pen:
    """Draws frames, given in pixels of the file, with labels inside of the drawing."""

    def __init__(self, drawing: Image.Image, scale: float) -> None:
        self.size, self.scale = drawing.size, scale
        self.draw = ImageDraw.Draw(drawing)
        self.font = ImageFont.truetype(findfont("DejaVu Sans"), LETTERS)

    def frame(self, box: list[float], color: str, label: str, *, dashed: bool = False) -> None:
        left, top, width, height = (float(side) * self.scale for side in box)
        right, bottom = left + max(width, 1), top + max(height, 1)
        for start, end in (
            ((left, top), (right, top)),
            ((right, top), (right, bottom)),
            ((right, bottom), (left, bottom)),
            ((left, bottom), (left, top)),
        ):
            self._line(start, end, color, dashed)
        _, _, text_width, text_height = self.draw.textbbox((0, 0), label, font=self.font)
        x = min(max(left, 0), max(self.size[0] - text_width - 4, 0))
        # What was missed has its label below, so that it does not hide that of a detection at the same place.
        y = bottom - text_height - 3 if dashed else top
        y = min(max(y, 0), max(self.size[1] - text_height - 3, 0))
        self.draw.rectangle((x, y, x + text_width + 4, y + text_height + 3), fill=color)
        self.draw.text((x + 2, y + 1), label, fill="white", font=self.font)

    def _line(self, start: tuple[float, float], end: tuple[float, float], color: str, dashed: bool) -> None:
        if not dashed:
            self.draw.line((*start, *end), fill=color, width=3)
            return
        first, last = np.array(start), np.array(end)
        pieces = max(1, round(np.linalg.norm(last - first) / DASH))
        stops = first + np.linspace(0, 1, pieces + 1)[:, None] * (last - first)
        for piece in range(0, pieces, 2):
            self.draw.line((*stops[piece], *stops[piece + 1]), fill=color, width=3)
