"""Whole runs whose host learns of steps later, as on a GPU: here on the CPU with a fused optimizer."""

import json
import os
import signal

import pytest
import torch
from detectron2.engine import HookBase
from detectron2.utils import comm

from backbones import ConfigError
from projects_vil.engine import Trainer
from projects_vil.engine.trainer import DeferredStep
from projects_vil.solver import build_optimizer
from tests.projects_vil.checkpoint.test_checkpointer import log_of
from tests.projects_vil.engine.gloo import in_processes
from tests.projects_vil.engine.test_resuming import RUN, assert_same_run, resume, train
from tests.projects_vil.helpers import small_config

OPTIONS = ["MODEL.EMA.ENABLED", "True", "SOLVER.MAX_NONFINITE_STEPS", "1", "TEST.EVAL_PERIOD", "0"]


@pytest.fixture(autouse=True)
def deferred(monkeypatch, shapes):
    def fused(cfg, model):
        optimizer = build_optimizer(cfg, model)
        for group in optimizer.param_groups:
            group["fused"] = True
        return optimizer

    monkeypatch.setattr(Trainer, "build_optimizer", staticmethod(fused))
    monkeypatch.setattr(DeferredStep, "supports", staticmethod(lambda model, optimizer: True))


class SignalIn(HookBase):
    def __init__(self, iteration):
        self.iteration = iteration

    def before_step(self):
        if self.trainer.iter == self.iteration:
            os.kill(os.getpid(), signal.SIGTERM)


class DivergeIn(HookBase):
    """The maps of the backbone are not finite in an iteration."""

    def __init__(self, iteration):
        self.iteration = iteration

    def before_train(self):
        self.trainer.model.backbone.register_forward_hook(self.spoil)

    def spoil(self, backbone, images, maps):
        return {name: x * float("nan") for name, x in maps.items()} if self.trainer.iter == self.iteration else maps


def trainer_with(hook, output, detector, *overrides, **options):
    output.mkdir(exist_ok=True)
    trainer = Trainer(small_config(detector, *RUN, "OUTPUT_DIR", str(output), *overrides), **options)
    trainer.register_hooks([hook])
    return trainer


def saved(output, name="model_final"):
    return torch.load(output / f"{name}.pth", weights_only=True)


def test_cut_off_and_stopped_runs_end_as_whole_ones(tmp_path):
    """The checkpoints of iterations 2 and 5, and of the signal's. The first iteration is logged at once."""
    detector, options = "retinanet", ["MODEL.EMA.ENABLED", "True"]
    with log_of("detectron2.utils.events") as log:
        train(detector, tmp_path / "whole", *options)
    assert " iter: 0  total_loss: " in log.output[0]
    assert isinstance(train(detector, tmp_path / "cut", *options, cut_at=4)._trainer, DeferredStep)
    with pytest.raises(SystemExit) as stop:
        resume(trainer_with(SignalIn(4), tmp_path / "cut", detector, *options))
    assert stop.value.code == 128 + signal.SIGTERM
    assert saved(tmp_path / "cut", "model_0000004")["iteration"] == 4
    train(detector, tmp_path / "cut", *options)
    (tmp_path / "cut/model_0000004.pth").unlink()
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("detector, reason", [("retinanet", "loss_cls is nan"), ("mask_rcnn", "contain Inf/NaN")])
def test_an_iteration_between_two_lines_of_the_log_diverges(detector, reason, tmp_path):
    """The proposals of Mask R-CNN are seen to diverge at once."""
    resume(trainer_with(DivergeIn(4), tmp_path / "skipped", detector, *OPTIONS))
    (entry,) = json.loads((tmp_path / "skipped/nonfinite.json").read_text())
    assert entry["iteration"] == 4 and entry["is_skipped"] and reason in entry["reason"]
    final = saved(tmp_path / "skipped")
    assert final["averaged_steps"] == 6 and final["trainer"]["_trainer"]["skipped"] == 1
    assert all(value.isfinite().all() for value in final["model"].values())

    none = ["SOLVER.MAX_NONFINITE_STEPS", "0", "SOLVER.CHECKPOINT_PERIOD", "6"]
    with pytest.raises(ConfigError, match="iteration 4"):
        resume(trainer_with(DivergeIn(4), tmp_path / "stopped", detector, *OPTIONS, *none))
    assert not [*(tmp_path / "stopped").glob("*.pth")]


def _stopped_run(output):
    """The second process gets a signal in iteration 1, and all learn of it with the log's line in iteration 2."""
    hook = SignalIn(1 if comm.get_rank() == 1 else -1)
    options = ["SOLVER.CHECKPOINT_PERIOD", "7", *OPTIONS]
    trainer = trainer_with(hook, output, "retinanet", *options, log_period=3)
    with pytest.raises(SystemExit) as stop:
        resume(trainer)
    assert stop.value.code == 128 + signal.SIGTERM and trainer.iter == 2


def test_a_signal_to_one_process_stops_all_in_the_same_iteration(tmp_path):
    in_processes(2, _stopped_run, tmp_path / "run", store=tmp_path / "store")
    assert [path.name for path in (tmp_path / "run").glob("*.pth")] == ["model_0000002.pth"]
    (line,) = (tmp_path / "run/metrics.json").read_text().splitlines()
    assert json.loads(line)["iteration"] == 2 and "total_loss" in json.loads(line)
