"""The numbers of tables 5 and 6 and of the official scripts, written a second time."""

import dataclasses

import pytest

from backbones import InputError
from projects_vil.sequence.lra import CONFIGS, TASKS, settings_of
from projects_vil.sequence.lra.settings import ADAM_BETAS, ADAM_EPSILON

# Window and rank.
TABLE_5 = {
    "listops": {"best": (16, 2), "projection": (0, 4), "fixed": (8, 32)},
    "text": {"best": (1, 1), "projection": (0, 128), "fixed": (8, 32)},
    "retrieval": {"best": (1, 254), "projection": (0, 256), "fixed": (8, 32)},
}
# Learning rate, batch size, warm-up, steps.
TABLE_6 = {
    "listops": (1e-4, 32, 1000, 5000),
    "text": (1e-4, 32, 8000, 20000),
    "retrieval": (1e-4, 32, 8000, 30000),
}
# Classes, steps between evaluations, weight decay, dropout, tokens that are read, positions, documents.
SCRIPTS = {
    "listops": (10, 50, 0.0, 0.0, 2000, 2048, 1),
    "text": (2, 500, 0.01, 0.0, 4000, 4096, 1),
    "retrieval": (2, 300, 0.01, 0.1, 4096, 4096, 2),
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("config", CONFIGS)
def test_settings_are_the_published_ones(task, config):
    found = settings_of(task, config)
    sizes, data = found.sizes, found.data
    assert (sizes.window_size, sizes.rank) == TABLE_5[task][config]
    assert (found.learning_rate, found.batch_size, found.warmup_steps, found.steps) == TABLE_6[task]
    facts = (found.num_classes, found.eval_every, found.weight_decay, found.dropout)
    assert (*facts, data.longest, sizes.max_length, data.num_documents) == SCRIPTS[task]
    assert found.attention_dropout == found.dropout
    assert (sizes.depth, sizes.dim, sizes.num_heads, sizes.hidden_dim, sizes.vocab_size) == (2, 64, 2, 128, 512)
    # run_*.sh: --cls_last_layer
    assert sizes.class_token == "last_layer"
    assert settings_of(task, config, class_token="all_layers").sizes.class_token is True


def test_the_optimizer_is_that_of_run_tasks():
    assert (ADAM_EPSILON, ADAM_BETAS) == (1e-6, (0.9, 0.999))


def test_ablations_leave_the_other_half():
    both, no_window, no_projection = (
        settings_of("listops", ablate=ablate) for ablate in (None, "window", "projection")
    )
    assert no_window == both.with_sizes(window_size=0)
    assert no_projection == both.with_sizes(rank=0)


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings_of("text").steps = 1


@pytest.mark.parametrize(
    "names, said",
    [
        ({"task": "listop"}, "did you mean 'listops'"),
        ({"task": "text", "config": "bset"}, "did you mean 'best'"),
        ({"task": "text", "ablate": "both"}, "unknown ablation"),
        ({"task": "text", "class_token": "first_layer"}, "unknown class token"),
    ],
)
def test_unknown_names(names, said):
    with pytest.raises(InputError, match=said):
        settings_of(**names)
