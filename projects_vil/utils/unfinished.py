"""A place for files that are not finished."""

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from backbones import InputError
from projects_vil.utils.signals import unwound_by_signals


@contextlib.contextmanager
def unfinished_folder(folder: Path) -> Iterator[Path]:
    """A folder for what is not finished, beside what is: what fails leaves older files as they were.

    Where there was none, ``folder`` goes with it. It is named before it is made, so that a signal that arrives while it
    is made finds it to be removed.
    """
    unfinished, is_new = folder / f".unfinished-{secrets.token_hex(4)}", not folder.exists()
    with unwound_by_signals():
        try:
            try:
                unfinished.mkdir(parents=True)
            except OSError as error:
                raise InputError(f"cannot write into {folder}: {error.strerror}") from error
            yield unfinished
        finally:
            if unfinished.exists():
                shutil.rmtree(unfinished)
            if is_new and folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
