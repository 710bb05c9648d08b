"""A strict version of detectron2's checkpointer, the checkpoints of a run, and detectors with their weights."""

import contextlib
import copy
import http.client
import logging
import os
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import timm
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim.swa_utils import AveragedModel

from backbones import ConfigError
from backbones.checkpoint_files import read_checkpoint, state_dict_of
from backbones.convert import detect_format
from backbones.errors import check_file, first_of, one_line
from backbones.files import atomic_write, write_text
from projects_vil.checkpoint import pretrained
from projects_vil.checkpoint.metadata import METADATA_KEY, CheckpointMetadata, InputFormat, differing_options
from projects_vil.checkpoint.predictors import copy_classes, is_predictor
from projects_vil.checkpoint.zoo import find_weights, is_zoo_name, zoo_entry
from projects_vil.config import CONFIG_FILE, config_path, head_of, with_overrides
from projects_vil.data import catalog
from projects_vil.modeling import TimmBackbone, TransformerBackbone, build_on_meta
from vil.choices import EXPORT_SUFFIXES

LAST_CHECKPOINT, BEST_CHECKPOINT = "last_checkpoint", "model_best.pth"
PUBLISHED_WEIGHTS = "model.safetensors"
# Keys next to "model" if that has averaged weights: the weights of training, and the number of averaged steps
UNAVERAGED, AVERAGED_STEPS = "unaveraged_model", "averaged_steps"


class Checkpointer(DetectionCheckpointer):
    """detectron2's checkpointer, which raises if the weights do not match the model.

    A checkpoint to start training from must have all weights of the backbone. It may lack the FPN or a head as a whole,
    and its predictors may have other classes: rows of classes with the same name are copied, and the others are
    initialized randomly. The log lists them. Everything else that does not match raises an error. Official checkpoints
    and classifiers of this project are converted for the variant and the options of the model.

    Every saved checkpoint has :class:`~projects_vil.checkpoint.metadata.CheckpointMetadata`.

    Args:
        model: See detectron2's checkpointer.
        save_dir: See detectron2's checkpointer.
        cfg: The config of the model, with its datasets and input format. Without a config, they are not checked and
            not saved.
        complete: Require weights for the whole model, as evaluation and export do. Resuming always requires them.
        averaged: Average of the weights during training. It is saved as ``model``. The weights of training, from which
            training resumes, are saved next to it.
        checkpointables: See detectron2's checkpointer.

    Attributes:
        resumed_from: The checkpoint that training resumed from, or None.
        has_average: Whether that checkpoint has averaged weights.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: str = "",
        *,
        cfg: CfgNode | None = None,
        complete: bool = False,
        averaged: AveragedModel | None = None,
        **checkpointables: Any,
    ) -> None:
        super().__init__(model, save_dir, **checkpointables)
        self.averaged = averaged
        self.has_average = False
        self.cfg = cfg
        self.complete = complete
        self.resumed_from: Path | None = None
        self._resuming = False
        self._contents: dict[str, Any] | None = None
        backbone = getattr(getattr(self.model, "backbone", None), "bottom_up", None)
        self._backbone = backbone if isinstance(backbone, (TransformerBackbone, TimmBackbone)) else None

    def save(self, name: str, **kwargs: Any) -> None:
        """Save a checkpoint with metadata atomically, then write its name to ``last_checkpoint`` unless it is the best.

        Args:
            name: File name without suffix.
            kwargs: More contents.

        Raises:
            ConfigError: If the file cannot be written.
        """
        if not self.save_dir or not self.save_to_disk:
            return
        contents = {"model": self.model.state_dict()}
        if self.averaged is not None:
            average = {"model": self.averaged.module.state_dict(), AVERAGED_STEPS: int(self.averaged.n_averaged)}
            contents = {UNAVERAGED: contents["model"], **average}
        contents |= {key: checkpointable.state_dict() for key, checkpointable in self.checkpointables.items()}
        path = Path(self.save_dir) / f"{name}.pth"
        self.logger.info("Saving checkpoint %sto %s", "and its evaluation " if kwargs.get("finished") else "", path)
        with atomic_write(path) as partial, partial.open("wb") as file:
            torch.save(contents | {METADATA_KEY: self.metadata.to_dict()} | kwargs, file)
        if path.name != BEST_CHECKPOINT:
            write_text(Path(self.save_dir) / LAST_CHECKPOINT, path.name)

    def resume_or_load(self, path: str, *, resume: bool = True) -> dict[str, Any]:
        """Resume from the last checkpoint in ``save_dir``; without one, load the weights of ``path``.

        If ``path`` is empty, a timm backbone that is named with a tag starts from the pretrained weights of this tag.

        Raises:
            ConfigError: See :meth:`load` and :func:`read_last_checkpoint`.
        """
        last = read_last_checkpoint(self.save_dir) if resume else None
        if last is not None:
            self.resumed_from, self._contents = last
            self.complete = True
            self._resuming = bool(self.checkpointables)
            return self.load(str(self.resumed_from))
        if path or self.complete:
            return self.load(path, checkpointables=[])
        backbone = self._backbone
        if not isinstance(backbone, TimmBackbone):
            self.logger.info("Training starts from random weights (MODEL.WEIGHTS is empty)")
        elif "." not in backbone.name:
            tags = first_of(timm.list_pretrained(f"{backbone.name}.*"), 3) or "none"
            self.logger.warning(f"{backbone.variant} starts from random weights: it has no tag (tags in timm: {tags})")
        else:
            self.logger.info(f"Loading timm's pretrained weights {backbone.name} into the backbone")
            self._path = backbone.variant
            self._log_incompatible_keys(self._load_model(pretrained.weights_of_timm(backbone)))
        return {}

    def load(self, path: str, *args, **kwargs) -> dict[str, Any]:
        """Load a checkpoint and return its contents without the weights.

        Raises:
            ConfigError: If the file is missing or unreadable, or if it does not match the model. With ``complete``,
                also if the checkpoint was trained with another input format.
        """
        if not path and self.complete:
            raise ConfigError("MODEL.WEIGHTS is empty. Set it to the checkpoint of a trained detector.")
        if not os.path.exists(path):
            path = find_weights(path)
        if "://" in path:
            try:
                # Keeps a copy, which detectron2 then reads
                self.path_manager.get_local_path(path)
            except (OSError, ValueError, AssertionError, http.client.HTTPException) as error:
                message = f"Cannot download MODEL.WEIGHTS '{path}': {one_line(error)}. Check the URL."
                raise ConfigError(message) from error
        elif path:
            check_file(path, "weights file", key="MODEL.WEIGHTS")
        if path.endswith(EXPORT_SUFFIXES):
            advice = "Run it with 'vil predict', or evaluate it with 'vil export --evaluate'."
            raise ConfigError(f"MODEL.WEIGHTS must be a checkpoint, but '{path}' is an exported model. {advice}")
        self._path = path
        return super().load(path, *args, **kwargs)

    @cached_property
    def metadata(self) -> CheckpointMetadata:
        """Return the metadata of the model. The classes are the datasets', if their number is the model's."""
        known: dict[str, Any] = {}
        if self._backbone is not None:
            known = {"variant": self._backbone.variant, "options": self._backbone.variant_options}
        if self.cfg is not None:
            mean, std = tuple(self.cfg.MODEL.PIXEL_MEAN), tuple(self.cfg.MODEL.PIXEL_STD)
            known["input"] = InputFormat(self.cfg.INPUT.FORMAT, mean, std)
            _, categories = catalog.model_classes(self.cfg)
            if categories:
                known |= {"category_ids": tuple(categories), "classes": tuple(categories.values())}
        return CheckpointMetadata(**known)

    def _load_file(self, filename: str) -> dict[str, Any]:
        contents, self._contents = self._contents or read_checkpoint(filename), None
        state_dict = state_dict_of(contents)
        if not any(name.removeprefix("module.").startswith(pretrained.BACKBONE_PREFIX) for name in state_dict):
            contents = self._convert(contents, state_dict)
        if "model" not in contents:
            known = "a detector or a classifier of this project, or an official checkpoint"
            raise ConfigError(f"'{self._path}' is not a checkpoint of {known}. Use another file.")
        # Loading changes both dicts. A copy keeps the versions of modules.
        return contents | {"model": copy.copy(contents["model"])}

    def _convert(self, contents: dict[str, Any], state_dict: dict[str, Tensor]) -> dict[str, Any]:
        """Convert an official checkpoint or a classifier for the backbone; return any other contents as they are."""
        backbone = self._backbone
        if isinstance(backbone, TimmBackbone) and not any("backbone." in name for name in state_dict):
            return pretrained.weights_of_timm(backbone, state_dict, source=self._path)
        official = detect_format(contents)
        if official is None and not pretrained.is_classifier(state_dict):
            return contents
        if backbone is None:
            text = f"'{self._path}' has weights of a transformer, but the model has another backbone."
            raise ConfigError(f"{text} Use a checkpoint of this model.")
        hint = ""
        try:
            if official is None:
                conversion = pretrained.convert_classifier(contents, backbone.variant, backbone.net)
                self._check_metadata(CheckpointMetadata.from_contents(conversion.contents))
            else:
                hint = " 'vil convert' lists the config keys of a checkpoint."
                conversion = pretrained.convert_official(official, backbone.variant, model_options=backbone.options)
                # The weights are converted for the options of the model.
                conversion.contents[METADATA_KEY] |= {"options": None}
        except ConfigError as error:
            model = f"'{backbone.variant}' (MODEL.TRANSFORMER.VARIANT)"
            raise ConfigError(f"Cannot convert '{self._path}' for {model}: {error}{hint}") from error
        for line in conversion.lines():
            self.logger.info(line)
        return conversion.contents

    def _load_model(self, checkpoint: dict[str, Any]):
        trained, steps = checkpoint.pop(UNAVERAGED, None), checkpoint.pop(AVERAGED_STEPS, 1)
        average = checkpoint["model"] if trained is not None and self._resuming else None
        if average is not None:
            checkpoint["model"] = copy.copy(trained)
        elif trained is not None:
            self.logger.info(f"Using the averaged weights (MODEL.EMA) of {self._path}")
        state_dict, saved = checkpoint["model"], CheckpointMetadata.from_contents(checkpoint)
        for name, value in (*state_dict.items(), *(average or {}).items()):
            if not isinstance(value, Tensor) or not value.isfinite().all():
                advice = "Use an older checkpoint. To resume from an older one, remove this file."
                raise ConfigError(f"'{name}' in '{self._path}' is not a tensor of finite values. {advice}")
        consume_prefix_in_state_dict_if_present(state_dict, "module.")
        self._check_metadata(saved)
        # The one difference between the RetinaNets of mmdetection and detectron2 that no weight shows
        if (checkpoint.get(METADATA_KEY) or {}).get("source") == "LIT mmdetection":
            top_block = getattr(getattr(self.model, "backbone", None), "top_block", None)
            if "backbone.top_block.p7.weight" in state_dict and getattr(top_block, "relu", True):
                self._fail("was trained without a ReLU between P6 and P7 (MODEL.FPN.P7_RELU False)", only_complete=True)
        self._match_classes(state_dict, saved)
        names = set(state_dict)
        incompatible = super()._load_model(checkpoint)
        if incompatible.missing_keys or incompatible.unexpected_keys or incompatible.incorrect_shapes:
            self._check_keys(incompatible, names)
        if not self.complete and all(name.startswith(pretrained.BACKBONE_PREFIX) for name in names):
            self.logger.info("The checkpoint has a backbone only. The FPN and the heads start from random weights.")
            incompatible.missing_keys.clear()
        if average is not None and self.averaged is None:
            self.logger.warning(f"MODEL.EMA.ENABLED is False: dropping the averaged weights of {self._path}")
        elif average is not None:
            self.has_average = True
            self.averaged.module.load_state_dict(average)
            self.averaged.n_averaged.fill_(steps)
        return incompatible

    def _check_keys(self, incompatible: Any, names: set[str]) -> None:
        """Raise a :class:`ConfigError` unless the model may lack the incompatible keys; ``names`` are all names."""
        parts = {_part(name) for name in names} | {"backbone.bottom_up"}
        found = {
            "other shapes": [
                f"{name} has shape {tuple(theirs)} instead of {tuple(ours)}"
                for name, theirs, ours in incompatible.incorrect_shapes
                if self.complete or not is_predictor(name) or theirs[1:] != ours[1:]
            ],
            "unexpected names": [name for name in incompatible.unexpected_keys if "pixel_" not in name],
            "missing parameters": [
                name
                for name in incompatible.missing_keys
                if name not in names and (self.complete or _part(name) in parts)
            ],
        }
        if any(found.values()):
            listed = [f"{len(names)} {what} ({first_of(names, 3)})" for what, names in found.items() if names]
            self._fail(f"does not match {self.metadata.variant or 'the model'}: {'; '.join(listed)}")

    def _check_metadata(self, saved: CheckpointMetadata) -> None:
        ours = self.metadata
        if None not in (saved.variant, ours.variant) and saved.variant != ours.variant:
            self._fail(f"is for {saved.variant}, but the model is {ours.variant} (MODEL.TRANSFORMER.VARIANT)")
        # Not all options change the shape of a parameter.
        if None not in (ours.variant, ours.options, saved.options) and saved.options != ours.options:
            differ = differing_options(ours.variant, saved.options, ours.options).items()
            if text := ", ".join(f"{key} {value} (the model has {own})" for key, (value, own) in differ):
                self._fail(f"was trained with {text}", only_complete=True)
        if None not in (saved.input, ours.input) and not saved.input.matches(ours.input):
            keys = "INPUT.FORMAT, MODEL.PIXEL_MEAN, MODEL.PIXEL_STD"
            self._fail(f"was trained on {saved.input}, but the config has {ours.input} ({keys})", only_complete=True)

    def _fail(self, reason: str, *, only_complete: bool = False) -> None:
        """Raise a :class:`ConfigError`. With ``only_complete``, an incomplete checkpoint gives a warning instead."""
        if not self.complete and only_complete:
            self.logger.warning(f"{self._path} {reason}")
            return
        config = Path(self._path).with_name(CONFIG_FILE)
        advice = f"the config of its run, '{config}'" if config.is_file() else "the config of this checkpoint"
        raise ConfigError(f"'{self._path}' {reason}. Use {advice}, or another checkpoint.")

    def _match_classes(self, state_dict: dict[str, Tensor], saved: CheckpointMetadata) -> None:
        """Reorder the rows of predictors by class name, if both sides have names."""
        ours, theirs = self.metadata.classes, saved.classes
        if ours is None or theirs is None or ours == theirs or not any(map(is_predictor, state_dict)):
            return
        differ = f"'{self._path}' was trained on {catalog.describe_classes(theirs)}, but the datasets have "
        differ += catalog.describe_classes(ours)
        if self._resuming:
            raise ConfigError(f"{differ}. To start a new run from it, set MODEL.WEIGHTS and leave out --resume.")
        if self.complete:
            matched = dict(enumerate(catalog.match_all_classes(ours, theirs, differ=differ)))
            if any(ours[index] != theirs[other] for index, other in matched.items()):
                return
        else:
            matched = catalog.match_classes(ours, theirs)
        copied = copy_classes(self.model.state_dict(), state_dict, matched, numbers=(len(ours), len(theirs)))
        if copied:
            new = [name for index, name in enumerate(ours) if index not in matched]
            self.logger.info(
                f"classes matched by name: {len(matched)} of {len(ours)} ({', '.join(ours[i] for i in matched)}) in "
                f"{', '.join(copied)}" + (f"; randomly initialized: {', '.join(new)}" if new else "")
            )
        state_dict.update(copied)


def check_weights(cfg: CfgNode, path: str, *, complete: bool = False, model: nn.Module | None = None) -> None:
    """Check that a local checkpoint matches the model of a config, without memory for the model; nothing is logged.

    Args:
        cfg: The config of the model.
        path: The checkpoint. A URL is not checked.
        complete: See :class:`Checkpointer`.
        model: The result of :func:`build_on_meta`, if it has been built already.

    Raises:
        ConfigError: See :meth:`Checkpointer.load`.
    """
    if "://" in path:
        return
    checkpointer = Checkpointer(model or build_on_meta(cfg), cfg=cfg, complete=complete)
    checkpointer.logger = logging.Logger(__name__, level=logging.CRITICAL + 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*meta parameter")
        checkpointer.load(path)


def load_detector(
    cfg: CfgNode, weights: str | Path, *, complete: bool = True, as_datasets: bool = True
) -> tuple[nn.Module, catalog.Categories]:
    """Build the model of a config in eval mode, load a checkpoint into it, and return both the model and its classes.

    Args:
        cfg: The config of the model, with its device.
        weights: The checkpoint. It may be empty if ``complete`` is False.
        complete: Require weights for the whole model.
        as_datasets: Reorder the classes to match the config's datasets; a checkpoint with other classes raises. If
            False, the classes are the checkpoint's own. In both cases the classes of a checkpoint without metadata are
            looked up in the datasets.

    Raises:
        ConfigError: If the checkpoint is missing or does not match.
    """
    datasets = (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN)
    if not as_datasets:
        cfg = with_overrides(cfg, {"DATASETS.TEST": (), "DATASETS.TRAIN": ()})
    model = build_model(cfg)
    checkpointer = Checkpointer(model, cfg=cfg, complete=complete)
    saved = CheckpointMetadata.from_contents(checkpointer.load(str(weights)))
    names, ids, ours = saved.classes, saved.category_ids, checkpointer.metadata.classes
    if names and ours and len(catalog.match_classes(ours, names)) == len(ours) == len(names):
        # The checkpointer has reordered the rows.
        ids = ids and tuple(ids[names.index(name)] for name in ours)
        names = ours
    if names is None or ids is None:
        with contextlib.suppress(ConfigError):
            catalog.register_datasets(cfg)
    number = cfg.MODEL[head_of(cfg)].NUM_CLASSES
    return model.eval(), catalog.known_categories(names, ids, number=number, datasets=datasets)


def _part(name: str) -> str:
    """Return the part of a detector that a parameter belongs to: ``backbone.bottom_up``, ``backbone``, or a head."""
    return "backbone.bottom_up" if name.startswith("backbone.bottom_up.") else name.partition(".")[0]


# -- the checkpoints of a run -----------------------------------------------------------------------


def checkpoints_of(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a run, newest first, without the best checkpoint."""
    files = [path for path in Path(folder).glob("model_*.pth") if path.is_file() and path.name != BEST_CHECKPOINT]
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def last_checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a run, the last one first, without the best checkpoint.

    The last one is the file that ``last_checkpoint`` names. If it names none, ``model_final.pth`` and the checkpoint
    with the most iterations come first, because copying a folder changes modification times.
    """
    files, tag = checkpoints_of(folder), Path(folder) / LAST_CHECKPOINT
    name = tag.read_text(errors="replace").strip() if tag.is_file() else ""
    if any(path.name == name for path in files):
        files.sort(key=lambda path: path.name != name)
    elif len(files) > 1:
        logging.getLogger(__name__).warning(
            "%s is missing or names no checkpoint in its folder (%r). The newest one is used.", tag, name[:80]
        )
        # model_final.pth is sorted before numbered checkpoints.
        files.sort(key=lambda path: path.name, reverse=True)
    return files


def weights_of(run: str | Path) -> Path | None:
    """Return the best checkpoint of a run, or else its last one, or the weights of a published folder, or None."""
    best, published = Path(run) / BEST_CHECKPOINT, Path(run) / PUBLISHED_WEIGHTS
    if best.is_file():
        return best
    return next(iter(last_checkpoints(run)), published if published.is_file() else None)


def find_model(source: Path, weights: str | os.PathLike | None = None) -> tuple[Path, str | os.PathLike | None]:
    """Return the config and the weights of a detector.

    Args:
        source: As for :meth:`projects_vil.Detector.load`, except for exported files.
        weights: Another checkpoint.

    Returns:
        The config file and the weights. The weights are None if the config sets them.

    Raises:
        ConfigError: If there is no config, or if a run has no weights.
    """
    if not source.exists():
        if is_zoo_name(source):
            entry = zoo_entry(str(source))
            if entry.config is None:
                what, use = f"weights of {entry.variant} ({entry.group['title']})", f"'vil train --weights {source}'"
                raise ConfigError(f"'{source}' is not a detector, but {what}. Use it with {use}.")
            return config_path(entry.config), weights or str(source)
        hub = " To load from the Hugging Face Hub, use Detector.from_pretrained." * (len(source.parts) == 2)
        choices = f"a run, a checkpoint with {CONFIG_FILE} in its folder, an exported file or a name of the model zoo"
        raise ConfigError(f"Model '{source}' does not exist. Use {choices}.{hub}")
    if source.name.endswith(EXPORT_SUFFIXES):
        raise ConfigError(f"'{source}' is an exported file. Give its run, or use 'vil export RUN --evaluate'.")
    folder = source if source.is_dir() else source.parent
    if source.suffix in (".yaml", ".yml") and source.name != CONFIG_FILE:
        return source, weights
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"'{source}' needs a {CONFIG_FILE}. Use a run's output directory, or a config and weights.")
    if source.is_file() and source.name != CONFIG_FILE:
        return folder / CONFIG_FILE, weights or source
    # MODEL.WEIGHTS in the config of a run are the initial weights.
    is_run = source.is_dir() or any((folder / name).is_file() for name in (LAST_CHECKPOINT, PUBLISHED_WEIGHTS))
    weights = weights or (weights_of(folder) if is_run else None)
    if is_run and weights is None:
        raise ConfigError(f"'{folder}' has no weights. It needs a checkpoint (model_*.pth) or {PUBLISHED_WEIGHTS}.")
    return folder / CONFIG_FILE, weights


def read_last_checkpoint(folder: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Read the checkpoint to resume from: the last complete one. The log lists skipped checkpoints.

    Args:
        folder: Output directory of a run.

    Returns:
        The path of the checkpoint and its contents; None if the folder has no checkpoint.

    Raises:
        ConfigError: If no checkpoint in the folder is complete, or if the only one is missing.
    """
    candidates, tag = last_checkpoints(folder), Path(folder) / LAST_CHECKPOINT
    for path in candidates:
        try:
            contents = read_checkpoint(path)
        except ConfigError as error:
            logging.getLogger(__name__).warning("skipped a checkpoint: %s", error)
            continue
        trainer = contents.get("trainer")
        if isinstance(trainer, dict) and type(trainer.get("iteration")) is int:
            return path, contents
        logging.getLogger(__name__).warning("skipped a checkpoint: '%s' has no training state to resume from.", path)
    if candidates:
        text = f"Cannot resume from any of the {len(candidates)} checkpoints in '{folder}'."
        raise ConfigError(f"{text} Remove them to start again, or choose another OUTPUT_DIR.")
    if tag.is_file():
        raise ConfigError(f"The checkpoint in '{tag}' does not exist. Restore it, or remove '{tag}' to start again.")
    return None


def remove_old(folder: str | Path, *, keep: int) -> None:
    """Remove old numbered checkpoints (``model_0000999.pth``), except for the ``keep`` newest ones, at least one."""
    numbered = [path for path in checkpoints_of(folder) if path.stem.removeprefix("model_").isdecimal()]
    for path in numbered[max(keep, 1) :]:
        path.unlink(missing_ok=True)


def remove_run(folder: str | Path) -> None:
    """Remove all checkpoints of an earlier run, so that the next run cannot resume from them."""
    for path in (Path(folder) / LAST_CHECKPOINT, *checkpoints_of(folder), Path(folder) / BEST_CHECKPOINT):
        path.unlink(missing_ok=True)
