"""Write an HTML report of a run from the files in its output directory."""

import contextlib
import datetime
import itertools
import json
import logging
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from backbones import ConfigError
from backbones.errors import GENERATOR, check_file, check_whole, explained_errors, first_of
from backbones.files import write_text
from projects_vil.config import Overrides, config_items, default_config, detector_name, load_config
from projects_vil.data import check_files, register_datasets
from projects_vil.data.records import fixed_coco, is_coco
from projects_vil.evaluation import LOSS_TASK, PER_CLASS, explain_results
from projects_vil.files import read_json
from projects_vil.report import figures
from projects_vil.report.coco_metrics import DetectionMetrics, confusion_matrix, evaluate_detections
from projects_vil.report.figures import TASK_NAMES
from projects_vil.visualization.predictions import predictions_file

REPORT_FILE = "report.html"
CONFIG, METRICS, EVALUATION, LOG = "config.yaml", "metrics.json", "evaluation.json", "log.txt"
MAX_CONFUSED = 12  # classes in the confusion matrix
MAX_WARNING_LINES = 6
_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "mIoU", "fwIoU", "mACC", "pACC")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_TIME = r"\[\d\d/\d\d \d\d:\d\d:\d\d\]"
_WARNING = re.compile(rf"^{_TIME} \S+ (?:WARNING|ERROR|CRITICAL): (.*(?:\n(?!{_TIME}).*)*)", re.MULTILINE)


@dataclass
class RunFolder:
    """The content of a run's files. It is empty for a missing or unreadable file, and ``omitted`` has the reason."""

    folder: Path
    cfg: CfgNode | None = None
    metrics: list[dict[str, float]] = field(default_factory=list)  # lines of metrics.json
    evaluation: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # dataset -> task -> metric
    log: str = ""
    omitted: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def omit_on_error(self, content: str) -> Iterator[None]:
        """Catch expected errors, and record that ``content`` is omitted and why."""
        try:
            yield
        except (ConfigError, OSError) as error:
            self.omitted.append(f"{content}: {error}")


def write_report(
    folder: str | Path, output: str | Path | None = None, *, num_images: int = 8, overrides: Overrides = ()
) -> Path:
    """Write a self-contained HTML report of a run, and return its path.

    Args:
        folder: The output directory of a run.
        output: The HTML file; ``report.html`` in the folder by default.
        num_images: Number of validation images to draw, 0 or more.
        overrides: Config keys and values, for example another path of the dataset.

    Raises:
        ConfigError: If the folder is not a run, ``num_images`` is negative, or the report cannot be written.

    Example:
        ``write_report("output/vil_tiny", overrides=["DATASETS.TEST", "('my_val',)"])``
    """
    folder = Path(folder)
    check_whole("num_images", num_images, least=0)
    path = folder / REPORT_FILE if output is None else Path(output)
    run = read_run(folder, overrides)
    if run.cfg is not None:
        with run.omit_on_error("evaluation on the datasets"):
            register_datasets(run.cfg)
    page = _render(run, _datasets(run, num_images=num_images))
    write_text(path, page)
    for line in run.omitted:
        logging.getLogger(__name__).info("Omitted: %s", line)
    return path


def read_run(folder: Path, overrides: Overrides = ()) -> RunFolder:
    """Read the files of a training or evaluation run, as far as possible.

    Raises:
        ConfigError: If the folder has none of the files, or if the overrides are invalid.
    """
    if not any((folder / name).is_file() for name in (CONFIG, METRICS, EVALUATION)):
        raise ConfigError(f"'{folder}' has no {CONFIG}, {METRICS} or {EVALUATION}. Use the output directory of a run.")
    run = RunFolder(folder)

    def read(name: str, content: str) -> str:
        with run.omit_on_error(content):
            check_file(folder / name, "file")
            return _COLOR.sub("", (folder / name).read_text(errors="replace"))
        return ""

    run.log = read(LOG, "versions and warnings")
    is_optional = run.omit_on_error("configuration, and evaluation on its datasets")
    with contextlib.nullcontext() if overrides else is_optional:
        run.cfg = load_config(folder / CONFIG, overrides)
    lines = read(METRICS, "curves").splitlines()
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
            values = json.loads(line)
            values["iteration"] = int(values["iteration"])
            run.metrics.append({name: value for name, value in values.items() if isinstance(value, (int, float))})
    if len(run.metrics) < len(lines):
        run.omitted.append(f"{len(lines) - len(run.metrics)} of {len(lines)} lines of {METRICS} are damaged")
    damaged = explained_errors(folder / EVALUATION, "is damaged", "Evaluate again.")
    with run.omit_on_error("metrics of the evaluation, which vil eval computes"), damaged:
        run.evaluation = dict(read_json(folder / EVALUATION))
    return run


def read_versions(log: str) -> list[tuple[str, str]]:
    """Return the rows of the last environment table that detectron2 logged."""
    _, found, table = log.rpartition("Environment info:\n")
    lines = table.splitlines()[1:] if found else []
    rows = (line.partition("  ") for line in itertools.takewhile(lambda line: not line.startswith("---"), lines))
    return [(name.strip(), value.strip()) for name, _, value in rows]


def read_warnings(log: str) -> list[tuple[str, int]]:
    """Return each warning and error with its number of occurrences, in order of first occurrence."""
    messages = ("\n".join(text.splitlines()[:MAX_WARNING_LINES]).rstrip() for text in _WARNING.findall(log))
    return list(Counter(messages).items())


# One section per dataset ---------------------------------------------------------------------------------------------


def _datasets(run: RunFolder, *, num_images: int) -> list[dict[str, Any]]:
    names = list(run.cfg.DATASETS.TEST) if run.cfg is not None else []
    sections = []
    for name in dict.fromkeys([*names, *run.evaluation]):
        metrics = None
        if run.cfg is not None:
            with run.omit_on_error(f"precision and recall, confusions and images of {name}"):
                check_files(name)
                if not is_coco(name):
                    raise ConfigError(f"'{name}' is not in COCO format. Use a COCO dataset for these sections.")
                annotations = fixed_coco(name, check=run.cfg.DATASETS.CHECK, masks=run.cfg.MODEL.MASK_ON)
                results, limit = predictions_file(run.folder, name), run.cfg.TEST.DETECTIONS_PER_IMAGE
                metrics = evaluate_detections(annotations, results, max_detections=limit)
        tasks = run.evaluation.get(name, {})
        section = {"name": name, "metrics": metrics, "figures": [], "images": []}
        with explained_errors(run.folder / EVALUATION, "is damaged", "Evaluate again."):
            section |= _summary(tasks, metrics) | _classes(tasks, metrics)
        if metrics is not None:
            section |= {"figures": figures.precision_figures(metrics)} | _confusion(metrics)
            with run.omit_on_error(f"images of {name}"):
                root = Path(MetadataCatalog.get(name).image_root)
                section["images"] = figures.match_figures(metrics, root, number=num_images)
        if section["summary"] or section["figures"]:
            sections.append(section)
    return sections


def _summary(tasks: dict[str, dict[str, Any]], metrics: DetectionMetrics | None) -> dict[str, Any]:
    """Return the table with the AP or mIoU of each task, and notes."""
    columns = [name for name in _METRICS if any(name in values for values in tasks.values())]
    summary = [
        (TASK_NAMES.get(task, task), [values.get(name) for name in columns])
        for task, values in tasks.items()
        if task != LOSS_TASK
    ]
    notes = []
    if metrics is not None:
        number, small, medium, large = metrics.num_objects.sum(axis=0).tolist()
        notes.append(f"{number} objects without crowds: {small} small, {medium} medium, {large} large.")
        absent = [metrics.categories[index]["name"] for index in np.flatnonzero(metrics.num_objects[:, 0] == 0)]
        if absent:
            notes.append(f"The table omits classes without objects: {first_of(absent, 20)}.")
    losses = [f"{name} {value:.4g}" for name, value in tasks.get(LOSS_TASK, {}).items() if value is not None]
    notes += [f"Losses on this dataset: {', '.join(losses)}."] * bool(losses)
    numbers = {
        task: {name: math.nan if value is None else value for name, value in values.items() if name != PER_CLASS}
        for task, values in tasks.items()
    }
    return {"columns": columns, "summary": summary, "notes": [*notes, *explain_results(numbers)]}


def _classes(tasks: dict[str, dict[str, Any]], metrics: DetectionMetrics | None) -> dict[str, Any]:
    """Return the table of classes with objects. A row is the name, the values, and the first metric for the bar."""
    rows: dict[str, dict[str, Any]] = defaultdict(dict)
    if metrics is not None:
        for category, (number, *_) in zip(metrics.categories, metrics.num_objects, strict=True):
            rows[category["name"]]["number of objects"] = str(number) if number else None
    for task, values in tasks.items():
        for name, own in values.get(PER_CLASS, {}).items():
            rows[name] |= {f"{metric} {TASK_NAMES.get(task, task)}": value for metric, value in own.items()}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    bar = next((column for column in columns if column != "number of objects"), "")
    table = [(name, [row.get(column) for column in columns], row.get(bar)) for name, row in rows.items()]
    return {"class_columns": columns, "bar_of": bar, "classes": [row for row in table if set(row[1]) != {None}]}


def _confusion(metrics: DetectionMetrics) -> dict[str, Any]:
    """Return the confusion matrix of the most confused classes. A cell is (count, share of the row, is correct)."""
    counts = confusion_matrix(metrics)
    background = len(metrics.categories)
    names = [category["name"] for category in metrics.categories] + ["background"]
    wrong = counts[:-1, :-1] * (1 - np.eye(background, dtype=int))
    most = np.lexsort((-counts[:-1].sum(axis=1), -(wrong.sum(axis=0) + wrong.sum(axis=1))))[:MAX_CONFUSED]
    shown = [*sorted(most.tolist()), background]
    shares = counts / counts.sum(axis=1, keepdims=True).clip(min=1)
    rows = [(names[row], [(counts[row, col], shares[row, col], row == col) for col in shown]) for row in shown]
    return {"confusion_columns": [names[col] for col in shown], "confusion": rows}


# HTML ----------------------------------------------------------------------------------------------------------------


def _render(run: RunFolder, datasets: list[dict[str, Any]]) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = _number
    defaults = dict(config_items(default_config()))
    values = [(key, value) for key, value in config_items(run.cfg) if not isinstance(value, CfgNode)]
    times = [line["time"] for line in run.metrics if line.get("time", 0) > 0]
    model = f"{detector_name(run.cfg)} with {run.cfg.MODEL.TRANSFORMER.VARIANT}" if run.cfg else ""
    return environment.get_template("page.html").render(
        generator=GENERATOR,
        run=run,
        title=model or run.folder.resolve().name,
        now=f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        task_names=TASK_NAMES,
        last=next((line for line in reversed(run.metrics) if "total_loss" in line), None),
        seconds=statistics.median(times) if times else None,
        curves=figures.training_figures(run.metrics),
        datasets=datasets,
        colors=figures.MATCH_COLORS,
        differences=[(key, value, defaults.get(key, "")) for key, value in values if defaults.get(key) != value],
        versions=read_versions(run.log),
        warnings=read_warnings(run.log),
    )


def _number(value: float | str | None) -> str:
    """Format a cell of a table. A missing or non-finite value is a dash."""
    if value is not None and not isinstance(value, (int, float)):
        return str(value)
    return "–" if value is None or not math.isfinite(value) else f"{value:.1f}"
