"""Character language models: the paper's numbers, exact resuming, and bits per character."""

import json
import math
from dataclasses import astuple, replace

import pytest
import torch
from torch import nn

from backbones import ConfigError
from research.char_lm.model import MODELS, ModelSize, Phase, count_parameters, create_model, phases_for, size_for
from research.char_lm.text import Streams, Vocabulary, read_text
from research.char_lm.training import Settings, Training, best_path, bits_per_character, generate, load_trained
from tests.projects_vil.helpers import error_of, message, run_tool

TOOL = "../research/char_lm/__main__.py"
SIZE = ModelSize(dim=16, num_heads=2, hidden_dim=24, depth=2, window_size=8, segment_length=4, rank=1)
PHASES = (
    Phase(length=16, steps=8, warmup_steps=2, learning_rate=1e-2, batch_size=4),
    Phase(length=24, steps=3, warmup_steps=1, learning_rate=5e-3, batch_size=2),
)

SETTINGS = Settings(models=MODELS, size=SIZE, phases=PHASES, dropout=0.1, weight_decay=0.01, accumulate=2, eval_every=2)


@pytest.mark.parametrize("name, millions", [("small", 44), ("large", 110)])
def test_models_have_the_parameters_of_table_2(name, millions):
    """LS table 2. The paper truncates the digits."""
    assert count_parameters("long_short", size_for(name)) // 1_000_000 == millions


def test_overrides_of_a_config():
    assert size_for("small", dim=128, depth=4).hidden_dim == 512
    phases = phases_for("small", steps=[4300, 50], length=[64, 128], batch_size=[2])
    # LS appendix C, and the ratios of the scripts
    assert [phase.learning_rate for phase in phases_for("text8")] == [5e-4, 2.5e-4, 1.25e-4]
    assert [PHASES[0].learning_rate_at(step) for step in (0, 1, 7)] == [5e-3, 1e-2, 1e-2]
    assert [astuple(phase) for phase in phases] == [(64, 4300, 100, 2.5e-4, 2), (128, 50, 5, 1.25e-4, 2)]


def test_full_attention_by_blocks_is_causal_and_equals_one_pass():
    torch.manual_seed(0)
    model = create_model("full", replace(SIZE, dim=24, num_heads=4), vocab_size=11, memory_length=64).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ids = torch.randint(11, (2, 29))
    whole, _ = model(ids)
    memory, blocks = None, []
    for block in ids.split((1, 18, 10), dim=1):
        log_probabilities, memory = model(block, memory)
        blocks.append(log_probabilities)
    torch.testing.assert_close(torch.cat(blocks, dim=1), whole, rtol=0, atol=1e-5)
    changed = torch.cat([ids[:, :17], (ids[:, 17:] + 1) % 11], dim=1)
    torch.testing.assert_close(whole[:, :17], model(changed)[0][:, :17])
    whole.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("number, num_streams, length", [(103, 4, 7), (20, 1, 64)])
def test_each_byte_is_a_target_once(number, num_streams, length):
    streams = Streams(torch.arange(number), num_streams, length)
    all_targets = []
    for index in range(len(streams)):
        inputs, targets, is_first = streams.block(index)
        assert torch.equal(targets, inputs + 1)
        all_targets += targets[is_first].tolist()
    assert sorted(all_targets) == list(range(1, number))


def test_text_is_split_into_train_val_and_test(tmp_path):
    (tmp_path / "text").write_bytes(b"ab" * 90 + b"\xff\x00" * 10)
    text = read_text(tmp_path / "text")
    train, val, test = (text.vocabulary.decode(part.tolist()) for part in (text.train, text.val, text.test))
    assert train + val[1:] + test[1:] == b"ab" * 90 + b"?" * 20
    assert text.vocabulary.encode_prompt("ba").tolist() == [1, 0]
    assert "prompt" in message(text.vocabulary.encode_prompt, "ax")


class Uniform(nn.Module):
    """A model with the same probability for all ids."""

    def forward(self, ids, memory=None):
        return torch.full((*ids.shape, 128), -math.log(128)), (ids,)


@pytest.mark.parametrize("num_streams", [1, 3, 500])
def test_bits_per_character_of_a_uniform_model(num_streams):
    # An unknown byte also costs the choice among the unknown ones.
    vocabulary = Vocabulary(range(127))
    ids = torch.cat([torch.zeros(1, dtype=torch.int16), vocabulary.encode(bytes([200, 5, 255, 127] * 10))])
    bits = bits_per_character(Uniform(), ids, vocabulary, length=8, num_streams=num_streams)
    assert bits == pytest.approx(7 + 0.75 * math.log2(129))


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_passes_the_memory_between_blocks(name):
    torch.manual_seed(0)
    model = create_model(name, SIZE, vocab_size=8, memory_length=16, dropout=0.5).eval()
    ids = torch.randint(7, (50,), dtype=torch.int16)
    memory, total = None, 0.0
    for inputs, targets in zip(ids[None, :-1].long().split(12, dim=1), ids[1:].long().split(12), strict=True):
        with torch.no_grad():
            log_probabilities, memory = model(inputs, memory)
        total -= log_probabilities[0, torch.arange(len(targets)), targets].sum().item()
    bits = bits_per_character(model.train(), ids, Vocabulary(range(7)), length=12)
    assert bits == pytest.approx(total / math.log(2) / 49, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_overlapping_sequences_predict_the_last_bytes(name):
    """Section 4.2: each byte is predicted once, from the sequence that ends at most 5 bytes after it."""
    torch.manual_seed(0)
    model = create_model(name, SIZE, vocab_size=8, memory_length=8).eval()
    ids, total = torch.randint(7, (33,)), 0.0
    with torch.no_grad():
        for target in range(1, 33):
            end = min(12 + max(-(-(target - 12) // 5), 0) * 5, 32)
            first = max(end - 12, 0)
            log_probabilities, _ = model(ids[None, first:end])
            total -= log_probabilities[0, target - 1 - first, ids[target]].item()
    bits = bits_per_character(model, ids.to(torch.int16), Vocabulary(range(7)), length=12, step=5)
    assert bits == pytest.approx(total / math.log(2) / 32, rel=1e-4)
    assert "at most 12" in message(bits_per_character, model, ids, Vocabulary(range(7)), length=12, step=24)
    whole = bits_per_character(model, ids.to(torch.int16), Vocabulary(range(7)), length=99, step=5)
    assert whole == pytest.approx(bits_per_character(model, ids.to(torch.int16), Vocabulary(range(7)), length=99))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(b"a repeated line of text\n" * 20)
    return read_text(path)


def results_of(training: Training, name: str) -> tuple:
    rows = [{**row, "seconds": 0.0} for row in training.evaluations if row["model"] == name]
    state_dict = load_trained(best_path(training.output, name))[0].state_dict()
    return rows, {key: tensor.tolist() for key, tensor in state_dict.items()}


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    training = Training(SETTINGS, text, tmp_path_factory.mktemp("whole") / "run")
    training.run()
    return training


class Stopped(Exception):
    pass


# Interrupt after the second evaluation of the first phase, at its end, and in the second phase.
@pytest.mark.parametrize("stop", [(1, 4), *(pytest.param((2, n), marks=pytest.mark.slow) for n in (2, 3))], ids=str)
def test_resumed_run_equals_an_uninterrupted_one(text, tmp_path, whole, stop):
    def interrupt(row) -> None:
        if (row["phase"], row["step"], row["model"]) == (*stop, "full"):
            raise Stopped

    with pytest.raises(Stopped):
        Training(SETTINGS, text, tmp_path / "run").run(interrupt)
    training = Training(SETTINGS, text, tmp_path / "run", resume=True)
    training.run()
    assert all(results_of(training, name) == results_of(whole, name) for name in MODELS)


def test_settings_that_do_not_fit(text, tmp_path, whole):
    with pytest.raises(ConfigError, match="loss"):
        Training(replace(SETTINGS, phases=(replace(PHASES[0], learning_rate=1e30),)), text, tmp_path).run()
    assert "last.pth" in message(Training, SETTINGS, text, whole.output)
    for changes in ({"size": replace(SIZE, dim=32)}, {"phases": PHASES[:1]}):
        (name,) = changes
        assert name in message(Training, replace(SETTINGS, **changes), text, whole.output, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_training_learns_and_generates_a_repeated_text(text, tmp_path, name):
    phases = (Phase(length=24, steps=40, warmup_steps=4, learning_rate=2e-2, batch_size=2),)
    settings = Settings(models=(name,), size=SIZE, phases=phases, dropout=0.0, weight_decay=0.0, eval_every=20)
    training = Training(settings, text, tmp_path / "run")
    training.run()
    first, last = training.evaluations
    assert last["train"] < 2 < first["train"] < math.log2(len(text.vocabulary)) and last["val"] < 2.5
    model, vocabulary, trained = load_trained(best_path(training.output, name), memory_length=48)
    assert trained["val"] == min(first["val"], last["val"]) and model.memory_length == trained["memory_length"] == 48
    prompt = vocabulary.encode_prompt("a repeated line of text\na rep")
    options = {"number": 40, "length": 24, "unknown": vocabulary.other, "temperature": 2.0}
    samples = [generate(model, prompt, seed=seed, **options) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2] and max(samples[0]) < vocabulary.other


@pytest.mark.slow
def test_the_commands(tmp_path):
    (tmp_path / "text").write_bytes(b"All work and no play makes a dull text.\n" * 50)
    run, found = tmp_path / "run", tmp_path / "found.json"
    sizes = "--depth 1 --dim 16 --num-heads 2 --window-size 16 --device cpu".split()
    train = ["train", "--data", tmp_path / "text", "--output", run, "--json", found, "--compare", *sizes]
    train += "--length 32 --batch-size 2 --steps 6 --eval-every 3".split()
    status, out, err = run_tool(TOOL, *train, "--sample", 20, "--prompt", "All")
    assert status == 0, err
    assert sorted(path.name for path in run.iterdir()) == ["best_full.pth", "best_long_short.pth", "last.pth"]
    figures = json.loads(found.read_text())["results"]
    assert all(f"{row['test']:.4f}" in out and row["sample"] in out for row in figures)
    assert "last.pth" in error_of(TOOL, *train)
    assert run_tool(TOOL, *train, "--resume")[0] == 0
    weights = ["--weights", run / "best_full.pth", "--device", "cpu"]
    run_tool(TOOL, "evaluate", *weights, "--data", tmp_path / "text", "--json", found)
    assert json.loads(found.read_text())["test"] == pytest.approx(figures[1]["test"], rel=1e-3)
    assert run_tool(TOOL, "generate", *weights, "--prompt", "All")[1].startswith("All")
    assert "last.pth" in error_of(TOOL, "generate", "--weights", run / "last.pth")
    assert len(run_tool(TOOL, "measure", *sizes, "--lengths", 32, "--runs", 1)[1].splitlines()) == 4
