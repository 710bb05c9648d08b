"""The official models on sequences: the same outputs from the same weights, through the converter."""

import pytest
import torch

from backbones.convert import convert_sequence_state_dict
from backbones.sequence import create_char_lm, create_sequence_encoder
from tests.golden import assert_close_to_golden, golden, golden_ids, golden_state_dict


@pytest.mark.parametrize("name", ["ls_sequence_cls_token", "ls_sequence_mean", "ls_sequence_window_only"])
def test_encoder(name):
    reference = golden(name)
    config = reference["config"]
    encoder = create_sequence_encoder(
        vocab_size=config["vocabulary"],
        dim=config["dim"],
        num_heads=config["heads"],
        hidden_dim=config["hidden"],
        depth=config["layers"],
        max_length=config["longest"],
        window_size=config["window"],
        rank=config["rank"],
        class_token=config["class_token"],
    ).eval()
    state_dict, report = convert_sequence_state_dict(golden_state_dict(reference), encoder)
    encoder.load_state_dict(state_dict, strict=True)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == reference["parameters"]
    # Without a projection the official layer of its scores is empty.
    assert len(report.dropped) == (4 if config["rank"] == 0 else 0)
    ids = golden_ids(reference)
    mask = torch.arange(ids.shape[1]) < torch.tensor(reference["input"]["real"])[:, None]
    with torch.inference_mode():
        assert_close_to_golden(encoder(ids, mask), reference["output"], correction=1)


def test_char_lm():
    """Three parts of a text, the memory carried from part to part."""
    reference = golden("ls_char_lm")
    config = reference["config"]
    model = create_char_lm(
        vocab_size=config["vocabulary"],
        dim=config["dim"],
        hidden_dim=config["hidden"],
        num_heads=config["heads"],
        depth=config["layers"],
        memory_length=config["cache"],
        segment_length=config["segment"],
        rank=config["rank"],
        window_size=config["window"],
    ).eval()
    state_dict, report = convert_sequence_state_dict(golden_state_dict(reference), model)
    model.load_state_dict(state_dict, strict=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == reference["parameters"]
    assert report.tied == {"out_emb.weight": "embedding.weight"}
    assert list(report.dropped) == ["pos_emb.inv_freq"]
    ids, memory = golden_ids(reference), None
    for part in range(3):
        first, last = 32 * part, 32 * part + 31
        with torch.inference_mode():
            log_probabilities, memory = model(ids[:, first : last + 1], memory)
        assert_close_to_golden(log_probabilities, reference["output"][f"tokens {first} to {last}"], correction=1)
