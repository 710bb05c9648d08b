"""Encoders with a head that classifies one document, or two that are compared (LS section 4.1)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.attention.dense import merge_heads, pytorch_attention, split_heads
from research.long_range_arena.tasks import CLASS_TOKENS, ENCODER, Settings
from research.sequence import create_sequence_encoder
from research.sequence.encoder import EncoderLayer


class FullAttention(nn.Module):
    """Multi-head softmax attention over all tokens."""

    def __init__(self, dim: int, *, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, class_token: None, mask: Tensor | None) -> tuple[Tensor, None]:
        """(B, N, C) and a mask (B, N) or None -> (B, N, C), and None, because the class token is one of the tokens."""
        query, key, value = (split_heads(layer(tokens), self.num_heads) for layer in (self.query, self.key, self.value))
        keys_mask = None if mask is None else mask[:, None, None]
        rate = self.dropout if self.training else 0.0
        update = pytorch_attention(query, key, value, attn_mask=keys_mask, dropout_p=rate)
        return self.proj(merge_heads(update)), class_token


class FullAttentionEncoder(nn.Module):
    """Word and position embeddings, a class token, and pre-norm layers of softmax attention: ids (B, N) -> (B, 1, C).

    The arguments are the same as in :func:`research.sequence.create_sequence_encoder`.
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
        self.embedding = nn.Embedding(vocab_size, dim)
        self.positions = nn.Parameter(torch.empty(max_length, dim))
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            attention = FullAttention(dim, num_heads=num_heads, dropout=attention_dropout)
            self.layers.append(EncoderLayer(dim, attention, hidden_dim=hidden_dim, dropout=dropout))
        self.norm = nn.LayerNorm(dim)
        for table in (self.embedding.weight, self.positions):
            nn.init.normal_(table, std=0.02)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Ids (B, N) int64 and mask (B, N) bool, True for real tokens, or None -> the class token (B, 1, C)."""
        tokens = self.dropout(self.embedding(ids) + self.positions[: ids.shape[1]])
        tokens = torch.cat([self.class_token.expand(len(ids), -1, -1), tokens], dim=1)
        mask = None if mask is None else F.pad(mask, (1, 0), value=True)
        for layer in self.layers:
            tokens, _ = layer(tokens, None, mask)
        return self.norm(tokens[:, :1])


class SequenceClassifier(nn.Module):
    """An encoder, and a head on the class token, or on u, v, u * v and u - v for the class tokens of two documents.

    Args:
        encoder: Module from ids (B, N) and mask (B, N) to (B, 1, dim).
        hidden_dim: Channels inside the head.

    Source: lra/model_wrapper.py, SCHead and SCHeadDual.
    """

    def __init__(
        self, encoder: nn.Module, *, dim: int, hidden_dim: int, num_classes: int, num_documents: int = 1
    ) -> None:
        super().__init__()
        self.encoder = encoder
        features = dim if num_documents == 1 else 4 * dim
        self.head = nn.Sequential(nn.Linear(features, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, num_classes))

    def forward(self, documents: tuple[tuple[Tensor, Tensor | None], ...]) -> Tensor:
        """Ids (B, N) and mask (B, N) or None of each document -> logits (B, C)."""
        tokens = [self.encoder(ids, mask)[:, 0] for ids, mask in documents]
        if len(tokens) == 2:
            first, second = tokens
            tokens = [torch.cat([first, second, first * second, first - second], dim=-1)]
        return self.head(tokens[0])


def create_classifier(settings: Settings) -> SequenceClassifier:
    """Create a classifier with random weights.

    Raises:
        ConfigError: If a size or rate is invalid for the encoder.
    """
    options = {**ENCODER, "max_length": settings.max_length}
    options |= {"dropout": settings.dropout, "attention_dropout": settings.attention_dropout}
    if settings.model == "full":
        encoder = FullAttentionEncoder(**options)
    else:
        encoder = create_sequence_encoder(
            **options,
            window_size=settings.window_size,
            rank=settings.rank,
            class_token=CLASS_TOKENS[settings.class_token],
        )
    return SequenceClassifier(
        encoder,
        dim=ENCODER["dim"],
        hidden_dim=ENCODER["hidden_dim"],
        num_classes=settings.num_classes,
        num_documents=settings.num_documents,
    )
