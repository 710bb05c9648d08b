"""Signals that end a process, and memory that is measured in a process of its own."""

import functools
import os
import pickle
import signal
import subprocess
import sys
import threading

import pytest
import torch

from backbones import ConfigError
from projects_vil.utils import (
    STOP_SIGNALS,
    Terminated,
    deferred_signals,
    handling_signals,
    memory_of,
    peak_in_new_process,
    terminate,
    terminating_between_calls,
)


@pytest.fixture(autouse=True)
def handlers():
    """The stop signals raise Terminated, whatever ignored them when the tests started (nohup, a background job)."""
    before = {number: signal.signal(number, terminate) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_deferred_signal_takes_effect_at_the_end(number):
    done = []
    with pytest.raises(Terminated) as caught:
        with deferred_signals():
            os.kill(os.getpid(), number)
            done.append("the rest")
        done.append("more")
    assert done == ["the rest"] and signal.getsignal(number) is terminate
    assert (caught.value.number, caught.value.code) == (number, 128 + number)


def test_ignored_signals_and_other_threads_stay_as_they_are():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    received = []

    def work():
        with handling_signals(lambda number, frame: received.append(number)):
            os.kill(os.getpid(), signal.SIGHUP)

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert received == [] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    with handling_signals(lambda number, frame: received.append(number)):
        os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is terminate


def test_terminated_reaches_another_process():
    """As any exception of a process that loads data."""
    error = pickle.loads(pickle.dumps(Terminated(signal.SIGTERM)))
    assert (error.name, error.status, error.code) == ("SIGTERM", 143, 143)


def test_a_model_is_left_between_two_calls():
    module, calls = torch.nn.Identity(), []
    with pytest.raises(Terminated) as caught, terminating_between_calls(module, alone=True):
        for number in range(3):
            calls.append(module(number))
            os.kill(os.getpid(), signal.SIGHUP)
            calls.append("in between")
    assert calls == [0, "in between"] and caught.value.name == "SIGHUP" and module(3) == 3
    with pytest.raises(Terminated), terminating_between_calls(module, alone=True):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("alone, error", [(True, KeyboardInterrupt), (False, Terminated)])
def test_a_second_ctrl_c_interrupts_at_once_where_it_cannot_be_the_first(alone, error):
    with pytest.raises(error), terminating_between_calls(torch.nn.Identity(), alone=alone):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


# -- memory ----------------------------------------------------------------------------------------


def allocate(number: int):
    """Return what allocates ``number`` floats, and has allocated four times as many."""
    torch.ones(4 * number)
    return functools.partial(torch.ones, number)


def refuse():
    raise ConfigError("not so")


@pytest.mark.slow
@pytest.mark.skipif(memory_of() is None, reason="the system has no /proc")
def test_the_peak_of_a_call():
    measure = functools.partial(peak_in_new_process, what="this", instead="that")
    assert 1e8 < measure(functools.partial(allocate, 50_000_000)) < 6e8
    with pytest.raises(ConfigError, match="not so"):
        measure(refuse)
    with pytest.raises(ConfigError, match="this"):
        measure(functools.partial(os._exit, 9))


# -- other systems ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_prediction_and_export_import_without_unixs_modules():
    code = "\n".join(
        (
            "import signal, sys",
            "del signal.SIGHUP, signal.SIGKILL, signal.pthread_sigmask",
            "import detectron2.engine",
            "for name in ('fcntl', 'resource', 'termios', 'pwd', 'grp'):",
            "    sys.modules[name] = None",
            "from projects_vil import Detector",
            "import projects_vil.export",
        )
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
