"""SIGTERM and SIGHUP end a process as an exception does, where nobody else handles them."""

import os
import pickle
import signal
import threading

import pytest
import torch

from projects_vil.utils import ToldToEnd, held_signals, told_between_calls, unwound_by_signals


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_what_is_open_is_closed(number, status):
    before = signal.signal(number, signal.SIG_DFL)
    closed = []
    try:
        with pytest.raises(SystemExit) as caught, unwound_by_signals():
            try:
                os.kill(os.getpid(), number)
            finally:
                closed.append(True)
        assert caught.value.code == status and closed
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_being_told_to_end_reaches_another_process():
    """As what a loading process raises does."""
    told = pickle.loads(pickle.dumps(ToldToEnd(signal.SIGTERM)))
    assert (told.name, told.status, told.code) == ("SIGTERM", 143, 143)


def test_the_handler_of_someone_else_stays():
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with unwound_by_signals():
            os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


class Interrupted(Exception):
    """What a handler of someone else's raises."""


def interrupt(number, frame) -> None:
    raise Interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_what_must_not_end_halfway(number):
    done, before = [], signal.signal(number, interrupt)
    try:
        with pytest.raises(Interrupted):
            with held_signals():
                os.kill(os.getpid(), number)
                done.append("the rest")
            done.append("more")
        assert done == ["the rest"] and signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)


def test_another_thread_may_not_set_one():
    handlers = []

    def work():
        with unwound_by_signals():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]


def test_a_signal_is_told_before_the_next_call():
    module, calls = torch.nn.Identity(), []
    with pytest.raises(ToldToEnd) as caught, told_between_calls(module, alone=True):
        for number in range(3):
            calls.append(module(number))
            os.kill(os.getpid(), signal.SIGHUP)
            calls.append("in between")
    assert calls == [0, "in between"] and (caught.value.name, caught.value.status) == ("SIGHUP", 129)
    assert module(3) == 3


def test_a_signal_after_the_last_call_is_told_at_the_end():
    with pytest.raises(ToldToEnd), told_between_calls(torch.nn.Identity(), alone=True):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("alone, error", [(True, KeyboardInterrupt), (False, ToldToEnd)])
def test_a_second_ctrl_c_interrupts_at_once_where_it_cannot_be_the_first(alone, error):
    with pytest.raises(error), told_between_calls(torch.nn.Identity(), alone=alone):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
