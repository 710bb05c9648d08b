"""The line of the log, metrics.json, the progress bar on a real terminal, Weights & Biases and MLflow."""

import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import select
import struct
import sys
import termios
import types
from contextlib import redirect_stderr, redirect_stdout

import pytest
from detectron2.engine.train_loop import TrainerBase
from detectron2.utils.events import EventStorage

from backbones import ConfigError
from projects_vil.engine.writers import (
    MetricPrinter,
    MetricsFile,
    ProgressBar,
    build_service_writers,
    check_services,
)
from tests.projects_vil.helpers import small_config


def test_the_line_of_the_log():
    """Losses and times are smoothed, evaluations are not; an iteration is logged once."""
    lines, printer = [], MetricPrinter(100, batch_size=8)
    printer.logger = types.SimpleNamespace(info=lambda text, line: lines.append(line))
    with EventStorage(0) as storage:
        for iteration in range(40):
            storage.iter = iteration
            storage.put_scalars(total_loss=1.0 + iteration % 2, lr=1e-4, time=2.0 if iteration >= 20 else 9.0)
            storage.put_scalar("data_time", 0.5)
            storage.put_scalar("validation_loss/total_loss", iteration, smoothing_hint=False)
            if iteration in (0, 39):
                printer.write()
                printer.write()
    first, line = lines
    assert "iter: 0  " in first
    expected = ("iter: 39  ", "total_loss: 1.5  ", "validation_loss/total_loss: 39  ", "lr: 0.0001  ", "eta: 0:0")
    assert all(part in line for part in (*expected, "images/s: 4  ", "(25% waiting)", "max_rss: ")), line


def test_metrics_of_later_iterations_and_an_incomplete_line_are_removed(tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text('{"iteration": 3, "a": 1}\n{"iteration": 7, "a": 2}\n{"iteration": 11, "a"')
    file = MetricsFile(path)
    file.start(7)
    file.close()
    assert path.read_text() == '{"iteration": 3, "a": 1}\n'


def test_an_evaluation_precedes_the_losses_after_it(tmp_path):
    file = MetricsFile(tmp_path / "metrics.json")
    with EventStorage() as storage:
        storage.put_scalar("total_loss", 2.0, cur_iter=5)
        storage.put_scalar("bbox/AP", 40.0, smoothing_hint=False, cur_iter=3)
        file.write()
        storage.put_scalar("total_loss", 4.0, cur_iter=6)
        file.write()
        file.write()
    file.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    # Losses are medians.
    expected = [
        {"bbox/AP": 40.0, "iteration": 3},
        {"iteration": 5, "total_loss": 2.0},
        {"iteration": 6, "total_loss": 3.0},
    ]
    assert lines == expected


class Counting(TrainerBase):
    """Trains nothing, and logs a line in the middle."""

    def run_step(self) -> None:
        self.storage.put_scalar("total_loss", 0.25)
        if self.iter == 2:
            logging.getLogger("projects_vil.test").info("a line")


@contextlib.contextmanager
def terminal():
    """stdout and stderr are a terminal of 100 columns; yields a list of what it shows, filled at the end."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    shown = []
    try:
        with open(writer, "w") as stream, redirect_stdout(stream), redirect_stderr(stream):
            yield shown
            stream.flush()
            while select.select([reader], [], [], 0.2)[0]:
                shown.append(os.read(reader, 1 << 16).decode())
    finally:
        os.close(reader)


def count(stream) -> None:
    logger = logging.getLogger("projects_vil")
    handler, level = logging.StreamHandler(stream), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        trainer = Counting()
        trainer.register_hooks([ProgressBar()])
        trainer.train(1, 5)
        assert handler in logger.handlers
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_a_terminal_shows_a_bar_below_the_log():
    with terminal() as parts:
        count(sys.stdout)
    shown = "".join(parts)
    assert "| 1/5" in shown and "total_loss 0.25" in shown and "\ra line\r\n" in shown


def test_a_pipe_or_a_file_shows_no_bar(capsys):
    count(sys.stdout)
    assert capsys.readouterr() == ("a line\n", "")


@pytest.mark.parametrize("module", ["wandb", "mlflow"])
def test_a_service_that_is_not_installed(module, tmp_path, monkeypatch):
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    # wandb leaves folders of its name.
    (tmp_path / module).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    key = f"LOGGING.{module.upper()}"
    with pytest.raises(ConfigError, match=key):
        check_services(small_config("retinanet", key, "mine"))
    assert build_service_writers(small_config()) == []


def write_two(cfg) -> None:
    check_services(cfg)
    (writer,) = build_service_writers(cfg)
    with EventStorage(0) as storage:
        for iteration, loss in enumerate((3.0, float("nan"), 1.0)):
            storage.iter = iteration
            storage.put_scalars(**{"total_loss": loss, "bbox/AP-big dog (old)": 7.0}, smoothing_hint=False)
            writer.write()
            writer.write()
    writer.close()


def test_mlflow_has_every_scalar_once(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path / 'mlruns'}")
    write_two(small_config("retinanet", "LOGGING.MLFLOW", "mine", "OUTPUT_DIR", str(tmp_path / "run")))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    history = client.get_metric_history(run.info.run_id, "total_loss")
    assert [(each.step, each.value) for each in history] == [(0, 3.0), (2, 1.0)]
    assert len(client.get_metric_history(run.info.run_id, "bbox/AP-big dog _old_")) == 3
    assert run.info.run_name == "run" and run.info.status == "FINISHED"


def test_wandb_keeps_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_two(small_config("retinanet", "LOGGING.WANDB", "mine", "OUTPUT_DIR", str(tmp_path)))
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert written.stat().st_size > 0
