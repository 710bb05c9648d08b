"""Images to trace and to compare on, and letterboxing."""

import cv2
import torch

from projects_vil.export import letterbox_size, pad_image
from projects_vil.export.images import comparison_images
from tests.projects_vil.helpers import small_config


def test_images_to_compare_on(shapes):
    synthetic = comparison_images(small_config())
    assert [tuple(image.shape[1:]) for image in synthetic] == [(64, 96), (85, 64), (64, 107), (35, 35)]
    file = min((shapes / "val").iterdir())
    for channels in ("RGB", "BGR"):
        cfg = small_config("retinanet", "INPUT.MIN_SIZE_TEST", "48", "INPUT.FORMAT", channels)
        (image,) = comparison_images(cfg, [file])
        assert (len(image), min(image.shape[1:]), image.dtype) == (3, 48, torch.uint8)
        means = cv2.imread(str(file)).mean(axis=(0, 1))
        expected = torch.from_numpy(means if channels == "BGR" else means[::-1].copy()).float()
        torch.testing.assert_close(image.float().mean(dim=(1, 2)), expected, atol=2, rtol=0)


def test_letterboxing():
    assert letterbox_size(480, 640, (800, 1333)) == (800, 1067)
    size = letterbox_size(300, 201, (96, 128))
    assert size == (96, 64)
    image = torch.full((3, *size), 7, dtype=torch.uint8)
    canvas = pad_image(image, (96, 128), [123.675, 116.28, 103.53])
    assert canvas.shape == (3, 96, 128) and torch.equal(canvas[:, : size[0], : size[1]], image)
    mean = torch.tensor([124, 116, 104], dtype=torch.uint8)[:, None, None]
    assert (canvas[:, size[0] :] == mean).all() and (canvas[:, :, size[1] :] == mean).all()
