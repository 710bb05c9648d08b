"""What a process does that is told to end."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

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
def ended_by_signals(what: str) -> Iterator[None]:
    """While this lasts, SIGINT, SIGTERM and SIGHUP end the process with 128 and their number, and one line on stderr.

    Args:
        what: is ended, in the line.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        print(f"{signal.Signals(number).name}: {what} was ended", file=sys.stderr, flush=True)
        sys.exit(128 + number)

    with handling_signals(end):
        yield


@contextlib.contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """While this lasts, SIGTERM ends the process as an exception does, so that it removes what is unfinished.

    A handler of someone else's stays; so does everything outside of the main thread, which alone may set one.
    """
    is_ours_to_set = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if not is_ours_to_set:
        yield
        return
    # The exit status that a shell gives a process that SIGTERM killed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
