"""Every detector with every backbone family in every format: how near an export is to eager, and how fast."""

import functools
import importlib.util
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import Tensor, nn

from backbones import InputError
from backbones.errors import check_choice
from projects_vil.checkpoint import build_detector
from projects_vil.config import load_config
from projects_vil.export.api import PRECISIONS, export_detector
from projects_vil.export.formats import FORMATS, check_format, compiler
from projects_vil.export.parity import CHANGED_SHARE, TOLERANCES, compare, describe
from projects_vil.export.report import eager_detections, example_image
from projects_vil.export.runtime import ExportedModel

CONFIGS = Path(__file__).parents[2] / "configs/demo"
TABLE_DETECTORS = ("retinanet", "mask_rcnn")
TABLE_FAMILIES = ("vil", "ls", "lit", "cvt")
SMALL_SIZE, EMPTY_SIZE, LARGE_SIZE = (64, 64), (96, 128), (800, 1333)
_UNITS = {"boxes": "box {:.1e} px", "scores": "score {:.1e}", "masks": "mask {:.1e}"}
# How much larger the last layers of an untrained detector are made.
_FACTORS = {
    "head.cls_score": 60,
    "head.bbox_pred": 20,
    "objectness_logits": 60,
    "anchor_deltas": 20,
    "box_predictor.cls_score": 60,
    "box_predictor.bbox_pred": 200,
    "mask_head.predictor": 100,
}


@dataclass(frozen=True)
class Subject:
    """A detector of the table."""

    detector: str
    family: str
    cfg: CfgNode
    weights: Path
    is_trained: bool


def lively_detector(cfg: CfgNode) -> nn.Module:
    """A detector in eval mode whose random predictors are large, so that scores and boxes are far apart."""
    torch.manual_seed(0)
    detector = build_model(cfg).eval()
    with torch.no_grad():
        for name, parameter in detector.named_parameters():
            for layer, factor in _FACTORS.items():
                if name.endswith(f"{layer}.weight"):
                    parameter *= factor
    return detector


def available_formats() -> tuple[str, ...]:
    """All formats, AOTInductor's only where there is a compiler, and OpenVINO's where it is installed."""
    is_there = {"aot_inductor": compiler() is not None, "openvino": importlib.util.find_spec("openvino") is not None}
    return tuple(name for name in FORMATS if is_there.get(name, True))


def export_table(
    output: str | Path,
    *,
    runs: str | Path | None = None,
    detectors: Sequence[str] = TABLE_DETECTORS,
    families: Sequence[str] = TABLE_FAMILIES,
    formats: Sequence[str] = tuple(FORMATS),
    precision: str = "fp32",
    large: bool = False,
    overrides: Sequence[str] = (),
) -> list[dict]:
    """Export the detectors of ``configs/demo`` in all formats, and compare each file with eager; progress on stderr.

    Compared are the images of :func:`projects_vil.export.report.comparison_images`, one of 64 x 64 and an empty one.
    What fails is noted, its traceback written into the folder, and the rest goes on.

    Args:
        output: folder; what is exported of a detector is in its ``DETECTOR_FAMILY``.
        runs: folder with trained runs, OUTPUT_DIR of ``train_net.py``, each in ``DETECTOR_FAMILY``. Where there is
            none, the weights are random.
        detectors: of ``TABLE_DETECTORS``. families: of ``TABLE_FAMILIES``. formats: of ``FORMATS``.
        precision: of ``PRECISIONS``.
        large: whether to compare on an image of 800 x 1333 too.
        overrides: keys and values by turns, for all configs.

    Returns:
        For each cell ``detector``, ``family``, ``format``, ``precision``, ``trained``, ``backbone``, ``seconds`` and
        ``ok``, and ``error`` where it failed, else ``images`` (see
        :func:`projects_vil.export.parity.compare`; the empty one is the last), ``latency``, ``bytes`` and ``opset``.

    Raises:
        InputError: before anything is exported, for names that are unknown, formats that cannot be had here, and
            folders, configs or overrides that cannot be used.
    """
    for what, values, known in (
        ("detector", detectors, TABLE_DETECTORS),
        ("backbone family", families, TABLE_FAMILIES),
        ("format", formats, FORMATS),
        ("precision", (precision,), PRECISIONS),
    ):
        for value in values:
            check_choice(what, value, known)
    for file_format in formats:
        check_format(file_format)
    if runs is not None and not Path(runs).is_dir():
        raise InputError(f"there is no folder {runs} with trained runs")
    names = [(detector, family) for detector in detectors for family in families]
    subjects = [_subject(Path(output), runs, *name, overrides) for name in names]
    cells = []
    for subject in subjects:
        for file_format in formats:
            cells.append(_cell(subject, Path(output), file_format, precision, large=large))
            place = f"[{len(cells)}/{len(subjects) * len(formats)}] {subject.detector} {subject.family} {file_format}"
            _say(f"{place}: {describe_cell(cells[-1])} ({cells[-1]['seconds']:.0f} s)")
    return cells


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _subject(output: Path, runs: str | Path | None, detector: str, family: str, overrides: Sequence[str]) -> Subject:
    name = f"{detector}_{family}"
    try:
        (output / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write into {output}: {error.strerror}") from error
    if runs is not None:
        weights = Path(runs) / name / "model_final.pth"
        if weights.is_file():
            return Subject(detector, family, load_config(weights.with_name("config.yaml"), overrides), weights, True)
    missing = f"there is no {weights}" if runs is not None else "no --runs"
    _say(f"warning: {name} has random weights, with large predictors: {missing}")
    cfg = load_config(CONFIGS / f"{name}_shapes.yaml", [*overrides, "MODEL.DEVICE", "cpu"])
    weights = output / name / "random.pth"
    torch.save({"model": lively_detector(cfg).state_dict()}, weights)
    return Subject(detector, family, cfg, weights, False)


def _cell(subject: Subject, output: Path, file_format: str, precision: str, *, large: bool) -> dict:
    cell = {
        "detector": subject.detector,
        "family": subject.family,
        "format": file_format,
        "precision": precision,
        "trained": subject.is_trained,
        "backbone": subject.cfg.MODEL.TRANSFORMER.NAME,
    }
    folder = output / f"{subject.detector}_{subject.family}"
    start = time.perf_counter()
    try:
        cell |= _compared(subject, folder, file_format, precision, large=large)
    # Exporters raise of every kind, and one format must not cost the others their cells.
    except Exception as error:
        (folder / f"{file_format}.error.txt").write_text(traceback.format_exc())
        lines = str(error).strip().splitlines() or [""]
        cell |= {"ok": False, "error": f"{type(error).__name__}: {lines[0]}"}
    return cell | {"seconds": round(time.perf_counter() - start, 1)}


def _compared(subject: Subject, folder: Path, file_format: str, precision: str, *, large: bool) -> dict:
    path, report = export_detector(subject.cfg, subject.weights, folder, file_format=file_format, precision=precision)
    images = [example_image(*SMALL_SIZE, seed=5)]
    if large:
        images.append(example_image(*LARGE_SIZE, seed=6))
    rows = report["images"] + _compare(subject, path, [*images, torch.zeros(3, *EMPTY_SIZE, dtype=torch.uint8)])
    return {
        "ok": describe(rows, TOLERANCES[precision])[1],
        "images": rows,
        "latency": report["latency"],
        "bytes": report["bytes"],
        "opset": report["opset"],
    }


def _compare(subject: Subject, path: Path, images: Sequence[Tensor]) -> list[dict]:
    model = ExportedModel(path)
    return compare(
        functools.partial(eager_detections, build_detector(subject.cfg, subject.weights)),
        model,
        images,
        tolerances=TOLERANCES[model.metadata["precision"]],
        score_threshold=model.metadata["thresholds"]["score"],
        max_detections=model.metadata["thresholds"]["detections_per_image"],
        changed_share=CHANGED_SHARE[model.metadata["precision"]],
    )


# -- as text ---------------------------------------------------------------------------------------


def describe_cell(cell: dict) -> str:
    """The largest differences of a cell of :func:`export_table` and its latency, or why there are none."""
    if "error" in cell:
        return f"FAILED: {cell['error']}"
    rows = cell["images"]
    parity = ", ".join(text.format(max(row[name] for row in rows)) for name, text in _UNITS.items() if name in rows[0])
    for name in ("unmatched", "changed"):
        number = sum(row[name] for row in rows)
        if number:
            parity += f", {number} of {sum(row['detections'] for row in rows)} {name}"
    latency = cell["latency"]
    differs = "" if cell["ok"] else "NOT EQUAL: "
    return f"{differs}{parity}; {latency['exported_ms']:.0f} ms (eager {latency['eager_ms']:.0f})"


def describe_table(cells: Sequence[dict]) -> str:
    """The cells of :func:`export_table` in Markdown: a row for each detector, a column for each format."""
    formats = list(dict.fromkeys(cell["format"] for cell in cells))
    by_detector: dict[tuple[str, str], dict[str, dict]] = {}
    for cell in cells:
        by_detector.setdefault((cell["detector"], cell["family"]), {})[cell["format"]] = cell
    lines = ["| detector | backbone | weights | " + " | ".join(formats) + " |", "|---" * (3 + len(formats)) + "|"]
    for (detector, _), row in by_detector.items():
        first = next(iter(row.values()))
        texts = (describe_cell(row[name]).replace("|", "\\|") for name in formats)
        weights = "trained" if first["trained"] else "random"
        lines.append(f"| {detector} | {first['backbone']} | {weights} | {' | '.join(texts)} |")
    measured = [cell for cell in cells if "latency" in cell]
    if measured:
        latency, rows = measured[0]["latency"], measured[0]["images"]
        sizes = ", ".join(f"{row['height']} x {row['width']}" for row in rows[:-1])
        found = sum(cell["images"][-1]["detections"] == 0 for cell in measured)
        lines += [
            "",
            f"{measured[0]['precision']}. The largest difference from eager on images of {sizes} and an empty one of "
            f"{rows[-1]['height']} x {rows[-1]['width']}, in which {found} of {len(measured)} cells have no detection. "
            f"Median latency at {latency['height']} x {latency['width']}, {latency['threads']} threads.",
        ]
    return "\n".join(lines)
