"""Signals that end a process, and the memory that a call takes in a process of its own."""

import contextlib
import multiprocessing
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
from torch import nn

from backbones import ConfigError

# Ctrl-C, a scheduler, and a terminal that is closed, which not every system has.
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Terminated(SystemExit):
    """A signal has asked this process to end; where nobody handles that, it does, with the status 128 + number.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (self.number,)

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    @property
    def status(self) -> int:
        return 128 + self.number


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Raise :class:`Terminated`; a signal handler."""
    raise Terminated(number)


@contextlib.contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let ``handler`` handle ``STOP_SIGNALS`` while this lasts, except for ignored ones, as SIGHUP is under nohup.

    Outside of the main thread, which alone may set handlers, nothing changes.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Let ``STOP_SIGNALS`` take effect at the end of the block, which is short and must not end halfway."""
    received: list[int] = []
    try:
        with handling_signals(lambda number, frame: received.append(number)):
            yield
    finally:
        for number in received:
            signal.raise_signal(number)


@contextlib.contextmanager
def terminating_between_calls(module: nn.Module, *, alone: bool) -> Iterator[None]:
    """Let a signal raise :class:`Terminated` before the next call of ``module``, or else at the end.

    It does not raise where it arrives: that may be in the middle of a fork, or where Python drops exceptions.

    Args:
        module: an evaluated model.
        alone: whether a second Ctrl-C interrupts at once; one of several processes may get one twice, from the terminal
            and from the process that has started it.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if alone and number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        received.append(number)

    def check(*_: object) -> None:
        if received:
            raise Terminated(received[0])

    with handling_signals(receive), module.register_forward_pre_hook(check):
        yield
        check()


def memory_of(process: int | str = "self", *, peak: bool = False) -> int | None:
    """Return the bytes of memory that a process has, or has had at most; None on systems without /proc.

    ``getrusage`` would not do: a child's peak begins with what its parent had when it was started.
    """
    status = Path(f"/proc/{process}/status")
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else None


def peak_in_new_process(build: Callable[[], Callable[[], object]], *, what: str, instead: str) -> int | None:
    """Return the peak bytes of one call above the memory before it, in a new process with as many threads as this one.

    Args:
        build: returns the function that is called; it is pickled.
        what: is measured, and ``instead`` what to do where memory is too small, both for an error.

    Returns:
        None on systems without /proc.

    Raises:
        ConfigError: as ``build`` or the call, and where the process is killed, as for lack of memory.
    """
    if memory_of(peak=True) is None:
        return None
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_peak, build, torch.get_num_threads()).result()
        except BrokenProcessPool as error:
            raise ConfigError(f"{what}: the process that measured the memory has ended: {instead}") from error


def _peak(build: Callable[[], Callable[[], object]], threads: int) -> int:
    torch.set_num_threads(threads)
    call = build()
    # The peak counts from here.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_of()
    call()
    return memory_of(peak=True) - before
