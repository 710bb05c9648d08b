"""The HTML of a report."""

import datetime
import statistics
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from projects_vil.config import detector_name
from projects_vil.report.dataset_part import DatasetPart, figure
from projects_vil.report.drawings import FALSE, HIT, MISSED
from projects_vil.report.figures import Drawn
from projects_vil.report.run_folder import LOG, Run

_TEMPLATE = "page.html"


def render(
    run: Run,
    *,
    curves: list[Drawn],
    datasets: list[DatasetPart],
    differences: list[tuple[str, str, str]],
    left_out: list[str],
) -> str:
    """The whole page; all texts are escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    parts = [
        ("training", "Training", curves),
        *((part.anchor, f"Evaluation on {part.name}", True) for part in datasets),
        ("configuration", "Configuration", run.config_text),
        ("versions", "Versions", run.versions),
        ("warnings", f"Warnings ({len(run.warnings)})", True),
        ("left-out", "Left out", left_out),
    ]
    has_log = (run.folder / LOG).is_file()
    return environment.get_template(_TEMPLATE).render(
        title=_title(run),
        subtitle=f"{run.folder.resolve()}, written {datetime.datetime.now():%Y-%m-%d %H:%M}",
        parts=[(name, text) for name, text, is_there in parts if is_there],
        tiles=_tiles(run),
        curves=curves,
        datasets=datasets,
        colors={"hit": HIT, "wrong": FALSE, "missed": MISSED},
        config_text=run.config_text,
        differences=differences,
        versions=run.versions,
        warnings=run.warnings,
        no_warnings=f"{LOG} has none." if has_log else f"There is no {LOG}.",
        left_out=left_out,
    )


def _title(run: Run) -> str:
    if run.cfg is None:
        return f"Run {run.folder.resolve().name}"
    return f"{detector_name(run.cfg)} with {run.cfg.MODEL.TRANSFORMER.NAME}"


def _tiles(run: Run) -> list[tuple[str, str]]:
    """The few figures at the top."""
    tiles = []
    for name, tasks in run.evaluation.items():
        where = f", {name}" if len(run.evaluation) > 1 else ""
        for task, metric, label in (
            ("bbox", "AP", "box AP"),
            ("bbox", "AP50", "box AP50"),
            ("segm", "AP", "mask AP"),
            ("sem_seg", "mIoU", "mIoU"),
        ):
            if metric in tasks.get(task, {}):
                tiles.append((label + where, figure(tasks[task][metric])))
    trained = [line for line in run.metrics if "total_loss" in line]
    if trained:
        done = int(trained[-1]["iteration"]) + 1
        tiles.append(("iterations", f"{done} of {run.cfg.SOLVER.MAX_ITER}" if run.cfg is not None else str(done)))
        tiles.append(("last total loss", f"{trained[-1]['total_loss']:.4g}"))
    times = [line["time"] for line in trained if line.get("time", 0) > 0]
    if times:
        seconds = statistics.median(times)
        tiles.append(("seconds of an iteration", f"{seconds:.3g}"))
        if run.cfg is not None:
            tiles.append(("images per second", f"{run.cfg.SOLVER.IMS_PER_BATCH / seconds:.3g}"))
    return tiles
