"""Weights & Biases and MLflow, by a key of the config, where they are installed."""

import importlib.util
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import yaml
from detectron2.config import CfgNode
from detectron2.utils.events import EventWriter

from backbones import InputError
from projects_vil.config import one_line
from projects_vil.progress.scalars import scalars_after


class ServiceWriter(EventWriter):
    """Hands on every scalar once, under its iteration."""

    def __init__(self) -> None:
        self._last_write = -1

    def write(self) -> None:
        for iteration, values in scalars_after(self._last_write, finite=True):
            self.log(iteration, values)
            self._last_write = iteration

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        """Hand the values of one iteration on."""
        raise NotImplementedError


class WandbWriter(ServiceWriter):
    """A run at Weights & Biases, in the project of ``LOGGING.WANDB``; where and how is told by ``WANDB_...`` variables.

    A resumed run is one of its own there, in the group of its ``OUTPUT_DIR``.

    Raises:
        InputError: where wandb does not start.
    """

    def __init__(self, cfg: CfgNode) -> None:
        import wandb

        super().__init__()
        try:
            self.run = wandb.init(
                project=cfg.LOGGING.WANDB,
                group=Path(cfg.OUTPUT_DIR).resolve().name,
                dir=cfg.OUTPUT_DIR,
                config=yaml.safe_load(cfg.dump()),
            )
        except wandb.errors.Error as error:
            raise InputError(
                f"LOGGING.WANDB {cfg.LOGGING.WANDB}: {one_line(error)}; WANDB_MODE=offline keeps all in OUTPUT_DIR"
            ) from error

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=iteration)

    def close(self) -> None:
        self.run.finish()


class MlflowWriter(ServiceWriter):
    """A run of the MLflow experiment ``LOGGING.MLFLOW``, at ``MLFLOW_TRACKING_URI``.

    Raises:
        InputError: where the run cannot be made.
    """

    def __init__(self, cfg: CfgNode) -> None:
        import mlflow

        super().__init__()
        self.client, self.failed = mlflow.MlflowClient(), False
        self._error = mlflow.exceptions.MlflowException
        try:
            experiment = mlflow.set_experiment(cfg.LOGGING.MLFLOW).experiment_id
            run = self.client.create_run(experiment, run_name=Path(cfg.OUTPUT_DIR).resolve().name)
            self.run_id = run.info.run_id
            self.client.log_text(self.run_id, cfg.dump(), "config.yaml")
        except self._error as error:
            raise InputError(f"LOGGING.MLFLOW {cfg.LOGGING.MLFLOW}: {one_line(error)}") from error

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        try:
            for name, value in values.items():
                # MLflow has few characters for names.
                self.client.log_metric(self.run_id, re.sub(r"[^\w\-./ ]", "_", name), value, step=iteration)
        except self._error as error:
            # A server that is away for a while is no reason to end a run: metrics.json has all.
            if not self.failed:
                logging.getLogger(__name__).warning("MLflow: %s; training goes on", one_line(error))
            self.failed = True

    def close(self) -> None:
        try:
            self.client.set_terminated(self.run_id)
        except self._error as error:
            logging.getLogger(__name__).warning("MLflow: %s", one_line(error))


# Key of LOGGING, module, writer.
_SERVICES = (("WANDB", "wandb", WandbWriter), ("MLFLOW", "mlflow", MlflowWriter))


def check_services(cfg: CfgNode) -> None:
    """Whether what a config logs to is installed.

    Raises:
        InputError: where not.
    """
    for key, module, _ in _SERVICES:
        found = importlib.util.find_spec(module) if cfg.LOGGING[key] else None
        # A folder of that name, which wandb makes, is found too, and has no file.
        if cfg.LOGGING[key] and (found is None or found.origin is None):
            raise InputError(
                f"LOGGING.{key} is {cfg.LOGGING[key]!r}, and {module} is not installed: pip install {module}, or leave "
                "the key empty"
            )


def build_service_writers(cfg: CfgNode) -> list[EventWriter]:
    """A writer for each service that the config names."""
    return [writer(cfg) for key, _, writer in _SERVICES if cfg.LOGGING[key]]
