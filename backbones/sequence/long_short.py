"""Long-short attention over a sequence, in both directions (Transformer-LS sections 3.2 to 3.4, figure 5).

The sequence is cut into segments of w tokens. A token sees its own segment, w // 2 tokens on either side of it, r
projected keys that sum up all tokens, and the class token, all in one softmax. Memory is linear in the length.
Shapes: B sequences, M heads, N tokens, D channels a head, C = M * D, r projected keys, P keys that all tokens see.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.attention import reference
from backbones.attention.dense import merge_heads, split_heads
from backbones.attention.long_short import DualNorm, project_tokens
from backbones.execution import overlap
from backbones.execution.precision import at_least_float32
from backbones.execution.tracing import missing
from backbones.utils.errors import check_choice

# Tokens that are attended for at once, where their segments are smaller.
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
    """Attention of the tokens.

    Args:
        query, key, value: (B, M, N, D); any N.
        window_size: w; the window has ``max(w // 2, 1)`` tokens more on each side of a segment. 0 for no window, where
            there are shared keys.
        mask: (B, N), True for a real token; None where all are. Padding is seen by none.
        shared_key, shared_value: (B, M, P, D), seen by all tokens, or None.
        dropout: rate of the attention weights that are left out.

    Returns:
        (B, M, N, D), 0 for padding.

    Source: sections 3.2 and 3.4, equation 6.
    """
    if window_size:
        output = _attend_in_windows(query, key, value, window_size, mask, shared_key, shared_value, dropout)
    else:
        output = F.scaled_dot_product_attention(query, shared_key, shared_value, dropout_p=dropout)
    return output if mask is None else output.masked_fill(~mask[:, None, :, None], 0)


def _attend_in_windows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window_size: int,
    mask: Tensor | None,
    shared_key: Tensor | None,
    shared_value: Tensor | None,
    dropout: float,
) -> Tensor:
    batch, _, number, _ = query.shape
    # One segment has all tokens then.
    window_size = max(min(window_size, number), 1)
    side = max(window_size // 2, 1)
    # Large blocks of segments copy the shared keys less often, small ones meet fewer keys that are none of theirs.
    block = window_size * min(max(_BLOCK // window_size, 1), -(-number // window_size))
    length, fill = block + 2 * side, missing(number, block)
    halo = (side, side + fill)

    # (block, length): whether a place is in the window of a query's segment.
    first = torch.arange(block, device=query.device)[:, None] // window_size * window_size
    place = torch.arange(length, device=query.device)
    seen = (place >= first) & (place < first + window_size + 2 * side)
    # (B, n, block, length): and holds a real token.
    real = query.new_ones((1, number), dtype=torch.bool) if mask is None else mask
    seen = F.pad(real, halo, value=False).unfold(1, length, block)[:, :, None] & seen
    if shared_key is None:
        # The window of such a query is padding alone; a softmax over nothing would be no number.
        seen = seen | ~seen.any(dim=-1, keepdim=True)
    else:
        seen = F.pad(seen, (shared_key.shape[2], 0), value=True)
    seen = seen.expand(batch, -1, -1, -1).flatten(0, 1)[:, None]

    # (B * n, M, block, D) and (B * n, M, P + length, D)
    queries = F.pad(query, (0, 0, 0, fill)).unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1)
    keys = _windows(F.pad(key, (0, 0, *halo)), shared_key, length, block)
    values = _windows(F.pad(value, (0, 0, *halo)), shared_value, length, block)
    output = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, dropout_p=dropout)
    blocks = (number + fill) // block
    return output.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :number]


def _windows(x: Tensor, shared: Tensor | None, length: int, step: int) -> Tensor:
    """(B, M, L, D) and (B, M, P, D) -> the keys of each block, the shared ones first: (B * n, M, P + length, D)."""
    windows = overlap.windows(x, 2, length, step).transpose(1, 2)
    if shared is not None:
        windows = torch.cat([shared[:, None].expand(-1, windows.shape[1], -1, -1, -1), windows], dim=3)
    return windows.flatten(0, 1)


def class_token_attention(
    query: Tensor, key: Tensor, value: Tensor, gathered: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """Attention of the class token over itself and what the tokens have gathered, which is key and value at once.

    Args:
        query, key, value: (B, M, 1, D), of the class token, not normed.
        gathered: (B, M, N, D), of :func:`sequence_attention`.
        mask: (B, N), True for a real token; None where all are.

    Returns:
        (B, M, 1, D)
    """
    seen = None if mask is None else F.pad(mask, (1, 0), value=True)[:, None, None, :]
    key, value = torch.cat([key, gathered], dim=2), torch.cat([value, gathered], dim=2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)


# What attends for the tokens, and what for the class token.
BACKENDS = {
    "sdpa": (sequence_attention, class_token_attention),
    "reference": (reference.sequence_attention, reference.class_token_attention),
}


class SequenceAttention(DualNorm):
    """Multi-head long-short attention over the tokens of a sequence and its class token, as in the official code.

    The class token's keys and values do without the norm of the tokens; they are normed beside the projected ones.

    Args:
        dim: channels of a token.
        num_heads: divides ``dim``.
        window_size: w, tokens of a segment; 0 for the projection alone.
        rank: r, projected keys of a head; 0 for the window alone.
        class_token: whether there is one.
        update_tokens: whether the tokens get an output; where only the class token is asked for they need none.
        dropout: rate of the tokens' attention weights that are left out in training.
        backend: a key of ``BACKENDS``; ``"reference"`` is quadratic, and for debugging.

    Raises:
        InputError: for an unknown backend.
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
        backend: str = "sdpa",
    ) -> None:
        super().__init__(dim, num_heads=num_heads, projects=rank > 0 or class_token)
        check_choice("attention backend", backend, BACKENDS)
        self.window_size = window_size
        self.update_tokens = update_tokens
        self.dropout = dropout
        self.backend = backend
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.dynamic_projection = nn.Linear(dim, num_heads * rank) if rank else None
        self.projection = nn.Linear(dim, dim)

    def forward(
        self, tokens: Tensor, class_token: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """(B, N, C), (B, 1, C) or None, and a mask (B, N) or None -> updates of both, None for what is not updated."""
        query = split_heads(self.query(tokens), self.num_heads)
        key, value = self.norm_local(self.key(tokens), self.value(tokens))
        own = None if class_token is None else [layer(class_token) for layer in (self.query, self.key, self.value)]
        shared_key, shared_value = self._shared(tokens, key, value, own, mask)
        attend, attend_for_class_token = BACKENDS[self.backend]
        options = {"dropout": self.dropout} if self.training and self.dropout else {}
        gathered = attend(
            query,
            key,
            value,
            window_size=self.window_size,
            mask=mask,
            shared_key=shared_key,
            shared_value=shared_value,
            **options,
        )
        update = self.projection(merge_heads(gathered)) if self.update_tokens else None
        if own is None:
            return update, None
        own = (split_heads(x, self.num_heads) for x in own)
        return update, self.projection(merge_heads(attend_for_class_token(*own, gathered, mask=mask)))

    def _shared(
        self, tokens: Tensor, key: Tensor, value: Tensor, own: list[Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Keys and values that all tokens see, (B, M, P, D): the class token's, and the sums of all tokens."""
        keys, values = ([], []) if own is None else ([own[1]], [own[2]])
        if self.dynamic_projection is not None:
            scores = at_least_float32(self.dynamic_projection(tokens))
            if mask is not None:
                # A sequence of padding alone sums it up evenly, for no one to see.
                scores = scores.masked_fill(~mask[:, :, None], torch.finfo(scores.dtype).min)
            scores = split_heads(scores, self.num_heads)[:, :, None]
            projected = project_tokens(scores, key[:, :, None], value[:, :, None])
            keys, values = ([*rest, merge_heads(x)] for rest, x in zip((keys, values), projected, strict=True))
        return self.norm_projected(torch.cat(keys, 1), torch.cat(values, 1)) if keys else (None, None)
