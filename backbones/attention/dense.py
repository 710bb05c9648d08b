"""Full attention: every token sees every token (ViL section 3.3, ``a = full``), with or without relative bias."""

import torch
from torch import Tensor, nn

from backbones.attention import blocked, reference
from backbones.attention.sdpa import pytorch_attention
from backbones.errors import check_choice
from backbones.layers.position import GridRelativeBias
from backbones.layers.tracing import contiguous_for_export, is_exporting, is_tracing, take_first

# For so few the scores are smaller than the keys, and may be kept.
_FEW_QUERIES = 16


def dense_attention(query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention over all keys.

    Args:
        query: (B, M, L, D). key, value: (B, M, S, D).
        bias: broadcast to (B, M, L, S) and added to the scaled products.

    Returns:
        (B, M, L, D)
    """
    if bias is not None and bias.ndim == 3:
        if (
            blocked.needs_blocks(query, key, value, biases=(bias,))
            and bias.requires_grad
            and query.shape[2] > _FEW_QUERIES
        ):
            return blocked.dense_attention(query, key, value, bias)
        # With a mask of three axes PyTorch leaves its fast kernel on the CPU.
        bias = bias[None]
        if is_exporting():
            # torch 2.14 exports a broadcast bias for batches of two or more only.
            bias = bias.expand(query.shape[0], -1, -1, -1)
    return pytorch_attention(query, key, value, attn_mask=bias)


def split_heads(tokens: Tensor, num_heads: int) -> Tensor:
    """(B, ..., M * D) -> (B, M, ..., D), a view."""
    return tokens.unflatten(-1, (num_heads, -1)).movedim(-2, 1)


def merge_heads(tokens: Tensor) -> Tensor:
    """(B, M, ..., D) -> (B, ..., M * D)."""
    return contiguous_for_export(tokens.movedim(1, -2)).flatten(-2)


# A traced run has a fixed number of groups: of about 2^21 scores per head, on the feature map that the table is made
# for, and at most 8.
_TRACED_SCORES, _TRACED_GROUPS = 2**21, 8

BACKENDS = {"sdpa": dense_attention, "reference": reference.attention}


class TokenAttention(nn.Module):
    """Multi-head attention of tokens of a feature map and global tokens; a subclass defines which keys they see.

    Args:
        dim: channels of a token.
        num_heads: divides ``dim``.
        num_global_tokens: G.
        update_globals: whether the global tokens are queries too; the last block of a stage drops them.
        backend: a key of ``backends``; ``"reference"`` is for debugging.

    Raises:
        ConfigError: for an unknown backend.
    """

    backends = BACKENDS
    shared_projections = True
    # Whether one layer projects tokens to queries, keys and values.
    has_qkv = True

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        num_global_tokens: int = 1,
        update_globals: bool = True,
        backend: str = "sdpa",
    ) -> None:
        super().__init__()
        check_choice("attention backend", backend, self.backends)
        self.num_heads = num_heads
        self.backend = backend
        self.num_global_tokens = num_global_tokens
        self.update_globals = update_globals and num_global_tokens > 0
        if self.has_qkv:
            self.qkv = nn.Linear(dim, 3 * dim)
        else:
            self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """(B, G + H * W, C), global tokens first, and (H, W) -> the same, or (B, H * W, C) without updated globals."""
        return self.proj(merge_heads(self._attend(tokens, size)))

    def _attend(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """The output of each head, (B, M, L, D), for the global tokens first, where they are updated."""
        raise NotImplementedError

    def _queries(self, tokens: Tensor) -> Tensor:
        """The tokens that are queries: all, or the local ones."""
        return tokens if self.update_globals else split_globals(tokens, self.num_global_tokens)[1]

    def _project(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Queries (B, M, L, D), keys and values (B, M, G + H * W, D), by one layer."""
        query, key, value = split_heads(self.qkv(tokens), 3 * self.num_heads).chunk(3, dim=1)
        return query if self.update_globals else query[:, :, self.num_global_tokens :], key, value


class DenseAttention(TokenAttention):
    """Multi-head self-attention over the tokens of a feature map and the global tokens together.

    On a large feature map a learned bias is computed for a group of rows at a time, and again in the backward pass, or
    is a view of a small table, so that never more than a part of the N x N scores of a head is in memory. A traced run
    has a fixed number of groups.

    Args:
        bias_size: height and width, in tokens, of the feature map that the relative bias table is made for, next to a
            table for the global tokens; None for no relative bias.
        bias_resize_mode: ``"linear"`` (bilinear) or ``"cubic"``.
        bias_resizing: ``"per_feature_map"``, or ``"once"`` for a table that is large enough for every map.
        common: see :class:`TokenAttention`.
    """

    sized = ("num_groups",)

    def __init__(
        self,
        dim: int,
        *,
        bias_size: tuple[int, int] | None = None,
        bias_resize_mode: str = "linear",
        bias_resizing: str = "per_feature_map",
        **common: int | bool | str,
    ) -> None:
        super().__init__(dim, **common)
        self.relative_bias, self.num_groups = None, 1
        if bias_size is not None:
            scores = (bias_size[0] * bias_size[1]) ** 2
            self.num_groups = min(-(-scores // _TRACED_SCORES), _TRACED_GROUPS)
            self.relative_bias = GridRelativeBias(
                bias_size,
                self.num_heads,
                num_global_tokens=self.num_global_tokens,
                global_queries=self.update_globals,
                resize_mode=bias_resize_mode,
                resizing=bias_resizing,
            )

    def _attend(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        height, width = size
        query, key, value = self._project(tokens)
        if is_tracing():
            return self._traced(query, key, value, height, width)
        if self.relative_bias is None:
            return self.backends[self.backend](query, key, value)
        return self._on_map(query, key, value, height, width)

    def _on_map(self, query: Tensor, key: Tensor, value: Tensor, height: int, width: int) -> Tensor:
        """Attention with the relative bias, outside of a traced run."""
        attend, bias = BACKENDS[self.backend], self.relative_bias
        if self.backend != "sdpa" or torch.compiler.is_compiling() or not query.numel():
            return attend(query, key, value, bias=bias(height, width))
        num_queries = query.shape[2] - height * width
        local = query[:, :, num_queries:].unflatten(2, (height, width))
        if query.device.type == "cuda":
            grid = bias.by_offset(height, width)
            output = blocked.checkpointed_map_attention(local, key, value, grid, bias.global_key_bias)
        else:
            output = blocked.map_attention(local, key, value, bias.by_row_offset(height, width), bias.global_key_bias)
        if num_queries:
            globals_ = attend(query[:, :, :num_queries], key, value, bias=bias.global_query_bias(height * width))
            output = torch.cat([globals_, output], dim=2)
        return output

    def _traced(self, query: Tensor, key: Tensor, value: Tensor, height: int, width: int) -> Tensor:
        """Attention in a run that is traced for maps of other sizes."""
        attend, num_global = BACKENDS[self.backend], self.num_global_tokens
        key, value, key_rows = traced_keys(key, value, height, width, num_global)
        if self.relative_bias is None:
            return attend(contiguous_for_export(query), key, value)
        # (groups, R); the last groups repeat the last row, where their number does not divide the height.
        step = (height + self.num_groups - 1) // self.num_groups
        starts = torch.arange(self.num_groups, device=query.device) * step
        rows = _up_to_last(starts[:, None] + torch.arange(step, device=query.device), height)
        num_queries = num_global if self.update_globals else 0
        local = query[:, :, num_queries:].index_select(2, _tokens_of(rows.flatten(), width))
        # (groups, B, M, R * W, D)
        local = contiguous_for_export(local.unflatten(2, (self.num_groups, step * width)).movedim(2, 0))
        biases = self.relative_bias.row_group_biases(self.relative_bias.by_row_offset(height, width), rows, key_rows)
        outputs = [attend(part, key, value, bias=bias) for part, bias in zip(local.unbind(), biases, strict=True)]
        output = outputs[0] if self.num_groups == 1 else take_first(torch.cat(outputs, dim=2), 2, height * width)
        if num_queries:
            bias = self.relative_bias.global_query_bias(height * width)
            globals_ = attend(contiguous_for_export(query[:, :, :num_queries]), key, value, bias=bias)
            output = torch.cat([globals_, output], dim=2)
        return output


def traced_keys(key: Tensor, value: Tensor, height: int, width: int, num_global: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values for a run that is traced for feature maps of other sizes, and the rows that they are.

    PyTorch branches on a single key, and an export would specialise to one branch. So an export sees a map of one row
    twice, which changes no weighted mean.

    Args:
        key, value: (B, M, G + height * width, D).

    Returns:
        Both as (B, M, G + S * width, D), and (S,): numbers of rows. S is ``height``, or 2 where that is 1, in an export
        and without global tokens.
    """
    if num_global or not is_exporting():
        return contiguous_for_export(key), contiguous_for_export(value), torch.arange(height, device=key.device)
    rows = _up_to_last(torch.arange(torch.sym_max(height, 2), device=key.device), height)
    numbers = _tokens_of(rows, width)
    return key.index_select(2, numbers), value.index_select(2, numbers), rows


def _up_to_last(rows: Tensor, height: int) -> Tensor:
    """``rows.clamp(max=height - 1)``; of int64, as numbers of rows are, TensorRT documents Min and no Clip."""
    return rows.minimum(torch.arange(height, device=rows.device)[-1:])


def _tokens_of(rows: Tensor, width: int) -> Tensor:
    """Numbers of rows (R,) of a feature map -> numbers of their tokens, (R * width,)."""
    return (rows[:, None] * width + torch.arange(width, device=rows.device)).flatten()


def join_tokens(tokens: Tensor, global_tokens: Tensor | None) -> Tensor:
    """(B, H, W, C) and (B, G, C) or None -> (B, G + H * W, C), global tokens first."""
    sequence = tokens.flatten(1, 2)
    return sequence if global_tokens is None else torch.cat([global_tokens, sequence], dim=1)


def split_globals(sequence: Tensor, num_global: int, dim: int = 1) -> tuple[Tensor | None, Tensor]:
    """(B, G + H * W, C) -> the global tokens, (B, G, C) or None for none, and the local ones, (B, H * W, C)."""
    if not num_global:
        return None, contiguous_for_export(sequence)
    parts = sequence.split([num_global, sequence.shape[dim] - num_global], dim=dim)
    return tuple(contiguous_for_export(part) for part in parts)
