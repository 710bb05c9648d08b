"""Write and read the results of an evaluation, and explain metrics that are nan or about 0."""

import json
import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from numpy.typing import ArrayLike

from backbones import ConfigError
from backbones.errors import first_of
from backbones.files import write_text

EVALUATION_FILE = "evaluation.json"
# The key of the results per class, and the metrics that evaluators compute per class, such as AP-dog.
PER_CLASS, _CLASS_METRICS = "per_class", ("AP", "IoU", "ACC")
# An AP in percent below which the setup is probably wrong.
_LOW_AP = 0.1


def check_finite(boxes: ArrayLike, scores: ArrayLike, *, source: str) -> None:
    """Raise a :class:`ConfigError` if a box or a score of an image is not finite.

    COCO's evaluation would count a box of nan as a true positive.

    Args:
        boxes, scores: (N, 4) and (N,).
        source: The image, and the file of the detections if there is one.
    """
    rows = np.column_stack([np.asarray(scores, np.float64), np.asarray(boxes, np.float64).reshape(-1, 4)])
    for score, *box in rows[~np.isfinite(rows).all(axis=1)][:1].tolist():
        raise ConfigError(f"A detection in {source} is not finite: box {box}, score {score}. Repair or remove it.")


def write_results(cfg: CfgNode, results: OrderedDict) -> None:
    """Write ``OUTPUT_DIR/evaluation.json``, and log explanations of metrics that are nan or about 0.

    The file maps dataset -> task -> metric, and for each task ``per_class`` -> class -> metric. An undefined metric is
    null.

    Args:
        cfg: The config with the datasets and the output directory.
        results: The results of the evaluators.
    """
    names = cfg.DATASETS.TEST
    by_dataset = {names[0]: results} if len(names) == 1 else results
    logger, path = logging.getLogger(__name__), Path(cfg.OUTPUT_DIR) / EVALUATION_FILE
    content = {}
    for name, tasks in by_dataset.items():
        classes = MetadataCatalog.get(name).get("thing_classes", ())
        content[name] = {task: _as_json(metrics, classes) for task, metrics in tasks.items()}
        for line in explain_results(tasks):
            logger.info("%s, %s", name, line)
    write_text(path, json.dumps(content, indent=2) + "\n")
    logger.info("results written to %s", path)


def _as_json(metrics: Mapping[str, float], classes: Iterable[str]) -> dict[str, object]:
    written: dict[str, object] = {metric: _or_none(value) for metric, value in metrics.items()}
    classes, per_class = list(classes), {}
    for metric in _CLASS_METRICS:
        prefix = f"{metric}-"
        values = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        if metric == "AP" and "AP" in metrics and not values:
            # detectron2 omits them if there is a single class, and LVIS if there is no detection.
            values = dict.fromkeys(classes, metrics["AP"] if len(classes) == 1 else math.nan)
        for name, value in values.items():
            per_class.setdefault(name, {})[metric] = _or_none(value)
    return written | ({PER_CLASS: per_class} if per_class else {})


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def explain_results(results: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for the undefined metrics of each task (nan, or -1 in COCO's table), and for an AP of about 0.

    Args:
        results: Task -> metric -> value, as an evaluator returns them.
    """
    lines = []
    for task, metrics in results.items():
        ap, undefined = metrics.get("AP", math.inf), [name for name, value in metrics.items() if math.isnan(value)]
        if undefined:
            names = "AP is" if math.isnan(ap) else f"{first_of(undefined, 5)} {'is' if len(undefined) == 1 else 'are'}"
            what = ". On LVIS, AP also needs detections" if math.isnan(ap) else " of this size or class"
            lines.append(f"{task}: {names} undefined (nan, or -1 in COCO's table): no ground truth{what}")
        if ap < _LOW_AP:
            lines.append(
                f"{task}: AP is {ap:.3f}: possible reasons are few iterations, a different class order than in the "
                "weights, or boxes that are not left, top, width, height in pixels"
            )
    return lines
