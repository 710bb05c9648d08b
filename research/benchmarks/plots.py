"""Plots of the measurements of `vil benchmark`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure


def plot_growth(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Plot time, and memory if measured, against the number of pixels on logarithmic axes.

    Args:
        rows: The measurements in the JSON file of ``vil benchmark``.
        path: PNG or SVG file to write.
    """
    panels = {"time": ("seconds", "seconds", 1)}
    if all(row["memory"] for row in rows):
        panels["memory"] = ("memory", "peak memory, GB", 1e9)
    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    exponents = growth(rows)
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (what, (key, title, unit)) in zip(all_axes, panels.items(), strict=True):
        for name, model_rows in by_model(rows).items():
            label = f"{name} ({exponents[name][what]:.2f})" if name in exponents else name
            pixels = [math.prod(row["size"]) / 1e6 for row in model_rows]
            axes.loglog(pixels, [row[key] / unit for row in model_rows], marker="o", label=label)
        axes.set(title=title, xlabel="megapixels")
        axes.grid(which="both", alpha=0.3)
        axes.legend(title="exponent in parentheses" if exponents else None, fontsize="small")
    figure.savefig(path, dpi=120)


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Fit time and memory of models with several sizes as powers of the number of pixels, and return the exponents."""
    exponents = {}
    for name, model_rows in by_model(rows).items():
        if len(model_rows) > 1:
            pixels = np.log([math.prod(row["size"]) for row in model_rows])
            values = {"time": [row["seconds"] for row in model_rows]}
            if all(row["memory"] for row in model_rows):
                values["memory"] = [row["memory"] for row in model_rows]
            exponents[name] = {what: float(np.polyfit(pixels, np.log(y), 1)[0]) for what, y in values.items()}
    return exponents


def by_model(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each model, by the number of pixels."""
    names = dict.fromkeys(row["model"] for row in rows)
    rows = sorted(rows, key=lambda row: math.prod(row["size"]))
    return {name: [row for row in rows if row["model"] == name] for name in names}
