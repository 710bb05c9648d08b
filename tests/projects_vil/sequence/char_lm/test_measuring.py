"""Seconds and memory by length."""

from dataclasses import replace

import pytest

from backbones import InputError
from projects_vil.sequence.char_lm import KINDS, ModelSize, measure_config, measure_steps
from projects_vil.sequence.char_lm.results import format_costs

SIZE = ModelSize(dim=16, num_heads=2, hidden_dim=24, depth=1, window_size=8, segment_length=4, rank=1)


def test_a_cost_for_each_model_and_length():
    told = []
    costs = measure_steps(KINDS, SIZE, [8, 32], runs=1, with_memory=False, told=told.append)
    assert told == costs
    assert [(cost.kind, cost.length) for cost in costs] == [(kind, length) for length in (8, 32) for kind in KINDS]
    assert all(cost.seconds > 0 and cost.memory is None and not cost.is_out for cost in costs)
    table = format_costs(costs, dict.fromkeys(KINDS, 1234)).splitlines()
    assert "long-short 1,234 parameters" in table[0]
    assert [line.split()[0] for line in table[1:]] == ["length", "8", "32"]


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own(capsys):
    found = measure_config(SIZE, [512], runs=1)
    assert [cost["kind"] for cost in found["costs"]] == list(KINDS)
    assert all(cost["memory"] > 0 for cost in found["costs"])
    printed = capsys.readouterr().out
    assert "44M" in printed and "110M" in printed


@pytest.mark.parametrize(
    "options, said",
    [
        ({"lengths": [4]}, "--lengths 4: it is a multiple of --segment 4, and no less than --window 8"),
        ({"lengths": [10]}, "--lengths 10"),
        ({"size": replace(SIZE, dim=15, num_heads=3)}, "--dim 15: it is even"),
        ({"runs": 0}, "--runs 0: it is 1 or more"),
        ({"batch_size": [1, 2]}, "--batch-size has 2 values: --measure takes one"),
        ({"batch_size": [0]}, "--batch-size 0: it is 1 or more"),
    ],
)
def test_what_cannot_be_measured(options, said):
    with pytest.raises(InputError, match=said):
        measure_config(**{"size": SIZE, "lengths": [8]} | options)
