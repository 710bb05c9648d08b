"""Images to record with and to compare on: they say something, and have the format and the size of testing."""

import cv2
import torch

from projects_vil.export.images import comparison_images, example_image
from tests.projects_vil.helpers import small_config


def test_example_images_differ_and_have_something_on_them():
    image = example_image(40, 70, seed=1)
    assert image.shape == (3, 40, 70) and image.dtype == torch.uint8 and 100 < image.max() <= 255
    assert torch.equal(image, example_image(40, 70, seed=1))
    assert not torch.equal(image, example_image(40, 70, seed=2))


def test_images_to_compare_on(shapes):
    drawn = comparison_images(small_config())
    assert [tuple(image.shape[1:]) for image in drawn] == [(64, 96), (85, 64), (64, 107), (35, 35)]
    files = sorted((shapes / "val").iterdir())[:2]
    for channels in ("RGB", "BGR"):
        cfg = small_config("retinanet", "INPUT.MIN_SIZE_TEST", "48", "INPUT.FORMAT", channels)
        images = comparison_images(cfg, files)
        assert [(len(image), min(image.shape[1:]), image.dtype) for image in images] == [(3, 48, torch.uint8)] * 2
        means = cv2.imread(str(files[0])).mean(axis=(0, 1))
        expected = torch.from_numpy(means if channels == "BGR" else means[::-1].copy()).float()
        torch.testing.assert_close(images[0].float().mean(dim=(1, 2)), expected, atol=2, rtol=0)
