"""Panoptic FPN on our backbone: a run and everything that follows it."""

import json

import pytest

from projects_vil import load_config
from projects_vil.engine.checks import check_values
from tests.projects_vil.helpers import message, run_tool
from tests.projects_vil.panoptic import CONFIG, SMALL_PANOPTIC, VAL, panoptic_config


def test_stuff_needs_masks():
    assert "MODEL.MASK_ON" in message(check_values, panoptic_config("MODEL.MASK_ON", "False"))


@pytest.mark.slow
def test_a_run(panoptic_root, tmp_path):
    run = tmp_path / "run"
    overrides = [*SMALL_PANOPTIC, "OUTPUT_DIR", run, "SOLVER.EPOCHS", 2, "TEST.VALIDATION_LOSS", True]
    overrides += ["TEST.NUM_VISUALIZED_IMAGES", 2, "TEST.BEST_METRIC", "sem_seg/mIoU"]
    result = run_tool("train_net.py", "--config-file", CONFIG, *overrides, datasets_root=panoptic_root)
    assert result.returncode == 0, result.stderr
    # Eight images, four in a batch.
    cfg = load_config(run / "config.yaml")
    assert (cfg.SOLVER.EPOCHS, cfg.SOLVER.MAX_ITER) == (0, 4)
    evaluation = json.loads((run / "evaluation.json").read_text())[VAL]
    assert evaluation.keys() == {"bbox", "segm", "sem_seg", "validation_loss"}
    assert 0 < evaluation["sem_seg"]["mIoU"] <= 100 and "loss_sem_seg" in evaluation["validation_loss"]
    assert (run / "model_best.pth").is_file() and len(list((run / "drawings").iterdir())) == 1
    model = ["--config-file", run / "config.yaml", "--weights", run / "model_final.pth", "--output", tmp_path / "out"]
    for name, options in (("export_model.py", ["--format", "torchscript"]), ("predict.py", ["--input", panoptic_root])):
        refused = run_tool(name, *model, *options, datasets_root=panoptic_root)
        assert refused.returncode == 1 and "PanopticFPN" in refused.stderr.splitlines()[-1]
    page = run_tool("report.py", run, datasets_root=panoptic_root)
    assert page.returncode == 0 and "mIoU" in (run / "report.html").read_text()
