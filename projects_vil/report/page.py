"""One HTML page about a run, from the files of its folder."""

import contextlib
import datetime
import itertools
import json
import logging
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from projects_vil.config import default_config, detector_name, load_config
from projects_vil.data import check_files, fixed_coco, is_coco, register_datasets
from projects_vil.evaluation import LOSS_TASK, PER_CLASS, explain_results
from projects_vil.report import figures
from projects_vil.report.coco_metrics import DetectionMetrics, confusion_matrix, evaluate_detections
from projects_vil.visualization import predictions_file

REPORT_FILE = "report.html"
CONFIG, METRICS, EVALUATION, LOG = "config.yaml", "metrics.json", "evaluation.json", "log.txt"
MAX_CONFUSED = 12  # classes in the confusion matrix
MAX_WARNING_LINES = 6
_TASKS = {"bbox": "boxes", "segm": "masks", "sem_seg": "labels"}
_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "mIoU", "fwIoU", "mACC", "pACC")
_SIZES = "APs: objects of at most 32² pixels, APm: 32² to 96², APl: at least 96²."
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_RECORD = re.compile(r"\[\d\d/\d\d \d\d:\d\d:\d\d\] \S+ (?P<level>[A-Z]+): (?P<text>.*)")


@dataclass
class RunFolder:
    """The files of a run; missing and unreadable ones are empty, and named in ``left_out``."""

    folder: Path
    cfg: CfgNode | None = None
    config_text: str = ""
    metrics: list[dict[str, float]] = field(default_factory=list)  # lines of metrics.json
    evaluation: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # dataset -> task -> metric
    log: str = ""
    left_out: list[str] = field(default_factory=list)


def write_report(
    folder: str | Path, output: str | Path | None = None, *, num_images: int = 8, overrides: Sequence[str] = ()
) -> Path:
    """Write one HTML page about a run, which needs no network and no other file; the run is not changed.

    Args:
        folder: ``OUTPUT_DIR`` of a run.
        output: the page; ``report.html`` in the folder by default.
        num_images: validation images to draw, 0 or more.
        overrides: keys and values for the run's config, as another path of the dataset.

    Raises:
        ConfigError: for a folder without a run, a negative number of images, or a page that cannot be written.
    """
    folder = Path(folder)
    if num_images < 0:
        raise ConfigError(f"num_images is {num_images}: it must be 0 or more")
    path = folder / REPORT_FILE if output is None else Path(output)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"output {path} must be a file in a folder that exists")
    run = read_run(folder, overrides)
    if run.cfg is not None:
        try:
            register_datasets(run.cfg)
        except ConfigError as error:
            run.left_out.append(f"evaluation on the datasets: {error}")
    page = _render(run, _datasets(run, num_images=num_images))
    with atomic_write(path) as partial:
        partial.write_text(page, encoding="utf-8")
    for line in run.left_out:
        logging.getLogger(__name__).info("left out: %s", line)
    return path


def read_run(folder: Path, overrides: Sequence[str] = ()) -> RunFolder:
    """Read a folder that training or evaluation wrote, as far as its files can be read.

    Raises:
        ConfigError: for a folder without any of these files.
    """
    if not any((folder / name).is_file() for name in (CONFIG, METRICS, EVALUATION)):
        raise ConfigError(f"{folder} has no {CONFIG}, {METRICS} or {EVALUATION}: name OUTPUT_DIR of a run")
    run = RunFolder(folder)

    def read(name: str, content: str) -> str:
        try:
            return _COLOR.sub("", (folder / name).read_text(errors="replace"))
        except OSError as error:
            run.left_out.append(f"{content}: {name} cannot be read ({error.strerror})")
            return ""

    run.log = read(LOG, "versions and warnings")
    run.config_text = read(CONFIG, "configuration and evaluation on its datasets")
    try:
        run.cfg = load_config(folder / CONFIG, overrides) if run.config_text else None
    except ConfigError as error:
        run.left_out.append(f"differences from the defaults, and evaluation on the datasets: {error}")
    lines = read(METRICS, "curves").splitlines()
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            values = json.loads(line)
            values["iteration"] = int(values["iteration"])
            run.metrics.append({name: value for name, value in values.items() if isinstance(value, (int, float))})
    if len(run.metrics) < len(lines):
        run.left_out.append(f"{len(lines) - len(run.metrics)} of {len(lines)} lines of {METRICS}, which are damaged")
    try:
        evaluation = json.loads(read(EVALUATION, "metrics of the evaluation") or "{}")
        run.evaluation = {name: {task: dict(v) for task, v in tasks.items()} for name, tasks in evaluation.items()}
    except (AttributeError, TypeError, ValueError):
        run.left_out.append(f"metrics of the evaluation: {EVALUATION} is damaged")
    return run


def read_versions(log: str) -> list[tuple[str, str]]:
    """Return the last table of the environment that detectron2 logged, where the run started last."""
    _, found, table = log.rpartition("Environment info:\n")
    lines = table.splitlines()[1:] if found else []
    rows = (line.partition("  ") for line in itertools.takewhile(lambda line: not line.startswith("---"), lines))
    return [(name.strip(), value.strip()) for name, _, value in rows]


def read_warnings(log: str) -> list[tuple[str, int]]:
    """Return warnings and errors in the order of their first appearance, with their numbers."""
    messages: list[list[str]] = []
    is_warning = False
    for line in log.splitlines():
        record = _RECORD.match(line)
        if record is not None:
            is_warning = record["level"] in ("WARNING", "ERROR", "CRITICAL")
        if is_warning and record is not None:
            messages.append([record["text"]])
        elif is_warning:
            messages[-1].append(line)
    return list(Counter("\n".join(lines[:MAX_WARNING_LINES]).rstrip() for lines in messages).items())


# -- one section for each dataset ------------------------------------------------------------------


def _datasets(run: RunFolder, *, num_images: int) -> list[dict[str, Any]]:
    names = list(run.cfg.DATASETS.TEST) if run.cfg is not None else []
    sections = []
    for name in dict.fromkeys([*names, *run.evaluation]):
        metrics = _evaluate(run, name) if run.cfg is not None else None
        section = {"name": name, "figures": [], "images": [], "confusion": None}
        tasks = run.evaluation.get(name, {})
        section |= _summary(tasks, metrics) | _classes(tasks, metrics)
        if metrics is not None:
            section |= {"figures": figures.precision_figures(metrics), "confusion": _confusion(metrics)}
            try:
                root = Path(MetadataCatalog.get(name).image_root)
                section["images"] = figures.match_figures(metrics, root, number=num_images)
            except ConfigError as error:
                run.left_out.append(f"images of {name}: {error}")
        if section["summary"] or section["figures"]:
            sections.append(section)
    return sections


def _evaluate(run: RunFolder, name: str) -> DetectionMetrics | None:
    results = predictions_file(run.folder, name)
    try:
        check_files(name)
        if not is_coco(name):
            raise ConfigError("they are made for datasets in COCO format")
        if not results.is_file():
            raise ConfigError(f"there is no {results.relative_to(run.folder)}")
        annotations, _ = fixed_coco(name, check=run.cfg.DATASETS.CHECK, masks=run.cfg.MODEL.MASK_ON)
        return evaluate_detections(annotations, results, max_detections=run.cfg.TEST.DETECTIONS_PER_IMAGE)
    except (ConfigError, OSError) as error:
        run.left_out.append(f"precision and recall, confusions and images of {name}: {error}")
        return None


def _summary(tasks: dict[str, dict[str, Any]], metrics: DetectionMetrics | None) -> dict[str, Any]:
    """Build the table of AP or mIoU of each task, and notes on it."""
    notes = []
    options = {"AP": {}, "AP50": {"iou": 0.5}, "AP75": {"iou": 0.75}, "APs": {"size": 1}, "APm": {"size": 2}}
    options["APl"] = {"size": 3}
    computed = {
        task: {name: metrics.ap(task, **keywords) for name, keywords in options.items()}
        for task in (metrics.precision if metrics is not None else ())
    }
    if not tasks and computed:
        notes.append(f"{EVALUATION} has no metrics of this dataset: these were computed for this page.")
        tasks = computed
    for task in computed:
        ours, logged = computed[task]["AP"], tasks.get(task, {}).get("AP")
        if logged is not None and abs(logged - ours) > 0.01:
            notes.append(f"{task}: AP is {logged:.2f} in {EVALUATION}, and {ours:.2f} by the detections in the folder.")
    columns = [name for name in _METRICS if any(name in values for values in tasks.values())]
    summary = [
        (_TASKS.get(task, task), [values.get(name) for name in columns])
        for task, values in tasks.items()
        if task != LOSS_TASK
    ]
    if metrics is not None and "APs" in columns:
        counts = dict(zip(("AP", "APs", "APm", "APl"), metrics.num_objects.sum(axis=0).tolist(), strict=True))
        summary.append(("objects", [str(counts.get(name, "")) for name in columns]))
        notes.append(_SIZES)
    losses = [f"{name} {value:.4g}" for name, value in tasks.get(LOSS_TASK, {}).items() if value is not None]
    notes += [f"Losses on this dataset: {', '.join(losses)}."] if losses else []
    numbers = {
        task: {name: math.nan if value is None else value for name, value in values.items() if name != PER_CLASS}
        for task, values in tasks.items()
    }
    return {"metrics": columns, "summary": summary, "notes": [*notes, *explain_results(numbers)]}


def _classes(tasks: dict[str, dict[str, Any]], metrics: DetectionMetrics | None) -> dict[str, Any]:
    """Build the table of classes: rows of a name, values, and the AP that a bar shows."""
    if metrics is not None:
        columns = ["objects", *(f"{name} {_TASKS[task]}" for task in metrics.precision for name in ("AP", "AP50"))]
        rows = []
        for index, category in enumerate(metrics.categories):
            values = [metrics.ap(task, iou=iou, category=index) for task in metrics.precision for iou in (None, 0.5)]
            rows.append((category["name"], [str(metrics.num_objects[index, 0]), *values], values[0]))
        return {"class_columns": columns, "bar_of": "AP boxes", "classes": rows}
    task, per_class = next(((task, v[PER_CLASS]) for task, v in tasks.items() if v.get(PER_CLASS)), ("", {}))
    columns = list(next(iter(per_class.values()), {}))
    rows = [(name, [own.get(each) for each in columns], own.get(columns[0])) for name, own in per_class.items()]
    return {"class_columns": columns, "bar_of": " ".join([*columns[:1], _TASKS.get(task, task)]), "classes": rows}


def _confusion(metrics: DetectionMetrics) -> dict[str, Any]:
    """Build the confusion matrix of the most confused classes: (count, share of its row, whether it is correct)."""
    counts = confusion_matrix(metrics)
    background = len(metrics.categories)
    names = [category["name"] for category in metrics.categories] + ["background"]
    wrong = counts[:-1, :-1] * (1 - np.eye(background, dtype=int))
    most = np.lexsort((-counts[:-1].sum(axis=1), -(wrong.sum(axis=0) + wrong.sum(axis=1))))[:MAX_CONFUSED]
    shown = [*sorted(most.tolist()), background]
    caption = (
        f"At a score of {metrics.threshold:.3g} or more, where F1 over all classes is highest ({metrics.f1:.2f}), and "
        "an IoU of 0.50. Rows are objects, columns detections: detections of background are false positives, objects "
        "detected as background are missed."
    )
    if background > MAX_CONFUSED:
        caption += f" The {MAX_CONFUSED} of {background} classes that are confused most."
    sums = counts.sum(axis=1).clip(min=1)
    rows = [
        (names[row], [(int(counts[row, column]), counts[row, column] / sums[row], row == column) for column in shown])
        for row in shown
    ]
    return {"caption": caption, "columns": [names[column] for column in shown], "rows": rows}


# -- the page --------------------------------------------------------------------------------------


def _render(run: RunFolder, datasets: list[dict[str, Any]]) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = _number
    title = f"Run {run.folder.resolve().name}"
    if run.cfg is not None:
        title = f"{detector_name(run.cfg)} with {run.cfg.MODEL.TRANSFORMER.NAME}"
    defaults = _flatten(default_config())
    changed = _flatten(run.cfg).items() if run.cfg is not None else ()
    return environment.get_template("page.html").render(
        title=title,
        subtitle=f"{run.folder.resolve()}, written {datetime.datetime.now():%Y-%m-%d %H:%M}",
        tiles=_tiles(run),
        curves=figures.training_figures(run.metrics),
        datasets=datasets,
        colors={"tp": figures.TRUE_POSITIVE, "fp": figures.FALSE_POSITIVE, "missed": figures.MISSED},
        differences=[(key, value, defaults.get(key, "")) for key, value in changed if defaults.get(key) != value],
        run=run,
        versions=read_versions(run.log),
        warnings=read_warnings(run.log),
    )


def _tiles(run: RunFolder) -> list[tuple[str, str]]:
    """Return names and values of the few numbers at the top."""
    tiles = [
        (f"{metric} {_TASKS[task]}" + (f", {name}" if len(run.evaluation) > 1 else ""), _number(values[metric]))
        for name, tasks in run.evaluation.items()
        for task, values in tasks.items()
        for metric in ("AP", "AP50", "mIoU")
        if task in _TASKS and metric in values
    ]
    trained = [line for line in run.metrics if "total_loss" in line]
    times = [line["time"] for line in trained if line.get("time", 0) > 0]
    if trained:
        total = f" of {run.cfg.SOLVER.MAX_ITER}" if run.cfg is not None else ""
        tiles.append(("iterations", f"{trained[-1]['iteration'] + 1}{total}"))
        tiles.append(("last total loss", f"{trained[-1]['total_loss']:.4g}"))
    if times:
        tiles.append(("seconds per iteration", f"{statistics.median(times):.3g}"))
        if run.cfg is not None:
            tiles.append(("images per second", f"{run.cfg.SOLVER.IMS_PER_BATCH / statistics.median(times):.3g}"))
    return tiles


def _flatten(node: CfgNode, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, CfgNode) else {prefix + key: value}
    return flat


def _number(value: float | str | None) -> str:
    """Format a cell of a table: a dash where the value is missing or not finite."""
    if isinstance(value, str):
        return value
    return "–" if value is None or not math.isfinite(value) else f"{value:.1f}"
