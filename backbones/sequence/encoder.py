"""The bidirectional encoder of the Long Range Arena (Transformer-LS section 4.1, appendix B)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.mlp import Mlp
from backbones.layers.parameters import undecayed_names
from backbones.sequence.checks import check_ids
from backbones.sequence.long_short import SequenceAttention
from backbones.utils.errors import InputError


class EncoderLayer(nn.Module):
    """Attention and MLP, each behind a LayerNorm and with a skip connection.

    The class token goes into the attention without the norm, as in the official code.

    Args:
        dim: channels of a token.
        attention: (B, N, C), (B, 1, C) or None, and a mask -> updates of both.
        hidden_dim: channels inside the MLP.
        dropout: rate after the attention and in the MLP, in training.
    """

    def __init__(self, dim: int, attention: SequenceAttention, *, hidden_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, hidden_dim=hidden_dim, dropout=dropout)

    def forward(
        self, tokens: Tensor, class_token: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """(B, N, C), (B, 1, C) or None, (B, N) or None -> tokens and class token, None for what is not updated."""
        updates = self.attention(self.attention_norm(tokens), class_token, mask)
        return tuple(
            None if update is None else self._finish(old + F.dropout(update, self.dropout, self.training))
            for old, update in zip((tokens, class_token), updates, strict=True)
        )

    def _finish(self, tokens: Tensor) -> Tensor:
        return tokens + self.mlp(self.mlp_norm(tokens))


class SequenceEncoder(nn.Module):
    """Word and position embeddings, layers of long-short attention, a LayerNorm.

    Args: as of :func:`backbones.sequence.create_sequence_encoder`, which checks them.
    """

    undecayed = ("positions", "class_token")

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        num_heads: int,
        hidden_dim: int,
        depth: int,
        max_length: int,
        window_size: int,
        rank: int,
        class_token: bool | str,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding = nn.Embedding(vocab_size, dim)
        self.positions = nn.Parameter(torch.empty(max_length, dim))
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim)) if class_token else None
        self.layers = nn.ModuleList()
        # With how many layers left the class token comes in.
        self.class_token_layers = 1 if class_token == "last_layer" else depth
        for number in range(depth):
            attention = SequenceAttention(
                dim,
                num_heads=num_heads,
                window_size=window_size,
                rank=rank,
                class_token=bool(class_token) and depth - number <= self.class_token_layers,
                update_tokens=not class_token or number + 1 < depth,
                dropout=attention_dropout,
            )
            self.layers.append(EncoderLayer(dim, attention, hidden_dim=hidden_dim, dropout=dropout))
        self.norm = nn.LayerNorm(dim)
        for table in (self.embedding.weight, self.positions):
            nn.init.normal_(table, std=0.02)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Token ids (B, N) -> the class token (B, 1, C), or without one the tokens (B, N, C), 0 for padding.

        What padding holds changes nothing, and a sequence of padding alone gives finite numbers.

        Args:
            ids: integers from 0 to ``vocab_size`` - 1, in a sequence of 1 to ``max_length`` tokens.
            mask: (B, N), bool, True for real tokens; None where all are.

        Raises:
            InputError: for ids or a mask of another shape or type, and ids of another vocabulary.
        """
        self._check(ids, mask)
        tokens = self.embedding(ids) + self.positions[: ids.shape[1]]
        tokens = F.dropout(tokens, self.dropout, self.training)
        class_token = None
        for left, layer in zip(range(len(self.layers), 0, -1), self.layers, strict=True):
            if left == self.class_token_layers and self.class_token is not None:
                class_token = self.class_token.expand(len(ids), -1, -1)
            tokens, class_token = layer(tokens, class_token, mask)
        if class_token is not None:
            return self.norm(class_token)
        output = self.norm(tokens)
        return output if mask is None else output * mask[:, :, None]

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that take no weight decay: biases, norms, positions and the class token."""
        return undecayed_names(self)

    def _check(self, ids: Tensor, mask: Tensor | None) -> None:
        check_ids(ids, vocab_size=self.embedding.num_embeddings)
        length, longest = ids.shape[1], len(self.positions)
        if length > longest:
            raise InputError(
                f"a sequence has {length} tokens, and max_length is {longest}: cut it, or raise max_length"
            )
        if mask is not None and (mask.dtype != torch.bool or mask.shape != ids.shape):
            raise InputError(
                f"mask is {mask.dtype} of shape {tuple(mask.shape)}: it is torch.bool of shape {tuple(ids.shape)}, "
                "True for real tokens"
            )
