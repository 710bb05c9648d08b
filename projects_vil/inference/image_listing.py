"""List the images of an input: files, folders, lists, tables and tar files, local or remote."""

import csv
import errno
import gzip
import hashlib
import io
import itertools
import logging
import os
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import IO

from backbones import ConfigError
from projects_vil.data.image_files import IMAGE_SUFFIXES, UNSUPPORTED_SUFFIXES, read_size
from projects_vil.inference.image_loading import VIDEO_SUFFIXES, ImageSource, open_file, without_password

ARCHIVES = (".tar", ".tar.gz", ".tgz")
TABLES = (".csv", ".parquet")
LISTS = (".txt", *TABLES)
COLUMNS = ("path", "file_name", "url", "image", "image_url")  # the default columns of tables, in order of preference
FORMATS = f"Give images, such as .jpg or .png, or a list ({', '.join(LISTS)}) or tar files of images."
# Photos of other types, such as HEIC or camera raw, are in the results as skipped. Documents are other files.
LISTED = (*IMAGE_SUFFIXES, *UNSUPPORTED_SUFFIXES.difference(VIDEO_SUFFIXES, (".svg", ".dcm", ".pdf")))
MAX_MEMBER_SIZE = 2**30  # bytes of an image in a tar file
PART_BYTES = 2**24  # of a list or table that one Ray task reads
_logger = logging.getLogger(__name__)
Listed = Iterator[tuple[str, str]]  # names and paths


def find_images(
    source: str | Path | Sequence[str], *, exclude: str | Path, column: str | None = None
) -> Iterator[ImageSource]:
    """Return an iterator over the images of an input. Image ids count from 1.

    The input is streamed: only the names of one folder, some rows of a table, or one image of a tar file are in memory.

    Args:
        source: An image; a folder, for all its images and tar files, including subfolders, sorted by name, without
            hidden files; a ``.txt`` list with one path or URL per line; a ``.csv`` or ``.parquet`` table with a column
            of paths or URLs; or a ``.tar`` or ``.tar.gz`` file of images. Everything but a folder may also be an fsspec
            URL, or a pattern such as ``shards-{000..127}.tar``. Paths in a list or table are relative to its folder.
            Several images, folders and tar files are a sequence of paths. Their names are relative to the lowest folder
            that contains all of them.
        exclude: A folder to skip.
        column: The column of a table. By default the first of ``COLUMNS`` that the table has.

    Raises:
        ConfigError: If the input does not exist or has no images, or if another argument is invalid.
        OSError: If a list or table cannot be read.
    """
    images = load_listed(list_paths(source, exclude=exclude, column=column))
    # Checks the input now.
    first = list(itertools.islice(images, 1))
    if not first:
        raise ConfigError(f"Input '{without_password(str(source))}' has no images. {FORMATS}")
    return itertools.chain(first, images)


def number_of_images(source: str | Path | Sequence[str], *, exclude: str | Path) -> int:
    """Return the number of images in a folder or a sequence, or 0 if it is unknown (tar files and tables)."""
    paths = [str(source)] if isinstance(source, (str, Path)) else source
    # A pattern in braces is not expanded.
    files = (_walk(p, os.path.realpath(exclude)) if os.path.isdir(p) else [p] * ("{" not in p) for p in paths)
    counts = Counter(map(suffix_of, itertools.chain.from_iterable(files)))
    return 0 if any(counts[suffix] for suffix in ARCHIVES) else sum(counts[suffix] for suffix in LISTED)


def is_video(source: str) -> bool:
    """Return whether an input is a video file, the number of a camera, or the URL of a video or stream."""
    suffix = suffix_of(source)
    if os.path.exists(source):
        return suffix in VIDEO_SUFFIXES and not os.path.isdir(source)
    is_stream = "://" in source and suffix not in (*IMAGE_SUFFIXES, *ARCHIVES, *LISTS)
    return source.isdecimal() or is_stream or suffix in VIDEO_SUFFIXES


def suffix_of(path: str) -> str:
    """Return the suffix of a path or URL in lower case, without the query of a URL."""
    path = (path.partition("?")[0] if "://" in path else path).lower()
    return ".tar.gz" if path.endswith(".tar.gz") else os.path.splitext(path)[1]


def list_paths(source: str | Path | Sequence[str], *, exclude: str | Path, column: str | None = None) -> Listed:
    """Yield the names and paths of the images and tar files of an input; see :func:`find_images`.

    Raises:
        ConfigError: If the input does not exist, is a video, or has no images.
    """
    if not isinstance(source, (str, Path)):
        paths = [_without_scheme(os.fspath(path)) for path in source]
        for path in paths:
            if "://" not in path and not os.path.exists(path):
                raise ConfigError(f"Input '{path}' does not exist. Check the path.")
            if suffix_of(path) in LISTS or is_video(path):
                raise ConfigError(f"Several inputs must be images, folders or tar files. Give only '{path}'.")
            if os.path.isdir(path) and next(_supported_files(path, exclude), None) is None:
                raise ConfigError(f"Input '{path}' has no images. {FORMATS}")
        root = common_folder(paths)
        for path in paths:
            listed = list_paths(path, exclude=exclude) if os.path.isdir(path) else [(path, path)]
            yield from ((file if "://" in file else os.path.relpath(file, root), file) for _, file in listed)
        return
    source = _without_scheme(os.fspath(source))
    if is_video(source):
        raise ConfigError(f"Input '{source}' is a video or a stream. {FORMATS}")
    first = next(expand_braces(source), source)
    if "://" not in first and not os.path.exists(first):
        raise ConfigError(f"Input '{first}' does not exist. Check the path.")
    is_folder, is_empty = os.path.isdir(source), True
    if os.path.isfile(source) and suffix_of(source) not in (*IMAGE_SUFFIXES, *LISTS, *ARCHIVES):
        if suffix_of(source) == ".json":
            advice = f"Give the folder of its images, and for a COCO file also --annotations '{source}'."
            raise ConfigError(f"'{source}' is not an image. {advice}")
        read_size(source)  # the error is better before the model is loaded
    root = source if is_folder else os.path.dirname(source.partition("{")[0])
    for path in _supported_files(source, exclude) if is_folder else expand_braces(source):
        is_list = suffix_of(path) in LISTS
        for listed in _read_list(path, column) if is_list else [(path[len(root) :].lstrip("/"), path)]:
            is_empty = False
            yield listed
    if is_empty:
        raise ConfigError(f"Input '{source}' has no images. {FORMATS}")


def list_parts(source: str | Path | Sequence[str], *, exclude: str | Path, column: str | None = None) -> list[partial]:
    """Return functions that together list an input as :func:`list_paths` does.

    Text lists and Parquet tables are divided into parts of ``PART_BYTES``. Other inputs are one part.
    """
    if not isinstance(source, (str, Path)) or os.path.isdir(source) or suffix_of(str(source)) not in LISTS:
        return [partial(list_paths, source, exclude=exclude, column=column)]
    parts = []
    for path in expand_braces(_without_scheme(str(source))):
        path, size, step = path if "://" in path else os.path.abspath(path), 1, sys.maxsize
        # A line break in a CSV table may be quoted. Not all web servers can read from a position.
        if suffix_of(path) != ".csv" and not path.startswith(("http://", "https://")):
            with open_file(path) as file:
                size, step = file.seek(0, os.SEEK_END), PART_BYTES
        parts += [partial(_read_list, path, column, first, first + step) for first in range(0, size, step)]
    return parts


def _without_scheme(path: str) -> str:
    """Return a URL of a file on this machine as a path. fsspec would read devices and pipes without end."""
    return re.sub("^(file|local)://", "", path)


def common_folder(paths: Sequence[str]) -> str:
    """Return the lowest folder that contains all local paths; an empty text if there are only URLs."""
    local = [os.path.dirname(os.path.realpath(path)) for path in paths if "://" not in path]
    return os.path.commonpath(local) if local else ""


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield the paths of a pattern such as ``shards-{000..127}.tar``, like a shell or webdataset."""
    match = None if os.path.exists(pattern) else re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if match is None:
        yield pattern
        return
    for number in range(int(match[1]), int(match[2]) + 1):
        yield from expand_braces(f"{pattern[: match.start()]}{number:0{len(match[1])}}{pattern[match.end() :]}")


def split_listed(paths: Listed, archives: dict[str, str], shard: tuple[int, int] | None = None) -> Listed:
    """Yield the names and paths of images, or of one shard of them, and add all tar files to ``archives``.

    Args:
        paths: Names and paths from :func:`list_paths`.
        archives: Gets the path of each tar file by its name in results.
        shard: (i, n) selects shard i, counted from 0, of n. A hash of its name assigns an image to a shard.
    """
    for name, path in paths:
        shown = shown_name(name)
        if suffix_of(path) in ARCHIVES:
            archives[shown] = path
        elif shard is None or int.from_bytes(hashlib.sha256(shown.encode()).digest(), "big") % shard[1] == shard[0]:
            yield name, path


def archives_of_shard(sizes: Mapping[str, int], shard: tuple[int, int]) -> Iterator[str]:
    """Yield the names of the tar files in a shard. Each of them, largest first, is assigned to the smallest shard."""
    totals = [0] * shard[1]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        number = totals.index(min(totals))
        totals[number] += max(sizes[name], 1)  # not all servers send sizes
        if number == shard[0]:
            yield name


def load_listed(paths: Iterable[tuple[str, str]]) -> Iterator[ImageSource]:
    """Yield the images of listed names and paths; a tar file is streamed."""
    number = itertools.count(1)
    for name, path in paths:
        is_archive = suffix_of(path) in ARCHIVES
        for member, image in _read_tar(path) if is_archive else [("", path if "://" in path else Path(path))]:
            yield ImageSource(image, shown_name(name + member), next(number))


def shown_name(name: str) -> str:
    """Return a listed name as in the results: without passwords, and in UTF-8. File names may be any bytes."""
    return without_password(name).encode(errors="backslashreplace").decode()


def _supported_files(folder: str, exclude: str | Path) -> Iterator[str]:
    """Yield the images and archives below a folder in sorted order, and log the number of other files."""
    others: Counter[str] = Counter()
    for path in _walk(folder, os.path.realpath(exclude)):
        if path.endswith("/"):
            # A link may lead back to a parent folder.
            _logger.warning("Skipping '%s', which is a link to a folder. To read its images, use it as input.", path)
        elif suffix_of(path) in (*LISTED, *ARCHIVES):
            yield path
        else:
            others[suffix_of(path) or "no suffix"] += 1
    if others:
        types = ", ".join(f"{suffix} ({number:,})" for suffix, number in others.most_common())
        _logger.warning("Skipped files other than images in '%s': %s.", folder, types)


def _walk(folder: str, exclude: str) -> Iterator[str]:
    """Yield the files below a folder, and its links to folders (with ``/``), in sorted order.

    Only the names of one folder are in memory at a time.
    """
    with os.scandir(folder) as entries:
        visible = (entry for entry in entries if not entry.name.startswith("."))
        # entry.is_dir fails for a link to itself.
        names = sorted(one.name + "/" * (os.path.isdir(one) if one.is_symlink() else one.is_dir()) for one in visible)
    for name in names:
        path = os.path.join(folder, name)
        if not name.endswith("/") or os.path.islink(path[:-1]):
            yield path
        elif os.path.realpath(path) != exclude:
            yield from _walk(path, exclude)


def _read_list(path: str, column: str | None, first: int = 0, end: int = sys.maxsize) -> Listed:
    """Yield the names and paths of the images in a range of bytes of a list, or in a column of a table.

    A line belongs to the range with the byte before it, and a row group of a Parquet table to the range with its first
    page.
    """
    with open_file(path) as file:
        if suffix_of(path) == ".txt":
            names = _lines(file, first, end)
        elif suffix_of(path) == ".csv":
            rows = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=""))
            selected = _selected_column(path, column, rows.fieldnames or [])
            names = (row[selected] for row in rows)
        else:
            from pyarrow import parquet  # an optional dependency

            table = parquet.ParquetFile(file)
            selected = _selected_column(path, column, table.schema_arrow.names)
            offsets = [table.metadata.row_group(i).column(0).data_page_offset for i in range(table.num_row_groups)]
            groups = [number for number, offset in enumerate(offsets) if first <= offset < end]
            batches = table.iter_batches(1024, row_groups=groups, columns=[selected])
            names = itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
        for name in map(str, (name or "" for name in names)):  # an empty path becomes an error row in the results
            # os.path.join keeps absolute paths.
            yield name, _without_scheme(name if "://" in name else os.path.join(os.path.dirname(path), name))


def _selected_column(path: str, column: str | None, names: list[str]) -> str:
    selected = column or next((name for name in COLUMNS if name in names), None)
    if (number := names.count(selected)) == 1:
        return selected
    found = f"{number or 'no'} column{'s' * (number > 1)} {selected or ' or '.join(COLUMNS)}"
    advice = "Rename one" if number else f"Use --column with one of: {', '.join(names)}"
    raise ConfigError(f"Table '{path}' has {found}. {advice}.")


def _lines(file: IO[bytes], position: int, end: int) -> Iterator[str]:
    with io.BufferedReader(file, 2**20) as lines:
        if position:
            # The part before reads the line that begins here.
            lines.seek(position)
            position += len(lines.readline())
        while position <= end and (block := lines.read(min(2**20, end - position)) + lines.readline()):
            position += len(block)
            text = block.decode("utf-8-sig", "surrogateescape")
            yield from filter(None, map(str.strip, re.split("[\r\n]+", text)))


class _TarMember(tarfile.TarInfo):
    """A member of a tar file, with the offset of the zero blocks before it, or None.

    ``tarfile`` treats a damaged or missing header as the end of the file. This class raises an error instead.
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
            # The end of the file, after the zero blocks that end an archive.
            if zeros is not None and isinstance(error, tarfile.EmptyHeaderError):
                raise
            raise tarfile.ReadError(f"{error} at byte {tar.offset}") from error
        # tarfile would skip it in steps of 10 kB, also after the end of the file.
        if member.size > 64 * MAX_MEMBER_SIZE:
            raise tarfile.ReadError(f"'{member.name}' has {member.size:,} bytes")
        member.zeros = zeros
        return member


def _read_tar(path: str) -> Iterator[tuple[str, bytes | OSError]]:
    """Yield the name and content of each image in a tar file. A damaged file ends with an empty name and an error."""
    name, is_compressed = without_password(path), suffix_of(path) != ".tar"
    num_images, member, has_zeros = 0, None, False
    try:
        with (
            open_file(path) as file,
            gzip.open(file) if is_compressed else nullcontext(file) as plain,
            # Reads to the end, where gzip verifies the checksum. Concatenated archives are allowed.
            tarfile.open(fileobj=plain, mode="r|", tarinfo=_TarMember, ignore_zeros=True) as tar,
        ):
            for member in tar:
                if member.zeros is not None and not has_zeros:
                    hint = "The file is several archives in a row, or some of its images are lost."
                    _logger.warning("'%s' has zero blocks at byte %d. %s", name, member.zeros, hint)
                    has_zeros = True
                is_image = member.name.lower().endswith(LISTED) and not member.isdir()
                if is_image and not os.path.basename(member.name).startswith("."):
                    num_images += 1
                    hint = "Create the archive with 'tar --dereference --hard-dereference'."
                    image = OSError(errno.EINVAL, f"it is a link to '{member.linkname}'. {hint}")
                    if member.size > MAX_MEMBER_SIZE:
                        image = OSError(errno.EFBIG, f"it has {member.size:,} bytes, more than {MAX_MEMBER_SIZE:,}")
                    elif member.isfile():
                        image = tar.extractfile(member).read()
                    yield f"/{member.name}", image
                tar.members.clear()  # the list would grow with the file
            if member is None:
                raise tarfile.ReadError("it contains only zeros")
    except OSError as error:
        if is_compressed and num_images:
            hint = "Its images may be damaged too. Replace the file and predict again (with Ray: into a new output)."
            error = OSError(error.errno, f"{error.strerror}. {hint}")
        yield "", error
    else:
        if not num_images:
            _logger.warning("Archive '%s' has no images. Supported formats: %s.", name, ", ".join(IMAGE_SUFFIXES))
