"""What a process does that is told to end."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

from torch import nn

# What ends a run: Ctrl-C, a scheduler, a terminal that is closed.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded_signals() -> list[signal.Signals]:
    """Those of ``STOP_SIGNALS`` that are not ignored, as SIGHUP is under nohup."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


@contextlib.contextmanager
def handling_signals(
    handler: Callable[[int, FrameType | None], object], numbers: Sequence[int] | None = None
) -> Iterator[None]:
    """While this lasts, ``handler`` is called for some signals, by default those of :func:`heeded_signals`.

    Outside of the main thread, which alone may set one, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = heeded_signals() if numbers is None else numbers
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """While this lasts, the signals of :func:`heeded_signals` wait; then those that came meet the handlers of before.

    For what must not end halfway, and is short.
    """
    received: list[int] = []
    try:
        with handling_signals(lambda number, frame: received.append(number)):
            yield
    finally:
        for number in received:
            signal.raise_signal(number)


class ToldToEnd(SystemExit):
    """A signal has told this process to end; where nobody handles that, it does, with the status of the signal.

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
        """Of a process that ends for it, as shells have it."""
        return 128 + self.number


@contextlib.contextmanager
def told_between_calls(module: nn.Module, *, alone: bool) -> Iterator[None]:
    """While this lasts, a signal raises :class:`ToldToEnd` before the next call of ``module``, or else at the end.

    Not where it arrives: that may be in the middle of a fork, or where Python drops what is raised.

    Args:
        alone: whether a second Ctrl-C interrupts at once; one of several processes may get one twice, from the terminal
            and from the process that has started it.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if alone and number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        received.append(number)

    def tell(*_: object) -> None:
        if received:
            raise ToldToEnd(received[0])

    with handling_signals(receive), module.register_forward_pre_hook(tell):
        yield
        tell()


@contextlib.contextmanager
def unwound_by_signals() -> Iterator[None]:
    """While this lasts, SIGTERM and SIGHUP end the process as an exception does, so that it removes what is unfinished.

    A handler of someone else's stays; so does everything outside of the main thread, which alone may set one.
    """
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    with handling_signals(end_by_signal, numbers):
        yield


def end_by_signal(number: int, frame: FrameType | None) -> NoReturn:
    """The handler of a process that ends where a signal meets it, as by any exception."""
    raise ToldToEnd(number)
