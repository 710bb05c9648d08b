"""One run in a folder at a time."""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from backbones import InputError

LOCK_FILE = ".run.lock"
# Seconds between two signs of life of a run, and without one until it counts as dead, where no lock tells.
HEARTBEAT = 20.0
PATIENCE = 90.0
# What a killed process may need to be gone.
SECONDS_TO_DIE = 3.0
# A file system that has no locks at all.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def run_lock(
    folder: str | Path, *, key: str = "OUTPUT_DIR", heartbeat: float = HEARTBEAT, patience: float = PATIENCE
) -> Iterator[None]:
    """While this lasts, no other run has the folder. The lock ends with its process, however that ends.

    The lock file names host and process. On a file system that shares its locks among hosts, and on one host, the
    system's lock counts; where another host is named the file's time, which the holder renews, tells whether its run is
    still alive: one that is not renewed is watched for a while, and then taken over.

    Args:
        folder: exists.
        key: that names it in a config.
        heartbeat: seconds between two renewals.
        patience: seconds without renewal until a run on another host counts as dead.

    Raises:
        InputError: where another run has it.
    """
    path = Path(folder) / LOCK_FILE
    descriptor = _acquire(path, f"{key} {folder}", patience)
    done = threading.Event()
    beat = threading.Thread(target=_renew, args=(descriptor, done, heartbeat), daemon=True)
    beat.start()
    try:
        yield
    finally:
        done.set()
        beat.join()
        # Before the lock ends, so that no file of the next one is removed.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def check_unlocked(folder: str | Path, *, key: str = "OUTPUT_DIR") -> None:
    """Whether no run on this host has the folder; it need not exist, and nothing is written.

    Raises:
        InputError: where one has it.
    """
    path = Path(folder) / LOCK_FILE
    if not path.exists():
        return
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        # What cannot be written to is told apart where the run starts.
        return
    try:
        if not _lock_soon(descriptor):
            raise _refusal(f"{key} {folder}", _read(descriptor))
    finally:
        os.close(descriptor)


def _acquire(path: Path, what: str, patience: float) -> int:
    """A descriptor of the file, locked, with this process' name in it."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(f"cannot write into {what}: {error.strerror}") from error
        try:
            _take(descriptor, what, patience)
            if _is_in_place(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # The run that had it ended, and removed it, in between.
        os.close(descriptor)


def _take(descriptor: int, what: str, patience: float) -> None:
    if not _lock_soon(descriptor):
        raise _refusal(what, _read(descriptor))
    host, process = _read(descriptor)
    if not host or host == socket.gethostname():
        return
    age = time.time() - os.fstat(descriptor).st_mtime
    if age < patience:
        logging.getLogger(__name__).info(
            "%s is or was that of process %s on %s: %.0f s to see whether that is alive", what, process, host, patience
        )
        _watch(descriptor, what, patience)
    logging.getLogger(__name__).info("%s: the run of process %s on %s is no more", what, process, host)


def _watch(descriptor: int, what: str, patience: float) -> None:
    """Clocks of two hosts differ: what counts is whether the file's time changes."""
    before, until = os.fstat(descriptor).st_mtime_ns, time.monotonic() + patience
    while time.monotonic() < until:
        time.sleep(min(1.0, patience / 10))
        if os.fstat(descriptor).st_mtime_ns != before:
            raise _refusal(what, _read(descriptor))


def _lock_soon(descriptor: int) -> bool:
    """Whether it is locked; a run that was killed may be a while at it, with much memory to free."""
    until = time.monotonic() + SECONDS_TO_DIE
    while not (is_locked := _try_lock(descriptor)) and time.monotonic() < until:
        time.sleep(0.1)
    return is_locked


def _try_lock(descriptor: int) -> bool:
    try:
        # A lock of the process, not of the open file: worker processes, which inherit that, do not keep it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in _NO_LOCKS:
            raise
        return not _is_alive_here(_read(descriptor))
    return True


def _is_alive_here(holder: tuple[str, str]) -> bool:
    """Whether a process of this host is; said without locks."""
    host, process = holder
    if host != socket.gethostname() or not process.isdecimal() or int(process) == os.getpid():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_in_place(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> tuple[str, str]:
    """Host and process id, or empty texts."""
    host, _, process = os.pread(descriptor, 4096, 0).decode(errors="replace").strip().partition(" ")
    return host, process


def _refusal(what: str, holder: tuple[str, str]) -> InputError:
    host, process = holder
    who = f"process {process} on {host}" if host else "another process"
    return InputError(f"{what} is in use by {who}: wait until that run has ended, or choose another folder")


def _renew(descriptor: int, done: threading.Event, heartbeat: float) -> None:
    while not done.wait(heartbeat):
        with contextlib.suppress(OSError):
            os.utime(descriptor)
