"""A bar on a terminal, a real one, and none elsewhere."""

import fcntl
import logging
import os
import struct
import sys
import termios

import pytest
from detectron2.engine.train_loop import TrainerBase

from projects_vil.progress import ProgressBar


class Counting(TrainerBase):
    """Trains nothing, and says a line in the middle."""

    def run_step(self) -> None:
        self.storage.put_scalar("total_loss", 0.25)
        if self.iter == 2:
            logging.getLogger("projects_vil.test").info("a line")


@pytest.fixture
def terminal(monkeypatch):
    """stdout and stderr are a terminal of 100 columns; what it shows."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    with open(writer, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        yield lambda: os.read(reader, 1 << 20).decode()
    os.close(reader)


def train(stream) -> None:
    logger = logging.getLogger("projects_vil")
    handler, level = logging.StreamHandler(stream), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        trainer = Counting()
        trainer.register_hooks([ProgressBar()])
        trainer.train(1, 5)
        assert handler.stream is stream
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_a_terminal_shows_a_bar_below_what_is_logged(terminal):
    before = sys.stdout
    train(sys.stdout)
    assert sys.stdout is before
    shown = terminal()
    assert "| 1/5" in shown and "total_loss 0.25" in shown
    # The bar steps aside: the line stands at the beginning of its own.
    assert "\ra line\r\n" in shown


def test_a_pipe_or_a_file_shows_none(capsys):
    train(sys.stdout)
    out, err = capsys.readouterr()
    assert out == "a line\n" and err == ""
