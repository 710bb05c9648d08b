"""Recipes for your own data: weights, image size, anchors, and config keys that replace COCO's schedule."""

import contextlib
import math
from array import array
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode

from backbones import ConfigError
from backbones.errors import counted
from projects_vil.checkpoint import find_weights, is_zoo_name, read_zoo, zoo_entry
from projects_vil.config import (
    config_path,
    detector_name,
    load_config,
    load_yaml_with_base,
    with_overrides,
)
from projects_vil.modeling import TIMM_PREFIX
from projects_vil.solver import longest_warmup

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
# Values by device: the image sizes to choose from in pixels, the batch size, the number of images that a run trains on,
# and the smallest and largest number of epochs. On a CPU, 720 images of 256 pixels take about 300 s on one core. In the
# same time, larger images reach a lower AP, because the run has fewer iterations.
IMAGE_SIZES = {"cpu": range(192, 257, 32), "cuda": range(512, 801, 32)}
# The sizes on a CPU if the user chooses a longer run
_SIZES_OF_LONG_RUNS = range(192, 641, 32)
_BATCH = {"cpu": 2, "cuda": 8}
_IMAGES = {"cpu": 720, "cuda": 3200}
_EPOCHS = {"cpu": (3, 100), "cuda": (12, 100)}
# For random weights, the number of images is multiplied by this factor. They need more iterations than pretrained
# weights, so the image size on a CPU is smaller.
_SCRATCH_FACTOR, _SCRATCH_SIZES = {"cpu": 0.6, "cuda": 1.5}, (128,)
# Epochs of the recipe "paper" on your own data. The schedules for COCO count iterations.
_PAPER_EPOCHS = 50
# The share of the objects that the chosen size and anchors match, at this IoU.
TARGET_SHARE = 0.98
MATCH_IOU = 0.5
# A size below 256 pixels is chosen only if half of the objects have a side of at least 50 pixels.
SMALL_SIZE, SMALL_SIDE = 256, 50
# The longer side of an image is at most this multiple of the image size.
LONGER_SIDE = 5 / 3
# Factors of the sizes of the config's anchors.
_FACTORS = [2 ** (step / 4) for step in range(-8, 5)]
# In larger datasets, the choice is made on this number of objects.
_MOST_OBJECTS = 10_000


def with_recipe(
    cfg: CfgNode,
    recipe: str,
    content: Mapping[str, Any] | None,
    *,
    image_size: int | str | None,
    given: Set[str],
    num_processes: int,
    keep_anchors: bool = False,
    low_rate: bool = False,
) -> CfgNode:
    """Return a config with the image size, the anchors and the recipe for a dataset, and print them.

    Args:
        cfg: The config of the run.
        recipe: ``"finetune"`` or ``"scratch"`` (``configs/base/recipe_*.yaml``), or ``"paper"`` to keep the config.
        content: The content of the COCO file of the training images; None without a dataset.
        image_size: Shorter side of the images in pixels; ``"auto"`` to choose it from the objects; None for the size of
            the config with the recipe ``"paper"`` or with an image size in ``given``, and otherwise ``"auto"``.
        given: Config keys that the user has set, and that keep their values.
        num_processes: Number of processes.
        keep_anchors: Whether the weights are a detector with the image size and the anchors of the config.
        low_rate: Whether the weights are a detector of the same classes, which needs a low learning rate.
    """
    device = "cuda" if cfg.MODEL.DEVICE.startswith("cuda") and torch.cuda.is_available() else "cpu"
    is_paper, objects = recipe == "paper", objects_of(content) if content else ()
    is_auto = image_size == "auto" or not (image_size or is_paper or keep_anchors or given & size_values(1).keys())
    batch, size, values = cfg.SOLVER.IMS_PER_BATCH, cfg.INPUT.MIN_SIZE_TEST, {}
    if "SOLVER.IMS_PER_BATCH" not in given:
        batch = batch if is_paper else num_processes * max(_BATCH[device] // num_processes, 1)
        values["SOLVER.GRADIENT_ACCUMULATION_STEPS"] = "auto"
    if len(objects) and (is_auto or not is_paper):
        # The heads of a pretrained detector need the anchors of its config.
        keep_anchors |= is_zoo_name(cfg.MODEL.WEIGHTS) and zoo_entry(cfg.MODEL.WEIGHTS).config is not None
        has_anchors = any(key.startswith("MODEL.ANCHOR_GENERATOR.") for key in given)
        number, least = len(content["images"]), _EPOCHS[device][0]
        chosen = cfg.SOLVER.EPOCHS * number or cfg.SOLVER.MAX_ITER * batch * ("SOLVER.MAX_ITER" in given)
        is_long = device == "cpu" and chosen > max(_IMAGES[device], least * number)
        own_sizes = _SCRATCH_SIZES if device == "cpu" and recipe == "scratch" else IMAGE_SIZES[device]
        sizes = (_SIZES_OF_LONG_RUNS if is_long else own_sizes) if is_auto else [size]
        fit = not (is_paper or keep_anchors or has_anchors)
        size, anchors, text = choose_size(cfg, objects, sizes=sizes, fit=fit)
        print(text, flush=True)
        values |= anchors | (size_values(size) if is_auto else {})
    if is_paper:
        values |= {"SOLVER.EPOCHS": cfg.SOLVER.EPOCHS or _PAPER_EPOCHS} if content else {}
    else:
        values |= _recipe_values(cfg, recipe, size, batch, low_rate=low_rate)
        if recipe == "finetune":
            rate = cfg.SOLVER.BASE_LR if "SOLVER.BASE_LR" in given else values["SOLVER.BASE_LR"]
            values["SOLVER.BASE_LR_END"] = _LAST_RATE_FACTOR * rate
        is_off = any(key in given and not cfg.TEST[key[5:]] for key in ("TEST.EVAL_PERIOD", "TEST.BEST_METRIC"))
        if is_off or not cfg.DATASETS.TEST:
            values |= {"TEST.BEST_METRIC": "", "SOLVER.EARLY_STOPPING_PATIENCE": 0}
        if content:
            images = _IMAGES[device] * (_SCRATCH_FACTOR[device] if recipe == "scratch" else 1)
            images *= (256 / size) ** 2 if device == "cpu" else 1
            least, most = _EPOCHS[device]
            values["SOLVER.EPOCHS"] = min(max(round(images / len(content["images"])), least), most)
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
    sizes = tuple(round(factor * size) for factor in (_SCALES if recipe == "finetune" else (1.0,)))
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


def size_values(size: int) -> dict[str, Any]:
    """Return the config keys of an image size, the shorter side of the images in pixels."""
    longest = dict.fromkeys(("INPUT.MAX_SIZE_TRAIN", "INPUT.MAX_SIZE_TEST"), round(size * LONGER_SIDE))
    return {"INPUT.MIN_SIZE_TRAIN": (size,), "INPUT.MIN_SIZE_TEST": size} | longest


def tile_values(size: int) -> dict[str, Any]:
    """Return the config keys, in addition to the image size, of tiles with a side of ``size`` pixels."""
    crop = {"INPUT.CROP.ENABLED": True, "INPUT.CROP.TYPE": "absolute", "INPUT.CROP.SIZE": [size, size]}
    return crop | {"TEST.TILE_SIZE": size}


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


# -- image size and anchors ------------------------------------------------------------------------


def objects_of(content: Mapping[str, Any]) -> np.ndarray:
    """Return left, top, width and height of each object, and height and width of its image, as (N, 6) float.

    Crowds and entries that are not valid COCO are left out.

    Args:
        content: The content of a COCO file.
    """
    valid = (image for image in content["images"] if isinstance(image, dict))
    rows, images = array("d"), {image["id"]: image for image in valid if isinstance(image.get("id"), int | str)}
    for entry in content.get("annotations", ()):
        # The dataset check reports invalid entries.
        with contextlib.suppress(KeyError, TypeError, ValueError):
            left, top, width, height = map(float, entry["bbox"])
            image = images[entry["image_id"]]
            if not entry.get("iscrowd"):
                rows.extend((left, top, width, height, float(image["height"]), float(image["width"])))
    objects = np.asarray(rows).reshape(-1, 6)
    return objects[np.isfinite(objects).all(axis=1) & (objects[:, 2:] > 0).all(axis=1)]


def choose_size(
    cfg: CfgNode, objects: np.ndarray, *, sizes: Iterable[int], fit: bool
) -> tuple[int, dict[str, Any], str]:
    """Return the first image size at which the anchors match ``TARGET_SHARE`` of the objects, or else the last one.

    Sizes below ``SMALL_SIZE`` are skipped if the median side of the objects would be below ``SMALL_SIDE``.

    Args:
        cfg: The config of a detector with anchors.
        objects: The result of :func:`objects_of`, at least one.
        sizes: The sizes to choose from, the smallest first.
        fit: Whether to fit the anchors to the objects instead of using the anchors of the config. Fitted anchors have
            the aspect ratios of the objects, and the sizes of the config times a factor.

    Returns:
        The shorter side of the images in pixels, the config keys of fitted anchors, and a line of text about both.
    """
    generator, number = cfg.MODEL.ANCHOR_GENERATOR, len(objects)
    objects = objects[:: math.ceil(number / _MOST_OBJECTS)]
    height, width = objects[:, 4], objects[:, 5]
    for size in sizes:
        scale = np.minimum(size / np.minimum(height, width), LONGER_SIDE * size / np.maximum(height, width))
        if cfg.TEST.TILE_SIZE:
            # Tiles are cut from images in their original size.
            scale = np.ones_like(height)
        boxes, anchors = objects[:, :4] * scale[:, None], {}
        if fit:
            quantiles = (np.arange(len(generator.ASPECT_RATIOS[0])) + 0.5) / len(generator.ASPECT_RATIOS[0])
            ratios = np.quantile(boxes[:, 3] / boxes[:, 2], quantiles).clip(0.05, 20).round(2).tolist()
            fits = []
            for factor in _FACTORS:
                anchor_sizes = [[round(factor * side, 1) for side in level] for level in generator.SIZES]
                fits.append((_best_ious(cfg, boxes, anchor_sizes, ratios), anchor_sizes))
            ious, anchor_sizes = max(fits, key=lambda pair: (round(np.mean(pair[0] >= MATCH_IOU), 2), pair[0].mean()))
            anchors = {"MODEL.ANCHOR_GENERATOR.SIZES": anchor_sizes, "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS": [ratios]}
        else:
            ious = _best_ious(cfg, boxes, generator.SIZES, generator.ASPECT_RATIOS[0])
        share = np.mean(ious >= MATCH_IOU)
        small, median, large = np.percentile(np.sqrt(boxes[:, 2] * boxes[:, 3]), (10, 50, 90))
        if share >= TARGET_SHARE and (size >= SMALL_SIZE or median >= SMALL_SIDE):
            break
    matching = "fitted anchors match" if fit else "the model's anchors match"
    advice = ". A larger --image-size matches more, and needs more --epochs" if share < TARGET_SHARE else ""
    text = (
        f"objects in the training images: {number:,}, with a side of {small:.0f} to {large:.0f} pixels "
        f"(median {median:.0f}) at image size {size}; {matching} {share:.1%} of them (IoU {MATCH_IOU}){advice}"
    )
    return size, anchors, text


def _best_ious(cfg: CfgNode, boxes: np.ndarray, anchor_sizes: list[list[float]], ratios: list[float]) -> np.ndarray:
    """Return the IoU of each box with the best anchor at the positions of the feature maps, (N,)."""
    heads = cfg.MODEL.RETINANET if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else cfg.MODEL.RPN
    strides = [2 ** int(name.removeprefix("p")) for name in heads.IN_FEATURES]
    rows = [
        (stride, side / ratio**0.5, side * ratio**0.5)
        for stride, sides in zip(strides, anchor_sizes, strict=True)
        for side in sides
        for ratio in ratios
    ]
    stride, *anchors = np.array(rows).T
    overlap, areas = 1.0, boxes[:, 2:].prod(axis=1)[:, None] + anchors[0] * anchors[1]
    for axis, anchor in enumerate(anchors):
        length = boxes[:, 2 + axis, None]
        center = boxes[:, axis, None] + length / 2 - cfg.MODEL.ANCHOR_GENERATOR.OFFSET * stride
        # The distance to the center of the closest anchor
        distance = np.abs((center + stride / 2) % stride - stride / 2)
        overlap = overlap * np.clip((length + anchor) / 2 - distance, 0, np.minimum(length, anchor))
    return (overlap / (areas - overlap)).max(axis=1)
