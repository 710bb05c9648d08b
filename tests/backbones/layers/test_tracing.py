"""The helpers for sizes in traced runs do as their names say in any other run."""

import pytest
import torch

from backbones.layers.tracing import first, in_order, missing, missing_to


@pytest.mark.parametrize("multiple", [1, 2, 7])
def test_missing(multiple):
    for size in range(1, 25):
        lack = missing(size, multiple)
        assert 0 <= lack < multiple and (size + lack) % multiple == 0


def test_missing_to():
    assert [missing_to(size, 4) for size in (1, 3, 4, 9)] == [3, 1, 0, 0]


@pytest.mark.parametrize("dim, size", [(1, 3), (1, 5), (-1, 2)])
def test_first_and_in_order_are_views_outside_of_an_export(dim, size):
    x = torch.randn(2, 5, 4).transpose(1, 2).transpose(0, 2)
    part = first(x, dim, min(size, x.shape[dim]))
    torch.testing.assert_close(part, x.split(min(size, x.shape[dim]), dim)[0])
    assert part.data_ptr() == x.data_ptr() and in_order(x) is x
