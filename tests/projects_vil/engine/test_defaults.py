"""What a run leaves behind, what is checked before one, and that resuming goes on where it stopped."""

import json
import math
import shutil

import pytest
import torch

from projects_vil import load_config
from projects_vil.checkpoint import build_detector
from projects_vil.data import register_datasets
from projects_vil.engine import Trainer, check_setup
from tests.projects_vil.helpers import CONFIGS, SMALL, run_tool, small_config
from tests.selection import slow_except


def read_json(path):
    def refuse(name: str):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def weights(path) -> torch.Tensor:
    """All parameters in one vector."""
    state = torch.load(path, weights_only=True)["model"]
    return torch.cat([tensor.flatten() for tensor in state.values()])


# -- a run -----------------------------------------------------------------------------------------


def test_what_a_run_leaves_behind(trained_run):
    names = {path.name for path in trained_run.iterdir()}
    assert names >= {"config.yaml", "log.txt", "metrics.json", "evaluation.json", "last_checkpoint"}
    assert names >= {"model_0000001.pth", "model_final.pth", "inference"}
    cfg = load_config(trained_run / "config.yaml")
    assert (cfg.SOLVER.MAX_ITER, cfg.OUTPUT_DIR, cfg.MODEL.FPN.OUT_CHANNELS) == (4, str(trained_run), 32)


def test_what_a_run_shows(trained_run):
    """What concerns its user, each once; the log has the rest."""
    shown, written = (trained_run / "stdout.txt").read_text(), (trained_run / "log.txt").read_text()
    results = f"results written to {trained_run / 'evaluation.json'}"
    for text in (results, "Distribution of instances among all 3 categories", "training RetinaNet with vil_tiny_1_1"):
        assert shown.count(text) == written.count(text) == 1, text
    assert shown.count("APl is not a number: the dataset has no large objects") == 1
    assert shown.count("images/s: ") == shown.count("max_rss: ") == shown.count("  iter: ") == 1
    for text in ("Running with full config", "Environment info", "Model:\n", "Serializing"):
        assert text not in shown and text in written, text
    assert "not built correctly" not in written
    assert len(shown.splitlines()) < 80


def test_a_run_trains_with_this_projects_groups(trained_run):
    final = torch.load(trained_run / "model_final.pth", weights_only=True)
    assert final["iteration"] == 3
    optimizer = final["trainer"]["_trainer"]["optimizer"]
    assert sorted(group["weight_decay"] for group in optimizer["param_groups"]) == [0.0, 0.1]
    assert {int(state["step"]) for state in optimizer["state"].values()} == {4}
    assert (weights(trained_run / "model_0000001.pth") != weights(trained_run / "model_final.pth")).any()


def test_losses_and_metrics_are_written(trained_run):
    lines = [json.loads(line) for line in (trained_run / "metrics.json").read_text().splitlines()]
    losses = [line["total_loss"] for line in lines if "total_loss" in line]
    assert losses and all(map(math.isfinite, losses))
    assert all(line["gradient_norm"] > 0 for line in lines if "total_loss" in line)
    assert any("bbox/AP" in line for line in lines)


def test_evaluation_file_of_a_run(trained_run):
    content = read_json(trained_run / "evaluation.json")
    assert content.keys() == {"shapes_val"} and content["shapes_val"].keys() == {"bbox"}
    metrics = content["shapes_val"]["bbox"]
    classes = {"AP-circle", "AP-square", "AP-triangle"}
    per_class = metrics.pop("per_class")
    assert metrics.keys() == {"AP", "AP50", "AP75", "APs", "APm", "APl"} | classes
    assert per_class == {name.removeprefix("AP-"): {"AP": metrics[name]} for name in classes}
    assert 0 <= metrics["AP"] <= metrics["AP50"] <= 100
    # No object of these images is large.
    assert metrics["APl"] is None


@pytest.mark.slow
def test_evaluating_again_gives_the_same(trained_run, datasets_root, tmp_path):
    config, weights, output = trained_run / "config.yaml", trained_run / "model_final.pth", tmp_path / "config.yaml"
    command = ["--config-file", config, "--eval-only", "MODEL.WEIGHTS", weights, "OUTPUT_DIR", tmp_path]
    output.write_text("# of another evaluation\n")
    result = run_tool("train_net.py", *command, datasets_root=datasets_root)
    assert result.returncode == 0, result.stderr
    assert read_json(tmp_path / "evaluation.json") == read_json(trained_run / "evaluation.json")
    assert not list(tmp_path.glob("*.pth"))
    assert f"OUTPUT_DIR: {tmp_path}" in output.read_text()

    # What a run is trained with stays there, in whatever way it is evaluated, before its first checkpoint too.
    for trace in ("metrics.json", "model_best.pth"):
        output.write_text("# of the run\n")
        (tmp_path / trace).touch()
        result = run_tool("train_net.py", *command, datasets_root=datasets_root)
        assert result.returncode == 0, result.stderr
        assert output.read_text() == "# of the run\n"
        (tmp_path / trace).unlink()


@pytest.mark.slow
def test_resuming_goes_on_where_the_run_stopped(trained_run, datasets_root, tmp_path):
    shutil.copy(trained_run / "model_0000001.pth", tmp_path)
    (tmp_path / "last_checkpoint").write_text("model_0000001.pth")
    arguments = ["--config-file", trained_run / "config.yaml", "--resume", "OUTPUT_DIR", tmp_path]
    result = run_tool("train_net.py", *arguments, "DATASETS.TEST", "()", datasets_root=datasets_root)
    assert result.returncode == 0, result.stderr
    assert "Starting training from iteration 2" in result.stdout

    stopped, finished, resumed = (
        weights(folder / name)
        for folder, name in [
            (trained_run, "model_0000001.pth"),
            (trained_run, "model_final.pth"),
            (tmp_path, "model_final.pth"),
        ]
    )
    # Equal but for the order of sums; without the optimizer's state or the schedule far more differs.
    assert (finished - resumed).norm() < 0.05 * (finished - stopped).norm()
    states = [torch.load(folder / "model_final.pth", weights_only=True) for folder in (trained_run, tmp_path)]
    assert [state["iteration"] for state in states] == [3, 3]
    optimizers = [state["trainer"]["_trainer"]["optimizer"] for state in states]
    assert {int(state["step"]) for state in optimizers[1]["state"].values()} == {4}
    rates = [[group["lr"] for group in optimizer["param_groups"]] for optimizer in optimizers]
    assert rates[0] == pytest.approx(rates[1])


@pytest.mark.slow
def test_mask_rcnn_trains_and_reports_both_tasks(datasets_root, tmp_path):
    few = ["SOLVER.MAX_ITER", "2", "SOLVER.IMS_PER_BATCH", "2", "OUTPUT_DIR", tmp_path]
    config = CONFIGS["mask_rcnn"]
    result = run_tool("train_net.py", "--config-file", config, *SMALL["mask_rcnn"], *few, datasets_root=datasets_root)
    assert result.returncode == 0, result.stderr
    content = read_json(tmp_path / "evaluation.json")["shapes_val"]
    assert content.keys() == {"bbox", "segm"}
    losses = json.loads((tmp_path / "metrics.json").read_text().splitlines()[0])
    assert {name for name in losses if name.startswith("loss_")} == {
        "loss_cls", "loss_box_reg", "loss_mask", "loss_rpn_cls", "loss_rpn_loc"
    }  # fmt: skip
    assert all(math.isfinite(value) for value in losses.values())


def test_semantic_fpn_trains_and_reports_miou(shapes_sem_seg, tmp_path):
    few = ["SOLVER.MAX_ITER", "3", "SOLVER.IMS_PER_BATCH", "4", "SOLVER.BASE_LR", "0.01", "SOLVER.WARMUP_ITERS", "0"]
    cfg = small_config("semantic_fpn", *few, "OUTPUT_DIR", str(tmp_path))
    check_setup(cfg)
    trainer = Trainer(cfg)
    assert trainer.scheduler.get_last_lr()[0] == pytest.approx(0.01)
    trainer.resume_or_load(resume=False)
    trainer.train()
    assert trainer.scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-9)
    metrics = read_json(tmp_path / "evaluation.json")["shapes_sem_seg_val"]["sem_seg"]
    assert metrics.keys() >= {"mIoU", "pACC", "IoU-background", "IoU-triangle"}
    assert 0 <= metrics["mIoU"] <= metrics["mACC"] <= 100

    again = cfg.clone()
    again.defrost()
    again.OUTPUT_DIR = str(tmp_path / "again")
    (tmp_path / "again").mkdir()
    Trainer.test(again, build_detector(cfg, tmp_path / "model_final.pth"))
    assert read_json(tmp_path / "again/evaluation.json") == read_json(tmp_path / "evaluation.json")


@pytest.mark.parametrize("family", slow_except(["ls", "lit", "cvt"], ["ls"]))
@pytest.mark.parametrize("detector", slow_except(["retinanet", "mask_rcnn"], ["retinanet"]))
def test_every_family_trains_in_both_detectors(shapes, tmp_path, detector, family):
    """Three iterations on two images: finite losses, and weights of the backbone that have moved."""
    path = CONFIGS[detector].with_name(f"{detector}_{family}_shapes.yaml")
    options = ["SOLVER.IMS_PER_BATCH", "2", "SOLVER.MAX_ITER", "3", "SOLVER.WARMUP_ITERS", "0"]
    cfg = load_config(path, [*SMALL[detector], *options, "OUTPUT_DIR", str(tmp_path), "DATASETS.TEST", "()"])
    trainer = Trainer(cfg)
    before = {name: parameter.clone() for name, parameter in trainer.model.backbone.bottom_up.named_parameters()}
    trainer.train()
    for name, parameter in trainer.model.backbone.bottom_up.named_parameters():
        assert parameter.isfinite().all()
        if "dynamic_projection.bias" not in name:
            assert not torch.equal(parameter, before[name]), name


def test_metrics_without_any_detection_are_null(shapes, trained_run, tmp_path):
    overrides = ["MODEL.RETINANET.SCORE_THRESH_TEST", "0.999", "OUTPUT_DIR", str(tmp_path)]
    cfg = load_config(trained_run / "config.yaml", overrides)
    register_datasets(cfg)
    results = Trainer.test(cfg, build_detector(cfg, trained_run / "model_final.pth"))
    assert math.isnan(results["bbox"]["AP"])
    content = read_json(tmp_path / "evaluation.json")
    per_class = content["shapes_val"]["bbox"].pop("per_class")
    assert set(content["shapes_val"]["bbox"].values()) == {None}
    assert per_class == {name: {"AP": None} for name in ("circle", "square", "triangle")}
