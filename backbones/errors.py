"""The one exception for a user's mistake, and how such a message names the closest right spelling."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path

# A file with this text in its first bytes was written by this project, and may be replaced.
GENERATOR = "written by vil-detectron2"
_NUM_FIRST_BYTES = 4096


class ConfigError(ValueError):
    """A user's mistake. The message is one line that names the file, key or value, and the way out."""


def find_os_error(error: BaseException) -> OSError | None:
    """Return the OSError that an exception is or that it was raised in the handling of, as by torch's writer."""
    return next((one for one in (error, error.__context__) if isinstance(one, OSError)), None)


def printable(text: object) -> str:
    """Return one line in which what controls a terminal, as in names of files, is written as Python writes it."""
    # Line ends, colors, and what hides or reverses text.
    control = r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(control, lambda found: found[0].encode("unicode_escape").decode(), str(text))


def closest(word: str, candidates: Iterable[str], *, most: int = 1) -> str:
    """``"; did you mean 'vil_small'?"`` for the candidates most like ``word``, or an empty string.

    Args:
        most: how many are named, ``'a' or 'b'``.
    """
    matches = difflib.get_close_matches(word, list(candidates), n=most, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""


def check_file(path: str | Path, description: str, *, key: str = "") -> None:
    """Raise a :class:`ConfigError` where ``path`` is not a file.

    Args:
        description: what the file is, in words.
        key: the key or argument that names it.
    """
    named_by = f" ({key})" if key else ""
    if Path(path).is_dir():
        raise ConfigError(f"{path} is a folder, not a {description}{named_by}: name a file in it")
    if not Path(path).is_file():
        # Reading a pipe or a device may never end.
        other = ", but a pipe or device" * Path(path).exists()
        raise ConfigError(f"there is no {description} {path}{named_by}{other}")


def check_replaceable(path: str | Path, *, advice: str = "Choose another file name.") -> None:
    """Raise a :class:`ConfigError` if ``path`` exists and its first bytes do not have ``GENERATOR``.

    Args:
        advice: a sentence about what to do, for the error.
    """
    path = Path(path)
    if path.is_file():
        with path.open("rb") as file:
            if GENERATOR.encode() in file.read(_NUM_FIRST_BYTES):
                return
    if path.exists() or path.is_symlink():
        raise ConfigError(f"'{path}' already exists and was not written by vil. {advice}")


def check_choice(what: str, value: object, choices: Iterable[str]) -> None:
    """Raise a :class:`ConfigError` where ``value`` is not one of ``choices``."""
    choices = list(choices)
    if value not in choices:
        names = list(map(str, choices))
        raise ConfigError(f"unknown {what} {value!r}: choose one of {', '.join(names)}{closest(str(value), names)}")


def check_whole(name: str, value: object, *, least: int = 1) -> None:
    """Raise a :class:`ConfigError` unless the argument ``name`` is a whole number of at least ``least``."""
    if type(value) is not int or value < least:
        raise ConfigError(f"{name}={value!r}: give a whole number, {least} or more")


def explain_unknown_keywords(function: Callable, also: Iterable[str] = ()) -> Callable:
    """Decorate ``function`` so that a keyword that is neither its own nor in ``also`` raises and names the closest."""
    parameters = inspect.signature(function).parameters.values()
    keywords = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD] + sorted(also)

    @functools.wraps(function)
    def checked(*args, **kwargs):
        for keyword in kwargs:
            if keyword not in keywords:
                hint = closest(keyword, keywords) or f"; known: {', '.join(keywords)}"
                raise ConfigError(f"{function.__name__} has no keyword {keyword!r}{hint}")
        return function(*args, **kwargs)

    return checked
