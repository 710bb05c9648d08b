"""A run that is stopped at any moment and resumed ends as one that never stopped, to the bit."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from detectron2.engine import HookBase
from detectron2.solver import LRMultiplier
from detectron2.utils.events import EventStorage
from fvcore.common.param_scheduler import LinearParamScheduler

from backbones import InputError
from projects_vil import load_config
from projects_vil.data import seed_all
from projects_vil.engine import Trainer
from projects_vil.engine.resuming import TIMES, ConfiguredRates, MetricsFile, restore_loss_normalizer
from tests.projects_vil.helpers import CONFIGS, ROOT, SMALL, error_line, run_tool, small_config
from tests.selection import slow_except

RUN = [
    *("SEED", "5", "SOLVER.MAX_ITER", "7", "SOLVER.CHECKPOINT_PERIOD", "3", "TEST.EVAL_PERIOD", "3"),
    *("SOLVER.IMS_PER_BATCH", "2", "INPUT.MIN_SIZE_TRAIN", "(48, 64)", "TEST.BEST_METRIC", "bbox/AP"),
    *("SOLVER.BASE_LR", "1e-3", "SOLVER.WARMUP_ITERS", "0"),
]

# All that a step may be asked for at once.
STEPS = [
    *("SOLVER.ACCUMULATE", "2", "MODEL.EMA.ENABLED", "True", "SOLVER.AMP.ENABLED", "True"),
    *("SOLVER.AMP.DTYPE", "bfloat16", "TEST.LOSS", "True", "TEST.BEST_METRIC", "validation_loss/total_loss"),
    *("SOLVER.EARLY_STOPPING_PATIENCE", "5", "SOLVER.SKIP_DIVERGED", "2", "MODEL.TRANSFORMER.DROP_PATH", "0.2"),
    *("MODEL.TRANSFORMER.RANDOM_SHIFT_UNTIL", "0.6"),
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


def train(detector, output, *overrides, cut_at=None):
    cfg = small_config(detector, *RUN, "OUTPUT_DIR", str(output), *overrides)
    output.mkdir(exist_ok=True)
    # As detectron2's default_setup, for the first weights.
    seed_all(cfg.SEED % 2**32)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=True)
    if cut_at is not None:
        trainer.register_hooks([CutAt(cut_at)])
        # The power cut leaves no time for what hooks do at the end.
        trainer.after_train = lambda: None
        with pytest.raises(PowerCut):
            trainer.train()
    else:
        trainer.train()
    return trainer


def leaves(value, path=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}/{index}")
    else:
        yield path, value


def assert_same_file(path, other):
    assert_same_file_as(path, torch.load(other, weights_only=True))


def assert_same_file_as(path, contents):
    ours, theirs = dict(leaves(torch.load(path, weights_only=True))), dict(leaves(contents))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[name]), name
        else:
            assert value == theirs[name] or value != value, name


def metrics(output):
    lines = [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]
    return [json.dumps({key: value for key, value in line.items() if key not in TIMES}) for line in lines]


WORKERS = ["DATALOADER.NUM_WORKERS", "2"]
PASTED = [*WORKERS, "INPUT.AUGMENTATION", "strong", "INPUT.LSJ.SIZE", "64"]


@pytest.mark.parametrize(
    "detector, overrides",
    [
        ("retinanet", []),
        *slow_except([("retinanet", STEPS), ("retinanet", WORKERS), ("mask_rcnn", []), ("mask_rcnn", STEPS)], []),
        *slow_except([("mask_rcnn", PASTED)], []),
    ],
    ids=["retinanet", "steps", "workers", "mask_rcnn", "mask_rcnn-steps", "pasted"],
)
def test_a_run_that_was_cut_off_ends_as_one_that_was_not(detector, overrides, shapes, tmp_path):
    train(detector, tmp_path / "whole", *overrides)
    # Before any checkpoint; after one; right after one, so that its iteration lacks its line of metrics.
    for iteration in (1, 5, 6):
        train(detector, tmp_path / "cut", *overrides, cut_at=iteration)
    train(detector, tmp_path / "cut", *overrides)
    for name in ("model_0000002", "model_0000005", "model_final", "model_best"):
        whole = tmp_path / "whole" / f"{name}.pth"
        assert whole.exists() == (tmp_path / "cut" / f"{name}.pth").exists()
        if whole.exists():
            assert_same_file(whole, tmp_path / "cut" / f"{name}.pth")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")
    assert (tmp_path / "whole/evaluation.json").read_text() == (tmp_path / "cut/evaluation.json").read_text()


@pytest.mark.slow
def test_a_run_that_stops_early_stays_so(shapes, tmp_path, caplog):
    """No object is large: the metric is never a number. Cut off or not, its count goes on; a larger patience too."""
    keys = ["TEST.BEST_METRIC", "bbox/APl", "TEST.EVAL_PERIOD", "1", "SOLVER.CHECKPOINT_PERIOD", "1"]
    keys += ["SOLVER.EARLY_STOPPING_PATIENCE", "3"]
    output = tmp_path / "run"
    train("retinanet", output, *keys, cut_at=2)
    assert not (output / "model_final.pth").exists()
    with caplog.at_level("INFO"):
        train("retinanet", output, *keys)
    final = torch.load(output / "model_final.pth", weights_only=True)
    assert final["iteration"] == 2 and final["finished"]
    assert final["trainer"]["hooks"]["KeepBest"]["waited"] == 3
    assert "stopped early after iteration 2: 3 evaluations without a better bbox/APl (none had one)" in caplog.text
    train("retinanet", output, *keys)
    assert_same_file_as(output / "model_final.pth", final)
    train("retinanet", output, *keys, "SOLVER.EARLY_STOPPING_PATIENCE", "4")
    assert torch.load(output / "model_final.pth", weights_only=True)["iteration"] == 3


@pytest.mark.slow
def test_an_evaluation_that_was_cut_off_is_made_up_for(shapes, tmp_path, monkeypatch):
    def cut(cls, cfg, model, evaluators=None):
        raise PowerCut

    train("retinanet", tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "test", classmethod(cut))
        patch.setattr(Trainer, "after_train", lambda self: None)
        with pytest.raises(PowerCut):
            train("retinanet", tmp_path / "cut")
    assert not torch.load(tmp_path / "cut/model_0000002.pth", weights_only=True)["finished"]
    train("retinanet", tmp_path / "cut")
    assert_same_file(tmp_path / "whole/model_final.pth", tmp_path / "cut/model_final.pth")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_evaluates_alone(shapes, tmp_path):
    train("retinanet", tmp_path / "run")
    before = metrics(tmp_path / "run")
    weights = (tmp_path / "run/model_final.pth").read_bytes()
    train("retinanet", tmp_path / "run")
    # The lines of the last iteration and of the last evaluation, which are one apart, change places.
    assert sorted(metrics(tmp_path / "run")) == sorted(before)
    assert (tmp_path / "run/model_final.pth").read_bytes() == weights


@pytest.mark.slow
def test_rates_of_the_config_count(shapes, tmp_path, caplog):
    train("retinanet", tmp_path / "run", cut_at=4)
    overrides = ["SOLVER.BASE_LR", "1e-5", "SOLVER.WEIGHT_DECAY", "0.5"]
    again = train("retinanet", tmp_path / "run", *overrides)
    assert "began with other learning rates, weight decays or momentum (largest rate 0.001, now 1e-05)" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.json").read_text().splitlines()]
    assert 0 < [line["lr"] for line in lines if "lr" in line][-1] <= 1e-5
    assert {group["weight_decay"] for group in again.optimizer.param_groups} == {0.0, 0.5}
    for overrides in (["SOLVER.OPTIMIZER", "SGD"], ["SOLVER.LR_MULTIPLIERS", "[['backbone.*', 0.1]]"]):
        other = Trainer(small_config("retinanet", *RUN, "OUTPUT_DIR", str(tmp_path / "run"), *overrides))
        with pytest.raises(InputError, match="another optimizer, other multipliers or other frozen stages"):
            other.resume_or_load(resume=True)


@pytest.mark.slow
def test_a_seed_is_drawn_and_kept(shapes, tmp_path):
    trainer = train("retinanet", tmp_path / "run", "SEED", "-1", cut_at=4)
    (tmp_path / "run/config.yaml").write_text("SEED: -1\n")
    again = Trainer(small_config("retinanet", *RUN, "OUTPUT_DIR", str(tmp_path / "run"), "SEED", "-1"))
    again.resume_or_load(resume=True)
    assert again.seed == trainer.seed >= 0
    assert load_config(tmp_path / "run/config.yaml").SEED == trainer.seed
    assert again.start_iter == 3


def test_metrics_of_iterations_to_come_and_a_torn_line_are_forgotten(tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text('{"iteration": 3, "a": 1}\n{"iteration": 7, "a": 2}\n{"iteration": 11, "a"')
    file = MetricsFile(path)
    file.start(7)
    file.close()
    assert path.read_text() == '{"iteration": 3, "a": 1}\n'


def test_an_evaluation_stands_before_the_losses_that_came_after_it(tmp_path):
    file = MetricsFile(tmp_path / "metrics.json")
    with EventStorage() as storage:
        storage.put_scalar("total_loss", 2.0, cur_iter=5)
        storage.put_scalar("bbox/AP", 40.0, smoothing_hint=False, cur_iter=3)
        file.write()
        storage.put_scalar("total_loss", 4.0, cur_iter=6)
        file.write()
        file.write()
    file.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [3, 5, 6]
    # Losses are medians.
    assert lines == [lines[0], {"iteration": 5, "total_loss": 2.0}, {"iteration": 6, "total_loss": 3.0}]
    assert lines[0]["bbox/AP"] == 40.0


def test_momentum_of_the_config_counts(caplog):
    def configured(momentum):
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1, momentum=momentum)
        return optimizer, LRMultiplier(optimizer, multiplier=LinearParamScheduler(1, 0.5), max_iter=10)

    (first, _), (second, scheduler) = configured(0.9), configured(0.5)
    rates = ConfiguredRates(second, scheduler)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["momentum"] == 0.9
    rates.restore()
    assert second.param_groups[0]["momentum"] == 0.5
    assert "other learning rates, weight decays or momentum" in caplog.text


@pytest.mark.parametrize("saved, expected", [([3.0], 3.0), ([3.0, 5.0], 4.0), ([None], None), ([], None)])
def test_the_normaliser_of_another_number_of_processes_is_their_mean(saved, expected):
    model = torch.nn.Linear(1, 1)
    restore_loss_normalizer(model, saved)
    assert getattr(model, "loss_normalizer", None) == expected


# -- processes -------------------------------------------------------------------------------------


def start(output, datasets_root, *overrides):
    command = [sys.executable, "tools/train_net.py", "--config-file", str(CONFIGS["retinanet"])]
    command += [*SMALL["retinanet"], *RUN]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DETECTRON2_DATASETS": str(datasets_root)}
    return subprocess.Popen(
        [*command, "OUTPUT_DIR", str(output), *overrides],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(path, process):
    deadline = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_says_so_and_has_a_code_of_its_own(number, datasets_root, tmp_path):
    output = tmp_path / "run"
    long = ["SOLVER.MAX_ITER", "4000", "SOLVER.CHECKPOINT_PERIOD", "1", "TEST.EVAL_PERIOD", "0"]
    long += ["SOLVER.CHECKPOINT_KEEP", "2"]
    process = start(output, datasets_root, *long)
    wait_for(output / "last_checkpoint", process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, said
    assert f"{number.name}: saved after iteration" in said
    assert "Traceback" not in said
    last = (output / "last_checkpoint").read_text()
    iteration = int(said.partition("saved after iteration ")[2].partition(";")[0])
    assert torch.load(output / last, weights_only=True)["iteration"] == iteration
    assert len(list(output.glob("model_*.pth"))) <= 2


@pytest.mark.slow
def test_a_run_that_fails_ends_its_workers_and_itself(datasets_root, tmp_path):
    """They leave the scheduler's signals to the run, and must not outlive it for that; nothing is evaluated either."""
    code = """
import sys, torch
from projects_vil import Trainer, register_datasets
from tests.projects_vil.helpers import small_config
options = ["DATALOADER.NUM_WORKERS", "1", "SOLVER.IMS_PER_BATCH", "2", "SOLVER.MAX_ITER", "1"]
cfg = small_config("retinanet", *options, "OUTPUT_DIR", sys.argv[1])
register_datasets(cfg)
trainer = Trainer(cfg)
step = trainer.run_step
def run_step():
    step()
    raise FloatingPointError("diverged")
trainer.run_step = run_step
trainer.train()
"""
    (tmp_path / "run").mkdir()
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DETECTRON2_DATASETS": str(datasets_root)}
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1
    assert "FloatingPointError: diverged" in result.stderr
    assert not (tmp_path / "run/evaluation.json").exists()


def test_training_anew_over_checkpoints_is_refused(trained_run, datasets_root):
    arguments = ["--config-file", str(trained_run / "config.yaml")]
    result = run_tool("train_net.py", *arguments, datasets_root=datasets_root)
    assert error_line(result) == (
        f"error: OUTPUT_DIR {trained_run} has checkpoints of another run, model_final.pth among them: add --resume to "
        "go on with it, choose another OUTPUT_DIR, or add OVERWRITE_OUTPUT_DIR True"
    )
