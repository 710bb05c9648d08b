"""The cells of the table: each export is compared with eager, timed beside it, and run in a process of its own."""

import contextlib
import functools
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from backbones import InputError
from backbones.utils.errors import check_choice
from projects_vil.checkpoint import build_detector
from projects_vil.export.api import export_detector
from projects_vil.export.formats import FORMATS, check_format
from projects_vil.export.images import example_image
from projects_vil.export.proof.parity import CHANGED_SHARE, TOLERANCES, Detector, compare, describe, measure_latency
from projects_vil.export.proof.report import eager_detections
from projects_vil.export.request import ALL_PRECISIONS, check_precision
from projects_vil.export.runtime import ExportedModel
from projects_vil.export.table.subjects import TABLE_DETECTORS, TABLE_FAMILIES, Subject, make_subject
from projects_vil.export.table.text import describe_cell
from projects_vil.modeling import SMALLEST_SIDE
from projects_vil.utils import peak_in_new_process

SMALL_SIZE, EMPTY_SIZE, LARGE_SIZE = (64, 64), (96, 128), (800, 1333)


def available_formats() -> tuple[str, ...]:
    """The formats that this machine can write and run."""
    return tuple(name for name in FORMATS if _reason(check_format, name) is None)


def export_table(
    output: str | Path,
    *,
    runs: str | Path | None = None,
    detectors: Sequence[str] = tuple(TABLE_DETECTORS),
    families: Sequence[str] = TABLE_FAMILIES,
    formats: Sequence[str] = tuple(FORMATS),
    precisions: Sequence[str] = ("fp32",),
    image_size: tuple[int, int] | None = None,
    large: bool = False,
    evaluate: bool = False,
    overrides: Sequence[str] = (),
) -> list[dict]:
    """Export the detectors of ``configs/demo`` in all formats, and compare each file with eager; progress on stderr.

    Compared are those of :func:`~projects_vil.export.images.comparison_images`, one of 64 x 64 and an empty one.
    What fails is noted, its traceback written into the folder, and the rest goes on. Average precision, latency, size
    and memory of a cell are of one file.

    Args:
        output: folder; what is exported of a detector is in its ``DETECTOR_FAMILY``.
        runs: folder with trained runs, OUTPUT_DIR of ``train_net.py``, each in ``DETECTOR_FAMILY``. Where there is
            none, the weights are random.
        detectors: of ``TABLE_DETECTORS``. families: of ``TABLE_FAMILIES``. formats: of ``FORMATS``.
        precisions: of ``ALL_PRECISIONS``.
        image_size: height and width of the image that is timed; that of testing where it is None.
        large: whether to compare on an image of 800 x 1333 too.
        evaluate: whether to evaluate file and eager on ``DATASETS.TEST``, where there is a trained run.
        overrides: keys and values by turns, for all configs.

    Returns:
        For each cell ``detector``, ``family``, ``format``, ``precision``, ``trained`` and ``backbone``. With
        ``left_out``, a reason, there is no such export. Else ``seconds`` and ``ok``, and ``error`` where it failed, or
        ``images`` (:func:`~projects_vil.export.proof.parity.compare`; the last is the empty one), ``latency``,
        ``memory`` (of ``eager`` and ``exported``: bytes at the peak of a new process that loads it and runs once, above
        what it had before; None where the system does not tell), ``evaluation`` (None without), ``bytes`` and
        ``opset``.

    Raises:
        InputError: before anything is exported, for names that are unknown, formats that cannot be had here, no runs to
            be evaluated, an image that is too small, and folders, configs or overrides that cannot be used.
    """
    for what, values, known in (
        ("detector", detectors, TABLE_DETECTORS),
        ("backbone family", families, TABLE_FAMILIES),
        ("format", formats, FORMATS),
        ("precision", precisions, ALL_PRECISIONS),
    ):
        for value in values:
            check_choice(what, value, known)
    for file_format in formats:
        check_format(file_format)
    if runs is not None and not Path(runs).is_dir():
        raise InputError(f"there is no folder {runs} with trained runs")
    if image_size is not None and min(image_size) < SMALLEST_SIDE:
        raise InputError(
            f"--image-size {image_size[0]} {image_size[1]}: models take sides of {SMALLEST_SIDE} pixels and more"
        )
    if evaluate and runs is None:
        raise InputError("--evaluate needs trained detectors: --runs DIR")
    names = [(detector, family) for detector in detectors for family in families if family in TABLE_DETECTORS[detector]]
    if not names:
        raise InputError(f"there is no config of {', '.join(detectors)} with {', '.join(families)} in configs/demo")
    subjects = [make_subject(Path(output), runs, *name, overrides) for name in names]
    kinds = [(file_format, precision) for precision in precisions for file_format in formats]
    cells = []
    for subject in subjects:
        measure = functools.partial(
            _measured, subject, Path(output), image_size=image_size, large=large, evaluate=evaluate
        )
        for kind in kinds:
            cells.append(_cell(subject, Path(output), kind, measure))
            place = f"[{len(cells)}/{len(subjects) * len(kinds)}] {subject.detector} {subject.family} {' '.join(kind)}"
            print(f"{place}: {describe_cell(cells[-1])}", file=sys.stderr, flush=True)
    return cells


def _reason(check: Callable, *args) -> str | None:
    """What a check raises, as text; None where it passes."""
    try:
        check(*args)
    except InputError as error:
        return str(error)
    return None


def _cell(subject: Subject, output: Path, kind: tuple[str, str], measure: Callable[[str, str], dict]) -> dict:
    cell = {
        "detector": subject.detector,
        "family": subject.family,
        "format": kind[0],
        "precision": kind[1],
        "trained": subject.is_trained,
        "backbone": subject.cfg.MODEL.TRANSFORMER.NAME,
    }
    reason = _reason(check_precision, *kind)
    if reason is not None:
        return cell | {"left_out": reason}
    start = time.perf_counter()
    try:
        cell |= measure(*kind)
    # Exporters raise of every kind, and one format must not cost the others their cells.
    except Exception as error:
        (output / subject.name / f"{'_'.join(kind)}.error.txt").write_text(traceback.format_exc())
        lines = str(error).strip().splitlines() or [""]
        cell |= {"ok": False, "error": f"{type(error).__name__}: {lines[0]}"}
    return cell | {"seconds": round(time.perf_counter() - start, 1)}


def _measured(
    subject: Subject,
    output: Path,
    file_format: str,
    precision: str,
    *,
    image_size: tuple[int, int] | None,
    large: bool,
    evaluate: bool,
) -> dict:
    # pycocotools prints its figures where the table is to be printed.
    with contextlib.redirect_stdout(sys.stderr):
        path, report = export_detector(
            subject.cfg,
            subject.weights,
            output / subject.name,
            file_format=file_format,
            precision=precision,
            evaluate=evaluate and subject.is_trained,
        )
    images = [example_image(*SMALL_SIZE, seed=5)]
    if large:
        images.append(example_image(*LARGE_SIZE, seed=6))
    eager, model = _eager(subject), ExportedModel(path)
    rows = report["images"] + _compare(eager, model, [*images, torch.zeros(3, *EMPTY_SIZE, dtype=torch.uint8)])
    latency = report["latency"]
    if image_size is not None:
        latency = measure_latency(eager, model, example_image(*image_size, seed=7))
    image = example_image(latency["height"], latency["width"], seed=7)
    # Two detectors less, before processes that hold one more.
    del eager, model
    return {
        "ok": describe(rows, TOLERANCES[precision])[1] and all(row["ok"] for row in report.get("evaluation", ())),
        "images": rows,
        "latency": latency,
        "memory": {
            "eager": _peak(_eager_run, subject, image),
            "exported": _peak(_exported_run, path, image),
        },
        "evaluation": report.get("evaluation"),
        "bytes": report["bytes"],
        "opset": report["opset"],
    }


def _eager(subject: Subject) -> Detector:
    return functools.partial(eager_detections, build_detector(subject.cfg, subject.weights))


def _peak(run: Callable[..., Callable[[], object]], *args) -> int | None:
    build = functools.partial(run, *args)
    return peak_in_new_process(build, what=str(args[0]), instead="take a smaller --image-size")


def _eager_run(subject: Subject, image: Tensor) -> Callable[[], object]:
    return lambda: _eager(subject)(image)


def _exported_run(path: Path, image: Tensor) -> Callable[[], object]:
    return lambda: ExportedModel(path)(image)


def _compare(eager: Detector, model: ExportedModel, images: Sequence[Tensor]) -> list[dict]:
    return compare(
        eager,
        model,
        images,
        tolerances=TOLERANCES[model.metadata["precision"]],
        score_threshold=model.metadata["thresholds"]["score"],
        max_detections=model.metadata["thresholds"]["detections_per_image"],
        changed_share=CHANGED_SHARE[model.metadata["precision"]],
    )
