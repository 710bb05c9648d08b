"""Where the metrics of a run go: a line of the log, metrics.json, a progress bar, Weights & Biases and MLflow."""

import contextlib
import importlib.util
import json
import logging
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
import yaml
from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.utils.events import CommonMetricPrinter, EventWriter, JSONWriter, get_event_storage
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from projects_vil.config import one_line
from projects_vil.utils import concerns_a_user, memory_of

# Writers take the median of so many values, as in detectron2.
WINDOW = 20
_LOGGERS = ("fvcore", "detectron2", "projects_vil", "backbones")


def _scalars_after(iteration: float) -> list[tuple[int, dict[str, float]]]:
    """The scalars logged after ``iteration``, smoothed, by iteration; an evaluation's may be older than the losses'."""
    new: dict[int, dict[str, float]] = defaultdict(dict)
    for name, (value, when) in get_event_storage().latest_with_smoothing_hint(WINDOW).items():
        if when > iteration:
            new[when][name] = value
    return sorted(new.items())


class MetricPrinter(CommonMetricPrinter):
    """detectron2's line of the log, with evaluations, images per second, the share of time spent waiting for data, and
    the process' memory.

    Args:
        max_iter: of the run.
        batch_size: images per iteration in all processes.
    """

    def __init__(self, max_iter: int, *, batch_size: int) -> None:
        super().__init__(max_iter)
        self.batch_size = batch_size
        self._last_iteration: int | None = None

    def write(self) -> None:
        storage = get_event_storage()
        # detectron2 estimates the time left from the iterations since the last line.
        if storage.iter in (self._max_iter, self._last_iteration):
            return
        self._last_iteration = storage.iter
        eta, names = self._get_eta(storage), storage.histories()
        smoothed = storage.latest_with_smoothing_hint(self._window_size)
        parts = [f"eta: {eta}"] if eta else []
        parts.append(f"iter: {storage.iter}")
        shown = [name for name in names if "loss" in name or "[metric]" in name or name == "gradient_norm"]
        parts += [f"{name}: {smoothed[name][0]:.4g}" for name in shown]
        if "lr" in names:
            parts.append(f"lr: {names['lr'].latest():.5g}")
        if "time" in names:
            samples = storage.count_samples("time", self._window_size)
            seconds = max(names["time"].avg(samples), 1e-9)
            parts += [f"time: {seconds:.4f}", f"images/s: {self.batch_size / seconds:.3g}"]
            if "data_time" in names:
                waiting = names["data_time"].avg(samples)
                parts.append(f"data_time: {waiting:.4f} ({min(waiting / seconds, 1):.0%} waiting)")
        if torch.cuda.is_initialized():
            parts.append(f"max_mem: {torch.cuda.max_memory_allocated() / 2**20:.0f}M")
        memory = memory_of(peak=True)
        if memory is not None:
            parts.append(f"max_rss: {memory / 2**20:.0f}M")
        self.logger.info(" %s", "  ".join(parts))


class MetricsFile(JSONWriter):
    """detectron2's ``metrics.json``, in which a resumed run repeats no iteration.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), WINDOW)
        self.path = path

    def start(self, first_iteration: int) -> None:
        """Remove the lines of ``first_iteration`` and later ones, and an incomplete last line."""
        self.close()
        lines = self.path.read_text().splitlines()
        kept = [line for line in lines if _iteration(line) < first_iteration]
        if len(kept) < len(lines):
            with atomic_write(self.path) as partial:
                partial.write_text("".join(f"{line}\n" for line in kept))
        super().__init__(str(self.path), WINDOW)
        self._last_write = max(map(_iteration, kept), default=-1)

    def write(self) -> None:
        # Not detectron2's: its last iteration is not known after a resume, and nothing is synced to the disk.
        for iteration, values in _scalars_after(self._last_write):
            line = json.dumps(values | {"iteration": iteration}, sort_keys=True)
            self._file_handle.write(f"{line}\n")
            self._last_write = iteration
        self._file_handle.flush()
        os.fsync(self._file_handle.fileno())


def _iteration(line: str) -> float:
    try:
        return json.loads(line)["iteration"]
    except (ValueError, KeyError, TypeError):
        return math.inf


class ProgressBar(HookBase):
    """tqdm's bar on stderr, above which the log is written; none where stderr is not a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._redirected = contextlib.ExitStack()

    def before_train(self) -> None:
        if not sys.stderr.isatty():
            return
        trainer, loggers = self.trainer, [logging.getLogger(name) for name in _LOGGERS]
        self._bar = tqdm(initial=trainer.start_iter, total=trainer.max_iter, unit="it", dynamic_ncols=True, leave=False)
        self._redirected.enter_context(logging_redirect_tqdm(loggers))
        for logger in loggers:
            # tqdm's own handler replaces that of the console.
            logger.handlers[-1].addFilter(concerns_a_user)

    def after_step(self) -> None:
        if self._bar is not None:
            loss = self.trainer.storage.latest().get("total_loss")
            if loss is not None:
                self._bar.set_postfix_str(f"total_loss {loss[0]:.4g}", refresh=False)
            self._bar.update()

    def after_train(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._redirected.close()


# -- services, which are imported only where a key of LOGGING names them ---------------------------


class ServiceWriter(EventWriter):
    """Passes each finite scalar on to a service once, with its iteration."""

    def __init__(self) -> None:
        self._last_write = -1

    def write(self) -> None:
        for iteration, values in _scalars_after(self._last_write):
            self.log(iteration, {name: value for name, value in values.items() if math.isfinite(value)})
            self._last_write = iteration

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        """Pass the values of one iteration on."""
        raise NotImplementedError


class WandbWriter(ServiceWriter):
    """A run at Weights & Biases, in the project of ``LOGGING.WANDB``, configured by ``WANDB_...`` variables.

    A resumed run is a new run there, in the group of its ``OUTPUT_DIR``.

    Raises:
        ConfigError: if wandb does not start.
    """

    def __init__(self, cfg: CfgNode) -> None:
        import wandb

        super().__init__()
        group, config = Path(cfg.OUTPUT_DIR).resolve().name, yaml.safe_load(cfg.dump())
        try:
            self.run = wandb.init(project=cfg.LOGGING.WANDB, group=group, dir=cfg.OUTPUT_DIR, config=config)
        except wandb.errors.Error as error:
            raise ConfigError(f"LOGGING.WANDB: {one_line(error)} (or set WANDB_MODE=offline)") from error

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=iteration)

    def close(self) -> None:
        self.run.finish()


class MlflowWriter(ServiceWriter):
    """A run of the MLflow experiment ``LOGGING.MLFLOW``, at ``MLFLOW_TRACKING_URI``.

    Raises:
        ConfigError: if the run cannot be created.
    """

    def __init__(self, cfg: CfgNode) -> None:
        import mlflow

        super().__init__()
        self.client, self.failed = mlflow.MlflowClient(), False
        self._error = mlflow.exceptions.MlflowException
        try:
            experiment = mlflow.set_experiment(cfg.LOGGING.MLFLOW).experiment_id
            self.run_id = self.client.create_run(experiment, run_name=Path(cfg.OUTPUT_DIR).resolve().name).info.run_id
            self.client.log_text(self.run_id, cfg.dump(), "config.yaml")
        except self._error as error:
            raise ConfigError(f"LOGGING.MLFLOW: {one_line(error)}") from error

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        try:
            for name, value in values.items():
                # MLflow allows few characters in names.
                self.client.log_metric(self.run_id, re.sub(r"[^\w\-./ ]", "_", name), value, step=iteration)
        except self._error as error:
            # metrics.json has everything: a server that is down for a while need not end a run.
            if not self.failed:
                logging.getLogger(__name__).warning("MLflow: %s; training continues", one_line(error))
            self.failed = True

    def close(self) -> None:
        with contextlib.suppress(self._error):
            self.client.set_terminated(self.run_id)


_SERVICES = {"WANDB": ("wandb", WandbWriter), "MLFLOW": ("mlflow", MlflowWriter)}


def check_services(cfg: CfgNode) -> None:
    """Raise a ConfigError if a service that the config logs to is not installed."""
    for key, (module, _) in _SERVICES.items():
        found = importlib.util.find_spec(module) if cfg.LOGGING[key] else None
        # wandb leaves folders of its name, which are found too, without an origin.
        if cfg.LOGGING[key] and (found is None or found.origin is None):
            raise ConfigError(
                f"LOGGING.{key} is {cfg.LOGGING[key]!r}, and {module} is not installed: pip install {module}"
            )


def build_service_writers(cfg: CfgNode) -> list[EventWriter]:
    """Build a writer for each service that the config names."""
    return [writer(cfg) for key, (_, writer) in _SERVICES.items() if cfg.LOGGING[key]]
