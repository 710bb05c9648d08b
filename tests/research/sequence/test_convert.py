"""Sequence models with official weights: the official outputs, names with prefixes, and mismatches."""

import functools

import pytest
import torch

from backbones.errors import ConfigError
from research.sequence import convert_sequence_state_dict, create_char_lm, create_sequence_encoder
from tests.backbones.helpers import with_tensor, without
from tests.golden import assert_close_to_golden, golden, golden_ids, golden_state_dict

ENCODER, CHAR_LM = "ls_sequence_cls_token", "ls_char_lm"
# Our argument -> the official one
SIZES = {"vocab_size": "vocabulary", "dim": "dim", "num_heads": "heads", "hidden_dim": "hidden", "depth": "layers"}
SIZES |= {"rank": "rank", "window_size": "window"}
ENCODER_SIZES = SIZES | {"max_length": "longest", "class_token": "class_token"}
CHAR_LM_SIZES = SIZES | {"memory_length": "cache", "segment_length": "segment"}


@functools.cache
def official(name: str) -> dict[str, torch.Tensor]:
    return golden_state_dict(golden(name))


def model_of(name: str, **changes) -> torch.nn.Module:
    create, sizes = (create_char_lm, CHAR_LM_SIZES) if name == CHAR_LM else (create_sequence_encoder, ENCODER_SIZES)
    config = golden(name)["config"]
    return create(**{ours: config[theirs] for ours, theirs in sizes.items()} | changes).double().eval()


@pytest.mark.parametrize("name", [ENCODER, "ls_sequence_mean", "ls_sequence_window_only"])
def test_encoder(name):
    reference, encoder = golden(name), model_of(name)
    state_dict, report = convert_sequence_state_dict(official(name), encoder)
    encoder.load_state_dict(state_dict, strict=True)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == reference["parameters"]
    # Without a projection, the official layer of its scores is empty.
    assert len(report.dropped) == (4 if name == "ls_sequence_window_only" else 0)
    ids = golden_ids(reference)
    mask = torch.arange(ids.shape[1]) < torch.tensor(reference["input"]["real"])[:, None]
    with torch.inference_mode():
        assert_close_to_golden(encoder(ids, mask), reference["output"], correction=1)


def test_char_lm():
    """The text has three parts, and the memory is passed from part to part."""
    reference, model = golden(CHAR_LM), model_of(CHAR_LM)
    state_dict, report = convert_sequence_state_dict(official(CHAR_LM), model)
    model.load_state_dict(state_dict, strict=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == reference["parameters"]
    assert report.tied == {"out_emb.weight": "embedding.weight"} and list(report.dropped) == ["pos_emb.inv_freq"]
    ids, memory = golden_ids(reference), None
    for first in (0, 32, 64):
        with torch.inference_mode():
            log_probabilities, memory = model(ids[:, first : first + 32], memory)
        expected = reference["output"][f"tokens {first} to {first + 31}"]
        assert_close_to_golden(log_probabilities, expected, correction=1)


@pytest.mark.parametrize(
    "name, prefix, head",
    [(ENCODER, "module.model.", "module.seq_classifer.mlpblock.0.weight"), (CHAR_LM, "decoder.model.", None)],
)
def test_wrapped_weights(name, prefix, head):
    """The names have the prefixes of official training. A head is dropped, and the values of the model are not read."""
    weights = {f"{prefix}{key}": tensor for key, tensor in official(name).items()}
    weights |= {head: torch.ones(128, 64)} if head else {}
    with torch.device("meta"):
        model = model_of(name)
    state_dict, report = convert_sequence_state_dict(weights, model)
    expected, _ = convert_sequence_state_dict(official(name), model)
    assert all(torch.equal(state_dict[key], tensor) for key, tensor in expected.items())
    assert head is None or list(report.dropped) == [head]


def test_unused_norm_is_dropped():
    """The official model always has the second norm. Without projection and class token, it is not used."""
    weights = {name: x for name, x in official("ls_sequence_window_only").items() if name != "cls_embed"}
    model = model_of("ls_sequence_window_only", class_token=False)
    state_dict, report = convert_sequence_state_dict(weights, model)
    model.load_state_dict(state_dict, strict=True)
    assert {name.split(".")[2] for name in report.dropped} == {"dual_ln_s", "dconv_fc"}


@pytest.mark.parametrize(
    "name, change, options, hint",
    [
        (ENCODER, with_tensor("conv", 2), {}, "conv"),
        (ENCODER, with_tensor("transformer_2.norm1.bias", 64), {}, "transformer_2.norm1.bias"),
        (ENCODER, with_tensor("module.norm.bias", 64), {}, "module.norm.bias"),
        (ENCODER, dict, {"max_length": 95}, "position_embeddings.weight"),
        (ENCODER, dict, {"class_token": False}, "cls_embed"),
        (ENCODER, dict, {"rank": 0}, "dconv_fc.weight"),
        (CHAR_LM, with_tensor("out_emb.weight", 48, 64), {}, "out_emb.weight"),
        (CHAR_LM, with_tensor("pos_emb.inv_freq", 32), {}, "pos_emb.inv_freq"),
        (CHAR_LM, with_tensor("layers.0.attn.r_w_bias", 1, 2, 1, 1, 32), {}, "r_w_bias"),
        (CHAR_LM, with_tensor("layers.0.attn.r_x_bias", 1, 4, 1, 16), {}, "r_x_bias"),
        (CHAR_LM, without("layers.1.ff.fc2.bias"), {}, "layers.1.mlp.fc2.bias"),
        (CHAR_LM, lambda _: official(ENCODER), {}, "transformer_0"),
    ],
)
def test_mismatched_weights_raise(name, change, options, hint):
    with pytest.raises(ConfigError, match=hint) as caught:
        convert_sequence_state_dict(change(official(name)), model_of(name, **options))
    assert "\n" not in str(caught.value)
