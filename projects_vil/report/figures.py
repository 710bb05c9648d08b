"""Curves as SVG, to be written into a page."""

import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from projects_vil.evaluation import LOSS_TASK
from projects_vil.report.judging import Judged

# Of a figure in inches of 72 points: what fits a telephone with letters that can be read there.
SIZE = (5.2, 3.3)
# Told apart by the colour-blind too, all with a contrast of 3 or more on white; then by the kind of line.
COLORS = ("#0b5cad", "#b3400a", "#1a7f4b", "#7a3e9d", "#80620a", "#44505c")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))
INK, LINES = "#1b1f24", "#d8dee4"
MOST_POINTS = 400  # of a curve
MOST_CLASSES = 6  # with a curve each
_STYLE = {
    # Text stays text, in the page's own letters.
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.edgecolor": LINES,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": LINES,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 10,
}


@dataclass(frozen=True)
class Drawn:
    """A figure of the page: SVG, a title, and what there is to see."""

    svg: str
    title: str
    caption: str


def training_figures(metrics: Sequence[Mapping[str, float]]) -> list[Drawn]:
    """Curves over the iterations: losses, learning rate, gradient norm, AP and time.

    Args:
        metrics: lines of ``metrics.json``.
    """
    names = {name for line in metrics for name in line}
    losses = sorted(name for name in names if "loss" in name and "/" not in name)
    losses.sort(key=lambda name: name != "total_loss")
    of_validation = sorted(name for name in names if f"{LOSS_TASK}/" in name)
    of_ap = sorted(
        (name for name in names if name.rpartition("/")[2] in ("AP", "AP50", "AP75", "mIoU") and "/" in name),
        key=lambda name: (name.rpartition("/")[0], len(name)),
    )
    median = "Each point is the median of the last 20 iterations."
    wanted = (
        ("Losses", losses, median, "", False),
        ("Validation loss", of_validation, "At each evaluation.", "", False),
        ("Learning rate", ["lr"], "Of parameters without a share of their own.", "", False),
        ("Gradient norm", ["gradient_norm"], f"Before clipping. {median}", "", True),
        ("Average precision", of_ap, "On the validation images, at each evaluation.", "%", False),
        ("Seconds of an iteration", ["time", "data_time"], "data_time is the wait for the batch.", "s", False),
    )
    figures = []
    for title, keys, caption, unit, is_logarithmic in wanted:
        curves = {key: _points(metrics, key) for key in keys}
        curves = {key: points for key, points in curves.items() if len(points)}
        if curves:
            infinite = sum(not math.isfinite(line[key]) for line in metrics for key in curves if key in line)
            if infinite:
                caption += f" {infinite} values are not finite, and left out."
            figures.append(_draw_curves(title, curves, caption, unit, is_logarithmic))
    return figures


def precision_figures(judged: Judged) -> list[Drawn]:
    """Precision over recall for each task, by IoU, and by class where they are few."""
    figures = []
    for task, precision in judged.by_task.items():
        name = {"bbox": "boxes", "segm": "masks"}[task]
        curves = {
            "IoU 0.50": precision.curve(iou=0.5),
            "IoU 0.75": precision.curve(iou=0.75),
            "mean of 0.50 to 0.95": precision.curve(),
        }
        caption = "Mean of the classes that have objects."
        figures.append(_draw_precision(f"Precision and recall, {name}", curves, caption))
        if 1 < len(judged.classes) <= MOST_CLASSES:
            by_class = {label: precision.curve(iou=0.5, index=row) for row, label in enumerate(judged.classes)}
            figures.append(_draw_precision(f"Precision and recall by class, {name}", by_class, "At an IoU of 0.50."))
    return [figure for figure in figures if figure is not None]


def _points(metrics: Sequence[Mapping[str, float]], key: str) -> np.ndarray:
    """(N, 2): iteration and value, N at most about ``MOST_POINTS``, by means of neighbours."""
    points = np.array([(line["iteration"], line[key]) for line in metrics if math.isfinite(line.get(key, math.nan))])
    if len(points) <= MOST_POINTS:
        return points
    return np.array([part.mean(axis=0) for part in np.array_split(points, MOST_POINTS)])


def _draw_curves(title: str, curves: Mapping[str, np.ndarray], caption: str, unit: str, is_logarithmic: bool) -> Drawn:
    figure, axes = _empty()
    with rc_context(_STYLE):
        for (name, points), (color, dashes) in zip(curves.items(), _looks(), strict=False):
            marker = "o" if len(points) < 25 else None
            look = {"color": color, "linestyle": dashes, "marker": marker, "markersize": 3.5, "linewidth": 1.6}
            axes.plot(*points.T, label=name, **look)
        values = np.concatenate([points[:, 1] for points in curves.values()])
        if is_logarithmic and values.min() > 0 and values.max() > 20 * values.min():
            axes.set_yscale("log")
        elif values.min() >= 0:
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        axes.set_xlabel("iteration")
        axes.set_ylabel(unit)
        if len(curves) > 1:
            _add_legend(axes)
    return Drawn(_as_svg(figure, title), title, caption)


def _draw_precision(title: str, curves: Mapping[str, np.ndarray], caption: str) -> Drawn | None:
    curves = {name: precision for name, precision in curves.items() if len(precision)}
    if not curves:
        return None
    figure, axes = _empty()
    with rc_context(_STYLE):
        for (name, precision), (color, dashes) in zip(curves.items(), _looks(), strict=False):
            recall = np.linspace(0, 1, len(precision))
            axes.plot(recall, precision, color=color, linestyle=dashes, linewidth=1.6, label=name)
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", ylabel="precision")
        _add_legend(axes)
    return Drawn(_as_svg(figure, title), title, caption)


def _empty() -> tuple[Figure, Axes]:
    with rc_context(_STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        return figure, figure.add_subplot()


def _looks():
    """Colours first, then other kinds of line."""
    return ((color, dashes) for dashes, color in itertools.product(DASHES, COLORS))


def _add_legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handlelength=1.8)


def _as_svg(figure: Figure, title: str) -> str:
    """The ``<svg>`` element alone, with ids that no other figure of the page has."""
    file = io.StringIO()
    prefix = re.sub(r"\W+", "-", title.lower())
    with rc_context(_STYLE | {"svg.hashsalt": prefix}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\1{prefix}-", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
