"""From a dataset's record to what a model takes."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T
from detectron2.data.detection_utils import (
    SizeMismatchError,
    annotations_to_instances,
    build_augmentation,
    check_image_size,
    filter_empty_instances,
    transform_instance_annotations,
    transform_proposals,
)
from detectron2.structures.masks import polygons_to_bitmask
from pycocotools import mask as mask_util

from backbones import InputError
from backbones.utils.errors import check_choice
from projects_vil.config import is_segmentor
from projects_vil.data.augmentations import pad_to
from projects_vil.data.datasets.ade20k import IGNORED_LABEL, open_labels, read_labels
from projects_vil.data.detection_utils import UnreadableImage, boxes_of_masks, read_image
from projects_vil.data.recipes import colour_augmentations, is_jittered, large_scale_jitter

_ADVICE = "mend it, or let tools/check_dataset.py ANNOTATIONS IMAGES --deep --fix OUT write a file without it"


class Mapper(DatasetMapper):
    """detectron2's mapper, with images read by :func:`~projects_vil.data.detection_utils.read_image`.

    An image that cannot be read, or is of another size than its record says, is an :class:`InputError` that names it.
    Masks are polygons as ``INPUT.MASK_FORMAT`` says, and bitmaps in an image where an object has RLE, or where images
    are cut (``INPUT.CROP``, ``INPUT.AUGMENTATION``, ``recompute_boxes``); boxes are those of what is left of the masks
    there, by :func:`~projects_vil.data.detection_utils.boxes_of_masks`.
    ``INPUT.PHOTOMETRIC_DISTORTION`` comes after detectron2's augmentations.
    """

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        options = super().from_config(cfg, is_train)
        if is_train and is_jittered(cfg):
            options["augmentations"], options["recompute_boxes"] = large_scale_jitter(cfg), cfg.MODEL.MASK_ON
        elif is_train:
            options["augmentations"] += colour_augmentations(cfg)
        return options

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any]:
        record = copy.deepcopy(dataset_dict)
        labels, num_labels = record.pop("sem_seg_file_name", None), record.pop("num_labels", IGNORED_LABEL)
        with _explain(_ADVICE, record):
            image = read_image(record["file_name"], self.image_format)
            check_image_size(record, image)
            inputs = T.AugInput(
                image, sem_seg=read_labels(labels, first_label=0, num_classes=num_labels) if labels else None
            )
        transforms = self.augmentations(inputs)
        height, width = inputs.image.shape[:2]
        record["image"] = torch.from_numpy(np.ascontiguousarray(inputs.image.transpose(2, 0, 1)))
        if inputs.sem_seg is not None:
            record["sem_seg"] = torch.from_numpy(inputs.sem_seg.astype(np.int64))
        if self.proposal_topk is not None:
            transform_proposals(record, (height, width), transforms, proposal_topk=self.proposal_topk)
        if not self.is_train:
            record.pop("annotations", None)
        elif "annotations" in record:
            self._transform_annotations(record, transforms, (height, width))
        return record

    def _transform_annotations(
        self, dataset_dict: dict[str, Any], transforms: T.TransformList, image_shape: tuple[int, int]
    ) -> None:
        objects = [entry for entry in dataset_dict.pop("annotations") if entry.get("iscrowd", 0) == 0]
        if self.use_instance_mask and not all("segmentation" in entry for entry in objects):
            raise InputError(
                f"{dataset_dict['file_name']} has an object without the mask that is to be learned: DATASETS.CHECK "
                "warn leaves such objects out, and MODEL.MASK_ON False learns boxes alone"
            )
        for entry in objects:
            for field, is_used in (("segmentation", self.use_instance_mask), ("keypoints", self.use_keypoint)):
                if not is_used:
                    entry.pop(field, None)
        has_rle = any(isinstance(entry.get("segmentation"), dict) for entry in objects)
        mask_format = "bitmask" if has_rle or self.recompute_boxes else self.instance_mask_format
        objects = [self._transform_object(entry, transforms, image_shape, mask_format) for entry in objects]
        instances = annotations_to_instances(objects, image_shape, mask_format=mask_format)
        if self.recompute_boxes and instances.has("gt_masks"):
            instances.gt_boxes = boxes_of_masks(instances.gt_masks, instances.gt_boxes)
        dataset_dict["instances"] = filter_empty_instances(instances)

    def _transform_object(
        self, entry: dict[str, Any], transforms: T.TransformList, image_shape: tuple[int, int], mask_format: str
    ) -> dict[str, Any]:
        mask = entry.pop("segmentation", None) if mask_format == "bitmask" else None
        entry = transform_instance_annotations(
            entry, transforms, image_shape, keypoint_hflip_indices=self.keypoint_hflip_indices
        )
        return entry if mask is None else entry | {"segmentation": _bitmap(mask, transforms, image_shape)}


def _bitmap(
    mask: list[list[float]] | dict[str, Any], transforms: T.TransformList, image_shape: tuple[int, int]
) -> np.ndarray:
    """Polygons or RLE after augmentation, cut off at the image's edges: (H, W) bool.

    detectron2 cuts polygons by shapely, which it does not require, and its padding of a mask is a part of the object.
    """
    if isinstance(mask, dict):
        return transforms.apply_segmentation(mask_util.decode(mask)) == 1
    points = [transforms.apply_coords(np.array(polygon, dtype=np.float64).reshape(-1, 2)) for polygon in mask]
    return polygons_to_bitmask([polygon.reshape(-1) for polygon in points], *image_shape)


CROP_TYPES = ("relative_range", "relative", "absolute", "absolute_range")


class SemSegMapper:
    """From a record to what detectron2's SemanticSegmentor takes: the image, and for training its labels.

    For training the image is resized, then cropped (detectron2's own mapper crops first), then flipped; the labels
    likewise, without interpolation. With ``INPUT.PHOTOMETRIC_DISTORTION`` its colours change after that. A crop larger
    than the image leaves it as it is, or with ``INPUT.CROP.PAD`` pads it to its own size; the batch is padded with
    zeros, after normalisation, and ignored labels.

    Args:
        cfg: ``INPUT`` has sizes, crop, flip and colours; ``MODEL.SEM_SEG_HEAD.NUM_CLASSES`` bounds the labels.
        is_train: whether to augment and to read the labels.

    Raises:
        InputError: for a crop that cannot be drawn, or not padded.
    """

    def __init__(self, cfg: CfgNode, *, is_train: bool) -> None:
        self.is_train = is_train
        self.image_format = cfg.INPUT.FORMAT
        self.num_classes = cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES
        augmentations = build_augmentation(cfg, is_train)
        crop = cfg.INPUT.CROP
        if is_train and crop.ENABLED:
            check_choice("INPUT.CROP.TYPE", crop.TYPE, CROP_TYPES)
            if len(crop.SIZE) != 2 or not all(side > 0 for side in crop.SIZE):
                raise InputError(f"INPUT.CROP.SIZE is {list(crop.SIZE)}: it is a height and a width above 0")
            if not 0 < crop.SINGLE_CATEGORY_MAX_AREA <= 1:
                area = crop.SINGLE_CATEGORY_MAX_AREA
                raise InputError(f"INPUT.CROP.SINGLE_CATEGORY_MAX_AREA is {area}: it is above 0 and at most 1")
            check_padding(cfg)
            augmentations.insert(
                1,
                T.RandomCrop_CategoryAreaConstraint(crop.TYPE, crop.SIZE, crop.SINGLE_CATEGORY_MAX_AREA, IGNORED_LABEL),
            )
        augmentations += colour_augmentations(cfg) if is_train else []
        self.augmentations = T.AugmentationList(augmentations)
        self.padded_size = tuple(crop.SIZE) if is_train and crop.ENABLED and crop.PAD else None
        self.pixel_mean = list(cfg.MODEL.PIXEL_MEAN)

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record with ``image`` (3, H, W) uint8, float32 where it is padded, ``height`` and ``width`` of its file
        and, for training, labels ``sem_seg`` (H, W) int64.

        Raises:
            InputError: for an image or labels that cannot be read or differ in size.
        """
        record = dict(record)
        label_file, first_label = record.pop("sem_seg_file_name"), record.pop("first_label", 0)
        with _explain("mend it, or take the image and its labels out", record):
            image = read_image(record["file_name"], self.image_format)
            check_image_size(record, image)
        with open_labels(label_file) as opened:
            size = opened.height, opened.width
        if size != image.shape[:2]:
            raise InputError(f"{label_file} is {size} pixels high and wide, its image {image.shape[:2]}")
        labels = None
        if self.is_train:
            labels = read_labels(label_file, first_label=first_label, num_classes=self.num_classes)
        inputs = T.AugInput(image, sem_seg=labels)
        self.augmentations(inputs)
        record["image"] = torch.from_numpy(np.ascontiguousarray(inputs.image.transpose(2, 0, 1)))
        if self.is_train:
            record["sem_seg"] = torch.from_numpy(inputs.sem_seg.astype(np.int64))
        if self.padded_size is not None:
            height, width = self.padded_size
            padding = {"height": height, "width": width, "pixel_mean": self.pixel_mean, "ignored": IGNORED_LABEL}
            record["image"], record["sem_seg"] = pad_to(record["image"], record["sem_seg"], **padding)
        return record


def check_padding(cfg: CfgNode) -> None:
    """Whether ``INPUT.CROP.PAD`` is for a model, and for crops, that know it.

    Raises:
        InputError: for a model whose crops are not padded, and for crops that have no one size to pad to. Without
            crops it is let be: it has no effect then.
    """
    crop = cfg.INPUT.CROP
    if not crop.PAD:
        return
    if not is_segmentor(cfg):
        raise InputError(
            f"INPUT.CROP.PAD is True, and a {cfg.MODEL.META_ARCHITECTURE}'s crops are not padded: set it to False"
        )
    if crop.ENABLED and crop.TYPE != "absolute":
        raise InputError(
            f"INPUT.CROP.PAD is True, and INPUT.CROP.TYPE {crop.TYPE} has no one size to pad to: take absolute, or "
            "INPUT.CROP.PAD False"
        )


@contextlib.contextmanager
def _explain(way_out: str, record: dict[str, Any]) -> Iterator[None]:
    """What is wrong with an image of a dataset, in a line that names its file and what to do."""
    try:
        yield
    except UnreadableImage as error:
        raise InputError(f"{error}; {way_out}") from error
    except SizeMismatchError as error:
        raise InputError(f"{' '.join(str(error).split())} ({record['file_name']})") from error
