"""What a process does that is told to end."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator


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
