"""Augmentation of training images with Albumentations: ``INPUT.ALBUMENTATIONS``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml
from detectron2.config import CfgNode
from detectron2.structures import BoxMode
from pycocotools import mask as mask_util

from backbones import ConfigError
from backbones.errors import check_file, check_packages, one_line
from projects_vil.data.segmentation import rle_of

_KEY = "INPUT.ALBUMENTATIONS"
# The conditions of a BboxParams in the file that apply. Boxes are always passed in pixels, with their indices.
_CONDITIONS = ("min_area", "min_visibility", "min_width", "min_height", "max_accept_ratio")


class AlbumentationsAugmentation:
    """Transforms of Albumentations for the image, the boxes and the masks of a record.

    All random numbers come from NumPy's generator. The loader seeds this generator for each image, so that a resumed
    run gets the same images.

    Args:
        cfg: A config whose ``INPUT.ALBUMENTATIONS`` is a YAML or JSON file that ``albumentations.save`` wrote. The
            conditions of its ``bbox_params``, such as ``min_visibility``, decide which objects are kept. The transforms
            get RGB images. With ``MODEL.MASK_ON``, masks are transformed too, and boxes enclose them.

    Raises:
        ConfigError: If the file cannot be read, if Albumentations is not installed, or if the model uses keypoints or
            proposals, which are not transformed.
    """

    def __init__(self, cfg: CfgNode) -> None:
        path = cfg.INPUT.ALBUMENTATIONS
        if cfg.MODEL.KEYPOINT_ON or cfg.MODEL.LOAD_PROPOSALS:
            raise ConfigError(f"{_KEY} does not support keypoints and precomputed proposals. Leave it empty.")
        check_file(path, "pipeline of Albumentations", key=_KEY)
        check_packages(_KEY, "albumentations")
        import albumentations as A

        try:
            pipeline = A.load(path, data_format="json" if Path(path).suffix == ".json" else "yaml")
        except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"{_KEY} '{path}' is not a pipeline of Albumentations: {one_line(error)}."
            advice = f"Write the file with A.save(pipeline, {path!r}, data_format='yaml')."
            raise ConfigError(f"{text} {advice}") from error
        processor = getattr(pipeline, "processors", {}).get("bboxes")
        conditions = {name: getattr(processor.params, name) for name in _CONDITIONS} if processor else {}
        boxes = A.BboxParams("pascal_voc", label_fields=["index"], clip=True, filter_invalid_bboxes=True, **conditions)
        self.path, self.is_bgr, self.use_masks = path, cfg.INPUT.FORMAT == "BGR", cfg.MODEL.MASK_ON
        self.pipeline = A.Compose([pipeline], bbox_params=boxes)

    def __call__(
        self, image: np.ndarray, objects: list[dict[str, Any]], labels: np.ndarray | None
    ) -> tuple[np.ndarray, list[dict[str, Any]], np.ndarray | None]:
        """Transform an image, its objects and its label image.

        Args:
            image: (H, W, 3) uint8.
            objects: Annotations in detectron2's format. They are not modified.
            labels: (H, W), or None.

        Returns:
            The image, possibly of another size, the annotations that are left, and the label image.

        Raises:
            ConfigError: If the result is not a uint8 image with three channels.
        """
        height, width = image.shape[:2]
        boxes = [BoxMode.convert(entry["bbox"], entry["bbox_mode"], BoxMode.XYXY_ABS) for entry in objects]
        inputs = {
            "image": np.ascontiguousarray(image[..., ::-1] if self.is_bgr else image),
            "bboxes": np.array(boxes, dtype=np.float64).reshape(-1, 4),
            "index": np.arange(len(objects)),
        }
        if self.use_masks and objects:
            masks = [mask_util.decode(rle_of(entry["segmentation"], height, width)) for entry in objects]
            inputs["masks"] = np.stack(masks)
        if labels is not None:
            inputs["mask"] = labels
        self.pipeline.set_random_seed(np.random.randint(2**31))
        try:
            outputs = self.pipeline(**inputs)
        except Exception as error:  # Transforms raise many types, for example for a crop that is larger than the image.
            size = f"{height} x {width} pixels"
            raise ConfigError(f"{_KEY} '{self.path}' fails for {size}: {one_line(error)}. Change the file.") from error
        image = np.asarray(outputs["image"])
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            advice = "The detector needs uint8 images of shape (H, W, 3). Remove Normalize and ToTensorV2."
            raise ConfigError(f"{_KEY} '{self.path}' returns {image.dtype} images of shape {image.shape}. {advice}")
        kept, boxes = [], dict(zip(map(int, outputs["index"]), outputs["bboxes"], strict=True))
        for index, box in boxes.items():
            entry = objects[index] | {"bbox": box.tolist(), "bbox_mode": BoxMode.XYXY_ABS}
            if self.use_masks:
                mask = mask_util.encode(np.asfortranarray(outputs["masks"][index]))
                if not mask_util.area(mask):
                    continue
                entry |= {"segmentation": mask, "bbox": mask_util.toBbox(mask).tolist(), "bbox_mode": BoxMode.XYWH_ABS}
            kept.append(entry)
        return image[..., ::-1] if self.is_bgr else image, kept, outputs.get("mask")
