"""Parallel streams: every byte is predicted, in order, and once where it counts."""

import pytest
import torch

from backbones import InputError
from projects_vil.sequence.char_lm import Streams

SIZES = [(101, 4, 8), (103, 4, 7), (50, 7, 3), (20, 1, 64), (12, 11, 2)]


@pytest.mark.parametrize("number, num_streams, length", SIZES)
def test_each_byte_is_a_target_once_and_in_order(number, num_streams, length):
    streams = Streams(torch.arange(number), num_streams, length)
    parts = [streams.part(index) for index in range(len(streams))]
    own = [
        target
        for stream in range(num_streams)
        for part in parts
        for target in part.targets[stream][part.is_own[stream]].tolist()
    ]
    assert own == list(range(1, number))
    assert all(part.targets.shape[1] == length for part in parts[:-1])
    # Besides those, a stream has at most the first target of the next one.
    assert all(int((~part.is_own).sum(dim=1).max()) <= (part is parts[-1]) for part in parts)


@pytest.mark.parametrize("number, num_streams, length", SIZES)
def test_targets_are_the_inputs_moved_by_one(number, num_streams, length):
    ids = torch.arange(number) * 3 % 17
    streams = Streams(ids, num_streams, length)
    inputs = torch.cat([streams.part(index).inputs for index in range(len(streams))], dim=1)
    targets = torch.cat([streams.part(index).targets for index in range(len(streams))], dim=1)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for stream, start in enumerate(streams.starts.tolist()):
        assert torch.equal(inputs[stream], ids[start : start + inputs.shape[1]])


def test_more_streams_than_targets_are_a_mistake():
    with pytest.raises(InputError, match="take a smaller --batch-size"):
        Streams(torch.arange(4), 4, 2)
