"""Recipes for your own data: weights, image size, anchors, and config keys that replace COCO's schedule."""

import math
from collections.abc import Mapping, Set
from typing import Any

from detectron2.config import CfgNode

from backbones import ConfigError
from backbones.errors import counted
from projects_vil.checkpoint import find_weights, is_zoo_name, read_zoo, zoo_entry
from projects_vil.config import config_path, detector_name, load_config, load_yaml_with_base, with_overrides
from projects_vil.data.object_sizes import IMAGE_SIZES, LONGER_SIDE, Anchors, choose_size, objects_of
from projects_vil.data.splits import entries_of
from projects_vil.modeling import TIMM_PREFIX
from projects_vil.solver import longest_warmup
from vil import choices

# Models that are trained without --model, with and without pretrained weights.
STARTER, STARTER_WEIGHTS = "timm:tf_efficientnet_lite0", "efficientnet_lite0_in1k"
SMALL_MODEL = "vil_tiny_1_1_3_1_rpb"
# The learning rate of a recipe is for batches up to this size.
_REFERENCE_BATCH = 4
# The learning rate of a pretrained transformer, or of a detector with the same classes, is this factor of the recipe's.
_LOW_RATE_FACTOR = 0.2
# The recipe "finetune" ends with this factor of its learning rate. With 0, the weights hardly change in the last epoch.
_LAST_RATE_FACTOR = 0.2
# Sizes of the training images of the recipe "finetune", as factors of the image size.
_SCALES = (0.8, 0.9, 1.0, 1.1, 1.2)
# Values by device: the batch size, the number of images that a run trains on, and the smallest and largest number of
# epochs. On a CPU, 720 images of 256 pixels take about 300 s on one core.
_BATCH = {"cpu": 2, "cuda": 8}
_IMAGES = {"cpu": 720, "cuda": 3200}
_EPOCHS = {"cpu": (3, 100), "cuda": (12, 100)}
# On a CPU, the default detector has narrower heads, which train on more images in the same time, and a GIoU loss
# (docs/benchmarks.md).
_NARROW_CHANNELS, _NARROW_FACTOR = 64, 1.9
# The image sizes on a CPU if the user chooses a longer run
_SIZES_OF_LONG_RUNS = range(192, 641, 32)
# For random weights, the number of images is multiplied by this factor. They need more iterations than pretrained
# weights, so the image size on a CPU is smaller.
_SCRATCH_FACTOR, _SCRATCH_SIZES = {"cpu": 0.6, "cuda": 1.5}, (128,)
# Epochs of the recipe "paper" on your own data. The schedules for COCO count iterations.
_PAPER_EPOCHS = 50


def with_recipe(
    cfg: CfgNode,
    recipe: str,
    content: Mapping[str, Any],
    *,
    image_size: int | str | None,
    given: Set[str],
    num_processes: int,
    keep_anchors: bool = False,
    low_rate: bool = False,
) -> CfgNode:
    """Return a config with the image size, the anchors and the recipe for a dataset, and print them.

    Args:
        cfg: The config of the run, with an available device.
        recipe: ``"finetune"`` or ``"scratch"`` (``configs/base/recipe_*.yaml``), or ``"paper"`` to keep the config.
        content: The content of the COCO file of the training images; empty without a dataset.
        image_size: Shorter side of the images in pixels; ``"auto"`` to choose it from the objects; None for the size of
            the config with the recipe ``"paper"`` or with an image size in ``given``, and otherwise ``"auto"``.
        given: Config keys that the user has set, and that keep their values.
        num_processes: Number of processes.
        keep_anchors: Whether the weights are a detector with the image size and the anchors of the config.
        low_rate: Whether the weights are a detector of the same classes, which needs a low learning rate.
    """
    device = cfg.MODEL.DEVICE.partition(":")[0]
    is_paper, objects = recipe == "paper", objects_of(content)
    # Training skips images without objects unless the config uses them.
    used = {str(one.get("image_id")) for one in entries_of(content, "annotations") if not one.get("iscrowd")}
    number = len(used if used and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS else content.get("images", ()))
    is_auto = image_size == "auto" or not (image_size or is_paper or keep_anchors or given & size_values(1).keys())
    batch, size, values = cfg.SOLVER.IMS_PER_BATCH, cfg.INPUT.MIN_SIZE_TEST, {}
    if "SOLVER.IMS_PER_BATCH" not in given:
        batch = batch if is_paper else num_processes * max(_BATCH[device] // num_processes, 1)
        values["SOLVER.GRADIENT_ACCUMULATION_STEPS"] = "auto"
    is_default = cfg.MODEL.WEIGHTS == STARTER_WEIGHTS and cfg.MODEL.META_ARCHITECTURE == "RetinaNet"
    can_be_narrow = is_default and recipe == "finetune" and device == "cpu" and "MODEL.FPN.OUT_CHANNELS" not in given
    images = _IMAGES[device] * (_NARROW_FACTOR if can_be_narrow else 1)
    iterations = cfg.SOLVER.MAX_ITER if "SOLVER.MAX_ITER" in given else 0
    chosen = cfg.SOLVER.EPOCHS * number or iterations * batch
    is_long = device == "cpu" and chosen > max(images, _EPOCHS[device][0] * number)
    if can_be_narrow and not is_long:
        values |= {"MODEL.FPN.OUT_CHANNELS": _NARROW_CHANNELS, "MODEL.RETINANET.BBOX_REG_LOSS_TYPE": "giou"}
    if len(objects) and (is_auto or not is_paper):
        # The heads of a pretrained detector need the anchors of its config.
        keep_anchors |= is_zoo_name(cfg.MODEL.WEIGHTS) and zoo_entry(cfg.MODEL.WEIGHTS).config is not None
        own_sizes = _SCRATCH_SIZES if device == "cpu" and recipe == "scratch" else IMAGE_SIZES[device]
        sizes = (_SIZES_OF_LONG_RUNS if is_long else own_sizes) if is_auto else [size]
        fit = not (is_paper or keep_anchors or any(key.startswith("MODEL.ANCHOR_GENERATOR.") for key in given))
        size, anchors, text = choose_size(anchors_of(cfg), objects, sizes=sizes, fit=fit, tiled=cfg.TEST.TILE_SIZE > 0)
        print(text, flush=True)
        if fit:
            values["MODEL.ANCHOR_GENERATOR.SIZES"] = anchors.sizes
            values["MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS"] = [anchors.ratios]
        values |= size_values(size) if is_auto else {}
    if is_paper:
        values |= {"SOLVER.EPOCHS": cfg.SOLVER.EPOCHS or _PAPER_EPOCHS} if content else {}
    else:
        values |= _recipe_values(cfg, recipe, size, batch, low_rate=low_rate)
        if recipe == "finetune":
            rate = cfg.SOLVER.BASE_LR if "SOLVER.BASE_LR" in given else values["SOLVER.BASE_LR"]
            values["SOLVER.BASE_LR_END"] = _LAST_RATE_FACTOR * rate
        switches = {"TEST.EVAL_PERIOD": cfg.TEST.EVAL_PERIOD, "TEST.BEST_METRIC": cfg.TEST.BEST_METRIC}
        if not cfg.DATASETS.TEST or not all(switches[key] for key in switches.keys() & given):
            values |= {"TEST.BEST_METRIC": "", "SOLVER.EARLY_STOPPING_PATIENCE": 0}
        if content:
            images *= _SCRATCH_FACTOR[device] if recipe == "scratch" else 1
            images *= (256 / size) ** 2 if device == "cpu" else 1
            least, most = _EPOCHS[device]
            values["SOLVER.EPOCHS"] = min(max(round(images / number), least), most)
    if "SOLVER.MAX_ITER" in given:
        values.pop("SOLVER.EPOCHS", None)
        if not is_paper:
            values["SOLVER.WARMUP_ITERS"] = min(values["SOLVER.WARMUP_ITERS"], longest_warmup(cfg.SOLVER.MAX_ITER))
    cfg = with_overrides(cfg, values, keep=given)
    if not is_paper:
        epochs, rate = cfg.SOLVER.EPOCHS, cfg.SOLVER.BASE_LR
        length = counted(epochs, "epoch") if epochs else counted(cfg.SOLVER.MAX_ITER, "iteration")
        print(f"Recipe {recipe}: {length}, batch {batch}, learning rate {rate:.3g}, image size {size}", flush=True)
    if image_size or not is_paper:
        # Position tables must cover the longer side.
        longest = max(cfg.INPUT.MAX_SIZE_TRAIN, cfg.MODEL.TRANSFORMER.MAX_IMG_SIZE)
        cfg = with_overrides(cfg, {"MODEL.TRANSFORMER.MAX_IMG_SIZE": longest})
    return cfg


def _recipe_values(cfg: CfgNode, recipe: str, size: int, batch: int, *, low_rate: bool) -> dict[str, Any]:
    """Return the config keys of a recipe for a model, an image size and a batch size."""
    values = load_yaml_with_base(config_path(f"base/recipe_{recipe}"))
    # Sides that are no multiples of 32 would be padded.
    sizes = tuple(round(factor * size / 32) * 32 for factor in _SCALES) if recipe == "finetune" else (size,)
    values |= {"INPUT.MIN_SIZE_TRAIN": sizes, "INPUT.MAX_SIZE_TRAIN": round(max(sizes) * LONGER_SIDE)}
    values["SOLVER.IMS_PER_BATCH"] = batch
    values["SOLVER.BASE_LR"] *= max(math.sqrt(batch / _REFERENCE_BATCH), 1)
    is_timm, has_batch_norm = cfg.MODEL.TRANSFORMER.VARIANT.startswith(TIMM_PREFIX), bool(cfg.MODEL.TRANSFORMER.NORM)
    if recipe == "finetune" and (low_rate or not is_timm):
        values["SOLVER.BASE_LR"] *= _LOW_RATE_FACTOR
    if not has_batch_norm:
        values.pop("MODEL.TRANSFORMER.NORM", None)
    if not (is_timm and has_batch_norm):
        values.pop("MODEL.BACKBONE.FREEZE_AT", None)
    if cfg.MODEL.MASK_ON:
        values["TEST.BEST_METRIC"] = "segm/AP"
    return values


def anchors_of(cfg: CfgNode) -> Anchors:
    """Return the anchors of a RetinaNet or R-CNN detector."""
    generator = cfg.MODEL.ANCHOR_GENERATOR
    heads = cfg.MODEL.RETINANET if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else cfg.MODEL.RPN
    strides = [2 ** int(name.removeprefix("p")) for name in heads.IN_FEATURES]
    return Anchors(generator.SIZES, generator.ASPECT_RATIOS[0], strides, generator.OFFSET)


def size_values(size: int) -> dict[str, Any]:
    """Return the config keys of an image size, the shorter side of the images in pixels."""
    longest = dict.fromkeys(("INPUT.MAX_SIZE_TRAIN", "INPUT.MAX_SIZE_TEST"), round(size * LONGER_SIDE))
    return {"INPUT.MIN_SIZE_TRAIN": (size,), "INPUT.MIN_SIZE_TEST": size} | longest


def chosen_size(image_size: int | str | None, tiles: int | None) -> tuple[int | str | None, dict[str, Any]]:
    """Return the image size or the side of the tiles that the user has chosen, and its config keys.

    There are no keys for an automatic size.

    Raises:
        ConfigError: If both are given, or if the size is not a whole number in the allowed range.
    """
    if None not in (tiles, image_size):
        raise ConfigError("tiles and image_size both set the size of the training images. Remove one.")
    size, (least, most) = image_size if tiles is None else tiles, choices.IMAGE_SIZES
    if tiles is None and size in (None, "auto"):
        return size, {}
    if not (isinstance(size, int) and least <= size <= most):
        argument = "image_size" if tiles is None else "tiles"
        raise ConfigError(f"{argument} is {size!r}. Give a whole number from {least} to {most}.")
    crop = {"INPUT.CROP.ENABLED": True, "INPUT.CROP.TYPE": "absolute", "INPUT.CROP.SIZE": [size, size]}
    return size, size_values(size) | ({} if tiles is None else crop | {"TEST.TILE_SIZE": size})


def default_model(weights: str, *, is_random: bool) -> str:
    """Return the model that is trained without ``--model``.

    Args:
        weights: ``MODEL.WEIGHTS``, if the user has set it. A name in the model zoo also sets the model.
        is_random: Whether the user wants random weights.
    """
    if weights:
        return zoo_entry(weights).variant if is_zoo_name(weights) else STARTER
    try:
        find_weights(STARTER_WEIGHTS)
    except ConfigError as error:
        if not is_random:
            print(f"{error} Without them, a small model is trained from random weights.", flush=True)
        is_random = True
    return SMALL_MODEL if is_random else STARTER


def best_weights(cfg: CfgNode) -> str:
    """Return the name of the best available weights of a model, or an empty string, and print a line about them.

    The model zoo lists detectors that were trained on COCO first, then ImageNet backbones. Weights that cannot be
    downloaded are skipped with a message. timm loads the weights of a model with a tag itself.
    """
    variant = cfg.MODEL.TRANSFORMER.VARIANT
    if "." in variant:
        print(f"Weights: timm's {variant.removeprefix(TIMM_PREFIX)}, from the Hugging Face Hub", flush=True)
        return ""
    for name, entry in read_zoo().items():
        if entry.variant != variant or "unreachable" in entry.group:
            continue
        if entry.config and detector_name(load_config(config_path(entry.config))) != detector_name(cfg):
            continue
        try:
            find_weights(name)
        except ConfigError as error:
            print(error, flush=True)
            continue
        print(f"Weights: {name} ({entry.group['trained_on']})", flush=True)
        return name
    print(f"Weights: random, because no pretrained weights of {variant} are available", flush=True)
    return ""
