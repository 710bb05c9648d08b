"""A bar on a terminal, a real one, and none elsewhere."""

import contextlib
import fcntl
import logging
import os
import select
import struct
import sys
import termios
from contextlib import redirect_stderr, redirect_stdout

from detectron2.engine.train_loop import TrainerBase

from projects_vil.progress import ProgressBar


class Counting(TrainerBase):
    """Trains nothing, and says a line in the middle."""

    def run_step(self) -> None:
        self.storage.put_scalar("total_loss", 0.25)
        if self.iter == 2:
            logging.getLogger("projects_vil.test").info("a line")


@contextlib.contextmanager
def terminal():
    """stdout and stderr are a terminal of 100 columns; what it shows, in a list that is filled at the end."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    shown = []
    try:
        # pytest's own streams come back between a fixture and its test: these are set in the test.
        with open(writer, "w") as stream, redirect_stdout(stream), redirect_stderr(stream):
            yield shown
            stream.flush()
            while select.select([reader], [], [], 0.2)[0]:
                shown.append(os.read(reader, 1 << 16).decode())
    finally:
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


def test_a_terminal_shows_a_bar_below_what_is_logged():
    with terminal() as parts:
        before = sys.stdout
        train(sys.stdout)
        assert sys.stdout is before
    shown = "".join(parts)
    assert "| 1/5" in shown and "total_loss 0.25" in shown
    # The bar steps aside: the line stands at the beginning of its own.
    assert "\ra line\r\n" in shown


def test_a_pipe_or_a_file_shows_none(capsys):
    train(sys.stdout)
    out, err = capsys.readouterr()
    assert out == "a line\n" and err == ""
