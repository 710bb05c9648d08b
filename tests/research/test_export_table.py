"""The table of exports: each file is compared and measured, and a failure does not end the table."""

import json

import pytest
import torch

from projects_vil.export import ExportedModel
from research.export_table import available_formats, export_table, format_table
from tests.projects_vil.helpers import run_tool, small_config, untrained_detector

OVERRIDES = ["MODEL.FPN.OUT_CHANNELS", "32", "MODEL.RETINANET.NUM_CONVS", "1", "INPUT.MIN_SIZE_TEST", "64"]
OVERRIDES += ["MODEL.TRANSFORMER.NAME", "vil_tiny_1_1_3_1_rpb"]


@pytest.mark.slow
def test_a_trained_run_and_random_weights(tmp_path):
    run = tmp_path / "runs/retinanet_vil"
    run.mkdir(parents=True)
    cfg = small_config("retinanet", "MODEL.RETINANET.NUM_CLASSES", "5")
    (run / "config.yaml").write_text(cfg.dump())
    torch.save({"model": untrained_detector(cfg).state_dict()}, run / "model_final.pth")
    options = {"detectors": ["retinanet"], "families": ["vil"], "formats": ["torchscript"], "overrides": OVERRIDES}
    (row,) = export_table(tmp_path / "out", runs=tmp_path / "runs", **options | {"overrides": []})
    assert row["ok"] and row["trained"] and all(image["detections"] for image in row["images"][:-1])
    model = ExportedModel(tmp_path / "out/retinanet_vil/model.ts")
    assert len(model.metadata["classes"]) == 5 and row["bytes"] == model.path.stat().st_size
    assert f"({row['latency']['eager_ms']:.0f})" in format_table([row])
    (row,) = export_table(tmp_path / "random", **options)
    assert row["ok"] and not row["trained"]


@pytest.mark.slow
def test_a_failure_is_a_row_and_an_exit_status(tmp_path):
    (tmp_path / "out/retinanet_vil/model.ts").mkdir(parents=True)
    arguments = ["--output", tmp_path / "out", "--detectors", "retinanet", "--families", "vil", *OVERRIDES]
    arguments += ["--formats", "torchscript", "--precisions", "int8", "fp32", "--json", tmp_path / "table.json"]
    result = run_tool("../research/export_table.py", *arguments)
    assert result.returncode == 1 and "FAILED" in result.stdout and "left out" in result.stderr
    (row,) = json.loads((tmp_path / "table.json").read_text())
    assert not row["ok"] and "model.ts" in row["error"]


def test_formats_depend_on_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "aot_inductor" not in available_formats() and {"torchscript", "torch_export"} <= set(available_formats())
