"""What an export is at, and how long each part of it takes."""

import contextlib
import logging
import time
from collections.abc import Iterator

_logger = logging.getLogger(__name__)


class Stages:
    """The stages of one export: the log says each as it begins, and its seconds as it ends.

    Attributes:
        seconds: of each stage that has ended, in their order.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str, remark: str = "") -> Iterator[None]:
        """One stage; ``remark`` is said as it begins."""
        _logger.info("%s%s ...", name, remark and f": {remark}")
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 1)
        _logger.info("%s: %.1f s", name, self.seconds[name])
