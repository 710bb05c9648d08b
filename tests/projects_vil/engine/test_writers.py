"""Metric writers: the log, metrics.json, Weights & Biases and MLflow."""

import importlib.util
import json
import types

import pytest
from detectron2.utils.events import EventStorage

from backbones import ConfigError
from projects_vil.engine.checks import check_setup
from projects_vil.engine.hooks import SERVICES, MetricPrinter, MetricsFile, ProgressBar
from tests.projects_vil.helpers import small_config


def test_the_log_and_metrics_json(tmp_path):
    """Times are means of the last iterations, gradient norms are medians, and an iteration is logged once."""
    lines, printer, file = [], MetricPrinter(100, batch_size=8), MetricsFile(tmp_path / "metrics.json")
    printer.logger = types.SimpleNamespace(info=lambda *line: lines.append(line[-1]))
    with EventStorage(0) as storage:
        for iteration in range(40):
            storage.iter = iteration
            storage.put_scalars(total_loss=1.0 + iteration % 2, lr=1e-4, time=2.0 if iteration >= 20 else 9.0)
            storage.put_scalars(data_time=0.5, gradient_norm=900.0 if iteration > 37 else 3.0)
            if iteration in (0, 39):
                for writer in (printer, printer, file):
                    writer.write()
    assert len(lines) == 4 and "iter: 0 " in lines[0] and "iter: 39 " in lines[2] and "eta: 0:0" in lines[2]
    assert all(part in lines[3] for part in ("iter: 39 ", "gradient_norm: 3 ", "images/s: 4 ", "data_wait: 25%")), lines
    assert json.loads((tmp_path / "metrics.json").read_text().splitlines()[-1])["gradient_norm"] == 3.0


def test_a_line_per_epoch_in_a_terminal(capsys, monkeypatch):
    """Three images in batches of two: the epochs end after iterations 2 and 3."""
    monkeypatch.setenv("COLUMNS", "200")
    bar, cfg = ProgressBar(3), small_config("retinanet", "SOLVER.IMS_PER_BATCH", "2")
    with EventStorage(0) as storage:
        for iteration in range(3):
            bar.trainer = types.SimpleNamespace(iter=iteration, max_iter=3, cfg=cfg, storage=storage)
            storage.put_scalars(total_loss=3.0, loss_cls=1.5, time=2.0)
            bar.after_step()
            storage.step()
    first, second, _ = (line.rpartition("\r")[2] for line in capsys.readouterr().out.split("\n"))
    assert all(part in first for part in ("epoch 1/2", "2/2", "eta 0:00:02", "1 images/s", "total_loss 3", "cls 1.5"))
    assert all(part in second for part in ("epoch 2/2", "1/1", "eta 0:00:00"))


def test_a_resumed_run_removes_later_iterations_and_an_incomplete_line(tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text('{"iteration": 3, "a": 1}\n{"iteration": 7, "a": 2}\n{"iteration": 11, "a"')
    MetricsFile(path, first_iteration=7).close()
    assert path.read_text() == '{"iteration": 3, "a": 1}\n'


@pytest.mark.parametrize("module", ["wandb", "mlflow"])
def test_a_service_that_is_not_installed(module, shapes, tmp_path, monkeypatch):
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    # wandb writes a folder of its name.
    (tmp_path / module).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    key = {"wandb": "LOGGING.WANDB_PROJECT", "mlflow": "LOGGING.MLFLOW_EXPERIMENT"}[module]
    with pytest.raises(ConfigError, match=key):
        check_setup(small_config("retinanet", key, "mine"))


def write_two(cfg) -> None:
    (writer,) = (build(cfg) for key, (_, build) in SERVICES.items() if cfg.LOGGING[key])
    with EventStorage(0) as storage:
        for iteration, loss in enumerate((3.0, float("nan"), 1.0)):
            storage.iter = iteration
            storage.put_scalars(**{"total_loss": loss, "bbox/AP-big dog (old)": 7.0}, smoothing_hint=False)
            writer.write()
            writer.write()
    writer.close()


def test_mlflow_logs_every_scalar_once(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path / 'mlruns'}")
    write_two(small_config("retinanet", "LOGGING.MLFLOW_EXPERIMENT", "mine", "OUTPUT_DIR", str(tmp_path / "run")))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    history = client.get_metric_history(run.info.run_id, "total_loss")
    assert [(each.step, each.value) for each in history] == [(0, 3.0), (2, 1.0)]
    assert len(client.get_metric_history(run.info.run_id, "bbox/AP-big dog _old_")) == 3
    assert run.info.run_name == "run" and run.info.status == "FINISHED"


def test_wandb_logs_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_two(small_config("retinanet", "LOGGING.WANDB_PROJECT", "mine", "OUTPUT_DIR", str(tmp_path)))
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert written.stat().st_size > 0
