"""What is the same in all of these tests, and as it was after each: threads, loggers, handlers of signals."""

import logging
import signal

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """On models as small as these, several wait for each other, and for long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def loggers_and_signals_as_before():
    """A run that a test starts here sets up loggers and handlers of signals, as it does in a process of its own."""
    loggers = [logging.getLogger(name) for name in ("projects_vil", "backbones", "detectron2", "fvcore")]
    states = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for logger, (handlers, level, propagate) in zip(loggers, states, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate
    for number, handler in signals.items():
        signal.signal(number, handler)
