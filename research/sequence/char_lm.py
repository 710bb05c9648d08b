"""The autoregressive character language model (Transformer-LS sections 3.3 and 4.2, appendix C, figures 4 and 5).

A token attends to the last w tokens, including itself, and to r projected keys of each earlier segment of l tokens, all
in one softmax. A text is processed in blocks, and each layer has a memory of earlier tokens. The cost of a block is
linear in its length, except for the projected keys.
Shapes: B texts, M heads, N tokens of a block, L of the memory, D channels per head, C = M * D, V projected keys.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.attention import chunks
from backbones.attention.dense import merge_heads, pytorch_attention, split_heads
from backbones.attention.long_short import DualNorm, dynamic_projection
from backbones.backbone import Backbone
from backbones.errors import ConfigError, check_whole
from backbones.layers.tracing import at_least_float32, padding_to_multiple
from research.sequence.encoder import EncoderLayer, check_heads

_NEVER = float("-inf")


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window_size: int,
    segment_length: int,
    rank: int,
    projected_key: Tensor,
    projected_value: Tensor,
    key_bias: Tensor,
    query_bias: Tensor,
    window_positions: Tensor,
    segment_positions: Tensor,
    dropout: float = 0.0,
) -> Tensor:
    """Compute the attention of the tokens of a block.

    The score of a query q and the key k of a token is, as in Transformer-XL,
    ``(q / sqrt(D) + key_bias) . k + (q / sqrt(D) + query_bias) . p``, where p encodes the distance of the tokens. The
    score of q and a projected key k is ``q / sqrt(D) . k + q / sqrt(D) . p``, where p encodes the number of projected
    keys between k and the segment of q.

    Args:
        query: (B, M, N, D); any N.
        key, value: (B, M, w + N, D): the last w tokens before the block, then the block.
        window_size: Number w of tokens that a token attends to, including itself.
        segment_length: Number l of tokens of a segment. Segments are counted from the start of the block.
        rank: Number r of projected keys of a segment.
        projected_key, projected_value: (B, M, V, D): all segments of the memory, then all segments of the block except
            for the last one, to which no token of the block attends.
        key_bias, query_bias: (M, D).
        window_positions: (M, w, D), for the distances w - 1 to 0.
        segment_positions: (M, V + r, D), for the distances V + r - 1 to 0 from the last segment, in projected keys.
        dropout: Dropout rate of the attention weights.

    Returns:
        (B, M, N, D)
    """
    batch, heads, number, channels = query.shape
    length = min(segment_length, number)
    segments = -(-number // length)
    # Larger groups of segments copy keys less often; smaller ones have fewer keys outside the window.
    group = length * min(max(window_size // 2 // length, 1), segments)
    fill = padding_to_multiple(number, group)
    query = F.pad(query, (0, 0, 0, fill))
    scaled = query * channels**-0.5

    in_memory = projected_key.shape[2] - (segments - 1) * rank
    sum_bias = _bias_of_sums(scaled, segment_positions, length, rank, segments, in_memory).unflatten(2, (-1, group))

    # (B, M, n, group, w) -> (B, M, n, group, w + group)
    token_bias = (scaled + query_bias[:, None]) @ window_positions.transpose(1, 2)
    token_bias = _on_the_diagonal(token_bias.unflatten(2, (-1, group)))
    key, value = F.pad(key, (0, 0, 0, fill)), F.pad(value, (0, 0, 0, fill))
    # (B, M, n, w + group)
    key_biases = chunks.windows((key @ key_bias[:, :, None])[..., 0], 2, window_size + group, group)
    bias = torch.cat([sum_bias, token_bias + key_biases[:, :, :, None]], dim=4)

    queries = query.unflatten(2, (-1, group)).flatten(0, 1)
    keys, values = (
        torch.cat(
            [
                projected[:, :, None].expand(-1, -1, bias.shape[2], -1, -1),
                chunks.windows(tokens, 2, window_size + group, group),
            ],
            dim=3,
        ).flatten(0, 1)
        for projected, tokens in ((projected_key, key), (projected_value, value))
    )
    output = pytorch_attention(queries, keys, values, attn_mask=bias.flatten(0, 1), dropout_p=dropout)
    return output.unflatten(0, (batch, heads)).flatten(2, 3)[:, :, :number]


def _on_the_diagonal(bias: Tensor) -> Tensor:
    """Move row i by i + 1 to the right and mask the rest: (..., group, w) -> (..., group, w + group).

    In the flat result, element j of row i has the index ``i * (w + group) + i + 1 + j``. It has this index already if
    each row is one element longer.
    """
    group, window_size = bias.shape[-2:]
    flat = F.pad(bias, (1, group), value=_NEVER).flatten(-2)
    return flat[..., : group * (window_size + group)].unflatten(-1, (group, window_size + group))


def _bias_of_sums(scaled: Tensor, positions: Tensor, length: int, rank: int, segments: int, in_memory: int) -> Tensor:
    """Return the bias of the scores of the projected keys: (B, M, n * length, V), n segments or more.

    For a query of segment s, key v has the position ``(segments - s) * r + v``. In a flat tensor with one row of V + r
    positions for each segment, this is the index ``s * V + v`` after the first ``segments * r`` elements.

    Args:
        scaled: (B, M, n * length, D). positions: (M, V + r, D).
        segments: Number of segments of the block; more are padding.
        in_memory: Projected keys of the memory, which come first.
    """
    vectors = positions.shape[1] - rank
    # (B, M, length, n, V + r): the same token of all segments is contiguous.
    queries = scaled.unflatten(2, (-1, length)).transpose(2, 3)
    rows = queries.shape[3]
    bias = queries @ positions.transpose(1, 2)[:, None]
    bias = bias.flatten(-2)[..., segments * rank :][..., : rows * vectors].unflatten(-1, (rows, vectors))
    seen = in_memory + rank * torch.arange(rows, device=scaled.device)
    bias = bias.masked_fill(torch.arange(vectors, device=scaled.device) >= seen[:, None], _NEVER)
    return bias.transpose(2, 3).flatten(2, 3)


class CausalAttention(DualNorm):
    """Multi-head long-short attention over a block of a text and a memory of earlier tokens.

    Keys of the block are projected, then summed. As in the official code, the memory is summed head by head, then
    projected. Therefore the output depends on how a text is divided into blocks.

    Args:
        dim: Channels of a token.
        num_heads: Number of heads. It divides ``dim``.
        window_size: Number w of tokens that a token attends to, including itself.
        segment_length: Number l of tokens of a segment.
        rank: Number r of projected keys of a segment and head.
        dropout: Dropout rate of the attention weights.
    """

    no_weight_decay_names = ("key_bias", "query_bias")

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        window_size: int,
        segment_length: int,
        rank: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dim, num_heads=num_heads)
        self.window_size = window_size
        self.segment_length = segment_length
        self.rank = rank
        self.dropout = dropout
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.dynamic_projection = nn.Linear(dim, num_heads * rank)
        self.window_position = nn.Linear(dim, dim, bias=False)
        self.segment_position = nn.Linear(dim, dim)
        self.key_bias = nn.Parameter(torch.zeros(num_heads, dim // num_heads))
        self.query_bias = nn.Parameter(torch.zeros(num_heads, dim // num_heads))
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, tokens: Tensor, memory: Tensor, window_table: Tensor, segment_table: Tensor) -> Tensor:
        """Return the update of the tokens, (B, N, C).

        Args:
            tokens: (B, N, C).
            memory: (B, L, C); L is a multiple of l, and w or more.
            window_table: (w, C), sinusoids of the distances w - 1 to 0.
            segment_table: (V + r, C), sinusoids of the distances V + r - 1 to 0. V counts the projected keys of the
                memory and of all segments of the block except for the last one.
        """
        key, value = self.key(tokens), self.value(tokens)
        recent = memory[:, -self.window_size :]
        window = [torch.cat([self.key(recent), key], dim=1), torch.cat([self.value(recent), value], dim=1)]
        window_key, window_value = self.norm_local(torch.stack(window)).unbind(3)
        (summed,) = self._sums(memory, memory)
        projected_key, projected_value = self.key(summed), self.value(summed)
        # No token of the block attends to the sums of the last segment.
        whole = (tokens.shape[1] - 1) // self.segment_length * self.segment_length
        if whole:
            sums = self._sums(tokens[:, :whole], key[:, :whole], value[:, :whole])
            projected_key = torch.cat([projected_key, sums[0]], dim=1)
            projected_value = torch.cat([projected_value, sums[1]], dim=1)
        projected_key, projected_value = self.norm_projected(torch.stack([projected_key, projected_value])).unbind(3)
        output = causal_attention(
            split_heads(self.query(tokens), self.num_heads),
            window_key,
            window_value,
            window_size=self.window_size,
            segment_length=self.segment_length,
            rank=self.rank,
            projected_key=projected_key,
            projected_value=projected_value,
            key_bias=self.key_bias,
            query_bias=self.query_bias,
            window_positions=self._by_head(self.window_position(window_table)),
            segment_positions=self._by_head(self.segment_position(segment_table)),
            dropout=self.dropout if self.training else 0.0,
        )
        return self.proj(merge_heads(output))

    def _sums(self, tokens: Tensor, *summed: Tensor) -> tuple[Tensor, ...]:
        """Return r sums of each segment, weighted by scores of ``tokens``: each (B, n * l, C) -> (B, n * r, C)."""
        batch, number = len(tokens), tokens.shape[1] // self.segment_length

        def segments(x: Tensor) -> Tensor:
            """(B, n * l, ...) -> (B * n, M, 1, l, D)."""
            return split_heads(x.unflatten(1, (number, 1, self.segment_length)).flatten(0, 1), self.num_heads)

        both = torch.cat([segments(x) for x in summed], dim=4)
        sums = dynamic_projection(segments(self.dynamic_projection(tokens)), both).chunk(len(summed), dim=3)
        return tuple(merge_heads(x).unflatten(0, (batch, number)).flatten(1, 2) for x in sums)

    def _by_head(self, table: Tensor) -> Tensor:
        """(P, C) -> (M, P, D)."""
        return table.unflatten(1, (self.num_heads, -1)).transpose(0, 1)


class CharLMLayer(EncoderLayer):
    """Attention and MLP. The skip connections add the normalized input, as in the official code.

    Args:
        dim: Channels of a token.
        attention: Tokens (B, N, C), memory (B, L, C) and tables of positions -> (B, N, C).
        hidden_dim: Channels inside the MLP.
        dropout: Dropout rate after the attention and in the MLP.
    """

    def forward(self, tokens: Tensor, memory: Tensor, window_table: Tensor, segment_table: Tensor) -> Tensor:
        """(B, N, C), (B, L, C) and two tables of positions -> (B, N, C)."""
        tokens, memory = self.attention_norm(tokens), self.attention_norm(memory)
        update = self.attention(tokens, memory, window_table, segment_table)
        tokens = self.mlp_norm(tokens + self.dropout(update))
        return tokens + self.mlp(tokens)


class CharLM(nn.Module):
    """A language model: an embedding, layers of causal long-short attention with a memory, and the tied embedding.

    No weight depends on ``memory_length``, ``segment_length`` or ``window_size``. A trained model can be tested with
    other values, as the paper does with a memory of 32768.

    Args:
        vocab_size: Number of token ids.
        dim: Channels of a token, even.
        hidden_dim: Channels inside the MLPs.
        num_heads: Number of heads. It divides ``dim``.
        depth: Number of layers.
        memory_length: Tokens of the memory, a multiple of ``segment_length``, and ``window_size`` or more.
        segment_length: Number l of tokens of a segment.
        rank: Number r of projected keys of a segment and head.
        window_size: Number w of tokens that a token attends to, including itself.
        dropout: Dropout rate after the embeddings and the attention, in the MLPs, and before the last layer.
        attention_dropout: Dropout rate of the attention weights.

    Raises:
        ConfigError: For an unknown keyword, with the closest known one, and for invalid sizes.
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
        check_heads(dim, num_heads)
        check_whole("rank", rank)
        check_whole("window_size", window_size)
        if dim % 2:
            raise ConfigError(f"dim={dim} is odd. Use an even number, for as many sines as cosines.")
        if memory_length % segment_length or memory_length < window_size:
            raise ConfigError(
                f"memory_length={memory_length} must be a multiple of segment_length={segment_length}, and at least "
                f"window_size={window_size}. Change it."
            )
        self.memory_length = memory_length
        self.segment_length = segment_length
        self.rank = rank
        self.window_size = window_size
        self.dropout = nn.Dropout(dropout)
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
        self.apply(_initialize)

    def forward(self, ids: Tensor, memory: Sequence[Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Predict the next ids of a block of a text.

        The division of a text into blocks changes the output; see :class:`CausalAttention`.

        Args:
            ids: (B, N) integers from 0 to ``vocab_size`` - 1; any N of 1 or more.
            memory: Memory after the previous block; None at the start of a text. Then it is zeros, to which tokens
                attend.

        Returns:
            Log-probabilities of the next id, (B, N, vocab_size) in float32 or better, and the memory for the next
            block: the last inputs of each layer, (B, ``memory_length``, C), without gradients.

        Raises:
            ConfigError: If the memory is from another model or batch.
        """
        dim = self.embedding.embedding_dim
        tokens = self.dropout(self.embedding(ids) * dim**0.5)
        if memory is None:
            memory = [tokens.new_zeros(len(ids), self.memory_length, dim)] * len(self.layers)
        expected = (len(ids), self.memory_length, dim)
        if len(memory) != len(self.layers) or any(tuple(x.shape) != expected for x in memory):
            raise ConfigError(
                f"The memory is from another model or batch. Give {len(self.layers)} tensors of shape {expected}."
            )
        segments = self.memory_length // self.segment_length - (-ids.shape[1] // self.segment_length)
        segment_table = _sinusoids(segments * self.rank, dim, tokens)
        window_table = self.dropout(_sinusoids(self.window_size, dim, tokens))
        kept = []
        for layer, old in zip(self.layers, memory, strict=True):
            kept.append(torch.cat([old, tokens], dim=1)[:, -self.memory_length :].detach())
            tokens = layer(tokens, old, window_table, segment_table)
        scores = F.linear(self.dropout(tokens), self.embedding.weight, self.bias)
        return at_least_float32(scores).log_softmax(dim=-1), tuple(kept)

    no_weight_decay = Backbone.no_weight_decay


def _sinusoids(number: int, dim: int, like: Tensor) -> Tensor:
    """Return sines and cosines of ``number - 1`` to 0 at the frequencies 10000^(-2 i / dim): (number, dim).

    Angles in half precision would be off by a token or more.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequency = 1 / 10000 ** (torch.arange(0, dim, 2, device=like.device, dtype=dtype) / dim)
    angle = torch.arange(number - 1, -1, -1, device=like.device, dtype=dtype)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(like.dtype)


def _initialize(module: nn.Module) -> None:
    """Set the official initial values."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight, mean=1.0, std=0.02)
    if isinstance(module, CausalAttention):
        nn.init.normal_(module.key_bias, std=0.02)
        nn.init.normal_(module.query_bias, std=0.02)


create_char_lm = CharLM
