"""Test the reading of image files, which matches detectron2 except for its bugs, and the boxes of masks."""

import contextlib

import numpy as np
import pytest
import torch
from detectron2.data.detection_utils import read_image as detectron2_read_image
from detectron2.structures import BitMasks, Boxes
from PIL import Image, ImageFile

from projects_vil.data.augmentation import boxes_of_masks
from projects_vil.data.image_files import UnreadableImage, read_image, read_size, read_sizes

HEIGHT, WIDTH = 30, 44


def gradient() -> np.ndarray:
    """Return an asymmetric image (H, W, 3) uint8."""
    rows, cols = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([rows * 8, cols * 5, rows * 3 + cols * 2], axis=-1).astype(np.uint8)


def turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return the pixels rotated according to the EXIF orientation."""
    flipped = pixels[:, ::-1] if orientation in (2, 4, 5, 7) else pixels
    return np.rot90(flipped, {1: 0, 2: 0, 3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}[orientation])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "tif", "jpg"])
def test_images_are_turned_upright_once(tmp_path, suffix, orientation):
    path, exif = tmp_path / f"turned.{suffix}", Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(gradient()).save(path, exif=exif)
    expected = turned(gradient(), orientation)
    read = read_image(path)
    assert read.shape == expected.shape and read_size(path) == expected.shape[:2]
    assert np.abs(read.astype(int) - expected).max() <= (20 if suffix == "jpg" else 0)
    if suffix != "tif":
        np.testing.assert_array_equal(read, detectron2_read_image(str(path), "RGB"))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "RGB"])
@pytest.mark.parametrize("image_format", ["RGB", "BGR"])
def test_other_modes_are_read_as_detectron2_reads_them(tmp_path, mode, image_format):
    image = Image.fromarray(gradient()).convert("RGBA")
    image.putalpha(Image.fromarray(gradient()[..., 1]))
    path = tmp_path / ("image.jpg" if mode == "CMYK" else "image.png")
    image.convert(mode).save(path)
    read = read_image(path, image_format)
    assert read.dtype == np.uint8 and read.shape == (HEIGHT, WIDTH, 3) and read.std() > 10
    np.testing.assert_array_equal(read, detectron2_read_image(str(path), image_format))
    if mode in ("RGB", "RGBA"):
        np.testing.assert_array_equal(read, gradient()[..., :: 1 if image_format == "RGB" else -1])


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_16_bits_keep_the_upper_8(tmp_path, suffix):
    gray = gradient()[..., 2].astype(np.uint16) * 256 + 77
    Image.fromarray(gray).save(tmp_path / f"deep.{suffix}")
    read = read_image(tmp_path / f"deep.{suffix}")
    np.testing.assert_array_equal(read, np.repeat(gradient()[..., 2:], 3, axis=2))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_32_bits_are_refused(tmp_path, dtype):
    Image.fromarray(gradient()[..., 2].astype(dtype)).save(tmp_path / "deep.tif")
    with pytest.raises(UnreadableImage, match="deep.tif"):
        read_image(tmp_path / "deep.tif")


@pytest.mark.parametrize("name", ["cut.jpg", "cut.png"])
def test_the_readable_part_of_a_damaged_file_is_used(tmp_path, name, caplog):
    path = tmp_path / name
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 70, 3), np.uint8)).save(path)
    whole = read_image(path)
    path.write_bytes(path.read_bytes()[:-1500])
    part = read_image(path)
    assert part.shape == whole.shape and (part[:40] == whole[:40]).all() and (part != whole).any()
    # The image is named and counted once, and other programs in this process still get Pillow's error.
    assert (read_image(path) == part).all()
    (text,) = [record.getMessage() for record in caplog.records]
    assert f"Image '{path}' is damaged: image file is truncated" in text and "damaged images so far: " in text
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    # A thread that decodes a damaged file does not change how other threads read files.
    assert all(size == (90, 70) and damage for size, damage in read_sizes([path] * 40, pixels=True))


@pytest.mark.parametrize("name", ["text.jpg", "empty.png", "absent.jpg", "folder.jpg", "header.png"])
def test_unreadable_files_raise_an_error(tmp_path, name):
    path = tmp_path / name
    if name.startswith("header"):
        Image.fromarray(gradient()).save(path)
        path.write_bytes(path.read_bytes()[:60])
    elif name.startswith("folder"):
        path.mkdir()
    elif not name.startswith("absent"):
        path.write_text("this is not an image" if name.startswith("text") else "")
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    with pytest.raises(UnreadableImage) as caught:
        read_image(path)
    assert str(path) in str(caught.value) and caught.value.reason
    with contextlib.nullcontext() if name.startswith("header") else pytest.raises(UnreadableImage):
        read_size(path)


def test_a_box_changes_if_its_mask_shrinks_by_more_than_a_pixel():
    masks = torch.zeros(4, HEIGHT, WIDTH, dtype=torch.bool)
    masks[0, 3:9, 2:12], masks[1, 3:6, 2:12], masks[2, 3:9, 5:12] = True, True, True
    boxes = torch.tensor([[1.6, 2.5, 12.4, 9.0]]).repeat(4, 1)
    expected = boxes.clone()
    # The objects are uncovered, covered at the bottom, covered on the left, and completely covered.
    expected[1, 3], expected[2, 0], expected[3] = 6, 5, 0
    found = boxes_of_masks(BitMasks(masks), Boxes(boxes))
    assert torch.equal(found.tensor, expected) and torch.equal(boxes, boxes[:1].repeat(4, 1))
