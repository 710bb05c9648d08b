"""Training and evaluation with a LazyConfig, as in configs/lazy/. The trainer is the one for YAML configs."""

import contextlib
import functools
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode, LazyConfig, instantiate
from detectron2.evaluation import DatasetEvaluator
from detectron2.solver import LRMultiplier
from omegaconf import DictConfig, OmegaConf
from torch import nn

from backbones import ConfigError
from backbones.errors import check_file, closest, one_line
from projects_vil.config import choose_device, config_items, default_config
from projects_vil.data import class_order, load_dataset, read_records
from projects_vil.engine.checks import check_setup
from projects_vil.engine.launch import Processes, launch, run_evaluation, run_training
from projects_vil.engine.trainer import Trainer
from projects_vil.evaluation import CheckedEvaluator
from projects_vil.solver import clip_full_model
from projects_vil.utils import cleanup_on_failure

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


def run_lazy_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    eval_only: bool = False,
    resume: bool = False,
    **processes: Any,
) -> None:
    """Check a LazyConfig, then train or evaluate in all processes. The check takes about a second.

    Args:
        path: Path of the config. Each process reads it again, because a LazyConfig may contain functions.
        overrides: ``key=value``, or ``+key=value`` to add a key.
        eval_only: Evaluate instead of training.
        resume: Continue from the last checkpoint in the output directory.
        processes: Arguments of :class:`Processes`, except for the device.

    Raises:
        ConfigError: For a mistake in the config, in the overrides, or in a file that they name.
    """
    cfg = load_lazy_config(path, overrides)
    with _explained_errors(path):
        with torch.device("meta"):
            model = instantiate(cfg.model)
            if not eval_only:
                build_lazy_optimizer(cfg, model)  # Raises an error if a pattern matches no parameter.
        instantiate(cfg.lr_multiplier)
        options = choose_device(lazy_options(cfg, model), requested=True)
    run_processes = Processes(options.MODEL.DEVICE, **processes)
    check_setup(options, processes=run_processes.world_size, eval_only=eval_only, resume=resume, model=model)
    for split in ("train", "test"):
        given = cfg.dataloader[split].mapper.image_format
        if given != model.input_format:
            key = f"dataloader.{split}.mapper.image_format"
            raise ConfigError(f"{key} is '{given}'. Use model.input_format, '{model.input_format}'.")
    if len(options.DATASETS.TEST) != 1:
        raise ConfigError(f"dataloader.test.dataset.names is {options.DATASETS.TEST}. It must have one dataset.")
    with cleanup_on_failure(Path(options.OUTPUT_DIR)):
        launch(functools.partial(_run, options, str(path), tuple(overrides), eval_only, resume), run_processes)


def _run(options: CfgNode, path: str, overrides: Sequence[str], eval_only: bool, resume: bool) -> None:
    """Train or evaluate in one process."""
    run = run_evaluation if eval_only else run_training
    run(options, lazy_trainer(load_lazy_config(path, overrides)), resume)


@contextlib.contextmanager
def _explained_errors(path: str | Path) -> Iterator[None]:
    """Raise a ConfigError with the path for any exception of a LazyConfig, which is a Python program."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = f"{one_line(error) or 'an assertion failed'} ({type(error).__name__})"
        raise ConfigError(f"The LazyConfig '{path}' is not valid: {reason}. Correct it.") from error


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
    with _explained_errors(path):
        cfg = LazyConfig.load(str(path))
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
    with _explained_errors(path):
        return LazyConfig.apply_overrides(cfg, list(overrides))


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
    read_records(cfg, names, train=train)
    return load_dataset(cfg, names, train=train)


def lazy_options(cfg: DictConfig, model: nn.Module) -> CfgNode:
    """Return a YAML config with the options that the trainer reads from a LazyConfig, its model and its datasets.

    Args:
        cfg: The LazyConfig.
        model: The model of ``cfg``. It may be on the meta device.
    """
    options = default_config()
    for name, key in _OPTIONS.items():
        value = OmegaConf.select(cfg.train, name)
        if value is not None:
            options.merge_from_list([key, value])
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
    """
    part = cfg.optimizer.copy()
    part.params.model = model
    optimizer = instantiate(part)
    clip_full_model(optimizer, cfg.train.clip_norm or math.inf)
    return optimizer


def lazy_trainer(lazy: DictConfig) -> type[Trainer]:
    """Return the trainer for a LazyConfig. Build it with the config from :func:`lazy_options`."""

    class LazyTrainer(Trainer):
        log_period = lazy.train.log_period

        build_model = staticmethod(lambda cfg: instantiate(lazy.model).to(cfg.MODEL.DEVICE))
        build_optimizer = staticmethod(lambda cfg, model: build_lazy_optimizer(lazy, model))
        build_train_loader = staticmethod(lambda cfg: instantiate(lazy.dataloader.train))
        build_test_loader = staticmethod(lambda cfg, dataset_name: instantiate(lazy.dataloader.test))
        # The loaders of a LazyConfig read the datasets.
        read_datasets = staticmethod(lambda cfg, train=True: 0)

        @classmethod
        def build_lr_scheduler(cls, cfg: CfgNode, optimizer: torch.optim.Optimizer) -> LRMultiplier:
            return LRMultiplier(optimizer, instantiate(lazy.lr_multiplier), cfg.SOLVER.MAX_ITER)

        @classmethod
        def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
            return CheckedEvaluator([instantiate(lazy.dataloader.evaluator)], class_order(cfg, dataset_name))

        @staticmethod
        def dump_config(cfg: CfgNode) -> str:
            saved = lazy.copy()
            saved.train.seed = cfg.SEED
            with tempfile.NamedTemporaryFile("r", suffix=".yaml") as file:
                LazyConfig.save(saved, file.name)
                return file.read()

    return LazyTrainer
