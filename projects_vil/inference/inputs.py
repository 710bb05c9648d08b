"""The images that an input names, one after the other: files, folders, lists, tables and tar files, local or remote."""

import csv
import hashlib
import io
import itertools
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from backbones import ConfigError
from backbones.errors import closest
from projects_vil.data import IMAGE_SUFFIXES
from projects_vil.inference.sources import ImageSource, open_file, without_password

LIST, TAR, TABLES = ".txt", ".tar", (".csv", ".parquet")
COLUMNS = ("path", "file_name", "url", "image", "image_url")  # of tables, in this order
TABLE_ROWS = 1024  # rows of a table that are read at once


def find_images(
    source: str | Path, *, exclude: Path, column: str | None = None, shard: tuple[int, int] | None = None
) -> Iterator[ImageSource]:
    """Return the images of an input, one after the other; ids count from 1.

    Nothing is in memory but the names of one folder, some rows of a table, or one image of a tar file.

    Args:
        source: an image; a folder, for all images and tar files in it and its subfolders, by name, except for hidden
            ones; ``.txt`` with a path or URL a line; ``.csv`` or ``.parquet`` with a column of them; ``.tar`` with
            images. Each but a folder may be a URL that fsspec knows, or a pattern, ``shards-{000..127}.tar`` or
            ``{a,b}.csv``. Paths in a list or table are relative to its folder.
        exclude: a folder to skip.
        column: the column of a table; None for the first of ``COLUMNS`` that it has.
        shard: (i, N) for one of N disjoint parts of the images, by a hash of their names, or for those in a tar file
            of its name.

    Raises:
        ConfigError: for an input that is missing, damaged or has no images.
    """
    source = str(source)
    place = next(expand_braces(source), source)
    if "://" not in place and not os.path.exists(place):
        raise ConfigError(f"source {place}: there is no such file or folder")
    images = _images(_named(source, exclude.resolve(), column), shard)
    first = next(images, None)
    if first is None and shard is None:
        raise ConfigError(f"source {source} has no images ({', '.join(IMAGE_SUFFIXES)}) and no {TAR} files with some")
    return itertools.chain([] if first is None else [first], images)


def is_stream(source: str | Path) -> bool:
    """Return whether a source is the number of a camera or a URL that is not one of images, and no file or folder."""
    names_images = _suffix(str(source)) in (*IMAGE_SUFFIXES, LIST, TAR, *TABLES)
    is_url = "://" in str(source) and not names_images
    return (str(source).isdecimal() or is_url) and not Path(source).exists()


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield the paths of a pattern such as ``shards-{000..127}.tar`` or ``{a,b}.csv``, as a shell or webdataset."""
    found = None if os.path.exists(pattern) else re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        yield pattern
        return
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    choices: Iterable[str] = found[1].split(",")
    if numbers:
        width = len(numbers[1]) if numbers[1].startswith("0") else 0
        choices = (f"{number:0{width}}" for number in range(int(numbers[1]), int(numbers[2]) + 1))
    for choice in choices:
        yield from expand_braces(pattern[: found.start()] + choice + pattern[found.end() :])


def _images(named: Iterable[tuple[str, str]], shard: tuple[int, int] | None) -> Iterator[ImageSource]:
    number = itertools.count(1)
    for name, place in named:
        if shard is not None and _hash(name) % shard[1] != shard[0]:
            continue
        if _suffix(place) == TAR:
            for member, content in _members(place):
                yield ImageSource(content, f"{name}/{member}" if member else name, next(number))
        else:
            yield ImageSource(place if "://" in place else Path(place), name, next(number))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big")


def _named(source: str, exclude: Path, column: str | None) -> Iterator[tuple[str, str]]:
    """Yield names and places, paths or URLs, of images and tar files."""
    if column is not None and _suffix(source) not in TABLES:
        raise ConfigError(f"column {column}: {source} is no table ({' or '.join(TABLES)})")
    if os.path.isdir(source):
        for name in _walk(Path(source), exclude):
            yield name, os.path.join(source, name)
        return
    root = os.path.dirname(source if os.path.exists(source) else source.partition("{")[0])
    for place in expand_braces(source):
        if _suffix(place) == LIST:
            listed = _lines(place)
        elif _suffix(place) in TABLES:
            listed = _column(place, column)
        else:
            yield without_password(place[len(root) :].lstrip("/")), place
            continue
        for text in listed:
            # Absolute paths and URLs stay.
            yield without_password(text), text if "://" in text else os.path.join(os.path.dirname(place), text)


def _suffix(place: str) -> str:
    return os.path.splitext(place.partition("?")[0] if "://" in place else place)[1].lower()


def _walk(folder: Path, exclude: Path) -> Iterator[str]:
    """Yield paths below a folder in the order of all of them sorted; only those of one folder are in memory."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name + "/" * entry.is_dir() for entry in entries if not entry.name.startswith("."))
    for name in names:
        path = folder / name
        if not name.endswith("/"):
            if name.lower().endswith((*IMAGE_SUFFIXES, TAR)):
                yield name
        elif not path.is_symlink() and path.resolve() != exclude:
            for below in _walk(path, exclude):
                yield name + below


def _lines(place: str) -> Iterator[str]:
    with open_file(place) as file:
        for line in io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape"):
            if line.strip():
                yield line.strip()


def _column(place: str, column: str | None) -> Iterator[str]:
    with open_file(place) as file:
        if _suffix(place) == ".csv":
            reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=""))
            names, rows = list(reader.fieldnames or ()), reader
        else:
            try:
                from pyarrow import parquet
            except ImportError as missing:
                raise ConfigError(f"{place} needs pyarrow: pip install 'vil-detectron2[scale]'") from missing
            table = parquet.ParquetFile(file)
            names = table.schema_arrow.names
        found = column or next((name for name in COLUMNS if name in names), None)
        if found not in names:
            hint = f"it has {', '.join(names)}{closest(found or '', names)}"
            raise ConfigError(f"column: {place} has no column {found or ' or '.join(COLUMNS)}; {hint}")
        if _suffix(place) != ".csv":
            batches = table.iter_batches(TABLE_ROWS, columns=[found])
            rows = (row for batch in batches for row in batch.to_pylist())
        for row in rows:
            value = row[found]
            if not isinstance(value, str | None):
                raise ConfigError(f"column {found} of {place} has {value!r:.80}, not a path or URL")
            yield value or ""  # whose row will have an error


def _members(place: str) -> Iterator[tuple[str, bytes | OSError]]:
    """Yield names and contents of the images in a tar file; where it breaks off, no name and the error."""
    try:
        with open_file(place) as file, tarfile.open(fileobj=file, mode="r|*") as tar:
            for member in tar:
                hidden = os.path.basename(member.name).startswith(".")
                if member.isfile() and member.name.lower().endswith(IMAGE_SUFFIXES) and not hidden:
                    yield member.name, tar.extractfile(member).read()
                tar.members.clear()  # which otherwise grow with the file
    except OSError as error:
        yield "", error
