"""The file of a run's results."""

import hashlib
import json
import logging
import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog

from backbones import InputError
from backbones.utils.files import written_whole
from projects_vil.evaluation.explaining import class_values, explain_results

RESULTS_FILE = "evaluation.json"
# Beside it: which model was evaluated. The results themselves have nothing but datasets at their top.
EVALUATED_FILE = "evaluation.model.json"
# Under which a task's results have those of each class.
PER_CLASS = "per_class"
# What evaluators give for each class, as in AP-dog.
_CLASS_METRICS = ("AP", "IoU", "ACC")


def write_results(cfg: CfgNode, results: OrderedDict, *, model: str | None = None) -> None:
    """Write ``OUTPUT_DIR/evaluation.json``, and log why a metric is not a number or about 0.

    The file has dataset -> task -> metric, and under ``per_class`` beside a task's metrics class -> metric; a metric
    that is not defined is null. Where the model is known, ``evaluation.model.json`` beside it says which it was.

    Args:
        cfg: names the datasets and the folder.
        results: of the evaluators.
        model: the fingerprint of what was evaluated.
    """
    names = cfg.DATASETS.TEST
    by_dataset = {names[0]: results} if len(names) == 1 else results
    logger = logging.getLogger(__name__)
    content = {
        name: {task: _as_json(metrics, _class_names(name)) for task, metrics in tasks.items()}
        for name, tasks in by_dataset.items()
    }
    path = Path(cfg.OUTPUT_DIR) / RESULTS_FILE
    for file, text in results_as_files(content, model=model).items():
        with written_whole(path.with_name(file)) as partial:
            partial.write_text(text)
    for name, tasks in by_dataset.items():
        for line in explain_results(tasks):
            logger.info("%s, %s", name, line)
    logger.info("results written to %s", path)


def results_as_files(content: Mapping[str, Mapping[str, object]], *, model: str | None) -> dict[str, str]:
    """File name -> text of what :func:`write_results` writes, ``content`` being dataset -> task -> metric."""
    text = json.dumps(content, indent=2) + "\n"
    files = {RESULTS_FILE: text}
    if model is not None:
        files[EVALUATED_FILE] = json.dumps({"model": model, RESULTS_FILE: _digest(text)}, indent=2) + "\n"
    return files


def read_results(folder: str | Path, *, model: str) -> dict[str, dict[str, dict[str, object]]] | None:
    """What ``evaluation.json`` of a folder says of a model: dataset -> task -> metric; None where there is no file.

    Args:
        folder: ``OUTPUT_DIR`` of a run.
        model: the fingerprint of the model.

    Raises:
        InputError: where the file is of another model, or nothing says of which.
    """
    path = Path(folder) / RESULTS_FILE
    beside = path.with_name(EVALUATED_FILE)
    if not path.is_file():
        return None
    again = "evaluate again, with tools/train_net.py --eval-only"
    try:
        text = path.read_text()
        content = json.loads(text)
        said = json.loads(beside.read_text()) if beside.is_file() else {}
        evaluated, results = said.get("model"), said.get(RESULTS_FILE)
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path} or {beside.name} beside it is damaged: {again}") from error
    if results != _digest(text):
        raise InputError(f"{path} does not say which model it is of (no {beside.name} fits it): {again}")
    if evaluated != model:
        raise InputError(f"{path} is of other weights, or of other settings for testing: {again}")
    return content


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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
