"""Metric writers for the log, metrics.json, Weights & Biases and MLflow."""

import contextlib
import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import yaml
from detectron2.config import CfgNode
from detectron2.utils.events import CommonMetricPrinter, EventWriter, JSONWriter, get_event_storage
from detectron2.utils.logger import log_first_n

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from projects_vil.config import one_line
from projects_vil.utils import memory_of

# Writers report the median of this many values, as in detectron2.
SMOOTHING_WINDOW = 20


class MetricPrinter(CommonMetricPrinter):
    """detectron2's log line, and a second line with gradient norm, images per second, data wait and memory.

    Args:
        max_iter: number of iterations of the run.
        batch_size: images per iteration in all processes.
    """

    def __init__(self, max_iter: int, *, batch_size: int) -> None:
        super().__init__(max_iter)
        self.batch_size = batch_size
        self._last_iteration: int | None = None

    def write(self) -> None:
        storage = get_event_storage()
        # detectron2 estimates the remaining time from the iterations since the last line.
        if storage.iter in (self._max_iter, self._last_iteration):
            return
        self._last_iteration = storage.iter
        super().write()
        histories, parts = storage.histories(), [f"iter: {storage.iter}"]
        if "gradient_norm" in histories:
            # The median, as in metrics.json.
            norm, _ = storage.latest_with_smoothing_hint(SMOOTHING_WINDOW)["gradient_norm"]
            parts.append(f"gradient_norm: {norm:.4g}")
        if histories.keys() >= {"time", "data_time"}:
            seconds, waited = (
                histories[name].avg(storage.count_samples(name, SMOOTHING_WINDOW)) for name in ("time", "data_time")
            )
            parts.append(f"images/s: {self.batch_size / seconds:.3g}")
            parts.append(f"data_wait: {min(waited / seconds, 1):.0%}")
        if (memory := memory_of(peak=True)) is not None:
            parts.append(f"max_rss: {memory / 2**20:.0f}M")
        self.logger.info(" %s", "  ".join(parts))


class MetricsFile(JSONWriter):
    """detectron2's writer of ``metrics.json``, without repeated iterations in a resumed run.

    Args:
        path: the file. An incomplete last line, and the lines of ``first_iteration`` and later iterations, are removed.
        first_iteration: first iteration of the run.
    """

    def __init__(self, path: Path, *, first_iteration: int = 0) -> None:
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        kept = [line for line in lines if _iteration(line) < first_iteration]
        if len(kept) < len(lines):
            with atomic_write(path) as partial:
                partial.write_text("".join(f"{line}\n" for line in kept))
        super().__init__(str(path), SMOOTHING_WINDOW)
        self._last_write = max(map(_iteration, kept), default=-1)


def _iteration(line: str) -> float:
    try:
        return int(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


# -- services, imported only if a key of LOGGING enables them --------------------------------------


class ServiceWriter(EventWriter):
    """Log each finite scalar to a service once, with its iteration.

    Args:
        log: function of a dict of scalars and their iteration.
        close: function that ends the run of the service.
    """

    def __init__(self, log: Callable[[dict[str, float], int], object], close: Callable[[], object]) -> None:
        self.log = log
        self.close = close
        self._last_write = -1

    def write(self) -> None:
        new: dict[int, dict[str, float]] = defaultdict(dict)
        for name, (value, iteration) in get_event_storage().latest_with_smoothing_hint(SMOOTHING_WINDOW).items():
            if iteration > self._last_write and math.isfinite(value):
                new[iteration][name] = value
        for iteration, values in sorted(new.items()):
            self.log(values, iteration)
            self._last_write = iteration


def wandb_writer(cfg: CfgNode) -> ServiceWriter:
    """Start a Weights & Biases run in the project ``LOGGING.WANDB_PROJECT``.

    ``WANDB_...`` environment variables configure it. A resumed run is a new run in the group named after its
    ``OUTPUT_DIR``.

    Raises:
        ConfigError: if wandb does not start.
    """
    import wandb

    group, config = Path(cfg.OUTPUT_DIR).resolve().name, yaml.safe_load(cfg.dump())
    try:
        run = wandb.init(project=cfg.LOGGING.WANDB_PROJECT, group=group, dir=cfg.OUTPUT_DIR, config=config)
    except wandb.errors.Error as error:
        reason = one_line(error).rstrip(".")
        raise ConfigError(f"LOGGING.WANDB_PROJECT: {reason}. Fix this, or set WANDB_MODE=offline.") from error
    return ServiceWriter(lambda values, iteration: run.log(values, step=iteration), run.finish)


def mlflow_writer(cfg: CfgNode) -> ServiceWriter:
    """Start an MLflow run in the experiment ``LOGGING.MLFLOW_EXPERIMENT``, at ``MLFLOW_TRACKING_URI``.

    Raises:
        ConfigError: if the run cannot be created.
    """
    import mlflow

    client = mlflow.MlflowClient()
    try:
        experiment = mlflow.set_experiment(cfg.LOGGING.MLFLOW_EXPERIMENT).experiment_id
        run_id = client.create_run(experiment, run_name=Path(cfg.OUTPUT_DIR).resolve().name).info.run_id
        client.log_text(run_id, cfg.dump(), "config.yaml")
    except mlflow.exceptions.MlflowException as error:
        reason = one_line(error).rstrip(".")
        raise ConfigError(f"LOGGING.MLFLOW_EXPERIMENT: {reason}. Check MLFLOW_TRACKING_URI.") from error

    def log(values: dict[str, float], iteration: int) -> None:
        try:
            for name, value in values.items():
                # MLflow allows only these characters in names.
                client.log_metric(run_id, re.sub(r"[^\w\-./ ]", "_", name), value, step=iteration)
        except mlflow.exceptions.MlflowException as error:
            # metrics.json has all values, so a server failure need not end the run.
            log_first_n(logging.WARNING, f"MLflow: {one_line(error)}; training continues", name=__name__)

    def close() -> None:
        with contextlib.suppress(mlflow.exceptions.MlflowException):
            client.set_terminated(run_id)

    return ServiceWriter(log, close)


# Key of LOGGING -> the package and the writer of a service.
SERVICES = {"WANDB_PROJECT": ("wandb", wandb_writer), "MLFLOW_EXPERIMENT": ("mlflow", mlflow_writer)}
