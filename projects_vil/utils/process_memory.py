"""How much memory a process has, as Linux counts it."""

import multiprocessing
import re
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from backbones import InputError


def memory_of(process: int | str = "self", *, peak: bool = False) -> int | None:
    """Bytes that a process has in memory, or the most that it ever had; None where the system has no /proc.

    What ``getrusage`` tells of a child begins with what its parent had when it was forked.

    Args:
        process: its number.
        peak: since it began, or since :func:`forget_peak`.
    """
    status = Path(f"/proc/{process}/status")
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else None


def forget_peak() -> None:
    """What this process has had until now counts no more."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_in_new_process(build: Callable[[], Callable[[], object]], *, what: str, instead: str) -> int | None:
    """Bytes at the peak of one call above what there was before it, in a new process with as many threads as this one.

    Args:
        build: makes what is called; it is pickled.
        what: is measured. instead: what can be done where it ends the process, both for an error.

    Returns:
        None where the system does not tell.

    Raises:
        InputError: as ``build`` or the call, and where the process is ended, as for want of memory.
    """
    if memory_of(peak=True) is None:
        return None
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(build, torch.get_num_threads(), writer))
    process.start()
    writer.close()
    try:
        found = reader.recv()
    except EOFError as error:
        raise InputError(f"{what}: the process that measured the memory has ended: {instead}") from error
    finally:
        process.join()
    if isinstance(found, InputError):
        raise found
    return found


def _send_peak(build: Callable[[], Callable[[], object]], threads: int, writer: Connection) -> None:
    torch.set_num_threads(threads)
    try:
        call = build()
        forget_peak()
        before = memory_of()
        call()
    except InputError as error:
        writer.send(error)
        return
    writer.send(memory_of(peak=True) - before)
