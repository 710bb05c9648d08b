"""Utilities for logs, output directories, signals, memory and child processes."""

import contextlib
import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import nn
from tqdm.contrib import DummyTqdmFile

from backbones import ConfigError
from backbones.errors import handling_signals

LOCK_FILE = ".run.lock"
# Seconds to wait for a lock. A killed process needs time to free its memory and its lock.
LOCK_TIMEOUT = 5.0
# Records that go to log.txt but not to the console: internals of detectron2, and very long texts.
_FILE_ONLY = re.compile(
    r"Rank of current process: 0\. World size: 1$|Environment info:|Command line arguments: |"
    r"Contents of args\.config_file|Running with full config:|Full config saved to|Model:\n|"
    r"\[DatasetMapper\] Augmentations used|Using training sampler|Serializ(ing|ed) |Making batched data loader|"
    r"Fast COCO eval is not built|Preparing results for COCO format|Total inference |"
    r"\[DetectionCheckpointer\] Loading|Saving checkpoint and its| iter: \d+  gradient_norm|"
    # The table before these records has the same figures. A metric that cannot be computed is nan.
    r"copypaste: |Evaluation results for .* in csv format:|Some metrics cannot be computed"
)
# Names of the files that a run writes before its config.
_FIRST_FILES = re.compile(r"(log|dataset)\.txt|metrics\.json$|data$|events\.out\.tfevents\.")
# Regular expressions for the start of a warning.
_WARNINGS = (
    # detectron2 scripts a few functions at import, and TorchScript is one of our export formats.
    r"`torch\.jit\.(script|load|save)` is deprecated",
    # detectron2's anchors rely on the current default order.
    r"torch\.meshgrid: in an upcoming release",
    # detectron2 passes this argument to DistributedDataParallel.
    r"`broadcast_buffers` is deprecated",
    # detectron2's model zoo imports it. `vil install-detectron2` excludes the versions of setuptools without it.
    r"pkg_resources is deprecated as an API",
    # The curves of a report are SVG images. A browser draws letters that Matplotlib's font lacks.
    r"Glyph \d+ .* missing from",
)
# Names of loggers, and regular expressions for the start of the records that are dropped.
_SILENCED_RECORDS = {
    # detectron2 looks for a compiler when it describes the environment.
    "torch.utils.cpp_extension": r"No CUDA runtime is found",
    # The files of detectron2's model zoo are as trustworthy as its code.
    "fvcore.common.config": r".*/detectron2/model_zoo/.*yaml\.unsafe_load",
    # Every Mask R-CNN of detectron2 calls is_fx_tracing.
    "torch.fx._symbolic_trace": r"is_fx_tracing will return true",
    # The exception that follows has the same text.
    "iopath.common.download": r"Failed to download",
    "detectron2.config.instantiate": r"Error when instantiating",
    # Every file with a subset of COCO's categories needs this mapping.
    "detectron2.data.datasets.coco": r"\s*Category ids in annotations are not in",
}


# -- logs ------------------------------------------------------------------------------------------


def silence_known_warnings() -> None:
    """Hide the warnings and records listed in this module. Call it before detectron2 is imported."""
    for text in _WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    for name, text in _SILENCED_RECORDS.items():
        silenced = re.compile(text, re.DOTALL)
        logging.getLogger(name).addFilter(lambda record, silenced=silenced: not silenced.match(record.getMessage()))


_handlers: list[tuple[logging.Logger, logging.StreamHandler]] = []  # of the last run in this process


def log_run(output_dir: str, *, rank: int = 0) -> None:
    """Log this project, detectron2 and fvcore to ``output_dir/log.txt``, and a selection of records to stdout.

    Call it before detectron2's ``default_setup``, which then adds no handlers.

    Args:
        output_dir: Output directory of the run.
        rank: Rank of the process. A rank above 0 writes to ``log.txt.rankN`` and not to stdout.
    """
    # This import warns. The package hides the warning first, so the import cannot be at the top of the file.
    from detectron2.utils.logger import _cached_log_stream, setup_logger

    # An earlier run of this process, as in a notebook, has handlers too. Its folder may be gone.
    for logger, handler in _handlers:
        logger.removeHandler(handler)
    _handlers.clear()
    _cached_log_stream.cache_clear()
    # setup_logger is cached: with the names and arguments of default_setup, it adds no second handler.
    setup_logger.cache_clear()
    for options in ({"name": "fvcore"}, {}, {"name": "projects_vil"}, {"name": "backbones"}):
        before = logging.getLogger(options.get("name", "detectron2")).handlers[:]
        logger = setup_logger(output_dir, distributed_rank=rank, **options)
        for handler in [handler for handler in logger.handlers if handler not in before]:
            _handlers.append((logger, handler))
            if handler.stream is sys.stdout:
                handler.addFilter(is_for_console)
                if sys.stdout.isatty():
                    # Lines appear above the progress bar.
                    handler.setStream(DummyTqdmFile(sys.stdout))


def is_for_console(record: logging.LogRecord) -> bool:
    """Return whether the console shows a record.

    It omits very long records. It also omits the traceback of a user's mistake, because the run ends with a one-line
    error instead. In a terminal, the progress bar has the metrics.
    """
    if record.name == "detectron2.utils.events" and sys.stdout.isatty():
        return False
    error = record.exc_info and record.exc_info[1]
    if isinstance(error, ConfigError) or "DataLoader worker" in str(error):
        return False
    return record.levelno > logging.WARNING or _FILE_ONLY.match(record.getMessage()) is None


# -- output directories ----------------------------------------------------------------------------


@contextlib.contextmanager
def run_lock(folder: str | Path) -> Iterator[None]:
    """Lock ``OUTPUT_DIR`` against other runs inside the context. The lock is released when this process ends.

    Args:
        folder: ``OUTPUT_DIR``, which must exist.

    Raises:
        ConfigError: If another run has locked it, with the process and host of the other run.
    """
    path = Path(folder) / LOCK_FILE
    lock = FileLock(path)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT)
    except Timeout as error:
        holder = path.read_text() if path.exists() else ""
        raise ConfigError(f"OUTPUT_DIR '{folder}' is in use by {holder or 'another run'}. Choose another.") from error
    except OSError as error:
        raise ConfigError(f"Cannot write to OUTPUT_DIR '{folder}': {error.strerror}. Choose another.") from error
    path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    try:
        yield
    finally:
        # The file is deleted before the lock is released. Otherwise the file of the next run could be deleted.
        path.unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def cleanup_on_failure(folder: Path) -> Iterator[None]:
    """Create ``OUTPUT_DIR``, and delete it if the run fails before it writes its config.

    The folder is kept if it was not empty at the start, or if it has a file that a run does not write so early.

    Args:
        folder: ``OUTPUT_DIR``.

    Raises:
        ConfigError: If the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot create OUTPUT_DIR '{folder}': {error.strerror}. Choose another.") from error
    is_new = not any(folder.iterdir())
    try:
        yield
    except BaseException:
        # Other processes of this run may delete the folder too, and another run may have its lock in it.
        with contextlib.suppress(OSError):
            if is_new and all(_FIRST_FILES.match(path.name) for path in folder.iterdir()):
                shutil.rmtree(folder)
        raise


# -- signals ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def stop_requests(*, single_process: bool, notice: str = "") -> Iterator[list[int]]:
    """Yield a list, and append the number of each received signal of ``STOP_SIGNALS`` to it.

    Args:
        single_process: Raise ``KeyboardInterrupt`` at a second Ctrl-C. Set it to False if the run has several
            processes: each one may receive the same Ctrl-C twice, from the terminal and from its parent process.
        notice: Sentence that is printed to stderr at the first signal.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if single_process and number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        # A second signal may interrupt this handler after each call.
        is_first = not received
        received.append(number)
        if notice and is_first:
            # print() would fail if the handler interrupts another print(), and the reader of a pipe may have ended.
            with contextlib.suppress(OSError):
                os.write(2, f"{signal.Signals(number).name}: {notice}\n".encode())

    with handling_signals(receive):
        yield received


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Defer ``STOP_SIGNALS`` to the end of the context. Use it for short blocks that must be completed."""
    received: list[int] = []
    try:
        with stop_requests(single_process=False) as received:
            yield
    finally:
        for number in received:
            signal.raise_signal(number)


@contextlib.contextmanager
def terminating_between_calls(module: nn.Module, received: list[int]) -> Iterator[None]:
    """End this process after a signal, before the next call of ``module`` or at the end of the context.

    The process does not end in the signal handler: a fork may be in progress, or Python may ignore exceptions there.

    Args:
        module: The model that is evaluated.
        received: The list from :func:`stop_requests`.
    """

    def check(*_: object) -> None:
        if received:
            raise SystemExit(128 + received[0])

    with module.register_forward_pre_hook(check):
        check()
        yield
        check()


# -- memory ----------------------------------------------------------------------------------------


def memory_of(*, peak: bool = False) -> int | None:
    """Return the resident memory of this process in bytes, or ``None`` on systems without ``/proc``.

    ``getrusage`` cannot replace this function: the peak of a child process includes the memory of its parent.

    Args:
        peak: Return the peak instead of the current value.
    """
    status = Path("/proc/self/status")
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else None


def peak_in_new_process(build: Callable[[], Callable[[], object]], *, what: str, instead: str) -> int | None:
    """Measure the peak memory of one function call in a new process with the same number of threads.

    Args:
        build: Returns the function to call. It must be picklable.
        what: Description of the measured function for error messages.
        instead: Sentence for error messages that says what to do if the memory is too small.

    Returns:
        The peak in bytes, minus the memory before the call. ``None`` on systems without ``/proc``.

    Raises:
        ConfigError: If ``build`` or the call raises it, or if the process is killed, for example because the memory is
            too small.
    """
    if memory_of(peak=True) is None:
        return None
    try:
        return call_in_new_process(_peak, build, torch.get_num_threads())
    except BrokenProcessPool as error:
        raise ConfigError(f"{what}: the process that measures the memory was killed. {instead}") from error


def _peak(build: Callable[[], Callable[[], object]], threads: int) -> int:
    torch.set_num_threads(threads)
    call = build()
    # This resets the peak of the process.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_of()
    call()
    return memory_of(peak=True) - before


# -- new processes ---------------------------------------------------------------------------------


@contextlib.contextmanager
def hidden_main_module() -> Iterator[None]:
    """Hide the main module from processes that are spawned inside the context.

    multiprocessing runs the main module of the parent in each spawned process. A script that calls
    :func:`projects_vil.train` without ``if __name__ == "__main__"`` would train again there. Functions that are passed
    to the processes must be importable from another module.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def call_in_new_process(function: Callable[..., Any], *args: object) -> Any:
    """Call ``function(*args)`` in a new interpreter and return the result.

    Args:
        function: A function that can be imported from a module other than the main module.
        args: Picklable arguments.

    Raises:
        BrokenProcessPool: If the process is killed, for example because the memory is too small.
        Exception: Any exception that ``function`` raises.
    """
    context = multiprocessing.get_context("spawn")
    with hidden_main_module(), ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()
