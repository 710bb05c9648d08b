"""The file of a run's results."""

import json
import logging
import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog

from backbones.files import written_whole
from projects_vil.evaluation.explaining import class_values, explain_results

RESULTS_FILE = "evaluation.json"
# Under which a task's results have those of each class.
PER_CLASS = "per_class"
# What evaluators give for each class, as in AP-dog.
_CLASS_METRICS = ("AP", "IoU", "ACC")


def write_results(cfg: CfgNode, results: OrderedDict) -> None:
    """Write ``OUTPUT_DIR/evaluation.json``, and log why a metric is not a number or about 0.

    The file has dataset -> task -> metric, and under ``per_class`` beside a task's metrics class -> metric; a metric
    that is not defined is null.
    """
    names = cfg.DATASETS.TEST
    by_dataset = {names[0]: results} if len(names) == 1 else results
    logger = logging.getLogger(__name__)
    content = {
        name: {task: _as_json(metrics, _class_names(name)) for task, metrics in tasks.items()}
        for name, tasks in by_dataset.items()
    }
    path = Path(cfg.OUTPUT_DIR) / RESULTS_FILE
    with written_whole(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n")
    for name, tasks in by_dataset.items():
        for line in explain_results(tasks):
            logger.info("%s, %s", name, line)
    logger.info("results written to %s", path)


def _as_json(metrics: Mapping[str, float], classes: list[str]) -> dict[str, object]:
    written = {metric: _or_none(value) for metric, value in metrics.items()}
    per_class: dict[str, dict[str, float | None]] = {}
    for metric in _CLASS_METRICS:
        values = class_values(metrics, metric)
        if metric == "AP" and "AP" in metrics and not values:
            # detectron2 leaves them out where there is one class, which is all then, and where nothing was found.
            values = dict.fromkeys(classes, metrics["AP"] if len(classes) == 1 else math.nan)
        for name, value in values.items():
            per_class.setdefault(name, {})[metric] = _or_none(value)
    return written | ({PER_CLASS: per_class} if per_class else {})


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _class_names(dataset: str) -> list[str]:
    return list(MetadataCatalog.get(dataset).get("thing_classes", []))
