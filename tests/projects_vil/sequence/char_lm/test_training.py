"""Training: it learns, it resumes exactly, and a comparison does not change what is compared."""

import math
from dataclasses import replace

import pytest
import torch

from backbones import InputError
from backbones.sequence.variants import Phase
from projects_vil.sequence.char_lm import (
    KINDS,
    ModelSize,
    Settings,
    Training,
    best_path,
    load_trained,
    phases_of,
    read_text,
)
from projects_vil.sequence.char_lm.training import rate_of

SIZE = ModelSize(dim=16, num_heads=2, hidden_dim=24, depth=2, window_size=8, segment_length=4, rank=1)
PHASES = (
    Phase(length=16, steps=8, warmup_steps=2, learning_rate=1e-2, batch_size=4),
    Phase(length=24, steps=3, warmup_steps=1, learning_rate=5e-3, batch_size=2),
)
SETTINGS = Settings(kinds=KINDS, size=SIZE, phases=PHASES, dropout=0.1, weight_decay=0.01, accumulate=2, eval_period=2)


class Stopped(Exception):
    pass


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_bytes(b"a repeated line of text\n" * 20)
    return read_text(tmp_path / "text")


def outcome_of(training: Training) -> tuple:
    weights = [load_trained(best_path(training.output, kind)).weights for kind in training.settings.kinds]
    return [replace(line, seconds=0.0) for line in training.lines], weights


def assert_same(one: tuple, other: tuple) -> None:
    assert one[0] == other[0]
    for weights, others in zip(one[1], other[1], strict=True):
        assert weights.keys() == others.keys()
        assert all(torch.equal(value, others[name]) for name, value in weights.items())


@pytest.fixture
def whole(text, tmp_path):
    training = Training(SETTINGS, text, tmp_path / "whole")
    training.run()
    return outcome_of(training)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_steps_learn_a_repeated_text(text, tmp_path, kind):
    phases = (Phase(length=24, steps=40, warmup_steps=4, learning_rate=2e-2, batch_size=2),)
    settings = Settings(kinds=(kind,), size=SIZE, phases=phases, dropout=0.0, weight_decay=0.0, eval_period=20)
    training = Training(settings, text, tmp_path / "run")
    training.run()
    first, last = training.lines
    assert last.train < 2 < first.train < math.log2(len(text.vocabulary))
    best = min(training.lines, key=lambda line: line.dev)
    assert best.dev < 2.5
    assert load_trained(best_path(training.output, kind)).facts == {"phase": 1, "step": best.step, "dev": best.dev}


# After the second evaluation of the first phase, at its end, and in the second one: what came before was saved.
@pytest.mark.parametrize("stop", [(1, 4), (2, 2), (2, 3)])
def test_resuming_is_exact(text, tmp_path, whole, stop):
    def stopping(line) -> None:
        if (line.phase, line.step, line.kind) == (*stop, "full"):
            raise Stopped

    with pytest.raises(Stopped):
        Training(SETTINGS, text, tmp_path / "run").run(stopping)
    training = Training(SETTINGS, text, tmp_path / "run", resume=True)
    training.run()
    assert_same(outcome_of(training), whole)


def test_the_end_of_a_phase_keeps_no_memories(tmp_path, whole):
    """Nothing goes on with them, and they are gigabytes."""
    state = torch.load(tmp_path / "whole/last.pth", weights_only=True)["trainer"]
    assert (state["phase"], state["done"]) == (2, 0)
    assert [list(one) for one in state["contestants"].values()] == [["seconds"], ["seconds"]]


def test_resuming_a_finished_run_changes_nothing(text, tmp_path, whole):
    training = Training(SETTINGS, text, tmp_path / "whole", resume=True)
    training.run()
    assert_same(outcome_of(training), whole)


def test_a_model_alone_is_the_same_as_in_a_comparison(text, tmp_path, whole):
    training = Training(replace(SETTINGS, kinds=KINDS[:1]), text, tmp_path / "run")
    training.run()
    lines, weights = outcome_of(training)
    assert_same((lines, weights), ([line for line in whole[0] if line.kind == KINDS[0]], whole[1][:1]))


def test_groups_one_after_the_other_train_as_one_batch(text, tmp_path):
    dev = []
    for accumulate in (1, 2):
        settings = replace(SETTINGS, phases=PHASES[:1], dropout=0.0, accumulate=accumulate)
        training = Training(settings, text, tmp_path / str(accumulate))
        training.run()
        dev.append([line.dev for line in training.lines])
    assert dev[0] == pytest.approx(dev[1], rel=1e-4)


def test_the_rate_rises_and_stays():
    phase = phases_of("small")[0]
    assert rate_of(phase, 0) == pytest.approx(2.5e-8)
    assert rate_of(phase, 4_999) == pytest.approx(1.25e-4)
    assert {rate_of(phase, step) for step in (9_999, 10_000, 429_999)} == {2.5e-4}
    assert rate_of(replace(phase, warmup_steps=0), 0) == 2.5e-4


def test_a_folder_has_one_run(text, tmp_path, whole):
    with pytest.raises(InputError, match="has a run already: --resume it, or choose another folder"):
        Training(SETTINGS, text, tmp_path / "whole")
    (tmp_path / "whole/last.pth").unlink()
    with pytest.raises(InputError, match=r"has another run's best_long_short\.pth: choose another folder"):
        Training(SETTINGS, text, tmp_path / "whole")
    with pytest.raises(InputError, match=r"there is no file .*last\.pth"):
        Training(SETTINGS, text, tmp_path / "none", resume=True)
    with pytest.raises(InputError, match="it is a file, and a folder is needed"):
        Training(SETTINGS, text, tmp_path / "text")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"size": replace(SIZE, dim=32)}, "dim was 16 .* and is 32 now"),
        ({"seed": 1}, "seed was 0 .* and is 1 now"),
        ({"phases": PHASES[:1]}, r"the number of phases \(of --steps\) was 2 .* and is 1 now"),
        ({"phases": (replace(PHASES[0], steps=9), PHASES[1])}, "steps of phase 1 was 8 .* and is 9 now"),
        ({"kinds": KINDS[:1]}, r"what trains \(--compare\) was long_short, full"),
        # And not that the text is too short for it.
        ({"phases": (replace(PHASES[0], batch_size=400), PHASES[1])}, "batch_size of phase 1 was 4 .* and is 400 now"),
    ],
)
def test_a_run_is_resumed_as_what_it_was(text, tmp_path, whole, change, said):
    with pytest.raises(InputError, match=said):
        Training(replace(SETTINGS, **change), text, tmp_path / "whole", resume=True)


def test_a_run_is_resumed_on_its_text(tmp_path, whole):
    (tmp_path / "other").write_bytes(b"a repeated line of text\n" * 21)
    with pytest.raises(InputError, match="the SHA-256 of the text was"):
        Training(SETTINGS, read_text(tmp_path / "other"), tmp_path / "whole", resume=True)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"phases": (replace(PHASES[0], batch_size=40),)}, "take a longer text, or a smaller --batch-size or --length"),
        ({"phases": (replace(PHASES[0], warmup_steps=8),)}, "--warm-up 8 is not over in --steps 8"),
        ({"accumulate": 3}, "--accumulate 3 does not divide --batch-size 4"),
        ({"eval_period": 0}, "--eval-every 0: it is 1 or more"),
        ({"dropout": 1.0}, "--dropout 1.0: it is at least 0 and below 1"),
        ({"weight_decay": -1.0}, "--weight-decay -1.0"),
        ({"seed": -1}, "--seed -1"),
        ({"memory_length": 10}, "a memory of 10 bytes is no multiple of --segment 4"),
        ({"memory_length": 4}, "a memory of 4 bytes is below --window 8"),
        ({"size": replace(SIZE, num_heads=3)}, "--heads 3 does not divide --dim 16"),
        ({"size": replace(SIZE, dim=15, num_heads=3)}, "--dim 15: it is even"),
    ],
)
def test_what_cannot_go_through_is_told_before_a_folder_is_made(text, tmp_path, change, said):
    with pytest.raises(InputError, match=said):
        Training(replace(SETTINGS, **change), text, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_bits_on_dev_that_are_no_number_are_not_saved(text, tmp_path):
    phases = (replace(PHASES[0], learning_rate=1e30, steps=1, warmup_steps=0),)
    with pytest.raises(InputError, match="bits per character on dev are (nan|inf): train with a smaller --rate"):
        Training(replace(SETTINGS, phases=phases, eval_period=1), text, tmp_path / "run").run()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_loss_that_is_no_number_ends_the_run(text, tmp_path):
    phases = (replace(PHASES[0], learning_rate=1e30),)
    with pytest.raises(InputError, match="the loss is .*: train with a smaller --rate"):
        Training(replace(SETTINGS, phases=phases), text, tmp_path / "run").run()
