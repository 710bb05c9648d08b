"""Classifiers: what padding, documents and the choice of attention mean to them."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from backbones import InputError
from projects_vil.sequence.lra import create_lra_classifier, settings_of
from projects_vil.sequence.lra.model import FullAttentionEncoder, SequenceClassifier

TOKENS, LENGTHS = torch.arange(1, 31).view(2, 15), torch.tensor([15, 9])


def create(task: str = "listops", *, model: str = "ls", **sizes):
    torch.manual_seed(0)
    settings = settings_of(task).with_sizes(**{"max_length": 40, "dim": 16, "hidden_dim": 24} | sizes)
    return create_lra_classifier(settings, model=model).eval().double()


def padded(fill: int = 0, extra: int = 0):
    mask = torch.arange(15 + extra) < LENGTHS[:, None]
    return F.pad(TOKENS, (0, extra)).masked_fill(~mask, fill), mask


@pytest.mark.parametrize("model", ["ls", "full"])
def test_padding_changes_nothing(model):
    classifier = create(model=model)
    logits = classifier((padded(),))
    assert logits.shape == (2, 10)
    torch.testing.assert_close(classifier((padded(fill=7, extra=4),)), logits)
    alone = classifier(((TOKENS[1:, :9], None),))
    torch.testing.assert_close(alone, logits[1:])


@pytest.mark.parametrize("sizes", [{}, {"window_size": 0}, {"rank": 0}, {"class_token": "last_layer"}], ids=str)
def test_every_parameter_learns(sizes):
    classifier = create(**sizes).train()
    classifier((padded(),)).square().sum().backward()
    assert [name for name, parameter in classifier.named_parameters() if parameter.grad is None] == []


def test_the_head_of_two_documents():
    """Of u, v, u * v and u - v, as SCHeadDual."""
    classifier = create("retrieval")
    first, second = padded(), (TOKENS[:, :6], None)
    with torch.no_grad():
        u, v = (classifier.encoder(*document)[:, 0] for document in (first, second))
        expand, _, contract = classifier.head
        expected = contract(expand(torch.cat([u, v, u * v, u - v], dim=-1)).relu())
        torch.testing.assert_close(classifier((first, second)), expected)
        assert not torch.allclose(classifier((second, first)), expected)
    assert expand.in_features == 64


def test_full_attention_is_the_softmax_over_all_tokens():
    """The class token of one layer with one head, written out."""
    torch.manual_seed(0)
    encoder = FullAttentionEncoder(vocab_size=40, dim=8, num_heads=1, hidden_dim=8, depth=1, max_length=20).double()
    layer = encoder.layers[0]
    with torch.no_grad():
        encoder.class_token.normal_()
        tokens = encoder.embedding(TOKENS[1, :9]) + encoder.positions[:9]
        tokens = torch.cat([encoder.class_token[0], tokens])
        normed = layer.attention_norm(tokens)
        weights = (layer.query(normed)[0] @ layer.key(normed).T / 8**0.5).softmax(dim=-1)
        token = tokens[0] + layer.projection(weights @ layer.value(normed))
        token = token + layer.mlp(layer.mlp_norm(token))
        torch.testing.assert_close(encoder(*padded())[1, 0], encoder.norm(token))


def test_parameters_of_the_two_kinds_are_nearly_as_many():
    with torch.device("meta"):
        ls, full = (create_lra_classifier(settings_of("listops"), model=model) for model in ("ls", "full"))
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (ls, full)]
    # Two norms of DualLN and two projections of rank 2.
    assert counts[0] - counts[1] == 2 * (2 * 2 * 64 + 65 * 2 * 2)


def test_what_cannot_be_made():
    settings = settings_of("listops")
    with pytest.raises(InputError, match="did you mean 'full'"):
        create_lra_classifier(settings, model="ful")
    with pytest.raises(InputError, match="a token sees nothing"):
        create_lra_classifier(settings.with_sizes(window_size=0, rank=0))
    for model in ("ls", "full"):
        with pytest.raises(InputError, match="dropout=1.5"):
            create_lra_classifier(dataclasses.replace(settings, dropout=1.5), model=model)
    with pytest.raises(InputError, match="a sequence has 41 tokens, and max_length is 40"):
        create(model="full")(((torch.ones(1, 41, dtype=torch.int64), None),))


def test_a_head_takes_any_encoder():
    class Mean(torch.nn.Module):
        def forward(self, ids, mask):
            return ids[:, :, None].float().mean(1, keepdim=True)

    head = SequenceClassifier(Mean(), dim=1, hidden_dim=4, num_classes=3)
    assert head(((TOKENS, None),)).shape == (2, 3)
