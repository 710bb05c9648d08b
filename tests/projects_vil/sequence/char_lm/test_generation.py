"""Samples: the same by seed, of known bytes, from all that was seen; and the files that they come from."""

import pytest
import torch

from backbones import InputError
from projects_vil.sequence.char_lm import KINDS, ModelSize, Trained, Vocabulary, create_model, generate, load_trained
from projects_vil.sequence.char_lm.checkpoints import save_run, save_trained

SIZE = ModelSize(dim=16, num_heads=2, hidden_dim=24, depth=2, window_size=8, segment_length=4, rank=1)
VOCABULARY = Vocabulary(sorted(b"abcdef"))


def trained_of(kind: str) -> Trained:
    torch.manual_seed(0)
    model = create_model(kind, SIZE, vocab_size=len(VOCABULARY), memory_length=16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return Trained(kind, SIZE, VOCABULARY, 12, 16, model.state_dict(), {"dev": 1.0})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["a", "abcabcabcabcabcabcabcabcabc"])
def test_a_sample_is_of_known_bytes_and_the_same_by_seed(kind, prompt):
    trained = trained_of(kind)
    model, ids = trained.build(), VOCABULARY.encode_prompt(prompt)
    options = {"number": 40, "length": 12, "other": VOCABULARY.other}
    samples = [generate(model, ids, seed=seed, **options) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    assert all(0 <= byte < VOCABULARY.other for byte in samples[0])
    assert len(VOCABULARY.decode(samples[0])) == 40


def test_the_id_of_unknown_bytes_is_never_drawn():
    trained = trained_of("long_short")
    model = trained.build()
    with torch.no_grad():
        model.bias[VOCABULARY.other] = 50.0
    drawn = generate(model, torch.tensor([0]), number=30, length=12, other=VOCABULARY.other)
    assert VOCABULARY.other not in drawn


@pytest.mark.parametrize("kind", KINDS)
def test_the_surest_sample_is_that_of_the_parts_of_training(kind):
    model = trained_of(kind).build()
    prompt = VOCABULARY.encode_prompt("abcdefabcdefab")
    drawn = generate(model, prompt, number=20, length=12, other=VOCABULARY.other, temperature=1e-310)
    memory, text = None, torch.tensor([[*prompt.tolist(), *drawn]])
    predicted = []
    for part in text.split(12, dim=1):
        log_probabilities, memory = model(part, memory)
        predicted += log_probabilities[0, :, : VOCABULARY.other].argmax(dim=-1).tolist()
    assert predicted[len(prompt) - 1 : -1] == drawn


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_says_all_of_its_model(tmp_path, kind):
    trained, path = trained_of(kind), tmp_path / "best.pth"
    save_trained(path, trained)
    read = load_trained(path)
    assert (read.kind, read.size, read.length, read.memory_length) == (kind, SIZE, 12, 16)
    assert (read.vocabulary.known, read.facts) == (VOCABULARY.known, {"dev": 1.0})
    ids = torch.tensor([[0, 3, 1]])
    assert torch.equal(read.build()(ids)[0], trained.build()(ids)[0])
    # Another memory needs no other weights.
    assert read.build(memory_length=32).memory_length == 32


def test_what_is_no_model_is_named(tmp_path):
    path = tmp_path / "file.pth"
    with pytest.raises(InputError, match="there is no file"):
        load_trained(path)
    torch.save({"model": {"weight": torch.zeros(1)}}, path)
    with pytest.raises(InputError, match="is no character model"):
        load_trained(path)
    save_run(path, {"full": trained_of("full").build()}, {}, {})
    with pytest.raises(InputError, match="is the state of a run, for --resume"):
        load_trained(path)


def test_weights_of_another_size_are_refused(tmp_path):
    trained, path = trained_of("full"), tmp_path / "best.pth"
    save_trained(path, Trained("long_short", SIZE, VOCABULARY, 12, 16, trained.weights, {}))
    with pytest.raises(InputError, match="the weights of long_short do not fit"):
        load_trained(path).build()
