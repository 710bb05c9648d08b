"""Colours change as in the official configuration of LIT on ADE20K, labels and places never; padding is exact."""

import colorsys

import numpy as np
import pytest
import torch
from detectron2.data import transforms as T
from detectron2.projects.point_rend.color_augmentation import ColorAugSSDTransform

from backbones import InputError
from projects_vil.data import IGNORED_LABEL, augmentations
from projects_vil.data.augmentations import PhotometricDistortion, PhotometricTransform, pad_to

GENERATOR = np.random.default_rng(7)
IMAGE = GENERATOR.integers(0, 256, (13, 17, 3), dtype=np.uint8)


def changed(image: np.ndarray = IMAGE, **changes) -> np.ndarray:
    before = image.copy()
    result = PhotometricTransform(**{"image_format": "RGB"} | changes).apply_image(image)
    assert (image == before).all() and (result.shape, result.dtype) == (image.shape, np.uint8)
    return result


def hsv(image: np.ndarray) -> np.ndarray:
    return np.array([colorsys.rgb_to_hsv(*pixel) for pixel in image.reshape(-1, 3) / 255])


def test_the_ranges_are_the_official_ones():
    """LIT segmentation/configs/_base_/datasets/ade20k.py: PhotoMetricDistortion with its defaults, which are SSD's."""
    theirs = ColorAugSSDTransform("RGB")
    assert augmentations.BRIGHTNESS == theirs.brightness_delta == 32
    assert augmentations.CONTRAST == (theirs.contrast_low, theirs.contrast_high) == (0.5, 1.5)
    assert augmentations.SATURATION == (theirs.saturation_low, theirs.saturation_high) == (0.5, 1.5)
    assert augmentations.HUE == theirs.hue_delta == 18


def test_nothing_to_change():
    assert (changed() == IMAGE).all()


@pytest.mark.parametrize("brightness", [-31.6, 12.3, 31.9])
def test_brightness_is_added(brightness):
    assert (changed(brightness=brightness) == np.clip(IMAGE + brightness, 0, 255).astype(np.uint8)).all()


@pytest.mark.parametrize("contrast_last", [False, True])
def test_contrast_multiplies(contrast_last):
    ours = changed(contrast=1.37, contrast_last=contrast_last)
    assert (ours == np.clip(IMAGE * np.float32(1.37), 0, 255).astype(np.uint8)).all()


def test_brightness_comes_before_contrast():
    assert changed(np.full((1, 1, 3), 100, np.uint8), brightness=20, contrast=1.5).tolist() == [[[180] * 3]]


def test_contrast_before_or_after_saturation():
    """Of a level that contrast cuts off the order shows."""
    image = np.full((1, 1, 3), (240, 120, 60), np.uint8)
    first = changed(image, contrast=1.5, saturation=0.5)[0, 0]
    last = changed(image, contrast=1.5, saturation=0.5, contrast_last=True)[0, 0]
    assert abs(first.astype(int) - (255, 217, 172)).max() <= 2
    assert abs(last.astype(int) - (255, 255, 225)).max() <= 2


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_saturation_keeps_hue_and_value(factor):
    before, after = hsv(IMAGE), hsv(changed(saturation=factor))
    assert abs(before[:, 2] - after[:, 2]).max() < 0.01
    assert abs(np.minimum(factor * before[:, 1], 1) - after[:, 1])[before[:, 2] > 0.2].max() < 0.04
    turned = abs(before[:, 0] - after[:, 0])[(before[:, 2] > 0.4) & (after[:, 1] > 0.3)]
    assert np.minimum(turned, 1 - turned).max() < 0.02


@pytest.mark.parametrize("hue", [-18, 17])
def test_hue_turns_by_two_degrees_a_step(hue):
    before, after = hsv(IMAGE), hsv(changed(hue=hue))
    assert abs(before[:, 2] - after[:, 2]).max() < 0.01
    turned = (after[:, 0] - before[:, 0] - hue / 180 + 0.5) % 1 - 0.5
    assert abs(turned[(before[:, 2] > 0.4) & (before[:, 1] > 0.3)]).max() < 0.02


@pytest.mark.parametrize("changes", [{"saturation": 1.4}, {"hue": 11}, {"brightness": -9, "contrast": 0.7}], ids=str)
def test_as_detectron2s_own_of_pointrend(changes, monkeypatch):
    """One operation at a time, since theirs draws inside."""
    theirs = ColorAugSSDTransform("RGB")
    brighter = theirs.convert(IMAGE, beta=changes.get("brightness", 0))
    expected = theirs.convert(brighter, alpha=changes.get("contrast", 1))
    monkeypatch.setattr("random.randrange", lambda stop: 1)
    monkeypatch.setattr("random.uniform", lambda low, high: changes["saturation"])
    monkeypatch.setattr("random.randint", lambda low, high: changes["hue"])
    swapped = expected[:, :, ::-1]
    if "saturation" in changes:
        swapped = theirs.saturation(swapped)
    if "hue" in changes:
        swapped = theirs.hue(swapped)
    assert (changed(**changes) == swapped[:, :, ::-1]).all()


def test_the_order_of_channels():
    changes = {"brightness": 5, "contrast": 1.2, "saturation": 0.6, "hue": -7}
    swapped = changed(np.ascontiguousarray(IMAGE[:, :, ::-1]), image_format="BGR", **changes)
    assert (swapped[:, :, ::-1] == changed(**changes)).all()
    with pytest.raises(InputError, match="unknown INPUT.FORMAT 'YUV-BT.601'"):
        PhotometricTransform(image_format="YUV-BT.601")


def test_places_and_labels_stay():
    labels, boxes = GENERATOR.integers(0, 5, (13, 17)), np.array([[1.0, 2.0, 3.0, 4.0]])
    transform = PhotometricTransform(image_format="RGB", brightness=30)
    assert (transform.apply_segmentation(labels) == labels).all() and (transform.apply_box(boxes) == boxes).all()
    assert (transform.inverse().apply_box(boxes) == boxes).all()


def test_each_is_drawn_for_half_of_the_images():
    np.random.seed(3)
    drawn = [PhotometricDistortion("RGB").get_transform(IMAGE) for _ in range(800)]
    for name, neutral, low, high in (
        ("brightness", 0, -32, 32),
        ("contrast", 1, 0.5, 1.5),
        ("saturation", 1, 0.5, 1.5),
        ("hue", 0, -18, 17),
    ):
        values = np.array([getattr(transform, name) for transform in drawn])
        assert 0.44 < np.mean(values == neutral) < 0.56, name
        values = values[values != neutral]
        width = high - low
        assert low <= values.min() < low + 0.06 * width and high - 0.06 * width < values.max() <= high, name
    assert 0.44 < np.mean([transform.contrast_last for transform in drawn]) < 0.56


def test_the_same_seed_draws_the_same():
    def augmented() -> np.ndarray:
        np.random.seed(11)
        inputs = T.AugInput(IMAGE)
        T.AugmentationList([PhotometricDistortion("RGB")])(inputs)
        return inputs.image

    assert (augmented() == augmented()).all() and (augmented() != IMAGE).any()


# -- padding ---------------------------------------------------------------------------------------


def test_padding_is_zero_after_normalisation():
    """ade20k.py pads with 0 after Normalize, and labels with 255."""
    mean, std = [123.675, 116.28, 103.53], torch.tensor([58.395, 57.12, 57.375])[:, None, None]
    image, labels = torch.from_numpy(IMAGE).permute(2, 0, 1), torch.arange(13 * 17).view(13, 17)
    padded, padded_labels = pad_to(image, labels, height=16, width=17, pixel_mean=mean, ignored=IGNORED_LABEL)
    assert (padded.shape, padded.dtype) == ((3, 16, 17), torch.float32)
    normalised = (padded - torch.tensor(mean)[:, None, None]) / std
    assert torch.equal(padded[:, :13], image.float()) and (normalised[:, 13:] == 0).all()
    assert torch.equal(padded_labels[:13], labels) and (padded_labels[13:] == 255).all()
    assert padded_labels.dtype == labels.dtype


@pytest.mark.parametrize("size", [(13, 17), (5, 9)])
def test_no_padding_where_nothing_is_lacking(size):
    image, labels = torch.from_numpy(IMAGE).permute(2, 0, 1), torch.zeros(13, 17)
    assert pad_to(image, labels, height=size[0], width=size[1], pixel_mean=[0.0] * 3, ignored=0) == (image, labels)
