"""Draw the curves and images of a report as data URLs."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from cycler import cycler
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from projects_vil.data import read_image
from projects_vil.evaluation import LOSS_TASK
from projects_vil.report.coco_metrics import DetectionMetrics
from projects_vil.visualization.drawing import Canvas

SIZE = (5.2, 3.3)  # inches of 72 points, so that text is legible on a phone
# Color-blind safe, with a contrast of at least 3 on white. Further curves have other line styles.
COLORS = ("#0b5cad", "#b3400a", "#1a7f4b", "#7a3e9d", "#80620a", "#44505c")
LINE_STYLES = ("-", (0, (5, 2)), (0, (1, 1.5)))
INK, LINES = "#1b1f24", "#d8dee4"
MAX_CLASS_CURVES = 6
MAX_SIDE = 480  # pixels of an image
TASK_NAMES = {"bbox": "boxes", "segm": "masks", "sem_seg": "labels"}
MATCH_COLORS = {"true positive": (15, 122, 69), "false positive": (179, 64, 10), "missed object": (29, 91, 191)}
_STYLE = {
    **{"svg.fonttype": "none", "font.size": 11, "legend.frameon": False, "legend.fontsize": 10},
    **{"axes.edgecolor": LINES, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": LINES},
    "axes.prop_cycle": cycler(linestyle=LINE_STYLES) * cycler(color=COLORS),
}


@dataclass(frozen=True)
class PageFigure:
    """A curve or an image of the report."""

    url: str
    title: str
    caption: str


def training_figures(metrics: Sequence[Mapping[str, float]]) -> list[PageFigure]:
    """Plot losses, learning rate, gradient norm, AP and time over the iterations, from ``metrics.json``."""
    names = {name for line in metrics for name in line}
    losses = sorted(name for name in names if "loss" in name and "/" not in name)
    losses.sort(key=lambda name: name != "total_loss")
    validation = sorted(name for name in names if f"{LOSS_TASK}/" in name)
    is_ap = {name for name in names if "/" in name and name.rpartition("/")[2] in ("AP", "AP50", "AP75", "mIoU")}
    ap = sorted(is_ap, key=lambda name: (name.rpartition("/")[0], len(name)))
    median = "Each point is the median of the last 20 iterations."
    figures = []
    for title, keys, caption, unit in (
        ("Losses", losses, median, ""),
        ("Validation loss", validation, "At each evaluation.", ""),
        ("Learning rate", ["lr"], "Base learning rate.", ""),
        ("Gradient norm", ["gradient_norm"], f"Before clipping. {median}", ""),
        ("Average precision", ap, "On the validation images, at each evaluation.", "%"),
        ("Seconds per iteration", ["time", "data_time"], "data_time is the time until the batch is loaded.", "s"),
    ):
        curves = {key: _points(metrics, key) for key in keys if key in names}
        curves = {key: points for key, points in curves.items() if len(points)}
        if not curves:
            continue
        infinite = sum(not math.isfinite(line[key]) for line in metrics for key in curves if key in line)
        if infinite:
            caption += f" {infinite} non-finite values are omitted."
        values = np.concatenate([points[:, 1] for points in curves.values()])
        options = {"ylim": (0, None)} if values.min() >= 0 else {}
        if title == "Gradient norm" and values.min() > 0 and values.max() > 20 * values.min():
            options = {"yscale": "log"}
        figures.append(PageFigure(_plot(curves, xlabel="iteration", ylabel=unit, **options), title, caption))
    return figures


def precision_figures(metrics: DetectionMetrics) -> list[PageFigure]:
    """Plot precision over recall for each task: by IoU, and by class if there are few classes."""
    figures = []
    for task in metrics.precision:
        name = TASK_NAMES[task]
        ious = {"IoU 0.50": 0.5, "IoU 0.75": 0.75, "mean of 0.50 to 0.95": None}
        curves = {label: metrics.curve(task, iou=iou) for label, iou in ious.items()}
        groups = [(f"Precision and recall, {name}", curves, "Mean over the classes with objects.")]
        if 1 < len(metrics.categories) <= MAX_CLASS_CURVES:
            classes = [category["name"] for category in metrics.categories]
            curves = {label: metrics.curve(task, iou=0.5, category=row) for row, label in enumerate(classes)}
            groups.append((f"Precision and recall by class, {name}", curves, "At an IoU of 0.50."))
        limits = {"xlim": (0, 1), "ylim": (0, 1.02), "xlabel": "recall", "ylabel": "precision"}
        for title, curves, caption in groups:
            curves = {str(label): points for label, points in curves.items() if len(points)}
            if curves:
                figures.append(PageFigure(_plot(curves, **limits), title, caption))
    return figures


def match_figures(metrics: DetectionMetrics, folder: Path, *, number: int) -> list[PageFigure]:
    """Draw the matches of images that are evenly distributed over the images with an object or a detection.

    Raises:
        ConfigError: If an image cannot be read.
    """
    names = {category["id"]: str(category["name"]) for category in metrics.categories}
    candidates = [image for image in metrics.images if image[1]]
    figures = []
    for index in np.unique(np.linspace(0, len(candidates) - 1, number).round().astype(int)) if candidates else ():
        image, matches = candidates[index]
        pixels = read_image(folder / image["file_name"])
        canvas = Canvas(pixels, scale=MAX_SIDE / max(pixels.shape[:2]))
        numbers = dict.fromkeys(MATCH_COLORS, 0)
        # True positives are drawn last, on top.
        for detection, target in sorted(matches, key=lambda match: (match[0] is not None) + (None not in match)):
            item, is_missed = detection or target, detection is None
            label = "missed object" if is_missed else "true positive" if target else "false positive"
            numbers[label] += 1
            left, top, width, height = item["bbox"]
            box, color = (left, top, left + width, top + height), MATCH_COLORS[label]
            canvas.draw_box(box, color, dashed=is_missed)
            text = names[item["category_id"]] + ("" if is_missed else f" {item['score']:.0%}")
            # Otherwise the label of a missed object could cover the label of a detection.
            canvas.draw_label(text, box, color, below=is_missed)
        encoded = cv2.imencode(".jpg", canvas.image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 82])[1]
        counts = ", ".join(f"{label}s: {number}" for label, number in numbers.items())
        figures.append(PageFigure(_url("image/jpeg", encoded.tobytes()), image["file_name"], counts))
    return figures


def _points(metrics: Sequence[Mapping[str, float]], key: str) -> np.ndarray:
    """Return (N, 2): iterations and finite values."""
    return np.array([(line["iteration"], line[key]) for line in metrics if math.isfinite(line.get(key, math.nan))])


def _plot(curves: Mapping[str, np.ndarray], **axes_options) -> str:
    """Plot named curves (N, 2) and return the data URL of an SVG image."""
    with rc_context(_STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        for name, points in curves.items():
            axes.plot(*points.T, label=name, marker="o" if len(points) < 25 else None, markersize=3.5, linewidth=1.6)
        axes.set(**axes_options)
        if axes_options.get("xlabel") == "iteration":
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        if len(curves) > 1:
            legend = axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handlelength=1.8)
            for text in legend.get_texts():
                text.set_parse_math(False)
        file = io.BytesIO()
        figure.savefig(file, format="svg")
    return _url("image/svg+xml", file.getvalue())


def _url(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
