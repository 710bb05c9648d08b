"""What the page says of a dataset that a run was evaluated on."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog

from backbones import InputError
from projects_vil.data import check_files, is_coco
from projects_vil.evaluation import LOSS_TASK, PER_CLASS, explain_results
from projects_vil.report.drawings import DrawnImage, draw_images
from projects_vil.report.figures import Drawn, precision_figures
from projects_vil.report.judging import SIZES, Judged, confusions, judge
from projects_vil.report.run_folder import Run
from projects_vil.visualization import predictions_file

MOST_CONFUSED = 12  # classes in the table of confusions
_TASKS = {"bbox": "boxes", "segm": "masks", "sem_seg": "labels"}
_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "mIoU", "fwIoU", "mACC", "pACC")


@dataclass(frozen=True)
class ClassRow:
    """Figures of a class."""

    name: str
    values: list[str]
    bar: float


@dataclass(frozen=True)
class Cell:
    """How often objects of one class were found as another."""

    count: int
    tint: float
    is_right: bool


@dataclass(frozen=True)
class ConfusionRow:
    name: str
    cells: list[Cell]


@dataclass(frozen=True)
class Confusion:
    """A table of what was found as what."""

    caption: str
    columns: list[str]
    rows: list[ConfusionRow]


@dataclass
class DatasetPart:
    """One section of the page."""

    name: str
    anchor: str
    metrics: list[str] = field(default_factory=list)
    summary: list[tuple[str, list[str]]] = field(default_factory=list)
    sizes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: list[Drawn] = field(default_factory=list)
    class_columns: list[str] = field(default_factory=list)
    bar_of: str = ""
    classes: list[ClassRow] = field(default_factory=list)
    confusion: Confusion | None = None
    images: list[DrawnImage] = field(default_factory=list)


def dataset_parts(run: Run, left_out: list[str], *, num_images: int) -> list[DatasetPart]:
    """A section for each dataset that was evaluated; what it has not is appended to ``left_out``."""
    names = list(run.cfg.DATASETS.TEST) if run.cfg is not None else []
    names += [name for name in run.evaluation if name not in names]
    parts = []
    for number, name in enumerate(names):
        part = DatasetPart(name=name, anchor=f"evaluation-{number}")
        tasks = run.evaluation.get(name, {})
        judged = _judge(run, name, left_out) if run.cfg is not None else None
        _add_summary(part, tasks, judged)
        _add_classes(part, tasks, judged)
        if judged is not None:
            part.figures = precision_figures(judged)
            part.confusion = _confusion(judged)
            try:
                part.images = draw_images(judged, Path(MetadataCatalog.get(name).image_root), number=num_images)
            except InputError as error:
                left_out.append(f"drawings of {name}: {error}")
        if part.summary or part.figures:
            parts.append(part)
    return parts


def _judge(run: Run, name: str, left_out: list[str]) -> Judged | None:
    what = f"precision and recall, confusions and drawings of {name}"
    if name in DatasetCatalog.list() and not is_coco(name):
        left_out.append(f"{what}: they are made for datasets in COCO format")
        return None
    results = predictions_file(run.folder, name)
    if not results.is_file():
        left_out.append(f"{what}: there is no {results.relative_to(run.folder)}")
        return None
    try:
        check_files(name)
        annotations = Path(MetadataCatalog.get(name).json_file)
        logging.getLogger(__name__).info("judging %s beside %s", results, annotations)
        return judge(annotations, results, max_detections=run.cfg.TEST.DETECTIONS_PER_IMAGE)
    except InputError as error:
        left_out.append(f"{what}: {error}")
        return None


def _add_summary(part: DatasetPart, tasks: Mapping[str, Mapping[str, Any]], judged: Judged | None) -> None:
    if not tasks and judged is not None:
        part.notes.append("evaluation.json has no figures of this dataset: these were computed for this page.")
        tasks = {task: _metrics_of(judged, task) for task in judged.by_task}
    part.metrics = [name for name in _METRICS if any(name in metrics for metrics in tasks.values())]
    part.summary = [
        (_TASKS.get(task, task), [figure(metrics.get(name)) for name in part.metrics])
        for task, metrics in tasks.items()
        if task != LOSS_TASK
    ]
    if LOSS_TASK in tasks:
        losses = ", ".join(f"{name} {value:.4g}" for name, value in tasks[LOSS_TASK].items() if value is not None)
        part.notes.append(f"Losses on this dataset: {losses}.")
    if judged is not None and "APs" in part.metrics:
        count = {"AP": sum(judged.objects_by_class)}
        count |= dict(zip(("APs", "APm", "APl"), judged.objects_by_size.values(), strict=True))
        part.sizes = [str(count.get(name, "")) for name in part.metrics]
        part.notes.append(", ".join(f"{name} is {extent} pixels" for name, extent in SIZES.items()).capitalize() + ".")
    numbers = {
        task: {name: math.nan if value is None else value for name, value in metrics.items() if name != PER_CLASS}
        for task, metrics in tasks.items()
    }
    part.notes += explain_results(numbers)
    for task, precision in (judged.by_task if judged is not None else {}).items():
        written = tasks.get(task, {}).get("AP")
        if written is not None and abs(written - precision.ap()) > 0.01:
            part.notes.append(
                f"{task}: evaluation.json says AP {written:.2f}, and the detections in the folder have "
                f"{precision.ap():.2f}: one of the two is of another evaluation."
            )


def _metrics_of(judged: Judged, task: str) -> dict[str, float]:
    precision = judged.by_task[task]
    return {
        "AP": precision.ap(),
        "AP50": precision.ap(iou=0.5),
        "AP75": precision.ap(iou=0.75),
        **{f"AP{letter}": precision.ap(size=number) for number, letter in enumerate("sml", start=1)},
    }


def _add_classes(part: DatasetPart, tasks: Mapping[str, Mapping[str, Any]], judged: Judged | None) -> None:
    if judged is not None:
        part.class_columns = ["objects"]
        for task in judged.by_task:
            part.class_columns += [f"AP {_TASKS[task]}", f"AP50 {_TASKS[task]}"]
        part.bar_of = f"AP {_TASKS['bbox']}"
        for row, name in enumerate(judged.classes):
            values = [str(judged.objects_by_class[row])]
            for precision in judged.by_task.values():
                values += [figure(precision.class_ap(row)), figure(precision.class_ap(row, iou=0.5))]
            ap = judged.by_task["bbox"].class_ap(row)
            part.classes.append(ClassRow(name, values, 0.0 if math.isnan(ap) else round(ap, 1)))
        return
    for task, metrics in tasks.items():
        per_class = metrics.get(PER_CLASS)
        if isinstance(per_class, dict) and per_class and not part.classes:
            columns = list(next(iter(per_class.values())))
            part.class_columns, part.bar_of = columns, f"{columns[0]} {_TASKS.get(task, task)}"
            part.classes = [
                ClassRow(name, [figure(values.get(column)) for column in columns], values.get(columns[0]) or 0.0)
                for name, values in per_class.items()
            ]


def _confusion(judged: Judged) -> Confusion:
    counts = confusions(judged)
    nothing = len(judged.classes)
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    chosen = np.arange(nothing)
    caption = (
        f"At a score of {judged.threshold:.3g} or more, where F1 over all classes is best ({judged.f1:.2f}), and an "
        "IoU of 0.50: how many objects of each class (rows) were found as what (columns)."
    )
    if nothing > MOST_CONFUSED:
        # Those that are taken for others most often, then those with most objects.
        weight = wrong[:nothing, :nothing].sum(axis=0) + wrong[:nothing, :nothing].sum(axis=1)
        order = np.lexsort((-counts[:nothing].sum(axis=1), -weight))
        chosen = np.sort(order[:MOST_CONFUSED])
        caption += f" Of {nothing} classes, the {MOST_CONFUSED} that are confused most."
    shown = [*chosen, nothing]
    of_row = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    names = [*judged.classes, ""]
    rows = [
        ConfusionRow(
            names[row] if row < nothing else "no object",
            [
                Cell(int(counts[row, column]), round(0.45 * counts[row, column] / of_row[row, 0], 3), row == column)
                for column in shown[: len(shown) - (row == nothing)]
            ],
        )
        for row in shown
    ]
    return Confusion(caption, [*(judged.classes[column] for column in chosen), "missed"], rows)


def figure(value: float | None) -> str:
    """A value as it stands in a table; a dash where it is not a number."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.1f}"
