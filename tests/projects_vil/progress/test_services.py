"""Weights & Biases and MLflow: one line where they are not installed, every scalar once where they are."""

import importlib.util

import pytest
from detectron2.utils.events import EventStorage

from backbones import InputError
from projects_vil.progress import build_service_writers, check_services
from tests.projects_vil.helpers import small_config

SERVICES = {"WANDB": "wandb", "MLFLOW": "mlflow"}


def test_none_is_asked_for():
    check_services(small_config())
    assert build_service_writers(small_config()) == []


@pytest.mark.parametrize(("key", "module"), SERVICES.items())
def test_what_is_not_installed_is_one_line(key, module, tmp_path, monkeypatch):
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    # A folder of that name, as wandb makes one, is no installation.
    (tmp_path / module).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=f"LOGGING.{key} is 'mine', and {module} is not installed: pip install"):
        check_services(small_config("retinanet", f"LOGGING.{key}", "mine"))


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
    experiment = client.get_experiment_by_name("mine").experiment_id
    (run,) = client.search_runs([experiment])
    history = client.get_metric_history(run.info.run_id, "total_loss")
    assert [(each.step, each.value) for each in history] == [(0, 3.0), (2, 1.0)]
    assert len(client.get_metric_history(run.info.run_id, "bbox/AP-big dog _old_")) == 3
    assert run.info.run_name == "run" and run.info.status == "FINISHED"


def test_wandb_keeps_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_two(small_config("retinanet", "LOGGING.WANDB", "mine", "OUTPUT_DIR", str(tmp_path)))
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert written.stat().st_size > 500
