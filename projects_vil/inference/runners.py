"""Run a detector: a PyTorch model with weights, or an exported file. Both runners have the same interface."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pycocotools.mask as mask_util
import torch
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from detectron2.structures import Boxes, ImageList, Instances
from torch import Tensor

from backbones import ConfigError
from backbones.errors import check_choice, explained_errors
from projects_vil.checkpoint import load_detector
from projects_vil.config import DETECTOR_ARCHITECTURES, detector_name, head_of, set_precision
from projects_vil.data import size_for_testing
from projects_vil.data.catalog import known_categories
from projects_vil.export.runtime import DAMAGED, ExportedModel, letterbox_size, pad_image, to_instances
from projects_vil.modeling import add_tta, autocast_detector, eval_dtype, max_input_side, use_sync_free_parts
from projects_vil.modeling.tiles import TiledDetector
from vil.choices import DTYPES

MAX_MASK_PIXELS = 2**27  # pixels of masks that are encoded at once; each takes one byte, plus temporary copies


class EagerRunner:
    """Run the detector of a config with the weights of a checkpoint, on ``MODEL.DEVICE``.

    Args:
        cfg: The config of the detector.
        weights: Its checkpoint.
        tta: Whether to use test-time augmentation. Images then keep their size.

    Attributes:
        channels: The channel order of the input, ``"RGB"`` or ``"BGR"``.
        sides: The smallest and largest side of an input in pixels; None if there is no limit.
        categories: The classes of the detector.
        architecture, backbone: Names of the detector and its backbone.
        device, weights: The device and the path of the checkpoint.
        score_threshold: Lowest score of a detection.

    Raises:
        ConfigError: If the model is not a detector, or if the weights are missing or do not fit.
    """

    def __init__(self, cfg: CfgNode, weights: str | Path, *, tta: bool = False) -> None:
        check_choice("MODEL.META_ARCHITECTURE", cfg.MODEL.META_ARCHITECTURE, DETECTOR_ARCHITECTURES)
        check_choice("INFERENCE.DTYPE", cfg.INFERENCE.DTYPE, ("auto", *DTYPES))
        set_precision(cfg)
        self.detector, self.categories = load_detector(cfg, weights, as_datasets=False)
        if self.detector.device.type == "cuda":
            use_sync_free_parts(self.detector)
        self.cfg, self.tta = cfg, tta
        self.weights, self.device = Path(weights), cfg.MODEL.DEVICE
        self.architecture = detector_name(cfg)
        self.backbone = getattr(getattr(self.detector.backbone, "bottom_up", None), "variant", cfg.MODEL.BACKBONE.NAME)
        self.score_threshold, self.channels = cfg.MODEL[head_of(cfg)].SCORE_THRESH_TEST, cfg.INPUT.FORMAT
        self.dtype = eval_dtype(cfg)
        if tta and cfg.TEST.TILE_SIZE:
            raise ConfigError("--tta does not support tiles. Leave it out, or set TEST.TILE_SIZE 0.")
        # Test-time augmentation limits the sizes itself, and absolute positions limit the tiles instead of the images.
        self.sides = 1, None if tta or cfg.TEST.TILE_SIZE else max_input_side(self.detector)
        wrap = add_tta if tta else TiledDetector
        self.model = wrap(cfg, self.detector) if tta or cfg.TEST.TILE_SIZE else self.detector

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width after resizing for inference."""
        return (height, width) if self.tta else size_for_testing(self.cfg, height, width)

    def padded_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width after resizing and padding. Images of one padded size can share a batch."""
        if self.tta:
            return height, width
        resized, backbone = torch.empty(self.input_size(height, width), device="meta"), self.detector.backbone
        padding = {"padding_constraints": backbone.padding_constraints}
        return tuple(ImageList.from_tensors([resized], backbone.size_divisibility, **padding).tensor.shape[1:])

    @torch.no_grad()
    def __call__(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        """Run the model on a batch.

        Args:
            images: (3, H, W) uint8 on the CPU, resized to :meth:`input_size`, all with the same :meth:`padded_size`.
            sizes: Height and width of each original image.

        Returns:
            For each image ``pred_boxes`` in pixels of the original image, ``scores``, ``pred_classes`` and, for
            Mask R-CNN, ``pred_masks`` (N, height, width), on the device of the model.
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
    """Run an exported model. The interface equals :class:`EagerRunner`. The metadata of the file sets the input size.

    Args:
        path: The exported file. Its metadata file is in the same folder.
        device: ``"cpu"``, or ``"cuda"`` for an ONNX file.
        score_threshold: Lowest score of a detection; None for the threshold of the export.

    Raises:
        ConfigError: If a file is missing or damaged, or if ``score_threshold`` is below the threshold of the export.
    """

    def __init__(
        self, path: str | Path, *, device: str | torch.device = "cpu", score_threshold: float | None = None
    ) -> None:
        self.model = ExportedModel(path, device=device)
        metadata = self.model.metadata
        self.weights, self.device = self.model.path, str(device)
        with explained_errors(path, *DAMAGED):
            self.architecture, self.backbone = metadata["detector"], metadata["backbone"]
            self.channels = metadata["input"]["color_order"]
            classes, ids = tuple(metadata["classes"]), metadata["category_ids"]
            exported, self.resizing = float(metadata["thresholds"]["score"]), metadata["resizing"]
            self.fixed_size = tuple(metadata["input"]["size"] or ()) or None
            self.sides = (1, None) if self.fixed_size else metadata["input"]["sides"]
        self.categories = known_categories(classes, ids, number=len(classes))
        self.score_threshold = exported if score_threshold is None else score_threshold
        if self.score_threshold < exported:
            text = f"score_threshold is {score_threshold:g}, but '{path}' was exported with {exported:g}."
            raise ConfigError(f"{text} Use a higher threshold, or export the model again.")

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        if self.fixed_size:
            return letterbox_size(height, width, self.fixed_size)
        if not self.resizing["short_side"]:
            return height, width
        sides = self.resizing["short_side"], self.resizing["longest_side"]
        return T.ResizeShortestEdge.get_output_shape(height, width, *sides)

    def padded_size(self, height: int, width: int) -> tuple[int, int]:
        return self.fixed_size or self.input_size(height, width)

    def __call__(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Instances]:
        mean = self.model.metadata["normalization"]["mean"]
        inputs = [pad_image(image, self.fixed_size, mean) if self.fixed_size else image for image in images]
        detections = []
        for outputs, image, size in zip(self.model.run_each(inputs), images, sizes, strict=True):
            kept = outputs["scores"] >= self.score_threshold
            outputs = {name: value[kept] for name, value in outputs.items()}
            detections.append(to_instances(outputs, image.shape[1:], size))
        return detections


Runner = EagerRunner | ExportedRunner


def to_host(outputs: Sequence[Instances], *, dense_masks: bool) -> tuple[list[Instances], list[list[dict] | None]]:
    """Copy the detections of a batch to the CPU.

    This synchronizes with the device once for the whole batch, and twice more for encoded masks.

    Args:
        outputs: The detections of each image, on one device.
        dense_masks: Whether to copy ``pred_masks`` as they are. Otherwise :func:`encode_masks` encodes them.

    Returns:
        The detections of each image, and their encoded masks; None for an image without encoded masks.
    """
    detections, masks = [], []
    for output in outputs:
        fields = dict(output.get_fields())
        if not dense_masks and "pred_masks" in fields:
            masks.append(fields.pop("pred_masks"))
        boxes = fields.pop("pred_boxes").tensor.to("cpu", non_blocking=True)
        copies = {name: value.to("cpu", non_blocking=True) for name, value in fields.items()}
        detections.append(Instances(output.image_size, pred_boxes=Boxes(boxes), **copies))
    encoded = encode_masks(masks) if masks else [None] * len(detections)
    # Non-blocking copies to the CPU are complete after this.
    if outputs and outputs[0].scores.is_cuda:
        torch.cuda.current_stream(outputs[0].scores.device).synchronize()
    return detections, encoded


def encode_masks(masks: Sequence[Tensor]) -> list[list[dict]]:
    """Encode masks as COCO's compressed RLE. The device computes the run starts, and only these are copied to the CPU.

    Args:
        masks: For each image (N, height, width) bool.

    Returns:
        For each image N dicts with ``size`` and ``counts`` (bytes), identical to ``pycocotools.mask.encode``.
    """
    areas = [image.shape[1] * image.shape[2] for image in masks]
    encoded: list[list[dict]] = [[] for _ in masks]
    chunks = [(i, chunk) for i, image in enumerate(masks) for chunk in image.split(max(MAX_MASK_PIXELS // areas[i], 1))]
    totals = itertools.accumulate(chunk.numel() for _, chunk in chunks)
    for _, group in itertools.groupby(zip(chunks, totals, strict=True), lambda pair: pair[1] // MAX_MASK_PIXELS):
        group_chunks = [chunk for chunk, _ in group]
        images = [i for i, chunk in group_chunks for _ in chunk]
        starts = torch.cat([_run_starts(chunk) for _, chunk in group_chunks]).nonzero()[:, 0].cpu().numpy()
        firsts = np.cumsum([0, *(areas[i] for i in images)])
        runs = np.split(starts, np.searchsorted(starts, firsts[1:-1]))
        for i, first, run in zip(images, firsts, runs, strict=False):
            counts = np.diff(run - first, prepend=0, append=areas[i])
            encoded[i].append({"size": list(masks[i].shape[1:]), "counts": counts})
    return [mask_util.frPyObjects(image, 0, 0) if image else [] for image in encoded]


def _run_starts(masks: Tensor) -> Tensor:
    """Return whether each pixel differs from the previous one in column-major order: (N, H, W) -> (N * W * H,)."""
    columns = masks.transpose(1, 2).flatten(1)
    starts = columns.clone()
    starts[:, 1:] ^= columns[:, :-1]
    return starts.flatten()
