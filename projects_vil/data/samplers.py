"""Batches that depend on the seed and the iteration alone, so that a resumed run sees what it would have seen."""

import contextlib
import functools
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from detectron2.data import DatasetFromList, MapDataset
from detectron2.data.samplers import InferenceSampler
from torch.utils.data import DataLoader, Dataset, Sampler

from projects_vil.utils import STOP_SIGNALS

# What an image of a batch is asked by: its index among the records, and the seed of its augmentations.
Item = tuple[int, int]


def derived_seed(what_for: Literal["image", "iteration"], *numbers: int) -> int:
    """A seed of 63 bits from what it is for and several numbers, none of them negative; near ones are unrelated."""
    words = (("image", "iteration").index(what_for) + 1, *numbers)
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, those of every CUDA device among them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, NumPy's and torch's CPU generators start from ``seed`` inside, and go on as they were outside."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not manual_seed, which would seed CUDA devices too.
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


class SeededRecords(Dataset):
    """Records and their mapper; each image is augmented from a seed of its own, whichever process maps it.

    Args:
        records: of detectron2, in a form that worker processes share.
        mapper: from a copy of a record to what a model takes.
    """

    def __init__(self, records: Dataset, mapper: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.records = records
        self.mapper = mapper

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, item: Item) -> dict[str, Any]:
        index, seed = item
        with seeded(seed):
            return self.mapper(self.records[index])


class BatchStream(Sampler[list[Item]]):
    """Endless batches of one process, from any iteration on.

    What comes first is found by going through indices, not images: a second for a million of them.

    Args:
        make_sampler: a seed -> an endless sampler of indices, this process' share of those of all.
        batch_size: of this process.
        groups: of each record; the images of a batch are of one group, as detectron2 groups by aspect ratio.
        rank, world_size: of this process, and how many there are.
    """

    def __init__(
        self,
        make_sampler: Callable[[int], Sampler[int]],
        *,
        batch_size: int,
        groups: Sequence[int],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.make_sampler = make_sampler
        self.batch_size = batch_size
        self.groups = groups
        self.rank = rank
        self.world_size = world_size
        self.seed = 0
        self.first_iteration = 0

    def __iter__(self) -> Iterator[list[Item]]:
        for batch in islice(self._batches(), self.first_iteration, None):
            yield [(index, derived_seed("image", self.seed, place)) for index, place in batch]

    def _batches(self) -> Iterator[list[tuple[int, int]]]:
        """Indices, and their places among the images of all processes, which do not change with their number."""
        waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, index in enumerate(self.make_sampler(self.seed)):
            batch = waiting[self.groups[index]]
            batch.append((index, number * self.world_size + self.rank))
            if len(batch) == self.batch_size:
                yield batch[:]
                batch.clear()


# That worker processes leave a run after a SIGTERM of their own.
SECONDS_TO_SAVE = 60
# An evaluation has nothing to save: it ends at once, and so do its workers.
SECONDS_TO_END = 2


class TrainLoader(DataLoader):
    """Endless batches, lists of mapped records, from any iteration on.

    Args:
        dataset: maps the records.
        batches: which records, and their seeds.
        num_workers: processes that map; their number changes nothing.
    """

    def __init__(self, dataset: SeededRecords, batches: BatchStream, *, num_workers: int) -> None:
        super().__init__(
            dataset,
            batch_sampler=batches,
            num_workers=num_workers,
            collate_fn=_as_list,
            worker_init_fn=_leave_signals_to_the_run if num_workers else None,
            # Else an iterator draws from the generator that the iteration was seeded with, and only in its first one.
            generator=torch.Generator(),
        )
        self._batches: Iterator[list[dict[str, Any]]] | None = None

    def start(self, *, seed: int, iteration: int) -> None:
        """What the next iterator over this loader begins with: the batch of an iteration, from 0, of a seed's run."""
        self.batch_sampler.seed = seed
        self.batch_sampler.first_iteration = iteration

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        with _signals_blocked():
            self._batches = super().__iter__()
        return self._batches

    def stop(self) -> None:
        """End the worker processes; torch does so only when nothing refers to their iterator, as a traceback may."""
        shutdown = getattr(self._batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


class EvaluationLoader(DataLoader):
    """detectron2's loader for inference, an image a batch, whose worker processes leave signals to the run.

    Args:
        records: of the images.
        mapper: maps them.
        num_workers: processes that do so.
    """

    def __init__(
        self, records: list[dict[str, Any]], mapper: Callable[[dict[str, Any]], dict[str, Any]], *, num_workers: int
    ) -> None:
        leave = functools.partial(_leave_signals_to_the_run, seconds=SECONDS_TO_END)
        super().__init__(
            MapDataset(DatasetFromList(records, copy=False), mapper),
            sampler=InferenceSampler(len(records)),
            num_workers=num_workers,
            collate_fn=_as_list,
            worker_init_fn=leave if num_workers else None,
        )

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        with _signals_blocked():
            return super().__iter__()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """While this lasts, signals wait, here and in the processes that are started: till these know what to do."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_signals_to_the_run(worker: int, *, seconds: int = SECONDS_TO_SAVE) -> None:
    """Ctrl-C and a scheduler's signal reach all processes; the run stops its workers when it has saved.

    One that is told to end, and is not stopped by the run, ends by itself.

    Args:
        seconds: until it does.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(seconds))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _as_list(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return batch
