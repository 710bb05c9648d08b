"""Logs, locks, signals and memory of processes."""

import contextlib
import gc
import json
import logging
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

import torch
from filelock import FileLock, Timeout
from torch import nn

from backbones import ConfigError
from backbones.errors import check_file

# Ctrl-C, a scheduler, a terminal that is closed, and a scheduler's or the system's warning that time is up soon.
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")
# Not every system has all.
STOP_SIGNALS = tuple(getattr(signal, name) for name in _STOP_SIGNALS if hasattr(signal, name))
LOCK_FILE = ".run.lock"
# Seconds that a killed process may need until it has freed its memory and its lock.
LOCK_TIMEOUT = 5.0
# What a run's log.txt has and its console leaves out: detectron2's internals, and pages that nobody reads there.
_FILE_ONLY = re.compile(
    r"Rank of current process: 0\. World size: 1$|Environment info:|Command line arguments: |"
    r"Contents of args\.config_file|Running with full config:|Full config saved to|Model:\n|"
    r"\[DatasetMapper\] Augmentations used|Using training sampler|Serializ(ing|ed) |Making batched data loader|"
    # The next line reports that there is no checkpoint.
    r"\[\w+\] Loading from  \.\.\.$|"
    r"Fast COCO eval is not built|Preparing results for COCO format|Total inference pure compute time|"
    # The table above these has the same figures, and nan for metrics that cannot be computed.
    r"copypaste: |Evaluation results for .* in csv format:|Some metrics cannot be computed"
)
# What a run and its libraries open in its folder under a fixed name; evaluators write into "inference".
_OPENED = ("log.txt*", "metrics.json", "last_checkpoint", "drawings", "inference", "inference/**/*")
# The files that a run writes before its config.
_FIRST_FILES = re.compile(r"log\.txt|metrics\.json$|data$|events\.out\.tfevents\.")
# The beginning of a warning, as a regular expression.
_WARNINGS = (
    # detectron2 scripts a few of its functions when it is imported; TorchScript is an export format.
    r"`torch\.jit\.(script|load|save)` is deprecated",
    # detectron2's anchors; the order that it relies on is the default.
    r"torch\.meshgrid: in an upcoming release",
    # detectron2's argument of DistributedDataParallel.
    r"`broadcast_buffers` is deprecated",
    # detectron2's model zoo; setup.py holds setuptools below the version without it.
    r"pkg_resources is deprecated as an API",
)
# Loggers, and the beginning of their records.
_SILENCED_RECORDS = {
    # detectron2's report of the environment looks for a compiler.
    "torch.utils.cpp_extension": r"No CUDA runtime is found",
    # Files of detectron2's model zoo are trusted as its code is.
    "fvcore.common.config": r".*/detectron2/model_zoo/.*yaml\.unsafe_load",
    # detectron2 asks torch in every Mask R-CNN whether it is traced.
    "torch.fx._symbolic_trace": r"is_fx_tracing will return true",
    # The exceptions have the same text.
    "iopath.common.download": r"Failed to download",
    "detectron2.config.instantiate": r"Error when instantiating",
    # The mapping is what any file of a few of COCO's categories needs.
    "detectron2.data.datasets.coco": r"\s*Category ids in annotations are not in",
}


# -- files -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Collect no garbage inside: it takes half of the time while millions of objects are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_json(path: str | Path, *, what: str = "file") -> Any:
    """Return the content of a JSON file.

    Args:
        what: what the file is, in words.

    Raises:
        ConfigError: for a file that is missing or not a regular one, cannot be read or is not JSON, and where
            :func:`parse_json` raises one.
    """
    check_file(path, what)
    try:
        with paused_garbage_collection():
            return parse_json(Path(path).read_text(encoding="utf-8"), source=path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def parse_json(text: str, *, source: str | Path) -> Any:
    """Return the content of JSON, in which NaN and infinity are numbers.

    Raises:
        ConfigError: for text that is not JSON, an object with a key twice, of which Python would drop one, and
            characters that are half of a surrogate pair, which no file or terminal takes.
    """
    try:
        content = json.loads(text, object_pairs_hook=_without_repetition)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            # Names of files that are not UTF-8 pass.
            json.dumps(content, ensure_ascii=False).encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        near = error.object[max(error.start - 20, 0) : error.end].encode("ascii", "backslashreplace").decode()
        raise ConfigError(f"{source} has half of a surrogate pair, which is no character: {near}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON that can be read: {error}") from error
    return content


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {key!r} twice")
    return content


# -- logs ------------------------------------------------------------------------------------------


def silence_known_warnings() -> None:
    """Leave out the warnings above, before detectron2 is imported; any other is shown."""
    for text in _WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    for name in _SILENCED_RECORDS:
        logging.getLogger(name).addFilter(_is_unknown)


def _is_unknown(record: logging.LogRecord) -> bool:
    return re.match(_SILENCED_RECORDS[record.name], record.getMessage(), re.DOTALL) is None


def log_run(output_dir: str, *, rank: int = 0) -> None:
    """Log this project, detectron2 and fvcore to ``output_dir/log.txt``, and what concerns a user to stdout.

    Call it before detectron2's ``default_setup``, which then adds no handlers of its own.

    Args:
        output_dir: folder of the run.
        rank: rank of the process; those above 0 write files of their own, and not to stdout.
    """
    # Not at the top of the file, because it warns: the package silences that first.
    from detectron2.utils.logger import setup_logger

    # Names and arguments as in default_setup: the same arguments add no second handler.
    for options in ({"name": "fvcore"}, {}, {"name": "projects_vil"}, {"name": "backbones"}):
        for handler in setup_logger(output_dir, distributed_rank=rank, **options).handlers:
            if getattr(handler, "stream", None) is sys.stdout:
                handler.addFilter(is_for_console)


def is_for_console(record: logging.LogRecord) -> bool:
    """Leave out pages, and the traceback of a user's mistake, for which the run ends with one line."""
    error = record.exc_info and record.exc_info[1]
    if isinstance(error, ConfigError) or "DataLoader worker" in str(error):
        return False
    return record.levelno > logging.WARNING or _FILE_ONLY.match(record.getMessage()) is None


# -- folders ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def run_lock(folder: str | Path) -> Iterator[None]:
    """Hold the lock of ``OUTPUT_DIR``, which exists: no other run can have it. It ends with this process.

    Raises:
        ConfigError: where another run has it, with that run's host and process.
    """
    path = Path(folder) / LOCK_FILE
    lock = FileLock(path)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT)
    except Timeout as error:
        holder = path.read_text() if path.exists() else ""
        raise ConfigError(
            f"OUTPUT_DIR {folder} is in use by {holder or 'another run'}: wait until it ends, or choose another folder"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write into OUTPUT_DIR {folder}: {error.strerror}") from error
    path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    try:
        yield
    finally:
        # While it is locked, so that the next run's file is not removed.
        path.unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Make a temporary folder in ``folder``, and remove it at the end; a new ``folder`` that stays empty goes too.

    Files are written there and moved into ``folder`` when they are complete: a failure leaves older files unchanged.
    """
    # Named before it is made, so that a signal in between finds it to be removed.
    unfinished, is_new = folder / f".unfinished-{secrets.token_hex(4)}", not folder.exists()
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if is_new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


@contextlib.contextmanager
def cleanup_on_failure(folder: Path) -> Iterator[None]:
    """Make ``OUTPUT_DIR``, and remove it where the run ends by an error before it has written its config, with its log.

    A folder that had anything in it stays, and so does one with any file that a run does not write by then.

    Raises:
        ConfigError: if the folder cannot be created, or where what the run opens in it would lead elsewhere or hang.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_new = not any(folder.iterdir())
        for path in sorted(path for pattern in _OPENED for path in folder.glob(pattern)):
            is_folder = path.is_dir() and path.relative_to(folder).parts[0] in ("drawings", "inference")
            if path.is_symlink() or not (path.is_file() or is_folder):
                raise ConfigError(
                    f"{path} is a link, a pipe or a folder, and a run writes a file of its own there: remove it, or "
                    "choose another OUTPUT_DIR"
                )
    except OSError as error:
        raise ConfigError(f"OUTPUT_DIR {folder} cannot be written: {error.strerror}") from error
    try:
        yield
    except BaseException:
        # Others of the run may do the same, and another run may have its lock in the folder.
        with contextlib.suppress(OSError):
            if is_new and all(_FIRST_FILES.match(path.name) for path in folder.iterdir()):
                shutil.rmtree(folder)
        raise


def check_output_folder(folder: str | Path) -> None:
    """Raise a :class:`ConfigError`, before the work, where ``output`` is a file and not a folder."""
    if Path(folder).exists() and not Path(folder).is_dir():
        raise ConfigError(f"output {folder} is a file, and a folder is needed")


# -- signals ---------------------------------------------------------------------------------------


def terminate(number: int, frame: FrameType | None = None) -> NoReturn:
    """End this process as a signal does, with the exit status 128 + number; a signal handler."""
    raise SystemExit(128 + number)


@contextlib.contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let ``handler`` handle ``STOP_SIGNALS``, except for those that are ignored, as SIGHUP under nohup.

    Outside of the main thread, the only one in which handlers can be set, nothing changes.
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
    """Yield a list to which ``STOP_SIGNALS`` are appended.

    Args:
        single_process: whether a second Ctrl-C interrupts at once; one of several processes may get the same Ctrl-C
            twice, from the terminal and from the process that started it.
        notice: a sentence that is printed to stderr at the first signal.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if single_process and number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        if notice and not received:
            # Not print, which fails in a handler that interrupts another print.
            os.write(2, f"{signal.Signals(number).name}: {notice}\n".encode())
        received.append(number)

    with handling_signals(receive):
        yield received


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Let ``STOP_SIGNALS`` take effect at the end of the block, which is short and must not end halfway."""
    received: list[int] = []
    try:
        with stop_requests(single_process=False) as received:
            yield
    finally:
        for number in received:
            signal.raise_signal(number)


@contextlib.contextmanager
def terminating_between_calls(module: nn.Module, received: list[int]) -> Iterator[None]:
    """End this process before the next call of ``module``, or at the end of the block, once a signal is received.

    It does not end where a signal arrives: that may be in the middle of a fork, or where Python ignores exceptions.

    Args:
        module: an evaluated model.
        received: of :func:`stop_requests`.
    """

    def check(*_: object) -> None:
        if received:
            terminate(received[0])

    with module.register_forward_pre_hook(check):
        check()
        yield
        check()


# -- memory ----------------------------------------------------------------------------------------


def memory_of(process: int | str = "self", *, peak: bool = False) -> int | None:
    """Return the bytes of memory that a process has, or has had at most; None on systems without /proc.

    ``getrusage`` would not do: a child's peak begins with what its parent had when it was started.
    """
    status = Path(f"/proc/{process}/status")
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else None


def peak_in_new_process(build: Callable[[], Callable[[], object]], *, what: str, instead: str) -> int | None:
    """Return the peak bytes of one call above the memory before it, in a new process with as many threads as this one.

    Args:
        build: returns the function that is called; it is pickled.
        what: is measured, and ``instead`` what to do where memory is too small, both for an error.

    Returns:
        None on systems without /proc.

    Raises:
        ConfigError: as ``build`` or the call, and where the process is killed, as for lack of memory.
    """
    if memory_of(peak=True) is None:
        return None
    try:
        return call_in_new_process(_peak, build, torch.get_num_threads())
    except EOFError as error:
        raise ConfigError(f"{what}: the process that measured the memory has ended: {instead}") from error


def _peak(build: Callable[[], Callable[[], object]], threads: int) -> int:
    torch.set_num_threads(threads)
    call = build()
    # The peak counts from here.
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
    """Return ``function(*args)``, called in a new interpreter, which ends when this call ends for any reason.

    Args:
        function: importable from a module other than the main module.
        args: pickled for the process.

    Raises:
        EOFError: if the process is killed, for example because memory is short.
        Exception: the exception that ``function`` raises.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, args))
    try:
        with deferred_signals(), hidden_main_module():
            # The new process inherits the mask: Ctrl-C in a terminal ends this process only, which kills the new one.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sender.close()
        result, error = receiver.recv()
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
    if error is not None:
        raise error
    return result


def _send_result(sender: Connection, function: Callable[..., Any], args: tuple) -> None:
    # A parent that is killed cannot end this process.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        sent = function(*args), None
    except Exception as error:
        sent = None, error
    sender.send(sent)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
