"""The tool's configs are those of the paper; what departs from them is what was asked for."""

import dataclasses

import pytest

from backbones import InputError
from projects_vil.sequence.char_lm import (
    PRESETS,
    PUBLISHED_TEST_MEMORY,
    PUBLISHED_TEST_PART,
    ModelSize,
    phases_of,
    size_of,
)
from projects_vil.sequence.char_lm.models.presets import BETAS, EPSILON, dropout_of, weight_decay_of
from projects_vil.sequence.char_lm.results import count_configs


def test_the_paper_is_pinned():
    """Section 4.2, appendix C, Table 2, autoregressive/launch/enwik8-{base,large}-phase{1,2,3}.sh and run-eval.sh."""
    for config, depth, dropout, weight_decay in (("small", 12, 0.2, 0.01), ("large", 30, 0.4, 0.1)):
        assert size_of(config) == ModelSize(512, 8, 2048, depth, window_size=512, segment_length=16, rank=1)
        assert (dropout_of(config), weight_decay_of(config)) == (dropout, weight_decay)
        assert [dataclasses.astuple(phase) for phase in phases_of(config)] == [
            (2048, 430_000, 10_000, 2.5e-4, 32),
            (4096, 50_000, 5_000, 1.25e-4, 32),
            (8192, 50_000, 5_000, 6.25e-5, 16),
        ]
    assert (PUBLISHED_TEST_MEMORY, PUBLISHED_TEST_PART) == (32768, 256)
    assert (BETAS, EPSILON) == ((0.9, 0.999), 1e-8)
    published = {config: dataclasses.astuple(preset.published) for config, preset in PRESETS.items()}
    assert published == {"small": (44, 1.01), "large": (110, None)}


def test_the_models_are_as_large_as_in_table_2():
    counts = {(count["config"], count["kind"]): count for count in count_configs()}
    for config, published in (("small", 44), ("large", 110)):
        count = counts[config, "long_short"]
        assert count["published"] == published
        # The paper cuts the digits off.
        assert count["parameters"] // 1_000_000 == published
        assert counts[config, "full"]["parameters"] < count["parameters"]


def test_overrides_of_the_size():
    size = size_of("small", dim=128, layers=4, heads=None, window=64)
    assert size == ModelSize(128, 8, 512, 4, window_size=64, segment_length=16, rank=1)
    assert size_of("small", dim=128, hidden=100).hidden_dim == 100
    with pytest.raises(InputError, match="--layers 0: it is 1 or more"):
        size_of("small", layers=0)
    with pytest.raises(InputError, match="unknown config 'smal'.*did you mean 'small'"):
        size_of("smal")


def test_overrides_of_the_phases():
    phases = phases_of("small", steps=[4300, 50], length=[64, 128], batch_size=[2], rate=None)
    assert [dataclasses.astuple(phase) for phase in phases] == [(64, 4300, 100, 2.5e-4, 2), (128, 50, 5, 1.25e-4, 2)]
    assert phases_of("small", steps=[10], warm_up=[0])[0].warmup_steps == 0
    assert [phase.learning_rate for phase in phases_of("small", rate=[0.3, 0.2, 1.0])] == [0.3, 0.2, 1.0]


@pytest.mark.parametrize(
    "overrides, said",
    [
        ({"steps": [1, 2, 3, 4]}, "--steps has 4 values, and small has 3 phases"),
        ({"steps": [9, 9], "length": [1, 2, 3]}, "--length has 3 values for 2 phases"),
        ({"rate": [0.0]}, "--rate 0.0: it is above 0"),
        ({"rate": [float("nan")]}, "--rate nan: it is above 0"),
        ({"rate": [1e38]}, r"--rate 1e\+38: it is above 0 and at most 1"),
        ({"steps": [0]}, "--steps 0: it is above 0"),
        ({"warm_up": [-1]}, "--warm-up -1: it is 0 or more"),
        ({"batch_size": [-2]}, "--batch-size -2: it is above 0"),
    ],
)
def test_phases_that_cannot_be(overrides, said):
    with pytest.raises(InputError, match=said):
        phases_of("small", **overrides)
