"""Encoders with a head that classifies one document, or two that are compared (LS section 4.1)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.sequence import create_sequence_encoder
from research.long_range_arena.tasks import CLASS_TOKENS, ENCODER, Settings


class FullAttentionEncoder(nn.Module):
    """Word and position embeddings, a class token, and pre-norm layers of softmax attention: ids (B, N) -> (B, 1, C).

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
        self.num_heads, self.attention_dropout = num_heads, attention_dropout
        self.embedding = nn.Embedding(vocab_size, dim)
        self.positions = nn.Parameter(torch.empty(max_length, dim))
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention_norm": nn.LayerNorm(dim),
                    "query": nn.Linear(dim, dim),
                    "key": nn.Linear(dim, dim),
                    "value": nn.Linear(dim, dim),
                    "projection": nn.Linear(dim, dim),
                    "mlp": nn.Sequential(
                        nn.LayerNorm(dim),
                        nn.Linear(dim, hidden_dim),
                        nn.GELU(),
                        nn.Dropout(dropout),
                        nn.Linear(hidden_dim, dim),
                        nn.Dropout(dropout),
                    ),
                }
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        for table in (self.embedding.weight, self.positions):
            nn.init.normal_(table, std=0.02)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Ids (B, N) int64 and mask (B, N) bool, True for real tokens, or None -> the class token (B, 1, C)."""
        tokens = self.dropout(self.embedding(ids) + self.positions[: ids.shape[1]])
        tokens = torch.cat([self.class_token.expand(len(ids), -1, -1), tokens], dim=1)
        keys_mask = None if mask is None else F.pad(mask, (1, 0), value=True)[:, None, None]
        rate = self.attention_dropout if self.training else 0.0
        for layer in self.layers:
            normed = layer["attention_norm"](tokens)
            heads = (layer[name](normed).unflatten(-1, (self.num_heads, -1)) for name in ("query", "key", "value"))
            query, key, value = (head.transpose(1, 2) for head in heads)
            update = F.scaled_dot_product_attention(query, key, value, attn_mask=keys_mask, dropout_p=rate)
            tokens = tokens + self.dropout(layer["projection"](update.transpose(1, 2).flatten(2)))
            tokens = tokens + layer["mlp"](tokens)
        return self.norm(tokens[:, :1])


class SequenceClassifier(nn.Module):
    """An encoder, and a head on its class token, or on those of two documents: u, v, u * v and u - v.

    Args:
        encoder: ids (B, N), mask (B, N) -> (B, 1, dim)
        hidden_dim: channels inside the head.

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
        ConfigError: for sizes or rates that the encoder does not take.
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
