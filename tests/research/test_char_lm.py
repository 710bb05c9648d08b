"""Character language models: the paper's numbers, exact resuming, and bits per character."""

import json
import math
from dataclasses import astuple, replace

import pytest
import torch
from torch import nn

from backbones import ConfigError
from research.char_lm.model import (
    BETAS,
    CONFIGS,
    EPSILON,
    MODELS,
    PUBLISHED_TEST_LENGTH,
    PUBLISHED_TEST_MEMORY,
    FullAttentionLM,
    ModelSize,
    Phase,
    count_parameters,
    create_model,
    phases_for,
    rotate,
    size_for,
)
from research.char_lm.text import Streams, Vocabulary, read_text
from research.char_lm.training import Settings, TrainedModel, Training, best_path, bits_per_character, generate
from tests.projects_vil.helpers import error_line, run_tool

TOOL = "../research/char_lm/__main__.py"
SIZE = ModelSize(dim=16, num_heads=2, hidden_dim=24, depth=2, window_size=8, segment_length=4, rank=1)
PHASES = (
    Phase(length=16, steps=8, warmup_steps=2, learning_rate=1e-2, batch_size=4),
    Phase(length=24, steps=3, warmup_steps=1, learning_rate=5e-3, batch_size=2),
)
SETTINGS = Settings(models=MODELS, size=SIZE, phases=PHASES, dropout=0.1, weight_decay=0.01, accumulate=2, eval_every=2)


def test_published_numbers():
    """LS section 4.2, appendix C, table 2; autoregressive/launch/enwik8-{base,large}-phase{1,2,3}.sh, run-eval.sh."""
    assert [astuple(phase) for phase in CONFIGS["small"].phases] == [
        (2048, 430_000, 10_000, 2.5e-4, 32),
        (4096, 50_000, 5_000, 1.25e-4, 32),
        (8192, 50_000, 5_000, 6.25e-5, 16),
    ]
    assert CONFIGS["large"].phases == CONFIGS["small"].phases
    for name, depth, values in (("small", 12, (0.2, 0.01, 44, 0.99)), ("large", 30, (0.4, 0.1, 110, 0.97))):
        config = CONFIGS[name]
        assert astuple(config.size) == (depth, 512, 2048, 8, 512, 16, 1)
        assert (config.dropout, config.weight_decay, config.parameters, config.bits_per_character) == values
        # The paper cuts the digits off.
        assert count_parameters("long_short", config.size) // 1_000_000 == config.parameters
        assert count_parameters("full", config.size) < count_parameters("long_short", config.size)
    assert (PUBLISHED_TEST_MEMORY, PUBLISHED_TEST_LENGTH) == (32768, 256)
    assert (BETAS, EPSILON) == ((0.9, 0.999), 1e-8)
    phase = PHASES[0]
    assert [phase.learning_rate_at(step) for step in (0, 1, 7)] == [5e-3, 1e-2, 1e-2]


def test_overrides_of_a_config():
    assert size_for("small", dim=128, depth=4).hidden_dim == 512
    assert size_for("small", dim=128, hidden_dim=100).hidden_dim == 100
    phases = phases_for("small", steps=[4300, 50], length=[64, 128], batch_size=[2])
    assert [astuple(phase) for phase in phases] == [(64, 4300, 100, 2.5e-4, 2), (128, 50, 5, 1.25e-4, 2)]
    with pytest.raises(ConfigError, match="length"):
        phases_for("small", steps=[9, 9], length=[1, 2, 3])
    with pytest.raises(ConfigError, match="smal"):
        size_for("smal")


def full_attention(memory_length: int = 64) -> FullAttentionLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "dim": 24, "num_heads": 4, "hidden_dim": 40, "depth": 3}
    model = FullAttentionLM(**sizes, memory_length=memory_length).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("lengths", [(10, 10, 9), (1, 27, 1)])
def test_full_attention_on_blocks_equals_the_whole_and_is_causal(lengths):
    model, ids = full_attention(), torch.randint(11, (2, 29), generator=torch.Generator().manual_seed(1))
    whole, _ = model(ids)
    memory, blocks = None, []
    for block in ids.split(lengths, dim=1):
        log_probabilities, memory = model(block, memory)
        blocks.append(log_probabilities)
    torch.testing.assert_close(torch.cat(blocks, dim=1), whole, rtol=0, atol=1e-6)
    changed = ids.clone()
    changed[:, 17:] = (changed[:, 17:] + 1) % 11
    after, _ = model(changed)
    torch.testing.assert_close(whole[:, :17], after[:, :17])
    assert not torch.equal(whole[:, 17], after[:, 17])
    whole.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert [tuple(layer.shape) for layer in full_attention(12)(ids)[1]] == [(2, 12, 24)] * 3


def test_rotations_depend_on_differences_of_positions_only():
    query, key = torch.randn(2, 1, 2, 9, 6, dtype=torch.float64)
    scores = [rotate(query, first) @ rotate(key, first).transpose(-1, -2) for first in (0, 33)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-5)
    assert not torch.allclose(scores[0], query @ key.transpose(-1, -2))


@pytest.mark.parametrize("number, num_streams, length", [(101, 4, 8), (103, 4, 7), (20, 1, 64), (12, 11, 2)])
def test_each_byte_is_a_target_once(number, num_streams, length):
    streams = Streams(torch.arange(number), num_streams, length)
    blocks = [streams.block(index) for index in range(len(streams))]
    own = [
        target
        for stream in range(num_streams)
        for block in blocks
        for target in block.targets[stream][block.is_own[stream]].tolist()
    ]
    assert own == list(range(1, number))
    assert all(torch.equal(block.targets, block.inputs + 1) for block in blocks)


def test_a_text_has_three_parts(tmp_path):
    data = b"ab" * 90 + b"\xff\x00" * 10
    (tmp_path / "text").write_bytes(data)
    text = read_text(tmp_path / "text")
    assert text.vocabulary.known == [ord("a"), ord("b")] and text.vocabulary.other == 2 == text.test[-1]
    train, val, test = (text.vocabulary.decode(part.tolist()) for part in (text.train, text.val, text.test))
    assert train + val[1:] + test[1:] == b"ab" * 90 + b"?" * 20
    assert text.vocabulary.encode_prompt("ba").tolist() == [1, 0]
    for prompt in ("ax", ""):
        with pytest.raises(ConfigError, match="prompt"):
            text.vocabulary.encode_prompt(prompt)
    (tmp_path / "short").write_bytes(b"x" * 99)
    with pytest.raises(ConfigError, match="short"):
        read_text(tmp_path / "short")


class Uniform(nn.Module):
    """Gives all ids the same probability."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, ids, memory=None):
        return torch.zeros(*ids.shape, self.vocab_size).log_softmax(dim=-1), (ids,)


@pytest.mark.parametrize("num_streams", [1, 3, 500])
def test_bits_of_a_uniform_guess(num_streams):
    ids = torch.randint(16, (137,), dtype=torch.int16)
    bits = bits_per_character(Uniform(17), ids, Vocabulary(range(16)), length=10, num_streams=num_streams)
    assert bits == pytest.approx(math.log2(17), abs=1e-6)
    # An unknown byte also costs the choice among the unknown ones.
    vocabulary = Vocabulary(range(127))
    ids = torch.cat([torch.zeros(1, dtype=torch.int16), vocabulary.encode(bytes([200, 5, 255, 127] * 10))])
    bits = bits_per_character(Uniform(128), ids, vocabulary, length=8, num_streams=num_streams)
    assert bits == pytest.approx(7 + 0.75 * math.log2(129))


@pytest.mark.parametrize("name", MODELS)
def test_the_memory_passes_from_block_to_block(name):
    torch.manual_seed(0)
    model = create_model(name, SIZE, vocab_size=8, memory_length=16, dropout=0.5).eval()
    ids = torch.randint(7, (50,), dtype=torch.int16)
    memory, total = None, 0.0
    for inputs, targets in zip(ids[None, :-1].long().split(12, dim=1), ids[1:].long().split(12), strict=True):
        with torch.no_grad():
            log_probabilities, memory = model(inputs, memory)
        total -= log_probabilities[0, torch.arange(len(targets)), targets].sum().item()
    bits = bits_per_character(model.train(), ids, Vocabulary(range(7)), length=12)
    assert bits == pytest.approx(total / math.log(2) / 49, rel=1e-5)
    assert model.training


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(b"a repeated line of text\n" * 20)
    return read_text(path)


def results_of(training: Training) -> tuple:
    rows = [{**row, "seconds": 0.0} for row in training.evaluations]
    return rows, [TrainedModel.load(best_path(training.output, name)).model for name in training.settings.models]


def assert_same(one: tuple, other: tuple) -> None:
    assert one[0] == other[0]
    for model, expected in zip(one[1], other[1], strict=True):
        weights = expected.state_dict()
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    training = Training(SETTINGS, text, tmp_path_factory.mktemp("whole") / "run")
    training.run()
    return training


class Stopped(Exception):
    pass


# After the second evaluation of the first phase, at its end, and in the second phase: the state before was saved.
@pytest.mark.parametrize("stop", [(1, 4), (2, 2), (2, 3)])
def test_resuming_is_exact(text, tmp_path, whole, stop):
    def interrupt(row) -> None:
        if (row["phase"], row["step"], row["model"]) == (*stop, "full"):
            raise Stopped

    with pytest.raises(Stopped):
        Training(SETTINGS, text, tmp_path / "run").run(interrupt)
    training = Training(SETTINGS, text, tmp_path / "run", resume=True)
    training.run()
    assert_same(results_of(training), results_of(whole))


def test_a_run_is_resumed_with_its_settings_only(text, whole):
    with pytest.raises(ConfigError, match="last.pth"):
        Training(SETTINGS, text, whole.output)
    for changes in ({"seed": 1}, {"size": replace(SIZE, dim=32)}, {"phases": PHASES[:1]}, {"models": MODELS[:1]}):
        (name,) = changes
        with pytest.raises(ConfigError, match=name):
            Training(replace(SETTINGS, **changes), text, whole.output, resume=True)
    finished = Training(SETTINGS, text, whole.output, resume=True)
    finished.run()
    assert_same(results_of(finished), results_of(whole))


def test_a_model_alone_trains_as_in_a_comparison(text, tmp_path, whole):
    training = Training(replace(SETTINGS, models=MODELS[:1]), text, tmp_path / "run")
    training.run()
    rows, models = results_of(whole)
    assert_same(results_of(training), ([row for row in rows if row["model"] == MODELS[0]], models[:1]))


def test_gradient_accumulation_trains_as_one_batch(text, tmp_path):
    bits = []
    for accumulate in (1, 2):
        settings = replace(SETTINGS, phases=PHASES[:1], dropout=0.0, accumulate=accumulate)
        training = Training(settings, text, tmp_path / str(accumulate))
        training.run()
        bits.append([row["val"] for row in training.evaluations])
    assert bits[0] == pytest.approx(bits[1], rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_a_repeated_text_is_learned_and_generated(text, tmp_path, name):
    phases = (Phase(length=24, steps=40, warmup_steps=4, learning_rate=2e-2, batch_size=2),)
    settings = Settings(models=(name,), size=SIZE, phases=phases, dropout=0.0, weight_decay=0.0, eval_every=20)
    training = Training(settings, text, tmp_path / "run")
    training.run()
    first, last = training.evaluations
    assert last["train"] < 2 < first["train"] < math.log2(len(text.vocabulary)) and last["val"] < 2.5
    trained = TrainedModel.load(best_path(training.output, name))
    assert trained.val == min(row["val"] for row in training.evaluations) and trained.length == 24
    prompt = text.vocabulary.encode_prompt("a repeated line of text\na rep")
    options = {"number": 40, "length": 24, "unknown": text.vocabulary.other}
    samples = [generate(trained.model, prompt, seed=seed, temperature=2.0, **options) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2] and max(samples[0]) < text.vocabulary.other
    longer = TrainedModel.load(best_path(training.output, name), memory_length=48)
    assert longer.model.memory_length == 48


@pytest.mark.parametrize(
    "changes",
    [
        {"phases": (replace(PHASES[0], batch_size=40),)},
        {"accumulate": 3},
        {"phases": (replace(PHASES[0], learning_rate=1e30),)},
        {"memory_length": 10},
    ],
    ids=str,
)
def test_settings_that_cannot_be_trained_with(text, tmp_path, changes):
    with pytest.raises(ConfigError):
        Training(replace(SETTINGS, **changes), text, tmp_path / "run").run()
    assert not (tmp_path / "run/best_full.pth").exists()


@pytest.mark.slow
def test_the_commands(tmp_path):
    (tmp_path / "text").write_bytes(b"All work and no play makes a dull text.\n" * 50)
    run, found = tmp_path / "run", tmp_path / "found.json"
    sizes = ["--depth", 1, "--dim", 16, "--num-heads", 2, "--window-size", 16, "--length", 32, "--batch-size", 2]
    train = [
        "train",
        "--data",
        tmp_path / "text",
        "--output",
        run,
        *sizes,
        "--steps",
        6,
        "--eval-every",
        3,
        "--compare",
    ]
    train += ["--device", "cpu", "--json", found]
    result = run_tool(TOOL, *train, "--sample", 20, "--prompt", "All")
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in run.iterdir()) == ["best_full.pth", "best_long_short.pth", "last.pth"]
    figures = json.loads(found.read_text())["results"]
    assert all(f"{row['test']:.4f}" in result.stdout and row["sample"] in result.stdout for row in figures)
    assert "last.pth" in error_line(run_tool(TOOL, *train))
    assert run_tool(TOOL, *train, "--resume").returncode == 0
    weights = ["--weights", run / "best_full.pth", "--device", "cpu"]
    tested = run_tool(TOOL, "evaluate", *weights, "--data", tmp_path / "text", "--json", found)
    assert json.loads(found.read_text())["test"] == pytest.approx(figures[1]["test"]), tested.stderr
    assert run_tool(TOOL, "generate", *weights, "--prompt", "All").stdout.startswith("All")
    assert "last.pth" in error_line(run_tool(TOOL, "generate", "--weights", run / "last.pth"))
    measured = run_tool(TOOL, "measure", *sizes[:8], "--lengths", 32, "--runs", 1)
    assert measured.returncode == 0 and "44M" in measured.stdout
