"""Encoders with a head: of one document, or of two that are compared (section 4.1)."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.attention.dense import merge_heads, split_heads
from backbones.layers.mlp import Mlp
from backbones.sequence import create_sequence_encoder
from backbones.sequence.checks import check_rate
from backbones.utils.errors import InputError, check_choice
from projects_vil.sequence.lra.settings import MODELS, Settings


class FullAttentionLayer(nn.Module):
    """Softmax attention over all tokens, and an MLP, each behind a LayerNorm and with a skip connection.

    Args:
        dim: C, channels of a token.
        num_heads: divides it.
        hidden_dim: channels inside the MLP.
        dropout: rate after the attention and in the MLP; ``attention_dropout``, of the attention weights.
    """

    def __init__(
        self, dim: int, *, num_heads: int, hidden_dim: int, dropout: float = 0.0, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.attention_norm = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.projection = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, hidden_dim=hidden_dim, dropout=dropout)

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """(B, N, C), and (B, N) bool, True for real tokens, or None -> (B, N, C)."""
        normed = self.attention_norm(tokens)
        heads = (split_heads(layer(normed), self.num_heads) for layer in (self.query, self.key, self.value))
        seen = None if mask is None else mask[:, None, None]
        rate = self.attention_dropout if self.training else 0.0
        gathered = F.scaled_dot_product_attention(*heads, attn_mask=seen, dropout_p=rate)
        update = self.projection(merge_heads(gathered))
        tokens = tokens + F.dropout(update, self.dropout, self.training)
        return tokens + self.mlp(self.mlp_norm(tokens))


class FullAttentionEncoder(nn.Module):
    """Word and position embeddings, a class token, layers of full attention and a LayerNorm: ids (B, N) -> (B, 1, C).

    Args: as of :func:`backbones.sequence.create_sequence_encoder`.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        num_heads: int,
        hidden_dim: int,
        depth: int,
        max_length: int,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding = nn.Embedding(vocab_size, dim)
        self.positions = nn.Parameter(torch.empty(max_length, dim))
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        rates = {"dropout": dropout, "attention_dropout": attention_dropout}
        self.layers = nn.ModuleList(
            FullAttentionLayer(dim, num_heads=num_heads, hidden_dim=hidden_dim, **rates) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        for table in (self.embedding.weight, self.positions):
            nn.init.normal_(table, std=0.02)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """The class token of each sequence.

        Args:
            ids: (B, N) int64.
            mask: (B, N) bool, True for real tokens; None where all are.

        Raises:
            InputError: for a sequence that is longer than ``max_length``.
        """
        if ids.shape[1] > len(self.positions):
            raise InputError(f"a sequence has {ids.shape[1]} tokens, and max_length is {len(self.positions)}")
        tokens = self.embedding(ids) + self.positions[: ids.shape[1]]
        tokens = F.dropout(tokens, self.dropout, self.training)
        tokens = torch.cat([self.class_token.expand(len(ids), -1, -1), tokens], dim=1)
        seen = None if mask is None else F.pad(mask, (1, 0), value=True)
        for layer in self.layers:
            tokens = layer(tokens, seen)
        return self.norm(tokens[:, :1])


class SequenceClassifier(nn.Module):
    """An encoder, and a head on its class token, or on those of two documents: u, v, u * v and u - v.

    Args:
        encoder: ids (B, N), mask (B, N) -> (B, 1, dim)
        dim: channels of the class token.
        hidden_dim: channels inside the head.
        num_classes: C
        num_documents: 1 or 2.

    Source: lra/model_wrapper.py, SCHead and SCHeadDual.
    """

    def __init__(
        self, encoder: nn.Module, *, dim: int, hidden_dim: int, num_classes: int, num_documents: int = 1
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Sequential(
            nn.Linear(dim if num_documents == 1 else 4 * dim, hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, num_classes),
        )

    def forward(self, documents: tuple[tuple[Tensor, Tensor | None], ...]) -> Tensor:
        """Ids (B, N) and mask (B, N) or None of each document -> logits (B, C)."""
        tokens = [self.encoder(ids, mask)[:, 0] for ids, mask in documents]
        if len(tokens) == 2:
            first, second = tokens
            tokens = [torch.cat([first, second, first * second, first - second], dim=-1)]
        return self.head(tokens[0])


def create_lra_classifier(settings: Settings, *, model: str = "ls") -> SequenceClassifier:
    """A classifier with random weights.

    Args:
        settings: sizes, classes, documents and dropout.
        model: ``"ls"``, long-short attention, or ``"full"``, softmax attention over all tokens.

    Raises:
        InputError: for an unknown model, a rate that is none, and a window and a rank that cannot be.
    """
    check_choice("model", model, MODELS)
    rates = {"dropout": settings.dropout, "attention_dropout": settings.attention_dropout}
    for name, rate in rates.items():
        check_rate(name, rate)
    sizes = dataclasses.asdict(settings.sizes)
    if model == "full":
        of_full = {name: size for name, size in sizes.items() if name not in ("window_size", "rank", "class_token")}
        encoder = FullAttentionEncoder(**of_full, **rates)
    else:
        encoder = create_sequence_encoder(**sizes, **rates)
    return SequenceClassifier(
        encoder,
        dim=settings.sizes.dim,
        hidden_dim=settings.sizes.hidden_dim,
        num_classes=settings.num_classes,
        num_documents=settings.data.num_documents,
    )
