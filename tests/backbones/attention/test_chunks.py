"""Chunks and overlapping windows of feature maps, and masked keys."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from backbones.attention.chunks import QUERY_MASK, is_padding, mask_keys
from tests.backbones.helpers import random_images


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels, extra", [(4, 1), (64, 8), (1024, 1), (1024, 8)])
def test_hidden_keys_score_far_below_all_others(channels, extra, dtype):
    """Every value is representable in the dtype, and unmasked keys keep their scores."""
    query, key = (random_images(1, 1, 2, 3, channels, seed=seed, dtype=dtype) for seed in (1, 2))
    hidden, scale = torch.tensor([[False, True, False], [True, False, False]]), 1 / math.sqrt(channels)
    marked_query, marked_key = F.pad(query, (0, extra), value=QUERY_MASK), mask_keys(key, hidden, extra)
    assert marked_query.dtype == marked_key.dtype == dtype and marked_key.isfinite().all()
    scores = scale * marked_query.double().flatten(0, 3) @ marked_key.double().flatten(0, 3).T
    plain = scale * query.double().flatten(0, 3) @ key.double().flatten(0, 3).T
    torch.testing.assert_close(scores[:, ~hidden.flatten()], plain[:, ~hidden.flatten()], atol=1e-9, rtol=0)
    # Below every float16 score
    assert scores[:, hidden.flatten()].max() < (-2 * 65504 if dtype == torch.float16 else -9e8)


def test_cached_padding_is_never_a_fake_tensor():
    """If a fake tensor were cached, each later result of this size would be fake."""
    with FakeTensorMode():
        is_padding(torch.empty(1), (3, 5), (1, 2, 3, 4))
    padding = is_padding(torch.empty(1), (3, 5), (1, 2, 3, 4))
    assert type(padding) is torch.Tensor
    assert padding.shape == (10, 8) and padding.sum() == 10 * 8 - 3 * 5 and not padding[3:6, 1:6].any()
