"""Long-short attention over a text from left to right (Transformer-LS section 3.3, appendix C, figures 4 and 5).

A token sees the last w tokens, itself included, and of every segment of l tokens before its own r projected keys, all
in one softmax. A text is read in parts: of what came before each layer has a memory. The cost of a part is linear in it
but for the projected keys.
Shapes: B texts, M heads, N tokens of a part, L of the memory, D channels a head, C = M * D, V projected keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.attention import reference
from backbones.attention.dense import merge_heads, split_heads
from backbones.attention.long_short import DualNorm, project_tokens
from backbones.execution import overlap
from backbones.execution.tracing import missing
from backbones.utils.errors import check_choice

_NEVER = float("-inf")


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window_size: int,
    segment_length: int,
    rank: int,
    summed_key: Tensor,
    summed_value: Tensor,
    key_bias: Tensor,
    query_bias: Tensor,
    window_positions: Tensor,
    segment_positions: Tensor,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of the tokens of a part.

    The score of a query q and a token's key k is ``(q / sqrt(D) + key_bias) . k + (q / sqrt(D) + query_bias) . p`` with
    p the position of their distance, as in Transformer-XL; that of q and a projected key is
    ``q / sqrt(D) . k + q / sqrt(D) . p`` with p the position of how many projected keys it stands back from the query's
    segment.

    Args:
        query: (B, M, N, D); any N.
        key, value: (B, M, w + N, D), of the last w tokens before the part, and of the part.
        window_size: w.
        segment_length: l; the part is cut from its start.
        rank: r, projected keys of a segment.
        summed_key, summed_value: (B, M, V, D), of all segments of the memory and, with S = ceil(N / l), of the first
            S - 1 of the part: the last one is seen by no token of the part.
        key_bias, query_bias: (M, D).
        window_positions: (M, w, D), of the distances w - 1 to 0.
        segment_positions: (M, V + r, D), of V + r - 1 to 0 projected keys back from the last segment.
        dropout: rate of the attention weights that are left out.

    Returns:
        (B, M, N, D)
    """
    batch, heads, number, channels = query.shape
    length = min(segment_length, number)
    segments = -(-number // length)
    # Larger blocks copy keys less often, smaller ones meet fewer that are not of the window.
    block = length * min(max(window_size // 2 // length, 1), segments)
    fill = missing(number, block)
    query = F.pad(query, (0, 0, 0, fill))
    scaled = query * channels**-0.5

    in_memory = summed_key.shape[2] - (segments - 1) * rank
    sum_bias = _bias_of_sums(scaled, segment_positions, length, rank, segments, in_memory).unflatten(2, (-1, block))

    # (B, M, n, block, w) -> (B, M, n, block, w + block)
    token_bias = (scaled + query_bias[:, None]) @ window_positions.transpose(1, 2)
    token_bias = _on_the_diagonal(token_bias.unflatten(2, (-1, block)))
    key, value = F.pad(key, (0, 0, 0, fill)), F.pad(value, (0, 0, 0, fill))
    # (B, M, n, w + block)
    of_keys = overlap.windows((key @ key_bias[:, :, None])[..., 0], 2, window_size + block, block)
    bias = torch.cat([sum_bias, token_bias + of_keys[:, :, :, None]], dim=4)

    queries = query.unflatten(2, (-1, block)).flatten(0, 1)
    keys, values = (
        torch.cat(
            [
                sums[:, :, None].expand(-1, -1, bias.shape[2], -1, -1),
                overlap.windows(tokens, 2, window_size + block, block),
            ],
            dim=3,
        ).flatten(0, 1)
        for sums, tokens in ((summed_key, key), (summed_value, value))
    )
    output = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias.flatten(0, 1), dropout_p=dropout)
    return output.unflatten(0, (batch, heads)).flatten(2, 3)[:, :, :number]


def _on_the_diagonal(bias: Tensor) -> Tensor:
    """(..., block, w) -> (..., block, w + block): row i moved i + 1 places to the right, and no key to its sides.

    In one row after the other, place j of row i is to be ``i * (w + block) + i + 1 + j``: with one place more in each
    row that is where it stands already.
    """
    block, window_size = bias.shape[-2:]
    flat = F.pad(bias, (1, block), value=_NEVER).flatten(-2)
    return flat[..., : block * (window_size + block)].unflatten(-1, (block, window_size + block))


def _bias_of_sums(scaled: Tensor, positions: Tensor, length: int, rank: int, segments: int, in_memory: int) -> Tensor:
    """What is added to the scores of the projected keys: (B, M, n * length, V), n segments or more.

    For a query of segment s, key v takes place ``(segments - s) * r + v`` of the positions. In one row of V + r places
    after the other, one row a segment, that is the place ``s * V + v`` behind the first ``segments * r``.

    Args:
        scaled: (B, M, n * length, D). positions: (M, V + r, D).
        segments: of the part; those after it are padding.
        in_memory: projected keys of the memory, the first of all V.
    """
    vectors = positions.shape[1] - rank
    # (B, M, length, n, V + r): a place of all segments is one block of memory.
    queries = scaled.unflatten(2, (-1, length)).transpose(2, 3)
    rows = queries.shape[3]
    bias = queries @ positions.transpose(1, 2)[:, None]
    bias = bias.flatten(-2)[..., segments * rank :][..., : rows * vectors].unflatten(-1, (rows, vectors))
    seen = in_memory + rank * torch.arange(rows, device=scaled.device)
    bias = bias.masked_fill(torch.arange(vectors, device=scaled.device) >= seen[:, None], _NEVER)
    return bias.transpose(2, 3).flatten(2, 3)


BACKENDS = {"sdpa": causal_attention, "reference": reference.causal_attention}


class CausalAttention(DualNorm):
    """Multi-head long-short attention over the part of a text and the memory of what came before.

    Keys of the part are projected, then summed; the memory is summed head by head before it is projected, as in the
    official code. So a text in parts does not give what it gives as a whole.

    Args:
        dim: channels of a token.
        num_heads: divides ``dim``.
        window_size: w, tokens that a token sees, itself included.
        segment_length: l, tokens that are summed up together.
        rank: r, projected keys of a segment and head.
        dropout: rate of the attention weights that are left out in training.
        backend: a key of ``BACKENDS``; ``"reference"`` is quadratic, and for debugging.

    Raises:
        InputError: for an unknown backend.
    """

    undecayed = ("key_bias", "query_bias")

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        window_size: int,
        segment_length: int,
        rank: int,
        dropout: float = 0.0,
        backend: str = "sdpa",
    ) -> None:
        super().__init__(dim, num_heads=num_heads)
        check_choice("attention backend", backend, BACKENDS)
        self.window_size = window_size
        self.segment_length = segment_length
        self.rank = rank
        self.dropout = dropout
        self.backend = backend
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.dynamic_projection = nn.Linear(dim, num_heads * rank)
        self.window_position = nn.Linear(dim, dim, bias=False)
        self.segment_position = nn.Linear(dim, dim)
        self.key_bias = nn.Parameter(torch.zeros(num_heads, dim // num_heads))
        self.query_bias = nn.Parameter(torch.zeros(num_heads, dim // num_heads))
        self.projection = nn.Linear(dim, dim, bias=False)

    def forward(self, tokens: Tensor, memory: Tensor, window_table: Tensor, segment_table: Tensor) -> Tensor:
        """The update of the tokens, (B, N, C).

        Args:
            tokens: (B, N, C). memory: (B, L, C); L is a multiple of l, and w or more.
            window_table: (w, C), sinusoids of the distances w - 1 to 0.
            segment_table: (V + r, C), sinusoids of V + r - 1 to 0; V projected keys of the memory and of all segments
                of the part but the last.
        """
        key, value = self.key(tokens), self.value(tokens)
        recent = memory[:, -self.window_size :]
        window_key, window_value = self.norm_local(
            torch.cat([self.key(recent), key], dim=1), torch.cat([self.value(recent), value], dim=1)
        )
        (summed,) = self._sums(memory, memory)
        summed_key, summed_value = self.key(summed), self.value(summed)
        # The last segment, whole or not, is seen by no token of the part.
        whole = (tokens.shape[1] - 1) // self.segment_length * self.segment_length
        if whole:
            of_part = self._sums(tokens[:, :whole], key[:, :whole], value[:, :whole])
            summed_key, summed_value = torch.cat([summed_key, of_part[0]], 1), torch.cat([summed_value, of_part[1]], 1)
        summed_key, summed_value = self.norm_projected(summed_key, summed_value)
        options = {"dropout": self.dropout} if self.training and self.dropout else {}
        output = BACKENDS[self.backend](
            split_heads(self.query(tokens), self.num_heads),
            window_key,
            window_value,
            window_size=self.window_size,
            segment_length=self.segment_length,
            rank=self.rank,
            summed_key=summed_key,
            summed_value=summed_value,
            key_bias=self.key_bias,
            query_bias=self.query_bias,
            window_positions=self._by_head(self.window_position(window_table)),
            segment_positions=self._by_head(self.segment_position(segment_table)),
            **options,
        )
        return self.projection(merge_heads(output))

    def _sums(self, tokens: Tensor, *summed: Tensor) -> tuple[Tensor, ...]:
        """r sums of every segment: (B, n * l, C), of which the scores are, and each of ``summed`` -> (B, n * r, C)."""
        batch, number = len(tokens), tokens.shape[1] // self.segment_length

        def segments(x: Tensor) -> Tensor:
            """(B, n * l, ...) -> (B * n, M, 1, l, D)."""
            return split_heads(x.unflatten(1, (number, 1, self.segment_length)).flatten(0, 1), self.num_heads)

        sums = project_tokens(segments(self.dynamic_projection(tokens)), *map(segments, summed))
        return tuple(merge_heads(x).unflatten(0, (batch, number)).flatten(1, 2) for x in sums)

    def _by_head(self, table: Tensor) -> Tensor:
        """(P, C) -> (M, P, D)."""
        return table.unflatten(1, (self.num_heads, -1)).transpose(0, 1)
