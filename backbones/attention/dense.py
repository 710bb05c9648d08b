"""Full attention: every token sees every token (ViL section 3.3, ``a = full``), with or without relative bias."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backbones.attention import reference
from backbones.attention.kernels.chunks import mark_keys, mark_queries
from backbones.attention.kernels.dense_gradients import dense_attention_by_blocks, map_attention_by_blocks
from backbones.attention.kernels.flash import attention_and_sums, learns_by_blocks
from backbones.execution.tracing import first, in_order, is_exporting, is_tracing, static_size
from backbones.layers.position import GridRelativeBias, bias_as_view
from backbones.utils.errors import check_choice

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
    if _bias_learns(query, key, value, bias):
        return dense_attention_by_blocks(query, key, value, bias)
    # With a mask of three axes PyTorch leaves its fast kernel on the CPU.
    mask = bias[None] if bias is not None and bias.ndim == 3 else bias
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def _bias_learns(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> bool:
    """Whether a bias without an axis for images needs a gradient, for which PyTorch's kernels would keep all scores."""
    is_learned = bias is not None and bias.ndim == 3 and bias.requires_grad
    if not is_learned or not learns_by_blocks(query, key, value, biases=(bias,)):
        return False
    return query.shape[2] > _FEW_QUERIES


def split_heads(tokens: Tensor, num_heads: int) -> Tensor:
    """(B, ..., M * D) -> (B, M, ..., D), a view."""
    return tokens.unflatten(-1, (num_heads, -1)).movedim(-2, 1)


def merge_heads(tokens: Tensor) -> Tensor:
    """(B, M, ..., D) -> (B, ..., M * D)."""
    return in_order(tokens.movedim(1, -2)).flatten(-2)


# Above so many scores a head, queries with a learned bias go in groups of rows.
_GROUP_SCORES = 2**22
# A recorded run has a fixed number of groups: so many scores a head on the map that the table is made for, and no more
# than so many groups.
_RECORDED_SCORES, _RECORDED_GROUPS = 2**21, 8

BACKENDS = {"sdpa": dense_attention, "reference": reference.attention}


class DenseAttention(nn.Module):
    """Multi-head self-attention over the tokens of a map and the global tokens together.

    On a large map a learned bias is made for a group of rows at a time, and again in the backward pass, or is a view of
    a small table, so that never more than a part of the N x N scores a head is in memory. A recorded run has a fixed
    number of groups.

    Args:
        dim: channels of a token.
        num_heads: divides ``dim``.
        num_global_tokens: G; their bias is learned apart from that of the map where ``bias_size`` is given.
        bias_size: height and width, in tokens, of the map that the relative bias table is made for; None for no
            relative bias.
        bias_resize_mode: ``"linear"`` (bilinear) or ``"cubic"``.
        bias_resizing: ``"map"``, or ``"load"`` for a table that is large enough for every map.
        update_globals: whether the global tokens are queries too; the last block of a stage drops them.
        backend: a key of ``BACKENDS``; ``"reference"`` is for debugging.
    """

    sized = ("num_groups",)

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        num_global_tokens: int = 1,
        bias_size: tuple[int, int] | None = None,
        bias_resize_mode: str = "linear",
        bias_resizing: str = "map",
        update_globals: bool = True,
        backend: str = "sdpa",
    ) -> None:
        super().__init__()
        check_choice("attention backend", backend, BACKENDS)
        self.num_heads = num_heads
        self.backend = backend
        self.shared_projections = True
        self.update_globals = update_globals and num_global_tokens > 0
        self.qkv = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim)
        self.relative_bias, self.num_groups = None, 1
        if bias_size is not None:
            scores = (bias_size[0] * bias_size[1]) ** 2
            self.num_groups = min(-(-scores // _RECORDED_SCORES), _RECORDED_GROUPS)
            self.relative_bias = GridRelativeBias(
                bias_size,
                num_heads,
                num_global_tokens=num_global_tokens,
                global_queries=self.update_globals,
                resize_mode=bias_resize_mode,
                resizing=bias_resizing,
            )

    def forward(self, tokens: Tensor, global_tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(B, H, W, C) and (B, G, C) or None -> the same; None for global tokens that are not updated."""
        height, width = tokens.shape[1:3]
        sequence = join_tokens(tokens, global_tokens)
        query, key, value = split_heads(self.qkv(sequence), 3 * self.num_heads).chunk(3, dim=1)
        num_global = 0 if global_tokens is None else static_size(global_tokens.shape[1])
        if not self.update_globals:
            query = query[:, :, num_global:]
        attend = BACKENDS[self.backend]
        if is_tracing():
            output = self._recorded(query, key, value, height, width, num_global)
        elif self.relative_bias is None:
            output = attend(query, key, value)
        else:
            output = self._on_map(query, key, value, height, width)
        output = self.projection(merge_heads(output))
        return part_tokens(output, height, width, num_global if self.update_globals else 0)

    def _on_map(self, query: Tensor, key: Tensor, value: Tensor, height: int, width: int) -> Tensor:
        """Attention with the relative bias, outside of a recorded run."""
        tables = tuple(self.relative_bias.parameters())
        if self.backend == "sdpa" and learns_by_blocks(query, key, value, biases=tables):
            local = self._by_blocks
        elif height * width * key.shape[2] <= _GROUP_SCORES:
            return BACKENDS[self.backend](query, key, value, bias=self.relative_bias(height, width))
        elif torch.is_grad_enabled() or query.device.type != "cpu" or self.backend != "sdpa":
            local = self._by_groups
        else:
            local = self._by_view
        num_queries = query.shape[2] - height * width
        output = local(query[:, :, num_queries:].unflatten(2, (height, width)), key, value)
        if num_queries:
            bias = self.relative_bias.of_globals(height * width)
            globals_ = BACKENDS[self.backend](query[:, :, :num_queries], key, value, bias=bias)
            output = torch.cat([globals_, output], dim=2)
        return output

    def _recorded(self, query: Tensor, key: Tensor, value: Tensor, height: int, width: int, num_global: int) -> Tensor:
        """Attention in a run that is recorded for maps of other sizes."""
        attend = BACKENDS[self.backend]
        key, value, key_rows = recorded_keys(key, value, height, width, num_global)
        if self.relative_bias is None:
            return attend(in_order(query), key, value)
        # (groups, R); the last groups repeat the last row, where their number does not divide the height.
        step = (height + self.num_groups - 1) // self.num_groups
        starts = torch.arange(self.num_groups, device=query.device) * step
        rows = _up_to_last(starts[:, None] + torch.arange(step, device=query.device), height)
        num_queries = num_global if self.update_globals else 0
        local = query[:, :, num_queries:].index_select(2, _tokens_of(rows.flatten(), width))
        # (groups, B, M, R * W, D)
        local = in_order(local.unflatten(2, (self.num_groups, step * width)).movedim(2, 0))
        biases = self.relative_bias.of_groups(self.relative_bias.by_row(height, width), rows, key_rows)
        outputs = [attend(part, key, value, bias=bias) for part, bias in zip(local.unbind(), biases, strict=True)]
        output = outputs[0] if self.num_groups == 1 else first(torch.cat(outputs, dim=2), 2, height * width)
        if num_queries:
            bias = self.relative_bias.of_globals(height * width)
            globals_ = attend(in_order(query[:, :, :num_queries]), key, value, bias=bias)
            output = torch.cat([globals_, output], dim=2)
        return output

    def _by_groups(self, query: Tensor, key: Tensor, value: Tensor, by_row: Tensor | None = None) -> Tensor:
        """Some rows of the map at a time: (B, M, H, W, D), (B, M, G + H * W, D) twice -> (B, M, H * W, D)."""
        height, width = query.shape[2:4]
        if by_row is None:
            by_row = self.relative_bias.by_row(height, width)

        def group(query: Tensor, key: Tensor, value: Tensor, by_row: Tensor, rows: Tensor) -> Tensor:
            bias = self.relative_bias.of_rows(by_row, rows).to(query.dtype)
            return BACKENDS[self.backend](query, key, value, bias=bias)

        step = max(1, _GROUP_SCORES // (width * key.shape[2]))
        numbers, outputs = torch.arange(height, device=query.device).split(step), []
        for part, rows in zip(query.split(step, dim=2), numbers, strict=True):
            inputs = (part.flatten(2, 3), key, value, by_row, rows)
            if torch.is_grad_enabled():
                outputs.append(checkpoint(group, *inputs, use_reentrant=False))
            else:
                outputs.append(group(*inputs))
        return torch.cat(outputs, dim=2)

    def _by_view(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As :meth:`_by_groups`, with a bias that is a view: twice as fast on the CPU, which takes any strides."""
        by_row, to_global = self.relative_bias.by_row(*query.shape[2:4]), self.relative_bias.to_global
        return _attend_by_view(query, key, value, by_row, to_global)[0]

    def _by_blocks(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As :meth:`_by_groups`, with gradients that need none of the scores."""
        by_row, to_global = self.relative_bias.by_row(*query.shape[2:4]), self.relative_bias.to_global
        if query.device.type == "cpu":
            return map_attention_by_blocks(_attend_by_view, query, key, value, by_row, to_global)
        return map_attention_by_blocks(
            lambda q, k, v, by_row, _: (self._by_groups(q, k, v, by_row), None), query, key, value, by_row, to_global
        )


def _attend_by_view(
    query: Tensor, key: Tensor, value: Tensor, by_row: Tensor, to_global: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Attention to a map with a bias that is a view, and its log-sum-exps: see :func:`.map_attention_by_blocks`.

    The rows of queries stand in the batch axis. The global tokens stand behind each row of keys, and are seen behind
    the first.
    """
    height, width, channels = query.shape[2:]
    scale, num_global = channels**-0.5, key.shape[2] - height * width
    if num_global:
        key, value = (
            torch.cat(
                [
                    x[:, :, num_global:].unflatten(2, (height, width)),
                    x[:, :, None, :num_global].expand(-1, -1, height, -1, -1),
                ],
                dim=3,
            )
            for x in (key, value)
        )
        hidden = torch.zeros(height, width + num_global, dtype=torch.bool)
        hidden[1:, width:] = True
        key, query = mark_keys(key, hidden, extra=1, scale=scale).flatten(2, 3), mark_queries(query, 1)
        value = F.pad(value, (0, 1)).flatten(2, 3)
    bias, outputs, sums = bias_as_view(by_row, to_global, query.dtype), [], []
    # Image by image: (H, M, W, D), the last row first, and (M, S, D) twice
    for rows, keys, values in zip(query.flip(2).transpose(1, 2), key, value, strict=True):
        keys, values = (x.expand(height, -1, -1, -1) for x in (keys, values))
        output, sum_ = attention_and_sums(rows, keys, values, bias=bias, scale=scale)
        outputs.append(output[..., :channels])
        sums.append(sum_)
    output = torch.stack(outputs).transpose(1, 2).flip(2).flatten(2, 3)
    return output, None if sums[0] is None else torch.stack(sums).transpose(1, 2).flip(2).flatten(2, 3)


def recorded_keys(
    key: Tensor, value: Tensor, height: int, width: int, num_global: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values for a run that is recorded for maps of other sizes, and the rows of the map that they are.

    PyTorch asks whether there is one key, and an export holds for that answer alone. So an export sees a map of one row
    twice, which changes no weighted mean.

    Args:
        key, value: (B, M, G + height * width, D).

    Returns:
        Both as (B, M, G + S * width, D), and (S,): numbers of rows. S is ``height``, or 2 where that is 1, in an export
        and without global tokens.
    """
    if num_global or not is_exporting():
        return in_order(key), in_order(value), torch.arange(height, device=key.device)
    rows = _up_to_last(torch.arange(torch.sym_max(height, 2), device=key.device), height)
    numbers = _tokens_of(rows, width)
    return key.index_select(2, numbers), value.index_select(2, numbers), rows


def _up_to_last(rows: Tensor, height: int) -> Tensor:
    """``rows.clamp(max=height - 1)``; of int64, as numbers of rows are, TensorRT documents Min and no Clip."""
    return rows.minimum(torch.arange(height, device=rows.device)[-1:])


def _tokens_of(rows: Tensor, width: int) -> Tensor:
    """Numbers of rows (R,) of a map -> numbers of their tokens, (R * width,)."""
    return (rows[:, None] * width + torch.arange(width, device=rows.device)).flatten()


def join_tokens(tokens: Tensor, global_tokens: Tensor | None) -> Tensor:
    """(B, H, W, C) and (B, G, C) or None -> (B, G + H * W, C), global tokens first."""
    sequence = tokens.flatten(1, 2)
    return sequence if global_tokens is None else torch.cat([global_tokens, sequence], dim=1)


def part_tokens(sequence: Tensor, height: int, width: int, num_global: int) -> tuple[Tensor, Tensor | None]:
    """(B, G + H * W, C) -> (B, H, W, C) and (B, G, C); None for no global token."""
    if not num_global:
        return sequence.unflatten(1, (height, width)), None
    return sequence[:, num_global:].unflatten(1, (height, width)), sequence[:, :num_global]
