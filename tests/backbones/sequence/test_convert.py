"""Official weights of models on sequences: wrapped, without some parts, and such that do not fit."""

import pytest
import torch

from backbones.convert import convert_sequence_state_dict
from backbones.errors import ConfigError
from backbones.sequence import create_char_lm, create_sequence_encoder
from tests.golden import golden, golden_state_dict

ENCODER = {"vocab_size": 32, "dim": 64, "num_heads": 2, "hidden_dim": 128, "depth": 2, "max_length": 96}
ENCODER |= {"window_size": 8, "rank": 16, "class_token": True}
CHAR_LM = {"vocab_size": 48, "dim": 64, "hidden_dim": 128, "num_heads": 4, "depth": 2, "memory_length": 48}
CHAR_LM |= {"segment_length": 8, "rank": 2, "window_size": 16}


def official(name: str) -> dict[str, torch.Tensor]:
    return golden_state_dict(golden(name))


def encoder(**changes) -> torch.nn.Module:
    return create_sequence_encoder(**ENCODER | changes)


def char_lm(**changes) -> torch.nn.Module:
    return create_char_lm(**CHAR_LM | changes)


@pytest.mark.parametrize("prefix", ["module.", "model.", "module.model."])
def test_wrapped_encoders(prefix):
    """As the official training saves it, with a head, which is dropped and reported."""
    weights = {f"{prefix}{name}": x for name, x in official("ls_sequence_cls_token").items()}
    weights[f"{prefix.removesuffix('model.')}seq_classifer.mlpblock.0.weight"] = torch.ones(128, 64)
    model = encoder()
    state_dict, report = convert_sequence_state_dict(weights, model)
    model.load_state_dict(state_dict, strict=True)
    assert list(report.dropped) == [f"{prefix.removesuffix('model.')}seq_classifer.mlpblock.0.weight"]


def test_a_wrapped_language_model():
    weights = {f"decoder.model.{name}": x for name, x in official("ls_char_lm").items()}
    model = char_lm()
    model.load_state_dict(convert_sequence_state_dict(weights, model)[0], strict=True)


def test_nothing_of_the_model_is_read():
    with torch.device("meta"):
        model = encoder()
    state_dict, _ = convert_sequence_state_dict(official("ls_sequence_cls_token"), model)
    assert not any(x.is_meta for x in state_dict.values())


def test_a_norm_that_nothing_passes():
    """The official model has the second norm always; without projection and class token nothing goes through it."""
    weights = {name: x for name, x in official("ls_sequence_window_only").items() if name != "cls_embed"}
    model = encoder(rank=0, class_token=False)
    state_dict, report = convert_sequence_state_dict(weights, model)
    model.load_state_dict(state_dict, strict=True)
    assert {name.split(".", 2)[2].rpartition(".")[0] for name in report.dropped} == {"dual_ln_s", "dconv_fc"}


@pytest.mark.parametrize(
    "change, hint",
    [
        (lambda w: w.update(conv=torch.ones(2)), "conv"),
        (lambda w: w.pop("norm.bias"), "norm.bias"),
        (lambda w: w.update({"norm.bias": torch.full((64,), float("nan"))}), "norm.bias"),
        (lambda w: w.update({"norm.bias": torch.ones(64, dtype=torch.int64)}), "norm.bias"),
        (lambda w: w.update({"norm.bias": torch.ones(1, 64)}), "norm.bias"),
        (lambda w: w.update({"transformer_2.norm1.bias": torch.ones(64)}), "transformer_2.norm1.bias"),
        (lambda w: w.update({"module.norm.bias": torch.ones(64)}), "module.norm.bias"),
        (lambda w: w.update({"transformer_0.mha.dconv_fc.bias": torch.ones(4)}), "dconv_fc.bias"),
    ],
)
def test_an_encoder_that_does_not_fit(change, hint):
    weights = official("ls_sequence_cls_token")
    change(weights)
    with pytest.raises(ConfigError, match=hint) as caught:
        convert_sequence_state_dict(weights, encoder())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes, hint",
    [
        ({"max_length": 95}, "position_embeddings.weight"),
        ({"depth": 1}, "transformer_1"),
        ({"depth": 3}, "layers.2"),
        ({"class_token": False}, "cls_embed"),
        ({"rank": 0}, "dconv_fc.weight"),
    ],
)
def test_an_encoder_of_other_sizes(changes, hint):
    with pytest.raises(ConfigError, match=hint):
        convert_sequence_state_dict(official("ls_sequence_cls_token"), encoder(**changes))


@pytest.mark.parametrize(
    "change, hint",
    [
        (lambda w: w.update({"out_emb.weight": torch.ones(48, 64)}), "out_emb.weight"),
        (lambda w: w.update({"pos_emb.inv_freq": torch.ones(32)}), "pos_emb.inv_freq"),
        (lambda w: w.update({"layers.0.attn.r_w_bias": torch.ones(1, 2, 1, 1, 32)}), "r_w_bias"),
        (lambda w: w.update({"layers.0.attn.r_x_bias": torch.ones(1, 4, 1, 16)}), "r_x_bias"),
        (lambda w: w.update({"layers.0.attn.proj_key.bias": torch.ones(64)}), "proj_key.bias"),
        (lambda w: w.pop("layers.1.ff.fc2.bias"), "layers.1.mlp.contract.bias"),
    ],
)
def test_a_language_model_that_does_not_fit(change, hint):
    weights = official("ls_char_lm")
    change(weights)
    with pytest.raises(ConfigError, match=hint):
        convert_sequence_state_dict(weights, char_lm())
    with pytest.raises(ConfigError):
        convert_sequence_state_dict(official("ls_char_lm"), encoder())
