"""Checkpoint files. Reading runs no code from the file, and writing is atomic."""

import hashlib
import json
import os
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from backbones.errors import ConfigError, check_file, first_of
from backbones.files import atomic_write

# Keys of the state dict: "model" in detectron2, LIT and timm, "net" in vision-longformer, "state_dict" in mmdetection
# and timm.
STATE_DICT_KEYS = ("model", "net", "state_dict")
SUFFIXES = (".pth", ".safetensors")
# Keys in the header of a safetensors file: the other contents as JSON, and the digest.
_METADATA, _DIGEST = "vil-detectron2", "sha256"
# Swin and LIT save a yacs config next to the weights; DeiT, LIT-Ti and timm save their arguments. They load as dicts.
_SETTINGS: list[Any] = [(OrderedDict, "yacs.config.CfgNode"), (OrderedDict, "argparse.Namespace")]


class _Placeholder:
    """Placeholder for an object of a training log in a checkpoint."""

    def __init__(self, *contents: object) -> None:
        """Ignore the contents."""

    __setstate__ = __init__


# mmengine, the runner of mmdetection 3, saves its log as arrays next to the weights.
_SETTINGS += [
    (_Placeholder, name)
    for name in (
        "mmengine.logging.history_buffer.HistoryBuffer",
        *("numpy.ndarray", "numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
        *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
    )
]


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a ``.pth`` or ``.safetensors`` file without running code.

    Returns:
        The contents of the file, with a state dict under one of ``STATE_DICT_KEYS``. A bare state dict becomes
        ``{"model": state dict}``.

    Raises:
        ConfigError: If the file is missing or damaged, or if it has no state dict or contents other than tensors and
            plain values.
    """
    path = Path(path)
    check_file(path, "file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        if zipfile.is_zipfile(path):
            # torch.load does not verify the checksum of each tensor.
            with zipfile.ZipFile(path) as file:
                if damaged := file.testzip():
                    raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
        with warnings.catch_warnings(), torch.serialization.safe_globals(_SETTINGS):
            warnings.simplefilter("ignore")  # about pickles that were not written by torch
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except zipfile.BadZipFile as error:
        raise ConfigError(f"'{path}' is damaged: {error}. {_get_again(path)}") from error
    except Exception as error:  # A damaged file may raise anything.
        # torch's own message recommends loading the file without weights_only.
        if unsafe := re.search(r"GLOBAL (\S+)", str(error)):
            advice = "Use a checkpoint that has only tensors."
            raise ConfigError(f"'{path}' refers to {unsafe[1]}, which could run code. {advice}") from error
        raise ConfigError(f"'{path}' is not a PyTorch checkpoint, or is truncated. {_get_again(path)}") from error
    if isinstance(loaded, dict) and not any(key in loaded for key in STATE_DICT_KEYS):
        loaded = {"model": loaded}
    state_dict = state_dict_of(loaded) if isinstance(loaded, dict) else None
    if state_dict is None or not all(isinstance(name, str) for name in state_dict):
        raise ConfigError(f"'{path}' has no state dict of a model. Use the weights of a model.")
    for name, tensor in state_dict.items():
        if isinstance(tensor, Tensor) and (tensor.layout != torch.strided or tensor.is_meta):
            raise ConfigError(f"'{name}' in '{path}' is not a dense tensor with values. Save a dense tensor.")
        # An expanded tensor stores one value for any number of elements.
        if isinstance(tensor, Tensor) and tensor.nbytes > path.stat().st_size:
            raise ConfigError(f"'{name}' in '{path}' has more bytes than the file. Save a copy of the tensor.")
    return loaded


def _get_again(path: Path) -> str:
    """Return what to do about a damaged file, with the other checkpoints of its run."""
    others = sorted(other.name for other in path.parent.glob("model_*.pth") if other != path)
    return f"Download or copy it again{f', or use {first_of(others, 3)} of its folder' if others else ''}."


def state_dict_of(contents: Mapping[str, Any]) -> Mapping[str, Tensor] | None:
    """Return the state dict in the contents of a checkpoint, or None if there is none."""
    for key in STATE_DICT_KEYS:
        value = contents.get(key)
        if isinstance(value, Mapping) and any(isinstance(tensor, Tensor) for tensor in value.values()):
            return value
    return None


def write_checkpoint(path: str | Path, contents: Mapping[str, Any]) -> None:
    """Write ``{"model": state dict, ...}`` atomically. The suffix of ``path`` selects the format.

    A safetensors file stores the other contents as JSON in its header.

    Raises:
        ConfigError: If the suffix is unknown or the file cannot be written.
    """
    path = Path(path)
    check_writable(path)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in contents["model"].items()}
    with atomic_write(path) as partial:
        if path.suffix == ".safetensors":
            header = json.dumps({key: value for key, value in contents.items() if key != "model"})
            partial.touch()
            mode = partial.stat().st_mode
            digest = digest_of_tensors(tensors, header)
            save_file(tensors, partial, metadata={"format": "pt", _METADATA: header, _DIGEST: digest})
            partial.chmod(mode)  # safetensors lets only the owner read the file.
        else:
            with partial.open("wb") as file:
                torch.save({**contents, "model": tensors}, file)


def check_writable(path: str | Path) -> None:
    """Raise a :class:`ConfigError` if a checkpoint cannot be written to ``path``. Call it before a long computation."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"The checkpoint '{path}' must end in {' or '.join(SUFFIXES)}. Choose another file name.")
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"Cannot write '{path}'. Choose a file in an existing folder with write permission.")


def _read_safetensors(path: Path) -> dict[str, Any]:
    """Read a safetensors file. Its header has the other contents that :func:`write_checkpoint` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
        header = metadata.get(_METADATA, "{}")
        others = dict(json.loads(header))
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"'{path}' is not a safetensors file: {reason}. {_get_again(path)}") from error
    # Files of other programs have no digest.
    if _METADATA in metadata and metadata.get(_DIGEST, "") not in ("", digest_of_tensors(tensors, header)):
        raise ConfigError(f"'{path}' is damaged: its tensors do not match its digest. {_get_again(path)}")
    return others | {"model": tensors}


def digest_of_tensors(tensors: Mapping[str, Tensor], header: str) -> str:
    """Return the SHA-256 of a text and of the names, dtypes, shapes and values of tensors."""
    digest = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
