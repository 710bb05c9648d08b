"""How every tool starts, and how it ends on a user's mistake."""

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from backbones.utils.errors import InputError, closest, system_error_of
from projects_vil.utils.endings import RunEnded, explain_ending
from projects_vil.utils.logging import log_to_stderr
from projects_vil.utils.signals import ToldToEnd, unwound_by_signals

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_RAISED_ELSEWHERE = f"{InputError.__module__}.{InputError.__qualname__}: "


class ToolParser(argparse.ArgumentParser):
    """A parser whose help is a tool's docstring, and whose errors are one line, with exit status 2.

    Args:
        description: the tool's docstring, with an example.
        parents: parsers whose arguments it takes too.
    """

    def __init__(self, description: str | None, *, parents: Sequence[argparse.ArgumentParser] = ()) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=parents,
            # A parent brings its --help along.
            add_help=not any(parent.add_help for parent in parents),
        )

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown argument {unknown[0]}{closest(unknown[0], self._option_string_actions)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists all arguments)\n")


def run_tool(main: Callable[[], None], *, log: bool = True) -> None:
    """Call ``main``, with what it logs on stderr, or without where it sets that up itself.

    An :class:`InputError`, raised here or in a process started from here, becomes one line on stderr and exit status
    1, an interrupt one line and status 130, :class:`ToldToEnd` one line and the status of its signal, and a process
    that was killed one line and, where it was one of those that train, the status of what killed it.
    """
    try:
        with unwound_by_signals(), log_to_stderr() if log else contextlib.nullcontext():
            main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except ToldToEnd as told:
        print(f"ended by {told.name}", file=sys.stderr)
        sys.exit(told.status)
    except (InputError, ProcessRaisedException) as error:
        # From another process comes its traceback as text, with the message at the end.
        message = str(error).strip().splitlines()[-1]
        if not isinstance(error, InputError) and not message.startswith(_RAISED_ELSEWHERE):
            raise
        _fail(message.removeprefix(_RAISED_ELSEWHERE))
    except (RunEnded, ProcessExitedException, RuntimeError, OSError) as error:
        ended, cause = explain_ending(error), system_error_of(error)
        if ended is not None:
            _fail(str(ended), ended.status)
        if cause is None or cause.errno not in _FULL:
            raise
        _fail(f"{cause.filename or 'a file'} cannot be written: {cause.strerror}; free some space and start again")


def _fail(message: str, status: int = 1) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


def check_json_path(path: str | None, *, not_one_of: Sequence[str] = ()) -> None:
    """Raise an :class:`InputError`, before the work, where ``--json`` names a folder, is in none or in one that cannot
    be written to, or names one of the files that the tool reads or writes."""
    if path and any(Path(path).resolve() == Path(other).resolve() for other in not_one_of):
        raise InputError(f"--json {path}: the file is needed for something else")
    if path and Path(path).is_dir():
        raise InputError(f"--json {path}: it is a folder")
    if path and not Path(path).absolute().parent.is_dir():
        raise InputError(f"--json {path}: there is no folder {Path(path).absolute().parent}")
    if path and not os.access(Path(path) if Path(path).exists() else Path(path).absolute().parent, os.W_OK):
        raise InputError(f"--json {path}: it cannot be written")


def check_output_folder(folder: str | Path) -> None:
    """Raise an :class:`InputError`, before the work, where ``--output`` is no folder and cannot be one."""
    if Path(folder).exists() and not Path(folder).is_dir():
        raise InputError(f"--output {folder}: it is a file, and a folder is needed")


def write_json(path: str | None, content: object) -> None:
    """Write ``content`` where ``--json`` asked for it."""
    if path:
        try:
            Path(path).write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise InputError(f"--json {path}: {error.strerror}") from error
