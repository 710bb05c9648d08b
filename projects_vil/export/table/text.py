"""The table as text: a line for each cell while it is made, then all in Markdown."""

from collections.abc import Sequence

_UNITS = {"boxes": "box {:.1e} px", "scores": "score {:.1e}", "masks": "mask {:.1e}"}
_COLUMNS = ("detector", "backbone", "weights", "runtime", "precision", "AP (eager)", "ms (eager)", "of eager's time")
_COLUMNS += ("file, MB", "peak memory, MB (eager)", "largest difference from eager")


def describe_cell(cell: dict) -> str:
    """The largest differences of a cell of :func:`.measuring.export_table` and what it takes, or why there is none."""
    if "left_out" in cell:
        return f"left out: {cell['left_out']}"
    if "error" in cell:
        return f"FAILED: {cell['error']} ({cell['seconds']:.0f} s)"
    latency = cell["latency"]
    return (
        f"{_parity(cell)}; {latency['exported_ms']:.0f} ms (eager {latency['eager_ms']:.0f}), "
        f"{cell['bytes'] / 1e6:.1f} MB, at its peak {_memory(cell)} MB ({cell['seconds']:.0f} s)"
    )


def _parity(cell: dict) -> str:
    rows = cell["images"]
    parity = ", ".join(text.format(max(row[name] for row in rows)) for name, text in _UNITS.items() if name in rows[0])
    for name in ("unmatched", "changed"):
        number = sum(row[name] for row in rows)
        if number:
            parity += f", {number} of {sum(row['detections'] for row in rows)} {name}"
    return parity if cell["ok"] else f"NOT EQUAL: {parity}"


def _memory(cell: dict) -> str:
    eager, exported = (
        "?" if cell["memory"][side] is None else f"{cell['memory'][side] / 1e6:.0f}" for side in ("eager", "exported")
    )
    return f"{exported} ({eager})"


def _precision(cell: dict) -> str:
    rows = cell["evaluation"] or ()
    return "; ".join(f"{row['task']} {row['AP_exported']} ({row['AP']})" for row in rows) or "-"


def _row(cell: dict) -> list[str]:
    row = [cell["detector"], cell["backbone"], "trained" if cell["trained"] else "random", cell["format"]]
    row.append(cell["precision"])
    if "error" in cell:
        return [*row, *["-"] * 5, f"FAILED: {cell['error']}"]
    latency = cell["latency"]
    times = f"{latency['exported_ms']:.0f} ({latency['eager_ms']:.0f})"
    share = f"{latency['exported_ms'] / latency['eager_ms']:.2f}"
    return [*row, _precision(cell), times, share, f"{cell['bytes'] / 1e6:.1f}", _memory(cell), _parity(cell)]


def describe_table(cells: Sequence[dict]) -> str:
    """The cells of :func:`.measuring.export_table` in Markdown: a row for each detector, runtime and precision."""
    rows = [_COLUMNS, *(_row(cell) for cell in cells if "left_out" not in cell)]
    lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    lines.insert(1, "|---" * len(_COLUMNS) + "|")
    left_out = {(cell["format"], cell["precision"]): cell["left_out"] for cell in cells if "left_out" in cell}
    if left_out:
        lines.append("")
    lines += [f"Left out: {' in '.join(kind)}: {reason}." for kind, reason in left_out.items()]
    measured = [cell for cell in cells if "latency" in cell]
    return "\n".join([*lines, "", _explanation(measured)] if measured else lines)


def _explanation(measured: Sequence[dict]) -> str:
    latency, rows = measured[0]["latency"], measured[0]["images"]
    sizes = ", ".join(f"{row['height']} x {row['width']}" for row in rows[:-1])
    empty = sum(cell["images"][-1]["detections"] == 0 for cell in measured)
    return (
        f"Median latency of one image of {latency['height']} x {latency['width']} by turns with eager in fp32, "
        f"{latency['threads']} threads. Peak memory of a new process that loads the file and runs that image "
        f"once, above what it had before. The largest difference from eager on images of {sizes} and an empty one of "
        f"{rows[-1]['height']} x {rows[-1]['width']}, in which {empty} of {len(measured)} cells have no detection."
    )
