"""Training and evaluation of LazyConfigs from the command line: what configs/lazy/ is run by."""

import argparse
import builtins
import contextlib
import logging
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode, LazyConfig, instantiate
from detectron2.engine import (
    AMPTrainer,
    SimpleTrainer,
    default_argument_parser,
    default_setup,
    default_writers,
    hooks,
)
from detectron2.evaluation import inference_on_dataset, print_csv_format
from detectron2.utils import comm
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from backbones import InputError
from backbones.attention.alternatives.performer import PerformerAttention
from backbones.utils.errors import check_file, closest
from projects_vil import data
from projects_vil.checkpoint import Checkpointer, check_weights, checkpoints_of, find_checkpoint
from projects_vil.config import default_config, one_line
from projects_vil.engine.checks import check_norms
from projects_vil.engine.hooks import LRScheduler, RandomShift, RedrawFeatures
from projects_vil.engine.processes import (
    check_processes,
    data_parallel,
    number_of_processes,
    said_once,
    share_statistics,
    start_processes,
)
from projects_vil.evaluation import write_results
from projects_vil.solver import clip_full_model
from projects_vil.utils import check_unlocked, log_run, run_lock, told_between_calls

_PARTS = ("model", "optimizer", "lr_multiplier", "dataloader", "train")
_OVERRIDE = re.compile(r"(?P<adds>\+{0,2})(?P<key>[\w.\[\]]+)=.*", re.DOTALL)
_BAD_VALUES = (TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError, OmegaConfBaseException)


def lazy_training_parser(epilog: str) -> argparse.ArgumentParser:
    """detectron2's parser of a run, whose overrides are ``key=value``."""
    return default_argument_parser(epilog=epilog)


def train_lazily_from_command_line(args: argparse.Namespace) -> None:
    """What ``tools/lazyconfig_train_net.py`` does: check what can be checked in a second, then start the processes.

    Args:
        args: of :func:`lazy_training_parser`; the overrides are ``key=value``, and ``+key=value`` for
            a key that the config does not have.

    Raises:
        InputError: for a mistake in the config, its overrides or the files that they name.
    """
    with said_once():
        cfg = load_lazy_config(args.config_file, args.opts)
        output_dir, device = cfg.train.output_dir, cfg.train.device
        check_processes(args, device=str(device), key="train.device")
        if not args.eval_only:
            check_unlocked(output_dir, key="train.output_dir")
        _check(cfg, processes=number_of_processes(args), eval_only=args.eval_only, resume=args.resume)
    start_processes(_run, args, args, output_dir=output_dir, device=device, key="train.output_dir")


def load_lazy_config(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """A LazyConfig with its overrides, in Hydra's syntax.

    Raises:
        InputError: for a file that is missing, is no Python, fails or lacks a part, or an override that is none or
            names a key that the config does not have (naming the closest).
    """
    if not str(path):
        raise InputError("no config file was given: add --config-file configs/lazy/retinanet_vil_tiny.py, say")
    check_file(path, "config file")
    own_import = builtins.__import__
    try:
        cfg = LazyConfig.load(str(path))
    except Exception as error:  # A config is a program: it may raise anything.
        raise InputError(f"{path} is no LazyConfig: {_reason(error)}") from error
    finally:
        # detectron2 leaves its own in place where a config raises.
        builtins.__import__ = own_import
    if not isinstance(cfg, DictConfig) or not all(isinstance(cfg.get(part), DictConfig) for part in _PARTS):
        raise InputError(f"{path} is no LazyConfig to train: it has the parts {', '.join(_PARTS)}")
    for override in overrides:
        match = _OVERRIDE.fullmatch(override)
        if match is None:
            raise InputError(f"{override!r} is no override: those are key=value, after all flags (--resume and so on)")
        if not match["adds"] and not _has(cfg, match["key"]):
            key = match["key"]
            raise InputError(f"unknown config key {key}{closest(key, _keys(cfg))} (+{key}=... adds one)")
    try:
        return LazyConfig.apply_overrides(cfg, list(overrides))
    except Exception as error:  # Hydra's parser has exceptions of its own.
        raise InputError(f"an override is not Hydra's: {_reason(error)} ({' '.join(overrides)})") from error


def load_records(
    names: Sequence[str],
    *,
    train: bool,
    num_classes: int,
    masks: bool = False,
    filter_empty: bool = True,
    check: str = "error",
) -> list[dict[str, Any]]:
    """The records of some datasets of boxes: what a LazyConfig's loaders take.

    Args:
        masks: whether segmentations are learned.
        filter_empty: whether images without annotation are left out of training.
        check: as ``DATASETS.CHECK``.

    Raises:
        InputError: as :func:`projects_vil.data.load_dataset`.
    """
    cfg = default_config()
    cfg.MODEL.META_ARCHITECTURE = "GeneralizedRCNN"
    cfg.MODEL.ROI_HEADS.NUM_CLASSES, cfg.MODEL.MASK_ON = num_classes, masks
    cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS = filter_empty
    cfg.DATASETS.CHECK = check
    return data.load_dataset(cfg, list(names), train=train, open_images=True)


def describe_lazy_config(cfg: DictConfig, model: nn.Module) -> CfgNode:
    """What of a LazyConfig the parts of this project ask a config for: datasets, classes, input format, device.

    Args:
        model: of ``cfg``, with or without values.
    """
    facts = default_config()
    facts.MODEL.META_ARCHITECTURE = type(model).__name__
    facts.MODEL.DEVICE = cfg.train.device
    facts.OUTPUT_DIR = cfg.train.output_dir
    if hasattr(model, "roi_heads"):
        facts.MODEL.ROI_HEADS.NUM_CLASSES = model.roi_heads.num_classes
        facts.MODEL.MASK_ON = model.roi_heads.mask_on
    else:
        facts.MODEL.RETINANET.NUM_CLASSES = model.num_classes
    facts.MODEL.PIXEL_MEAN, facts.MODEL.PIXEL_STD = list(cfg.model.pixel_mean), list(cfg.model.pixel_std)
    facts.INPUT.FORMAT = model.input_format
    facts.DATASETS.TRAIN = tuple(cfg.dataloader.train.dataset.names)
    facts.DATASETS.TEST = tuple(cfg.dataloader.test.dataset.names)
    facts.DATASETS.COCO = OmegaConf.to_container(cfg.dataloader.coco)
    facts.freeze()
    return facts


def build_lazy_optimizer(cfg: DictConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of ``cfg`` for ``model``, with ``train.clip_norm``.

    Raises:
        InputError: for an argument that it does not take.
    """
    part = cfg.optimizer.copy()
    part.params.model = model
    optimizer = _instantiate(part, "optimizer")
    if cfg.train.clip_norm:
        clip_full_model(optimizer, cfg.train.clip_norm)
    return optimizer


def _check(cfg: DictConfig, *, processes: int, eval_only: bool, resume: bool) -> None:
    train = cfg.train
    for key, smallest in (("max_iter", 1), ("eval_period", 0), ("log_period", 1), ("checkpointer.period", 1)):
        value = OmegaConf.select(train, key)
        if type(value) is not int or value < smallest:
            raise InputError(f"train.{key} is {value!r}: it is a number of iterations, {smallest} or more")
    if train.device not in ("cpu", "cuda"):
        raise InputError(f"train.device is {train.device!r}: it is cpu or cuda")
    if train.device == "cuda" and not torch.cuda.is_available():
        raise InputError("train.device is cuda, and there is no CUDA device here: add train.device=cpu")
    if train.amp.enabled and train.device == "cpu" and not eval_only:
        raise InputError("train.amp.enabled is True, and AMP needs train.device cuda: set it to False")
    batch = cfg.dataloader.train.total_batch_size
    if not eval_only and (type(batch) is not int or batch < 1 or batch % processes):
        raise InputError(f"dataloader.train.total_batch_size is {batch!r}, no multiple of {processes} processes")
    with torch.device("meta"):
        model = _instantiate(cfg.model, "model")
        if not eval_only:
            build_lazy_optimizer(cfg, model)
            if processes > 1 and train.device == "cpu":
                check_norms(model)
    _instantiate(cfg.lr_multiplier, "lr_multiplier")
    facts = describe_lazy_config(cfg, model)
    for split in ("train", "test"):
        given = cfg.dataloader[split].mapper.image_format
        if given != model.input_format:
            raise InputError(
                f"model.input_format is {model.input_format}, and dataloader.{split}.mapper.image_format {given}"
            )
    data.register_datasets(facts)
    if len(facts.DATASETS.TEST) != 1:
        raise InputError(f"dataloader.test.dataset.names is {list(facts.DATASETS.TEST)}: it is one dataset, in a list")
    for name in (*facts.DATASETS.TEST, *(() if eval_only else facts.DATASETS.TRAIN)):
        data.check_files(name)
    resumed = find_checkpoint(train.output_dir) if resume else None
    if resumed is not None:
        check_weights(facts, str(resumed), complete=True, model=model)
        return
    if not eval_only and (there := checkpoints_of(train.output_dir)):
        raise InputError(
            f"train.output_dir {train.output_dir} has checkpoints of another run, {there[0].name} among them: add "
            "--resume to go on with it, or choose another train.output_dir"
        )
    if train.init_checkpoint:
        check_weights(facts, train.init_checkpoint, complete=eval_only, model=model)
    elif eval_only:
        raise InputError("train.init_checkpoint is empty: name the checkpoint to evaluate")


def _run(args: argparse.Namespace) -> OrderedDict | None:
    """Train or evaluate in one process; returns an evaluation's results."""
    cfg = load_lazy_config(args.config_file, args.opts)
    if args.eval_only:
        model, facts = _set_up(cfg, args)
        model = data_parallel(model)
        checkpointer = Checkpointer(model, cfg.train.output_dir, cfg=facts, complete=True)
        checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=args.resume)
        with told_between_calls(model, alone=comm.get_world_size() == 1):
            return _evaluate(cfg, facts, model)
    output_dir = cfg.train.output_dir
    with run_lock(output_dir, key="train.output_dir") if comm.is_main_process() else contextlib.nullcontext():
        # Nothing is written before the lock is there.
        comm.synchronize()
        model, facts = _set_up(cfg, args)
        return _train(cfg, facts, model, resume=args.resume)


def _set_up(cfg: DictConfig, args: argparse.Namespace) -> tuple[nn.Module, CfgNode]:
    """The model on its device, and what its config says of it."""
    log_run(str(cfg.train.output_dir), rank=comm.get_rank())
    default_setup(cfg, args)
    model = _instantiate(cfg.model, "model").to(cfg.train.device)
    facts = describe_lazy_config(cfg, model)
    data.register_datasets(facts)
    if not args.eval_only:
        # Found before the first iteration, not by the first evaluation.
        _instantiate(cfg.dataloader.test.dataset, "dataloader.test.dataset")
    return model, facts


def _train(cfg: DictConfig, facts: CfgNode, model: nn.Module, *, resume: bool) -> None:
    optimizer = build_lazy_optimizer(cfg, model)
    loader = _instantiate(cfg.dataloader.train, "dataloader.train")
    shift_until = cfg.train.random_shift_until
    redraws = any(isinstance(module, PerformerAttention) for module in model.modules())
    model = data_parallel(model, **cfg.train.ddp)
    trainer = (AMPTrainer if cfg.train.amp.enabled else SimpleTrainer)(model, loader, optimizer)
    checkpointer = Checkpointer(model, cfg.train.output_dir, cfg=facts, trainer=trainer)
    is_main = comm.is_main_process()
    trainer.register_hooks(
        [
            RedrawFeatures(cfg.train.feature_redraw_period) if redraws else None,
            RandomShift(model, shift_until) if shift_until else None,
            hooks.IterationTimer(),
            LRScheduler(scheduler=_instantiate(cfg.lr_multiplier, "lr_multiplier")),
            hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer) if is_main else None,
            hooks.EvalHook(cfg.train.eval_period, lambda: _evaluate(cfg, facts, model)),
            hooks.PeriodicWriter(default_writers(cfg.train.output_dir, cfg.train.max_iter), period=cfg.train.log_period)
            if is_main
            else None,
        ]
    )
    checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=resume)
    start = trainer.iter + 1 if checkpointer.resumed_from is not None else 0
    trainer.train(start, cfg.train.max_iter)


def _evaluate(cfg: DictConfig, facts: CfgNode, model: nn.Module) -> OrderedDict:
    """Evaluate on the one test dataset and write ``train.output_dir/evaluation.json``."""
    share_statistics(model)
    loader = _instantiate(cfg.dataloader.test, "dataloader.test")
    results = inference_on_dataset(model, loader, _instantiate(cfg.dataloader.evaluator, "dataloader.evaluator"))
    if comm.is_main_process():
        print_csv_format(results)
        write_results(facts, results)
    return results


def _instantiate(part: DictConfig, name: str) -> Any:
    """An :class:`InputError` that names the part for what it cannot be made of."""
    logger = logging.getLogger("detectron2.config.instantiate")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        return instantiate(part)
    except InputError:
        raise
    except _BAD_VALUES as error:
        raise InputError(f"{name} cannot be made of this config: {_reason(error)}") from error
    finally:
        logger.disabled = was_disabled


def _has(cfg: DictConfig, key: str) -> bool:
    """Whether ``cfg`` has a key, with a value or an interpolation."""
    parent, _, leaf = key.rpartition(".")
    try:
        node = OmegaConf.select(cfg, parent) if parent else cfg
    except OmegaConfBaseException:
        return False
    if isinstance(node, ListConfig):
        return leaf.isdecimal() and int(leaf) < len(node)
    return isinstance(node, DictConfig) and leaf in node.keys()


def _keys(node: object, prefix: str = "") -> Iterable[str]:
    if isinstance(node, DictConfig):
        for key in node.keys():
            yield f"{prefix}{key}"
            child = node._get_node(key)
            yield from _keys(child, f"{prefix}{key}.")


def _reason(error: Exception) -> str:
    return f"{one_line(error) or 'an assertion failed'} ({type(error).__name__})"
