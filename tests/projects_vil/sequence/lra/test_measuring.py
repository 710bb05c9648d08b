"""What a step costs: counts that follow from the sizes, and memory of a process of its own."""

import pytest

from backbones import InputError
from projects_vil.sequence.lra import LengthCost, format_costs, measure_lengths, settings_of


def count(config: str, length: int, model: str = "ls", task: str = "listops") -> LengthCost:
    settings = settings_of(task, config, class_token="all_layers")
    (cost,) = measure_lengths(settings, [length], models=[model], runs=1, memory=False)
    return cost


def test_full_attention_has_the_multiply_adds_of_table_1():
    cost = count("fixed", 2048, "full")
    assert f"{cost.multiply_adds / 1e9:.2f}" == "1.21"
    assert cost.seconds > 0 and cost.memory is None


def test_long_short_attention_grows_with_the_length_and_full_attention_with_its_square():
    def growth(model: str) -> float:
        few, more = (count("fixed", length, model).multiply_adds for length in (512, 1024))
        return more / few

    assert growth("ls") == pytest.approx(2, abs=0.01) and growth("full") > 3


def test_multiply_adds_by_hand():
    """w = 16, r = 2, n tokens and the class token, d = 64, hidden 128, in two layers."""
    n, d, hidden, w, r = 512, 64, 128, 16, 2
    projections, mlp = 3 * n * d * d, 2 * n * d * hidden
    rank = 2 * r * n * d + 2 * r * n * d  # scores of 2 heads, and the sums of keys and values
    # Blocks of 64 tokens with half a window on each side: more products than 2 w for each token, in fewer calls.
    attention = 2 * n * (64 + w + r + 1) * d
    own = (3 + 1) * d * d + 2 * (n + 1) * d + 2 * d * hidden
    # The last layer updates the class token alone.
    by_hand = 2 * (projections + rank + attention + own) + n * d * d + mlp + d * hidden + hidden * 10
    assert count("best", n).multiply_adds == by_hand


def test_two_documents_cost_twice_as_much():
    one, two = (count("fixed", 256, task=task).multiply_adds for task in ("text", "retrieval"))
    assert two / one == pytest.approx(2, rel=0.01)


@pytest.mark.slow
def test_memory_grows_with_the_length():
    settings = settings_of("listops")
    costs = measure_lengths(settings, [256, 2048], models=["ls"], batch_size=4, runs=1)
    short, long = (cost.memory for cost in costs)
    assert 4 * short < long < 16 * short


def test_the_table():
    costs = [
        LengthCost("ls", 512, 143000, 28_000_000, 0.07, 6_000_000),
        LengthCost("full", 512, 142000, 101, 0.05, None),
    ]
    header, first, second = format_costs(costs).splitlines()
    assert header.split() == ["length", "model", "params", "M", "1e9", "mult-adds", "seconds", "MB"]
    assert first.split() == ["512", "ls", "0.143", "0.028", "0.070", "6"] and second.split()[-1] == "-"


@pytest.mark.parametrize("changes, said", [({"lengths": [0]}, "--lengths 0"), ({"runs": 0}, "--runs 0")], ids=str)
def test_what_cannot_be_measured(changes, said):
    with pytest.raises(InputError, match=said):
        measure_lengths(settings_of("listops"), **{"lengths": [8], "models": ["ls"]} | changes)
