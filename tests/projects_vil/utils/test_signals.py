"""SIGTERM ends a process as an exception does, where nobody else handles it."""

import os
import signal
import threading

import pytest

from projects_vil.utils import unwound_by_sigterm


def test_what_is_open_is_closed():
    closed = []
    with pytest.raises(SystemExit) as caught, unwound_by_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            closed.append(True)
    assert caught.value.code == 128 + 15 and closed
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_handler_of_someone_else_stays():
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with unwound_by_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_may_not_set_one():
    handlers = []

    def work():
        with unwound_by_sigterm():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]
