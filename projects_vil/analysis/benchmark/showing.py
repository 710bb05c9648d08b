"""Measurements as a table, as JSON, and as a drawing of time and memory against pixels."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from projects_vil.analysis.benchmark.limits import BOUNDS, KINDS, Limits, Rates
from projects_vil.analysis.benchmark.measuring import Measurement


def format_measurements(measurements: Sequence[Measurement], *, reference: str) -> str:
    """A Markdown table of all models and sizes, with quartiles in brackets; ratios are to ``reference``."""
    lines = [
        f"| model | size | seconds | images/s | x {reference} | memory, GB | x {reference} |",
        "|---|---|---|---|---|---|---|",
    ]
    bases = {m.case.size: m.memory for m in measurements if m.case.name == reference}
    for m in measurements:
        base = bases.get(m.case.size)
        memory, share = ("", "") if m.memory is None else (f"{m.memory / 1e9:.2f}", f"{m.memory / base:.2f}")
        seconds = f"{m.seconds:.3f} ({m.low:.3f} to {m.high:.3f})"
        ratio = f"{m.ratio:.2f} ({m.ratio_low:.2f} to {m.ratio_high:.2f})"
        size = f"{m.case.size[0]} x {m.case.size[1]}"
        cells = (m.case.name, size, seconds, f"{m.images_per_second:.2f}", ratio, memory, share)
        lines.append(f"| {' | '.join(cells)} |")
    for name, exponents in growth(measurements).items():
        told = [f"{what} grows as pixels to the {value:.2f}" for what, value in exponents.items()]
        lines.append(f"\n{name}: {', '.join(told)}")
    return "\n".join(lines)


def format_limits(limits: Sequence[Limits], measurements: Sequence[Measurement], rates: Rates) -> str:
    """A Markdown table of what holds up each model, below the rates of the device."""
    lines = [
        f"Large products {rates.flops / 1e9:.0f} GFLOP/s, large copies {rates.bytes / 1e9:.1f} GB/s, smallest operator "
        f"{rates.call * 1e6:.1f} us. At these rates\nthe operators of a step take the limit, by what holds each up; "
        "then, how the time that they do take is divided.\n",
        f"| model | size | seconds | limit | x limit | {' | '.join((*BOUNDS, *KINDS))} | operators |",
        f"|{'---|' * (6 + len(BOUNDS) + len(KINDS))}",
    ]
    for found, m in zip(limits, measurements, strict=True):
        shares = [found.shortest[bound] / found.limit for bound in BOUNDS]
        shares += [found.seconds[kind] / sum(found.seconds.values()) for kind in KINDS]
        cells = [m.case.name, f"{m.case.size[0]} x {m.case.size[1]}", f"{m.seconds:.3f}", f"{found.limit:.3f}"]
        cells += [f"{m.seconds / found.limit:.2f}", *(f"{share:.0%}" for share in shares), str(found.operators)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def growth(measurements: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """For models at several sizes: the exponents of pixels that time and memory grow by, fitted to logarithms."""
    found = {}
    for name, own in _by_model(measurements).items():
        if len(own) < 2:
            continue
        found[name] = {"time": _exponent([(_pixels(m), m.seconds) for m in own])}
        if all(m.memory for m in own):
            found[name]["memory"] = _exponent([(_pixels(m), m.memory) for m in own])
    return found


def as_json_of(measurements: Sequence[Measurement], limits: Sequence[Limits] = (), rates: Rates | None = None) -> dict:
    """For ``--json``; ``limits``, if there are any, are those of the measurements, in their order, at ``rates``."""
    rows = []
    for m in measurements:
        row = {"model": m.case.name, "what": m.case.what, "size": list(m.case.size), "batch_size": m.case.batch_size}
        row |= {"backward": m.case.backward, "device": m.case.device, "dtype": m.case.dtype}
        row |= {"seconds": m.seconds, "seconds_quartiles": [m.low, m.high], "images_per_second": m.images_per_second}
        row |= {"ratio": m.ratio, "ratio_quartiles": [m.ratio_low, m.ratio_high], "memory": m.memory}
        rows.append(row)
    for row, found in zip(rows, limits, strict=False):
        row |= {"limit": found.shortest, "operators": found.operators, "seconds_by_kind": found.seconds}
    found = {"measurements": rows, "growth": growth(measurements)}
    return found if rates is None else found | {"rates": dataclasses.asdict(rates)}


def draw_measurements(measurements: Sequence[Measurement], path: str | Path) -> None:
    """Time, and memory where it was measured, against pixels, both axes logarithmic."""
    with_memory = all(m.memory for m in measurements)
    figure = Figure(figsize=(11 if with_memory else 6, 4.5), layout="constrained")
    panels = figure.subplots(1, 2 if with_memory else 1, squeeze=False)[0]
    exponents = growth(measurements)
    for name, own in _by_model(measurements).items():
        pixels = [_pixels(m) / 1e6 for m in own]
        values = {"time": [m.seconds for m in own], "memory": [(m.memory or 0) / 1e9 for m in own]}
        for panel, (what, ys) in zip(panels, values.items(), strict=False):
            label = f"{name} ({exponents[name][what]:.2f})" if name in exponents else name
            panel.loglog(pixels, ys, marker="o", label=label)
    for panel, title in zip(panels, ("seconds", "peak memory, GB"), strict=False):
        panel.set(title=title, xlabel="megapixels")
        panel.grid(which="both", alpha=0.3)
        panel.legend(title="exponent in brackets" if exponents else None, fontsize="small")
    figure.savefig(path, dpi=120)


def _by_model(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    names = dict.fromkeys(m.case.name for m in measurements)
    return {name: sorted((m for m in measurements if m.case.name == name), key=_pixels) for name in names}


def _pixels(measurement: Measurement) -> int:
    return math.prod(measurement.case.size)


def _exponent(points: Sequence[tuple[float, float]]) -> float:
    pixels, values = np.log(np.array(points, float)).T
    return float(np.polyfit(pixels, values, 1)[0])
