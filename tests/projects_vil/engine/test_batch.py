"""SOLVER.ACCUMULATE 0: micro-batches that fit into a given memory, by real steps on the CPU."""

import re
from pathlib import Path

import pytest
import torch
from detectron2.utils import comm

from projects_vil import Trainer
from projects_vil.config import load_config
from projects_vil.engine.batch import choose_micro_batches, largest_training_size, peak_of_step
from tests.gpu import on_gpus
from tests.projects_vil.engine.gloo import in_processes
from tests.projects_vil.helpers import CONFIGS, SMALL, message, run_tool, small_config

AUTO = ["INPUT.MIN_SIZE_TRAIN", "(128,)", "SOLVER.ACCUMULATE", "0", "SOLVER.IMS_PER_BATCH"]


@pytest.mark.slow
@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_the_largest_micro_batch_within_a_limit(detector):
    keys = ["8", "INPUT.MIN_SIZE_TRAIN", "(256,)", "MODEL.EMA.ENABLED", "True", "SOLVER.AMP.ENABLED", "True"]
    cfg = small_config(detector, *AUTO, *keys)
    chosen, (line,) = choose_micro_batches(cfg, limit=1e15)
    assert chosen.SOLVER.ACCUMULATE == 1 and chosen.SOLVER.IMS_PER_BATCH == 8 and "256 x 512" in line
    peaks = {int(size): float(peak) * 1e9 for size, peak in re.findall(r"(\d+): ([\d.]+) GB", line)}
    assert list(peaks) == [1, 2, 8] and peaks[8] > peaks[2] + 5e7
    # Four images take about a third of the way from two to eight.
    chosen, (line,) = choose_micro_batches(cfg, limit=peaks[2] / 3 + peaks[8] * 2 / 3)
    assert chosen.SOLVER.ACCUMULATE == 2 and "SOLVER.ACCUMULATE 2" in line and "4 of 8 images" in line
    error = message(choose_micro_batches, cfg, limit=peaks[1] / 4)
    assert "INPUT.MIN_SIZE_TRAIN" in error and "ACTIVATION_CHECKPOINTING" in error


def test_other_numbers_stay_and_only_a_command_chooses(shapes, tmp_path):
    cfg = small_config("retinanet", "SOLVER.ACCUMULATE", "2")
    assert choose_micro_batches(cfg, limit=0) == (cfg, [])
    assert "SOLVER.ACCUMULATE is 0" in message(Trainer, small_config("retinanet", *AUTO, "8"))


@pytest.mark.parametrize(
    "detector, overrides, size",
    [
        ("retinanet", ["INPUT.MIN_SIZE_TRAIN", "(640, 800)"], (800, 1333)),
        ("retinanet", ["INPUT.MIN_SIZE_TRAIN", "(100,)"], (100, 200)),
        ("retinanet", ["INPUT.MIN_SIZE_TRAIN", "(100,)", "DATALOADER.ASPECT_RATIO_GROUPING", "False"], (200, 200)),
        ("retinanet", ["INPUT.AUGMENTATION", "lsj", "INPUT.LSJ.SIZE", "512"], (512, 512)),
        ("semantic_fpn", [], (64, 64)),
    ],
)
def test_sizes_of_the_largest_training_images(detector, overrides, size):
    assert largest_training_size(small_config(detector, *overrides)) == size


@pytest.mark.slow
def test_processes_agree_on_the_smallest(tmp_path):
    in_processes(2, choose_with_other_limits, tmp_path, store=tmp_path / "store")
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2", "2"]


def choose_with_other_limits(folder: Path) -> None:
    cfg = small_config("retinanet", *AUTO, "4", "INPUT.MIN_SIZE_TRAIN", "(512,)")
    # One image of 512 x 1024 pixels takes 0.9 GB, two 1.6 GB.
    limit = (1.2e9, 1e15)[comm.get_rank()]
    number = choose_micro_batches(cfg, limit=limit)[0].SOLVER.ACCUMULATE
    (folder / str(comm.get_rank())).write_text(str(number))


@on_gpus(1)
def test_micro_batches_of_a_gpu_end_where_its_memory_does():
    cfg = small_config("retinanet", *AUTO, "64", "INPUT.MIN_SIZE_TRAIN", "(512,)", "MODEL.DEVICE", "cuda")
    needed, total = peak_of_step(cfg, 4), torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(needed / total)
    try:
        number = choose_micro_batches(cfg, limit=1e15)[0].SOLVER.ACCUMULATE
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert number >= 16 and torch.cuda.memory_allocated() < 1e7


@pytest.mark.slow
def test_a_run_has_the_number_in_its_config_and_keeps_it(datasets_root, tmp_path):
    def train(*overrides) -> str:
        keys = [*SMALL["retinanet"], "SOLVER.IMS_PER_BATCH", "4", "OUTPUT_DIR", tmp_path / "run", *overrides]
        command = ["train_net.py", "--config-file", CONFIGS["retinanet"], "--resume", *keys, "SOLVER.WARMUP_ITERS", "0"]
        result = run_tool(*command, datasets_root=datasets_root)
        assert result.returncode == 0, result.stderr
        return result.stdout

    number = "SOLVER.ACCUMULATE", "0"
    assert "SOLVER.ACCUMULATE 0 is SOLVER.ACCUMULATE 1: 4 of 4 images" in train(*number, "SOLVER.MAX_ITER", "1")
    assert load_config(tmp_path / "run/config.yaml").SOLVER.ACCUMULATE == 1
    train("SOLVER.ACCUMULATE", "2", "SOLVER.MAX_ITER", "2")
    assert "SOLVER.ACCUMULATE 2, as in the resumed run" in train(*number, "SOLVER.MAX_ITER", "3")
    assert load_config(tmp_path / "run/config.yaml").SOLVER.ACCUMULATE == 2
