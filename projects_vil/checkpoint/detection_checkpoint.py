"""Checkpoints that fit, official ones among them, or a clear word: no tensor is left random without being named."""

import dataclasses
import functools
import logging
import shlex
import warnings
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from backbones import InputError
from backbones.convert import OfficialCheckpoint, recognise
from backbones.utils.errors import check_file
from backbones.utils.files import read_checkpoint, save_tensors, state_dict_of, written_whole
from backbones.variants import OPTIONS, classifier_variant
from projects_vil.checkpoint.class_rows import copy_rows, is_predictor, match_classes
from projects_vil.checkpoint.origins.conversion import BACKBONE_PREFIX, convert_official
from projects_vil.checkpoint.origins.pretrained import backbone_of_classifier, is_classifier, named_variant
from projects_vil.checkpoint.provenance import (
    PROVENANCE_KEY,
    Provenance,
    differing_options,
    input_format,
    model_categories,
)
from projects_vil.checkpoint.storage import find_checkpoint, tag_checkpoint
from projects_vil.config import CONFIG_FILE
from projects_vil.modeling import TransformerBackbone, build_on_meta

# Beside averaged weights under "model": those of training, and how many steps are averaged.
UNAVERAGED, AVERAGED_STEPS = "unaveraged_model", "averaged_steps"


# What tools/export_model.py writes.
_EXPORTS = (".ts", ".onnx", ".pt2")


class Checkpointer(DetectionCheckpointer):
    """detectron2's checkpointer, strict: nothing stays random without being a whole part that the file lacks.

    A file to start training from must fill the backbone; it may lack FPN or heads as a whole, and predictors may be
    of other classes: rows of classes of the same name are copied where both sides know their names, and the rest
    starts anew. The log names all that does. Anything else that does not fit raises. A file of an official project,
    or of a classifier of this one, is converted for the model's variant and options.

    Every saved file says under ``PROVENANCE_KEY`` what it is (:class:`~projects_vil.checkpoint.provenance.Provenance`).

    Args:
        model, save_dir: as detectron2's.
        cfg: the model's config, which knows its datasets and input format; without it neither is compared or saved.
        complete: for evaluation and export: the file must fill the whole model. So it must where training resumes.
        averaged: of the model, while it trains: saved as ``model``, which all that reads a checkpoint takes, with the
            weights of training beside it, which a resumed run takes.
        checkpointables: as detectron2's.

    Attributes:
        has_average: whether the checkpoint that was resumed from had one.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: str = "",
        *,
        cfg: CfgNode | None = None,
        complete: bool = False,
        averaged: AveragedModel | None = None,
        **checkpointables,
    ) -> None:
        super().__init__(model, save_dir, **checkpointables)
        self.averaged = averaged
        self.has_average = False
        self.cfg = cfg
        self.complete = complete
        self._resuming = False
        self.resumed_from: Path | None = None

    def save(self, name: str, *, tag: bool = True, **kwargs) -> None:
        """As detectron2's, with the provenance, and whole or not at all: the files before stay until this one is on the
        disk, and ``last_checkpoint`` changes last.

        Args:
            tag: whether it becomes the one to resume from.

        Raises:
            InputError: where it cannot be written.
        """
        if not self.save_dir or not self.save_to_disk:
            return
        contents = {"model": self.model.state_dict()}
        if self.averaged is not None:
            average = {"model": self.averaged.module.state_dict(), AVERAGED_STEPS: int(self.averaged.n_averaged)}
            contents = {UNAVERAGED: contents["model"], **average}
        contents |= {key: thing.state_dict() for key, thing in self.checkpointables.items()}
        path = Path(self.save_dir) / f"{name}.pth"
        self.logger.info("Saving checkpoint to %s", path)
        with written_whole(path) as partial:
            save_tensors(contents | {PROVENANCE_KEY: self.provenance.to_dict()} | kwargs, partial)
        if tag:
            tag_checkpoint(self.save_dir, path.name)

    def resume_or_load(self, path: str, *, resume: bool = True) -> dict[str, Any]:
        """Resume from the file of :func:`~projects_vil.checkpoint.storage.find_checkpoint`, which must fill the whole
        model, or else load the weights of ``path``.

        Raises:
            InputError: where :meth:`load` would, or where there are checkpoints to resume from, and none is whole.
        """
        self.resumed_from = find_checkpoint(self.save_dir, logger=self.logger) if resume else None
        if self.resumed_from is None:
            return self.load(path, checkpointables=[])
        self.complete = True
        self._resuming = bool(self.checkpointables)
        return self.load(str(self.resumed_from))

    def load(self, path: str, *args, **kwargs) -> dict[str, Any]:
        """As detectron2's.

        Raises:
            InputError: for a file that is missing or unreadable, of another variant or model, or, where it must fill
                the whole model, of another input format.
        """
        if path:
            check_weights_file(path)
        elif self.complete:
            raise InputError("no weights were given: name the checkpoint of a trained detector (MODEL.WEIGHTS)")
        self._path = path
        return super().load(path, *args, **kwargs)

    @functools.cached_property
    def provenance(self) -> Provenance:
        """Of this model. Its classes are those of a dataset with as many as the model has."""
        backbone = self._backbone
        known: dict[str, Any] = {}
        if backbone is not None:
            known = {"variant": backbone.variant, "options": backbone.variant_options}
        if self.cfg is not None:
            train, test = self.cfg.DATASETS.TRAIN, self.cfg.DATASETS.TEST
            names = (*test, *train) if self.complete and not self._resuming else (*train, *test)
            known["input_format"] = input_format(self.cfg)
            categories = model_categories(self.cfg, names)
            if categories is not None:
                known |= {"classes": categories.names, "category_ids": categories.ids}
        return Provenance(**known)

    @property
    def _backbone(self) -> TransformerBackbone | None:
        """This project's, where the model has one."""
        backbone = getattr(getattr(self.model, "backbone", None), "bottom_up", None)
        return backbone if isinstance(backbone, TransformerBackbone) else None

    # -- reading -----------------------------------------------------------------------------------

    def _load_file(self, filename: str) -> dict[str, Any]:
        contents = read_checkpoint(filename)
        official = recognise(contents)
        if official is not None:
            return self._convert(official)
        if is_classifier(state_dict_of(contents)):
            return self._convert_own(contents)
        if "model" not in contents:
            raise InputError(f"{self._path} is neither a detectron2 checkpoint nor an official one, nor a classifier's")
        return contents

    def _convert(self, official: OfficialCheckpoint) -> dict[str, Any]:
        """The file's contents in this model's names; logs what became of the official ones."""
        backbone = self._backbone
        if backbone is None:
            raise InputError(f"{self._path} is of {official.kind}, and the model has no backbone of this project")
        try:
            converted = convert_official(official, backbone.variant, model_options=backbone.options)
        except InputError as error:
            model = f"and the model is {backbone.variant} (MODEL.TRANSFORMER.NAME)"
            hint = _needed_keys(official, backbone)
            raise InputError(f"{self._path} is of {official.kind}, {model}: {error}{hint}") from error
        # Converted for the model's options: the file itself says none.
        converted.contents[PROVENANCE_KEY] |= {"options": None}
        for line in converted.lines():
            self.logger.info(line)
        return converted.contents

    def _convert_own(self, contents: dict[str, Any]) -> dict[str, Any]:
        """As :meth:`_convert`, from a classifier of this project."""
        said, backbone = Provenance.of(contents), self._backbone
        said = dataclasses.replace(said, variant=said.variant or named_variant(contents), classes=None)
        if backbone is None:
            raise InputError(f"{self._path} is a classifier's, and the model has no backbone of this project")
        if said.variant == classifier_variant(backbone.variant):
            said = dataclasses.replace(said, variant=backbone.variant)
        self._check_variant(said)
        try:
            weights, lines = backbone_of_classifier(state_dict_of(contents), backbone.variant, backbone.net)
        except InputError as error:
            model = f"and the model is {backbone.variant} (MODEL.TRANSFORMER.NAME)"
            raise InputError(f"{self._path} is a classifier's, {model}: {error}") from error
        for line in lines:
            self.logger.info(line)
        model = {f"{BACKBONE_PREFIX}{name}": tensor for name, tensor in weights.items()}
        return {"model": model, PROVENANCE_KEY: said.to_dict()}

    def _load_model(self, checkpoint: dict[str, Any]):
        average, steps = self._take_unaveraged(checkpoint), checkpoint.pop(AVERAGED_STEPS, 1)
        incompatible = self._load_weights(checkpoint)
        if average is not None:
            self._check_finite(average)
            self.averaged.module.load_state_dict(average)
            self.averaged.n_averaged.fill_(steps)
            self.has_average = True
        return incompatible

    def _take_unaveraged(self, checkpoint: dict[str, Any]) -> dict[str, Tensor] | None:
        """Where training resumes, put its weights in the place of their average; returns that, if it goes on."""
        trained = checkpoint.pop(UNAVERAGED, None)
        if trained is None:
            return None
        if not self._resuming:
            self.logger.info(f"{self._path} has averaged weights (MODEL.EMA): they are taken")
            return None
        average, checkpoint["model"] = checkpoint["model"], trained
        if self.averaged is None:
            self.logger.warning(f"{self._path} has averaged weights, and MODEL.EMA.ENABLED is False: they end here")
            return None
        return average

    def _check_finite(self, state_dict: dict[str, Tensor]) -> None:
        diverged = next((name for name, value in state_dict.items() if not value.isfinite().all()), None)
        if diverged is not None:
            raise InputError(
                f"{self._path}: {diverged} has values that are not finite: take an older checkpoint, or, to resume "
                "from one, take this one away"
            )

    def _load_weights(self, checkpoint: dict[str, Any]):
        said, state_dict = Provenance.of(checkpoint), checkpoint["model"]
        others = [name for name, value in state_dict.items() if not isinstance(value, Tensor)]
        if others:
            raise InputError(f"{self._path} has a {type(state_dict[others[0]]).__name__} where {others[0]} should be")
        self._check_finite(state_dict)
        if all(name.startswith("module.") for name in state_dict):
            state_dict = {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}
        self._check_variant(said)
        differ = self._check_options(said)
        options = f"; it has {differ}" if differ else ""
        self._check_input(said)
        self._match_classes(state_dict, said)
        checkpoint["model"] = state_dict
        held = {_part(name) for name in state_dict}
        incompatible = super()._load_model(checkpoint)
        predictors = set()
        for name, theirs, ours in incompatible.incorrect_shapes:
            if self.complete or not is_predictor(name) or not _other_rows(tuple(theirs), tuple(ours)):
                raise InputError(
                    f"{self._path} is of another model: {len(incompatible.incorrect_shapes)} shapes differ, {name} is "
                    f"{tuple(theirs)} there and {tuple(ours)} here{options}{self._own_config()}"
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
                f"{self._path} is of another model: {len(unexpected)} names in it fit nothing{_some(unexpected)} and "
                f"{len(missing)} parameters of the model are not in it{_some(missing)}{options}{self._own_config()}"
            )
        return incompatible

    # -- what the file says of itself --------------------------------------------------------------

    def _check_variant(self, said: Provenance) -> None:
        ours = self.provenance.variant
        if said.variant is not None and ours is not None and said.variant != ours:
            raise InputError(
                f"{self._path} is of {said.variant}, and the model is {ours} (MODEL.TRANSFORMER.NAME)"
                f"{self._own_config()}"
            )

    def _check_options(self, said: Provenance) -> str:
        """Which options differ, in words; shapes do not show all of them."""
        variant, ours = self.provenance.variant, self.provenance.options
        if variant is None or ours is None or said.options is None:
            return ""
        differ = differing_options(variant, said.options, ours).items()
        text = ", ".join(f"{key} {value} where the model has {here}" for key, (value, here) in differ)
        if text and self.complete:
            raise InputError(f"{self._path} has {text}{self._own_config()}")
        if text:
            self.logger.warning(f"{self._path} has {text}: what it learned was for that")
        return text

    def _check_input(self, said: Provenance) -> None:
        ours = self.provenance.input_format
        if said.input_format is None or ours is None or said.input_format.matches(ours):
            return
        text = (
            f"{self._path} was trained on {said.input_format}, and the config has {ours} (INPUT.FORMAT, "
            "MODEL.PIXEL_MEAN, MODEL.PIXEL_STD)"
        )
        if self.complete:
            raise InputError(f"{text}{self._own_config()}")
        self.logger.warning(text)

    def _own_config(self) -> str:
        """The config that a run left beside its checkpoint, as a way out."""
        config = Path(self._path).with_name(CONFIG_FILE)
        return f"; its run's own is --config-file {config}" if config.is_file() else ""

    def _match_classes(self, state_dict: dict[str, Tensor], said: Provenance) -> None:
        """Put predictors into the order of this model's classes, where both sides know theirs."""
        theirs = said.classes
        if theirs is None or not any(map(is_predictor, state_dict)):
            return
        ours = self.provenance.classes
        if ours is None or ours == theirs:
            return
        differ = f"{self._path} was trained for {_listed(theirs)}, and the datasets have {_listed(ours)}"
        if self._resuming:
            raise InputError(f"{differ}: it cannot be resumed, but MODEL.WEIGHTS may start from it")
        if self.complete and len(ours) != len(theirs):
            raise InputError(f"{differ}{self._own_config()}")
        matched = match_classes(ours, theirs)
        if self.complete and len(matched) < len(ours):
            unmatched = next(index for index in range(len(ours)) if index not in matched)
            if any(index != place for index, place in matched.items()):
                raise InputError(
                    f"{differ}: others are in another order, and {ours[unmatched]} here matches no name in it"
                )
            self.logger.warning(f"{differ}: {len(ours) - len(matched)} names differ, and classes are taken by number")
            return
        here, copied = self.model.state_dict(), {}
        for name, tensor in state_dict.items():
            if name not in here or not is_predictor(name):
                continue
            # To see whether a file fits, a model needs no values.
            start = torch.zeros(here[name].shape) if here[name].is_meta else here[name]
            rows = copy_rows(name, start, tensor, matched=matched, our_number=len(ours), their_number=len(theirs))
            if rows is not None:
                copied[name] = rows
        if copied:
            anew = [name for index, name in enumerate(ours) if index not in matched]
            self.logger.info(
                f"classes matched by name: {len(matched)} of {len(ours)} ({', '.join(ours[i] for i in matched)}) in "
                f"{', '.join(copied)}" + (f"; these start anew: {', '.join(anew)}" if anew else "")
            )
        state_dict.update(copied)


def check_weights_file(path: str) -> None:
    """Whether a local weights file exists; addresses that detectron2 downloads from pass.

    Raises:
        InputError: where it does not.
    """
    if "://" in path:
        return
    check_file(path, "weights file", named_by="MODEL.WEIGHTS")
    if path.endswith(_EXPORTS):
        raise InputError(
            f"{path} is an exported model, and a checkpoint is needed here (MODEL.WEIGHTS): tools/predict.py takes it, "
            "and tools/export_model.py --evaluate judges it"
        )


def check_weights(cfg: CfgNode, path: str, *, complete: bool = False, model: nn.Module | None = None) -> None:
    """Whether a local file fits the model of ``cfg``, which takes no memory here; nothing is loaded or logged.

    Args:
        complete: see :class:`Checkpointer`.
        model: of :func:`build_on_meta`, where it is there already.

    Raises:
        InputError: where :class:`Checkpointer` would.
    """
    check_weights_file(path)
    if "://" in path:
        return
    checkpointer = Checkpointer(model or build_on_meta(cfg), cfg=cfg, complete=complete)
    checkpointer.logger = logging.Logger(__name__, level=logging.CRITICAL + 1)
    with warnings.catch_warnings():
        # That loading into a model without values does nothing is the point.
        warnings.filterwarnings("ignore", message=".*meta parameter")
        checkpointer.load(path)


def _needed_keys(official: OfficialCheckpoint, backbone: TransformerBackbone) -> str:
    """The config keys with which an official file fits that does not fit the model; nothing where none help."""
    try:
        needed = convert_official(official, backbone.variant).options
    except InputError:
        return ""
    theirs = {key: value for key, value in needed.items() if key in OPTIONS}
    differ = differing_options(backbone.variant, theirs, backbone.variant_options)
    # A window's tables are resized, and positions too: they are never why a file does not fit.
    keys = [
        f"{key} {shlex.quote(str(value))}"
        for key, (value, _) in differ.items()
        if not key.endswith(("WINDOW_SIZE", "POSITION_RESIZING", "ATTENTION_MODE"))
    ]
    return f"; it is to be loaded with {' '.join(keys)}" if keys else ""


def _listed(classes: tuple[str, ...]) -> str:
    more = f" and {len(classes) - 5} more" if len(classes) > 5 else ""
    return f"{len(classes)} classes, {', '.join(classes[:5])}{more}"


def _some(names: list[str]) -> str:
    """The first of the names, to go on with the sentence."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f", such as {', '.join(names[:3])}{more}" if names else ""


def _other_rows(theirs: tuple[int, ...], ours: tuple[int, ...]) -> bool:
    """Whether two shapes differ in the first axis alone."""
    return theirs[:1] != ours[:1] and theirs[1:] == ours[1:]


def _part(name: str) -> str:
    """Which part of a detector a parameter belongs to: ``backbone.bottom_up``, ``backbone``, or a head."""
    return "backbone.bottom_up" if name.startswith("backbone.bottom_up.") else name.partition(".")[0]
