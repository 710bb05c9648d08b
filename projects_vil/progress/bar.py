"""A bar on a terminal."""

import logging
import sys
from typing import Any, TextIO

from detectron2.engine import HookBase
from tqdm import tqdm

_LOGGERS = ("fvcore", "detectron2", "projects_vil", "backbones")


class ProgressBar(HookBase):
    """Shows the iterations on stderr where that is a terminal, and nothing in a pipe or a file.

    What is logged and printed meanwhile stands above the bar.
    """

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._streams: list[tuple[Any, TextIO]] = []
        self._stdout: TextIO | None = None

    def before_train(self) -> None:
        if not sys.stderr.isatty():
            return
        first, last = self.trainer.start_iter, self.trainer.max_iter
        self._bar = tqdm(initial=first, total=last, unit="it", dynamic_ncols=True, leave=False, file=sys.stderr)
        if sys.stdout.isatty():
            self._stdout = sys.stdout
            handlers = {handler for name in _LOGGERS for handler in logging.getLogger(name).handlers}
            self._streams = [(each, each.stream) for each in handlers if getattr(each, "stream", None) is sys.stdout]
            sys.stdout = AboveBar(sys.stdout)
            for handler, _ in self._streams:
                handler.setStream(sys.stdout)

    def after_step(self) -> None:
        if self._bar is not None:
            loss = self.trainer.storage.latest().get("total_loss")
            if loss is not None:
                self._bar.set_postfix_str(f"total_loss {loss[0]:.4g}", refresh=False)
            self._bar.update()

    def after_train(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        for handler, stream in self._streams:
            handler.setStream(stream)
        self._streams = []
        if self._stdout is not None:
            sys.stdout, self._stdout = self._stdout, None


class AboveBar:
    """A terminal whose bars step aside for what is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        # A bar shares its line with what does not end in a line break: it waits for the next.
        with tqdm.external_write_mode(file=self._stream):
            return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
