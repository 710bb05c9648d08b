"""What detects: an eager detector, or an exported one."""

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.structures import Instances
from torch import Tensor

from backbones import InputError
from projects_vil.checkpoint import Categories, check_weights_file, checked_ids, known_categories, load_detector
from projects_vil.config import DETECTORS, check_device, default_config, number_of_classes
from projects_vil.data import size_for_testing
from projects_vil.export import ExportedModel, fitted_size, is_exported, padded, read_metadata, to_instances
from projects_vil.modeling import add_tta, augmentation_sizes, longest_side


class Runner(Protocol):
    """What detects: an eager detector, or an exported one.

    Attributes:
        channels: the order that it takes, ``"RGB"`` or ``"BGR"``.
        categories: its classes.
    """

    channels: str
    categories: Categories

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width to which it wants an image of this size to be resized."""

    def refusal(self, height: int, width: int) -> str | None:
        """Why it cannot take an image of this size; None where it can."""

    def __call__(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        """Detect.

        Args:
            images: (3, H, W) uint8 on the CPU, all of one size, that of :meth:`input_size`.
            sizes: height and width of each image's file.

        Returns:
            For each image ``pred_boxes`` in pixels of the file, ``scores``, ``pred_classes`` and, for Mask R-CNN,
            ``pred_masks`` (N, height, width), on the CPU.
        """


class Predictor:
    """The eager detector of a config on ``MODEL.DEVICE``, as a :class:`Runner`.

    Args:
        cfg: the detector's config.
        weights: its checkpoint.
        tta: whether to augment (:mod:`projects_vil.modeling.test_time_augmentation`); then it takes images as they are
            in their files.

    Raises:
        InputError: where the weights are missing or do not fit.
    """

    def __init__(self, cfg: CfgNode, weights: str | Path, *, tta: bool = False) -> None:
        model, self.categories = load_detector(cfg, weights, device=cfg.MODEL.DEVICE, as_datasets=False)
        self.cfg = cfg
        self.weights = Path(weights)
        self.detector = model
        self.channels = cfg.INPUT.FORMAT
        self.tta = tta
        self.longest_side = longest_side(model)
        self.model = add_tta(cfg, model) if tta else model

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        return (height, width) if self.tta else size_for_testing(self.cfg, height, width)

    def refusal(self, height: int, width: int) -> str | None:
        if not self.tta:
            return _refusal((height, width), self.input_size(height, width), (1, self.longest_side))
        mapper = self.model.tta_mapper if isinstance(self.model, GeneralizedRCNNWithTTA) else self.model.mapper
        # The smallest; its longest side is no more than the mapper's.
        size = T.ResizeShortestEdge.get_output_shape(height, width, min(mapper.min_sizes), mapper.max_size)
        return _refusal((height, width), size, (1, None))

    @torch.no_grad()
    def __call__(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        inputs = [
            {"image": image, "height": height, "width": width}
            for image, (height, width) in zip(images, sizes, strict=True)
        ]
        return [output["instances"].to("cpu") for output in self.model(inputs)]


class ExportedRunner:
    """An exported model, as a :class:`Runner`: resized as its metadata says, whatever the config.

    Args:
        path: of the file; its metadata stands beside it.
        score_threshold: of what it gives; None for all that the file gives.
        datasets: where what older metadata do not say of the classes is looked for.

    Raises:
        InputError: where either is missing or damaged, or the file itself leaves out what the threshold lets through.
    """

    def __init__(self, path: str | Path, *, score_threshold: float | None = None, datasets: Sequence[str] = ()) -> None:
        self.model = ExportedModel(path)
        self.channels = self.model.metadata["input"]["color_order"]
        classes = self.model.metadata["classes"]
        ids = checked_ids(self.model.metadata.get("category_ids"), classes)
        self.categories = known_categories(classes, ids, number=len(classes), datasets=datasets)
        inside = self.model.metadata.get("thresholds", {}).get("score", 0)
        if score_threshold is not None and score_threshold < inside:
            raise InputError(
                f"score_threshold is {score_threshold:g}, and {path} was exported with {inside:g}: it gives no more"
            )
        self.score_threshold = score_threshold
        self.resizing = self.model.metadata["resizing"]
        self.fixed_size = tuple(self.model.metadata["input"].get("size") or ()) or None
        self.sides = (None if self.fixed_size else self.model.metadata["input"].get("sides")) or (1, None)

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        if self.fixed_size:
            return fitted_size(height, width, self.fixed_size)
        if not self.resizing["short_side"]:
            return height, width
        sides = self.resizing["short_side"], self.resizing["longest_side"]
        return T.ResizeShortestEdge.get_output_shape(height, width, *sides)

    def refusal(self, height: int, width: int) -> str | None:
        return _refusal((height, width), self.input_size(height, width), self.sides)

    def __call__(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        taken = [self._padded(image) for image in images]
        if self.model.batched:
            found = self.model(torch.stack(taken))
            image_index = found.pop("image_index")
            each = [
                {name: value[image_index == index] for name, value in found.items()} for index in range(len(images))
            ]
        else:
            each = [self.model(image) for image in taken]
        if self.score_threshold is not None:
            each = [
                {name: value[found["scores"] >= self.score_threshold] for name, value in found.items()}
                for found in each
            ]
        return [
            to_instances(found, image.shape[1:], size) for found, image, size in zip(each, images, sizes, strict=True)
        ]

    def _padded(self, image: Tensor) -> Tensor:
        if not self.fixed_size:
            return image
        return padded(image, self.fixed_size, self.model.metadata["normalization"]["mean"])


def check_runner(cfg: CfgNode, weights: str | Path, *, tta: bool = False) -> None:
    """What can be checked of :func:`build_runner` in no time.

    Raises:
        InputError: for a model that is no detector, missing weights, an exported model of other classes, a device that
            is not here, or sizes to augment to that are none.
    """
    if cfg.MODEL.META_ARCHITECTURE not in DETECTORS:
        raise InputError(f"a {cfg.MODEL.META_ARCHITECTURE} cannot predict here: only {' and '.join(DETECTORS)} can")
    if cfg.INPUT.FORMAT not in ("RGB", "BGR"):
        raise InputError(f"INPUT.FORMAT is {cfg.INPUT.FORMAT}: it is RGB or BGR")
    if not str(weights):
        raise InputError("no weights were given: name a trained detector's checkpoint (--weights, MODEL.WEIGHTS)")
    if is_exported(weights):
        if tta:
            raise InputError(f"--tta changes the images inside the detector, and {weights} is an exported one")
        check_number_of_classes(cfg, read_metadata(weights)["classes"])
        return
    check_weights_file(str(weights))
    check_device(cfg)
    if tta:
        augmentation_sizes(cfg)


def check_overrides(weights: str | Path, overrides: Sequence[str]) -> None:
    """Raise an :class:`InputError` for an override, of keys and values by turns, that an export cannot follow."""
    heeded = ("MODEL.WEIGHTS", "MODEL.DEVICE", "DATASETS.")
    idle = [key for key in overrides[::2] if not key.startswith(heeded)] if is_exported(weights) else []
    if idle:
        raise InputError(f"{idle[0]} changes nothing here: it is inside {weights}; export the model again with it")


def config_of_export(path: str | Path | None, overrides: Sequence[str] = ()) -> CfgNode:
    """A config that says of an exported file what those who read images ask a config for.

    Args:
        path: the file; None where none was named.
        overrides: keys and values by turns: the file's own and its device alone.

    Raises:
        InputError: for a checkpoint, whose config cannot be made up, where the file's metadata are missing, for a key
            that changes nothing, and for a device other than the CPU.
    """
    if path is None:
        raise InputError("name a config with --config-file, or an exported model, which needs none, with --weights")
    if not is_exported(path):
        there = exported_in(Path(path))
        instead = f", and {there[0]} is: name that, or a config" if there else ": name its config"
        raise InputError(f"{path} is no exported model{instead} with --config-file")
    check_overrides(path, overrides)
    for key, value in zip(overrides[::2], overrides[1::2], strict=True):
        if key.startswith("DATASETS."):
            raise InputError(f"{key} is read from a config alone: name one with --config-file")
        if key == "MODEL.DEVICE" and value != "cpu":
            raise InputError(f"{path} is an exported model, which runs on the CPU here, not on {value}")
    cfg = default_config()
    cfg.MODEL.WEIGHTS = str(path)
    cfg.MODEL.META_ARCHITECTURE = "RetinaNet"
    cfg.MODEL.RETINANET.NUM_CLASSES = len(read_metadata(path)["classes"])
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ()
    cfg.freeze()
    return cfg


def exported_in(path: Path) -> list[Path]:
    """The exported files of a folder, or those beside another of their files, ``model.xml`` of ``model.bin``."""
    if path.is_dir():
        return sorted(found for found in path.rglob("*") if found.is_file() and is_exported(found))
    beside = path.parent.glob(f"{glob.escape(path.stem)}.*") if path.is_file() else ()
    return sorted(found for found in beside if is_exported(found))


def check_number_of_classes(cfg: CfgNode, classes: Sequence[str] | None) -> None:
    """Raise an :class:`InputError` where a model has ``classes``, and its config another number of them."""
    key, number = number_of_classes(cfg)
    if classes is not None and len(classes) != number:
        names = f"{', '.join(classes[:3])}{', ...' if len(classes) > 3 else ''}"
        raise InputError(f"{key} is {number}, and the weights know {len(classes)} classes ({names}): set it to that")


def _refusal(file_size: tuple[int, int], size: tuple[int, int], sides: Sequence[int | None]) -> str | None:
    """Why a file of ``file_size`` that is resized to ``size`` is nothing for a model that takes these sides."""
    smallest, largest = sides
    before = f"{file_size[0]} x {file_size[1]} pixels"
    if min(size) < 1:
        return f"{before}: resized, nothing would be left of it"
    if min(size) < smallest or (largest is not None and max(size) > largest):
        takes = f"{smallest} or more" if largest is None else f"{smallest} to {largest}"
        return f"{before}: resized to {size[0]} x {size[1]}, and the model takes sides of {takes}"
    return None
