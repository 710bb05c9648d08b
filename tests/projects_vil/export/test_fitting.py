"""Images are fitted into the one size that a model takes."""

import pytest
import torch

from projects_vil.export import fitted_size, padded
from projects_vil.export.images import example_image


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(480, 640, (800, 1067)), (640, 480, (800, 600)), (400, 2000, (267, 1333)), (800, 1333, (800, 1333))],
)
def test_as_large_as_fits(height, width, expected):
    assert fitted_size(height, width, (800, 1333)) == expected


def test_never_more_than_the_size():
    for height in range(1, 200, 7):
        for width in range(1, 200, 11):
            fitted = fitted_size(height, width, (96, 128))
            assert fitted[0] <= 96 and fitted[1] <= 128 and (fitted[0] == 96 or fitted[1] == 128)


def test_padding_is_the_mean():
    image = example_image(50, 70)
    canvas = padded(image, (60, 90), [123.675, 116.28, 103.53])
    assert canvas.shape == (3, 60, 90) and canvas.dtype == torch.uint8
    assert torch.equal(canvas[:, :50, :70], image)
    assert canvas[:, 50:].unique(dim=1).flatten(1)[:, 0].tolist() == canvas[:, 0, 70:][:, 0].tolist() == [124, 116, 104]
