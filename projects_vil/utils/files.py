"""Folders that a run or an export writes into."""

import contextlib
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from backbones import ConfigError

LOCK_FILE = ".run.lock"
# Seconds that a killed process may need until it has freed its memory and its lock.
SECONDS_TO_DIE = 5.0


@contextlib.contextmanager
def run_lock(folder: str | Path, *, key: str = "OUTPUT_DIR") -> Iterator[None]:
    """Hold the lock of a folder: no other run can have it. The lock ends with its process, however that ends.

    Args:
        folder: exists.
        key: the config key that names it.

    Raises:
        ConfigError: where another run has it, with that run's host and process.
    """
    path = Path(folder) / LOCK_FILE
    lock = _acquire(path, key)
    path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    try:
        yield
    finally:
        # While it is locked, so that the next run's file is not removed.
        path.unlink(missing_ok=True)
        lock.release()


def check_unlocked(folder: str | Path, *, key: str = "OUTPUT_DIR") -> None:
    """Raise a :class:`ConfigError` where a run has the folder, which need not exist."""
    path = Path(folder) / LOCK_FILE
    # A run that starts reports a file that cannot be written.
    if path.exists() and os.access(path, os.W_OK):
        _acquire(path, key).release()


def _acquire(path: Path, key: str) -> FileLock:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=SECONDS_TO_DIE)
    except Timeout as error:
        holder = path.read_text() if path.exists() else ""
        raise ConfigError(
            f"{key} {path.parent} is in use by {holder or 'another run'}: wait until that has ended, or choose another "
            "folder"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write into {key} {path.parent}: {error.strerror}") from error
    return lock


@contextlib.contextmanager
def unfinished_folder(folder: Path) -> Iterator[Path]:
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


def check_output_folder(folder: str | Path) -> None:
    """Raise a :class:`ConfigError`, before the work, where ``output`` is a file and not a folder."""
    if Path(folder).exists() and not Path(folder).is_dir():
        raise ConfigError(f"output {folder} is a file, and a folder is needed")
