"""Files of results that are written whole or not at all, and the progress of writing them."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30


@contextlib.contextmanager
def written_whole(*paths: Path) -> Iterator[tuple[Any, ...]]:
    """Text files to write to, which take their names only when all are written: an interruption leaves those before."""
    partials = [path.with_name(f".{path.name}.{os.getpid()}.partial") for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            yield tuple(stack.enter_context(partial.open("w")) for partial in partials)
        for partial, path in zip(partials, paths, strict=True):
            partial.replace(path)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)


class JsonList:
    """A JSON list, an item a line, in the order of an index that the items come without.

    Args:
        file: to write to.
    """

    def __init__(self, file: Any) -> None:
        self.file = file
        self.length = 0
        self._next = 0
        self._waiting: dict[int, list[dict]] = {}
        file.write("[")

    def put(self, index: int, items: list[dict]) -> None:
        self._waiting[index] = items
        while self._next in self._waiting:
            for item in self._waiting.pop(self._next):
                self.file.write(f"{',' if self.length else ''}\n{json.dumps(item)}")
                self.length += 1
            self._next += 1

    def close(self) -> None:
        self.file.write("\n]\n")


class Progress:
    """A bar on stderr, or a line now and then where that is no terminal.

    Args:
        total: of what is to do; 0 where that is not known.
        unit: its name.
    """

    def __init__(self, total: int, unit: str) -> None:
        self.total = total
        self.unit = unit
        self.done = 0
        self.start = self.last = time.monotonic()
        # tqdm shows no bar where stderr is no terminal, with None.
        self.bar = tqdm(total=total or None, unit=unit, file=sys.stderr, disable=None, dynamic_ncols=True)

    def add(self, number: int) -> None:
        self.done += number
        self.bar.update(number)
        now = time.monotonic()
        if self.bar.disable and now - self.last >= SECONDS_BETWEEN_LINES:
            self.last = now
            of_total = f" of {self.total}" if self.total else ""
            rate = self.done / (now - self.start)
            self.say(f"{self.done}{of_total} {self.unit}s, {rate:.2g} a second")

    def say(self, line: str) -> None:
        """Print a line on stderr, over the bar."""
        tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        self.bar.close()
