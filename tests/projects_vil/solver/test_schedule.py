"""SOLVER.EPOCHS: iterations by the size of the data."""

import re
import runpy
import shlex

import pytest

from backbones import InputError
from projects_vil import load_config
from projects_vil.solver import count_training_images, is_by_epochs, scale_learning_rate, schedule_by_epochs
from tests.projects_vil.helpers import CONFIGS, ROOT, run_tool, small_config

ONE_X = ROOT / "configs/retinanet/vil_tiny_1x.yaml"
THREE_X = ROOT / "configs/retinanet/vil_tiny_3x_ms.yaml"
KEYS = ("SOLVER.MAX_ITER", "SOLVER.STEPS", "SOLVER.WARMUP_ITERS", "TEST.EVAL_PERIOD", "SOLVER.CHECKPOINT_PERIOD")


def plan(num_images, *overrides, config=ONE_X):
    overrides = list(map(str, overrides))
    return schedule_by_epochs(load_config(config, overrides), num_images, overrides)


def numbers(cfg):
    return cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS, cfg.SOLVER.WARMUP_ITERS, cfg.TEST.EVAL_PERIOD


@pytest.mark.parametrize(
    "num_images, batch, epochs, expected",
    [
        # COCO's images with objects, as the paper's 1x: 90k iterations with steps at 60k and 80k.
        (117266, 16, 12, (87950, (58633, 78178), 1000, 7330)),
        # 63 iterations an epoch: two epochs are 100 iterations, a twentieth of the run more.
        (1000, 16, 80, (5000, (3333, 4444), 250, 250)),
        (50, 8, 40, (250, (167, 222), 13, 100)),
        (7, 16, 1, (1, (), 1, 1)),
        # Of 2 iterations, both steps come after the first.
        (16, 16, 2, (2, (1,), 1, 2)),
    ],
)
def test_iterations(num_images, batch, epochs, expected):
    cfg, _ = plan(num_images, "SOLVER.EPOCHS", epochs, "SOLVER.IMS_PER_BATCH", batch)
    assert numbers(cfg) == expected
    assert cfg.SOLVER.CHECKPOINT_PERIOD == cfg.TEST.EVAL_PERIOD
    assert cfg.SOLVER.EPOCHS == 0 and cfg.is_frozen()


@pytest.mark.parametrize("config", [ONE_X, THREE_X])
def test_steps_keep_their_fractions(config):
    whole = load_config(config)
    cfg, _ = plan(4567, "SOLVER.EPOCHS", 36, config=config)
    for step, of_the_whole in zip(cfg.SOLVER.STEPS, whole.SOLVER.STEPS, strict=True):
        assert step / cfg.SOLVER.MAX_ITER == pytest.approx(of_the_whole / whole.SOLVER.MAX_ITER, abs=1e-4)


def test_a_schedule_without_steps_keeps_its_own():
    cfg, lines = plan(400, "SOLVER.EPOCHS", "8", config=CONFIGS["retinanet"])
    assert cfg.SOLVER.STEPS == (30000,)
    assert cfg.SOLVER.MAX_ITER == 400 and cfg.SOLVER.WARMUP_ITERS == 20
    assert load_config(CONFIGS["retinanet"]).SOLVER.WARMUP_ITERS == 50


def test_a_warm_up_grows_no_longer_than_the_config_says():
    assert plan(117266, "SOLVER.EPOCHS", 36)[0].SOLVER.WARMUP_ITERS == 1000
    assert plan(400, "SOLVER.EPOCHS", 36, "SOLVER.WARMUP_ITERS", 0)[0].SOLVER.WARMUP_ITERS == 0


def test_off_changes_nothing():
    cfg = load_config(ONE_X)
    assert schedule_by_epochs(cfg, 0) == (cfg, [])
    assert not is_by_epochs(cfg)


def test_what_is_printed_can_be_typed():
    cfg, lines = plan(400, "SOLVER.EPOCHS", 12)
    assert lines[0] == "SOLVER.EPOCHS 12: 400 training images, 16 an iteration, 25 iterations an epoch"
    typed = shlex.split(lines[1].removeprefix("SOLVER.EPOCHS 12 is "))
    assert typed[::2] == list(KEYS)
    assert load_config(ONE_X, typed) == cfg


@pytest.mark.parametrize(
    "key, value", [("SOLVER.WARMUP_ITERS", "77"), ("TEST.EVAL_PERIOD", "0"), ("SOLVER.STEPS", "(5,)")]
)
def test_what_is_typed_stays(key, value):
    cfg, lines = plan(400, "SOLVER.EPOCHS", 12, key, value)
    assert cfg.SOLVER.MAX_ITER == 300
    parent, leaf = key.split(".")
    assert cfg[parent][leaf] == load_config(ONE_X, [key, value])[parent][leaf]
    assert key not in lines[1]


def test_typed_iterations_count_over_a_files_epochs(tmp_path):
    config = tmp_path / "own.yaml"
    config.write_text(f"_BASE_: {ONE_X}\nSOLVER:\n  EPOCHS: 12\n")
    cfg, lines = plan(400, "SOLVER.MAX_ITER", 20, config=config)
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS, cfg.SOLVER.EPOCHS) == (20, (60000, 80000), 0)
    assert lines == ["SOLVER.MAX_ITER 20 was typed and counts; SOLVER.EPOCHS 12 of the config does not"]
    assert plan(400, config=config)[0].SOLVER.MAX_ITER == 300


@pytest.mark.parametrize(
    "overrides, message",
    [
        (("SOLVER.EPOCHS", 3, "SOLVER.MAX_ITER", 9), "SOLVER.EPOCHS 3 and SOLVER.MAX_ITER 9 both say how long"),
        (("SOLVER.EPOCHS", -1), "SOLVER.EPOCHS is -1: it is 1 or more, or 0 for SOLVER.MAX_ITER as it is"),
        (("SOLVER.EPOCHS", 3, "SOLVER.IMS_PER_BATCH", 0), "40 images, 0 an iteration: both are 1 or more"),
    ],
)
def test_mistakes(overrides, message):
    with pytest.raises(InputError, match=re.escape(message)):
        plan(40, *overrides)


def test_images_without_objects_are_not_counted(shapes):
    assert count_training_images(small_config()) == 16


@pytest.mark.slow
def test_training_by_epochs(datasets_root, tmp_path):
    overrides = ["DATALOADER.NUM_WORKERS", "0", "MODEL.FPN.OUT_CHANNELS", "16", "MODEL.RETINANET.NUM_CONVS", "1"]
    overrides += ["INPUT.MIN_SIZE_TRAIN", "(48,)", "INPUT.MIN_SIZE_TEST", "48", "SOLVER.IMS_PER_BATCH", "8"]
    overrides += ["OUTPUT_DIR", tmp_path, "SOLVER.EPOCHS", "1"]
    result = run_tool("train_net.py", "--config-file", CONFIGS["retinanet"], *overrides, datasets_root=datasets_root)
    assert result.returncode == 0, result.stderr
    assert "SOLVER.EPOCHS 1: 16 training images, 8 an iteration, 2 iterations an epoch" in result.stdout
    cfg = load_config(tmp_path / "config.yaml")
    assert (cfg.SOLVER.EPOCHS, cfg.SOLVER.MAX_ITER, cfg.SOLVER.CHECKPOINT_PERIOD) == (0, 2, 2)
    assert "SOLVER.EPOCHS" not in " ".join(schedule_by_epochs(cfg, 99)[1])
    assert (tmp_path / "model_final.pth").is_file()


def plan_schedule(*args):
    runpy.run_path(str(ROOT / "tools/plan_schedule.py"))["main"](list(map(str, args)))


def test_the_tool_prints_a_table_and_what_to_type(capsys):
    plan_schedule("--images", 50, "--epochs", "20,40", "--batch", 8)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("50 training images, 8 an iteration")
    assert lines[3].split() == ["40", "250", "167,", "222", "13", "100", "100"]
    assert "SOLVER.IMS_PER_BATCH 8 SOLVER.EPOCHS 40" in lines
    assert lines[-1].startswith("SOLVER.MAX_ITER 250 SOLVER.STEPS '(167, 222)'")


def test_the_tool_counts(shapes, capsys):
    plan_schedule("--config-file", CONFIGS["retinanet"], "--epochs", 9, "SOLVER.WARMUP_ITERS", 0)
    assert capsys.readouterr().out.startswith("16 training images, 8 an iteration")


@pytest.mark.parametrize("epochs", ["0", "3,", "-1", "many"])
def test_the_tool_on_mistakes(epochs):
    with pytest.raises(InputError, match="it is a number of 1 or more"):
        plan_schedule("--images", 5, f"--epochs={epochs}")


# -- the learning rate -----------------------------------------------------------------------------


def test_a_rate_follows_the_batch_by_a_key_alone():
    keys = ["SOLVER.IMS_PER_BATCH", "4", "SOLVER.BASE_LR", "1e-3", "SOLVER.BASE_LR_END", "1e-4"]
    cfg = load_config(ONE_X, keys)
    assert scale_learning_rate(cfg) == (cfg, [])
    cfg = load_config(ONE_X, [*keys, "SOLVER.SCALE_LR_TO_BATCH", "16"])
    scaled, lines = scale_learning_rate(cfg)
    assert (scaled.SOLVER.BASE_LR, scaled.SOLVER.BASE_LR_END) == (2.5e-4, 2.5e-5)
    assert lines == ["SOLVER.SCALE_LR_TO_BATCH 16: SOLVER.IMS_PER_BATCH is 4, and SOLVER.BASE_LR 0.001 becomes 0.00025"]
    # Not twice, where a run goes on with its own config.
    assert scale_learning_rate(scaled) == (scaled, [])


def test_what_detectron2_scales_is_said():
    cfg = load_config(ONE_X, ["SOLVER.REFERENCE_WORLD_SIZE", "8", "SOLVER.BASE_LR", "1e-3"])
    same, (line,) = scale_learning_rate(cfg, processes=2)
    assert same == cfg and line.startswith("SOLVER.REFERENCE_WORLD_SIZE is 8, and there are 2 processes: detectron2")
    assert "BASE_LR by 0.25 (BASE_LR 0.00025)" in line
    assert scale_learning_rate(cfg, processes=8) == (cfg, [])
