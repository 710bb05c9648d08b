"""JSON files, records that need little memory, and folders of files. Importing this module does not import PyTorch."""

import contextlib
import gc
import hashlib
import itertools
import json
import mmap
import os
import pickle
import re
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from backbones import ConfigError
from backbones.errors import FULL_DISK, GENERATOR, check_file

# The long lists of JSON files of at least this number of bytes are stored as bytes, which need less memory, but more
# time for each access. The annotations of COCO's 118,287 training images have 470 MB.
LARGE_FILE = 1 << 29
# Long lists are parsed in parts of about this number of bytes. Smaller files are not divided.
_PART = 1 << 24
# Between two objects of a list, and at the end of a list of objects in the top-level object
_NEXT_ITEM, _LIST_END = re.compile(rb"\}[ \t\r\n]*,[ \t\r\n]*(?=\{)"), re.compile(rb'\}\s*\](?=\s*(,\s*"|\}\s*\Z))')
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Disable garbage collection inside the context.

    It would take half of the time when millions of objects are created.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_json(path: str | Path, *, what: str = "file", lists: Iterable[str] = ()) -> Any:
    """Return the content of a JSON file. NaN and infinity are accepted as numbers.

    Args:
        path: Path of the file.
        what: Description of the file for error messages.
        lists: Lists of the top-level object that may be long, such as a COCO file's annotations. If they can be
            divided, they are parsed in parts, and in a file of 512 MiB or more, they become :class:`SharedRecords`.

    Raises:
        ConfigError: If the file is missing, is not a regular file, cannot be read, or is not JSON. Also if an object
            has the same key twice (Python would drop one value), or if a string has an unpaired surrogate, which
            cannot be encoded.
    """
    check_file(path, what)
    try:
        with paused_garbage_collection():
            # Some lists cannot be divided, and some file systems do not map files.
            with contextlib.suppress(ValueError, OSError):
                if lists and os.path.getsize(path) >= _PART:
                    return _parse_lists(path, lists)
            return _parse(Path(path).read_bytes())
    except UnicodeEncodeError as error:
        near = error.object[max(error.start - 20, 0) : error.end].encode("ascii", "backslashreplace").decode()
        raise ConfigError(f"'{path}' has an unpaired surrogate: {near}. Replace it by a valid character.") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        advice = "Check the file and its permissions." if isinstance(error, OSError) else "Save it as UTF-8."
        raise ConfigError(f"Cannot read '{path}': {reason}. {advice}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"'{path}' is not valid JSON: {error}. Fix the file.") from error


def _parse(text: bytes) -> Any:
    """Parse JSON. Raise a ValueError under the conditions of :func:`read_json`.

    orjson is several times as fast as Python's parser. But it drops the first value of a duplicate key, rounds integers
    of more than 64 bits, and rejects NaN and other encodings than UTF-8.
    """
    num_keys = text.count(b'":') + len(re.findall(rb'"\s+:', text))
    with contextlib.suppress(orjson.JSONDecodeError):
        content = orjson.loads(text)
        if _num_keys(content) == num_keys and b"0" * 19 not in text.translate(_DIGITS_TO_ZERO):
            return content
    decoded = text.decode(json.detect_encoding(text))
    content = json.loads(decoded, object_pairs_hook=_without_repetition)
    if re.search(r"\\u[dD][89a-fA-F]", decoded):
        # File names that are not UTF-8 are accepted.
        json.dumps(content, ensure_ascii=False).encode(errors="surrogateescape")
    return content


def _num_keys(value: Any) -> int:
    if type(value) is dict:
        return len(value) + sum(map(_num_keys, value.values()))
    # A list of numbers may be very long.
    return sum(map(_num_keys, value)) if type(value) is list and value and type(value[0]) is dict else 0


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the duplicate key {key!r}")
    return content


def _parse_lists(path: str | Path, names: Iterable[str]) -> dict[str, Any]:
    """Parse a JSON object with long lists of objects. Raise a ValueError if the lists cannot be parsed in parts."""
    marker = "a list without its objects"
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        rest, end, spans = [], 0, {}
        for name in names:
            # Each pattern must match once.
            (start,) = (match.end() for match in re.finditer(rb'"%b"\s*:\s*\[\s*(?=\{)' % name.encode(), text))
            (stop,) = (match.start() + 1 for match in itertools.islice(_LIST_END.finditer(text, start), 1))
            spans[name] = start, stop
        for start, stop in sorted(spans.values()):
            rest.append(text[end:start] + json.dumps(marker).encode())
            end = stop
        content, kind = _parse(b"".join([*rest, text[end:]])), SharedRecords if len(text) >= LARGE_FILE else list
        for name, span in spans.items():
            if not isinstance(content, dict) or content.get(name) != [marker]:
                raise ValueError(f"{name} is not a list of the top-level object")
            content[name] = kind(_parts(text, *span))
    return content


def _parts(text: mmap.mmap, start: int, stop: int) -> Iterator[Any]:
    """Yield the objects of a list. Raise a ValueError if an object has a list of objects."""
    while start < stop:
        cut = _NEXT_ITEM.search(text, min(start + _PART, stop), stop)
        yield from _parse(b"[%b]" % text[start : cut.start() + 1 if cut else stop])
        start = cut.end() if cut else stop
        if hasattr(text, "madvise"):
            # Otherwise, the pages of the file count as memory of this process.
            text.madvise(mmap.MADV_DONTNEED)


def like(entries: Sequence[Any], items: Iterable[Any]) -> Sequence[Any]:
    """Return items as :class:`SharedRecords` if ``entries`` are, and otherwise as a list."""
    return SharedRecords(items) if isinstance(entries, SharedRecords) else [*items]


def content_hash(path: str | Path) -> str:
    """Return the SHA-256 of a file, or the path of a broken link."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if os.path.isfile(path) else str(path)


class SharedRecords(Sequence[Any]):
    """Records as bytes in two arrays. Each access restores a record. Processes share the arrays as tensors.

    In contrast to detectron2's ``DatasetFromList``, records are created and serialized one at a time, and the keys of
    dicts are stored once. A box of a COCO file needs about 100 bytes instead of 600. Slices are not supported.
    """

    def __init__(self, records: Iterable[Any]) -> None:
        content, ends = bytearray(), array("q", [0])
        numbers: dict[tuple[str, ...] | None, int] = {}
        for record in records:
            keys, values = (tuple(record), [*record.values()]) if isinstance(record, dict) else (None, record)
            content += pickle.dumps((numbers.setdefault(keys, len(numbers)), values), -1)
            ends.append(len(content))
        self.content, self.ends = np.frombuffer(content, np.uint8), np.frombuffer(ends, np.int64)
        self.keys, self.length = list(numbers), len(ends) - 1

    def __getstate__(self) -> dict[str, Any]:
        # The dataset check does not send records, and must not import PyTorch.
        import torch

        # To send tensors to another process, PyTorch moves them to shared memory once.
        self.content, self.ends = torch.as_tensor(self.content), torch.as_tensor(self.ends)
        return self.__dict__

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        index = range(self.length)[index]
        content, ends = memoryview(np.asarray(self.content)), memoryview(np.asarray(self.ends))
        number, values = pickle.loads(content[ends[index] : ends[index + 1]])
        return values if self.keys[number] is None else dict(zip(self.keys[number], values, strict=True))


# -- folders ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Create a temporary folder in ``folder`` and delete it at the end.

    Write files to the temporary folder, and move them to ``folder`` when they are complete. A failure then leaves
    older files unchanged. If ``folder`` is new and stays empty, it is deleted too.

    Yields:
        The path of the temporary folder.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as unfinished:
            yield Path(unfinished)
    except OSError as error:
        # Most writes to a full disk fail without the name of the file.
        if error.errno in FULL_DISK and not error.filename:
            error.filename = str(folder)
        raise
    finally:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


def walk(root: str | Path) -> Iterator[str]:
    """Yield all files in a folder in sorted order, except hidden files and files of training runs.

    Links are followed, and each folder is visited once.
    """
    seen = set()
    for parent, folders, names in os.walk(root, followlinks=True):
        folder = os.path.realpath(parent)
        is_read = folder not in seen and not _is_run(parent, names)
        seen.add(folder)
        folders[:] = sorted(name for name in folders if is_read and not name.startswith((".", "__MACOSX")))
        yield from (os.path.join(parent, name) for name in sorted(names) if is_read and not name.startswith("."))


def _is_run(folder: str, names: list[str]) -> bool:
    train = Path(folder, "data", "train.json")
    is_converted = "log.txt" in names and train.is_file() and GENERATOR.encode() in train.read_bytes()[:200]
    return is_converted or {"log.txt", "config.yaml"} <= {*names}
