"""Checks that report a user's mistakes in about a second, before a run starts."""

import filecmp
import math
import os
from collections.abc import Collection
from operator import attrgetter
from pathlib import Path

import yaml
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer
from torch import nn

from backbones import ConfigError
from backbones.attention.sliding_chunk import sample_shifts
from backbones.errors import check_choice, check_packages, check_replaceable
from projects_vil.checkpoint import BEST_CHECKPOINT, check_weights, checkpoints_of
from projects_vil.config import CONFIG_FILE, is_panoptic, is_segmentor, with_overrides
from projects_vil.data import AUGMENTATIONS, CHECK_MODES, check_files, class_order, register_datasets
from projects_vil.engine.hooks import SERVICES
from projects_vil.evaluation import EVALUATION_FILE, check_metric
from projects_vil.modeling import MAX_EXPORT_SIDE, MIN_EXPORT_SIDE, build_on_meta
from projects_vil.solver import LR_SCHEDULERS, build_lr_scheduler, build_optimizer
from vil.choices import DTYPES

_CHOICES: dict[str, Collection[str]] = {
    "DATASETS.CHECK": CHECK_MODES,
    "FLOAT32_PRECISION": ("", "highest", "high", "medium"),
    "INFERENCE.DTYPE": ("auto", *DTYPES),
    "INPUT.AUGMENTATION": AUGMENTATIONS,
    "INPUT.CROP.TYPE": ("relative_range", "relative", "absolute", "absolute_range"),
    "INPUT.FORMAT": ("RGB", "BGR"),
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": ("choice", "range", "batch"),
    "SOLVER.AMP.DTYPE": ("auto", "bfloat16", "float16"),
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": ("full_model", "norm", "value"),
    "SOLVER.LR_SCHEDULER_NAME": LR_SCHEDULERS,
}
# Smallest and largest value of a number, or of each number in a list. Infinite values are errors too. For other keys,
# PyTorch or detectron2 raises an error at the start.
_RANGES: dict[str, tuple[float, float]] = {
    "DATALOADER.NUM_WORKERS": (0, math.inf),
    "INPUT.COPY_PASTE.PROBABILITY": (0, 1),
    "INPUT.LSJ.SCALE": (1e-3, 10),
    "INPUT.LSJ.SIZE": (MIN_EXPORT_SIDE, MAX_EXPORT_SIDE),
    "INPUT.MIN_SIZE_TRAIN": (0, math.inf),
    "MODEL.EMA.DECAY": (0, 1 - 1e-12),
    "MODEL.PIXEL_STD": (1e-30, math.inf),
    "MODEL.TRANSFORMER.RANDOM_SHIFT_FRACTION": (0, 1),
    "SOLVER.BASE_LR": (1e-30, math.inf),
    "SOLVER.CHECKPOINT_MAX_TO_KEEP": (0, math.inf),
    "SOLVER.CHECKPOINT_PERIOD": (1, math.inf),
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": (1e-30, math.inf),
    "SOLVER.EARLY_STOPPING_PATIENCE": (0, math.inf),
    "SOLVER.IMS_PER_BATCH": (1, math.inf),
    "SOLVER.MAX_ITER": (1, math.inf),
    "SOLVER.WARMUP_FACTOR": (0, 1),
    "SOLVER.WARMUP_ITERS": (0, math.inf),
    "TEST.DETECTIONS_PER_IMAGE": (1, math.inf),
    "TEST.NUM_VISUALIZED_IMAGES": (0, 32),
}
# Prefix of a key, the key that it depends on, and the values of that key for which it has an effect.
_EFFECTIVE_WITH = (
    ("INPUT.MIN_SIZE_TRAIN", "INPUT.AUGMENTATION", ("default",)),
    ("INPUT.MAX_SIZE_TRAIN", "INPUT.AUGMENTATION", ("default",)),
    ("INPUT.MASK_FORMAT", "INPUT.AUGMENTATION", ("default",)),
    ("INPUT.PHOTOMETRIC_DISTORTION", "INPUT.AUGMENTATION", ("default", "lsj")),
    ("INPUT.LSJ.", "INPUT.AUGMENTATION", ("lsj", "lsj_copy_paste")),
    ("INPUT.COPY_PASTE.", "INPUT.AUGMENTATION", ("lsj_copy_paste",)),
    ("MODEL.EMA.DECAY", "MODEL.EMA.ENABLED", (True,)),
)
_OTHER_FOLDER = "Choose another OUTPUT_DIR."


class _PlainLoader(yaml.SafeLoader):
    """YAML loader that reads the ``config.yaml`` of a LazyConfig and replaces its Python objects by None."""


_PlainLoader.add_multi_constructor("", lambda loader, suffix, node: None)


def check_setup(
    cfg: CfgNode,
    *,
    processes: int = 1,
    eval_only: bool = False,
    resume: bool = False,
    overridden: Collection[str] = (),
    model: nn.Module | None = None,
) -> None:
    """Check the values, model, device, datasets and weights of a run. This takes about a second.

    The datasets of the config are registered. :func:`check_output_dir` checks ``OUTPUT_DIR``. If the run resumes, its
    checkpoint is checked later, when it is read.

    Args:
        cfg: Config of the run.
        processes: Number of processes of the run.
        eval_only: Whether the run only evaluates.
        resume: Whether the run continues from a checkpoint.
        overridden: Config keys that the user set for this run. In training, they must have an effect.
        model: Model of a LazyConfig, on any device. By default the model is built from ``cfg``.

    Raises:
        ConfigError: For the first mistake.
    """
    check_values(cfg, () if eval_only else overridden)
    register_datasets(cfg)
    is_lazy, model = model is not None, build_on_meta(cfg) if model is None else model
    if not (cfg.DATASETS.TEST if eval_only else cfg.DATASETS.TRAIN):
        raise ConfigError(f"DATASETS.{'TEST' if eval_only else 'TRAIN'} is empty. Set it to the name of a dataset.")
    for name in (*cfg.DATASETS.TEST, *(() if eval_only else cfg.DATASETS.TRAIN)):
        check_files(name)
        class_order(cfg, name)
    if not eval_only:
        _check_training(cfg, model, processes=processes)
        if not is_lazy:
            # As in the trainer, but without the warning about ignored steps.
            scaled = DefaultTrainer.auto_scale_workers(cfg, processes)
            steps = [step for step in scaled.SOLVER.STEPS if step <= scaled.SOLVER.MAX_ITER]
            build_lr_scheduler(with_overrides(scaled, {"SOLVER.STEPS": steps}), build_optimizer(scaled, model))
    if resume and checkpoints_of(cfg.OUTPUT_DIR):
        return
    if eval_only and not cfg.MODEL.WEIGHTS:
        raise ConfigError("MODEL.WEIGHTS is empty. Set it to the checkpoint to evaluate.")
    if cfg.MODEL.WEIGHTS:
        check_weights(cfg, cfg.MODEL.WEIGHTS, complete=eval_only, model=model)


def saved_config(folder: str | Path) -> Path | None:
    """Return the ``config.yaml`` of a run that can be resumed, which has checkpoints. Return None for other folders."""
    path = Path(folder) / CONFIG_FILE
    return path if path.is_file() and checkpoints_of(folder) else None


def check_output_dir(cfg: CfgNode, *, resume: bool) -> bool:
    """Return whether training resumes from a checkpoint in OUTPUT_DIR.

    Args:
        cfg: Config of the run.
        resume: Whether the user asked to resume.

    Raises:
        ConfigError: If training would overwrite checkpoints of another run or files that no run wrote, or if it would
            resume with other datasets or another batch size.
    """
    folder, saved = Path(cfg.OUTPUT_DIR), checkpoints_of(cfg.OUTPUT_DIR)
    if not saved and not (folder / "log.txt").exists():
        # This is not the output directory of a run, so its files must not be overwritten.
        for name in (CONFIG_FILE, "metrics.json", EVALUATION_FILE):
            check_replaceable(folder / name, advice=_OTHER_FOLDER)
    if cfg.OVERWRITE_OUTPUT_DIR and not resume:
        if Path(cfg.MODEL.WEIGHTS).resolve() in [path.resolve() for path in (*saved, folder / BEST_CHECKPOINT)]:
            raise ConfigError(f"OVERWRITE_OUTPUT_DIR would delete MODEL.WEIGHTS '{cfg.MODEL.WEIGHTS}'. {_OTHER_FOLDER}")
    elif saved and not resume:
        raise ConfigError(
            f"OUTPUT_DIR '{cfg.OUTPUT_DIR}' has checkpoints of another run, such as '{saved[0].name}'. Continue that "
            "run with --resume (resume=True), choose another output directory, or set OVERWRITE_OUTPUT_DIR True."
        )
    if resume and (path := saved_config(folder)) is not None:
        _check_resumed(cfg, path)
    return resume and bool(saved)


def _check_resumed(cfg: CfgNode, path: Path) -> None:
    """Raise a ConfigError if the datasets or the batch size differ from the ``config.yaml`` at ``path``."""
    content = yaml.load(path.read_text(), _PlainLoader)
    # The sections of a LazyConfig differ from a YAML config.
    solver, datasets, lazy = (content.get(key, {}) for key in ("SOLVER", "DATASETS", "dataloader"))
    loader = lazy.get("train", {})
    names = datasets["TRAIN"] if solver else loader["dataset"]["names"]
    images = solver["IMS_PER_BATCH"] if solver else loader["total_batch_size"]
    # With REFERENCE_WORLD_SIZE, the batch size is proportional to the number of processes.
    reference = solver.get("REFERENCE_WORLD_SIZE", 0) and cfg.SOLVER.REFERENCE_WORLD_SIZE
    factor = cfg.SOLVER.REFERENCE_WORLD_SIZE / solver["REFERENCE_WORLD_SIZE"] if reference else 1
    entries = datasets["COCO"] if solver else lazy.get("coco", [])
    old, new = (dict(entry[:2] for entry in given) for given in (entries, cfg.DATASETS.COCO))
    compared = [
        ("DATASETS.TRAIN", tuple(cfg.DATASETS.TRAIN), tuple(names)),
        ("SOLVER.IMS_PER_BATCH", cfg.SOLVER.IMS_PER_BATCH, images * factor),
    ]
    # A missing annotation file may have been moved, so it is not an error.
    compared += [
        (f"The annotation file of {name}", new[name], old[name])
        for name in names
        if all(name in files and os.path.isfile(files[name]) for files in (old, new))
        and old[name] != new[name]
        and not filecmp.cmp(old[name], new[name], shallow=False)
    ]
    for key, value, began in compared:
        if value != began:
            advice = f"Set it to {began}, or choose another OUTPUT_DIR."
            raise ConfigError(f"{key} is {value}, but the run in '{path.parent}' began with {began}. {advice}")


def _check_training(cfg: CfgNode, model: nn.Module, *, processes: int) -> None:
    solver, transformer = cfg.SOLVER, cfg.MODEL.TRANSFORMER
    if solver.AMP.ENABLED and solver.AMP.DTYPE == "float16" and cfg.MODEL.DEVICE.startswith("cpu"):
        raise ConfigError("SOLVER.AMP.DTYPE float16 needs MODEL.DEVICE cuda. Use bfloat16 on the CPU.")
    # With REFERENCE_WORLD_SIZE, detectron2's trainer scales the batch size to the number of processes.
    batch, divisor = solver.IMS_PER_BATCH, solver.REFERENCE_WORLD_SIZE or processes
    steps = solver.GRADIENT_ACCUMULATION_STEPS
    if steps != "auto" and not (type(steps) is int and steps > 0):
        raise ConfigError(f"SOLVER.GRADIENT_ACCUMULATION_STEPS is {steps!r}. Use a whole number above 0, or 'auto'.")
    if batch % (number := divisor * (1 if steps == "auto" else steps)):
        product = f"{number} (processes x SOLVER.GRADIENT_ACCUMULATION_STEPS)"
        raise ConfigError(f"SOLVER.IMS_PER_BATCH is {batch}. It must be a multiple of {product}.")
    if transformer.RANDOM_SHIFT_FRACTION:
        if transformer.COMPILE:
            raise ConfigError("MODEL.TRANSFORMER.COMPILE and RANDOM_SHIFT_FRACTION cannot be combined. Unset one.")
        if not sample_shifts(model, seed=None):
            raise ConfigError("MODEL.TRANSFORMER.RANDOM_SHIFT_FRACTION needs sliding_chunk attention. Set it to 0.0.")
    if cfg.TEST.BEST_METRIC and cfg.DATASETS.TEST:
        check_metric(cfg)
    for key, (module, _) in SERVICES.items():
        if cfg.LOGGING[key]:
            check_packages(f"LOGGING.{key}", module)


def check_values(cfg: CfgNode, overridden: Collection[str] = ()) -> None:
    """Check the values of config keys, and combinations of keys.

    Args:
        cfg: A config.
        overridden: Keys that must have an effect on training. Keys in files are not checked: a base file may set them
            for other values of the key that they depend on.

    Raises:
        ConfigError: For the first mistake. The message names the key.
    """
    for key in overridden:
        for beginning, other, values in _EFFECTIVE_WITH:
            value = attrgetter(other)(cfg)
            if key.startswith(beginning) and value not in values:
                instead = " or ".join(map(str, values))
                raise ConfigError(f"{key} has no effect with {other} {value}. Remove it, or set {other} {instead}.")
    for key, (smallest, largest) in _RANGES.items():
        value = attrgetter(key)(cfg)
        numbers = value if isinstance(value, (list, tuple)) else [value]
        valid = [isinstance(one, (int, float)) and smallest <= one <= largest and one < math.inf for one in numbers]
        if not (valid and all(valid)):
            least = "above 0" if smallest == 1e-30 else f"at least {smallest:g}"
            limits = least if largest == math.inf else f"{smallest:g} to {largest:g}"
            raise ConfigError(f"{key} is {value!r}. It must be {limits}.")
    if not cfg.OUTPUT_DIR:
        raise ConfigError("OUTPUT_DIR is empty. Set it to a folder.")
    for key, choices in _CHOICES.items():
        check_choice(key, attrgetter(key)(cfg), choices)
    if len(cfg.MODEL.PIXEL_MEAN) != 3 or len(cfg.MODEL.PIXEL_STD) != 3:
        mean, std = cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD
        raise ConfigError(f"MODEL.PIXEL_MEAN is {mean!r} and MODEL.PIXEL_STD is {std!r}. Set each to three numbers.")
    _check_augmentation(cfg)
    if is_panoptic(cfg) and not cfg.MODEL.MASK_ON:
        raise ConfigError("MODEL.MASK_ON is False, but PanopticFPN needs instance masks. Set it to True.")
    if cfg.SOLVER.REFERENCE_BATCH_SIZE and cfg.SOLVER.REFERENCE_WORLD_SIZE:
        raise ConfigError("SOLVER.REFERENCE_BATCH_SIZE and REFERENCE_WORLD_SIZE both scale BASE_LR. Set one to 0.")
    if cfg.SOLVER.EARLY_STOPPING_PATIENCE and not (cfg.TEST.BEST_METRIC and cfg.TEST.EVAL_PERIOD):
        raise ConfigError("SOLVER.EARLY_STOPPING_PATIENCE needs TEST.EVAL_PERIOD and TEST.BEST_METRIC. Set both.")


def _check_augmentation(cfg: CfgNode) -> None:
    """Check crops, large-scale jitter and copy-paste against the model and each other."""
    crop, name, model = cfg.INPUT.CROP, cfg.INPUT.AUGMENTATION, cfg.MODEL
    if crop.PAD and not is_segmentor(cfg):
        raise ConfigError(f"INPUT.CROP.PAD does not support a {model.META_ARCHITECTURE}. Set it to False.")
    if crop.PAD and crop.ENABLED and crop.TYPE != "absolute":
        raise ConfigError(f"INPUT.CROP.PAD does not support INPUT.CROP.TYPE {crop.TYPE!r}. Use 'absolute'.")
    if name == "default":
        return
    if is_segmentor(cfg):
        raise ConfigError(f"INPUT.AUGMENTATION {name!r} needs a detector. Use 'default', and INPUT.CROP for crops.")
    if crop.ENABLED:
        raise ConfigError(f"INPUT.AUGMENTATION {name!r} already crops images. Set INPUT.CROP.ENABLED False.")
    has_masks = model.META_ARCHITECTURE == "GeneralizedRCNN" and model.MASK_ON and not model.KEYPOINT_ON
    if name == "lsj_copy_paste" and cfg.INPUT.COPY_PASTE.PROBABILITY and not has_masks:
        raise ConfigError("Copy-paste needs a Mask R-CNN without keypoints. Set INPUT.COPY_PASTE.PROBABILITY 0.0.")
