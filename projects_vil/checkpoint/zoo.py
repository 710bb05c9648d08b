"""The model zoo: official weights by name, downloaded once. The table is zoo.yaml, or a file that ``VIL_ZOO`` names."""

import dataclasses
import hashlib
import http.client
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml
from filelock import FileLock
from iopath.common.download import download
from iopath.common.file_io import get_cache_dir

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write, read_checkpoint
from backbones.errors import check_file, closest
from projects_vil.config import config_path, one_line
from projects_vil.utils import atomic_folder

TIMEOUT = 60.0  # seconds without an answer
_FIGURES = {"box_ap": "box AP", "mask_ap": "mask AP", "top1": "top-1", "miou": "mIoU"}
_SIZES = {"img_size": "image size", "chunk_size": "chunk sizes"}
_COLUMNS = {"variant": "variant", "config": "config", **_SIZES, "params": "params", **_FIGURES}
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ZooEntry:
    """An official file.

    Attributes:
        variant: the backbone's.
        url: where the file is.
        config: that of a whole detector, for :func:`projects_vil.config.config_path`; None for other weights.
        img_size: image side in pixels of a classifier; None for the variant's own.
        chunk_size: chunk size of each stage of a classifier; None for sizes that are the variant's or in the file.
        params: millions of parameters of the whole official model.
        figures: published ones, by the names of the table's columns.
        group: ``title``, ``source``, ``license``, ``trained_on`` and perhaps ``note`` of the table that the file is in.
    """

    variant: str
    url: str
    config: str | None
    img_size: int | None
    chunk_size: list[int] | None
    params: float
    figures: Mapping[str, float]
    group: Mapping[str, str]


def read_zoo() -> dict[str, ZooEntry]:
    """Return the table: name -> entry.

    Raises:
        ConfigError: for a table of ``VIL_ZOO`` that is missing or of another form.
    """
    path = os.environ.get("VIL_ZOO") or Path(__file__).with_name("zoo.yaml")
    check_file(path, "table of weights", key="VIL_ZOO")
    zoo = {}
    try:
        for group in yaml.safe_load(Path(path).read_text(encoding="utf-8")):
            for name, values in group["files"].items():
                row = dict(zip(group["columns"], values, strict=True))
                figures = {key: row[key] for key in _FIGURES if row.get(key) is not None}
                url = group["url"].format(row["file"])
                known = {key: row.get(key) for key in ("config", *_SIZES)}
                zoo[name] = ZooEntry(row["variant"], url, params=row["params"], figures=figures, group=group, **known)
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not in the form of the project's zoo.yaml: {one_line(error)}") from error
    return zoo


def is_zoo_name(weights: str | os.PathLike) -> bool:
    """Return whether weights are named as in the zoo: a word that no file or folder has as its name."""
    return re.fullmatch(r"\w+", os.fspath(weights)) is not None and not os.path.exists(weights)


def zoo_entry(name: str) -> ZooEntry:
    """Return the entry of a name; an unknown one is a :class:`ConfigError` that names the closest."""
    zoo = read_zoo()
    if name not in zoo:
        raise ConfigError(f"there is no file or folder {name}, nor a name of the model zoo{closest(name, zoo)}")
    return zoo[name]


def zoo_config(name: str) -> Path:
    """Return the config of an official detector; a name of other weights is a :class:`ConfigError`."""
    entry = zoo_entry(name)
    if entry.config is None:
        what = f"weights of {entry.variant} ({entry.group['title']}), not a detector"
        raise ConfigError(f"{name} has {what}: training may start from it (MODEL.WEIGHTS)")
    return config_path(entry.config)


def find_weights(weights: str) -> str:
    """Return the path that ``MODEL.WEIGHTS`` stands for: itself, or for a name of the zoo that of its file.

    Raises:
        ConfigError: for an unknown name, a file that cannot be downloaded, is no checkpoint, or is not the same as when
            it was downloaded.
    """
    if not is_zoo_name(weights):
        return weights
    url = zoo_entry(weights).url
    path = Path(get_cache_dir()) / "vil_detectron2" / f"{weights}.pth"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                _download(url, path)
            elif not _digest_file(path).exists():
                # Somebody copied the file there, or a process was killed after the download.
                _check_loads(path)
            _check_digest(path)
    except (OSError, http.client.HTTPException) as error:
        reason = one_line(error) or type(error).__name__
        raise ConfigError(f"{weights} cannot be downloaded from {url}: {reason}; or put the file at {path}") from error
    return str(path)


def _download(url: str, path: Path) -> None:
    _logger.info("downloading %s to %s", url, path)
    with atomic_folder(path.parent) as unfinished, _timeout():
        file = Path(download(url, str(unfinished), filename=path.name))
        try:
            read_checkpoint(file)
        except ConfigError as error:
            with file.open("rb") as opened:
                beginning = opened.read(60)
            reason = str(error).replace(str(file), "the file that it sends")
            raise OSError(f"{reason}, and begins with {beginning!r}") from error
        os.replace(file, path)


@contextmanager
def _timeout() -> Iterator[None]:
    """Limit the time without an answer, for which iopath has no argument."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _check_loads(path: Path) -> None:
    try:
        read_checkpoint(path)
    except ConfigError as error:
        raise ConfigError(f"{error}. Delete {path} to download it again.") from error


def _check_digest(path: Path) -> None:
    """Compare a file's SHA-256 with the one noted at its first use, or note it; only for files that can be loaded."""
    digest, noted = hashlib.sha256(path.read_bytes()).hexdigest(), _digest_file(path)
    if not noted.exists():
        with atomic_write(noted) as partial:
            partial.write_text(f"{digest}  {path.name}\n")
    elif noted.read_text().split()[:1] != [digest]:
        raise ConfigError(
            f"{path} is damaged or another file: its SHA-256 is not the one in {noted}. "
            "Delete both files to download it again."
        )


def zoo_tables() -> str:
    """Return the tables of docs/model_zoo.md."""
    zoo, lines = read_zoo(), []
    for title in dict.fromkeys(entry.group["title"] for entry in zoo.values()):
        entries = {name: entry for name, entry in zoo.items() if entry.group["title"] == title}
        group = next(iter(entries.values())).group
        columns = {key: label for key, label in _COLUMNS.items() if key in group["columns"]}
        lines += [f"## {title}\n", f"{group['trained_on']}. [Source]({group['source']}), {group['license']}."]
        if "note" in group:
            lines.append(f"Note: {group['note']}.")
        lines += ["", f"| name | {' | '.join(columns.values())} |", f"|{'---|' * (len(columns) + 1)}"]
        for name, entry in entries.items():
            config = f"[{entry.config}](../configs/{entry.config}.yaml)"
            values = {"variant": f"`{entry.variant}`", "config": config, "params": entry.params, **entry.figures}
            values |= {
                "img_size": entry.img_size,
                "chunk_size": ", ".join(map(str, entry.chunk_size or ["in the file"])),
            }
            cells = [f"[`{name}`]({entry.url})", *(str(values.get(key, "")) for key in columns)]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)
