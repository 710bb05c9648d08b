"""Checkpoint files: reading runs no code that a file holds, and writing is atomic."""

import contextlib
import hashlib
import json
import os
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from backbones.errors import ConfigError, check_file, find_os_error

# The keys of a state dict in a checkpoint of detectron2, LIT and timm; vision-longformer; mmdetection and timm.
STATE_DICT_KEYS = ("model", "net", "state_dict")
SUFFIXES = (".pth", ".safetensors")
# Keys in the header of a safetensors file: the other contents as JSON, the digest, and, in the JSON, the versions of
# modules whose state dict is not of version 1.
_METADATA, _DIGEST, _VERSIONS = "vil-detectron2", "sha256", "module_versions"
# Swin's code, and so LIT's, saves its yacs config next to the weights; DeiT's, and so LIT-Ti's and timm's, its
# arguments. A dict replaces such an object, and nothing reads it.
_SETTINGS = ((OrderedDict, "yacs.config.CfgNode"), (OrderedDict, "argparse.Namespace"))


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a ``.pth`` or ``.safetensors`` file without running code.

    Returns:
        The file's dict, with a state dict under one of ``STATE_DICT_KEYS``. A bare state dict and a safetensors file
        are returned as ``{"model": ..., ...}``, the latter with the other contents that :func:`write_checkpoint` wrote.

    Raises:
        ConfigError: if the file is missing, damaged, or not a checkpoint of tensors only.
    """
    path = Path(path)
    check_file(path, "file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        _check_crc(path)
        with warnings.catch_warnings(), torch.serialization.safe_globals([*_SETTINGS]):
            warnings.simplefilter("ignore")  # about pickles that were not written by torch: their contents are checked
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    except Exception as error:  # A damaged file may raise anything.
        # The first line of torch's message advises to run what the file holds.
        unsafe = re.search(r"GLOBAL (\S+)", str(error))
        if unsafe is None:
            raise ConfigError(f"{path} is not a PyTorch checkpoint, or is truncated") from error
        reason = f"it refers to {unsafe[1]}, which would run code"
        raise ConfigError(f"{path} is not a checkpoint of tensors only: {reason}") from error
    if isinstance(loaded, dict) and not any(key in loaded for key in STATE_DICT_KEYS):
        loaded = {"model": loaded}
    state_dict = state_dict_of(loaded) if isinstance(loaded, dict) else None
    if state_dict is None or not all(isinstance(name, str) for name in state_dict):
        raise ConfigError(f"{path} has no state dict of a model")
    for name, tensor in state_dict.items():
        if isinstance(tensor, Tensor) and (tensor.layout != torch.strided or tensor.is_meta):
            raise ConfigError(f"{path}: {name} is not a dense tensor with values")
        # One value may stand for any number of them.
        if isinstance(tensor, Tensor) and tensor.nbytes > path.stat().st_size:
            raise ConfigError(f"{path}: {name} has {tensor.nbytes:,} bytes, more than the file")
    return loaded


def _check_crc(path: Path) -> None:
    """torch.save writes a checksum of each tensor, which torch.load does not verify."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            if damaged := file.testzip():
                raise zipfile.BadZipFile(f"wrong checksum of {damaged}")


def state_dict_of(contents: Mapping[str, Any]) -> Mapping[str, Tensor] | None:
    """Return the state dict among a checkpoint's contents, or None if there is none."""
    for key in STATE_DICT_KEYS:
        value = contents.get(key)
        if isinstance(value, Mapping) and any(isinstance(tensor, Tensor) for tensor in value.values()):
            return value
    return None


def write_checkpoint(path: str | Path, contents: Mapping[str, Any]) -> None:
    """Write ``{"model": state dict, ...}`` atomically, as ``.pth`` or ``.safetensors`` by the suffix of ``path``.

    A safetensors file stores the other contents as JSON in its header. Module versions of the state dict are kept.

    Raises:
        ConfigError: for another suffix, or if the file cannot be written.
    """
    path = Path(path)
    check_writable(path)
    # load_state_dict hands a version to each module, which adapts weights of an older format.
    stored = getattr(contents["model"], "_metadata", None) or {}
    versions = {name: data["version"] for name, data in stored.items() if data and data.get("version", 1) != 1}
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in contents["model"].items()}
    others = {key: value for key, value in contents.items() if key != "model"}
    with atomic_write(path) as partial:
        if path.suffix == ".safetensors":
            header = json.dumps(others | ({_VERSIONS: versions} if versions else {}))
            partial.touch()
            mode = partial.stat().st_mode
            digest = digest_of_tensors(tensors, header)
            save_file(tensors, partial, metadata={"format": "pt", _METADATA: header, _DIGEST: digest})
            partial.chmod(mode)  # safetensors gives no access to anybody but the owner
        else:
            with partial.open("wb") as file:
                torch.save({"model": _with_versions(tensors, versions), **others}, file)


@contextlib.contextmanager
def atomic_write(path: str | Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to ``path``, which replaces ``path`` once its contents are on the disk.

    If the body fails, or the machine does, ``path`` still names what it did before. What a link or a pipe of that name
    leads to is never written. ``torch.save`` gets an open file rather than the path: its own writer does not report why
    it failed.

    Args:
        sync: whether to wait for the disk, which drawings by the thousand need not.

    Raises:
        ConfigError: if the file cannot be written.
    """
    path = Path(path)
    # Names have a limit of 255 bytes.
    partial = path.with_name(f".{path.name[:60]}.{os.getpid()}.partial")
    try:
        yield partial
        if sync:
            _sync(partial)
        os.replace(partial, path)
        if sync:
            _sync(path.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = find_os_error(error) or error
        if isinstance(cause, RuntimeError):
            raise
        raise ConfigError(f"{path} cannot be written: {getattr(cause, 'strerror', None) or cause}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(path: str | Path) -> None:
    """Raise a :class:`ConfigError` if no checkpoint can be written to ``path``, before hours of work end with that."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: the name of a checkpoint ends in {' or '.join(SUFFIXES)}")
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written: is {folder} a folder that you may write to?")


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
        header = metadata.get(_METADATA, "{}")
        others = dict(json.loads(header))
        versions = {name: int(version) for name, version in others.pop(_VERSIONS, {}).items()}
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {str(error).partition(chr(10))[0]}") from error
    # Files of other writers have no digest.
    if _METADATA in metadata and metadata.get(_DIGEST, "") not in ("", digest_of_tensors(tensors, header)):
        raise ConfigError(f"{path} is damaged: its tensors differ from its digest")
    return others | {"model": _with_versions(tensors, versions)}


def _with_versions(tensors: Mapping[str, Tensor], versions: Mapping[str, int]) -> OrderedDict[str, Tensor]:
    state_dict = OrderedDict(tensors)
    # torch reads this attribute, which OrderedDict does not declare.
    state_dict._metadata = OrderedDict((name, {"version": version}) for name, version in versions.items())  # type: ignore[attr-defined]
    return state_dict


def digest_of_tensors(tensors: Mapping[str, Tensor], header: str) -> str:
    """SHA-256 of a text, and of the names, dtypes, shapes and values of tensors; safetensors has no checksum."""
    digest = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
