"""Changes of an image's colours, and what a crop is padded with: what detectron2's own augmentations lack."""

import cv2
import numpy as np
import torch
from detectron2.data import transforms as T
from torch import Tensor

from backbones.utils.errors import check_choice

# What PhotoMetricDistortion of the official LIT configuration has for defaults, those of SSD: grey levels of 256,
# factors, and hue in steps of two degrees, as OpenCV keeps it in 8 bits.
BRIGHTNESS = 32.0
CONTRAST = (0.5, 1.5)
SATURATION = (0.5, 1.5)
HUE = 18

_HUES = 180
_TO_HSV = {"RGB": (cv2.COLOR_RGB2HSV, cv2.COLOR_HSV2RGB), "BGR": (cv2.COLOR_BGR2HSV, cv2.COLOR_HSV2BGR)}


class PhotometricTransform(T.Transform):
    """Brightness, contrast, saturation and hue of an image in 8 bits; places and labels stay as they are.

    Args:
        image_format: ``"RGB"`` or ``"BGR"``, the order of the channels.
        brightness: grey levels to add, first of all.
        contrast: factor of all channels.
        contrast_last: whether contrast comes after saturation and hue, and not before.
        saturation: factor.
        hue: what is added to the hue, in steps of two degrees.
    """

    def __init__(
        self,
        *,
        image_format: str,
        brightness: float = 0.0,
        contrast: float = 1.0,
        contrast_last: bool = False,
        saturation: float = 1.0,
        hue: int = 0,
    ) -> None:
        super().__init__()
        check_choice("INPUT.FORMAT", image_format, _TO_HSV)
        self.image_format = image_format
        self.brightness = brightness
        self.contrast = contrast
        self.contrast_last = contrast_last
        self.saturation = saturation
        self.hue = hue

    def apply_image(self, img: np.ndarray) -> np.ndarray:
        """(H, W, 3) uint8 -> the same; levels beyond 0 and 255 are cut off, fractions dropped."""
        img = _levels(offset=self.brightness)[img]
        if not self.contrast_last:
            img = _levels(self.contrast)[img]
        # Both ways round 8 bits lose a little, which an image that keeps its colours is spared.
        if self.saturation != 1 or self.hue:
            there, back = _TO_HSV[self.image_format]
            hue, saturation, value = cv2.split(cv2.cvtColor(np.ascontiguousarray(img), there))
            hue = ((hue.astype(np.int16) + self.hue) % _HUES).astype(np.uint8)
            img = cv2.cvtColor(cv2.merge([hue, _levels(self.saturation)[saturation], value]), back)
        return _levels(self.contrast)[img] if self.contrast_last else img

    def apply_coords(self, coords: np.ndarray) -> np.ndarray:
        return coords

    def apply_segmentation(self, segmentation: np.ndarray) -> np.ndarray:
        return segmentation

    def inverse(self) -> T.Transform:
        """Of places, as test-time augmentation needs it: they have not moved."""
        return T.NoOpTransform()


class PhotometricDistortion(T.Augmentation):
    """Brightness, contrast, saturation and hue, each drawn for half of the images; contrast before or after the last.

    As ``PhotoMetricDistortion`` of mmsegmentation, in NumPy's random numbers.

    Args:
        image_format: ``"RGB"`` or ``"BGR"``, the order of the channels.
    """

    def __init__(self, image_format: str) -> None:
        super().__init__()
        self.image_format = image_format

    def get_transform(self, image: np.ndarray) -> PhotometricTransform:
        return PhotometricTransform(
            image_format=self.image_format,
            brightness=np.random.uniform(-BRIGHTNESS, BRIGHTNESS) if _half() else 0.0,
            contrast=np.random.uniform(*CONTRAST) if _half() else 1.0,
            contrast_last=_half(),
            saturation=np.random.uniform(*SATURATION) if _half() else 1.0,
            # The upper end is left out, as in the official code.
            hue=int(np.random.randint(-HUE, HUE)) if _half() else 0,
        )


def pad_to(
    image: Tensor, labels: Tensor, *, height: int, width: int, pixel_mean: list[float], ignored: int
) -> tuple[Tensor, Tensor]:
    """An image and its labels with what they lack of a size on the right and below: the mean colour, and no class.

    The mean becomes 0 in normalisation, without an error of rounding: an image that is padded is in float32.

    Args:
        image: (3, H, W) uint8.
        labels: (H, W).
        height: that the result has at least.
        width: likewise.
        pixel_mean: of the channels, ``MODEL.PIXEL_MEAN``.
        ignored: the label of what is padded.

    Returns:
        (3, max(H, height), max(W, width)) and the labels of that size; both as they are where nothing is lacking.
    """
    own_height, own_width = labels.shape
    size = max(own_height, height), max(own_width, width)
    if size == (own_height, own_width):
        return image, labels
    padded = torch.tensor(pixel_mean, dtype=torch.float32)[:, None, None].expand(-1, *size).clone()
    padded[:, :own_height, :own_width] = image
    padded_labels = torch.full(size, ignored, dtype=labels.dtype)
    padded_labels[:own_height, :own_width] = labels
    return padded, padded_labels


def _half() -> bool:
    return bool(np.random.randint(2))


def _levels(factor: float = 1.0, offset: float = 0.0) -> np.ndarray:
    """What becomes of the levels 0 to 255, by which an image can be indexed: (256,) uint8."""
    return np.clip(np.arange(256, dtype=np.float32) * np.float32(factor) + np.float32(offset), 0, 255).astype(np.uint8)
