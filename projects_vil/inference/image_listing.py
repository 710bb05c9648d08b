"""The images that an input names, one after the other: files, folders, lists, tables and tar files, local or remote."""

import csv
import errno
import gzip
import hashlib
import io
import itertools
import logging
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

from backbones import ConfigError
from projects_vil.data import IMAGE_SUFFIXES
from projects_vil.inference.image_loading import VIDEO_SUFFIXES, ImageSource, open_file, without_password

TAR, TABLES = ".tar", (".csv", ".parquet")
LISTS = (".txt", *TABLES)
COLUMNS = ("path", "file_name", "url", "image", "image_url")  # of tables, in this order
_logger = logging.getLogger(__name__)


def find_images(
    source: str | Path, *, exclude: Path, column: str | None = None, shard: tuple[int, int] | None = None
) -> Iterator[ImageSource]:
    """Return the images of an input, one after the other; ids count from 1.

    Nothing is in memory but the names of one folder, some rows of a table, or one image of a tar file.

    Args:
        source: an image; a folder, for all images and tar files in it and its subfolders, by name, except for hidden
            ones; ``.txt`` with a path or URL a line; ``.csv`` or ``.parquet`` with a column of them; ``.tar`` or
            ``.tar.gz`` with images. Each but a folder may be a URL that fsspec knows, or a pattern,
            ``shards-{000..127}.tar``. Paths in a list or table are relative to its folder.
        exclude: a folder to skip.
        column: the column of a table; None for the first of ``COLUMNS`` that it has, and for other inputs.
        shard: (I, N) for part I, from 0, of N disjoint parts of the images, by a hash of their names; those in a tar
            file are of one part, by a hash of its name.

    Raises:
        ConfigError: for an input that is missing or has no images, and for other wrong arguments.
        OSError: for a list or table that cannot be read.
    """
    source = str(source)
    if is_video(source):
        raise ConfigError(f"source {source} is a video, a stream, or a URL without the suffix of images or a list")
    if shard is not None and not 0 <= shard[0] < shard[1]:
        raise ConfigError(f"shard {shard[0]}/{shard[1]}: the first number must be below the second, and count from 0")
    check_column(source, column)
    place = next(expand_braces(source), source)
    if "://" not in place and not os.path.exists(place):
        raise ConfigError(f"source {place}: there is no such file or folder")
    images = images_of(named_places(source, os.path.realpath(exclude), column), shard)
    first = next(images, None)
    if first is None and shard is None:
        raise ConfigError(f"source {source} has no images ({', '.join(IMAGE_SUFFIXES)}) and no {TAR} files with some")
    return itertools.chain([] if first is None else [first], images)


def check_column(source: str, column: str | None) -> None:
    """Raise a :class:`ConfigError` if there is a column for a source without columns."""
    if column is not None and (suffix_of(source) not in TABLES or os.path.isdir(source)):
        raise ConfigError(f"column is {column!r}, and {source} is no {' or '.join(TABLES)} file. Leave out --column.")


def is_video(source: str) -> bool:
    """Return whether a source has frames: a stream, or a file or URL with the suffix of videos."""
    return is_stream(source) or (suffix_of(source) in VIDEO_SUFFIXES and not os.path.isdir(source))


def is_stream(source: str | Path) -> bool:
    """Return whether a source is the number of a camera or a URL that is not one of images, and no file or folder."""
    is_url = "://" in str(source) and suffix_of(str(source)) not in (*IMAGE_SUFFIXES, TAR, *LISTS)
    return (str(source).isdecimal() or is_url) and not Path(source).exists()


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield the paths of a pattern such as ``shards-{000..127}.tar``, as a shell and webdataset do."""
    found = None if os.path.exists(pattern) else re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if found is None:
        yield pattern
        return
    for number in range(int(found[1]), int(found[2]) + 1):
        yield from expand_braces(f"{pattern[: found.start()]}{number:0{len(found[1])}}{pattern[found.end() :]}")


def images_of(named: Iterable[tuple[str, str]], shard: tuple[int, int] | None = None) -> Iterator[ImageSource]:
    """Yield the images at named places, those in a tar file one after the other, or those of a shard."""
    number = itertools.count(1)
    for name, place in named:
        name = _as_utf8(without_password(name))
        digest = int.from_bytes(hashlib.sha256(name.encode()).digest(), "big")
        if shard is not None and digest % shard[1] != shard[0]:
            continue
        images = [("", place if "://" in place else Path(place))] if suffix_of(place) != TAR else _members(place)
        for member, image in images:
            yield ImageSource(image, name + _as_utf8(member), next(number))


def _as_utf8(name: str) -> str:
    """Return the name of a file for results, which must be UTF-8, as not all names are."""
    return name.encode(errors="backslashreplace").decode()


def named_places(source: str, exclude: str, column: str | None) -> Iterator[tuple[str, str]]:
    """Yield names and places, paths or URLs, of images and tar files."""
    root = source if os.path.isdir(source) else os.path.dirname(source.partition("{")[0])
    for place in _walk(source, exclude) if os.path.isdir(source) else expand_braces(source):
        if suffix_of(place) not in LISTS:
            yield place[len(root) :].lstrip("/"), place
            continue
        for text in _listed(place, column):
            # Absolute paths and URLs stay.
            yield text, text if "://" in text else os.path.join(os.path.dirname(place), text)


def suffix_of(place: str) -> str:
    """Return the suffix of a path or URL, in lower case; ``.tar`` for ``.tar.gz`` too."""
    path = _path_of(place)
    return TAR if path.endswith((".tar.gz", ".tgz")) else os.path.splitext(path)[1]


def _path_of(place: str) -> str:
    """Return a path, or a URL without its query, in lower case."""
    return (place.partition("?")[0] if "://" in place else place).lower()


def _walk(folder: str, exclude: str) -> Iterator[str]:
    """Yield paths below a folder in the order of all of them sorted; only those of one folder are in memory."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name + "/" * entry.is_dir() for entry in entries if not entry.name.startswith("."))
    for name in names:
        path = os.path.join(folder, name)
        if suffix_of(name) in (*IMAGE_SUFFIXES, TAR):
            yield path
        elif name.endswith("/") and os.path.islink(path[:-1]):
            # It may lead back to a folder above.
            _logger.warning("%s is a link to a folder, and its images are left out. Give it as an input.", path)
        elif name.endswith("/") and os.path.realpath(path) != exclude:
            yield from _walk(path, exclude)


def _listed(place: str, column: str | None) -> Iterator[str]:
    """Yield the paths and URLs in a list or in the column of a table."""
    with open_file(place) as file:
        if suffix_of(place) == ".parquet":
            from pyarrow import parquet  # which not everybody has

            table = parquet.ParquetFile(file)
            names = table.schema_arrow.names
        else:
            lines = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
            if suffix_of(place) == ".txt":
                yield from filter(None, map(str.strip, lines))
                return
            table = csv.DictReader(lines)
            names = table.fieldnames or ()
        found = column or next((name for name in COLUMNS if name in names), None)
        if found not in names:
            raise ConfigError(
                f"{place} has no column {found or ' or '.join(COLUMNS)}: name one of {', '.join(names)} (--column)"
            )
        if suffix_of(place) == ".parquet":
            batches = table.iter_batches(1024, columns=[found])
            table = (row for batch in batches for row in batch.to_pylist())
        for row in table:
            yield str(row[found] or "")  # The row of an image without a name has an error.


class _Member(tarfile.TarInfo):
    """A member of a tar file, and the byte at which blocks of zeros before it begin, or None.

    tarfile would take a damaged or missing header for the end of the file.
    """

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> tarfile.TarInfo:
        zeros, tar.zeros = getattr(tar, "zeros", None), None
        try:
            member = super().fromtarfile(tar)
        except tarfile.EOFHeaderError:
            tar.zeros = tar.offset if zeros is None else zeros
            raise
        except tarfile.HeaderError as error:
            # The end of the file, behind the blocks of zeros that end an archive.
            if zeros is not None and isinstance(error, tarfile.EmptyHeaderError):
                raise
            raise tarfile.ReadError(f"{error} at byte {tar.offset}") from error
        member.zeros = zeros
        return member


def _members(place: str) -> Iterator[tuple[str, bytes | OSError]]:
    """Yield names and contents of the images in a tar file, or an error; where it breaks off, no name and the error."""
    name, is_compressed = without_password(place), not _path_of(place).endswith(TAR)
    num_images, member, has_zeros = 0, None, False
    try:
        with (
            open_file(place) as file,
            gzip.open(file) if is_compressed else nullcontext(file) as plain,
            # Up to the end of the file, where gzip compares the checksum. Archives may follow each other.
            tarfile.open(fileobj=plain, mode="r|", tarinfo=_Member, ignore_zeros=True) as tar,
        ):
            for member in tar:
                if member.zeros is not None and not has_zeros:
                    hint = "They are the end of an archive that another follows, or replace images that are lost."
                    _logger.warning("%s has blocks of zeros at byte %d. %s", name, member.zeros, hint)
                    has_zeros = True
                is_image = member.name.lower().endswith(IMAGE_SUFFIXES) and not member.isdir()
                if is_image and not os.path.basename(member.name).startswith("."):
                    num_images += 1
                    yield f"/{member.name}", tar.extractfile(member).read() if member.isfile() else _link_error(member)
                tar.members.clear()  # which otherwise grow with the file
            if member is None:
                raise tarfile.ReadError("it contains only zeros")
    except OSError as error:
        if is_compressed and num_images:
            hint = "Its images may be damaged too: replace the file, and predict into a new folder."
            error = OSError(error.errno, f"{error.strerror}. {hint}")
        yield "", error
    else:
        if not num_images:
            _logger.warning("%s has no images (%s)", name, ", ".join(IMAGE_SUFFIXES))


def _link_error(member: tarfile.TarInfo) -> OSError:
    hint = "Make the tar file with 'tar --dereference --hard-dereference'."
    return OSError(errno.EINVAL, f"it is a link to '{member.linkname}', not a file. {hint}")
