"""Training lowers the loss, keeps the best on dev, and says what is wrong."""

import dataclasses
import itertools
from dataclasses import astuple

import numpy as np
import pytest
import torch

from backbones import InputError
from projects_vil.sequence.lra import (
    Dataset,
    Examples,
    Run,
    Sequences,
    check_output,
    create_lra_classifier,
    load_lra_classifier,
    score,
    settings_of,
    train_lra,
)


def changed(settings, **changes) -> Run:
    return Run(dataclasses.replace(settings, **changes))


@pytest.mark.parametrize("model", ["ls", "full"])
def test_a_tiny_set_is_learned_by_heart(quick, tiny, model):
    run = Run(dataclasses.replace(quick, steps=60, eval_every=30), model=model)
    trained, result = train_lra(run, Dataset(tiny.train, tiny.train, tiny.test))
    first, last = result.evaluations
    assert last.dev.loss < first.dev.loss < 2.3
    assert last.dev.accuracy > 0.8 > tiny.train.chance
    assert astuple(score(trained, tiny.test, 5)) == pytest.approx(astuple(result.test))
    assert trained.training is True


def test_two_documents(quick):
    """Whether two texts are the same."""
    generator = np.random.default_rng(0)
    texts = [bytes(generator.integers(0, 9, size=6).tolist()) for _ in range(24)]
    others = [text if number % 2 else texts[number - 1] for number, text in enumerate(texts)]
    examples = Examples((Sequences.join(texts), Sequences.join(others)), np.arange(24) % 2)
    pairs = settings_of("retrieval")
    settings = dataclasses.replace(quick, data=pairs.data, num_classes=2, steps=24, dropout=0.1, attention_dropout=0.1)
    _, result = train_lra(Run(settings), Dataset(examples, examples, examples))
    assert result.evaluations[-1].train_loss < result.evaluations[0].train_loss
    assert result.chance == 0.5


def test_the_best_on_dev_is_kept(quick, tiny, tmp_path):
    seen = []
    trained, result = train_lra(Run(quick), tiny, output=tmp_path, report=seen.append)
    assert [evaluation.step for evaluation in seen] == [8, 16, 20] and tuple(seen) == result.evaluations
    assert result.best.dev.accuracy == max(evaluation.dev.accuracy for evaluation in seen)
    loaded, run = load_lra_classifier(tmp_path / "model_best.pth")
    assert run == Run(quick) and not loaded.training
    assert score(loaded, tiny.test, 8) == result.test
    assert score(trained, tiny.dev, 8).accuracy == result.best.dev.accuracy


def test_a_seed_gives_the_same_run(quick, tiny):
    first, again, other = (train_lra(Run(quick, seed=seed), tiny)[1].evaluations for seed in (3, 3, 4))
    assert [one.dev for one in first] == [one.dev for one in again] != [one.dev for one in other]


@pytest.mark.parametrize("schedule", ["linear", "fixed"])
def test_the_learning_rate(quick, tiny, schedule, monkeypatch):
    rates = []
    step = torch.optim.AdamW.step

    def note(self, *args, **kwargs):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", note)
    train_lra(Run(dataclasses.replace(quick, warmup_steps=5), schedule=schedule), tiny)
    assert len(rates) == 20
    assert rates[0] == pytest.approx(1e-2 / 25) and max(rates[:6]) == pytest.approx(1e-2, rel=0.25)
    assert rates[:5] == sorted(rates[:5])
    if schedule == "linear":
        assert rates[-1] < 1e-6 and rates[6:] == sorted(rates[6:], reverse=True)
    else:
        assert len(set(rates[5:])) == 1 and rates[-1] > 9e-3


def test_each_sample_comes_once_before_any_comes_again(tiny):
    batches = itertools.islice(tiny.train.endlessly(5, seed=0), 16)
    ids = torch.cat([torch.nn.functional.pad(b.documents[0][0], (0, 20))[:, :20] for b in batches])
    rounds = [{tuple(row.tolist()) for row in ids[start : start + 16]} for start in range(0, 80, 16)]
    assert all(len(seen) == 16 for seen in rounds) and ids.shape == (80, 20)
    assert len({tuple(map(tuple, ids[start : start + 16].tolist())) for start in range(0, 80, 16)}) == 5


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"steps": 0}, "--steps 0"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"eval_every": 0}, "--eval-every 0"),
        ({"warmup_steps": 20}, "--warmup 20 --steps 20"),
        ({"warmup_steps": -1}, "--warmup -1"),
        ({"learning_rate": 0.0}, "--lr 0.0"),
        ({"learning_rate": float("nan")}, "--lr nan"),
        ({"weight_decay": -1.0}, "--weight-decay -1.0"),
        ({"dropout": 1.0}, "dropout=1.0"),
    ],
    ids=str,
)
def test_runs_that_cannot_be(quick, tiny, changes, said):
    with pytest.raises(InputError, match=said):
        train_lra(changed(quick, **changes), tiny)


def test_names_and_seeds_that_cannot_be(quick):
    for run, said in ((Run(quick, schedule="cosine"), "schedule"), (Run(quick, seed=-1), "--seed -1")):
        with pytest.raises(InputError, match=said):
            run.check()
    with pytest.raises(InputError, match="sees nothing"):
        Run(quick.with_sizes(window_size=0, rank=0)).check()


def test_a_loss_that_is_no_number(quick, tiny):
    with pytest.raises(InputError, match=r"the loss is (nan|inf) at step \d+: take a lower --lr"):
        train_lra(changed(quick, learning_rate=1e30), tiny)


def test_a_folder_with_a_checkpoint_is_kept(quick, tiny, tmp_path):
    folder = tmp_path / "new" / "run"
    check_output(folder)
    train_lra(changed(quick, steps=3), tiny, output=folder)
    with pytest.raises(InputError, match="take another folder, or add --overwrite"):
        check_output(folder)
    check_output(folder, overwrite=True)
    with pytest.raises(InputError, match="the folder cannot be made"):
        check_output(folder / "model_best.pth" / "deeper")


def test_checkpoints_of_something_else(quick, tmp_path):
    weights = create_lra_classifier(quick).state_dict()
    torch.save({"model": weights}, tmp_path / "other.pth")
    with pytest.raises(InputError, match=r"other\.pth is no checkpoint of tools/train_lra\.py"):
        load_lra_classifier(tmp_path / "other.pth")
    said = dataclasses.asdict(Run(quick.with_sizes(depth=2)))
    torch.save({"model": weights, "lra": said}, tmp_path / "wrong.pth")
    with pytest.raises(InputError, match=r"wrong\.pth does not fit the model"):
        load_lra_classifier(tmp_path / "wrong.pth")
