"""Batches that depend only on the seed and the iteration, so that a resumed run gets those that it would have got."""

import contextlib
import dataclasses
import errno
import functools
import multiprocessing.queues
import random
import re
import resource
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from detectron2.data import DatasetFromList, MapDataset
from detectron2.data.build import trivial_batch_collator
from detectron2.data.samplers import InferenceSampler
from detectron2.utils import comm
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, Sampler

from backbones import ConfigError
from projects_vil.config import one_line
from projects_vil.utils import STOP_SIGNALS

# An image of a batch: its index among the records, and the seed of its augmentation.
Item = tuple[int, int]
# Open files: pipes of the processes, and one for each tensor under way.
_MIN_FILES = 256
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EROFS)


def derived_seed(purpose: Literal["image", "iteration"], *numbers: int) -> int:
    """Return a seed of 63 bits for a purpose and numbers of at least 0; seeds of neighbouring numbers are unrelated."""
    words = (("image", "iteration").index(purpose) + 1, *numbers)
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, those of every CUDA device among them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's CPU generators inside the context, and restore their states after it."""
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
    """Mapped records; each image is augmented with a seed of its own, whichever process maps it.

    Args:
        records: detectron2's records, serialised, so that worker processes share them.
        mapper: from a copy of a record to what a model takes.
    """

    def __init__(self, records: Dataset, mapper: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.records, self.mapper = records, mapper

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, item: Item) -> dict[str, Any]:
        index, seed = item
        with seeded(seed):
            return self.mapper(self.records[index])


@dataclasses.dataclass(eq=False)
class BatchStream(Sampler[list[Item]]):
    """Endless batches of one process, from any iteration on.

    Batches before the first iteration are skipped by their indices, without images: a second for a million images.

    Args:
        make_sampler: from a seed to an endless sampler of this rank's indices.
        batch_size: images per batch of this rank.
        groups: the group of each record; the images of a batch have one group, as detectron2 groups by aspect ratio.
        seed, first_iteration: of the next iterator.
    """

    make_sampler: Callable[[int], Sampler[int]]
    batch_size: int
    groups: Sequence[int]
    seed: int = 0
    first_iteration: int = 0

    def __iter__(self) -> Iterator[list[Item]]:
        for batch in islice(self._batches(), self.first_iteration, None):
            yield [(index, derived_seed("image", self.seed, position)) for index, position in batch]

    def _batches(self) -> Iterator[list[tuple[int, int]]]:
        """Yield indices and their positions among the images of all ranks, which do not change with their number."""
        rank, world_size = comm.get_rank(), comm.get_world_size()
        waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, index in enumerate(self.make_sampler(self.seed)):
            batch = waiting[self.groups[index]]
            batch.append((index, number * world_size + rank))
            if len(batch) == self.batch_size:
                yield batch[:]
                batch.clear()


class _Loader(DataLoader):
    """A loader whose worker processes ignore the signals that end a run, which itself ends them when it has saved.

    A SIGTERM to one of them takes effect in the run. A batch that a worker cannot share is an error in the run.
    """

    def __init__(self, dataset: Dataset, **options: Any) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if options["num_workers"] and files < _MIN_FILES:
            raise ConfigError(
                f"`ulimit -n` is {files}, and loading processes need {_MIN_FILES} open files or more: raise it, or set "
                "DATALOADER.NUM_WORKERS 0"
            )
        # Shared with the workers: whether one has received a SIGTERM.
        with _explaining_limits():
            self._has_ended = multiprocessing.RawValue("b", False) if options["num_workers"] else None
        prepare = functools.partial(_prepare_worker, self._has_ended)
        super().__init__(dataset, collate_fn=trivial_batch_collator, worker_init_fn=prepare, **options)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        # Signals wait until the workers ignore them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with _explaining_limits():
                self._batches = super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self._passing_on(self._batches)

    def _passing_on(self, batches: Iterator[list[dict[str, Any]]]) -> Iterator[list[dict[str, Any]]]:
        try:
            with _explaining_limits():
                for batch in batches:
                    if self._has_ended is not None and self._has_ended.value:
                        signal.raise_signal(signal.SIGTERM)
                    yield batch
        finally:
            _end_workers(batches)

    def stop(self) -> None:
        """End the worker processes; torch does so only when nothing refers to their iterator, as a traceback may."""
        _end_workers(getattr(self, "_batches", None))


class TrainLoader(_Loader):
    """Endless batches, lists of mapped records, from any iteration on.

    Args:
        dataset: maps the records.
        batches: which records, and their seeds.
        num_workers: processes that map; their number does not change the batches.
    """

    def __init__(self, dataset: SeededRecords, batches: BatchStream, *, num_workers: int) -> None:
        # Without a generator of its own, an iterator would take numbers from the one that the iteration is seeded with.
        super().__init__(dataset, num_workers=num_workers, batch_sampler=batches, generator=torch.Generator())

    def start(self, *, seed: int, iteration: int) -> None:
        """Let the next iterator over this loader begin with the batch of an iteration, from 0, of a seed's run."""
        self.batch_sampler.seed = seed
        self.batch_sampler.first_iteration = iteration


class EvaluationLoader(_Loader):
    """detectron2's loader for inference, one image per batch.

    Args:
        records: detectron2's records of the images.
        mapper: maps them.
        num_workers: number of processes that map images.
    """

    def __init__(
        self, records: Sequence[dict[str, Any]], mapper: Callable[[dict[str, Any]], dict[str, Any]], *, num_workers: int
    ) -> None:
        serialised = records if isinstance(records, DatasetFromList) else DatasetFromList(records, copy=False)
        dataset = MapDataset(serialised, mapper)
        super().__init__(dataset, num_workers=num_workers, sampler=InferenceSampler(len(records)))


def _end_workers(batches: object) -> None:
    getattr(batches, "_shutdown_workers", lambda: None)()


def _prepare_worker(has_ended: Any, worker: int) -> None:
    """Let a worker end a minute after SIGTERM, in case that the run does not end it earlier."""

    def end(number: int, frame: FrameType | None) -> None:
        has_ended.value = True
        signal.alarm(60)

    for number in STOP_SIGNALS:
        signal.signal(number, end if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    # Python's hook for what its thread cannot send: else a traceback, and a run that waits for ever.
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_error


def _send_error(queue: multiprocessing.queues.Queue, error: Exception, item: tuple[int, Any]) -> None:
    try:
        with _explaining_limits():
            raise error
    except Exception:
        queue.put((item[0], ExceptionWrapper(where="in a loading process")))


@contextlib.contextmanager
def _explaining_limits() -> Iterator[None]:
    """Turn the errors of a system without shared memory or file descriptors into a :class:`ConfigError`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        is_limit = re.search("shared memory|</torch_|open files", str(error))
        if getattr(error, "errno", None) not in _LIMITS and not is_limit:
            raise
        raise ConfigError(
            f"the DATALOADER.NUM_WORKERS processes cannot share images: {one_line(error)} (is /dev/shm full or "
            "read-only, or `ulimit -n` low?): enlarge it, or set DATALOADER.NUM_WORKERS 0"
        ) from error
