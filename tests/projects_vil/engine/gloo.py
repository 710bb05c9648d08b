"""Forked processes in a gloo process group, as in distributed training."""

from collections.abc import Callable
from pathlib import Path

import torch
from detectron2.utils import comm


def in_processes(number: int, function: Callable, *args, store: Path) -> None:
    """Call ``function(*args)`` in ``number`` processes.

    Args:
        store: Path of a new file for the rendezvous.
    """
    given = (number, store, function, args)
    torch.multiprocessing.start_processes(_joined, given, nprocs=number, start_method="fork")


def _joined(rank: int, number: int, store: Path, function: Callable, args: tuple) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=number)
    comm.create_local_process_group.cache_clear()
    comm.create_local_process_group(number)
    function(*args)
    torch.distributed.destroy_process_group()
