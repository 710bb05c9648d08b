"""Utilities for JSON files, logs, output folders, signals, memory and child processes."""

import contextlib
import gc
import hashlib
import itertools
import json
import logging
import mmap
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

import numpy as np
import orjson
import torch
from filelock import FileLock, Timeout
from torch import nn
from tqdm.contrib import DummyTqdmFile

from backbones import ConfigError
from backbones.errors import FULL_DISK, check_file

# SIGINT: Ctrl-C. SIGTERM: a scheduler. SIGHUP: a closed terminal. SIGUSR1 and SIGXCPU: the time limit is near.
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")
# Some systems lack some of these signals.
STOP_SIGNALS = tuple(getattr(signal, name) for name in _STOP_SIGNALS if hasattr(signal, name))
LOCK_FILE = ".run.lock"
# Seconds to wait for a lock. A killed process needs time to free its memory and its lock.
LOCK_TIMEOUT = 5.0
# The long lists of JSON files of at least this number of bytes are stored as bytes, which need less memory, but more
# time for each access. The annotations of COCO's 118,287 training images have 470 MB.
LARGE_FILE = 1 << 29
# Long lists are parsed in parts of about this number of bytes. Smaller files are not divided.
_PART = 1 << 24
# Between two objects of a list, and at the end of a list of objects in the top-level object
_NEXT_ITEM, _LIST_END = re.compile(rb"\}[ \t\r\n]*,[ \t\r\n]*(?=\{)"), re.compile(rb'\}\s*\](?=\s*(,\s*"|\}\s*\Z))')
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
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
_FIRST_FILES = re.compile(r"log\.txt|metrics\.json$|data$|events\.out\.tfevents\.")
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


# -- files -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Disable garbage collection inside the context.

    It would take half of the time when millions of objects are created.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_json(path: str | Path, *, what: str = "file", lists: Iterable[str] = ()) -> Any:
    """Return the content of a JSON file. NaN and infinity are accepted as numbers.

    Args:
        path: Path of the file.
        what: Description of the file for error messages.
        lists: Lists of the top-level object that may be long, such as a COCO file's annotations. If they can be
            divided, they are parsed in parts, and in a file of 512 MiB or more, they become :class:`SharedRecords`.

    Raises:
        ConfigError: If the file is missing, is not a regular file, cannot be read, or is not JSON. Also if an object
            has the same key twice (Python would drop one value), or if a string has an unpaired surrogate, which
            cannot be encoded.
    """
    check_file(path, what)
    try:
        with paused_garbage_collection():
            # Some lists cannot be divided, and some file systems do not map files.
            with contextlib.suppress(ValueError, OSError):
                if lists and os.path.getsize(path) >= _PART:
                    return _parse_lists(path, lists)
            return _parse(Path(path).read_bytes())
    except UnicodeEncodeError as error:
        near = error.object[max(error.start - 20, 0) : error.end].encode("ascii", "backslashreplace").decode()
        raise ConfigError(f"'{path}' has an unpaired surrogate: {near}. Replace it by a valid character.") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"Cannot read '{path}': {reason}. Check the file and its permissions.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"'{path}' is not valid JSON: {error}. Fix the file.") from error


def _parse(text: bytes) -> Any:
    """Parse JSON. Raise a ValueError under the conditions of :func:`read_json`.

    orjson is several times as fast as Python's parser. But it drops the first value of a duplicate key, rounds integers
    of more than 64 bits, and rejects NaN and other encodings than UTF-8.
    """
    num_keys = text.count(b'":') + len(re.findall(rb'"\s+:', text))
    with contextlib.suppress(orjson.JSONDecodeError):
        content = orjson.loads(text)
        if _num_keys(content) == num_keys and b"0" * 19 not in text.translate(_DIGITS_TO_ZERO):
            return content
    decoded = text.decode(json.detect_encoding(text))
    content = json.loads(decoded, object_pairs_hook=_without_repetition)
    if re.search(r"\\u[dD][89a-fA-F]", decoded):
        # File names that are not UTF-8 are accepted.
        json.dumps(content, ensure_ascii=False).encode(errors="surrogateescape")
    return content


def _num_keys(value: Any) -> int:
    if type(value) is dict:
        return len(value) + sum(map(_num_keys, value.values()))
    # A list of numbers may be very long.
    return sum(map(_num_keys, value)) if type(value) is list and value and type(value[0]) is dict else 0


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the duplicate key {key!r}")
    return content


def _parse_lists(path: str | Path, names: Iterable[str]) -> dict[str, Any]:
    """Parse a JSON object with long lists of objects. Raise a ValueError if the lists cannot be parsed in parts."""
    marker = "a list without its objects"
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        rest, end, spans = [], 0, {}
        for name in names:
            # Each pattern must match once.
            (start,) = (match.end() for match in re.finditer(rb'"%b"\s*:\s*\[\s*(?=\{)' % name.encode(), text))
            (stop,) = (match.start() + 1 for match in itertools.islice(_LIST_END.finditer(text, start), 1))
            spans[name] = start, stop
        for start, stop in sorted(spans.values()):
            rest.append(text[end:start] + json.dumps(marker).encode())
            end = stop
        content, kind = _parse(b"".join([*rest, text[end:]])), SharedRecords if len(text) >= LARGE_FILE else list
        for name, span in spans.items():
            if not isinstance(content, dict) or content.get(name) != [marker]:
                raise ValueError(f"{name} is not a list of the top-level object")
            content[name] = kind(_parts(text, *span))
    return content


def _parts(text: mmap.mmap, start: int, stop: int) -> Iterator[Any]:
    """Yield the objects of a list. Raise a ValueError if an object has a list of objects."""
    while start < stop:
        cut = _NEXT_ITEM.search(text, min(start + _PART, stop), stop)
        yield from _parse(b"[%b]" % text[start : cut.start() + 1 if cut else stop])
        start = cut.end() if cut else stop
        if hasattr(text, "madvise"):
            # Otherwise, the pages of the file count as memory of this process.
            text.madvise(mmap.MADV_DONTNEED)


def like(entries: Sequence[Any], items: Iterable[Any]) -> Sequence[Any]:
    """Return items as :class:`SharedRecords` if ``entries`` are, and otherwise as a list."""
    return SharedRecords(items) if isinstance(entries, SharedRecords) else [*items]


def content_hash(path: str | Path) -> str:
    """Return the SHA-256 of a file, or the path of a broken link."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if os.path.isfile(path) else str(path)


class SharedRecords(Sequence[Any]):
    """Records as bytes in two tensors, which processes share. Each access restores a record.

    In contrast to detectron2's ``DatasetFromList``, records are created and serialized one at a time, and the keys of
    dicts are stored once. A box of a COCO file needs about 100 bytes instead of 600. Slices are not supported.
    """

    def __init__(self, records: Iterable[Any]) -> None:
        content, ends = bytearray(), array("q", [0])
        numbers: dict[tuple[str, ...] | None, int] = {}
        for record in records:
            keys, values = (tuple(record), [*record.values()]) if isinstance(record, dict) else (None, record)
            content += pickle.dumps((numbers.setdefault(keys, len(numbers)), values), -1)
            ends.append(len(content))
        self.content = torch.from_numpy(np.frombuffer(content, np.uint8))
        self.ends = torch.from_numpy(np.frombuffer(ends, np.int64))
        self.keys, self.length = list(numbers), len(ends) - 1
        # Views of the tensors, which are faster
        self._views: tuple[memoryview, memoryview] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # To send the tensors to a new process, PyTorch moves them.
        self._views = None
        return self.__dict__

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        index = range(self.length)[index]
        if self._views is None:
            self._views = memoryview(self.content.numpy()), memoryview(self.ends.numpy())
        content, ends = self._views
        number, values = pickle.loads(content[ends[index] : ends[index + 1]])
        return values if self.keys[number] is None else dict(zip(self.keys[number], values, strict=True))


# -- logs ------------------------------------------------------------------------------------------


def silence_known_warnings() -> None:
    """Hide the warnings and records listed in this module. Call it before detectron2 is imported."""
    for text in _WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    for name, text in _SILENCED_RECORDS.items():
        silenced = re.compile(text, re.DOTALL)
        logging.getLogger(name).addFilter(lambda record, silenced=silenced: not silenced.match(record.getMessage()))


def log_run(output_dir: str, *, rank: int = 0) -> None:
    """Log this project, detectron2 and fvcore to ``output_dir/log.txt``, and a selection of records to stdout.

    Call it before detectron2's ``default_setup``, which then adds no handlers.

    Args:
        output_dir: Output directory of the run.
        rank: Rank of the process. A rank above 0 writes to ``log.txt.rankN`` and not to stdout.
    """
    # This import warns. The package hides the warning first, so the import cannot be at the top of the file.
    from detectron2.utils.logger import setup_logger

    # setup_logger is cached: with the names and arguments of default_setup, it adds no second handler.
    for options in ({"name": "fvcore"}, {}, {"name": "projects_vil"}, {"name": "backbones"}):
        for handler in setup_logger(output_dir, distributed_rank=rank, **options).handlers:
            if getattr(handler, "stream", None) is sys.stdout:
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


# -- folders ---------------------------------------------------------------------------------------


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
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Create a temporary folder in ``folder`` and delete it at the end.

    Write files to the temporary folder, and move them to ``folder`` when they are complete. A failure then leaves
    older files unchanged. If ``folder`` is new and stays empty, it is deleted too.

    Yields:
        The path of the temporary folder.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as unfinished:
            yield Path(unfinished)
    except OSError as error:
        # Most writes to a full disk fail without the name of the file.
        if error.errno in FULL_DISK and not error.filename:
            error.filename = str(folder)
        raise
    finally:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


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


def terminate(number: int, frame: FrameType | None = None) -> NoReturn:
    """Raise ``SystemExit`` with the exit status 128 + ``number``. This is a signal handler."""
    raise SystemExit(128 + number)


@contextlib.contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle ``STOP_SIGNALS`` with ``handler`` inside the context.

    Signals that are ignored stay ignored, such as SIGHUP under ``nohup``. Python sets signal handlers in the main
    thread only, so this is a no-op in other threads.

    Args:
        handler: Called with the signal number and the stack frame.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


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
            # print() would fail if the handler interrupts another print().
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
            terminate(received[0])

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
