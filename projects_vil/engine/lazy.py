"""Training and evaluation with a LazyConfig, as in configs/lazy/. The trainer is the one for YAML configs."""

import functools
import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode, LazyConfig, instantiate
from detectron2.evaluation import inference_on_dataset, print_csv_format
from detectron2.solver import LRMultiplier
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from backbones import ConfigError
from backbones.errors import check_file, closest
from projects_vil import data
from projects_vil.config import config_items, default_config, one_line
from projects_vil.engine.checks import check_setup
from projects_vil.engine.launch import Processes, launch
from projects_vil.engine.train import lock_output_dir, run_evaluation, run_training
from projects_vil.engine.trainer import Trainer, report_results, share_statistics
from projects_vil.evaluation import match_to_dataset
from projects_vil.solver import clip_full_model

_PARTS = ("model", "optimizer", "lr_multiplier", "dataloader", "train")
# Keys below `train` in a LazyConfig, and the corresponding keys of a YAML config.
_OPTIONS = {
    "output_dir": "OUTPUT_DIR",
    "overwrite_output_dir": "OVERWRITE_OUTPUT_DIR",
    "init_checkpoint": "MODEL.WEIGHTS",
    "max_iter": "SOLVER.MAX_ITER",
    "seed": "SEED",
    "device": "MODEL.DEVICE",
    "cudnn_benchmark": "CUDNN_BENCHMARK",
    "amp.enabled": "SOLVER.AMP.ENABLED",
    "amp.dtype": "SOLVER.AMP.DTYPE",
    "gradient_accumulation_steps": "SOLVER.GRADIENT_ACCUMULATION_STEPS",
    "max_nonfinite_steps": "SOLVER.MAX_NONFINITE_STEPS",
    "ema.enabled": "MODEL.EMA.ENABLED",
    "ema.decay": "MODEL.EMA.DECAY",
    "checkpointer.period": "SOLVER.CHECKPOINT_PERIOD",
    "checkpointer.max_to_keep": "SOLVER.CHECKPOINT_MAX_TO_KEEP",
    "eval_period": "TEST.EVAL_PERIOD",
    "best_metric": "TEST.BEST_METRIC",
    "early_stopping_patience": "SOLVER.EARLY_STOPPING_PATIENCE",
    "num_visualized_images": "TEST.NUM_VISUALIZED_IMAGES",
    "feature_redraw_period": "MODEL.TRANSFORMER.FEATURE_REDRAW_PERIOD",
    "random_shift_fraction": "MODEL.TRANSFORMER.RANDOM_SHIFT_FRACTION",
}
_INVALID = (TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError, OmegaConfBaseException)


def run_lazy_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    processes: Processes,
    eval_only: bool = False,
    resume: bool = False,
) -> None:
    """Check a LazyConfig, then train or evaluate in all processes. The check takes about a second.

    Args:
        path: Path of the config. Each process reads it again, because a LazyConfig may contain functions.
        overrides: ``key=value``, or ``+key=value`` to add a key.
        processes: Processes of the run.
        eval_only: Evaluate instead of training.
        resume: Continue from the last checkpoint in the output directory.

    Raises:
        ConfigError: For a mistake in the config, in the overrides, or in a file that they name.
    """
    cfg = load_lazy_config(path, overrides)
    device = str(cfg.train.device)
    processes.check(device)
    with torch.device("meta"):
        model = _instantiate(cfg.model, "model")
        if not eval_only:
            build_lazy_optimizer(cfg, model)  # Raises an error if a pattern matches no parameter.
    options = lazy_options(cfg, model)
    _instantiate(cfg.lr_multiplier, "lr_multiplier")
    data.register_datasets(options)
    check_setup(options, processes=processes.world_size, eval_only=eval_only, resume=resume, model=model)
    for split in ("train", "test"):
        given = cfg.dataloader[split].mapper.image_format
        if given != model.input_format:
            raise ConfigError(
                f"model.input_format is '{model.input_format}', but dataloader.{split}.mapper.image_format is "
                f"'{given}'. Set both to the same format."
            )
    if len(options.DATASETS.TEST) != 1:
        raise ConfigError(f"dataloader.test.dataset.names is {options.DATASETS.TEST}. It must have one dataset.")
    arguments = str(path), tuple(overrides), eval_only, resume
    launch(_run, arguments, processes, output_dir=options.OUTPUT_DIR, device=device)


def load_lazy_config(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Load a LazyConfig and apply overrides in Hydra's syntax.

    Args:
        path: Path of the config.
        overrides: ``key=value``, or ``+key=value`` to add a key.

    Raises:
        ConfigError: If the file is missing, raises an exception or lacks a section, or if an override is not
            ``key=value`` or has an unknown key.
    """
    check_file(path, "config file")
    try:
        cfg = LazyConfig.load(str(path))
    except Exception as error:  # A config is a Python program, so it may raise any exception.
        raise ConfigError(f"Cannot load the LazyConfig '{path}': {_reason(error)}. Fix the file.") from error
    if not isinstance(cfg, DictConfig) or not all(isinstance(cfg.get(part), DictConfig) for part in _PARTS):
        raise ConfigError(f"'{path}' is not a LazyConfig for training. It must define {', '.join(_PARTS)}.")
    known = {key for key, _ in config_items(OmegaConf.to_container(cfg), lists=True)}
    for override in overrides:
        key, separator, _ = override.partition("=")
        if not separator:
            raise ConfigError(f"The override {override!r} has no '='. Write key=value.")
        if not key.startswith("+") and key.replace("[", ".").replace("]", "") not in known:
            hint = closest(key, known) or "."
            raise ConfigError(f"Config key '{key}' does not exist{hint} Write +{key}=VALUE to add it.")
    try:
        return LazyConfig.apply_overrides(cfg, list(overrides))
    except Exception as error:  # Hydra's parser raises its own exceptions.
        raise ConfigError(
            f"Cannot apply the overrides '{' '.join(overrides)}': {_reason(error)}. Fix their values."
        ) from error


def load_records(
    names: Sequence[str],
    *,
    train: bool,
    num_classes: int,
    masks: bool = False,
    filter_empty: bool = True,
    check: str = "error",
    classes_of: Sequence[str] = (),
) -> Sequence[dict[str, Any]]:
    """Return the records of detection datasets for the data loaders of a LazyConfig.

    All processes of the run must call this function.

    Args:
        names: Names of the datasets.
        train: Whether the datasets are used for training.
        num_classes: Number of classes of the model.
        masks: Whether the model predicts masks.
        filter_empty: Whether to skip images without annotations in training.
        check: Value of ``DATASETS.CHECK``.
        classes_of: Names of the training datasets. Used only if ``train`` is False.

    Raises:
        ConfigError: See :func:`projects_vil.data.load_dataset`.
    """
    cfg = default_config()
    cfg.MODEL.META_ARCHITECTURE = "GeneralizedRCNN"
    cfg.MODEL.ROI_HEADS.NUM_CLASSES, cfg.MODEL.MASK_ON = num_classes, masks
    cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS = filter_empty
    cfg.DATASETS.CHECK = check
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (tuple(names), ()) if train else (tuple(classes_of), tuple(names))
    data.read_records(cfg, names, train=train)
    return data.load_dataset(cfg, list(names), train=train)


def lazy_options(cfg: DictConfig, model: nn.Module) -> CfgNode:
    """Return a YAML config with the options that the trainer reads from a LazyConfig, its model and its datasets.

    Args:
        cfg: The LazyConfig.
        model: The model of ``cfg``. It may be on the meta device.

    Raises:
        ConfigError: If an option of ``cfg.train`` has the wrong type.
    """
    options = default_config()
    for name, key in _OPTIONS.items():
        value = OmegaConf.select(cfg.train, name)
        if value is not None:
            try:
                options.merge_from_list([key, value])
            except ValueError as error:
                raise ConfigError(f"train.{name} is {value!r}: {one_line(error).rstrip('.')}. Correct it.") from error
    options.MODEL.META_ARCHITECTURE = type(model).__name__
    options.MODEL.TRANSFORMER.VARIANT = getattr(model.backbone.bottom_up, "variant", "")
    if hasattr(model, "roi_heads"):
        options.MODEL.ROI_HEADS.NUM_CLASSES = model.roi_heads.num_classes
        options.MODEL.MASK_ON = model.roi_heads.mask_on
    else:
        options.MODEL.RETINANET.NUM_CLASSES = model.num_classes
    options.MODEL.PIXEL_MEAN, options.MODEL.PIXEL_STD = list(cfg.model.pixel_mean), list(cfg.model.pixel_std)
    options.INPUT.FORMAT = model.input_format
    options.SOLVER.IMS_PER_BATCH = cfg.dataloader.train.total_batch_size
    options.SOLVER.WARMUP_ITERS = 0
    options.DATASETS.TRAIN = tuple(cfg.dataloader.train.dataset.names)
    options.DATASETS.TEST = tuple(cfg.dataloader.test.dataset.names)
    options.DATASETS.COCO = OmegaConf.to_container(cfg.dataloader.coco)
    options.freeze()
    return options


def build_lazy_optimizer(cfg: DictConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer of a LazyConfig, which clips gradients to ``train.clip_norm``.

    Args:
        cfg: The LazyConfig.
        model: The model to optimize.

    Raises:
        ConfigError: If an argument of the optimizer is not valid.
    """
    part = cfg.optimizer.copy()
    part.params.model = model
    optimizer = _instantiate(part, "optimizer")
    clip_full_model(optimizer, cfg.train.clip_norm or math.inf)
    return optimizer


class LazyTrainer(Trainer):
    """Trainer for a LazyConfig.

    Args:
        options: Config from :func:`lazy_options`.
        lazy: The LazyConfig.
    """

    def __init__(self, options: CfgNode, *, lazy: DictConfig) -> None:
        self.lazy = lazy
        super().__init__(options, log_period=lazy.train.log_period)

    def build_model(self, cfg: CfgNode) -> nn.Module:
        return _build_model(self.lazy, cfg)

    def build_optimizer(self, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        return build_lazy_optimizer(self.lazy, model)

    def build_lr_scheduler(self, cfg: CfgNode, optimizer: torch.optim.Optimizer) -> LRMultiplier:
        return LRMultiplier(optimizer, _instantiate(self.lazy.lr_multiplier, "lr_multiplier"), cfg.SOLVER.MAX_ITER)

    def build_train_loader(self, cfg: CfgNode) -> Any:
        return _instantiate(self.lazy.dataloader.train, "dataloader.train")

    def test(self, cfg: CfgNode, model: nn.Module) -> OrderedDict:
        return _test(self.lazy, cfg, model)


def _build_model(lazy: DictConfig, options: CfgNode) -> nn.Module:
    return _instantiate(lazy.model, "model").to(options.MODEL.DEVICE)


def _run(path: str, overrides: Sequence[str], eval_only: bool, resume: bool) -> None:
    """Train or evaluate in one process."""
    cfg = load_lazy_config(path, overrides)
    with torch.device("meta"):
        options = lazy_options(cfg, _instantiate(cfg.model, "model"))
    data.register_datasets(options)

    def write_config(options: CfgNode, path: Path) -> None:
        saved = cfg.copy()
        saved.train.seed = options.SEED
        LazyConfig.save(saved, str(path))

    if eval_only:
        build, test = functools.partial(_build_model, cfg), functools.partial(_test, cfg)
        run_evaluation(options, build, test, write_config, resume=resume)
    else:
        with lock_output_dir(options, resume=resume):
            run_training(options, functools.partial(LazyTrainer, lazy=cfg), write_config, resume=resume)


def _test(cfg: DictConfig, options: CfgNode, model: nn.Module) -> OrderedDict:
    """Evaluate on the test dataset and write ``evaluation.json``."""
    share_statistics(model)
    loader = _instantiate(cfg.dataloader.test, "dataloader.test")
    evaluator = _instantiate(cfg.dataloader.evaluator, "dataloader.evaluator")
    evaluator = match_to_dataset(evaluator, data.class_order(options, options.DATASETS.TEST[0]))
    results = inference_on_dataset(model, loader, evaluator)
    if results:
        print_csv_format(results)
    report_results(options, results)
    return results


def _instantiate(part: DictConfig, name: str) -> Any:
    """Return ``instantiate(part)``.

    Raises:
        ConfigError: If ``part`` is invalid. The message has its ``name``.
    """
    try:
        return instantiate(part)
    except ConfigError:
        raise
    except _INVALID as error:
        raise ConfigError(f"Section '{name}' of the config is not valid: {_reason(error)}. Correct it.") from error


def _reason(error: Exception) -> str:
    return f"{one_line(error) or 'an assertion failed'} ({type(error).__name__})"
