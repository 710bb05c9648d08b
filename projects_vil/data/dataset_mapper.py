"""The mapper from a dataset record to an input of a model."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from detectron2.config import CfgNode, configurable
from detectron2.data import DatasetMapper
from detectron2.data import detection_utils as utils
from detectron2.data import transforms as T
from detectron2.projects.point_rend import ColorAugSSDTransform
from detectron2.structures.masks import polygons_to_bitmask
from pycocotools import mask as mask_util

from backbones import ConfigError
from projects_vil.config import is_segmentor, with_overrides
from projects_vil.data.albumentations_pipeline import AlbumentationsAugmentation
from projects_vil.data.augmentation import ResizeBatch, boxes_of_masks, large_scale_jitter
from projects_vil.data.image_files import DAMAGED, IGNORED_LABEL, decode_image, read_labels, read_size


class Mapper(DatasetMapper):
    """detectron2's mapper, which reads images and labels with :mod:`projects_vil.data.image_files`.

    An image that cannot be read raises an :class:`UnreadableImage`. If only a part of an image can be decoded, the key
    ``damaged`` of the input has the file name and the damage. An image whose size differs from its record raises a
    :class:`ConfigError`. ``INPUT.PHOTOMETRIC_DISTORTION`` is applied after detectron2's augmentations. If
    ``INPUT.MIN_SIZE_TRAIN_SAMPLING`` is ``"batch"``, all images of a batch are resized to the same size.

    ``INPUT.MASK_FORMAT`` selects polygons or bitmaps. Masks are always bitmaps if an object of the image has RLE, or if
    images are cropped (``INPUT.CROP``, ``INPUT.AUGMENTATION``, ``recompute_boxes``). After a crop, boxes enclose the
    visible masks (:func:`~projects_vil.data.augmentation.boxes_of_masks`).

    For a SemanticSegmentor the image is resized, cropped and flipped, in this order (detectron2's mapper crops first).
    The labels ``sem_seg`` (H, W) int64 are transformed in the same way. If the crop is larger than the image, the image
    is not cropped. With ``INPUT.CROP.PAD``, a smaller image is padded to the size of the crop with the mean color, as
    float32, and with ignored labels.

    Args:
        is_train: Whether the mapper is for training.
        num_labels: The number of classes of label images.
        padded_size: The minimum height and width after padding.
        pixel_mean: The color of the padding.
        albumentations: Transforms of the image before all others.
        options: Options of detectron2's mapper.
    """

    @configurable
    def __init__(
        self,
        is_train: bool,
        *,
        num_labels: int = IGNORED_LABEL,
        padded_size: tuple[int, int] | None = None,
        pixel_mean: Sequence[float] = (),
        albumentations: AlbumentationsAugmentation | None = None,
        **options: Any,
    ) -> None:
        super().__init__(is_train, **options)
        self.num_labels, self.padded_size, self.pixel_mean = num_labels, padded_size, pixel_mean
        self.albumentations = albumentations

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        options: dict[str, Any] = {"num_labels": cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES}
        if is_train and cfg.INPUT.ALBUMENTATIONS:
            options["albumentations"] = AlbumentationsAugmentation(cfg)
        elif not is_train and cfg.TEST.TILE_SIZE:
            cfg = with_overrides(cfg, {"INPUT.MIN_SIZE_TEST": 0})
        sampling = cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING
        cfg = with_overrides(cfg, {"INPUT.MIN_SIZE_TRAIN_SAMPLING": "choice" if sampling == "batch" else sampling})
        options |= super().from_config(cfg, is_train)
        if not is_train:
            return options
        crop, is_label_model = cfg.INPUT.CROP, is_segmentor(cfg)
        if cfg.INPUT.AUGMENTATION != "default" and not is_label_model:
            return options | {"augmentations": large_scale_jitter(cfg), "recompute_boxes": cfg.MODEL.MASK_ON}
        augmentations = options["augmentations"]
        if is_label_model and crop.ENABLED:
            augmentations = utils.build_augmentation(cfg, is_train)
            area = crop.SINGLE_CATEGORY_MAX_AREA
            augmentations.insert(1, T.RandomCrop_CategoryAreaConstraint(crop.TYPE, crop.SIZE, area, IGNORED_LABEL))
            if crop.PAD:
                options |= {"padded_size": tuple(crop.SIZE), "pixel_mean": list(cfg.MODEL.PIXEL_MEAN)}
        if sampling == "batch":
            # detectron2's crop is before the resize.
            index = crop.ENABLED and not is_label_model
            augmentations[index] = ResizeBatch(cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN, "choice")
        if cfg.INPUT.PHOTOMETRIC_DISTORTION:
            # Its ranges are equal to mmsegmentation's PhotoMetricDistortion, which the official LIT segmentation uses.
            augmentations.append(ColorAugSSDTransform(img_format=cfg.INPUT.FORMAT))
        return options | {"augmentations": augmentations}

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any]:
        record = copy.deepcopy(dataset_dict)
        label_file, first_label = record.pop("sem_seg_file_name", None), record.pop("first_label", 0)
        labels = None
        try:
            image, damaged = decode_image(record["file_name"], self.image_format)
            utils.check_image_size(record, image)
            if label_file:
                if (size := read_size(label_file)) != (own := image.shape[:2]):
                    raise ConfigError(f"Label image '{label_file}' is {size}, but its image is {own}. Resize it.")
                if self.is_train:
                    labels = read_labels(label_file, first_label=first_label, num_classes=self.num_labels)
        except utils.SizeMismatchError as error:
            raise ConfigError(f"{str(error).rstrip('.')}. Correct the annotations, or run 'vil check'.") from error
        record |= {DAMAGED: damaged} if damaged else {}
        if self.is_train and "annotations" in record:
            # Crowds are not objects.
            record["annotations"] = [entry for entry in record["annotations"] if not entry.get("iscrowd", 0)]
            if self.use_instance_mask and any("segmentation" not in entry for entry in record["annotations"]):
                advice = "Set DATASETS.CHECK warn to use its box as its mask, or MODEL.MASK_ON False for boxes only."
                raise ConfigError(f"Image '{record['file_name']}' has an object without a mask. {advice}")
        if self.albumentations is not None:
            image, objects, labels = self.albumentations(image, record.get("annotations", []), labels)
            record |= {"annotations": objects} if "annotations" in record else {}
        inputs = T.AugInput(image, sem_seg=labels)
        inputs.iteration = record.pop("iteration", 0)
        transforms = self.augmentations(inputs)
        height, width = inputs.image.shape[:2]
        record["image"] = torch.from_numpy(np.ascontiguousarray(inputs.image.transpose(2, 0, 1)))
        if labels is not None:
            record["sem_seg"] = torch.from_numpy(inputs.sem_seg.astype(np.int64))
            self._pad(record)
        if self.proposal_topk is not None:
            utils.transform_proposals(record, (height, width), transforms, proposal_topk=self.proposal_topk)
        if not self.is_train:
            record.pop("annotations", None)
        elif "annotations" in record:
            self._transform_annotations(record, transforms, (height, width))
        return record

    def _pad(self, record: dict[str, Any]) -> None:
        """Pad an image and its labels on the right and at the bottom.

        The padding has the mean color, which becomes 0 in the normalized image.
        """
        height, width = record["sem_seg"].shape
        size = tuple(map(max, (height, width), self.padded_size or (0, 0)))
        if size == (height, width):
            return
        image = torch.tensor(self.pixel_mean, dtype=torch.float32)[:, None, None].repeat(1, *size)
        image[:, :height, :width] = record["image"]
        padding = (0, size[1] - width, 0, size[0] - height)
        record |= {"image": image, "sem_seg": F.pad(record["sem_seg"], padding, value=IGNORED_LABEL)}

    def _transform_annotations(self, record: dict, transforms: T.TransformList, size: tuple[int, int]) -> None:
        objects = record.pop("annotations")
        has_rle = self.use_instance_mask and any(isinstance(entry["segmentation"], dict) for entry in objects)
        mask_format = "bitmask" if has_rle or self.recompute_boxes else self.instance_mask_format
        flipped = self.keypoint_hflip_indices
        for entry in objects:
            if not self.use_keypoint:
                entry.pop("keypoints", None)
            is_polygon = self.use_instance_mask and mask_format == "polygon"
            mask = None if is_polygon else entry.pop("segmentation", None)
            utils.transform_instance_annotations(entry, transforms, size, keypoint_hflip_indices=flipped)
            if self.use_instance_mask and mask is not None:
                entry["segmentation"] = _bitmap(mask, transforms, size)
        instances = utils.annotations_to_instances(objects, size, mask_format=mask_format)
        if self.recompute_boxes and instances.has("gt_masks"):
            instances.gt_boxes = boxes_of_masks(instances.gt_masks, instances.gt_boxes)
        record["instances"] = utils.filter_empty_instances(instances)


def _bitmap(mask: list | dict[str, Any], transforms: T.TransformList, size: tuple[int, int]) -> np.ndarray:
    """Return polygons or RLE as a mask (H, W) bool after augmentation, clipped to the image.

    detectron2's functions are not used here for two reasons. They clip polygons with shapely, an optional dependency,
    and they pad a mask with ones.
    """
    if isinstance(mask, dict):
        return transforms.apply_segmentation(mask_util.decode(mask)) == 1
    points = [transforms.apply_coords(np.array(polygon, dtype=np.float64).reshape(-1, 2)) for polygon in mask]
    return polygons_to_bitmask([polygon.reshape(-1) for polygon in points], *size)


def to_input(pixels: np.ndarray, size: tuple[int, int], channels: str) -> torch.Tensor:
    """Resize (H, W, 3) uint8 RGB as in evaluation, and return (3, *size) uint8.

    Args:
        pixels: The image.
        size: The new height and width, such as the result of :func:`size_for_testing`.
        channels: The channel order of the result, ``"RGB"`` or ``"BGR"``.
    """
    resized = T.ResizeTransform(*pixels.shape[:2], *size).apply_image(pixels)
    ordered = resized[..., ::-1] if channels == "BGR" else resized
    return torch.from_numpy(ordered.transpose(2, 0, 1).copy())  # PIL's memory is read-only


def size_for_testing(cfg: CfgNode, height: int, width: int) -> tuple[int, int]:
    """Return the height and width after the resize with ``INPUT.MIN_SIZE_TEST`` and ``INPUT.MAX_SIZE_TEST``.

    With ``TEST.TILE_SIZE``, images keep their size.
    """
    if cfg.TEST.TILE_SIZE or not cfg.INPUT.MIN_SIZE_TEST:
        return height, width
    return T.ResizeShortestEdge.get_output_shape(height, width, cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST)
