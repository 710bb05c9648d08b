"""Runs from the command line and from Python: files, evaluations, and all model families."""

import json
import math

import pytest
import torch

from projects_vil import load_config
from projects_vil.checkpoint import fingerprint, load_detector, weights_of
from projects_vil.data import register_datasets
from projects_vil.engine import Trainer
from projects_vil.engine.launch import run_training
from tests.projects_vil.helpers import CONFIGS, SMALL, run_tool, small_config
from tests.selection import slow_except


def read_json(path):
    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_the_files_of_a_run(trained_run):
    names = {path.name for path in trained_run.iterdir()}
    assert names >= {"config.yaml", "log.txt", "metrics.json", "evaluation.json", "last_checkpoint", "inference"}
    assert load_config(trained_run / "config.yaml").OUTPUT_DIR == str(trained_run)
    first, final = (torch.load(trained_run / f"model_{n}.pth", weights_only=True) for n in ("0000001", "final"))
    assert final["iteration"] == 3
    optimizer = final["trainer"]["_trainer"]["optimizer"]
    assert sorted(group["weight_decay"] for group in optimizer["param_groups"]) == [0.0, 0.1]
    assert {int(state["step"]) for state in optimizer["state"].values()} == {4}
    assert any(not torch.equal(value, first["model"][name]) for name, value in final["model"].items())
    lines = [json.loads(line) for line in (trained_run / "metrics.json").read_text().splitlines()]
    trained = [line for line in lines if "total_loss" in line]
    assert trained and all(math.isfinite(line["total_loss"]) and line["gradient_norm"] > 0 for line in trained)
    assert any("bbox/AP" in line for line in lines)


def test_the_console_shows_results_and_the_log_everything(trained_run):
    console, log = (trained_run / "stdout.txt").read_text(), (trained_run / "log.txt").read_text()
    written = str(trained_run / "evaluation.json")
    for text in (written, " iter: 0  total_loss: ", " iter: 3  total_loss: "):
        assert console.count(text) == log.count(text) == 1, text
    for text in ("Running with full config", "Environment info", "Model:\n"):
        assert text not in console and text in log, text


@pytest.mark.slow
def test_an_evaluation_does_not_change_a_run(trained_run, datasets_root, tmp_path):
    """The metrics equal the metrics of the run. config.yaml is written only into a new folder."""
    config, weights, written = trained_run / "config.yaml", trained_run / "model_final.pth", tmp_path / "config.yaml"
    command = ["--config-file", config, "--eval-only", "MODEL.WEIGHTS", weights, "OUTPUT_DIR", tmp_path]
    # A run that is writing a checkpoint, before and after its first files.
    partial = tmp_path / ".model_0000001.pth.1.partial"
    for trace in (None, "metrics.json"):
        if trace is not None:
            written.write_text("# of the run\n")
            partial.touch()
            (tmp_path / trace).touch()
        result = run_tool("train_net.py", *command, datasets_root=datasets_root)
        assert result.returncode == 0, result.stderr
        assert read_json(tmp_path / "evaluation.json") == read_json(trained_run / "evaluation.json")
        if trace is None:
            assert f"OUTPUT_DIR: {tmp_path}" in written.read_text() and not list(tmp_path.glob("*.pth"))
        else:
            assert written.read_text() == "# of the run\n" and partial.exists()
            (tmp_path / trace).unlink()


def test_semantic_fpn_trains_and_reports_miou(shapes_sem_seg, tmp_path):
    few = ["SOLVER.MAX_ITER", "3", "SOLVER.IMS_PER_BATCH", "4", "SOLVER.BASE_LR", "0.01", "SOLVER.WARMUP_ITERS", "0"]
    cfg = small_config("semantic_fpn", *few, "OUTPUT_DIR", str(tmp_path))
    trainer = Trainer(cfg)
    trainer.train()
    assert trainer.scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-9)
    metrics = read_json(tmp_path / "evaluation.json")["shapes_sem_seg_val"]["sem_seg"]
    assert metrics.keys() >= {"mIoU", "pACC", "IoU-background", "IoU-triangle"}
    assert 0 <= metrics["mIoU"] <= metrics["mACC"] <= 100


def train_family(detector, family, output, *options):
    """Train four iterations with finite losses; return the trainer and the names of unchanged weights."""
    few = ["SOLVER.IMS_PER_BATCH", "2", "SOLVER.MAX_ITER", "4", "SOLVER.WARMUP_ITERS", "0", "SOLVER.BASE_LR", "1e-3"]
    path = CONFIGS[detector].with_name(f"{detector}_{family}_shapes.yaml")
    overrides = [*SMALL[detector], *few, "OUTPUT_DIR", str(output), "DATASETS.TEST", "()", *options]
    trainer = Trainer(load_config(path, overrides))
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    losses = trainer.storage.history("total_loss").values()
    assert len(losses) >= 3 and all(math.isfinite(value) for value, _ in losses)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    return trainer, {name for name, value in trainer.model.named_parameters() if torch.equal(value, before[name])}


@pytest.mark.slow
@pytest.mark.parametrize("family, detector", [("ls", "retinanet"), ("lit", "mask_rcnn"), ("cvt", "mask_rcnn")])
def test_every_family_trains(shapes, tmp_path, family, detector):
    _, unchanged = train_family(detector, family, tmp_path)
    assert not [n for n in unchanged if n.startswith("backbone.bottom_up.") and "dynamic_projection.bias" not in n]


@pytest.mark.parametrize("is_on", slow_except([False, True], [True]))
def test_evaluations_in_bfloat16(is_on, shapes, tmp_path):
    """Feature maps are computed in bfloat16 and heads return float32. Afterwards the model is unchanged."""
    cfg = small_config("mask_rcnn", "OUTPUT_DIR", str(tmp_path), *(["INFERENCE.DTYPE", "bfloat16"] if is_on else []))
    model, dtypes = Trainer.build_model(cfg), []
    for module in (model.backbone.output_convs[0], model.roi_heads.box_head):
        module.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    # detectron2's code passes the model of the trainer.
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        Trainer.test(cfg, torch.nn.parallel.DistributedDataParallel(model))
    finally:
        torch.distributed.destroy_process_group()
    assert dtypes[:2] == [torch.bfloat16 if is_on else torch.float32, torch.float32]
    model.eval()([{"image": torch.zeros(3, 64, 96)}])
    assert dtypes[-2:] == [torch.float32] * 2


def test_the_best_checkpoint_is_the_result_of_a_run(shapes, tmp_path):
    """The AP of both evaluations is equal, so the first is the best."""
    options = ["SOLVER.MAX_ITER", "2", "TEST.EVAL_PERIOD", "1", "SOLVER.BASE_LR", "1e-7", "SOLVER.WARMUP_ITERS", "0"]
    options += ["SOLVER.IMS_PER_BATCH", "2", "TEST.BEST_METRIC", "bbox/AP75", "MODEL.EMA.ENABLED", "True"]
    cfg = small_config("retinanet", *options, "MODEL.RETINANET.TOPK_CANDIDATES_TEST", "1", "OUTPUT_DIR", str(tmp_path))
    register_datasets(cfg)
    evaluated = []

    class Recorder(Trainer):
        @classmethod
        def test(cls, cfg, model, evaluators=None):
            evaluated.append(fingerprint(cfg, model))
            return super().test(cfg, model, evaluators)

    run_training(cfg, Recorder, resume=False)
    assert weights_of(tmp_path) == tmp_path / "model_best.pth"
    best, last = (fingerprint(cfg, load_detector(cfg, tmp_path / f"model_{name}.pth")[0]) for name in ("best", "final"))
    assert best != last and evaluated[-1] == best
