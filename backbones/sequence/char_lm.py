"""The autoregressive character language model (Transformer-LS section 4.2, appendix C)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.execution.precision import at_least_float32
from backbones.layers.mlp import Mlp
from backbones.layers.parameters import undecayed_names
from backbones.sequence.causal import CausalAttention
from backbones.sequence.checks import check_ids
from backbones.utils.errors import InputError


class CharLMLayer(nn.Module):
    """Attention and MLP. What is added to is the normed input, as in the official code, and not the input itself.

    Args:
        dim: channels of a token.
        attention: tokens (B, N, C), memory (B, L, C) and tables of positions -> (B, N, C).
        hidden_dim: channels inside the MLP.
        dropout: rate after the attention and in the MLP, in training.
    """

    def __init__(self, dim: int, attention: CausalAttention, *, hidden_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, hidden_dim=hidden_dim, dropout=dropout)

    def forward(self, tokens: Tensor, memory: Tensor, window_table: Tensor, segment_table: Tensor) -> Tensor:
        """(B, N, C), (B, L, C) and two tables of positions -> (B, N, C)."""
        tokens, memory = self.attention_norm(tokens), self.attention_norm(memory)
        update = self.attention(tokens, memory, window_table, segment_table)
        tokens = self.mlp_norm(tokens + F.dropout(update, self.dropout, self.training))
        return tokens + self.mlp(tokens)


class CharLM(nn.Module):
    """An embedding, layers of causal long-short attention with a memory, and the embedding again as the last layer.

    Args: as of :func:`backbones.sequence.create_char_lm`, which checks them.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        hidden_dim: int,
        num_heads: int,
        depth: int,
        memory_length: int,
        segment_length: int,
        rank: int,
        window_size: int,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.memory_length = memory_length
        self.segment_length = segment_length
        self.rank = rank
        self.window_size = window_size
        self.dropout = dropout
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            attention = CausalAttention(
                dim,
                num_heads=num_heads,
                window_size=window_size,
                segment_length=segment_length,
                rank=rank,
                dropout=attention_dropout,
            )
            self.layers.append(CharLMLayer(dim, attention, hidden_dim=hidden_dim, dropout=dropout))
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.apply(_initialise)

    def forward(self, ids: Tensor, memory: Sequence[Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A part of a text, ids (B, N) -> log-probabilities of the next id (B, N, vocab_size), float32 or better.

        With them goes the memory for the next part: of each layer the last inputs, (B, ``memory_length``, C), without
        gradients. At the start of a text it is zeros, which are attended to as tokens are. What parts a text is cut
        into has an effect: the memory is summed up otherwise than the part itself.

        Args:
            ids: integers from 0 to ``vocab_size`` - 1, one or more in a part, as many as you like.
            memory: of the part before; None at the start of a text.

        Raises:
            InputError: for ids of another shape, type or vocabulary, or a memory of another model or batch.
        """
        vocab_size, dim = self.embedding.weight.shape
        check_ids(ids, vocab_size=vocab_size)
        tokens = self._drop(self.embedding(ids) * dim**0.5)
        if memory is None:
            memory = [tokens.new_zeros(len(ids), self.memory_length, dim)] * len(self.layers)
        self._check_memory(ids, memory)
        segments = self.memory_length // self.segment_length - (-ids.shape[1] // self.segment_length)
        segment_table = _sinusoids(segments * self.rank, dim, tokens)
        window_table = self._drop(_sinusoids(self.window_size, dim, tokens))
        kept = []
        for layer, old in zip(self.layers, memory, strict=True):
            kept.append(torch.cat([old, tokens], dim=1)[:, -self.memory_length :].detach())
            tokens = layer(tokens, old, window_table, segment_table)
        scores = F.linear(self._drop(tokens), self.embedding.weight, self.bias)
        return at_least_float32(scores).log_softmax(dim=-1), tuple(kept)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that take no weight decay: biases, those of the attention too, and norms."""
        return undecayed_names(self)

    def _drop(self, tokens: Tensor) -> Tensor:
        return F.dropout(tokens, self.dropout, self.training)

    def _check_memory(self, ids: Tensor, memory: Sequence[Tensor]) -> None:
        expected = (len(ids), self.memory_length, self.embedding.embedding_dim)
        if len(memory) != len(self.layers):
            raise InputError(f"the memory is of {len(memory)} layers, and the model has {len(self.layers)}")
        for number, part in enumerate(memory):
            if tuple(part.shape) != expected:
                raise InputError(
                    f"the memory of layer {number} has shape {tuple(part.shape)}, and {expected} is expected: "
                    "a memory goes with its model and its batch; pass None at the start of a text"
                )


def _sinusoids(number: int, dim: int, like: Tensor) -> Tensor:
    """(number, dim): sine and cosine of ``number - 1`` to 0 at the frequencies 10000^(-2 i / dim), in ``like``'s type.

    In half precision the angles would be a token or more off.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequency = 1 / 10000 ** (torch.arange(0, dim, 2, device=like.device, dtype=dtype) / dim)
    angle = torch.arange(number - 1, -1, -1, device=like.device, dtype=dtype)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(like.dtype)


def _initialise(module: nn.Module) -> None:
    """The official initial values. On the meta device there is nothing to fill, and finding that out takes long."""
    if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight, mean=1.0, std=0.02)
    if isinstance(module, CausalAttention):
        nn.init.normal_(module.key_bias, std=0.02)
        nn.init.normal_(module.query_bias, std=0.02)
