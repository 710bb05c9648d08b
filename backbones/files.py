"""Checkpoint files: read without running what they hold, and written whole or not at all."""

import json
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from backbones.errors import InputError

# Under which a checkpoint may hold its state dict: detectron2, LIT and timm; vision-longformer; mmdetection; timm.
STATE_DICT_KEYS = ("model", "net", "state_dict")
SUFFIXES = (".pth", ".safetensors")
_METADATA = "vil-detectron2"


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
    if not path.is_file():
        raise InputError(f"{path} is a folder, not a checkpoint" if path.is_dir() else f"there is no file {path}")
    if not path.stat().st_size:
        raise InputError(f"{path} is empty")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
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
    contents as JSON in its metadata.

    Raises:
        InputError: for another ending, a place that cannot be written to, or contents that are no JSON.
    """
    path = Path(path)
    check_writable(path)
    model = {name: tensor.detach().clone().contiguous() for name, tensor in contents["model"].items()}
    others = {key: value for key, value in contents.items() if key != "model"}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.suffix == ".safetensors":
            save_file(model, partial, metadata={"format": "pt", _METADATA: json.dumps(others)})
        else:
            torch.save({"model": model, **others}, partial)
        os.replace(partial, path)
    except (OSError, RuntimeError, SafetensorError, TypeError) as error:
        raise InputError(f"{path} cannot be written: {_reason(error)}") from error
    finally:
        partial.unlink(missing_ok=True)


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
            others = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is no safetensors file: {_reason(error)}") from error
    return (others if isinstance(others, dict) else {}) | {"model": model}


def _reason(error: Exception) -> str:
    """One line; torch's own first one is advice to run what the file holds."""
    if match := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it refers to {match[1]}, which would run code"
    lines = str(error).strip().splitlines()
    if isinstance(error, SafetensorError | json.JSONDecodeError) and lines:
        return lines[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "it is damaged, cut off, or no file that torch.save wrote"
