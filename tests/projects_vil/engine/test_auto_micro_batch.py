"""SOLVER.GRADIENT_ACCUMULATION_STEPS auto: from the memory of a GPU, or the number of pixels on the CPU."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from detectron2.utils import comm

from projects_vil.config import with_overrides
from projects_vil.engine import auto_micro_batch
from projects_vil.engine.auto_micro_batch import choose_micro_batches, largest_training_size, peak_of_step, run_steps
from tests.gpu import on_gpus
from tests.projects_vil.checkpoint.test_checkpointer import log_of
from tests.projects_vil.engine.gloo import in_processes
from tests.projects_vil.helpers import message, small_config
from tests.selection import slow_except

AUTO = ["INPUT.MIN_SIZE_TRAIN", "(128,)", "SOLVER.GRADIENT_ACCUMULATION_STEPS", "auto", "SOLVER.IMS_PER_BATCH"]
# Memory of a step without a GPU: 1 GB for the model, and 0.5 GB per image.
linear_peaks = mock.patch.object(auto_micro_batch, "peak_of_step", lambda cfg, num_images: 1e9 + 0.5e9 * num_images)


@linear_peaks
def test_the_largest_micro_batch_within_a_limit():
    cfg = small_config("retinanet", *AUTO, "8", "INPUT.MIN_SIZE_TRAIN", "(256,)", "MODEL.DEVICE", "cuda")
    chosen = choose_micro_batches(cfg, limit=1e15)
    assert chosen.SOLVER.GRADIENT_ACCUMULATION_STEPS == 1 and chosen.SOLVER.IMS_PER_BATCH == 8
    with log_of(auto_micro_batch.__name__) as log:
        assert choose_micro_batches(cfg, limit=4.9e9).SOLVER.GRADIENT_ACCUMULATION_STEPS == 2
    assert all(text in log.output[-1] for text in ("256 x 512", "2 micro-batches of 4 images", "3.00 GB"))
    error = message(choose_micro_batches, cfg, limit=1.4e9)
    assert "1.50 GB" in error and "INPUT.MIN_SIZE_TRAIN" in error and "ACTIVATION_CHECKPOINTING" in error


@pytest.mark.parametrize(
    ("side", "images", "steps"), [(128, 16, 1), (256, 16, 2), (512, 16, 8), (512, 3, 3), (800, 16, 16)]
)
def test_micro_batches_on_the_cpu_follow_from_pixels(side, images, steps):
    """The memory is not measured."""
    cfg = small_config("retinanet", *AUTO, str(images), "INPUT.MIN_SIZE_TRAIN", f"({side},)")
    with mock.patch.object(auto_micro_batch, "run_steps", side_effect=AssertionError):
        assert choose_micro_batches(cfg).SOLVER.GRADIENT_ACCUMULATION_STEPS == steps


@pytest.mark.parametrize("detector", slow_except(["retinanet", "mask_rcnn", "semantic_fpn"], ["mask_rcnn"]))
def test_the_probe_runs_training_steps(detector):
    keys = [] if detector == "semantic_fpn" else ["INPUT.MIN_SIZE_TRAIN", "(64,)"]
    run_steps(small_config(detector, *keys, "MODEL.EMA.ENABLED", "True", "SOLVER.AMP.ENABLED", "True"), 2)


@pytest.mark.parametrize(
    "detector, overrides, size",
    [
        ("retinanet", ["INPUT.MIN_SIZE_TRAIN", "(640, 800)"], (800, 1333)),
        ("retinanet", ["INPUT.MIN_SIZE_TRAIN", "(100,)", "DATALOADER.ASPECT_RATIO_GROUPING", "False"], (200, 200)),
        ("retinanet", ["INPUT.AUGMENTATION", "lsj", "INPUT.LSJ.SIZE", "512"], (512, 512)),
        ("semantic_fpn", [], (64, 64)),
    ],
)
def test_the_largest_training_size(detector, overrides, size):
    assert largest_training_size(small_config(detector, *overrides)) == size


def test_processes_agree_on_the_smallest_micro_batch(tmp_path):
    in_processes(2, choose_with_other_limits, tmp_path, store=tmp_path / "store")
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2", "2"]


def choose_with_other_limits(folder: Path) -> None:
    cfg = small_config("retinanet", *AUTO, "4", "MODEL.DEVICE", "cuda")
    # One image takes 1.5 GB, two take 2 GB.
    limit = (1.7e9, 1e15)[comm.get_rank()]
    with linear_peaks:
        number = choose_micro_batches(cfg, limit=limit).SOLVER.GRADIENT_ACCUMULATION_STEPS
    (folder / str(comm.get_rank())).write_text(str(number))


@on_gpus(1)
def test_micro_batches_fit_the_memory_of_a_gpu():
    cfg = small_config("retinanet", *AUTO, "64", "INPUT.MIN_SIZE_TRAIN", "(512,)", "MODEL.DEVICE", "cuda")
    needed, total = peak_of_step(cfg, 4), torch.cuda.mem_get_info()[1]
    # The workspaces of cuBLAS, 64 MB on an H200, stay.
    before = torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(needed / total)
    try:
        number = choose_micro_batches(cfg, limit=1e15).SOLVER.GRADIENT_ACCUMULATION_STEPS
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert number >= 16 and torch.cuda.memory_allocated() - before < 1e7


def test_a_resumed_run_keeps_the_number_of_its_config(tmp_path):
    run = ["OUTPUT_DIR", str(tmp_path), *AUTO, "4"]
    (tmp_path / "model_final.pth").touch()
    config = with_overrides(small_config("retinanet", *run), {"SOLVER.GRADIENT_ACCUMULATION_STEPS": 2})
    (tmp_path / "config.yaml").write_text(config.dump())
    for resume, steps in ((True, 2), (False, 1)):
        chosen = choose_micro_batches(small_config("retinanet", *run), resume=resume)
        assert chosen.SOLVER.GRADIENT_ACCUMULATION_STEPS == steps
