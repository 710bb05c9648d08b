"""Training lowers the loss, keeps the best on dev, and says what is wrong."""

import dataclasses
import itertools
import os
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


def expected_rate(step: int, *, highest: float, warmup: int, steps: int, schedule: str) -> float:
    """OneCycleLR's: from a 25th up to the highest at the last step of the warm-up, down to a 10000th of the start."""
    if schedule == "fixed":
        # run_tasks.py takes the step after the warm-up too, and none after it.
        step = min(step, warmup)
    start, end, top = highest / 25, highest / 25e4, warmup - 1
    if step < top:
        return start + (highest - start) * step / top
    return highest + (end - highest) * (step - top) / (steps - 1 - top)


@pytest.mark.parametrize("schedule", ["linear", "fixed"])
@pytest.mark.parametrize("warmup", [0, 2, 5, 19])
def test_the_learning_rate(quick, tiny, schedule, warmup, monkeypatch):
    rates = []
    step = torch.optim.AdamW.step

    def note(self, *args, **kwargs):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", note)
    train_lra(Run(dataclasses.replace(quick, warmup_steps=warmup), schedule=schedule), tiny)
    course = {"highest": 1e-2, "warmup": warmup, "steps": 20, "schedule": schedule}
    assert rates == pytest.approx([expected_rate(step, **course) for step in range(20)], rel=1e-6)


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
        ({"warmup_steps": 1}, "--warmup 1 --steps 20"),
        ({"learning_rate": 1e38}, r"--lr 1e\+38"),
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
    for run, said in (
        (Run(quick, schedule="cosine"), "schedule"),
        (Run(quick, seed=-1), "--seed -1"),
        (Run(quick, seed=2**63), "--seed"),
    ):
        with pytest.raises(InputError, match=said):
            run.check()
    with pytest.raises(InputError, match="sees nothing"):
        Run(quick.with_sizes(window_size=0, rank=0)).check()


def test_a_loss_that_is_no_number(quick, tiny):
    with pytest.raises(InputError, match=r"the loss is (nan|inf) at step \d+: take a lower --lr"):
        train_lra(changed(quick, weight_decay=1e30), tiny)


def test_a_folder_with_a_checkpoint_is_kept(quick, tiny, tmp_path):
    folder = tmp_path / "new" / "run"
    check_output(folder)
    train_lra(changed(quick, steps=3), tiny, output=folder)
    with pytest.raises(InputError, match="take another folder, or add --overwrite"):
        check_output(folder)
    check_output(folder, overwrite=True)
    with pytest.raises(InputError, match="it is a file, and a folder is needed"):
        check_output(folder / "model_best.pth")
    with pytest.raises(InputError, match="the folder cannot be made"):
        train_lra(changed(quick, steps=3), tiny, output=folder / "model_best.pth" / "deeper")


def test_a_run_locks_its_folder(quick, tiny, tmp_path):
    seen = []
    train_lra(
        changed(quick, steps=3), tiny, output=tmp_path, report=lambda _: seen.append(sorted(os.listdir(tmp_path)))
    )
    assert seen == [[".run.lock", "model_best.pth"]] and os.listdir(tmp_path) == ["model_best.pth"]


def test_checkpoints_of_something_else(quick, tmp_path):
    weights = create_lra_classifier(quick).state_dict()
    torch.save({"model": weights}, tmp_path / "other.pth")
    with pytest.raises(InputError, match=r"other\.pth is no checkpoint of tools/train_lra\.py"):
        load_lra_classifier(tmp_path / "other.pth")
    said = dataclasses.asdict(Run(quick.with_sizes(depth=2)))
    torch.save({"model": weights, "lra": said}, tmp_path / "wrong.pth")
    with pytest.raises(InputError, match=r"wrong\.pth does not fit the model"):
        load_lra_classifier(tmp_path / "wrong.pth")
