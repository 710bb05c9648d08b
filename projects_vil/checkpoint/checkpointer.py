"""detectron2's checkpointer made strict, and detectors with the weights of a file."""

import copy
import dataclasses
import functools
import http.client
import logging
import warnings
from pathlib import Path
from typing import Any

import timm
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write, read_checkpoint, state_dict_of
from backbones.convert import detect_format
from backbones.errors import check_file
from projects_vil.checkpoint.categories import (
    Categories,
    copy_classes,
    dataset_categories,
    is_predictor,
    known_categories,
)
from projects_vil.checkpoint.metadata import METADATA_KEY, CheckpointMetadata, differing_options, input_format
from projects_vil.checkpoint.pretrained import (
    BACKBONE_PREFIX,
    backbone_of_classifier,
    convert_official,
    is_classifier,
    named_variant,
    weights_of_timm,
)
from projects_vil.checkpoint.storage import read_last_checkpoint, tag_checkpoint
from projects_vil.checkpoint.zoo import find_weights
from projects_vil.config import CONFIG_FILE, first_of, is_segmentor, number_of_classes, one_line, with_overrides
from projects_vil.data import describe_classes, match_all_classes, match_classes
from projects_vil.modeling import TimmBackbone, TransformerBackbone, build_on_meta

# With "model" for averaged weights: the weights of training, and the number of averaged steps.
UNAVERAGED, AVERAGED_STEPS = "unaveraged_model", "averaged_steps"
# Those of FORMATS in projects_vil/export/formats.py, which this package cannot import.
_EXPORT_SUFFIXES = (".ts", ".onnx", ".pt2", ".xml")


class Checkpointer(DetectionCheckpointer):
    """detectron2's checkpointer made strict: a parameter stays random only if the file lacks its whole part.

    A file to start training from must have all weights of the backbone. It may lack FPN or heads as a whole, and its
    predictors may have other classes: rows of classes with the same name are copied where both sides have names, and
    other rows stay random. All this is logged; anything else that does not match raises. Official checkpoints and
    classifiers of this project are converted for the model's variant and options.

    Every saved file has metadata (:class:`~projects_vil.checkpoint.metadata.CheckpointMetadata`).

    Args:
        model: see detectron2's.
        save_dir: see detectron2's.
        cfg: the model's config, for its datasets and input format; without it neither is compared or saved.
        complete: whether the file must have weights for the whole model, as evaluation and export require. A resume
            always requires this.
        averaged: the average of the model's weights during training. It is saved as ``model``, which every reader of
            checkpoints uses, next to the weights of training, which a resume uses.
        checkpointables: see detectron2's.

    Attributes:
        resumed_from: the checkpoint that training resumed from, or None.
        has_average: whether that checkpoint has averaged weights.
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

    def save(self, name: str, *, tag: bool = True, **kwargs) -> None:
        """Save as detectron2's does, with metadata, and atomically; ``last_checkpoint`` changes last.

        Args:
            tag: whether ``last_checkpoint`` names the file.

        Raises:
            ConfigError: if the file cannot be written.
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
        if tag:
            tag_checkpoint(self.save_dir, path.name)

    def resume_or_load(self, path: str, *, resume: bool = True) -> dict[str, Any]:
        """Resume from the last checkpoint of ``save_dir``, which is read once, or else load the weights of ``path``.

        A model of timm that is named with a tag starts from timm's weights of this tag where ``path`` is empty.

        Raises:
            ConfigError: see :meth:`load` and :func:`~projects_vil.checkpoint.storage.read_last_checkpoint`.
        """
        found, backbone = read_last_checkpoint(self.save_dir) if resume else None, self._backbone
        if found is None and not path and not self.complete and isinstance(backbone, TimmBackbone):
            self._load_pretrained(backbone)
            return {}
        if found is None:
            return self.load(path, checkpointables=[])
        self.resumed_from, self._contents = found
        self.complete = True
        self._resuming = bool(self.checkpointables)
        return self.load(str(self.resumed_from))

    def load(self, path: str, *args, **kwargs) -> dict[str, Any]:
        """Load as detectron2's does.

        Raises:
            ConfigError: if the file is missing or unreadable, if it is for another variant or model, or, where it must
                fill the whole model, if it was trained with another input format.
        """
        if path:
            path = find_weights(path)
            check_weights_file(path)
            if "://" in path:
                self._download(path)
        elif self.complete:
            raise ConfigError("MODEL.WEIGHTS is empty: name the checkpoint of a trained detector")
        self._path = path
        return super().load(path, *args, **kwargs)

    def _download(self, url: str) -> None:
        """Have the path manager keep a copy, which detectron2 then loads."""
        try:
            self.path_manager.get_local_path(url)
        except (OSError, ValueError, AssertionError, http.client.HTTPException) as error:
            raise ConfigError(f"MODEL.WEIGHTS {url} cannot be downloaded: {one_line(error)}") from error

    @functools.cached_property
    def metadata(self) -> CheckpointMetadata:
        """Return the model's metadata; its classes are those of a dataset with the model's number of classes."""
        backbone, known = self._backbone, {}
        if backbone is not None:
            known = {"variant": backbone.variant, "options": backbone.variant_options}
        if self.cfg is not None:
            names = (*self.cfg.DATASETS.TRAIN, *self.cfg.DATASETS.TEST)
            known["input"] = input_format(self.cfg)
            categories = dataset_categories(names, number_of_classes(self.cfg)[1], stuff=is_segmentor(self.cfg))
            if categories is not None:
                known |= {"classes": categories.names, "category_ids": categories.ids}
        return CheckpointMetadata(**known)

    @property
    def _backbone(self) -> TransformerBackbone | TimmBackbone | None:
        backbone = getattr(getattr(self.model, "backbone", None), "bottom_up", None)
        return backbone if isinstance(backbone, (TransformerBackbone, TimmBackbone)) else None

    def _load_file(self, filename: str) -> dict[str, Any]:
        # A resume has read it.
        contents, self._contents = self._contents or read_checkpoint(filename), None
        backbone, state_dict = self._backbone, state_dict_of(contents)
        if isinstance(backbone, TimmBackbone) and not any("backbone." in name for name in state_dict):
            return weights_of_timm(backbone, state_dict, source=self._path)
        official = detect_format(contents)
        if official is None and not is_classifier(state_dict):
            if "model" not in contents:
                raise ConfigError(f"{self._path} is not a checkpoint of detectron2, of a classifier or an official one")
            # Loading changes both dicts, which may be the caller's. A copy keeps the versions of modules.
            return contents | {"model": copy.copy(contents["model"])}
        if backbone is None:
            raise ConfigError(f"{self._path} has weights of a backbone that the model does not have")
        try:
            if official is None:
                contents, lines = self._convert_classifier(contents, backbone)
            else:
                converted = convert_official(official, backbone.variant, model_options=backbone.options)
                # The weights are converted for the model's options: the file itself stores none.
                converted.contents[METADATA_KEY] |= {"options": None}
                contents, lines = converted.contents, converted.lines()
        except ConfigError as error:
            hint = "" if official is None else "; tools/convert_checkpoint.py reports the config keys that it needs"
            model = f"{backbone.variant} (MODEL.TRANSFORMER.VARIANT)"
            raise ConfigError(f"{self._path} cannot be converted for {model}: {error}{hint}") from error
        for line in lines:
            self.logger.info(line)
        return contents

    def _convert_classifier(self, contents: dict[str, Any], backbone: TransformerBackbone) -> tuple[dict, list[str]]:
        saved = CheckpointMetadata.from_contents(contents)
        saved = dataclasses.replace(saved, variant=saved.variant or named_variant(contents), classes=None)
        if saved.variant == backbone.variant.removesuffix("_seg"):
            saved = dataclasses.replace(saved, variant=backbone.variant)
        self._check_metadata(saved)
        weights, lines = backbone_of_classifier(state_dict_of(contents), backbone.variant, backbone.net)
        model = {f"{BACKBONE_PREFIX}{name}": tensor for name, tensor in weights.items()}
        return {"model": model, METADATA_KEY: saved.to_dict()}, lines

    def _load_pretrained(self, backbone: TimmBackbone) -> None:
        """Load timm's weights of the model's tag, which are downloaded once; without a tag all weights stay random."""
        if "." not in backbone.name:
            tags = first_of(timm.list_pretrained(f"{backbone.name}.*"), 3) or "none"
            self.logger.warning(f"{backbone.variant} starts from random weights: it has no tag (timm has {tags})")
            return
        self.logger.info(f"the backbone starts from timm's weights {backbone.name}")
        self._path = backbone.variant
        self._log_incompatible_keys(self._load_model(weights_of_timm(backbone)))

    def _load_model(self, checkpoint: dict[str, Any]):
        trained, steps = checkpoint.pop(UNAVERAGED, None), checkpoint.pop(AVERAGED_STEPS, 1)
        average = checkpoint["model"] if trained is not None and self._resuming else None
        if average is not None:
            checkpoint["model"] = copy.copy(trained)
        elif trained is not None:
            self.logger.info(f"{self._path} has averaged weights (MODEL.EMA): using them")
        incompatible = self._load_weights(checkpoint)
        self.has_average = average is not None and self.averaged is not None
        if self.has_average:
            self._check_values(average)
            self.averaged.module.load_state_dict(average)
            self.averaged.n_averaged.fill_(steps)
        elif average is not None:
            self.logger.warning(f"{self._path} has averaged weights, and MODEL.EMA.ENABLED is False: dropping them")
        return incompatible

    def _check_values(self, state_dict: dict[str, Tensor]) -> None:
        for name, value in state_dict.items():
            if not isinstance(value, Tensor) or not value.isfinite().all():
                raise ConfigError(
                    f"{self._path}: {name} is not a tensor of finite values: use an older checkpoint, or, to resume "
                    "from one, remove this file"
                )

    def _load_weights(self, checkpoint: dict[str, Any]):
        saved, state_dict = CheckpointMetadata.from_contents(checkpoint), checkpoint["model"]
        self._check_values(state_dict)
        nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, "module.")
        self._check_metadata(saved)
        if (checkpoint.get(METADATA_KEY) or {}).get("source") == "LIT mmdetection":
            self._check_p7(state_dict)
        self._match_classes(state_dict, saved)
        parts = {_part(name) for name in state_dict} | {"backbone.bottom_up"}
        incompatible = super()._load_model(checkpoint)
        shapes, predictors = [], set()
        for name, theirs, ours in incompatible.incorrect_shapes:
            if self.complete or not is_predictor(name) or theirs[1:] != ours[1:]:
                shapes.append(f"{name} has shape {tuple(theirs)} in it and {tuple(ours)} in the model")
            predictors.add(name)
        unexpected = [name for name in incompatible.unexpected_keys if "pixel_" not in name]
        missing = [
            name
            for name in incompatible.missing_keys
            if name not in predictors and (self.complete or _part(name) in parts)
        ]
        if shapes or unexpected or missing:
            found = {"other shapes": shapes, "unexpected names": unexpected, "missing parameters": missing}
            listed = [f"{len(names)} {what} ({first_of(names, 3)})" for what, names in found.items() if names]
            self._fail(f"does not match {self.metadata.variant or 'the model'}: {'; '.join(listed)}")
        return incompatible

    def _check_metadata(self, saved: CheckpointMetadata) -> None:
        ours = self.metadata
        if None not in (saved.variant, ours.variant) and saved.variant != ours.variant:
            self._fail(f"is for {saved.variant}, and the model is {ours.variant} (MODEL.TRANSFORMER.VARIANT)")
        # Shapes do not show all options.
        if None not in (ours.variant, ours.options, saved.options):
            differ = differing_options(ours.variant, saved.options, ours.options).items()
            if text := ", ".join(f"{key} {value} where the model has {own}" for key, (value, own) in differ):
                self._fail(f"was trained with {text}", only_complete=True)
        if None not in (saved.input, ours.input) and not saved.input.matches(ours.input):
            keys = "INPUT.FORMAT, MODEL.PIXEL_MEAN, MODEL.PIXEL_STD"
            self._fail(f"was trained on {saved.input}, and the config has {ours.input} ({keys})", only_complete=True)

    def _check_p7(self, state_dict: dict[str, Tensor]) -> None:
        """Check the one difference between mmdetection's RetinaNet and detectron2's that no weight shows."""
        top_block = getattr(getattr(self.model, "backbone", None), "top_block", None)
        if "backbone.top_block.p7.weight" in state_dict and getattr(top_block, "relu", True):
            self._fail("was trained without a ReLU between P6 and P7 (MODEL.FPN.P7_RELU False)", only_complete=True)

    def _fail(self, reason: str, *, only_complete: bool = False) -> None:
        """Raise a :class:`ConfigError`, or log a warning if the file need not have the whole model."""
        config = Path(self._path).with_name(CONFIG_FILE)
        if self.complete or not only_complete:
            raise ConfigError(f"{self._path} {reason}{f'; its run has {config}' if config.is_file() else ''}")
        self.logger.warning(f"{self._path} {reason}")

    def _match_classes(self, state_dict: dict[str, Tensor], saved: CheckpointMetadata) -> None:
        """Reorder the rows of predictors by class name, where both sides have names."""
        ours, theirs = self.metadata.classes, saved.classes
        if ours is None or theirs is None or ours == theirs or not any(map(is_predictor, state_dict)):
            return
        differ = (
            f"{self._path} was trained for {describe_classes(theirs)}, and the datasets have {describe_classes(ours)}"
        )
        if self._resuming:
            raise ConfigError(f"{differ}: it cannot be resumed, but MODEL.WEIGHTS may start from it")
        if self.complete:
            matched = dict(enumerate(match_all_classes(ours, theirs, differ=differ)))
            if any(ours[index] != theirs[other] for index, other in matched.items()):
                return
        else:
            matched = match_classes(ours, theirs)
        copied = copy_classes(self.model.state_dict(), state_dict, matched, numbers=(len(ours), len(theirs)))
        if copied:
            new = [name for index, name in enumerate(ours) if index not in matched]
            self.logger.info(
                f"classes matched by name: {len(matched)} of {len(ours)} ({', '.join(ours[i] for i in matched)}) in "
                f"{', '.join(copied)}" + (f"; randomly initialized: {', '.join(new)}" if new else "")
            )
        state_dict.update(copied)


def check_weights_file(path: str) -> None:
    """Raise a :class:`ConfigError` unless a local weights file exists; URLs that detectron2 downloads pass."""
    if "://" in path:
        return
    check_file(path, "weights file", key="MODEL.WEIGHTS")
    if path.endswith(_EXPORT_SUFFIXES):
        raise ConfigError(
            f"{path} is an exported model, and MODEL.WEIGHTS needs a checkpoint: tools/predict.py takes exported "
            "models, and tools/export_model.py --evaluate evaluates them"
        )


def check_weights(cfg: CfgNode, path: str, *, complete: bool = False, model: nn.Module | None = None) -> None:
    """Check that a local file fits the model of ``cfg``, built on the meta device; nothing is logged.

    Args:
        complete: see :class:`Checkpointer`.
        model: the result of :func:`build_on_meta`, if it has been built already.

    Raises:
        ConfigError: see :meth:`Checkpointer.load`.
    """
    if "://" in path:
        return
    checkpointer = Checkpointer(model or build_on_meta(cfg), cfg=cfg, complete=complete)
    checkpointer.logger = logging.Logger(__name__, level=logging.CRITICAL + 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*meta parameter")
        checkpointer.load(path)


def build_detector(cfg: CfgNode, weights: str | Path) -> nn.Module:
    """Build the model of ``cfg`` with the weights of a file, on the CPU and in eval mode; see :func:`load_detector`."""
    return load_detector(cfg, weights)[0]


def load_detector(
    cfg: CfgNode,
    weights: str | Path,
    *,
    device: str | torch.device = "cpu",
    complete: bool = True,
    as_datasets: bool = True,
) -> tuple[nn.Module, Categories]:
    """Build the model of ``cfg`` with the weights of a file, in eval mode, and return its categories as well.

    Args:
        cfg: the model's config; ``MODEL.DEVICE`` is not used.
        weights: a checkpoint; may be empty where the model need not be complete.
        device: the device that the model is moved to.
        complete: whether the file must have weights for the whole model.
        as_datasets: whether classes follow the config's datasets: the model's rows are reordered to match them, and a
            file with other classes raises. Otherwise the classes are the file's own. Those of a file without metadata
            are looked up in the datasets in both cases.

    Raises:
        ConfigError: if the file is missing or does not fit.
    """
    datasets = (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN)
    values = {} if as_datasets else {"DATASETS.TEST": (), "DATASETS.TRAIN": ()}
    cfg = with_overrides(cfg, values | {"MODEL.DEVICE": str(device)})
    model = build_model(cfg)
    checkpointer = Checkpointer(model, cfg=cfg, complete=complete)
    saved = CheckpointMetadata.from_contents(checkpointer.load(str(weights)))
    names, ids, ours = saved.classes, saved.category_ids, checkpointer.metadata.classes
    if names and ours and len(match_classes(ours, names)) == len(ours) == len(names):
        # The checkpointer has reordered the rows.
        ids = ids and tuple(ids[names.index(name)] for name in ours)
        names = ours
    _, number = number_of_classes(cfg)
    return model.eval(), known_categories(names, ids, number=number, datasets=datasets)


def _part(name: str) -> str:
    """Return the part of a detector that a parameter belongs to: ``backbone.bottom_up``, ``backbone``, or a head."""
    return "backbone.bottom_up" if name.startswith("backbone.bottom_up.") else name.partition(".")[0]
