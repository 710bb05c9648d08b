"""What is done to files."""

import os
import signal
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from tests.faults.fault import AtWork, Spoil


def _at(name: str, change: Callable[[Path], object]) -> Spoil:
    return lambda folder: change(folder / name)


def all_of(*spoils: Spoil) -> Spoil:
    return lambda folder: [spoil(folder) for spoil in spoils]


def emptied(name: str) -> Spoil:
    return _at(name, lambda path: path.write_bytes(b""))


def removed(name: str) -> Spoil:
    return _at(name, Path.unlink)


def written(name: str, text: str) -> Spoil:
    return _at(name, lambda path: [path.parent.mkdir(parents=True, exist_ok=True), path.write_text(text)])


def cut_off(name: str) -> Spoil:
    return _at(name, lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]))


def made_a_folder(name: str) -> Spoil:
    return _at(name, lambda path: [path.unlink(missing_ok=True), path.mkdir(parents=True)])


def made_a_pipe(name: str) -> Spoil:
    return _at(name, lambda path: [path.unlink(missing_ok=True), os.mkfifo(path)])


def flipped(name: str) -> Spoil:
    """One bit of a stored tensor, the first."""

    def flip(path: Path) -> None:
        with zipfile.ZipFile(path) as file:
            entry = next(entry for entry in file.infolist() if entry.filename.endswith("/data/0"))
        content = bytearray(path.read_bytes())
        # The header ends with the name and what pads it, whose lengths it has at 26 and 28.
        name_length, padding = struct.unpack_from("<HH", content, entry.header_offset + 26)
        content[entry.header_offset + 30 + name_length + padding] ^= 1
        path.write_bytes(content)

    return _at(name, flip)


def stored(name: str, change: Callable[[dict], object]) -> Spoil:
    """A checkpoint, written anew with other contents."""

    def rewrite(path: Path) -> None:
        contents = torch.load(path, weights_only=True)
        change(contents)
        torch.save(contents, path)

    return _at(name, rewrite)


def every(pattern: str, spoil: Callable[[str], Spoil]) -> Spoil:
    """All files of a pattern."""
    return lambda folder: [spoil(str(path.relative_to(folder)))(folder) for path in sorted(folder.glob(pattern))]


def signalled(number: signal.Signals, *, when: Callable[[AtWork], object]) -> Callable[[AtWork], None]:
    """A signal to the tool, once something has happened."""

    def send(tool: AtWork) -> None:
        tool.wait_for(lambda: when(tool))
        os.kill(tool.pid, number)

    return send


def has_saved(tool: AtWork) -> bool:
    return (tool.folder / "output/last_checkpoint").exists()
