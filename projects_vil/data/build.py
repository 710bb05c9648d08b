"""Build data loaders whose batches depend only on the seed and the iteration.

A resumed run therefore trains on the same batches as an uninterrupted run.
"""

import contextlib
import dataclasses
import errno
import functools
import multiprocessing.queues
import random
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import samplers
from detectron2.data.build import trivial_batch_collator
from detectron2.utils import comm
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, Sampler

from backbones import ConfigError
from backbones.errors import STOP_SIGNALS, check_choice, one_line
from projects_vil.data.augmentation import CopyPaste
from projects_vil.data.dataset_mapper import Mapper
from projects_vil.data.image_files import DAMAGED, UnreadableImage, log_damaged
from projects_vil.data.records import SharedRecords, load_dataset

TRAIN_SAMPLERS = ("TrainingSampler", "RepeatFactorTrainingSampler", "RandomSubsetTrainingSampler")
# Maps a record to an input of the model.
MapFunction = Callable[[dict[str, Any]], dict[str, Any]]
# An image of a batch: the index of its record, the seed of its augmentation, and the iteration.
Item = tuple[int, int, int]
# If this many images in a row cannot be read, training stops, because the disk has probably failed.
_MAX_UNREADABLE = 20
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EROFS)


def derived_seed(purpose: Literal["image", "iteration"], *numbers: int) -> int:
    """Return a 63-bit seed for a purpose and non-negative numbers. Consecutive numbers give unrelated seeds."""
    words = (("image", "iteration").index(purpose) + 1, *numbers)
    # The value is converted first because NumPy 1 cannot shift an np.uint64 by a Python integer.
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, including the generators of all CUDA devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch (CPU) inside the context, and restore their states afterwards."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # torch.manual_seed would also seed the CUDA devices.
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


@dataclasses.dataclass(eq=False)
class MappedRecords(Dataset):
    """A dataset that maps records. An image that cannot be read becomes an input with only its damage.

    Args:
        records: detectron2's records. :class:`SharedRecords` are in memory once for all worker processes.
        mapper: Maps a copy of a record to an input of the model.
    """

    records: Sequence[dict[str, Any]]
    mapper: MapFunction

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return self.mapper(self.records[index])
        except UnreadableImage as error:
            return {DAMAGED: {error.path: f"{error.reason}. It is evaluated as an image without detections"}}


class SeededRecords(MappedRecords):
    """A dataset that maps each record with its own seed, so that the result does not depend on the worker process.

    If an image cannot be read, another record is mapped instead. The seed selects it, so that a resumed run uses the
    same one.
    """

    def __getitem__(self, item: Item) -> dict[str, Any]:
        (index, seed, iteration), skipped = item, {}
        with seeded(seed):
            for _ in range(_MAX_UNREADABLE):
                try:
                    sample = self.mapper(self.records[index] | {"iteration": iteration})
                except UnreadableImage as error:
                    skipped[error.path] = f"{error.reason}. Another image is used instead"
                    index = random.randrange(len(self.records))
                else:
                    return sample | {DAMAGED: skipped | sample.get(DAMAGED, {})} if skipped else sample
        path, reason = skipped.popitem()
        raise ConfigError(f"Cannot read {_MAX_UNREADABLE} images in a row, such as '{path}': {reason}. Check the disk.")


@dataclasses.dataclass(eq=False)
class BatchStream(Sampler[list[Item]]):
    """An infinite batch sampler of one process that can start at any iteration.

    The iterator skips earlier batches by their indices and reads no images. This takes one second per million images.

    Args:
        make_sampler: Returns an infinite sampler of the indices of this rank, for a seed.
        batch_size: The number of images per batch of this rank.
        groups: The group of each record. All images of a batch have the same group, as in detectron2's grouping by
            aspect ratio.
        seed: The seed of the next iterator.
        first_iteration: The first iteration of the next iterator.
    """

    make_sampler: Callable[[int], Sampler[int]]
    batch_size: int
    groups: Sequence[int]
    seed: int = 0
    first_iteration: int = 0

    def __iter__(self) -> Iterator[list[Item]]:
        rank, world_size, iteration = comm.get_rank(), comm.get_world_size(), 0
        waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, index in enumerate(self.make_sampler(self.seed)):
            batch = waiting[self.groups[index]]
            # The position counts the images of all ranks, so that it does not depend on the number of ranks.
            batch.append((index, number * world_size + rank))
            if len(batch) == self.batch_size:
                if iteration >= self.first_iteration:
                    yield [(index, derived_seed("image", self.seed, number), iteration) for index, number in batch]
                iteration += 1
                batch.clear()


class Loader(DataLoader):
    """A loader of mapped records, whose worker processes ignore the signals that stop a run.

    The main process stops the workers after it has saved a checkpoint. A SIGTERM to a worker is raised again in the
    main process. If a worker cannot share a batch, the main process raises a :class:`ConfigError`.

    The main process logs each damaged image once. Images that cannot be read are skipped.

    Args:
        dataset: :class:`SeededRecords` with a :class:`BatchStream` as ``batch_sampler``, or :class:`MappedRecords`.
        options: Arguments of torch's DataLoader, with the number of worker processes. It does not change the batches.
    """

    def __init__(self, dataset: MappedRecords, **options: Any) -> None:
        # Whether a worker has received a SIGTERM. The workers share this value.
        with _explaining_limits():
            self._is_terminated = multiprocessing.RawValue("b", False) if options["num_workers"] else None
        prepare = functools.partial(_prepare_worker, self._is_terminated)
        options |= {"collate_fn": trivial_batch_collator, "worker_init_fn": prepare}
        # Without its own generator, the iterator would draw numbers from the global generator, which training seeds.
        super().__init__(dataset, generator=torch.Generator(), **options)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        with _explaining_limits():
            # Signals are blocked until the workers ignore them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                batches = super().__iter__()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            try:
                for batch in batches:
                    if self._is_terminated is not None and self._is_terminated.value:
                        signal.raise_signal(signal.SIGTERM)
                    for sample in batch:
                        if damaged := sample.pop(DAMAGED, None):
                            log_damaged(damaged)
                    if readable := [sample for sample in batch if sample]:
                        yield readable
            finally:
                # torch stops the workers when nothing refers to this iterator, but a traceback may refer to it.
                if self.num_workers:
                    batches._shutdown_workers()

    def start(self, *, seed: int, iteration: int) -> None:
        """Set the seed and the first iteration, counted from 0, of the next iterator over a :class:`BatchStream`."""
        self.batch_sampler.seed = seed
        self.batch_sampler.first_iteration = iteration


def _prepare_worker(is_terminated: Any, worker: int) -> None:
    """Install the signal handlers of a worker. After a SIGTERM, the worker exits within ten minutes.

    Until then the training process ends its iteration and saves a checkpoint, if it got the same signal.
    """

    def on_terminate(number: int, frame: FrameType | None) -> None:
        is_terminated.value = True
        signal.alarm(600)

    for number in STOP_SIGNALS:
        signal.signal(number, on_terminate if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    # Python calls this hook if its feeder thread cannot send an object. The default prints a traceback, and the main
    # process would wait forever.
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_error


def _send_error(queue: multiprocessing.queues.Queue, error: Exception, item: tuple[int, Any]) -> None:
    try:
        with _explaining_limits():
            raise error
    except Exception:
        queue.put((item[0], ExceptionWrapper(where="in a worker process")))


@contextlib.contextmanager
def _explaining_limits() -> Iterator[None]:
    """Convert errors of missing shared memory or file descriptors to a :class:`ConfigError`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        is_limit = re.search("shared memory|</torch_|open files", str(error))
        if getattr(error, "errno", None) not in _LIMITS and not is_limit:
            raise
        advice = "Free space in /dev/shm, make it writable, raise `ulimit -n`, or set DATALOADER.NUM_WORKERS 0."
        raise ConfigError(f"The worker processes cannot share images: {one_line(error)}. {advice}") from error


def build_train_loader(cfg: CfgNode) -> Loader:
    """Build a loader of ``DATASETS.TRAIN`` that samples and groups images like detectron2's training loader.

    The images of a batch and their augmentation depend only on the seed and the iteration. They do not depend on the
    number of worker processes.

    Raises:
        ConfigError: If ``DATALOADER.SAMPLER_TRAIN`` is unknown, and under the conditions of :func:`load_dataset`.
    """
    records = load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)
    check_choice("DATALOADER.SAMPLER_TRAIN", cfg.DATALOADER.SAMPLER_TRAIN, TRAIN_SAMPLERS)
    mapper = Mapper(cfg, is_train=True)
    if cfg.INPUT.AUGMENTATION == "lsj_copy_paste":
        mapper = CopyPaste(mapper, records, probability=cfg.INPUT.COPY_PASTE.PROBABILITY)
    return make_train_loader(
        records,
        mapper=mapper,
        total_batch_size=cfg.SOLVER.IMS_PER_BATCH,
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        aspect_ratio_grouping=cfg.DATALOADER.ASPECT_RATIO_GROUPING,
        make_sampler=_sampler(cfg, records),
    )


def make_train_loader(
    dataset: Sequence[dict[str, Any]],
    *,
    mapper: MapFunction,
    total_batch_size: int,
    num_workers: int = 0,
    aspect_ratio_grouping: bool = True,
    make_sampler: Callable[[int], Sampler[int]] | None = None,
) -> Loader:
    """Build a training loader from records and a mapper, like detectron2's ``build_detection_train_loader``.

    Args:
        dataset: The records in detectron2's dataset format.
        mapper: Maps a record to an input of the model.
        total_batch_size: The number of images per iteration over all processes.
        num_workers: The number of worker processes per training process.
        aspect_ratio_grouping: Whether landscape and portrait images are in different batches.
        make_sampler: Returns the sampler for a seed. The default is detectron2's ``TrainingSampler``.
    """
    records = dataset if isinstance(dataset, SharedRecords) else SharedRecords(dataset)
    groups = [False] * len(records)
    if aspect_ratio_grouping:
        groups = [one.get("width", 0) <= one.get("height", 0) for one in records]
    make_sampler = make_sampler or (lambda seed: samplers.TrainingSampler(len(records), seed=seed))
    batches = BatchStream(make_sampler, batch_size=total_batch_size // comm.get_world_size(), groups=groups)
    return Loader(SeededRecords(records, mapper), batch_sampler=batches, num_workers=num_workers)


def _sampler(cfg: CfgNode, records: SharedRecords) -> Callable[[int], Sampler[int]] | None:
    """Return a function that maps a seed to ``DATALOADER.SAMPLER_TRAIN``, or None for detectron2's default."""
    options = cfg.DATALOADER
    if options.SAMPLER_TRAIN == "RepeatFactorTrainingSampler":
        sampler = samplers.RepeatFactorTrainingSampler
        factors = sampler.repeat_factors_from_category_frequency(records, options.REPEAT_THRESHOLD)
        return lambda seed: sampler(factors, seed=seed)
    if options.SAMPLER_TRAIN == "RandomSubsetTrainingSampler":
        size, ratio = len(records), options.RANDOM_SUBSET_RATIO
        return lambda seed: samplers.RandomSubsetTrainingSampler(size, ratio, seed_shuffle=seed, seed_subset=seed)
    return None


def build_test_loader(cfg: CfgNode, dataset_name: str) -> Loader:
    """Build an evaluation loader of one dataset with one image per batch."""
    records = load_dataset(cfg, [dataset_name], train=False)
    return make_test_loader(records, Mapper(cfg, is_train=False), num_workers=cfg.DATALOADER.NUM_WORKERS)


def make_test_loader(records: Sequence[dict[str, Any]], mapper: MapFunction, *, num_workers: int) -> Loader:
    """Build a loader with one image per batch, like detectron2's ``build_detection_test_loader``."""
    sampler = samplers.InferenceSampler(len(records))
    return Loader(MappedRecords(records, mapper), num_workers=num_workers, sampler=sampler)
