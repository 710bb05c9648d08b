"""Checkpoints that fit, or a clear word: no tensor is left random without being named."""

from pathlib import Path
from typing import Any

from detectron2.checkpoint import DetectionCheckpointer
from torch import nn

from backbones import InputError
from backbones.files import read_checkpoint

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
        contents = read_checkpoint(filename)
        if "model" not in contents:
            raise InputError(f"{filename} is no checkpoint of a detector: convert it with tools/convert_checkpoint.py")
        return contents

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


def _part(name: str) -> str:
    """Which part of a detector a parameter belongs to: ``backbone.bottom_up``, ``backbone``, or a head."""
    return "backbone.bottom_up" if name.startswith("backbone.bottom_up.") else name.partition(".")[0]
