"""Interrupted and resumed runs equal uninterrupted runs, bit by bit."""

import functools
import json
import os
import signal

import pytest
import torch
from detectron2.engine import HookBase
from detectron2.utils import comm

from backbones import ConfigError
from projects_vil.data import seed_all
from projects_vil.engine import Trainer, trainer
from projects_vil.engine.hooks import TIMES
from projects_vil.modeling.micro_batches import restore_loss_normalizer
from projects_vil.solver import build_optimizer
from tests.projects_vil.checkpoint.test_checkpointer import log_of
from tests.projects_vil.engine.gloo import in_processes
from tests.projects_vil.helpers import message, small_config
from tests.selection import slow_except

RUN = [
    *("SEED", "5", "SOLVER.MAX_ITER", "7", "SOLVER.CHECKPOINT_PERIOD", "3", "TEST.EVAL_PERIOD", "3"),
    *("SOLVER.IMS_PER_BATCH", "2", "INPUT.MIN_SIZE_TRAIN", "(48, 64)", "TEST.BEST_METRIC", "bbox/AP"),
    *("SOLVER.BASE_LR", "1e-3", "SOLVER.WARMUP_ITERS", "0"),
]
EMA = ["MODEL.EMA.ENABLED", "True"]
# All options of a step at once.
STEPS = [
    *("SOLVER.GRADIENT_ACCUMULATION_STEPS", "2", *EMA, "SOLVER.AMP.ENABLED", "True"),
    *("SOLVER.AMP.DTYPE", "bfloat16", "TEST.VALIDATION_LOSS", "True", "TEST.BEST_METRIC", "validation_loss/total_loss"),
    *("SOLVER.EARLY_STOPPING_PATIENCE", "5", "SOLVER.MAX_NONFINITE_STEPS", "2", "MODEL.TRANSFORMER.DROP_PATH", "0.2"),
    *("MODEL.TRANSFORMER.RANDOM_SHIFT_FRACTION", "0.6"),
]


class PowerCut(BaseException):
    """An exception that no error handler catches."""


class Before(HookBase):
    """Call a function of the trainer before an iteration."""

    def __init__(self, iteration, action):
        self.iteration, self.action = iteration, action

    def before_step(self):
        if self.trainer.iter == self.iteration:
            self.action(self.trainer)


def cut_power(*args, **options):
    raise PowerCut


def send_sigterm(_):
    os.kill(os.getpid(), signal.SIGTERM)


def spoil_features(trainer):
    """Let the next call of the backbone return NaN."""

    def spoil(backbone, images, features):
        handle.remove()
        return {name: x * float("nan") for name, x in features.items()}

    handle = trainer.model.backbone.register_forward_hook(spoil)


def resume(trainer, *, cut_at=None):
    trainer.resume_or_load(resume=True)
    if cut_at is None:
        trainer.train()
        return
    trainer.register_hooks([Before(cut_at, cut_power)])
    # A power cut leaves no time for the hooks at the end.
    trainer.after_train = lambda: None
    with pytest.raises(PowerCut):
        trainer.train()


def new_trainer(detector, output, *overrides, before=()):
    """Return a trainer with a seed as in detectron2's default_setup, for the initial weights."""
    cfg = small_config(detector, *RUN, "OUTPUT_DIR", str(output), *overrides)
    output.mkdir(exist_ok=True)
    seed_all(cfg.SEED % 2**32)
    made = Trainer(cfg)
    made.register_hooks([Before(*before)] if before else [])
    return made


def train(detector, output, *overrides, cut_at=None):
    made = new_trainer(detector, output, *overrides)
    resume(made, cut_at=cut_at)
    return made


def saved(output, name="model_final"):
    return torch.load(output / f"{name}.pth", weights_only=True)


def leaves(value, path=""):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else None
    if items is None:
        yield path, value
    for key, inner in items or ():
        yield from leaves(inner, f"{path}/{key}")


def assert_same_file(path, other):
    ours, theirs = (dict(leaves(torch.load(file, weights_only=True))) for file in (path, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[name]), name
        else:
            assert value == theirs[name] or value != value, name


def metrics(output):
    lines = [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]
    return [json.dumps({key: value for key, value in line.items() if key not in TIMES}) for line in lines]


def assert_same_run(whole, cut):
    """Equal checkpoints, metrics and evaluations."""
    names = {path.name for path in whole.glob("*.pth")}
    assert names == {path.name for path in cut.glob("*.pth")} and "model_final.pth" in names
    for name in names:
        assert_same_file(whole / name, cut / name)
    assert metrics(whole) == metrics(cut)
    assert (whole / "evaluation.json").read_text() == (cut / "evaluation.json").read_text()


WORKERS = ["DATALOADER.NUM_WORKERS", "2"]
PERFORMER = ["MODEL.TRANSFORMER.VARIANT", "performer_tiny", "MODEL.TRANSFORMER.FEATURE_REDRAW_PERIOD", "2"]
PASTED = [*WORKERS, "INPUT.AUGMENTATION", "lsj_copy_paste", "INPUT.LSJ.SIZE", "64"]


SHORT = ["SOLVER.MAX_ITER", "4", "SOLVER.CHECKPOINT_PERIOD", "2", "TEST.EVAL_PERIOD", "2", "TEST.BEST_METRIC", ""]
CASES = {
    "retinanet": ("retinanet", SHORT),
    "steps": ("retinanet", [*STEPS, *WORKERS]),
    "pasted": ("mask_rcnn", PASTED),
    "performer": ("retinanet", PERFORMER),
}


@pytest.mark.parametrize("name", slow_except(CASES, ["retinanet"]))
def test_interrupted_run_equals_uninterrupted(name, shapes, tmp_path):
    detector, overrides = CASES[name]
    train(detector, tmp_path / "whole", *overrides)
    # Before any checkpoint; after one; right after one, so that its iteration has no metrics.
    for iteration in (1, 5, 6) if name != "retinanet" else (3,):
        train(detector, tmp_path / "cut", *overrides, cut_at=iteration)
    train(detector, tmp_path / "cut", *overrides)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    lines = map(json.loads, metrics(tmp_path / "whole"))
    assert [line["iteration"] for line in lines if "bbox/AP" in line] == ([2, 5, 7] if name != "retinanet" else [1, 4])


@pytest.mark.slow
def test_an_early_stopped_run_stays_stopped(shapes, tmp_path):
    """No object is large, so the metric is NaN. The count continues after a resume."""
    keys = ["TEST.BEST_METRIC", "bbox/APl", "TEST.EVAL_PERIOD", "1", "SOLVER.CHECKPOINT_PERIOD", "1"]
    keys += ["SOLVER.EARLY_STOPPING_PATIENCE", "3"]
    output = tmp_path / "run"
    train("retinanet", output, *keys, cut_at=2)
    assert not (output / "model_final.pth").exists()
    for patience, iteration in (("3", 2), ("3", 2), ("4", 3)):
        train("retinanet", output, *keys, "SOLVER.EARLY_STOPPING_PATIENCE", patience)
        assert saved(output)["iteration"] == iteration and saved(output)["finished"]
        assert saved(output)["trainer"]["hooks"]["BestCheckpointer"]["waited"] == int(patience)


@pytest.mark.slow
def test_an_interrupted_evaluation_is_repeated_and_logged(shapes, tmp_path, monkeypatch):
    train("retinanet", tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "test", classmethod(cut_power))
        patch.setattr(Trainer, "after_train", lambda self: None)
        with pytest.raises(PowerCut):
            train("retinanet", tmp_path / "cut")
    assert not saved(tmp_path / "cut", "model_0000002")["finished"]
    with log_of("projects_vil.engine.trainer") as log:
        train("retinanet", tmp_path / "cut")
    assert any("Evaluating iteration 2 first" in text for text in log.output)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    # A finished run that is resumed only evaluates. The lines of the last iteration and evaluation are swapped.
    before, weights = metrics(tmp_path / "cut"), (tmp_path / "cut/model_final.pth").read_bytes()
    train("retinanet", tmp_path / "cut")
    assert sorted(metrics(tmp_path / "cut")) == sorted(before)
    assert (tmp_path / "cut/model_final.pth").read_bytes() == weights
    # A longer run begins with the evaluation of the finished run, which may be the best.
    with log_of("projects_vil.engine.trainer") as log:
        train("retinanet", tmp_path / "cut", "SOLVER.MAX_ITER", "9", "TEST.EVAL_PERIOD", "9")
    assert "Evaluating iteration" in "".join(log.output)


def test_a_resumed_run_keeps_its_seed_and_has_the_rates_of_the_config(shapes, tmp_path, caplog):
    start = functools.partial(new_trainer, "retinanet", tmp_path / "run", "TEST.EVAL_PERIOD", "0")
    first = start("SEED", "-1")
    entries, path = [{"iteration": iteration} for iteration in (2, 3)], tmp_path / "run/nonfinite.json"
    path.write_text(json.dumps(entries))
    resume(first, cut_at=4)
    assert not path.exists()
    resumed = start("SEED", "-1")
    resumed.resume_or_load(resume=True)
    assert "of the resumed run" not in caplog.text
    path.write_text(json.dumps(entries))
    other = start("SOLVER.BASE_LR", "1e-5", "SOLVER.WEIGHT_DECAY", "0.5")
    resume(other, cut_at=4)
    assert json.loads(path.read_text()) == entries[:1]
    assert "The config changes the learning rate, weight decay of the resumed run." in caplog.text
    assert all(0 < group["lr"] <= 1e-5 for group in other.optimizer.param_groups)
    assert {group["weight_decay"] for group in other.optimizer.param_groups} == {0.0, 0.5}
    other = start("SOLVER.LR_MULTIPLIERS", "[['backbone.*', 0.1]]")
    assert "optimizer" in message(other.resume_or_load, resume=True)
    assert resumed.seed == resumed.cfg.SEED == first.seed >= 0 and resumed.start_iter == 3


@pytest.mark.parametrize("values, expected", [([3.0], 3.0), ([3.0, 5.0], 4.0), ([None], None), ([], None)])
def test_the_loss_normalizer_of_another_number_of_processes_is_their_mean(values, expected):
    model = torch.nn.Linear(1, 1)
    restore_loss_normalizer(model, values)
    assert getattr(model, "loss_normalizer", None) == expected


def test_a_run_that_fails_is_not_evaluated(shapes, tmp_path):
    def fail(_):
        raise FloatingPointError("on purpose")

    with pytest.raises(FloatingPointError, match="on purpose"):
        resume(new_trainer("retinanet", tmp_path, "SOLVER.MAX_ITER", "1", before=(0, fail)))
    assert not (tmp_path / "evaluation.json").exists()


# -- runs that synchronize every few iterations as on a GPU: here on the CPU, with a fused optimizer --


@pytest.fixture
def deferred(monkeypatch, shapes):
    def fused(cfg, model):
        optimizer = build_optimizer(cfg, model)
        for group in optimizer.param_groups:
            group["fused"] = True
        return optimizer

    monkeypatch.setattr(Trainer, "build_optimizer", staticmethod(fused))
    monkeypatch.setattr(trainer, "supports_deferred_sync", lambda model, optimizer: True)


@pytest.mark.slow
@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_interrupted_deferred_runs_equal_uninterrupted(detector, deferred, tmp_path):
    """Checkpoints of iterations 2 and 5, and of a signal. The first iteration is logged at once."""
    with log_of("detectron2.utils.events") as log:
        train(detector, tmp_path / "whole", *EMA)
    assert " iter: 0  total_loss: " in log.output[0]
    assert train(detector, tmp_path / "cut", *EMA, cut_at=4)._trainer.sync_period == 20
    with pytest.raises(SystemExit) as stop:
        resume(new_trainer(detector, tmp_path / "cut", *EMA, before=(4, send_sigterm)))
    assert stop.value.code == 128 + signal.SIGTERM
    assert saved(tmp_path / "cut", "model_0000004")["iteration"] == 4
    train(detector, tmp_path / "cut", *EMA)
    (tmp_path / "cut/model_0000004.pth").unlink()
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.parametrize("detector, reason", [("retinanet", "loss_cls is nan"), ("mask_rcnn", "contain Inf/NaN")])
def test_a_nonfinite_loss_between_two_synchronizations(detector, reason, deferred, tmp_path):
    """Mask R-CNN raises an error at once, for its proposals."""
    options = [*EMA, "TEST.EVAL_PERIOD", "0", "SOLVER.CHECKPOINT_PERIOD", "6", "SOLVER.MAX_NONFINITE_STEPS"]
    resume(new_trainer(detector, tmp_path / "skipped", *options, "1", before=(4, spoil_features)))
    (entry,) = json.loads((tmp_path / "skipped/nonfinite.json").read_text())
    assert entry["iteration"] == 4 and entry["is_skipped"] and reason in entry["reason"]
    final = saved(tmp_path / "skipped")
    assert final["averaged_steps"] == 6 and final["trainer"]["_trainer"]["skipped"] == 1
    assert all(value.isfinite().all() for value in final["model"].values())
    with pytest.raises(ConfigError, match="iteration 4"):
        resume(new_trainer(detector, tmp_path / "stopped", *options, "0", before=(4, spoil_features)))
    assert not [*(tmp_path / "stopped").glob("*.pth")]


def _stopped_run(output):
    """Send a signal to the second process in iteration 1. All processes stop after the synchronization in 2."""
    options = ["SOLVER.CHECKPOINT_PERIOD", "7", "TEST.EVAL_PERIOD", "0"]
    before = (1 if comm.get_rank() == 1 else -1, send_sigterm)
    Trainer.log_period = 3
    stopped = new_trainer("retinanet", output, *options, before=before)
    with pytest.raises(SystemExit) as stop:
        resume(stopped)
    assert stop.value.code == 128 + signal.SIGTERM and stopped.iter == 2


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_in_the_same_iteration(deferred, tmp_path):
    in_processes(2, _stopped_run, tmp_path / "run", store=tmp_path / "store")
    assert [path.name for path in (tmp_path / "run").glob("*.pth")] == ["model_0000002.pth"]
    (line,) = (tmp_path / "run/metrics.json").read_text().splitlines()
    assert json.loads(line)["iteration"] == 2 and "total_loss" in json.loads(line)
