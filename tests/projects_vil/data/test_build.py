"""Test that batches depend only on the seed and the iteration."""

import random
import signal
from itertools import chain, islice
from multiprocessing.process import BaseProcess
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from detectron2.data.samplers import TrainingSampler
from detectron2.utils import comm

from backbones.errors import STOP_SIGNALS
from projects_vil.data import build_test_loader, build_train_loader
from projects_vil.data.build import BatchStream, seed_all, seeded
from tests.projects_vil.data.custom_dataset import NAME, config, entry, load, truncate
from tests.projects_vil.helpers import message, small_config

GROUPS = [0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0]


def stream(*, seed=3, **options) -> BatchStream:
    options = {"batch_size": 2, "groups": GROUPS, "seed": seed} | options
    return BatchStream(lambda seed: TrainingSampler(len(GROUPS), seed=seed), **options)


def test_batches_have_one_group_resume_at_any_iteration_and_differ_by_seed():
    batches = list(islice(stream(), 30))
    assert list(islice(stream(first_iteration=17), 13)) == batches[17:]
    assert all(len({GROUPS[index] for index, *_ in batch}) == 1 for batch in batches)
    assert {index for batch in batches for index, *_ in batch} == set(range(len(GROUPS)))
    assert len({seed for batch in batches for _, seed, _ in batch}) == 60
    assert list(islice(stream(seed=4), 30)) != batches


def test_two_processes_share_the_images_of_one(monkeypatch):
    groups = [0] * len(GROUPS)
    whole = list(islice(stream(batch_size=4, groups=groups), 12))
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr(comm, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(comm, "get_world_size", lambda: 2)
        parts.append(list(islice(stream(groups=groups), 12)))
    assert [sorted(batch) for batch in whole] == [sorted(a + b) for a, b in zip(*parts, strict=True)]


def test_seeding_does_not_change_the_generators_outside():
    def sample():
        return random.random(), np.random.rand(), torch.rand(()).item()

    seed_all(0)
    first, second = sample(), sample()
    seed_all(0)
    assert sample() == first
    with seeded(7):
        inside = sample()
    assert sample() == second
    with seeded(7):
        assert sample() == inside


@pytest.mark.parametrize("of", ["training", "evaluation"])
def test_signals_are_deferred_while_loading_processes_start(of, shapes, monkeypatch):
    """A signal that arrives before a worker ignores it would stop the worker, and so the run."""
    masks = []
    start = BaseProcess.start

    def watched(process):
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        start(process)

    monkeypatch.setattr(BaseProcess, "start", watched)
    cfg = small_config("retinanet", "DATALOADER.NUM_WORKERS", "1", "SOLVER.IMS_PER_BATCH", "2")
    loader = build_train_loader(cfg) if of == "training" else build_test_loader(cfg, "shapes_val")
    next(iter(loader))
    assert masks and all(mask >= set(STOP_SIGNALS) for mask in masks)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOP_SIGNALS)


STRONG = ["INPUT.AUGMENTATION", "lsj_copy_paste", "INPUT.LSJ.SIZE", "48"]


SIZES = ["INPUT.MIN_SIZE_TRAIN", "(48, 64)"]
ONE_SIZE = [*SIZES, "INPUT.MIN_SIZE_TRAIN_SAMPLING", "batch"]


@pytest.mark.parametrize("detector, keys", [("retinanet", SIZES), ("retinanet", ONE_SIZE), ("mask_rcnn", STRONG)])
def test_batches_do_not_depend_on_worker_processes_or_on_resuming(shapes, detector, keys):
    def images(*, workers: int, first: int, number: int) -> list[dict]:
        options = ["SOLVER.IMS_PER_BATCH", "3", "DATALOADER.NUM_WORKERS", str(workers)]
        loader = build_train_loader(small_config(detector, *keys, *options))
        loader.start(seed=7, iteration=first)
        return list(chain(*islice(loader, number)))

    whole = images(workers=0, first=0, number=6)
    resumed = images(workers=2, first=0, number=4) + images(workers=1, first=4, number=2)
    for sample, other in zip(resumed, whole, strict=True):
        assert sample["image_id"] == other["image_id"] and torch.equal(sample["image"], other["image"])
        assert torch.equal(sample["instances"].gt_boxes.tensor, other["instances"].gt_boxes.tensor)
        if keys is STRONG:
            assert torch.equal(sample["instances"].gt_masks.tensor, other["instances"].gt_masks.tensor)
    if keys is STRONG:
        assert any("pasted_from" in sample for sample in whole)
    else:
        sides = [min(sample["image"].shape[1:]) for sample in whole]
        assert set(sides) == {48, 64}
        assert (sides[::3] == sides[1::3] == sides[2::3]) == (keys is ONE_SIZE)


def test_damaged_images_do_not_end_a_run(copy, caplog):
    """The damage appears after the check of the dataset."""
    keys = ["SOLVER.IMS_PER_BATCH", "3", "DATALOADER.ASPECT_RATIO_GROUPING", "False", "DATASETS.CHECK", "off"]
    records = load(copy, *keys)
    cut, empty, *_, last = (Path(record["file_name"]) for record in records)
    truncate(cut), empty.write_bytes(b"")

    def names(*, workers: int, first: int, number: int) -> list[str]:
        loader = build_train_loader(config(entry(copy), overrides=[*keys, "DATALOADER.NUM_WORKERS", str(workers)]))
        loader.start(seed=7, iteration=first)
        return [(one["file_name"], *one["image"].flatten()[:50].tolist()) for one in chain(*islice(loader, number))]

    whole = names(workers=0, first=0, number=8)
    assert len(whole) == 24 and {str(cut), str(last)} <= {name for name, *_ in whole} and str(empty) not in str(whole)
    assert names(workers=2, first=0, number=5) + names(workers=1, first=5, number=3) == whole
    cfg = config(entry(copy), overrides=[*keys, "DATALOADER.NUM_WORKERS", "1"])
    tested = [batch[0]["file_name"] for batch in build_test_loader(cfg, NAME)]
    assert tested == [record["file_name"] for record in records if record["file_name"] != str(empty)]
    texts = [record.getMessage() for record in caplog.records if "is damaged: " in record.getMessage()]
    assert [sum(str(path) in text for text in texts) for path in (cut, empty, last)] == [1, 1, 0]
    for record in records:
        Path(record["file_name"]).write_bytes(b"")
    assert "Check the disk" in message(names, workers=0, first=0, number=1)


def test_test_loader_gives_every_image_once_in_rgb(shapes):
    batches = list(build_test_loader(small_config("retinanet", "INPUT.MIN_SIZE_TEST", "40"), "shapes_val"))
    assert [len(batch) for batch in batches] == [1] * 8
    assert len({batch[0]["image_id"] for batch in batches}) == 8
    assert {min(batch[0]["image"].shape[1:]) for batch in batches} == {40}
    record = batches[0][0]
    bgr = cv2.imread(record["file_name"])
    assert bgr.shape[:2] == (record["height"], record["width"])
    mean = record["image"].float().mean(dim=(1, 2))
    torch.testing.assert_close(mean, torch.from_numpy(bgr[..., ::-1].mean(axis=(0, 1))).float(), atol=2, rtol=0)
