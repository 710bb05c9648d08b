"""The paper's sizes: they make models, and the counts are those of Table 2."""

import dataclasses

import pytest
import torch

from backbones.sequence import create_char_lm, create_sequence_encoder
from backbones.sequence.variants import CHAR_LMS, LRA


# enwik8 has about 200 different bytes, and text8 27 characters: either way 0.1 M parameters at most.
@pytest.mark.parametrize("name, vocab_size, millions", [("text8_small", 27, 44), ("enwik8_large", 208, 110)])
def test_parameters_of_table_2(name, vocab_size, millions):
    with torch.device("meta"):
        model = create_char_lm(vocab_size=vocab_size, **dataclasses.asdict(CHAR_LMS[name].sizes))
    # 44.2 and 110.6: the paper cuts the rest off.
    assert int(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions
    assert CHAR_LMS["enwik8_small"].sizes == CHAR_LMS["text8_small"].sizes


def test_phases_are_those_of_the_official_scripts():
    rates = {name: [phase.learning_rate for phase in task.phases] for name, task in CHAR_LMS.items()}
    enwik8 = [2.5e-4, 1.25e-4, 6.25e-5]
    assert rates == {"enwik8_small": enwik8, "text8_small": [5e-4, 2.5e-4, 1.25e-4], "enwik8_large": enwik8}
    for task in CHAR_LMS.values():
        assert [phase.length for phase in task.phases] == [2048, 4096, 8192]
        assert [phase.steps for phase in task.phases] == [430_000, 50_000, 50_000]


def test_courses_and_figures_are_those_of_the_paper():
    """Appendix C, and the figures of tables 1 and 2 that the settings are printed with."""
    assert {name: task.bits_per_character for name, task in CHAR_LMS.items()} == {
        "enwik8_small": 0.99,
        "text8_small": 1.09,
        "enwik8_large": 0.97,
    }
    assert [(task.dropout, task.weight_decay) for task in CHAR_LMS.values()] == [(0.2, 0.01), (0.2, 0.01), (0.4, 0.1)]
    for task in CHAR_LMS.values():
        assert [phase.warmup_steps for phase in task.phases] == [10_000, 5_000, 5_000]
        assert [phase.batch_size for phase in task.phases] == [32, 32, 16]
    accuracies = {"listops": (37.50, 38.36, 37.79), "text": (66.01, 68.40, 66.28), "retrieval": (81.79, 81.95, 81.86)}
    for name, figures in accuracies.items():
        assert tuple(LRA[name + suffix].accuracy for suffix in ("", "_best", "_projection")) == figures


@pytest.mark.parametrize("name", LRA)
def test_encoders_of_the_long_range_arena(name):
    """2 w + r is at most 256 (appendix B), and the model reads what the task has."""
    sizes = LRA[name].sizes
    assert 2 * sizes.window_size + sizes.rank <= 256
    encoder = create_sequence_encoder(**dataclasses.asdict(sizes)).eval()
    ids = torch.arange(100).view(2, 50)
    with torch.no_grad():
        assert encoder(ids).shape == (2, 1, 64)
