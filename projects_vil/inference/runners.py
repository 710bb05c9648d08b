"""Detectors behind one interface: a model with weights, and an exported file."""

from collections.abc import Sequence
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.structures import Instances
from torch import Tensor

from backbones import ConfigError
from projects_vil.checkpoint import check_weights_file, checked_ids, known_categories, load_detector
from projects_vil.config import DETECTORS, check_device, default_config, number_of_classes
from projects_vil.data import size_for_testing
from projects_vil.export import ExportedModel, is_exported, letterbox_size, pad_image, read_metadata, to_instances
from projects_vil.modeling import add_tta, augmentation_sizes, longest_side


class EagerRunner:
    """The detector of a config with the weights of a checkpoint, on ``MODEL.DEVICE``.

    Args:
        cfg: the detector's config.
        weights: its checkpoint.
        tta: whether to use test-time augmentation, which takes images in their own size.

    Attributes:
        channels: ``"RGB"`` or ``"BGR"``, the channel order of its input.
        categories: its classes.

    Raises:
        ConfigError: if the weights are missing or do not fit.
    """

    def __init__(self, cfg: CfgNode, weights: str | Path, *, tta: bool = False) -> None:
        self.detector, self.categories = load_detector(cfg, weights, device=cfg.MODEL.DEVICE, as_datasets=False)
        self.cfg = cfg
        self.weights = Path(weights)
        self.channels = cfg.INPUT.FORMAT
        self.tta = tta
        self.longest_side = longest_side(self.detector)
        self.model = add_tta(cfg, self.detector) if tta else self.detector

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width to which an image of this size must be resized."""
        return (height, width) if self.tta else size_for_testing(self.cfg, height, width)

    def size_error(self, height: int, width: int) -> str | None:
        """Return why an image of this size cannot be used, or None."""
        if not self.tta:
            return _size_error((height, width), self.input_size(height, width), (1, self.longest_side))
        mapper = self.model.tta_mapper if isinstance(self.model, GeneralizedRCNNWithTTA) else self.model.mapper
        smallest = T.ResizeShortestEdge.get_output_shape(height, width, min(mapper.min_sizes), mapper.max_size)
        return _size_error((height, width), smallest, (1, None))

    @torch.no_grad()
    def __call__(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        """Detect.

        Args:
            images: (3, H, W) uint8 on the CPU, all of one size, from :meth:`input_size`.
            sizes: height and width of each original image.

        Returns:
            For each image ``pred_boxes`` in pixels of the original, ``scores``, ``pred_classes`` and, for Mask R-CNN,
            ``pred_masks`` (N, height, width), on the CPU.
        """
        inputs = [
            {"image": image, "height": height, "width": width}
            for image, (height, width) in zip(images, sizes, strict=True)
        ]
        return [output["instances"].to("cpu") for output in self.model(inputs)]


class ExportedRunner:
    """An exported model with the interface of :class:`EagerRunner`; images are resized as its metadata say.

    Args:
        path: the exported file; its metadata lie next to it.
        score_threshold: lowest score of a detection; None for that of the export.
        datasets: where class names and ids of older exports are looked up.

    Raises:
        ConfigError: if either file is missing or damaged, or the export's own threshold is above ``score_threshold``.
    """

    def __init__(self, path: str | Path, *, score_threshold: float | None = None, datasets: Sequence[str] = ()) -> None:
        self.model = ExportedModel(path)
        metadata = self.model.metadata
        self.channels = metadata["input"]["color_order"]
        classes = metadata["classes"]
        ids = checked_ids(metadata.get("category_ids"), classes)
        self.categories = known_categories(classes, ids, number=len(classes), datasets=datasets)
        exported_with = metadata.get("thresholds", {}).get("score", 0)
        if score_threshold is not None and score_threshold < exported_with:
            raise ConfigError(f"score_threshold is {score_threshold:g}, and {path} was exported with {exported_with:g}")
        self.score_threshold = score_threshold
        self.resizing = metadata["resizing"]
        self.fixed_size = tuple(metadata["input"].get("size") or ()) or None
        self.sides = (None if self.fixed_size else metadata["input"].get("sides")) or (1, None)

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        if self.fixed_size:
            return letterbox_size(height, width, self.fixed_size)
        if not self.resizing["short_side"]:
            return height, width
        sides = self.resizing["short_side"], self.resizing["longest_side"]
        return T.ResizeShortestEdge.get_output_shape(height, width, *sides)

    def size_error(self, height: int, width: int) -> str | None:
        return _size_error((height, width), self.input_size(height, width), self.sides)

    def __call__(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        mean = self.model.metadata["normalization"]["mean"]
        inputs = [pad_image(image, self.fixed_size, mean) if self.fixed_size else image for image in images]
        if self.model.batched:
            found = self.model(torch.stack(inputs))
            image_index = found.pop("image_index")
            each = [{name: value[image_index == i] for name, value in found.items()} for i in range(len(images))]
        else:
            each = [self.model(image) for image in inputs]
        if self.score_threshold is not None:
            kept = [found["scores"] >= self.score_threshold for found in each]
            each = [
                {name: value[keep] for name, value in found.items()} for found, keep in zip(each, kept, strict=True)
            ]
        return [
            to_instances(found, image.shape[1:], size) for found, image, size in zip(each, images, sizes, strict=True)
        ]


def check_runner(cfg: CfgNode, weights: str | Path, *, tta: bool = False) -> None:
    """Check what can be checked before a model is built.

    Raises:
        ConfigError: for a model that is not a detector, missing weights, an exported model with another number of
            classes, an unavailable device, or invalid augmentation sizes.
    """
    if cfg.MODEL.META_ARCHITECTURE not in DETECTORS:
        raise ConfigError(f"MODEL.META_ARCHITECTURE is {cfg.MODEL.META_ARCHITECTURE}, not {' or '.join(DETECTORS)}")
    if cfg.INPUT.FORMAT not in ("RGB", "BGR"):
        raise ConfigError(f"INPUT.FORMAT is {cfg.INPUT.FORMAT}, not RGB or BGR")
    if not str(weights):
        raise ConfigError("MODEL.WEIGHTS is empty: name the checkpoint of a trained detector")
    if is_exported(weights):
        if tta:
            raise ConfigError(f"tta changes images inside the detector, and {weights} is an exported model")
        (key, number), classes = number_of_classes(cfg), read_metadata(weights)["classes"]
        if len(classes) != number:
            raise ConfigError(f"{key} is {number}, and {weights} has {len(classes)} classes")
        return
    check_weights_file(str(weights))
    check_device(cfg)
    if tta:
        augmentation_sizes(cfg)


def check_overrides(weights: str | Path, overrides: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` for an override of the config that an exported model cannot follow."""
    followed = ("MODEL.WEIGHTS", "MODEL.DEVICE", "DATASETS.")
    ignored = [key for key in overrides[::2] if not key.startswith(followed)] if is_exported(weights) else []
    if ignored:
        raise ConfigError(f"{ignored[0]} has no effect on {weights}: export the model again with it")


def config_of_export(path: str | Path | None, overrides: Sequence[str] = ()) -> CfgNode:
    """Return a config for an exported file, for the functions that read a detector's config.

    Args:
        path: the file; None raises.
        overrides: keys and values of the config; only the file's name and its device, the CPU, may be given.

    Raises:
        ConfigError: for a file that is not an export, missing metadata, or other overrides.
    """
    if path is None or not is_exported(path):
        raise ConfigError(f"{path or 'weights'}: name a detector's config, or an exported model, which needs none")
    check_overrides(path, overrides)
    for key, value in zip(overrides[::2], overrides[1::2], strict=True):
        if key.startswith("DATASETS.") or (key == "MODEL.DEVICE" and value != "cpu"):
            raise ConfigError(f"{key} {value} has no effect on {path}, which runs on the CPU without a config")
    cfg = default_config()
    cfg.MODEL.WEIGHTS = str(path)
    cfg.MODEL.META_ARCHITECTURE = "RetinaNet"
    cfg.MODEL.RETINANET.NUM_CLASSES = len(read_metadata(path)["classes"])
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ()
    cfg.freeze()
    return cfg


def _size_error(original: tuple[int, int], size: tuple[int, int], sides: Sequence[int | None]) -> str | None:
    smallest, largest = sides
    if min(size) < smallest or (largest is not None and max(size) > largest):
        takes = f"{smallest} or more" if largest is None else f"{smallest} to {largest}"
        resized = f"{size[0]} x {size[1]}, and the model takes sides of {takes}"
        return f"{original[0]} x {original[1]} pixels: resized to {resized}"
    return None
