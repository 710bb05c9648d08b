"""Cutting maps into chunks and overlapping windows, and keys that are there but not seen."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from backbones.attention.chunks import (
    from_chunks,
    is_padding,
    mask_channels,
    mask_keys,
    mask_queries,
    pad_keys_values,
    to_chunks,
    windows,
)
from tests.backbones.helpers import assert_all_close, outputs_and_gradients, random_images


@pytest.mark.parametrize("height, width, window_size", [(7, 11, 3), (2, 1, 4), (6, 4, 2), (3, 5, 1)])
def test_chunks_round_trip(height, width, window_size):
    x = random_images(2, 3, height, width, 4)
    chunks = to_chunks(x, window_size)
    rows, cols = -(-height // window_size), -(-width // window_size)
    assert chunks.shape == (2 * rows * 3, cols, window_size**2, 4)
    # Image 1, the last row of chunks, head 2, the first column
    first = x[1, 2, (rows - 1) * window_size :, :window_size].reshape(-1, 4)
    found = chunks.unflatten(0, (2, rows, 3))[1, -1, 2, 0].unflatten(0, (window_size, window_size))
    found = found[: height - (rows - 1) * window_size, : min(width, window_size)].flatten(0, 1)
    torch.testing.assert_close(found, first, atol=0, rtol=0)
    back = from_chunks(chunks, window_size, batch=2, heads=3, height=height, width=width)
    torch.testing.assert_close(back, x, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels, extra", [(4, 1), (64, 8), (1024, 1), (1024, 8)])
def test_hidden_keys_score_far_below_all_others(channels, extra, dtype):
    """Every number is one that the type holds, and seen keys keep their scores."""
    query, key = (random_images(1, 1, 2, 3, channels, seed=seed, dtype=dtype) for seed in (1, 2))
    hidden, scale = torch.tensor([[False, True, False], [True, False, False]]), 1 / math.sqrt(channels)
    marked_query, marked_key = mask_queries(query, extra), mask_keys(key, hidden, extra)
    assert marked_query.dtype == marked_key.dtype == dtype and marked_key.isfinite().all()
    scores = scale * marked_query.double().flatten(0, 3) @ marked_key.double().flatten(0, 3).T
    plain = scale * query.double().flatten(0, 3) @ key.double().flatten(0, 3).T
    torch.testing.assert_close(scores[:, ~hidden.flatten()], plain[:, ~hidden.flatten()], atol=1e-9, rtol=0)
    # Below every score that float16 can hold
    assert scores[:, hidden.flatten()].max() < (-2 * 65504 if dtype == torch.float16 else -9e8)


def test_padded_keys_and_values_are_those_of_a_trace_with_their_gradients():
    key, value = (random_images(2, 3, 4, 5, 6, seed=seed).requires_grad_() for seed in (1, 2))

    def pad(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return pad_keys_values(key, value, (1, 2, 3, 4), 2)

    padded = pad(key, value)
    assert padded.shape == (4, 3, 11, 8, 8)
    torch.testing.assert_close(padded[:2, ..., :6], F.pad(key, (0, 0, 1, 2, 3, 4)), atol=0, rtol=0)
    # Other numbers than those that were traced; of the last channels only those of keys are used.
    traced = torch.jit.trace(pad, (torch.zeros_like(key), torch.zeros_like(value)))(key, value)
    torch.testing.assert_close(padded[:2], traced[:2], atol=0, rtol=0)
    torch.testing.assert_close(padded[2:, ..., :6], traced[2:, ..., :6], atol=0, rtol=0)
    assert torch.autograd.gradcheck(pad, (key, value))


def test_padding_that_is_kept_is_never_that_of_a_run_that_only_counts():
    """A fake tensor that is kept would make each later result of this size a fake one."""
    with FakeTensorMode():
        is_padding(torch.empty(1), (3, 5), (1, 2, 3, 4))
    padding = is_padding(torch.empty(1), (3, 5), (1, 2, 3, 4))
    assert type(padding) is torch.Tensor
    assert padding.shape == (10, 8) and padding.sum() == 10 * 8 - 3 * 5 and not padding[3:6, 1:6].any()


def test_mask_channels_are_a_multiple_of_8_on_a_gpu():
    assert [mask_channels(channels, torch.device("cuda")) for channels in (31, 32, 33)] == [1, 8, 7]
    assert mask_channels(32, torch.device("cpu")) == 1


@pytest.mark.parametrize("dim, size, step", [(1, 5, 3), (1, 3, 1), (2, 4, 4), (2, 7, 2), (1, 10, 7), (2, 9, 3)])
def test_windows_are_those_of_unfold(dim, size, step):
    """With the positions behind the number of the window, gradients included, also of a tensor of any strides."""
    for x in (random_images(2, 11, 17, 3), random_images(3, 17, 11, 2).permute(3, 2, 1, 0)):
        actual = outputs_and_gradients(lambda x: windows(x, dim, size, step), {"x": x})
        expected = outputs_and_gradients(lambda x: x.unfold(dim, size, step).movedim(-1, dim + 1), {"x": x})
        assert_all_close(actual, expected, tolerance=1e-13)
