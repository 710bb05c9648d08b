"""Checks before a run starts."""

import shutil

import pytest
import torch
from detectron2.engine import DefaultTrainer

from projects_vil.config import with_overrides
from projects_vil.engine import check_output_dir, check_setup
from tests.projects_vil.helpers import message, small_config, untrained_detector


def message_of(*overrides: str, **options) -> str:
    return message(check_setup, small_config("retinanet", *overrides), **options)


def test_valid_setups(shapes, trained_run):
    final = str(trained_run / "model_final.pth")
    check_setup(small_config())
    check_setup(small_config("retinanet", "MODEL.WEIGHTS", final), eval_only=True)
    absent = ["MODEL.WEIGHTS", final, "DATASETS.TRAIN", "('absent',)"]
    check_setup(small_config("retinanet", *absent), eval_only=True)
    check_setup(small_config("retinanet", "SOLVER.AMP.ENABLED", "True"))


SHIFT = ["MODEL.TRANSFORMER.RANDOM_SHIFT_FRACTION", "0.5"]
# The error names the key.
VALUES = (
    *("SOLVER.MAX_ITER 0", "SOLVER.CHECKPOINT_PERIOD 0", "SOLVER.BASE_LR -0.1"),
    *("SOLVER.OPTIMIZER ADAM", "SOLVER.LR_SCHEDULER_NAME Cosine", "SOLVER.GRADIENT_ACCUMULATION_STEPS 3"),
    *("SOLVER.LAYER_DECAY 1.5", "SOLVER.WARMUP_ITERS -1", "MODEL.META_ARCHITECTURE DETR", "INPUT.FORMAT HSV"),
    *("TEST.BEST_METRIC bbox/ap", "TEST.BEST_METRIC segm/AP", "DATASETS.CHECK eror"),
    *("MODEL.PIXEL_MEAN [1.0]", "MODEL.PIXEL_STD [1.0, 0.0, 1.0]", "MODEL.FPN.NORM foo", "INPUT.CROP.PAD True"),
    *("SOLVER.EARLY_STOPPING_PATIENCE 3", "SOLVER.LR_MULTIPLIERS ['*weight*', 0.1]", "INPUT.MIN_SIZE_TRAIN ()"),
    *("DATASETS.TRAIN ()", "INPUT.MIN_SIZE_TRAIN_SAMPLING batches"),
)


@pytest.mark.parametrize("value", VALUES)
def test_a_wrong_value_is_named(shapes, value):
    key, text = value.split(maxsplit=1)
    assert key in message_of(key, text)


@pytest.mark.parametrize(
    "overrides, named",
    [
        (["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.DTYPE", "float16"], "SOLVER.AMP.DTYPE"),
        (["SOLVER.REFERENCE_BATCH_SIZE", "16", "SOLVER.REFERENCE_WORLD_SIZE", "8"], "REFERENCE_BATCH_SIZE"),
        (["INPUT.CROP.ENABLED", "True", "INPUT.CROP.TYPE", "relativ"], "'relative'"),
        (["SOLVER.LR_SCHEDULER_NAME", "WarmupMultiStepLR", "SOLVER.STEPS", "(0, 10)"], "SOLVER.STEPS"),
        (["SOLVER.WARMUP_FACTOR", "1.5"], "SOLVER.WARMUP_FACTOR is 1.5. It must be 0 to 1"),
        (["OUTPUT_DIR", ""], "OUTPUT_DIR"),
        (["TEST.BEST_METRIC", "validation_loss/total_loss"], "TEST.VALIDATION_LOSS"),
        (["DATALOADER.NUM_WORKERS", "-1"], "DATALOADER.NUM_WORKERS is -1. It must be at least 0"),
        (["MODEL.PIXEL_STD", "[1.0, 1e999, 1.0]"], "MODEL.PIXEL_STD is [1.0, inf, 1.0]"),
        (["SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "nrom"], "Did you mean 'norm'"),
        (["SOLVER.LR_SCHEDULER_NAME", "WarmupMultiStepLR", "SOLVER.STEPS", "(9, 5)"], "Check SOLVER.STEPS"),
        (["MODEL.TRANSFORMER.VARIANT", "vil_tinny"], "MODEL.TRANSFORMER: Unknown variant 'vil_tinny'. Did you mean"),
        (["MODEL.TRANSFORMER.ATTENTION_BACKEND", "spda"], "MODEL.TRANSFORMER: Unknown attention_backend 'spda'"),
        (["MODEL.TRANSFORMER.VARIANT", "sra64_tiny", *SHIFT], "RANDOM_SHIFT_FRACTION"),
        pytest.param(["MODEL.TRANSFORMER.COMPILE", "True", *SHIFT], "COMPILE", marks=pytest.mark.slow),
        (["DATASETS.TEST", "('shapes_vall',)"], "'shapes_val'"),
        (["MODEL.WEIGHTS", "absent.pth"], "absent.pth"),
        (["MODEL.RETINANET.NUM_CLASSES", "80"], "MODEL.RETINANET.NUM_CLASSES is 80, but 'shapes_val' has 3 classes"),
    ],
)
def test_mistakes(shapes, overrides, named):
    assert named in message_of(*overrides)


def test_evaluation_needs_data_and_weights(shapes):
    assert "DATASETS.TEST" in message_of("DATASETS.TEST", "()", "MODEL.WEIGHTS", __file__, eval_only=True)
    assert "MODEL.WEIGHTS" in message_of(eval_only=True)
    assert "NUM_CLASSES is 80" in message_of("MODEL.RETINANET.NUM_CLASSES", "80", eval_only=True)


def test_a_batch_is_divided_among_processes_and_micro_batches(shapes):
    def keys(*values):
        names = ("IMS_PER_BATCH", "GRADIENT_ACCUMULATION_STEPS", "REFERENCE_WORLD_SIZE")
        return [token for name, value in zip(names, values, strict=True) for token in (f"SOLVER.{name}", str(value))]

    for values, processes in (((6, 1, 0), 4), ((8, 4, 0), 4), ((6, 1, 4), 3)):
        assert "SOLVER.IMS_PER_BATCH" in message_of(*keys(*values), processes=processes)
    for values, processes in (((6, 1, 0), 3), ((8, 4, 0), 2), ((16, 1, 8), 5), ((16, 2, 8), 12)):
        cfg = small_config("retinanet", *keys(*values))
        check_setup(cfg, processes=processes)
        scaled = DefaultTrainer.auto_scale_workers(cfg, processes).SOLVER.IMS_PER_BATCH
        assert scaled % (processes * values[1]) == 0


def test_the_weights_of_a_run_need_its_config(shapes, tmp_path):
    weights = tmp_path / "model_final.pth"
    torch.save({"model": untrained_detector(small_config()).state_dict()}, weights)
    keys = ["MODEL.FPN.OUT_CHANNELS", "64", "MODEL.WEIGHTS", str(weights)]
    assert "config.yaml" not in message_of(*keys, eval_only=True)
    (tmp_path / "config.yaml").write_text(small_config().dump())
    assert str(tmp_path / "config.yaml") in message_of(*keys, eval_only=True)


def test_a_new_run_does_not_start_among_checkpoints(shapes, trained_run):
    cfg, batch = small_config("retinanet", "OUTPUT_DIR", str(trained_run)), "SOLVER.IMS_PER_BATCH"
    assert "--resume" in message(check_output_dir, cfg, resume=False)
    assert check_output_dir(with_overrides(cfg, {batch: 16}), resume=True)
    assert "SOLVER.IMS_PER_BATCH is 8" in message(check_output_dir, with_overrides(cfg, {batch: 8}), resume=True)
    assert not check_output_dir(with_overrides(cfg, {"OVERWRITE_OUTPUT_DIR": True}), resume=False)


def test_a_resume_has_the_same_annotations(shapes, tmp_path):
    """The file may have been moved, and the config may be of an earlier version."""
    annotations = [shapes / f"annotations/instances_{split}.json" for split in ("train", "val")]
    for name, source in (("first", annotations[0]), ("moved", annotations[0]), ("other", annotations[1])):
        shutil.copy(source, tmp_path / f"{name}.json")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/model_final.pth").touch()

    def keys(name: str) -> list[str]:
        entries = [["mine", str(tmp_path / f"{name}.json"), str(shapes / "train")]]
        return ["DATASETS.COCO", repr(entries), "DATASETS.TRAIN", "('mine',)", "OUTPUT_DIR", str(tmp_path / "run")]

    (tmp_path / "run/config.yaml").write_text(small_config("retinanet", *keys("first")).dump())
    assert check_output_dir(small_config("retinanet", *keys("moved")), resume=True)
    text = message(check_output_dir, small_config("retinanet", *keys("other")), resume=True)
    assert "other.json" in text and "first.json" in text
    (tmp_path / "first.json").unlink()
    assert check_output_dir(small_config("retinanet", *keys("moved")), resume=True)
