"""A run that is stopped at any moment and resumed ends as one that never stopped, to the bit."""

import json

import pytest
import torch
from detectron2.engine import HookBase

from backbones import ConfigError
from projects_vil.data import seed_all
from projects_vil.engine import Trainer
from projects_vil.engine.hooks import TIMES
from projects_vil.engine.trainer import restore_loss_normalizer
from tests.projects_vil.checkpoint.test_checkpointer import log_of
from tests.projects_vil.helpers import small_config
from tests.selection import slow_except

RUN = [
    *("SEED", "5", "SOLVER.MAX_ITER", "7", "SOLVER.CHECKPOINT_PERIOD", "3", "TEST.EVAL_PERIOD", "3"),
    *("SOLVER.IMS_PER_BATCH", "2", "INPUT.MIN_SIZE_TRAIN", "(48, 64)", "TEST.BEST_METRIC", "bbox/AP"),
    *("SOLVER.BASE_LR", "1e-3", "SOLVER.WARMUP_ITERS", "0"),
]

# All that a step may be asked for at once.
STEPS = [
    *("SOLVER.GRADIENT_ACCUMULATION_STEPS", "2", "MODEL.EMA.ENABLED", "True", "SOLVER.AMP.ENABLED", "True"),
    *("SOLVER.AMP.DTYPE", "bfloat16", "TEST.VALIDATION_LOSS", "True", "TEST.BEST_METRIC", "validation_loss/total_loss"),
    *("SOLVER.EARLY_STOPPING_PATIENCE", "5", "SOLVER.MAX_NONFINITE_STEPS", "2", "MODEL.TRANSFORMER.DROP_PATH", "0.2"),
    *("MODEL.TRANSFORMER.RANDOM_SHIFT_FRACTION", "0.6"),
]


class PowerCut(BaseException):
    """What no handler of errors expects."""


class CutAt(HookBase):
    """End the run before an iteration, with nothing after it."""

    def __init__(self, iteration):
        self.iteration = iteration

    def before_step(self):
        if self.trainer.iter == self.iteration:
            raise PowerCut


def resume(trainer, *, cut_at=None):
    trainer.resume_or_load(resume=True)
    if cut_at is None:
        trainer.train()
        return
    trainer.register_hooks([CutAt(cut_at)])
    # The power cut leaves no time for what hooks do at the end.
    trainer.after_train = lambda: None
    with pytest.raises(PowerCut):
        trainer.train()


def train(detector, output, *overrides, cut_at=None):
    cfg = small_config(detector, *RUN, "OUTPUT_DIR", str(output), *overrides)
    output.mkdir(exist_ok=True)
    # As detectron2's default_setup, for the first weights.
    seed_all(cfg.SEED % 2**32)
    trainer = Trainer(cfg)
    resume(trainer, cut_at=cut_at)
    return trainer


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


@pytest.mark.parametrize(
    "detector, overrides",
    [
        ("retinanet", []),
        *slow_except([("retinanet", [*STEPS, *WORKERS]), ("mask_rcnn", PASTED), ("retinanet", PERFORMER)], []),
    ],
    ids=["retinanet", "steps", "pasted", "performer"],
)
def test_interrupted_run_equals_uninterrupted(detector, overrides, shapes, tmp_path):
    train(detector, tmp_path / "whole", *overrides)
    # Before any checkpoint; after one; right after one, so that its iteration lacks its line of metrics.
    for iteration in (1, 5, 6):
        train(detector, tmp_path / "cut", *overrides, cut_at=iteration)
    train(detector, tmp_path / "cut", *overrides)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    lines = map(json.loads, metrics(tmp_path / "whole"))
    assert [line["iteration"] for line in lines if "bbox/AP" in line] == [2, 5, 7]


@pytest.mark.slow
def test_an_early_stopped_run_stays_stopped(shapes, tmp_path):
    """No object is large: the metric is never a number. The count continues after a resume."""
    keys = ["TEST.BEST_METRIC", "bbox/APl", "TEST.EVAL_PERIOD", "1", "SOLVER.CHECKPOINT_PERIOD", "1"]
    keys += ["SOLVER.EARLY_STOPPING_PATIENCE", "3"]
    output = tmp_path / "run"
    train("retinanet", output, *keys, cut_at=2)
    assert not (output / "model_final.pth").exists()
    train("retinanet", output, *keys)
    final = torch.load(output / "model_final.pth", weights_only=True)
    assert final["iteration"] == 2 and final["finished"]
    assert final["trainer"]["hooks"]["BestCheckpointer"]["waited"] == 3
    train("retinanet", output, *keys)
    assert torch.load(output / "model_final.pth", weights_only=True)["iteration"] == 2
    train("retinanet", output, *keys, "SOLVER.EARLY_STOPPING_PATIENCE", "4")
    assert torch.load(output / "model_final.pth", weights_only=True)["iteration"] == 3


@pytest.mark.slow
def test_an_evaluation_that_was_cut_off_is_repeated_and_logged(shapes, tmp_path, monkeypatch):
    def cut(cls, cfg, model, evaluators=None):
        raise PowerCut

    train("retinanet", tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "test", classmethod(cut))
        patch.setattr(Trainer, "after_train", lambda self: None)
        with pytest.raises(PowerCut):
            train("retinanet", tmp_path / "cut")
    assert not torch.load(tmp_path / "cut/model_0000002.pth", weights_only=True)["finished"]
    with log_of("projects_vil.engine.trainer") as log:
        train("retinanet", tmp_path / "cut")
    assert any("evaluating iteration 2 first" in text for text in log.output)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_only_evaluates(shapes, tmp_path):
    train("retinanet", tmp_path / "run")
    before = metrics(tmp_path / "run")
    weights = (tmp_path / "run/model_final.pth").read_bytes()
    train("retinanet", tmp_path / "run")
    # The lines of the last iteration and of the last evaluation, which are one apart, are swapped.
    assert sorted(metrics(tmp_path / "run")) == sorted(before)
    assert (tmp_path / "run/model_final.pth").read_bytes() == weights


@pytest.mark.slow
def test_rates_of_the_config_apply(shapes, tmp_path):
    train("retinanet", tmp_path / "run", cut_at=4)
    resumed = train("retinanet", tmp_path / "run", "SOLVER.BASE_LR", "1e-5", "SOLVER.WEIGHT_DECAY", "0.5")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.json").read_text().splitlines()]
    assert 0 < [line["lr"] for line in lines if "lr" in line][-1] <= 1e-5
    assert {group["weight_decay"] for group in resumed.optimizer.param_groups} == {0.0, 0.5}
    multipliers = ["SOLVER.LR_MULTIPLIERS", "[['backbone.*', 0.1]]"]
    other = Trainer(small_config("retinanet", *RUN, "OUTPUT_DIR", str(tmp_path / "run"), *multipliers))
    with pytest.raises(ConfigError, match="optimizer"):
        other.resume_or_load(resume=True)


def test_the_seed_of_a_run_is_kept(shapes, tmp_path):
    trainer = train("retinanet", tmp_path / "run", "SEED", "-1", cut_at=4)
    resumed = Trainer(small_config("retinanet", *RUN, "OUTPUT_DIR", str(tmp_path / "run"), "SEED", "-1"))
    resumed.resume_or_load(resume=True)
    assert resumed.seed == resumed.cfg.SEED == trainer.seed >= 0
    assert resumed.start_iter == 3


@pytest.mark.parametrize("saved, expected", [([3.0], 3.0), ([3.0, 5.0], 4.0), ([None], None), ([], None)])
def test_the_loss_normalizer_of_another_number_of_processes_is_their_mean(saved, expected):
    model = torch.nn.Linear(1, 1)
    restore_loss_normalizer(model, saved)
    assert getattr(model, "loss_normalizer", None) == expected


def test_a_run_that_fails_is_not_evaluated(shapes, tmp_path, monkeypatch):
    step = Trainer.run_step

    def run_step(self):
        step(self)
        raise FloatingPointError("on purpose")

    monkeypatch.setattr(Trainer, "run_step", run_step)
    with pytest.raises(FloatingPointError, match="on purpose"):
        train("retinanet", tmp_path, "SOLVER.MAX_ITER", "1")
    assert not (tmp_path / "evaluation.json").exists()
