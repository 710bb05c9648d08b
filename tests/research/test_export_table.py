"""The table of exports: each file is compared and measured, and a failure does not end the table."""

import json
import sys

import pytest
import torch

from projects_vil.export import ExportedModel
from research import export_table
from tests.projects_vil.helpers import small_config, untrained_detector

OVERRIDES = ["MODEL.FPN.OUT_CHANNELS", "32", "MODEL.RETINANET.NUM_CONVS", "1", "INPUT.MIN_SIZE_TEST", "64"]
OVERRIDES += ["MODEL.TRANSFORMER.VARIANT", "vil_tiny_1_1_3_1_rpb"]


def run(monkeypatch, folder, *args) -> tuple[int, list[dict]]:
    """Return the exit status and the rows of the table of one detector."""
    command = ["--output", folder / "out", "--detectors", "retinanet", "--families", "vil", *args]
    monkeypatch.setattr(sys, "argv", ["export_table", *map(str, command), "--json", str(folder / "table.json")])
    with pytest.raises(SystemExit) as end:
        export_table.main()
    return int(end.value.code), json.loads((folder / "table.json").read_text())["rows"]


@pytest.mark.slow
def test_a_trained_run(tmp_path, monkeypatch, capsys):
    cfg = small_config("retinanet", "MODEL.RETINANET.NUM_CLASSES", "5")
    (tmp_path / "runs/retinanet_vil").mkdir(parents=True)
    (tmp_path / "runs/retinanet_vil/config.yaml").write_text(cfg.dump())
    torch.save({"model": untrained_detector(cfg).state_dict()}, tmp_path / "runs/retinanet_vil/model_final.pth")
    status, (row,) = run(monkeypatch, tmp_path, "--runs", tmp_path / "runs", "--formats", "torchscript")
    assert status == 0 and row["ok"] and row["trained"] and all(image["detections"] for image in row["images"][:-1])
    model = ExportedModel(tmp_path / "out/retinanet_vil/model.ts")
    assert len(model.metadata["classes"]) == 5 and row["bytes"] == model.path.stat().st_size
    assert f"({row['latency']['eager_ms']:.0f})" in capsys.readouterr().out


@pytest.mark.slow
def test_failed_format_is_a_row_and_a_nonzero_exit_status(tmp_path, monkeypatch):
    """The weights are random, and TorchScript has no int8."""
    (tmp_path / "out/retinanet_vil/model.ts").mkdir(parents=True)
    arguments = [*OVERRIDES, "--formats", "torchscript", "--precisions", "int8", "fp32"]
    status, (row,) = run(monkeypatch, tmp_path, *arguments)
    assert status == 1 and not row["ok"] and not row["trained"] and "model.ts" in row["error"]
