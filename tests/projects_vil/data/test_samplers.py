"""Batches depend on the seed and the iteration alone."""

import random
import signal
from itertools import islice
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
import torch
from detectron2.data.samplers import TrainingSampler

from projects_vil.data import build_test_loader, build_train_loader
from projects_vil.data.samplers import BatchStream, derived_seed, seeded
from projects_vil.utils import STOP_SIGNALS
from tests.projects_vil.helpers import small_config

GROUPS = [0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0]


def stream(*, first_iteration=0, seed=3, **kwargs):
    batches = BatchStream(
        lambda seed: TrainingSampler(len(GROUPS), seed=seed), **{"batch_size": 2, "groups": GROUPS} | kwargs
    )
    batches.seed, batches.first_iteration = seed, first_iteration
    return batches


@pytest.mark.parametrize("first_iteration", [1, 4, 17])
def test_a_stream_goes_on_from_any_iteration(first_iteration):
    whole = list(islice(stream(), 25))
    assert list(islice(stream(first_iteration=first_iteration), 25 - first_iteration)) == whole[first_iteration:]


def test_a_batch_has_images_of_one_group_and_another_seed_other_batches():
    batches = list(islice(stream(), 30))
    assert all(len({GROUPS[index] for index, _ in batch}) == 1 for batch in batches)
    assert {index for batch in batches for index, _ in batch} == set(range(len(GROUPS)))
    assert len({seed for batch in batches for _, seed in batch}) == 60
    assert list(islice(stream(seed=4), 30)) != batches


def test_two_processes_share_the_images_of_one():
    class OfRank(TrainingSampler):
        def __init__(self, rank, seed):
            super().__init__(len(GROUPS), seed=seed)
            self._rank, self._world_size = rank, 2

    one = stream(batch_size=4, groups=[0] * len(GROUPS))
    two = [
        BatchStream(
            lambda seed, rank=rank: OfRank(rank, seed), batch_size=2, groups=[0] * len(GROUPS), rank=rank, world_size=2
        )
        for rank in (0, 1)
    ]
    for batches in two:
        batches.seed = 3
    for whole, *parts in islice(zip(one, *two, strict=False), 12):
        assert sorted(whole) == sorted(parts[0] + parts[1])


def test_seeds_are_unrelated():
    seeds = {derived_seed("image", a, b) for a in range(20) for b in range(20)}
    seeds |= {derived_seed("iteration", a, b, 0) for a in range(20) for b in range(20)}
    assert len(seeds) == 800
    assert min(seeds) >= 0
    assert derived_seed("image", 1, 2) == derived_seed("image", 1, 2)


def test_seeding_leaves_the_generators_outside_as_they_were():
    def sample():
        return random.random(), np.random.rand(), torch.rand(()).item()

    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    expected = [sample(), sample()]
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    found = [sample()]
    with seeded(7):
        inside = sample()
    found.append(sample())
    with seeded(7):
        assert sample() == inside
    assert found == expected


@pytest.mark.parametrize("of", ["training", "evaluation"])
def test_signals_wait_while_loading_processes_start(of, shapes, monkeypatch):
    """A signal before a worker ignores it would end the worker, and so the run."""
    masks = []
    start = BaseProcess.start

    def watched(process):
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        start(process)

    monkeypatch.setattr(BaseProcess, "start", watched)
    cfg = small_config("retinanet", "DATALOADER.NUM_WORKERS", "1", "SOLVER.IMS_PER_BATCH", "2")
    if of == "training":
        loader = build_train_loader(cfg)
        loader.start(seed=5, iteration=0)
        next(iter(loader))
        loader.stop()
    else:
        next(iter(build_test_loader(cfg, "shapes_val")))
    assert masks and all(mask >= set(STOP_SIGNALS) for mask in masks)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOP_SIGNALS)


def images(cfg, *, iteration=0, number=3):
    loader = build_train_loader(cfg)
    loader.start(seed=5, iteration=iteration)
    return [[(one["image_id"], one["image"]) for one in batch] for batch in islice(loader, number)]


def test_worker_processes_change_no_pixel_and_a_resumed_loader_goes_on(shapes):
    options = ["SOLVER.IMS_PER_BATCH", "3", "INPUT.MIN_SIZE_TRAIN", "(48, 64, 80)"]
    alone = images(small_config("retinanet", *options))
    shared = images(small_config("retinanet", *options, "DATALOADER.NUM_WORKERS", "2"))
    later = images(small_config("retinanet", *options), iteration=2, number=1)
    for expected, found in ((alone, shared), (alone[2:], later)):
        assert [[i for i, _ in batch] for batch in expected] == [[i for i, _ in batch] for batch in found]
        for one, other in zip(sum(expected, []), sum(found, []), strict=True):
            assert torch.equal(one[1], other[1])
    # Of three sizes and two directions some differ.
    assert len({image.shape for batch in alone for _, image in batch}) > 1
