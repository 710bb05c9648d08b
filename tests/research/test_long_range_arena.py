"""The Long Range Arena: the numbers in the paper, the data, and a complete training run."""

import dataclasses
import json
import re
import statistics

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from backbones import ConfigError
from research.long_range_arena.data import Dataset, Examples, read_imdb, read_pairs, read_released_listops
from research.long_range_arena.listops import WORDS, ListOpsRules, drop_brackets, generate_listops, load_listops
from research.long_range_arena.model import create_classifier
from research.long_range_arena.tasks import settings_for
from research.long_range_arena.training import (
    count_costs,
    evaluate,
    load_lra_classifier,
    measure_models,
    train_classifier,
)
from tests.projects_vil.helpers import error_of, message, run_tool
from tests.selection import slow_except

TOOL = "../research/long_range_arena/__main__.py"
SHORT = ListOpsRules(min_length=10, max_length=60)
OPERATIONS = {
    "MIN": lambda *values: min(values),
    "MAX": lambda *values: max(values),
    "MED": lambda *values: int(statistics.median(values)),
    "SM": lambda *values: sum(values) % 10,
}


def test_fewer_steps_keep_the_share_of_the_warm_up():
    assert settings_for("listops", steps=500).warmup_steps == 100
    assert settings_for("listops", steps=6).warmup_steps == 0
    assert "listop" in message(settings_for, "listop")


def evaluate_tree(text: str) -> int:
    """Return the value of a sample, computed by Python: ``[MIN 3 4 ]`` becomes ``MIN(3, 4, )``."""
    calls = re.sub(r"\[(\w+)", r"\1(", text).replace("]", ")")
    return eval(re.sub(r"(?<=[\d)]) (?!$)", ", ", calls), OPERATIONS)


def texts_of(examples: Examples) -> list[str]:
    return [" ".join(WORDS[token] for token in text) for text in examples.documents[0]]


def splits_of(dataset: Dataset) -> tuple[Examples, ...]:
    return dataset.train, dataset.val, dataset.test


def test_labels_are_the_values_of_the_samples_and_no_sample_occurs_twice():
    dataset = generate_listops(SHORT, num_train=60, num_val=20, num_test=21)
    assert [len(split) for split in splits_of(dataset)] == [60, 20, 21]
    texts = [text for split in splits_of(dataset) for text in texts_of(split)]
    labels = np.concatenate([split.labels for split in splits_of(dataset)])
    assert [evaluate_tree(text) for text in texts] == labels.tolist() and len(set(texts)) == len(texts)
    assert all(SHORT.min_length < len(text.split()) < SHORT.max_length for text in texts)


def test_published_rules_give_the_lengths_of_table_1():
    """Table 1 has 888 +- 339 tokens without the closing brackets."""
    dataset = generate_listops(ListOpsRules(), num_train=600, num_val=10, num_test=10, seed=3)
    stripped = drop_brackets(dataset)
    lengths = np.array([len(text) for text in stripped.train.documents[0]])
    assert abs(lengths.mean() - 888) < 60 and abs(lengths.std() - 339) < 40
    assert [text.replace(" ]", "") for text in texts_of(dataset.val)] == texts_of(stripped.val)


def test_generated_samples_follow_from_the_arguments_and_are_kept(tmp_path):
    sizes = {"num_train": 300, "num_val": 40, "num_test": 50}
    first = load_listops(tmp_path / "new", SHORT, **sizes)
    again, other = load_listops(tmp_path / "new", SHORT, **sizes), generate_listops(SHORT, seed=1, **sizes)
    assert [texts_of(split) for split in splits_of(first)] == [texts_of(split) for split in splits_of(again)]
    assert not set(texts_of(first.val)) & set(texts_of(other.val))
    assert "listops" in message(load_listops, tmp_path / "new", dataclasses.replace(SHORT, max_arguments=4), **sizes)
    # With 4 tokens there are four operators and two digits: 400 samples.
    with pytest.raises(ConfigError, match="401"):
        generate_listops(ListOpsRules(3, 5, max_depth=2, max_arguments=2), num_train=399, num_val=1, num_test=1)


def test_released_listops(tmp_path):
    lines = ["( ( ( [MIN 3 ) 4 ) ] )\t3", "( ( ( [SM 7 ) ( ( ( [MAX 1 ) 6 ) ] ) ) ] )\t3"]
    for name in ("train", "val", "test"):
        (tmp_path / f"basic_{name}.tsv").write_text("\r\n".join(["Source\tTarget", *lines, ""]), newline="")
    examples = read_released_listops(tmp_path, read_length=6, words=WORDS).val
    assert texts_of(examples) == ["[MIN 3 4 ]", "[SM 7 [MAX 1 6 ]"] and examples.labels.tolist() == [3, 3]
    assert "basic_train.tsv" in message(read_released_listops, tmp_path / "none", read_length=30, words=WORDS)


def test_imdb_and_pairs(tmp_path):
    for split in ("train", "test"):
        for name, text in (("neg", "bad"), ("pos", "good")):
            folder = tmp_path / "aclImdb" / split / name
            folder.mkdir(parents=True)
            (folder / "0_1.txt").write_text(text)
    dataset = read_imdb(tmp_path, read_length=3)
    assert dataset.train.documents == ([b"bad", b"goo"],)
    assert dataset.train.labels.tolist() == [0, 1] and dataset.val is dataset.test
    assert "neg" in message(read_imdb, tmp_path / "none", read_length=3)
    for name in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_bytes(b"1.0\ta\tb\tone text\tanother\n0.0\tc\td\tx\ty\n")
    pairs = read_pairs(tmp_path, read_length=5).val
    assert pairs.documents == ([b"one t", b"x"], [b"anoth", b"y"])
    assert pairs.labels.tolist() == [1, 0]
    (tmp_path / "new_aan_pairs.test.tsv").write_bytes(b"1\ta\tb\tc\td\n1.0\ta\tb\tc\n")
    assert "new_aan_pairs.test.tsv line 2" in message(read_pairs, tmp_path, read_length=5)


TOKENS, LENGTHS = torch.arange(1, 31).view(2, 15), torch.tensor([15, 9])


def small_classifier(task: str = "listops", **changes):
    torch.manual_seed(0)
    return create_classifier(settings_for(task, max_length=40, **changes)).eval().double()


def padded(fill: int = 0, extra: int = 0):
    mask = torch.arange(15 + extra) < LENGTHS[:, None]
    return F.pad(TOKENS, (0, extra)).masked_fill(~mask, fill), mask


@pytest.mark.parametrize("changes", [{"model": "full"}, {}, {"window_size": 0}, {"class_token": "all_layers"}], ids=str)
def test_padding_has_no_effect_and_every_parameter_gets_a_gradient(changes):
    classifier = small_classifier(**changes)
    logits = classifier((padded(),))
    torch.testing.assert_close(classifier((padded(fill=7, extra=4),)), logits)
    torch.testing.assert_close(classifier(((TOKENS[1:, :9], None),)), logits[1:])
    logits.square().sum().backward()
    assert [name for name, parameter in classifier.named_parameters() if parameter.grad is None] == []


def test_two_documents_are_compared():
    """The head equals SCHeadDual of the official lra/model_wrapper.py."""
    classifier = small_classifier("retrieval")
    first, second = padded(), (TOKENS[:, :6], None)
    with torch.no_grad():
        u, v = (classifier.encoder(*document)[:, 0] for document in (first, second))
        expand, _, contract = classifier.head
        expected = contract(expand(torch.cat([u, v, u * v, u - v], dim=-1)).relu())
        torch.testing.assert_close(classifier((first, second)), expected)


@pytest.fixture(scope="module")
def tiny() -> Dataset:
    return generate_listops(ListOpsRules(4, 20), num_train=16, num_val=12, num_test=14)


def quick(**changes):
    values = {"max_length": 32, "window_size": 4, "batch_size": 8, "learning_rate": 1e-2, "warmup_steps": 2}
    return settings_for("listops", **{**values, "steps": 20, "eval_every": 8, **changes})


@pytest.mark.parametrize("model", slow_except(["ls", "full"], ["ls"]))
def test_a_tiny_set_is_overfitted(tiny, model):
    dataset = Dataset(tiny.train, tiny.train, tiny.test)
    trained, result = train_classifier(quick(model=model, steps=60, eval_every=30), dataset)
    first, last = result["evaluations"]
    assert last["loss"] < first["loss"] < 2.3 and last["accuracy"] > 0.8 > tiny.train.chance
    assert evaluate(trained, tiny.test, 5) == pytest.approx(result["test"])


def test_the_best_weights_are_kept_and_a_seed_gives_the_same_run(tiny, tmp_path):
    trained, result = train_classifier(quick(), tiny, output=tmp_path)
    assert [row["step"] for row in result["evaluations"]] == [8, 16, 20]
    assert result["best"]["accuracy"] == max(row["accuracy"] for row in result["evaluations"])
    loaded, settings = load_lra_classifier(tmp_path / "model_best.pth")
    assert settings == quick() and evaluate(loaded, tiny.test, 8) == result["test"]
    assert evaluate(trained, tiny.val, 8)["accuracy"] == result["best"]["accuracy"]
    assert "model_best.pth" in message(train_classifier, quick(), tiny, output=tmp_path)
    _, again = train_classifier(quick(), tiny)
    assert [row["loss"] for row in again["evaluations"]] == [row["loss"] for row in result["evaluations"]]
    assert "loss" in message(train_classifier, quick(learning_rate=1e30, warmup_steps=0), tiny)


@pytest.mark.parametrize(("schedule", "warmup"), [("linear", 5), ("fixed", 2)])
def test_the_learning_rate_follows_run_tasks(tiny, schedule, warmup, monkeypatch):
    rates, step = [], torch.optim.AdamW.step

    def record(self, *args, **kwargs):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    train_classifier(quick(steps=12, warmup_steps=warmup, schedule=schedule), tiny)
    # The warm-up ends at the highest rate and begins at a 25th of it; the linear schedule ends at a 250000th of it.
    assert rates[0] == pytest.approx(1e-2 / 25) and rates[warmup - 1] == pytest.approx(1e-2)
    after = np.linspace(1e-2, 1e-2 / 25e4, 13 - warmup)
    assert rates[warmup - 1 :] == pytest.approx(after if schedule == "linear" else [1e-2, *[after[1]] * (12 - warmup)])


# LS table 1, in 1e9: ListOps, Text, Retrieval
TABLE_1 = {
    "full": ("1.21", "4.57", "9.14"),
    "fixed": ("0.20", "0.40", "0.80"),
    "projection": ("0.15", "0.69", "2.18"),  # printed 2.17
    "best": ("0.16", "0.29", "2.17"),
}


@pytest.mark.parametrize("config", TABLE_1)
def test_multiply_adds_of_table_1(config):
    given = {"model": "full"} if config == "full" else {"config": config}
    counts = [count_costs(settings_for(task, **given))["as_published"] for task in ("listops", "text", "retrieval")]
    assert tuple(f"{count / 1e9:.2f}" for count in counts) == TABLE_1[config]


@pytest.mark.slow
def test_multiply_adds():
    def count(length: int, config: str = "fixed") -> int:
        settings = settings_for("listops", config, class_token="all_layers")
        (row,) = measure_models(settings, [length], runs=1, memory=False, models=["ls"])
        return row["multiply_adds"]

    assert count(1024) / count(512) == pytest.approx(2, abs=0.01)
    # Hand count for w = 16, r = 2, with blocks of 64 tokens and half a window on each side.
    n, d, hidden, w, r = 512, 64, 128, 16, 2
    layer = 3 * n * d * d + 4 * r * n * d + 2 * n * (64 + w + r + 1) * d + 4 * d * d + 2 * (n + 1) * d + 2 * d * hidden
    # The last layer updates only the class token.
    assert count(n, "best") == 2 * layer + n * d * d + 2 * n * d * hidden + d * hidden + hidden * 10


@pytest.mark.slow
def test_the_command(tmp_path):
    data = ["--min-length", 4, "--max-length", 30, "--num-train", 200, "--num-val", 30, "--num-test", 40]
    arguments = ["--task", "listops", *data, "--data", tmp_path / "data", "--drop-brackets", "--rank", 0]
    arguments += ["--batch-size", 8, "--steps", 6, "--eval-every", 3, "--output", tmp_path / "run"]
    status, out, err = run_tool(TOOL, *arguments, "--json", tmp_path / "run.json")
    assert status == 0, err
    figures = json.loads((tmp_path / "run.json").read_text())
    assert f"test accuracy {figures['test']['accuracy']:.4f}" in out
    _, out, _ = run_tool(TOOL, *arguments[:-1], tmp_path / "seeds", "--seed", 0, 1)
    accuracies = [float(text) for text in re.findall(r"^test accuracy (\d\.\d+)", out, re.MULTILINE)]
    assert accuracies[2] == pytest.approx(statistics.mean(accuracies[:2]), abs=1e-4)
    assert sorted(path.name for path in (tmp_path / "seeds").iterdir()) == ["seed_0", "seed_1"]
    assert figures["settings"]["rank"] == 0 and [row["step"] for row in figures["evaluations"]] == [3, 6]
    assert "model_best.pth" in error_of(TOOL, *arguments)
    assert len(run_tool(TOOL, "--task", "listops", "--measure", "--lengths", 64, "--runs", 1)[1].splitlines()) == 4
