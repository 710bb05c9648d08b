"""What can be found wrong with a run in a second, before it starts."""

import functools
import logging
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from torch import nn

from backbones import InputError
from backbones.utils.errors import check_choice
from projects_vil import data
from projects_vil.checkpoint import check_weights, checkpoints_of, find_checkpoint, optimizer_groups
from projects_vil.config import check_device, is_panoptic
from projects_vil.engine.hooks import RandomShift
from projects_vil.engine.steps import AMP_DTYPES, check_groups
from projects_vil.evaluation import LOSS_TASK, check_coco_api, check_metric, parts_of_metric
from projects_vil.modeling import (
    LARGEST_SIDE,
    SMALLEST_SIDE,
    build_on_meta,
    check_cascade,
    check_point_rend,
    longest_side,
)
from projects_vil.progress import check_services
from projects_vil.solver import LR_SCHEDULERS, OPTIMIZERS, build_lr_scheduler, build_optimizer

# What is passed over is said where the run resumes.
_SILENT = logging.Logger(__name__, level=logging.CRITICAL + 1)


def check_setup(cfg: CfgNode, *, processes: int = 1, eval_only: bool = False, resume: bool = False) -> None:
    """Whether the model, devices, datasets and weights that a run needs are there.

    Raises:
        InputError: for the first that is not.
    """
    check_values(cfg)
    model = build_on_meta(cfg)
    on_gpu = check_device(cfg)
    if cfg.SOLVER.AMP.ENABLED and cfg.SOLVER.AMP.DTYPE == "float16" and not eval_only and not on_gpu:
        raise InputError(
            "SOLVER.AMP.ENABLED is True, and AMP needs MODEL.DEVICE cuda for float16: add SOLVER.AMP.DTYPE bfloat16, "
            "or SOLVER.AMP.ENABLED False"
        )
    if not eval_only:
        _check_batch(cfg, max(processes, 1))
        _check_jitter(cfg, model)
        optimizer = build_optimizer(cfg, model)
        _check_schedule(cfg, max(processes, 1))
        if cfg.MODEL.TRANSFORMER.RANDOM_SHIFT_UNTIL:
            RandomShift(model, cfg.MODEL.TRANSFORMER.RANDOM_SHIFT_UNTIL)
        if processes > 1 and not on_gpu:
            check_norms(model)
        check_services(cfg)
    if not cfg.DATASETS.TEST and eval_only or not cfg.DATASETS.TRAIN and not eval_only:
        raise InputError(f"DATASETS.{'TEST' if eval_only else 'TRAIN'} is empty: name a dataset")
    for names in (*([name] for name in cfg.DATASETS.TEST), () if eval_only else cfg.DATASETS.TRAIN):
        data.check_datasets(cfg, names)
    if cfg.TEST.BEST_METRIC and cfg.DATASETS.TEST and not eval_only:
        check_metric(cfg)
    resumed = find_checkpoint(cfg.OUTPUT_DIR, logger=_SILENT) if resume else None
    if resumed is not None:
        check_weights(cfg, str(resumed), complete=True, model=model)
        if not eval_only:
            _check_optimizer(resumed, optimizer)
        return
    there = checkpoints_of(cfg.OUTPUT_DIR)
    if there and not eval_only and not cfg.OVERWRITE_OUTPUT_DIR:
        raise InputError(
            f"OUTPUT_DIR {cfg.OUTPUT_DIR} has checkpoints of another run, {there[0].name} among them: add --resume to "
            "go on with it, choose another OUTPUT_DIR, or add OVERWRITE_OUTPUT_DIR True"
        )
    if eval_only and not cfg.MODEL.WEIGHTS:
        raise InputError("MODEL.WEIGHTS is empty: name the checkpoint to evaluate")
    if cfg.MODEL.WEIGHTS:
        check_weights(cfg, cfg.MODEL.WEIGHTS, complete=eval_only, model=model)


def _check_jitter(cfg: CfgNode, model: nn.Module) -> None:
    """Whether the model's absolute positions reach as far as the images of ``INPUT.AUGMENTATION``."""
    size, end = cfg.INPUT.LSJ.SIZE, longest_side(model)
    if cfg.INPUT.AUGMENTATION != "default" and end is not None and size > end:
        raise InputError(
            f"INPUT.LSJ.SIZE is {size}, and this model's tables of positions end at MODEL.TRANSFORMER.MAX_IMG_SIZE "
            f"{end}: make one of them fit"
        )


def _check_schedule(cfg: CfgNode, processes: int) -> None:
    """Whether there is one, at the rate that detectron2's trainer will scale, if it does."""
    rate, reference = cfg.SOLVER.BASE_LR, cfg.SOLVER.REFERENCE_WORLD_SIZE
    if reference:
        cfg = cfg.clone()
        cfg.defrost()
        cfg.SOLVER.BASE_LR = rate = rate * processes / reference
    # An optimizer of its own: a schedule sets the rates of the one that it is for.
    build_lr_scheduler(cfg, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate))


def _check_optimizer(resumed: Path, optimizer: torch.optim.Optimizer) -> None:
    saved = optimizer_groups(resumed)
    if saved is None:
        raise InputError(
            f"{resumed} has no optimizer to go on with: begin anew from its weights (MODEL.WEIGHTS {resumed}, without "
            "--resume, in another OUTPUT_DIR)"
        )
    check_groups(saved, optimizer.param_groups)


def check_norms(model: nn.Module) -> None:
    """Whether a model's batch norms train in several processes on the CPU.

    Raises:
        InputError: for one that is synchronised, for which torch needs GPUs.
    """
    name = next((name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)), None)
    if name is not None:
        raise InputError(
            f"{name} is a synchronised batch norm, which needs GPUs: on the CPU train in one process, or with another "
            "MODEL.TRANSFORMER.BATCH_NORM (batch, frozen) or NORM"
        )


def check_values(cfg: CfgNode) -> None:
    """Whether values are such as detectron2 can use, whose own words for them would be a traceback.

    Raises:
        InputError: for the first that is not, naming its key and what it may be.
    """
    for key, is_right, meaning in _VALUES:
        value = functools.reduce(getattr, key.split("."), cfg)
        if not is_right(value):
            raise InputError(f"{key} is {value!r}: it is {meaning}")
    check_choice("DATASETS.CHECK", cfg.DATASETS.CHECK, data.CHECKS)
    check_coco_api(cfg.TEST.COCO_API)
    check_choice("DATALOADER.SAMPLER_TRAIN", cfg.DATALOADER.SAMPLER_TRAIN, data.TRAIN_SAMPLERS)
    if cfg.INPUT.CROP.ENABLED:
        check_choice("INPUT.CROP.TYPE", cfg.INPUT.CROP.TYPE, data.CROP_TYPES)
    data.check_padding(cfg)
    data.check_augmentation(cfg)
    if is_panoptic(cfg) and not cfg.MODEL.MASK_ON:
        raise InputError("MODEL.MASK_ON is False, and a PanopticFPN joins masks with stuff: add MODEL.MASK_ON True")
    check_cascade(cfg)
    check_point_rend(cfg)
    for key, choices in _CHOICES:
        check_choice(key, functools.reduce(getattr, key.split("."), cfg), choices)
    _check_best_metric(cfg)
    if cfg.SOLVER.SCALE_LR_TO_BATCH and cfg.SOLVER.REFERENCE_WORLD_SIZE:
        raise InputError(
            "SOLVER.SCALE_LR_TO_BATCH and SOLVER.REFERENCE_WORLD_SIZE both scale the learning rate: set one to 0"
        )
    patience = cfg.SOLVER.EARLY_STOPPING_PATIENCE
    if patience and not (cfg.TEST.BEST_METRIC and cfg.TEST.EVAL_PERIOD):
        raise InputError(
            f"SOLVER.EARLY_STOPPING_PATIENCE is {patience}: it needs TEST.BEST_METRIC, bbox/AP for one, and a "
            "TEST.EVAL_PERIOD above 0"
        )


def _check_best_metric(cfg: CfgNode) -> None:
    """Whether it is of what evaluations judge; :func:`check_metric` knows the names, once datasets are known."""
    metric, tests = cfg.TEST.BEST_METRIC, cfg.DATASETS.TEST
    if not metric:
        return
    dataset, task, name = parts_of_metric(cfg)
    if len(tests) > 1 and not dataset:
        raise InputError(
            f"TEST.BEST_METRIC is {metric}: with several DATASETS.TEST it begins with one, as {tests[0]}/bbox/AP"
        )
    tasks = _tasks(cfg)
    if task not in tasks or not name or (task in _TASKS_WITH_AP and not name.startswith("AP")):
        example = "sem_seg/mIoU" if "sem_seg" in tasks else "bbox/AP"
        raise InputError(
            f"TEST.BEST_METRIC is {metric}: it is one of {', '.join(tasks)}, and a metric of it: {example} for one"
        )
    if task == LOSS_TASK and not cfg.TEST.LOSS:
        raise InputError(f"TEST.BEST_METRIC is {metric}, which nobody computes: add TEST.LOSS True")


def _check_batch(cfg: CfgNode, processes: int) -> None:
    """As detectron2's trainer will scale it, if it does."""
    batch, reference = cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.REFERENCE_WORLD_SIZE
    if reference and batch % reference:
        raise InputError(
            f"SOLVER.IMS_PER_BATCH is {batch}, no multiple of the {reference} processes of SOLVER.REFERENCE_WORLD_SIZE"
        )
    if not reference and batch % processes:
        raise InputError(f"SOLVER.IMS_PER_BATCH is {batch}, no multiple of {processes} processes")
    own, parts = batch // (reference or processes), cfg.SOLVER.ACCUMULATE
    if own % parts:
        raise InputError(f"SOLVER.ACCUMULATE is {parts}, and the {own} images of a process cannot be split evenly")


def _whole(low: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _are_steps(value: Any) -> bool:
    return all(map(_whole(0), value)) and list(value) == sorted(set(value))


def _are_scales(value: Any) -> bool:
    return len(value) == 2 and all(map(_is_finite, value)) and 0 < value[0] <= value[1] <= _LARGEST_SCALE


def _are_colors(value: Any) -> bool:
    return len(value) == 3 and all(map(_is_finite, value))


# Ten times the side is a hundred times the memory.
_LARGEST_SCALE = 10
_TASKS_WITH_AP = ("bbox", "segm", "keypoints")


def _tasks(cfg: CfgNode) -> tuple[str, ...]:
    """What evaluations of this model judge."""
    if cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor":
        return ("sem_seg", LOSS_TASK)
    has_rois = cfg.MODEL.META_ARCHITECTURE in ("GeneralizedRCNN", "PanopticFPN")
    stuff = ("sem_seg",) if is_panoptic(cfg) else ()
    is_judged = (True, has_rois and cfg.MODEL.MASK_ON, has_rois and cfg.MODEL.KEYPOINT_ON)
    return (*(task for task, judged in zip(_TASKS_WITH_AP, is_judged, strict=True) if judged), *stuff, LOSS_TASK)


_CHOICES: tuple[tuple[str, Collection[str]], ...] = (
    ("SOLVER.AMP.DTYPE", AMP_DTYPES),
    ("SOLVER.OPTIMIZER", OPTIMIZERS),
    ("SOLVER.LR_SCHEDULER_NAME", LR_SCHEDULERS),
    ("SOLVER.WARMUP_METHOD", ("linear", "constant")),
    ("INPUT.RANDOM_FLIP", ("none", "horizontal", "vertical")),
    ("INPUT.FORMAT", ("RGB", "BGR")),
    ("INPUT.MASK_FORMAT", ("polygon", "bitmask")),
    ("INPUT.MIN_SIZE_TRAIN_SAMPLING", ("choice", "range")),
)
_VALUES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("SOLVER.MAX_ITER", _whole(1), "1 or more iterations"),
    ("SOLVER.IMS_PER_BATCH", _whole(1), "1 or more images, those of all processes together"),
    ("SOLVER.REFERENCE_WORLD_SIZE", _whole(0), "a number of processes, or 0"),
    ("SOLVER.CHECKPOINT_PERIOD", _whole(1), "1 or more iterations"),
    ("SOLVER.CHECKPOINT_KEEP", _whole(0), "a number of checkpoints, or 0 for all"),
    ("SOLVER.ACCUMULATE", _whole(1), "1 or more parts of a batch"),
    ("SOLVER.SCALE_LR_TO_BATCH", _whole(0), "a number of images, or 0 for a learning rate as it is"),
    ("SOLVER.SKIP_DIVERGED", _whole(0), "a number of batches, or 0 to stop at the first"),
    ("SOLVER.EARLY_STOPPING_PATIENCE", _whole(0), "a number of evaluations, or 0 for never"),
    ("SOLVER.WARMUP_ITERS", _whole(0), "0 or more iterations"),
    ("SOLVER.BASE_LR", lambda value: _is_finite(value) and value > 0, "above 0"),
    ("SOLVER.BASE_LR_END", lambda value: _is_finite(value) and value >= 0, "0 or more"),
    ("SOLVER.MOMENTUM", lambda value: _is_finite(value) and 0 <= value < 1, "0 or more, and below 1"),
    ("SOLVER.STEPS", lambda value: _are_steps(value), "iterations, each later than the one before"),
    ("SOLVER.WARMUP_FACTOR", lambda value: _is_finite(value) and 0 <= value <= 1, "0 to 1"),
    ("SOLVER.NUM_DECAYS", _whole(1), "1 or more"),
    ("SEED", lambda value: _whole(-1)(value) and value < 2**63, "0 or more, or -1 to have one drawn"),
    ("MODEL.RETINANET.NUM_CLASSES", _whole(1), "1 or more"),
    ("MODEL.ROI_HEADS.NUM_CLASSES", _whole(1), "1 or more"),
    ("MODEL.FPN.OUT_CHANNELS", _whole(1), "1 or more"),
    (
        "MODEL.ANCHOR_GENERATOR.SIZES",
        lambda value: all(_is_finite(side) and side > 0 for level in value for side in level),
        "lists of sides above 0",
    ),
    ("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", lambda value: _is_finite(value) and value > 0, "above 0"),
    ("INPUT.MIN_SIZE_TRAIN", lambda value: len(value) > 0 and all(map(_whole(1), value)), "sides of 1 pixel or more"),
    ("INPUT.MAX_SIZE_TRAIN", _whole(1), "a side of 1 pixel or more"),
    ("INPUT.MIN_SIZE_TEST", _whole(0), "a side of 1 pixel or more, or 0 for images as they are"),
    ("INPUT.MAX_SIZE_TEST", _whole(1), "a side of 1 pixel or more"),
    (
        "INPUT.LSJ.SIZE",
        lambda value: _whole(SMALLEST_SIDE)(value) and value <= LARGEST_SIDE,
        f"the side of a square, {SMALLEST_SIDE} to {LARGEST_SIDE} pixels",
    ),
    ("INPUT.LSJ.SCALE", _are_scales, f"two factors above 0 and at most {_LARGEST_SCALE}, the larger one last"),
    ("INPUT.COPY_PASTE.PROBABILITY", lambda value: _is_finite(value) and 0 <= value <= 1, "0 to 1"),
    ("TEST.DETECTIONS_PER_IMAGE", _whole(1), "1 or more"),
    ("SOLVER.WEIGHT_DECAY", lambda value: _is_finite(value) and value >= 0, "0 or more"),
    ("TEST.EVAL_PERIOD", _whole(0), "a number of iterations, or 0 for the end alone"),
    ("TEST.DRAW_IMAGES", lambda value: _whole(0)(value) and value <= 32, "0 to 32 images"),
    ("DATALOADER.NUM_WORKERS", _whole(0), "0 or more processes"),
    ("MODEL.TRANSFORMER.RANDOM_SHIFT_UNTIL", lambda value: _is_finite(value) and 0 <= value <= 1, "0 to 1"),
    ("MODEL.EMA.DECAY", lambda value: _is_finite(value) and 0 <= value < 1, "0 or more, and below 1"),
    ("MODEL.PIXEL_MEAN", _are_colors, "three numbers, in the order of INPUT.FORMAT"),
    (
        "MODEL.PIXEL_STD",
        lambda value: _are_colors(value) and all(number > 0 for number in value),
        "three numbers above 0, in the order of INPUT.FORMAT",
    ),
    ("OUTPUT_DIR", lambda value: isinstance(value, str) and bool(value.strip()), "the folder that a run writes into"),
)
