"""The exception for user mistakes, checks that raise it, and the handling of signals."""

import contextlib
import difflib
import errno
import importlib.metadata
import importlib.util
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

# A file with this text in its first bytes was written by this project and may be replaced.
GENERATOR = "written by vil-detectron2"
_NUM_FIRST_BYTES = 4096
FULL_DISK = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
# SIGINT: Ctrl-C. SIGTERM: a scheduler. SIGHUP: a closed terminal. SIGUSR1 and SIGXCPU: the time limit is near.
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")
# Some systems lack some of these signals.
STOP_SIGNALS = tuple(getattr(signal, name) for name in _STOP_SIGNALS if hasattr(signal, name))


class ConfigError(ValueError):
    """A mistake of the user. The message is one line. It names the file, key or value, and how to fix it."""


def find_os_error(error: BaseException) -> OSError | None:
    """Return ``error`` if it is an OSError. Otherwise return the disk error that caused it, or None."""
    cause = error.__context__
    if isinstance(error, OSError):
        return error
    return cause if isinstance(cause, OSError) and cause.errno in (*FULL_DISK, errno.EIO, errno.EROFS) else None


@contextlib.contextmanager
def explained_errors(path: str | Path, problem: str, advice: str) -> Iterator[None]:
    """Raise a :class:`ConfigError` with the name of a file instead of an error about its content.

    Wrap only code that parses the file, so that the errors of other code stay bugs. For damaged content, pyarrow raises
    an OSError without errno.
    """
    try:
        yield
    except (AssertionError, LookupError, OSError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError) or getattr(error, "errno", None) is not None:
            raise
        raise ConfigError(f"'{path}' {problem} ({error!r}). {advice}") from error


def printable(text: object) -> str:
    """Return ``text`` as one line, with control characters escaped. File names may contain them."""
    # Line ends, colors, and characters that hide or reverse text
    control = r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(control, lambda match: match[0].encode("unicode_escape").decode(), str(text))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural, such as ``"1 image"`` or ``"1,200 images"``."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}{'es' if noun.endswith(('s', 'tch')) else 's'}"
    return f"{number:,} {noun if number == 1 else plural}"


def first_of(names: Sequence[str], number: int) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - number} more" if len(names) > number else ""
    return f"{', '.join(names[:number])}{more}"


def one_line(message: object) -> str:
    """Return a message of a library on one line, without its final period. A long message is cut in the middle."""
    line = " ".join(str(message).split()).rstrip(".")
    return line if len(line) <= 300 else f"{line[:150]} ... {line[-150:]}"


def closest(word: str, candidates: Iterable[str], *, most: int = 1, cutoff: float = 0.5) -> str:
    """Return ``". Did you mean 'vil_small'?"`` with the candidates closest to ``word``, or an empty string.

    Args:
        word: An invalid value.
        candidates: The valid values.
        most: Maximum number of suggestions.
        cutoff: Minimum similarity, from 0 to 1.
    """
    matches = difflib.get_close_matches(word, list(candidates), n=most, cutoff=cutoff)
    return f". Did you mean {' or '.join(map(repr, matches))}?" if matches else ""


def package_version(*names: str) -> str | None:
    """Return the version of the first installed package, or None if none is installed."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def pip_install(*packages: str) -> str:
    """Return the command that installs packages, in the versions that this project requires, as advice."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        required = [line.partition(";")[0].strip() for line in importlib.metadata.requires("vil-detectron2") or ()]
        names = {re.split(r"[^\w.-]", line)[0].replace("_", "-"): line for line in reversed(required)}
        packages = tuple(names.get(name.replace("_", "-"), name) for name in packages)
    return f"Run `{shlex.join(('pip', 'install', *packages))}`."


def check_packages(what: str, *packages: str) -> None:
    """Raise a :class:`ConfigError` unless the optional packages of an argument, a key or a format are installed."""
    for name in packages:
        spec = importlib.util.find_spec(name)
        # A folder that wandb has written is found too, without an origin.
        if spec is None or spec.origin is None:
            raise ConfigError(f"{what} needs {name}. {pip_install(*packages)}")


def check_file(path: str | Path, description: str, *, key: str = "") -> None:
    """Check that ``path`` is a file.

    Args:
        path: The path.
        description: What the file should be, such as ``"checkpoint"``.
        key: The config key or argument with this path.

    Raises:
        ConfigError: If there is no such file.
    """
    named_by = f" ({key})" if key else ""
    if Path(path).is_dir():
        raise ConfigError(f"'{path}' is a folder, not a {description}{named_by}. Give a file in it.")
    if not Path(path).is_file():
        # Reading a pipe or a device may never end.
        problem = "is a pipe or a device" if Path(path).exists() else "does not exist"
        raise ConfigError(f"The {description} '{path}'{named_by} {problem}. Give another file.")


def check_replaceable(path: str | Path, *, advice: str = "Choose another file name.") -> None:
    """Check that ``path`` does not exist, or has ``GENERATOR`` in its first bytes.

    Args:
        path: The path of an output file.
        advice: A sentence for the error message that says what to do.

    Raises:
        ConfigError: If another file exists there.
    """
    path = Path(path)
    if path.is_file():
        with path.open("rb") as file:
            if GENERATOR.encode() in file.read(_NUM_FIRST_BYTES):
                return
    if path.exists() or path.is_symlink():
        raise ConfigError(f"'{path}' already exists and was not written by vil. {advice}")


def check_choice(what: str, value: object, choices: Iterable[str]) -> None:
    """Raise a :class:`ConfigError` if ``value`` is not one of ``choices``."""
    choices = list(choices)
    if value not in choices:
        names = list(map(str, choices))
        hint = closest(str(value), names) or "."
        raise ConfigError(f"Unknown {what} {value!r}{hint} Choose one of {', '.join(names)}.")


def check_whole(name: str, value: object, *, least: int = 1) -> None:
    """Raise a :class:`ConfigError` unless the argument ``name`` is a whole number of at least ``least``."""
    if type(value) is not int or value < least:
        raise ConfigError(f"{name}={value!r} is not valid. Give a whole number of at least {least}.")


def terminate(number: int, frame: FrameType | None = None) -> NoReturn:
    """Raise ``SystemExit`` with the exit status 128 + ``number``. This is a signal handler.

    Python ignores exceptions in destructors. If the signal interrupts a destructor, it is therefore sent again.
    """

    def send_again(unraisable: "sys.UnraisableHookArgs") -> None:
        if isinstance(unraisable.exc_value, SystemExit):
            threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, number)).start()
        else:
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = send_again
    raise SystemExit(128 + number)


@contextlib.contextmanager
def handling_signals(handler: Callable[..., object], *, only_default: bool = False) -> Iterator[None]:
    """Handle ``STOP_SIGNALS`` with ``handler`` inside the context.

    Signals that are ignored stay ignored, such as SIGHUP under ``nohup``. Python sets signal handlers in the main
    thread only, so this is a no-op in other threads.

    Args:
        handler: Called with the signal number and the stack frame.
        only_default: Keep the handlers that Python or other libraries have set.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            former = signal.getsignal(number)
            if former == signal.SIG_DFL or not (only_default or former in (signal.SIG_IGN, None)):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
