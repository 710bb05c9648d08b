"""Atomic writing of files. This module does not import PyTorch."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from backbones.errors import ConfigError, find_os_error


@contextlib.contextmanager
def atomic_write(path: str | Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to ``path``, which replaces ``path`` at the end of the block.

    If the block fails or the machine crashes, ``path`` is unchanged. If ``path`` is a link or a pipe, it is replaced,
    and its target is unchanged. A missing folder is created. Give ``torch.save`` an open file instead of the path,
    because its own writer does not report the cause of a failure.

    Args:
        path: The file to write.
        sync: Wait until the contents are on the disk. Not needed for many small files such as drawings.

    Raises:
        ConfigError: If the file cannot be written.

    Example:
        >>> with atomic_write("results.json") as partial:
        ...     partial.write_text("{}")
    """
    path = Path(path)
    # A file name has at most 255 bytes.
    partial = path.with_name(f".{path.name[:60]}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if sync:
            _sync(partial)
        os.replace(partial, path)
        if sync:
            _sync(path.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = find_os_error(error) or error
        if isinstance(cause, RuntimeError):
            raise
        reason = getattr(cause, "strerror", None) or cause
        raise ConfigError(f"Cannot write '{path}': {reason}. Check the folder and the free space.") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a file in UTF-8, atomically."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    """Wait until the contents of a file or the entries of a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
