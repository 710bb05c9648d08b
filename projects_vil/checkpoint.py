"""Checkpoints that fit, or a clear word: no tensor is left random without being named."""

import pickle
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from backbones import InputError

# The layers whose size is the number of classes.
_PREDICTORS = (
    "head.cls_score",
    "box_predictor.cls_score",
    "box_predictor.bbox_pred",
    "mask_head.predictor",
    "sem_seg_head.predictor",
)


class Checkpointer(DetectionCheckpointer):
    """detectron2's checkpointer, strict: nothing stays random without being a whole part that the file lacks.

    A file to start training from must fill the backbone; it may lack FPN or heads as a whole, and predictors may be
    of another number of classes. These start anew, and the log names them. Anything else that does not fit raises.

    Args:
        model, save_dir: as detectron2's.
        complete: for evaluation and export: the file must fill the whole model.
        checkpointables: as detectron2's.
    """

    def __init__(self, model: nn.Module, save_dir: str = "", *, complete: bool = False, **checkpointables) -> None:
        super().__init__(model, save_dir, **checkpointables)
        self.complete = complete

    def load(self, path: str, *args, **kwargs) -> dict[str, Any]:
        """As detectron2's.

        Raises:
            InputError: for a file that is missing or unreadable, or of another model.
        """
        if path:
            check_weights_file(path)
        elif self.complete:
            raise InputError("no weights were given: name the checkpoint of a trained detector (MODEL.WEIGHTS)")
        self._path = path
        return super().load(path, *args, **kwargs)

    def _load_file(self, filename: str) -> dict[str, Any]:
        return read_checkpoint(filename)

    def _load_model(self, checkpoint: dict[str, Any]):
        names = list(checkpoint["model"])
        wrapped = all(name.startswith("module.") for name in names)
        held = {_part(name.removeprefix("module.") if wrapped else name) for name in names}
        incompatible = super()._load_model(checkpoint)
        predictors = set()
        for name, theirs, ours in incompatible.incorrect_shapes:
            if self.complete or not any(layer in name for layer in _PREDICTORS):
                raise InputError(
                    f"{self._path} is of another model: {len(incompatible.incorrect_shapes)} shapes differ, {name} is "
                    f"{tuple(theirs)} there and {tuple(ours)} here"
                )
            predictors.add(name)
        unexpected = [name for name in incompatible.unexpected_keys if "pixel_" not in name]
        missing = [
            name
            for name in incompatible.missing_keys
            if name not in predictors and (self.complete or _part(name) in held | {"backbone.bottom_up"})
        ]
        if unexpected or missing:
            raise InputError(
                f"{self._path} is of another model: {len(unexpected)} names in it fit nothing and {len(missing)} "
                f"parameters of the model are not in it, such as {(unexpected or missing)[0]}"
            )
        return incompatible


def check_weights_file(path: str) -> None:
    """Whether a local weights file exists; addresses that detectron2 downloads from pass.

    Raises:
        InputError: where it does not.
    """
    if "://" not in path and not Path(path).is_file():
        raise InputError(f"there is no weights file {path} (MODEL.WEIGHTS)")


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A ``.pth`` or ``.safetensors`` file as ``{"model": state dict, ...}``; no code in a file is ever run.

    Raises:
        InputError: for a file that cannot be read so.
    """
    path = str(path)
    if path.endswith(".safetensors"):
        try:
            return {"model": load_file(path)}
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is no safetensors file: {_first_line(error)}") from error
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} is no checkpoint of tensors only: {_first_line(error)}") from error
    if not isinstance(loaded, dict):
        raise InputError(f"{path} holds a {type(loaded).__name__}, not a state dict")
    state_dict = loaded.get("model", loaded)
    if not isinstance(state_dict, dict) or not any(isinstance(value, torch.Tensor) for value in state_dict.values()):
        raise InputError(f"{path} holds no state dict of a model")
    return loaded if "model" in loaded else {"model": loaded}


def _part(name: str) -> str:
    """Which part of a detector a parameter belongs to: ``backbone.bottom_up``, ``backbone``, or a head."""
    return "backbone.bottom_up" if name.startswith("backbone.bottom_up.") else name.partition(".")[0]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
