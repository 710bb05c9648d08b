"""Detectors behind one interface: a model with weights, and an exported file."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pycocotools.mask as mask_util
import torch
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.structures import Boxes, ImageList, Instances
from torch import Tensor

from backbones import ConfigError
from backbones.errors import check_choice
from projects_vil.checkpoint import known_categories, load_detector
from projects_vil.config import DETECTORS, detector_name
from projects_vil.data import size_for_testing
from projects_vil.export import ExportedModel, letterbox_size, pad_image, to_instances
from projects_vil.modeling import add_tta, autocast_detector, max_input_side, use_sync_free_parts

DTYPES = ("float32", "bfloat16", "float16")
MASK_PIXELS = 2**27  # of masks that are encoded at once, a byte each and some for copies


class EagerRunner:
    """The detector of a config with the weights of a checkpoint, on ``MODEL.DEVICE``.

    Args:
        cfg: the detector's config.
        weights: its checkpoint.
        tta: whether to use test-time augmentation, which takes images in their own size.

    Attributes:
        channels: ``"RGB"`` or ``"BGR"``, the channel order of its input.
        categories: its classes.
        architecture, backbone: names of the detector and its backbone; ``device`` and ``weights`` as they were given.
        score_threshold: lowest score of a detection.

    Raises:
        ConfigError: for a model that is not a detector, and weights that are missing or do not fit.
    """

    def __init__(self, cfg: CfgNode, weights: str | Path, *, tta: bool = False) -> None:
        check_choice("MODEL.META_ARCHITECTURE", cfg.MODEL.META_ARCHITECTURE, DETECTORS)
        check_choice("INPUT.FORMAT", cfg.INPUT.FORMAT, ("RGB", "BGR"))
        check_choice("INFERENCE.DTYPE", cfg.INFERENCE.DTYPE, DTYPES)
        self.detector, self.categories = load_detector(cfg, weights, device=cfg.MODEL.DEVICE, as_datasets=False)
        use_sync_free_parts(self.detector)
        self.cfg = cfg
        self.weights, self.device = Path(weights), cfg.MODEL.DEVICE
        self.architecture = detector_name(cfg)
        self.backbone = getattr(getattr(self.detector.backbone, "bottom_up", None), "variant", cfg.MODEL.BACKBONE.NAME)
        head = cfg.MODEL.RETINANET if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else cfg.MODEL.ROI_HEADS
        self.score_threshold = head.SCORE_THRESH_TEST
        self.channels = cfg.INPUT.FORMAT
        self.dtype = getattr(torch, cfg.INFERENCE.DTYPE)
        self.tta = tta
        self.max_input_side = max_input_side(self.detector)
        self.model = add_tta(cfg, self.detector) if tta else self.detector

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width to which an image of this size must be resized."""
        return (height, width) if self.tta else size_for_testing(self.cfg, height, width)

    def padded_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size to which detectron2 pads an image of this size, resized: images of one may share a batch."""
        if self.tta:
            return height, width
        resized, backbone = torch.empty(self.input_size(height, width), device="meta"), self.detector.backbone
        padding = {"padding_constraints": backbone.padding_constraints}
        return tuple(ImageList.from_tensors([resized], backbone.size_divisibility, **padding).tensor.shape[1:])

    def size_error(self, height: int, width: int) -> str | None:
        """Return why an image of this size cannot be used, or None."""
        if not self.tta:
            return _size_error((height, width), self.input_size(height, width), (1, self.max_input_side))
        mapper = self.model.tta_mapper if isinstance(self.model, GeneralizedRCNNWithTTA) else self.model.mapper
        smallest = T.ResizeShortestEdge.get_output_shape(height, width, min(mapper.min_sizes), mapper.max_size)
        return _size_error((height, width), smallest, (1, None))

    @torch.no_grad()
    def __call__(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        """Detect.

        Args:
            images: (3, H, W) uint8 on the CPU, of sizes from :meth:`input_size`, all of one :meth:`padded_size`.
            sizes: height and width of each original image.

        Returns:
            For each image ``pred_boxes`` in pixels of the original, ``scores``, ``pred_classes`` and, for Mask R-CNN,
            ``pred_masks`` (N, height, width), on the detector's device.
        """
        if self.detector.device.type == "cuda" and not self.tta:
            images = [image.pin_memory().to(self.detector.device, non_blocking=True) for image in images]
        inputs = [
            {"image": image, "height": height, "width": width}
            for image, (height, width) in zip(images, sizes, strict=True)
        ]
        with autocast_detector(self.dtype, self.detector):
            return [output["instances"] for output in self.model(inputs)]


class ExportedRunner:
    """An exported model with the interface of :class:`EagerRunner`; images are resized as in its metadata.

    Args:
        path: the exported file; its metadata is next to it.
        score_threshold: lowest score of a detection; None for that of the export.

    Raises:
        ConfigError: if either file is missing or damaged, or the export's own threshold is above ``score_threshold``.
    """

    def __init__(self, path: str | Path, *, score_threshold: float | None = None) -> None:
        self.model = ExportedModel(path)
        metadata = self.model.metadata
        self.weights, self.device = self.model.path, "cpu"
        self.architecture, self.backbone = metadata["detector"], metadata["backbone"]
        self.channels = metadata["input"]["color_order"]
        classes = tuple(metadata["classes"])
        self.categories = known_categories(classes, metadata["category_ids"], number=len(classes))
        exported_with = metadata["thresholds"]["score"]
        self.score_threshold = exported_with if score_threshold is None else score_threshold
        if self.score_threshold < exported_with:
            raise ConfigError(f"score_threshold is {score_threshold:g}, and {path} was exported with {exported_with:g}")
        self.resizing = metadata["resizing"]
        self.fixed_size = tuple(metadata["input"]["size"] or ()) or None
        self.sides = (1, None) if self.fixed_size else metadata["input"]["sides"]

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        if self.fixed_size:
            return letterbox_size(height, width, self.fixed_size)
        if not self.resizing["short_side"]:
            return height, width
        sides = self.resizing["short_side"], self.resizing["longest_side"]
        return T.ResizeShortestEdge.get_output_shape(height, width, *sides)

    def padded_size(self, height: int, width: int) -> tuple[int, int]:
        return self.fixed_size or self.input_size(height, width)

    def size_error(self, height: int, width: int) -> str | None:
        return _size_error((height, width), self.input_size(height, width), self.sides)

    def __call__(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        mean = self.model.metadata["normalization"]["mean"]
        inputs = [pad_image(image, self.fixed_size, mean) if self.fixed_size else image for image in images]
        found = []
        for outputs, image, size in zip(self.model.run_each(inputs), images, sizes, strict=True):
            kept = outputs["scores"] >= self.score_threshold
            outputs = {name: value[kept] for name, value in outputs.items()}
            found.append(to_instances(outputs, image.shape[1:], size))
        return found


def _size_error(original: tuple[int, int], size: tuple[int, int], sides: Sequence[int | None]) -> str | None:
    smallest, largest = sides
    if min(size) < smallest or (largest is not None and max(size) > largest):
        takes = f"{smallest} or more" if largest is None else f"{smallest} to {largest}"
        resized = f"{size[0]} x {size[1]}, and the model takes sides of {takes}"
        return f"{original[0]} x {original[1]} pixels: resized to {resized}"
    return None


def to_host(outputs: Sequence[Instances], *, dense: bool) -> tuple[list[Instances], list[list[dict] | None]]:
    """Copy the detections of a batch to the CPU, which waits for their device once, and twice more for encoded masks.

    Args:
        outputs: detections of images, on one device.
        dense: whether ``pred_masks`` are copied as they are, or encoded by :func:`encode_masks` in their place.

    Returns:
        The detections of the images, and their encoded masks; None for an image with none.
    """
    found, masks = [], []
    for output in outputs:
        fields = dict(output.get_fields())
        if not dense and "pred_masks" in fields:
            masks.append(fields.pop("pred_masks"))
        boxes = fields.pop("pred_boxes").tensor.to("cpu", non_blocking=True)
        copies = {name: value.to("cpu", non_blocking=True) for name, value in fields.items()}
        found.append(Instances(output.image_size, pred_boxes=Boxes(boxes), **copies))
    encoded = encode_masks(masks) if masks else [None] * len(found)
    # Copies to the CPU are not complete before it.
    if outputs and outputs[0].scores.is_cuda:
        torch.cuda.current_stream(outputs[0].scores.device).synchronize()
    return found, encoded


def encode_masks(masks: Sequence[Tensor]) -> list[list[dict]]:
    """Encode masks as COCO's compressed RLE, of which the device finds where runs begin, and the host gets only these.

    Args:
        masks: for each image (N, height, width) bool.

    Returns:
        For each image N dicts with ``size`` and ``counts`` (bytes), equal to those of ``pycocotools.mask.encode``.
    """
    areas = [image.shape[1] * image.shape[2] for image in masks]
    encoded: list[list[dict]] = [[] for _ in masks]
    parts = [(i, part) for i, image in enumerate(masks) for part in image.split(max(MASK_PIXELS // areas[i], 1))]
    totals = itertools.accumulate(part.numel() for _, part in parts)
    for _, group in itertools.groupby(zip(parts, totals, strict=True), lambda pair: pair[1] // MASK_PIXELS):
        parts_of_group = [part for part, _ in group]
        images = [i for i, part in parts_of_group for _ in part]
        starts = torch.cat([_run_starts(part) for _, part in parts_of_group]).nonzero()[:, 0].cpu().numpy()
        firsts = np.cumsum([0, *(areas[i] for i in images)])
        runs = np.split(starts, np.searchsorted(starts, firsts[1:-1]))
        for i, first, run in zip(images, firsts, runs, strict=False):
            counts = np.diff(run - first, prepend=0, append=areas[i])
            encoded[i].append({"size": list(masks[i].shape[1:]), "counts": counts})
    return [mask_util.frPyObjects(image, 0, 0) if image else [] for image in encoded]


def _run_starts(masks: Tensor) -> Tensor:
    """(N, H, W) -> (N * W * H,): whether a pixel differs from the one before, column by column."""
    columns = masks.transpose(1, 2).flatten(1)
    starts = columns.clone()
    starts[:, 1:] ^= columns[:, :-1]
    return starts.flatten()
