"""``INPUT.AUGMENTATION``: what becomes of a detector's training images, and what it goes together with."""

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from detectron2.data.detection_utils import build_augmentation

from backbones import InputError
from backbones.utils.errors import check_choice
from projects_vil.config import is_segmentor
from projects_vil.data.augmentations import PhotometricDistortion

AUGMENTATIONS = ("default", "lsj", "strong")


class ResizeScale(T.ResizeScale):
    """detectron2's, which leaves nothing of a narrow image at a small scale: here a pixel of each side stays."""

    def get_transform(self, image: np.ndarray) -> T.ResizeTransform:
        resize = super().get_transform(image)
        return T.ResizeTransform(resize.h, resize.w, max(resize.new_h, 1), max(resize.new_w, 1), self.interp)


def large_scale_jitter(cfg: CfgNode) -> list[T.Augmentation]:
    """Scaled at random, cut or padded to a square of ``INPUT.LSJ.SIZE``, and flipped as ``INPUT.RANDOM_FLIP`` says.

    As in ``configs/new_baselines`` of detectron2: what is padded, on the right and below, is grey of level 128, and not
    ``MODEL.PIXEL_MEAN``. Colours change between the cut, which leaves fewer pixels to change, and the padding.
    """
    size = (cfg.INPUT.LSJ.SIZE, cfg.INPUT.LSJ.SIZE)
    _, *flip = build_augmentation(cfg, is_train=True)
    return [
        ResizeScale(*cfg.INPUT.LSJ.SCALE, *size),
        T.FixedSizeCrop(size, pad=False),
        *colour_augmentations(cfg),
        # Nothing is left for it to cut.
        T.FixedSizeCrop(size),
        *flip,
    ]


def colour_augmentations(cfg: CfgNode) -> list[T.Augmentation]:
    """Those of ``INPUT.PHOTOMETRIC_DISTORTION`` and of ``strong``; none for other training images."""
    is_drawn = cfg.INPUT.PHOTOMETRIC_DISTORTION or cfg.INPUT.AUGMENTATION == "strong"
    return [PhotometricDistortion(cfg.INPUT.FORMAT)] if is_drawn else []


def is_jittered(cfg: CfgNode) -> bool:
    """Whether training images are scaled, cut and padded to ``INPUT.LSJ.SIZE``."""
    return cfg.INPUT.AUGMENTATION != "default"


def is_pasted_on(cfg: CfgNode) -> bool:
    """Whether training images get objects of others."""
    return cfg.INPUT.AUGMENTATION == "strong" and cfg.INPUT.COPY_PASTE.PROBABILITY > 0


def check_augmentation(cfg: CfgNode) -> None:
    """Whether ``INPUT.AUGMENTATION`` is one for this model, and for the other keys.

    Raises:
        InputError: for an unknown one, a jitter of label images or beside ``INPUT.CROP``, and objects to be pasted by
            masks that the model does not learn, with keypoints or stuff, which nobody pastes, or into a subset.
    """
    name = cfg.INPUT.AUGMENTATION
    check_choice("INPUT.AUGMENTATION", name, AUGMENTATIONS)
    if name == "default":
        return
    if is_segmentor(cfg):
        raise InputError(
            f"INPUT.AUGMENTATION is {name}, which is for boxes and masks: a SemanticSegmentor takes default, with "
            "INPUT.CROP"
        )
    if cfg.INPUT.CROP.ENABLED:
        raise InputError(
            f"INPUT.CROP.ENABLED is True, and INPUT.AUGMENTATION {name} cuts images itself: add INPUT.CROP.ENABLED "
            "False, or INPUT.AUGMENTATION default"
        )
    if not is_pasted_on(cfg):
        return
    model = cfg.MODEL
    if model.META_ARCHITECTURE != "GeneralizedRCNN" or not model.MASK_ON or model.KEYPOINT_ON:
        raise InputError(
            "INPUT.AUGMENTATION strong pastes objects by their masks, for a GeneralizedRCNN with masks and without "
            f"keypoints, and this is a {model.META_ARCHITECTURE} with MODEL.MASK_ON {model.MASK_ON} and "
            f"MODEL.KEYPOINT_ON {model.KEYPOINT_ON}: add INPUT.COPY_PASTE.PROBABILITY 0.0"
        )
    if cfg.DATALOADER.SAMPLER_TRAIN == "RandomSubsetTrainingSampler":
        raise InputError(
            "INPUT.AUGMENTATION strong pastes objects of all images, and DATALOADER.SAMPLER_TRAIN "
            "RandomSubsetTrainingSampler trains on some of them: add INPUT.COPY_PASTE.PROBABILITY 0.0"
        )
