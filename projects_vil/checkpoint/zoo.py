"""The model zoo: official weights by name, downloaded once. The table is zoo.yaml, or the file in ``VIL_ZOO``."""

import dataclasses
import http.client
import importlib.util
import logging
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import yaml
from filelock import FileLock
from iopath.common.download import download
from iopath.common.file_io import get_cache_dir

from backbones import ConfigError
from backbones.checkpoint_files import read_checkpoint
from backbones.errors import check_file, closest, one_line, pip_install
from projects_vil.files import atomic_folder

TIMEOUT = 60.0  # seconds without an answer
# PyYAML may have no C library. Its Python loader needs 0.2 s for the table.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FIGURES = ("box_ap", "mask_ap", "top1", "miou")
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ZooEntry:
    """An official file.

    Attributes:
        variant: Variant of the backbone.
        url: Address of the file.
        config: Config of a detector, for :func:`projects_vil.config.config_path`; None for other weights.
        img_size: Image side in pixels of a classifier; None for the variant's own.
        chunk_size: Chunk size of each stage of a classifier; None if the variant or the file determines it.
        params: Millions of parameters of the whole official model.
        figures: Published results, by the names of the table's columns.
        group: ``title``, ``source``, ``license``, ``trained_on`` and optionally ``note``, ``unreachable`` and
            ``package`` of the table with the file.
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
    """Return the entries of the table by name.

    Raises:
        ConfigError: If the table in ``VIL_ZOO`` is missing or invalid.
    """
    path = os.environ.get("VIL_ZOO") or Path(__file__).with_name("zoo.yaml")
    check_file(path, "table of weights", key="VIL_ZOO")
    zoo = {}
    try:
        for group in yaml.load(Path(path).read_text(encoding="utf-8"), _LOADER):
            for name, values in group["files"].items():
                row = dict(zip(group["columns"], values, strict=True))
                figures = {key: row[key] for key in _FIGURES if row.get(key) is not None}
                url = group["url"].format(row["file"])
                known = {key: row.get(key) for key in ("config", "img_size", "chunk_size")}
                zoo[name] = ZooEntry(row["variant"], url, params=row["params"], figures=figures, group=group, **known)
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"The table of weights '{path}' (VIL_ZOO) is not valid: {one_line(error)}. Fix the file."
        raise ConfigError(message) from error
    return zoo


def is_zoo_name(weights: str | os.PathLike) -> bool:
    """Return whether weights are named as in the model zoo: one word, and no file or folder has this name."""
    return re.fullmatch(r"\w+", os.fspath(weights)) is not None and not os.path.exists(weights)


def zoo_entry(name: str) -> ZooEntry:
    """Return the entry of a name. An unknown name raises a :class:`ConfigError` with the closest name."""
    zoo = read_zoo()
    if name not in zoo:
        hint = closest(name, zoo) or ". Check the path."
        raise ConfigError(f"'{name}' is not a file, a folder, or a name in the model zoo{hint}")
    return zoo[name]


def find_weights(weights: str) -> str:
    """Return the path of ``MODEL.WEIGHTS``. For a name of the model zoo it is the downloaded file.

    Raises:
        ConfigError: For an unknown name, and if the file cannot be downloaded or is not a checkpoint. Also if the
            package with the file is not installed.
    """
    if not is_zoo_name(weights):
        return weights
    entry = zoo_entry(weights)
    if "package" in entry.group:
        module, _, file = entry.group["package"].partition("/")
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.origin:
            raise ConfigError(f"The weights '{weights}' are in a package. {pip_install(Path(entry.url).name)}")
        return str(Path(spec.origin).parent / file)
    path = Path(get_cache_dir()) / "vil_detectron2" / f"{weights}.pth"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if path.exists():
            return str(path)
        if "unreachable" in entry.group:
            text = f"The host of '{weights}' has been down since 2024 ({entry.group['unreachable']})."
            raise ConfigError(f"{text} If you have the file, save it as '{path}'. Otherwise choose other weights.")
        try:
            _download(entry.url, path)
        except (OSError, http.client.HTTPException, ConfigError) as error:
            reason = one_line(error) or type(error).__name__
            text = f"Cannot download '{weights}' from {entry.url}: {reason}"
            raise ConfigError(f"{text}. Save the file as '{path}'.") from error
    return str(path)


def _download(url: str, path: Path) -> None:
    """Download a checkpoint, check that it can be read, and move it to ``path``."""
    _logger.info("downloading %s to %s", url, path)
    before = socket.getdefaulttimeout()
    with atomic_folder(path.parent) as unfinished:
        try:
            # iopath has no argument for a timeout.
            socket.setdefaulttimeout(TIMEOUT)
            file = Path(download(url, str(unfinished), filename=path.name))
        finally:
            socket.setdefaulttimeout(before)
        read_checkpoint(file)
        os.replace(file, path)
