"""Where what is logged goes: stderr for a tool; stdout and OUTPUT_DIR/log.txt for a training run."""

import contextlib
import logging
import re
import sys
from collections.abc import Iterator

from backbones import InputError
from projects_vil.utils.endings import explain_ending

_OWN = ("projects_vil", "backbones")

# What a run's log.txt has and its console leaves out: how detectron2 works inside, and pages that nobody reads there.
_FOR_THE_FILE = re.compile(
    "|".join(
        (
            r"Rank of current process: 0\. World size: 1$",
            r"Environment info:",
            r"Command line arguments: ",
            r"Contents of args\.config_file",
            r"Running with full config:",
            # An evaluation in a run's folder puts the run's own back.
            r"Full config saved to",
            r"Model:\n",
            r"\[DatasetMapper\] Augmentations used",
            r"Using training sampler",
            r"Serializ(ing|ed) ",
            r"Making batched data loader",
            # The next line says that there is no checkpoint.
            r"\[\w+\] Loading from  \.\.\.$",
            # faster_coco_eval and its like are optional.
            r"Fast COCO eval is not built",
            r"Preparing results for COCO format",
            r"Total inference pure compute time",
            # The table above has the same figures.
            r"copypaste: ",
            r"Evaluation results for .* in csv format:",
            # The table has them as nan.
            r"Some metrics cannot be computed",
        )
    )
)


@contextlib.contextmanager
def log_to_stderr() -> Iterator[None]:
    """While a tool runs, what this project logs goes to stderr, a line each, and so do the warnings of others."""
    root, handler = logging.getLogger(), _Stderr()
    before = {name: logging.getLogger(name).level for name in _OWN}
    root.addHandler(handler)
    for name in _OWN:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def log_run(output_dir: str, *, rank: int = 0) -> None:
    """What this project, detectron2 and fvcore log goes to ``output_dir/log.txt``, and what concerns a user to stdout.

    To be called before detectron2's ``default_setup``, whose own set-up finds it done then.

    Args:
        output_dir: of the run.
        rank: of the process; those above 0 write into files of their own, and not to stdout.
    """
    # Here, since whoever imports this file need not have silenced detectron2's warnings yet.
    from detectron2.utils.logger import setup_logger

    loggers = [
        # Exactly as default_setup calls it: the same arguments add no second handler.
        setup_logger(output_dir, distributed_rank=rank, name="fvcore"),
        setup_logger(output_dir, distributed_rank=rank),
        *(setup_logger(output_dir, distributed_rank=rank, name=name) for name in _OWN),
    ]
    for handler in (handler for logger in loggers for handler in logger.handlers):
        if getattr(handler, "stream", None) is sys.stdout:
            handler.addFilter(concerns_a_user)


def concerns_a_user(record: logging.LogRecord) -> bool:
    """Whether a record of a run is worth a place on the console.

    The traceback of a user's mistake is not: the run ends with its one line.
    """
    if record.exc_info and isinstance(error := record.exc_info[1], Exception) and _has_a_line(error):
        return False
    return record.levelno > logging.WARNING or _FOR_THE_FILE.match(record.getMessage()) is None


def _has_a_line(error: Exception) -> bool:
    """Whether the tool ends with one line for it, which its traceback would only bury."""
    return isinstance(error, InputError) or explain_ending(error) is not None


class _Stderr(logging.Handler):
    """Writes to what stderr is at the time: all of this project, and warnings of others."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.name.startswith(_OWN)

    def emit(self, record: logging.LogRecord) -> None:
        kind = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        print(f"{kind}{self.format(record)}", file=sys.stderr)
