"""A fault, the folder that it is injected into, and what becomes of a tool that meets it."""

import dataclasses
import hashlib
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tests.projects_vil.helpers import PATIENCE, start_tool

# What the folder of every fault has; what is larger, those only that name it.
ALWAYS = ("configs", "datasets", "own", "photos", "small.yaml", "mask.yaml")
ERROR = "^error: "
# A run of seconds, and where it writes.
TRAIN = "train_net.py --config-file small.yaml"
OUTPUT = ("output/*", "output")
# What is done to the folder of a fault.
Spoil = Callable[[Path], object]


@dataclass(frozen=True)
class Fault:
    """What is wrong, and how a tool meets it.

    Attributes:
        name: what is wrong, in words.
        command: the tool and its arguments, as they are typed in the folder of the fault.
        spoil: what is done to the folder first.
        status: the exit status.
        line: a regular expression for the line that says it, which no other line matches.
        parts: what else the folder has: ``run``, ``export``.
        makes: patterns of the files that may be new or changed after it.
        meanwhile: what is done while the tool is at work.
        environment: variables that the tool has.
        file_size: how many bytes the files may have that the tool writes, which stands for a full disk.
    """

    name: str
    command: str
    spoil: Spoil | None = None
    status: int = 1
    line: str = ERROR
    parts: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    meanwhile: "Callable[[AtWork], object] | None" = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    file_size: int | None = None

    @property
    def begins(self) -> bool:
        """Whether a run comes to its first iteration."""
        return "output/*" in self.makes


@dataclass(frozen=True)
class Outcome:
    """What became of a tool.

    Attributes:
        line: what says what is wrong; all lines that match, where it is not one.
        is_last: whether it is the last.
        status: the exit status.
        output: all that it wrote.
        lost: files that are gone or changed and should not be.
        left: files that are new and should not be.
    """

    line: str
    is_last: bool
    status: int
    output: str
    lost: tuple[str, ...]
    left: tuple[str, ...]

    def complaints(self, fault: Fault) -> str:
        """What is not as it has to be, or nothing."""
        lines = self.line.splitlines()
        found = {
            f"its exit status is {self.status}, not {fault.status}": self.status != fault.status,
            f"{len(lines)} lines match {fault.line}": len(lines) != 1,
            "there is a traceback": "Traceback" in self.output,
            f"lost or changed: {', '.join(self.lost)}": bool(self.lost),
            f"left behind: {', '.join(self.left)}": bool(self.left),
            "the error is not the last line": fault.line == ERROR and not self.is_last,
        }
        return "; ".join(text for text, is_so in found.items() if is_so)


class AtWork:
    """A tool that runs in the folder of a fault."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.folder = folder
        self._said = folder.with_name(folder.name + "_said")
        self._said.mkdir()
        tool, *arguments = shlex.split(fault.command)
        self._process = start_tool(
            tool,
            *arguments,
            folder=self._said,
            datasets_root=folder / "datasets",
            root=folder,
            environment=fault.environment,
            file_size=fault.file_size,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    @property
    def output(self) -> str:
        # It exists once the process has begun.
        paths = [self._said / name for name in ("stdout", "stderr")]
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    def wait_for(self, happened: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened():
            if self.status is not None or time.monotonic() > deadline:
                raise AssertionError(f"it ended before that, or never came to it:\n{self.output}")
            time.sleep(0.01)

    def end(self) -> int:
        """The exit status; what takes too long is killed."""
        deadline = time.monotonic() + PATIENCE
        while self.status is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"it hangs:\n{self.output}")
        return self.status


def happen(fault: Fault, world: Path, folder: Path) -> Outcome:
    """Inject a fault into what ``folder``, which must not exist, gets of ``world``, and run its tool there."""
    folder.mkdir()
    for name in (*ALWAYS, *fault.parts):
        source = world / name
        if source.is_symlink():
            (folder / name).symlink_to(os.readlink(source))
        elif source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copy(source, folder / name)
    if fault.spoil is not None:
        fault.spoil(folder)
    before = _contents(folder)
    tool = AtWork(fault, folder)
    if fault.meanwhile is not None:
        fault.meanwhile(tool)
    status = tool.end()
    after = _contents(folder)
    lines = [_plain(line).replace(f"{folder}/", "") for line in tool.output.splitlines()]
    # What depends on the machine, and on when a signal came.
    lines = [re.sub(r"(there are|saved after iteration) \d+", r"\1 N", line) for line in lines]
    told = [line for line in lines if re.search(fault.line, line)]
    return Outcome(
        line="\n".join(told),
        is_last=told == lines[-1:],
        status=status,
        output=tool.output,
        lost=tuple(sorted(name for name in before if after.get(name) != before[name] and not _may(fault, name))),
        left=tuple(sorted(name for name in after if name not in before and not _may(fault, name))),
    )


def _may(fault: Fault, name: str) -> bool:
    """What is unfinished, and a lock, may never stay."""
    if re.search(r"(^|/)\.", name):
        return False
    return any(fnmatch(name, pattern) for pattern in fault.makes)


def _contents(folder: Path) -> dict[str, str]:
    """A digest of every file below a folder, but those that a link leads to, by its name."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            if path.is_symlink() or not path.is_file():
                found[str(path.relative_to(folder))] = "folder" if path.is_dir() else "link or pipe"
            else:
                found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _plain(line: str) -> str:
    """Without colours and without what a logger puts before a line: time and place."""
    return re.sub(r"^(WARNING |ERROR )?\[[^]]*\]:? ?", "", re.sub(r"\x1b\[[0-9;]*m", "", line)).strip()
