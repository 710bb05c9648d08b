"""The model to compare with: causal, the same in parts and as a whole, blind to absolute places."""

import pytest
import torch

from projects_vil.sequence.char_lm.models.full_attention import FullAttentionLM, rotate


def model_of(memory_length: int = 64) -> FullAttentionLM:
    torch.manual_seed(0)
    model = FullAttentionLM(
        vocab_size=11, dim=24, num_heads=4, hidden_dim=40, depth=3, memory_length=memory_length
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def ids():
    return torch.randint(11, (2, 29), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("lengths", [(10, 10, 9), (1, 27, 1), (29,)])
def test_parts_with_a_memory_equal_the_whole(ids, lengths):
    model = model_of()
    whole, _ = model(ids)
    memory, parts = None, []
    for part in ids.split(lengths, dim=1):
        log_probabilities, memory = model(part, memory)
        parts.append(log_probabilities)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(whole.exp().sum(dim=-1), torch.ones(2, 29), check_dtype=False)


def test_no_place_sees_a_later_one(ids):
    model, changed = model_of(), ids.clone()
    changed[:, 17:] = (changed[:, 17:] + 1) % 11
    before, after = model(ids)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :17], after[:, :17])
    assert not torch.equal(before[:, 17], after[:, 17])


def test_a_memory_has_a_length_and_no_gradients(ids):
    model = model_of(memory_length=12)
    _, memory = model(ids)
    assert [tuple(part.shape) for part in memory] == [(2, 12, 24)] * 3
    assert not any(part.requires_grad for part in memory)
    log_probabilities, memory = model(ids[:, :5], memory)
    assert [tuple(part.shape) for part in memory] == [(2, 12, 24)] * 3
    log_probabilities.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_rotations_tell_differences_of_places_alone():
    query, key = torch.randn(2, 1, 2, 9, 6, dtype=torch.float64)
    scores = [rotate(query, first) @ rotate(key, first).transpose(-1, -2) for first in (0, 33)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-5)
    assert not torch.allclose(scores[0], query @ key.transpose(-1, -2))
