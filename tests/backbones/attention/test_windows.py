"""Overlapping windows: those of ``unfold``, with their positions behind their number, gradients included."""

import pytest
import torch

from backbones.attention.chunks import copied_windows, copies_windows, threes, windows
from tests.backbones.helpers import assert_all_close, outputs_and_gradients, random_images, trace


@pytest.mark.parametrize("dim, size", [(1, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("turned", [False, True])
def test_equals_unfold(dim, size, turned):
    x = random_images(2, 10, 15, 3) if not turned else random_images(3, 15, 10, 2).permute(3, 2, 1, 0)
    actual = outputs_and_gradients(lambda x: threes(x, dim, size), {"x": x})
    expected = outputs_and_gradients(lambda x: x.unfold(dim, 3 * size, size).movedim(-1, dim + 1), {"x": x})
    assert_all_close(actual, expected, tolerance=1e-14)


def test_gradient_is_that_of_finite_differences():
    x = random_images(2, 8, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: threes(x, 1, 2).square(), (x,))


def test_makes_no_copy():
    x = random_images(2, 12, 3)
    assert threes(x, 1, 2).data_ptr() == x.data_ptr()
    assert threes(x.requires_grad_(), 1, 2).untyped_storage().nbytes() == x.untyped_storage().nbytes()


@pytest.mark.parametrize("dim, size, step", [(1, 5, 3), (1, 3, 1), (2, 4, 4), (2, 7, 2), (1, 10, 7)])
def test_windows_of_any_size_equal_unfold(dim, size, step):
    x = random_images(2, 11, 17, 3)
    actual = outputs_and_gradients(lambda x: windows(x, dim, size, step), {"x": x})
    expected = outputs_and_gradients(lambda x: x.unfold(dim, size, step).movedim(-1, dim + 1), {"x": x})
    assert_all_close(actual, expected, tolerance=1e-14)


@pytest.mark.parametrize("dim, size, step", [(1, 5, 3), (2, 4, 4), (2, 7, 2)])
def test_copied_windows_equal_those_that_are_views(dim, size, step):
    with copied_windows():
        assert not copies_windows()
        traced = trace(lambda x: windows(x, dim, size, step), (random_images(1, 9, 13, 3),))
    assert "aten::unfold" not in str(traced.inlined_graph)
    x = random_images(2, 11, 17, 3)
    torch.testing.assert_close(traced(x), windows(x, dim, size, step), atol=0, rtol=0)
    traced = trace(lambda x: windows(x, dim, size, step), (x,))
    assert "aten::unfold" in str(traced.inlined_graph)
