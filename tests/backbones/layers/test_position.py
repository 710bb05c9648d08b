"""Positions: the table entry of each position, and resized tables."""

import numpy as np
import pytest
import torch

from backbones.errors import ConfigError
from backbones.layers.position import AbsolutePositions, GridPositions, GridRelativeBias, resize_table
from tests.backbones.helpers import random_images, randomize
from tests.tolerances import FLOAT32


def interpolate(table: np.ndarray, size: int) -> np.ndarray:
    """Interpolate linearly along the first axis. The center of position i is at i + 1/2, and the ends are clamped."""
    old = len(table)
    position = (np.arange(size) + 0.5) * old / size - 0.5
    columns = [np.interp(position, np.arange(old), column) for column in table.reshape(old, -1).T]
    return np.stack(columns, axis=1).reshape(size, *table.shape[1:])


@pytest.mark.parametrize("old, new", [(56, 336), (7, 42), (42, 7), (5, 5), (1, 4)])
def test_resizing_a_row_is_linear_with_half_pixel_centers(old, new):
    table = random_images(old, 3, dtype=torch.float32)
    resized = resize_table(table, (new,))
    assert resized.dtype == torch.float32
    np.testing.assert_allclose(resized.numpy(), interpolate(table.numpy(), new), **FLOAT32)


@pytest.mark.parametrize("old, new", [((27, 27), (19, 19)), ((5, 9), (11, 4)), ((3, 4), (3, 4))])
def test_resizing_a_grid_is_bilinear(old, new):
    table = random_images(*old, 2, dtype=torch.float32)
    rows = interpolate(table.numpy(), new[0])
    expected = interpolate(rows.swapaxes(0, 1), new[1]).swapaxes(0, 1)
    np.testing.assert_allclose(resize_table(table, new).numpy(), expected, **FLOAT32)


def test_absolute_positions_concatenate_row_and_column():
    positions = randomize(AbsolutePositions((5, 9), 8, num_global_tokens=2))
    output = positions(4, 7)
    assert output.shape == (4, 7, 8)
    for row in range(4):
        for col in range(7):
            torch.testing.assert_close(output[row, col], torch.cat([positions.rows[row], positions.cols[col]]))
    assert positions.global_tokens.shape == (1, 2, 8)
    torch.testing.assert_close(positions(5, 9)[:4, :7], output)


@pytest.mark.parametrize("num_global, global_queries", [(0, False), (2, False), (2, True)])
def test_grid_bias_is_looked_up_by_offset(num_global, global_queries):
    height, width = 3, 5
    grid = GridRelativeBias((height, width), 2, num_global_tokens=num_global, global_queries=global_queries)
    output = randomize(grid)(height, width)
    first = num_global if global_queries else 0
    assert output.shape == (2, first + height * width, num_global + height * width)
    for query in range(height * width):
        row = output[:, first + query]
        for key in range(height * width):
            row_offset, col_offset = query // width - key // width, query % width - key % width
            entry = (row_offset + height - 1) * (2 * width - 1) + col_offset + width - 1
            torch.testing.assert_close(row[:, num_global + key], grid.table[entry])
        if num_global:
            torch.testing.assert_close(row[:, :num_global], grid.local_to_global)
    if global_queries:
        to_local = grid.global_to_local[..., None]
        # Softmax ignores a constant of a query.
        torch.testing.assert_close(output[:, :2, :2] + to_local, grid.global_to_global)
        torch.testing.assert_close(output[:, :2, 2:] + to_local, to_local.expand(-1, -1, height * width))


def test_grid_positions_of_the_largest_map_are_cropped():
    positions = GridPositions((5, 7), 4, resizing="once")
    assert torch.equal(positions(3, 6), positions.table[:3, :6])
    with pytest.raises(ConfigError, match="6 x 7 tokens does not fit the position table of 5 x 7"):
        positions(6, 7)


def test_relative_bias_of_a_smaller_map_is_a_crop():
    """The bias of a pair of tokens is the same in a smaller feature map as in the largest one."""
    bias = GridRelativeBias((5, 7), 2, resizing="once").double()
    whole = bias(5, 7).unflatten(1, (5, 7)).unflatten(3, (5, 7))
    torch.testing.assert_close(bias(3, 4).unflatten(1, (3, 4)).unflatten(3, (3, 4)), whole[:, :3, :4, :3, :4])
    with pytest.raises(ConfigError, match="Raise max_img_size"):
        bias(5, 8)
