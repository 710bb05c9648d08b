"""The bidirectional encoder of the Long Range Arena (Transformer-LS sections 3.2 to 3.4 and 4.1, appendix B, figure 5).

The sequence is divided into segments of w tokens. A token attends to its own segment, w // 2 tokens on each side of the
segment, r projected keys that summarize all tokens, and the class token, all in one softmax. Memory is linear in the
length.
Shapes: B sequences, M heads, N tokens, D channels per head, C = M * D, r projected keys, P shared keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.attention import chunks
from backbones.attention.dense import merge_heads, pytorch_attention, split_heads
from backbones.attention.long_short import DualNorm, dynamic_projection
from backbones.backbone import Backbone
from backbones.errors import ConfigError, check_choice, check_whole
from backbones.layers.block import Mlp
from backbones.layers.tracing import at_least_float32, padding_to_multiple

# Queries of a block, if a segment is smaller
_BLOCK = 64


def sequence_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window_size: int,
    mask: Tensor | None = None,
    shared_key: Tensor | None = None,
    shared_value: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute the attention of the tokens.

    Args:
        query, key, value: (B, M, N, D); any N.
        window_size: Number w of tokens of a segment. The window has ``max(w // 2, 1)`` more tokens on each side of a
            segment. 0 for only the shared keys.
        mask: (B, N), True for real tokens, False for padding; None if all tokens are real.
        shared_key, shared_value: (B, M, P, D), attended to by all tokens, or None.
        dropout: Dropout rate of the attention weights.

    Returns:
        (B, M, N, D), 0 for padding.

    Source: sections 3.2 and 3.4, equation 6.
    """
    if not window_size:
        output = pytorch_attention(query, shared_key, shared_value, dropout_p=dropout)
        return output if mask is None else output.masked_fill(~mask[:, None, :, None], 0)
    batch, _, number, _ = query.shape
    # With a larger window one segment has all tokens.
    window_size = max(min(window_size, number), 1)
    side = max(window_size // 2, 1)
    # Larger blocks of segments copy the shared keys less often; smaller ones have fewer keys outside the window.
    block = window_size * min(max(_BLOCK // window_size, 1), -(-number // window_size))
    length, fill = block + 2 * side, padding_to_multiple(number, block)
    halo = (side, side + fill)

    # (block, length): whether a key is in the window of a query's segment.
    first = torch.arange(block, device=query.device)[:, None] // window_size * window_size
    position = torch.arange(length, device=query.device)
    seen = (position >= first) & (position < first + window_size + 2 * side)
    # (B, n, block, length): and is a real token.
    real = query.new_ones((1, number), dtype=torch.bool) if mask is None else mask
    seen = F.pad(real, halo, value=False).unfold(1, length, block)[:, :, None] & seen
    if shared_key is None:
        # If a window has only padding, attend to all of it, because a softmax over no keys is NaN.
        seen = seen | ~seen.any(dim=-1, keepdim=True)
    else:
        seen = F.pad(seen, (shared_key.shape[2], 0), value=True)
    seen = seen.expand(batch, -1, -1, -1).flatten(0, 1)[:, None]

    # (B * n, M, block, D) and (B * n, M, P + length, D)
    queries = F.pad(query, (0, 0, 0, fill)).unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1)
    keys = _windows(F.pad(key, (0, 0, *halo)), shared_key, length, block)
    values = _windows(F.pad(value, (0, 0, *halo)), shared_value, length, block)
    output = pytorch_attention(queries, keys, values, attn_mask=seen, dropout_p=dropout)
    blocks = (number + fill) // block
    output = output.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :number]
    return output if mask is None else output.masked_fill(~mask[:, None, :, None], 0)


def _windows(x: Tensor, shared: Tensor | None, length: int, step: int) -> Tensor:
    """Return the keys of each block, shared keys first: (B, M, L, D), (B, M, P, D) -> (B * n, M, P + length, D)."""
    windows = chunks.windows(x, 2, length, step).transpose(1, 2)
    if shared is not None:
        windows = torch.cat([shared[:, None].expand(-1, windows.shape[1], -1, -1, -1), windows], dim=3)
    return windows.flatten(0, 1)


def class_token_attention(
    query: Tensor, key: Tensor, value: Tensor, gathered: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """Compute the attention of the class token to itself and to the output of the tokens, which is key and value.

    Args:
        query, key, value: (B, M, 1, D), of the class token, not normalized.
        gathered: (B, M, N, D), output of :func:`sequence_attention`.
        mask: (B, N), True for real tokens; None if all tokens are real.

    Returns:
        (B, M, 1, D)
    """
    seen = None if mask is None else F.pad(mask, (1, 0), value=True)[:, None, None, :]
    key, value = torch.cat([key, gathered], dim=2), torch.cat([value, gathered], dim=2)
    return pytorch_attention(query, key, value, attn_mask=seen)


class SequenceAttention(DualNorm):
    """Multi-head long-short attention of the tokens of a sequence and its class token, as in the official code.

    Keys and values of the class token are normalized with the projected keys, not with the tokens.

    Args:
        dim: Channels of a token.
        num_heads: Number of heads. It divides ``dim``.
        window_size: Number w of tokens of a segment. 0 for only the projection.
        rank: Number r of projected keys of a head. 0 for only the window.
        class_token: Whether there is a class token.
        update_tokens: Whether to compute an output of the tokens. The last layer may have only the class token.
        dropout: Dropout rate of the tokens' attention weights in training.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        window_size: int,
        rank: int,
        class_token: bool,
        update_tokens: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dim, num_heads=num_heads, projects=rank > 0 or class_token)
        self.window_size = window_size
        self.update_tokens = update_tokens
        self.dropout = dropout
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.dynamic_projection = nn.Linear(dim, num_heads * rank) if rank else None
        self.proj = nn.Linear(dim, dim)

    def forward(
        self, tokens: Tensor, class_token: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Tokens (B, N, C), class token (B, 1, C) or None, mask (B, N) or None -> updates of both, None without one."""
        query = split_heads(self.query(tokens), self.num_heads)
        keys_values = self.norm_local(torch.stack([self.key(tokens), self.value(tokens)]))
        key, value = keys_values.unbind(3)
        qkv = None if class_token is None else [layer(class_token) for layer in (self.query, self.key, self.value)]
        shared_key, shared_value = self._shared(tokens, key, value, qkv, mask)
        gathered = sequence_attention(
            query,
            key,
            value,
            window_size=self.window_size,
            mask=mask,
            shared_key=shared_key,
            shared_value=shared_value,
            dropout=self.dropout if self.training else 0.0,
        )
        update = self.proj(merge_heads(gathered)) if self.update_tokens else None
        if qkv is None:
            return update, None
        qkv = (split_heads(x, self.num_heads) for x in qkv)
        return update, self.proj(merge_heads(class_token_attention(*qkv, gathered, mask=mask)))

    def _shared(
        self, tokens: Tensor, key: Tensor, value: Tensor, qkv: list[Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return keys and values for all tokens, (B, M, P, D): the class token, and weighted sums of all tokens."""
        keys, values = ([], []) if qkv is None else ([qkv[1]], [qkv[2]])
        if self.dynamic_projection is not None:
            scores = at_least_float32(self.dynamic_projection(tokens))
            if mask is not None:
                # A sequence of only padding has uniform weights, and its output is masked.
                scores = scores.masked_fill(~mask[:, :, None], torch.finfo(scores.dtype).min)
            scores = split_heads(scores, self.num_heads)[:, :, None]
            sums = dynamic_projection(scores, torch.cat([key, value], dim=3)[:, :, None]).chunk(2, dim=3)
            keys, values = ([*rest, merge_heads(x)] for rest, x in zip((keys, values), sums, strict=True))
        if not keys:
            return None, None
        return self.norm_projected(torch.stack([torch.cat(keys, 1), torch.cat(values, 1)])).unbind(3)


class DropoutMlp(Mlp):
    """An MLP with dropout after the GELU and after the second layer."""

    def __init__(self, dim: int, *, hidden_dim: int, dropout: float) -> None:
        super().__init__(dim, hidden_dim=hidden_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.dropout.p:
            return super().forward(tokens)
        return self.dropout(self.fc2(self.dropout(F.gelu(self.fc1(tokens)))))


class EncoderLayer(nn.Module):
    """Pre-norm attention and MLP with skip connections.

    The class token is not normalized before the attention, as in the official code.

    Args:
        dim: Channels of a token.
        attention: Module from tokens (B, N, C), class token (B, 1, C) or None and mask to updates of both.
        hidden_dim: Channels inside the MLP.
        dropout: Dropout rate after the attention and in the MLP.
    """

    def __init__(self, dim: int, attention: nn.Module, *, hidden_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = DropoutMlp(dim, hidden_dim=hidden_dim, dropout=dropout)

    def forward(
        self, tokens: Tensor, class_token: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Tokens (B, N, C), class token (B, 1, C) or None, mask (B, N) or None -> both, None without an update."""
        updates = self.attention(self.attention_norm(tokens), class_token, mask)
        attended = (
            None if update is None else old + self.dropout(update)
            for old, update in zip((tokens, class_token), updates, strict=True)
        )
        return tuple(None if x is None else x + self.mlp(self.mlp_norm(x)) for x in attended)


class SequenceEncoder(nn.Module):
    """A bidirectional encoder: word and position embeddings, layers of long-short attention, a LayerNorm.

    Args:
        vocab_size: Number of token ids.
        dim: Channels of a token.
        num_heads: Number of heads. It divides ``dim``.
        hidden_dim: Channels inside the MLPs.
        depth: Number of layers.
        max_length: Tokens of the longest sequence.
        window_size: Number w of tokens of a segment. A token attends to its segment and to w // 2 tokens, at least 1,
            on each side of the segment. 0 for only the dynamic projection.
        rank: Number r of projected keys of a head. 0 for only the window.
        class_token: Whether the output is a class token. It attends to all tokens, and all tokens attend to it. With
            ``"last_layer"``, it is only in the last layer, as in the official scripts.
        dropout: Dropout rate after the embeddings and the attention, and in the MLPs.
        attention_dropout: Dropout rate of the attention weights.

    Raises:
        ConfigError: For an unknown keyword, with the closest known one, and for invalid sizes.
    """

    no_weight_decay_names = ("positions", "class_token")

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
        check_heads(dim, num_heads)
        check_whole("window_size", window_size, least=0)
        check_whole("rank", rank, least=0)
        check_choice("class_token", class_token, (True, False, "last_layer"))
        if not window_size and not rank:
            raise ConfigError("window_size=0 and rank=0 leave no keys. Set at least one of them to 1 or more.")
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocab_size, dim)
        self.positions = nn.Parameter(torch.empty(max_length, dim))
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim)) if class_token else None
        self.layers = nn.ModuleList()
        # The number of layers with the class token
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
        """Encode sequences.

        The ids of padding have no effect. The output is finite, even for a sequence of only padding.

        Args:
            ids: (B, N) integers from 0 to ``vocab_size`` - 1; N is at most ``max_length``.
            mask: (B, N) bool, True for real tokens; None if all tokens are real.

        Returns:
            The class token, (B, 1, C). Without a class token: the tokens, (B, N, C), with 0 for padding.

        Raises:
            ConfigError: If N is larger than ``max_length``.
        """
        if ids.shape[1] > len(self.positions):
            raise ConfigError(f"A sequence has {ids.shape[1]} tokens. Use at most max_length={len(self.positions)}.")
        tokens = self.dropout(self.embedding(ids) + self.positions[: ids.shape[1]])
        class_token = None
        for left, layer in zip(range(len(self.layers), 0, -1), self.layers, strict=True):
            if left == self.class_token_layers and self.class_token is not None:
                class_token = self.class_token.expand(len(ids), -1, -1)
            tokens, class_token = layer(tokens, class_token, mask)
        if class_token is not None:
            return self.norm(class_token)
        output = self.norm(tokens)
        return output if mask is None else output * mask[:, :, None]

    no_weight_decay = Backbone.no_weight_decay


def check_heads(dim: int, num_heads: int) -> None:
    """Raise a :class:`ConfigError` unless ``num_heads`` divides ``dim``."""
    if dim % num_heads:
        raise ConfigError(f"num_heads={num_heads} does not divide dim={dim}. Choose another number of heads.")


create_sequence_encoder = SequenceEncoder
