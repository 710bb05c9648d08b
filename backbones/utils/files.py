"""Checkpoint files: read without running what they hold, and written whole or not at all."""

import contextlib
import hashlib
import json
import os
import re
import shutil
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

from backbones.utils.errors import InputError, check_file, system_error_of

# Under which a checkpoint may hold its state dict: detectron2, LIT and timm; vision-longformer; mmdetection; timm.
STATE_DICT_KEYS = ("model", "net", "state_dict")
SUFFIXES = (".pth", ".safetensors")
_METADATA, _DIGEST = "vil-detectron2", "sha256"
# Beside the tensors of a safetensors file: a module's name -> the version of its form of weights, where it is not 1.
_VERSIONS = "module_versions"
_ANOTHER = "copy or download it again, or take another"


# Swin's code, and so LIT's, saves its yacs configuration beside the weights; DeiT's, and so LIT-Ti's and timm's, its
# arguments. A dict stands for such an object, and nothing reads it.
_SETTINGS = ((OrderedDict, "yacs.config.CfgNode"), (OrderedDict, "argparse.Namespace"))


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """What a ``.pth`` or ``.safetensors`` file holds; no code in a file is ever run.

    Returns:
        The file's dict, with a state dict under one of ``STATE_DICT_KEYS``; a bare state dict comes as ``{"model":
        ...}``, as does a safetensors file, together with what :func:`write_checkpoint` wrote beside the tensors.

    Raises:
        InputError: for a file that is missing or cannot be read so.
    """
    path = Path(path)
    check_file(path, "file")
    if not path.stat().st_size:
        raise InputError(f"{path} is empty: {_ANOTHER}")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    _check_sums(path)
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([*_SETTINGS]):
            warnings.simplefilter("ignore")  # of pickles that were not written by torch: what they hold is checked
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # A damaged file may raise anything.
        raise InputError(f"{path} is no checkpoint of tensors only: {_reason(error)}") from error
    if not isinstance(loaded, dict):
        raise InputError(f"{path} holds a {type(loaded).__name__}, not a state dict")
    if not any(key in loaded for key in STATE_DICT_KEYS):
        loaded = {"model": loaded}
    state_dict = state_dict_of(loaded)
    if state_dict is None:
        raise InputError(f"{path} holds no state dict of a model")
    for name, tensor in state_dict.items():
        if not isinstance(name, str):
            raise InputError(f"{path} has {name!r} among its names: they are texts")
        if isinstance(tensor, Tensor) and (tensor.layout != torch.strided or tensor.is_meta):
            raise InputError(f"{path}: {name} is no plain tensor of values")
    return loaded


def _check_sums(path: Path) -> None:
    """torch writes a checksum of every tensor, and does not look at them when it reads."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
        raise InputError(f"{path} is damaged ({' '.join(str(error).split())}): {_ANOTHER}") from error
    if damaged:
        # Everything is in a folder there, whose name says nothing.
        name = damaged.partition("/")[2] or damaged
        raise InputError(f"{path} is damaged (the checksum of {name} in it is wrong): {_ANOTHER}")


def state_dict_of(contents: Mapping[str, Any]) -> Mapping[str, Tensor] | None:
    """The state dict among a checkpoint's contents, or None where there is none."""
    for key in STATE_DICT_KEYS:
        value = contents.get(key)
        if isinstance(value, Mapping) and any(isinstance(tensor, Tensor) for tensor in value.values()):
            return value
    return None


def write_checkpoint(path: str | Path, contents: Mapping[str, Any]) -> None:
    """Write ``{"model": state dict, ...}`` as the file's name ends: ``.pth`` or ``.safetensors``.

    The file is written beside ``path`` and moved into place. Beside the tensors, a safetensors file has the other
    contents as JSON in its metadata. The versions of modules that torch keeps with a state dict stay with it.

    Raises:
        InputError: for another ending, a place that cannot be written to, or contents that are no JSON.
    """
    path = Path(path)
    check_writable(path)
    versions = _versions_of(contents["model"])
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in contents["model"].items()}
    model = _with_versions(tensors, versions)
    others = {key: value for key, value in contents.items() if key != "model"}
    with written_whole(path) as partial:
        if path.suffix == ".safetensors":
            said = json.dumps(others | ({_VERSIONS: versions} if versions else {}))
            partial.touch()
            mode = partial.stat().st_mode
            digest = digest_of_tensors(model, said)
            save_file(model, partial, metadata={"format": "pt", _METADATA: said, _DIGEST: digest})
            partial.chmod(mode)  # safetensors lets nobody but the owner read it
        else:
            save_tensors({"model": model, **others}, partial)


def save_tensors(contents: Mapping[str, Any], path: Path) -> None:
    """``torch.save``, whose own writer, which takes paths, does not say why it failed."""
    with path.open("wb") as file:
        torch.save(contents, file)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write a file to that takes its place under ``path`` when it is whole and on the disk.

    Whatever ends the writing, a full disk or a lost power supply, the file that ``path`` named before is still there.

    Raises:
        InputError: where it cannot be written; what was begun is removed.
    """
    # Names have a limit of 255 bytes.
    partial = path.with_name(f".{path.name[:60]}.{os.getpid()}.partial")
    try:
        yield partial
        _sync(partial)
        os.replace(partial, path)
        _sync(path.parent)
    except (OSError, RuntimeError, SafetensorError, TypeError) as error:
        raise InputError(f"{path} cannot be written: {_full_disk(path.parent) or _reason_of_writing(error)}") from error
    finally:
        # Where nothing could be written there is nothing to remove.
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _full_disk(folder: Path) -> str:
    """torch's writer does not say why it failed."""
    if not folder.is_dir() or shutil.disk_usage(folder).free > 1 << 20:
        return ""
    return "no space is left on the device"


def _reason_of_writing(error: BaseException) -> str:
    cause = system_error_of(error)
    if cause is not None and cause.strerror:
        return cause.strerror
    return str(error).strip().partition("\n")[0] or type(error).__name__


def check_writable(path: str | Path) -> None:
    """Raise an :class:`InputError`, before the work, where no checkpoint can be written to ``path``."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: a checkpoint's name ends in {' or '.join(SUFFIXES)}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{path}: there is no folder {folder}")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{path} cannot be written")


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            model = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
            said = metadata.get(_METADATA, "{}")
            others = json.loads(said)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is no safetensors file: {_reason(error)}") from error
    if _METADATA in metadata and metadata.get(_DIGEST, "") not in ("", digest_of_tensors(model, said)):
        raise InputError(f"{path} is damaged (its tensors are not those that were written): {_ANOTHER}")
    others = others if isinstance(others, dict) else {}
    versions = others.pop(_VERSIONS, {})
    if not isinstance(versions, dict) or not all(isinstance(version, int) for version in versions.values()):
        raise InputError(f"{path}: {_VERSIONS} in its header are no whole numbers by the names of modules")
    return others | {"model": _with_versions(model, versions)}


def _versions_of(state_dict: Mapping[str, Tensor]) -> dict[str, int]:
    """What a module asks when it is loaded, to mend weights of an older form: its name -> a version other than 1."""
    known = getattr(state_dict, "_metadata", None) or {}
    return {name: said["version"] for name, said in known.items() if said and said.get("version", 1) != 1}


def _with_versions(tensors: Mapping[str, Tensor], versions: Mapping[str, int]) -> OrderedDict[str, Tensor]:
    state_dict = OrderedDict(tensors)
    state_dict._metadata = OrderedDict((name, {"version": version}) for name, version in versions.items())
    return state_dict


def digest_of_tensors(model: Mapping[str, Tensor], said: str) -> str:
    """SHA-256 of tensors with their names, types and shapes, and of what is said of them: safetensors has no sums."""
    digest = hashlib.sha256(said.encode())
    for name, tensor in sorted(model.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _reason(error: BaseException) -> str:
    """One line; torch's own first one is advice to run what the file holds."""
    if match := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it refers to {match[1]}, which would run code"
    lines = str(error).strip().splitlines()
    if isinstance(error, SafetensorError | json.JSONDecodeError) and lines:
        return lines[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "it is damaged, cut off, or no file that torch.save wrote"
