"""Full attention between all tokens (ViL section 3.3, ``a = full``), with or without a relative position bias."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from backbones.attention import cpu_blocks, reference
from backbones.attention.chunks import split_blocks
from backbones.attention.triton_check import resolve_backend
from backbones.attention.triton_dense import DENSE_MODE, triton_map_attention
from backbones.layers import tracing
from backbones.layers.position import GridRelativeBias

# Kernels of PyTorch's attention: all but cuDNN's.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Maximum number of scores in one call on a GPU: 512 MB in bfloat16
_CALL_SCORES = 2**28


def pytorch_attention(query: Tensor, key: Tensor, value: Tensor, **options: Tensor | float | bool | None) -> Tensor:
    """Return ``F.scaled_dot_product_attention`` of the arguments, without cuDNN's kernel.

    PyTorch may choose cuDNN's kernel on an H100. Its backward pass has rules for strides, which keys that are
    overlapping views may break.
    """
    # Dynamo cannot trace a read of the flag. If the caller has excluded cuDNN, its choice of kernels is kept.
    if query.device.type != "cuda" or not (torch.compiler.is_compiling() or torch.backends.cuda.cudnn_sdp_enabled()):
        return F.scaled_dot_product_attention(query, key, value, **options)
    with sdpa_kernel(_KERNELS):
        return F.scaled_dot_product_attention(query, key, value, **options)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Return scaled dot-product attention over all keys.

    Args:
        query: (B, M, L, D).
        key: (B, M, S, D).
        value: (B, M, S, D).
        bias: Broadcast to (B, M, L, S) and added to the scaled products.

    Returns:
        (B, M, L, D)
    """
    if bias is not None and bias.ndim == 3:
        # With a mask of three axes PyTorch does not use its fast kernel on a CPU.
        bias = bias[None]
        if tracing.is_exporting():
            # torch 2.14 exports a broadcast bias only for batches of two or more.
            bias = bias.expand(query.shape[0], -1, -1, -1)
    return pytorch_attention(query, key, value, attn_mask=bias)


def global_query_attention(query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Return the same as :func:`dense_attention`, but faster on a GPU for few queries and many keys.

    PyTorch's kernel for biases computes all keys of a query in sequence. One query with 67,201 keys took 17 ms on an
    H200, and matrix products took 0.7 ms. Without a bias, the kernel for half precision splits the keys.
    """
    dtype = tracing.autocast_dtype(query.device) or query.dtype
    if query.device.type != "cuda" or (bias is None and dtype != torch.float32):
        return dense_attention(query, key, value, bias=bias)
    scores = torch.matmul(query * query.shape[3] ** -0.5, key.transpose(2, 3))
    weights = (scores if bias is None else scores + bias).softmax(-1, dtype=torch.promote_types(dtype, torch.float32))
    if dtype == torch.float16:
        # The weights of many keys are too small for float16.
        with tracing.autocast_off(query.device):
            return torch.matmul(weights, value.float()).to(dtype)
    return torch.matmul(weights.to(dtype), value.to(dtype))


def split_heads(tokens: Tensor, num_heads: int) -> Tensor:
    """Return a view (B, M, ..., D) of tokens (B, ..., M * D)."""
    return tokens.unflatten(-1, (num_heads, -1)).movedim(-2, 1)


def merge_heads(tokens: Tensor) -> Tensor:
    """Return tokens (B, ..., M * D) from the outputs (B, M, ..., D) of the heads."""
    return tracing.contiguous_for_export(tokens.movedim(1, -2)).flatten(-2)


# A traced run has a fixed number of groups: about 2^21 scores per head and group on the feature map that the table is
# made for, and at most 8 groups.
_TRACED_SCORES, _TRACED_GROUPS = 2**21, 8

BACKENDS = {"sdpa": dense_attention, "reference": reference.attention}


class TokenAttention(nn.Module):
    """Base class of multi-head attention over the tokens of a feature map and global tokens.

    A subclass defines which keys the tokens attend to.

    Args:
        dim: Channels of a token.
        num_heads: Number M of heads. It divides ``dim``.
        num_global_tokens: Number G of global tokens.
        update_globals: Whether the global tokens are queries too. The last block of a stage drops them.
        backend: A key of ``backends``. ``"reference"`` is for debugging.
    """

    backends = BACKENDS
    shared_projections = True
    # Whether one layer computes queries, keys and values.
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
        """Return the updated tokens.

        Args:
            tokens: (B, G + H * W, C), global tokens first.
            size: H and W.

        Returns:
            (B, G + H * W, C), or (B, H * W, C) if the global tokens are not updated.
        """
        return self.proj(merge_heads(self._attend(tokens, size)))

    def _attend(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the output of each head, (B, M, L, D). The global tokens come first if they are updated."""
        raise NotImplementedError

    def _queries(self, tokens: Tensor) -> Tensor:
        """Return the tokens that are queries: all tokens, or only the local ones."""
        return tokens if self.update_globals else split_globals(tokens, self.num_global_tokens)[1]

    def _project(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return queries (B, M, L, D), keys and values (B, M, G + H * W, D), computed by one layer."""
        query, key, value = split_heads(self.qkv(tokens), 3 * self.num_heads).chunk(3, dim=1)
        return query if self.update_globals else query[:, :, self.num_global_tokens :], key, value


class DenseAttention(TokenAttention):
    """Multi-head self-attention over the tokens of a feature map and the global tokens together.

    The bias of a large feature map is computed for a group of rows at a time, and computed again in the backward pass.
    Only a part of the N x N scores of a head is in memory at any time. A traced run has a fixed number of groups.

    Args:
        dim: Channels of a token.
        bias_size: Height and width, in tokens, of the feature map that the relative bias table is made for. None for no
            relative bias. The global tokens have a table of their own.
        bias_resize_mode: ``"linear"`` (bilinear) or ``"cubic"``.
        bias_resizing: ``"per_feature_map"``, or ``"once"`` for a table that is large enough for every feature map.
        common: See :class:`TokenAttention`. ``"auto"`` and ``"sdpa"`` are PyTorch's attention. ``"triton"`` is for CUDA
            and a relative bias. Without a bias it is PyTorch's attention.
    """

    backends = BACKENDS | dict.fromkeys(("auto", "triton"), dense_attention)

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
        if bias_size is None:
            self.backend = "reference" if self.backend == "reference" else "sdpa"
        else:
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
        if tracing.is_tracing():
            return self._traced(query, key, value, height, width)
        if self.relative_bias is None:
            return self.backends[self.backend](query, key, value)
        return self._on_map(query, key, value, height, width)

    def _on_map(self, query: Tensor, key: Tensor, value: Tensor, height: int, width: int) -> Tensor:
        """Return the attention with the relative bias, in a run that is not traced."""
        bias, num_queries = self.relative_bias, query.shape[2] - height * width
        local = query[:, :, num_queries:].unflatten(2, (height, width))
        tensors = {"query": local, "key": key, "value": value}
        parameters = {"local_bias": bias.table, "global_bias": bias.local_to_global}
        backend = resolve_backend(self.backend, tensors | parameters, mode=DENSE_MODE)
        if backend == "reference" or (backend == "sdpa" and torch.compiler.is_compiling()) or not query.numel():
            return self.backends[backend](query, key, value, bias=bias(height, width))
        # FLOPs are counted on the meta device, so the padding for a GPU must not be counted there.
        if backend == "sdpa" and query.device.type in ("cpu", "meta"):
            by_row_offset = bias.by_row_offset(height, width)
            output = cpu_blocks.map_attention(local, key, value, by_row_offset, bias.local_to_global)
        else:
            attend = triton_map_attention if backend == "triton" else map_attention
            output = attend(local, key, value, bias.by_offset(height, width), bias.local_to_global)
        if num_queries:
            bias = bias.global_query_bias(height * width)
            globals_ = global_query_attention(query[:, :, :num_queries], key, value, bias=bias)
            output = torch.cat([globals_, output], dim=2)
        return output

    def _traced(self, query: Tensor, key: Tensor, value: Tensor, height: int, width: int) -> Tensor:
        """Return the attention in a traced run, for feature maps of any size."""
        attend, num_global = self.backends[self.backend], self.num_global_tokens
        key, value, key_rows = traced_keys(key, value, height, width, num_global)
        if self.relative_bias is None:
            return attend(tracing.contiguous_for_export(query), key, value)
        # (groups, R). The last groups repeat the last row if the number of groups does not divide the height.
        step = (height + self.num_groups - 1) // self.num_groups
        starts = torch.arange(self.num_groups, device=query.device) * step
        rows = _up_to_last(starts[:, None] + torch.arange(step, device=query.device), height)
        num_queries = num_global if self.update_globals else 0
        local = query[:, :, num_queries:].index_select(2, _tokens_of(rows.flatten(), width))
        # (groups, B, M, R * W, D)
        local = tracing.contiguous_for_export(local.unflatten(2, (self.num_groups, step * width)).movedim(2, 0))
        biases = self.relative_bias.row_group_biases(self.relative_bias.by_row_offset(height, width), rows, key_rows)
        outputs = [attend(part, key, value, bias=bias) for part, bias in zip(local.unbind(), biases, strict=True)]
        output = outputs[0]
        if self.num_groups > 1:
            output = tracing.take_first(torch.cat(outputs, dim=2), 2, height * width)
        if num_queries:
            bias = self.relative_bias.global_query_bias(height * width)
            globals_ = attend(tracing.contiguous_for_export(query[:, :, :num_queries]), key, value, bias=bias)
            output = torch.cat([globals_, output], dim=2)
        return output


def map_attention(query: Tensor, key: Tensor, value: Tensor, offset_bias: Tensor, global_bias: Tensor | None) -> Tensor:
    """Return the attention of a feature map's tokens to the global tokens and to the whole feature map.

    PyTorch's kernel computes it in a few calls. The backward pass computes the bias of each call again.

    Args:
        query: (B, M, H, W, D).
        key: (B, M, G + H * W, D).
        value: (B, M, G + H * W, D).
        offset_bias: (M, 2 * H - 1, 2 * W - 1), the bias by offset of rows and of columns, query minus key.
        global_bias: (M, G), or None without global tokens.

    Returns:
        (B, M, H * W, D)
    """
    (batch, heads, height, width), num_keys = query.shape[:4], key.shape[2]
    # Keys are in reverse order, so that the bias is a view of its table. PyTorch does not copy an aligned bias again.
    fill = (0, 0, 0, tracing.padding_to_multiple(num_keys, 16))
    key, value = (F.pad(x.flip(2), fill) for x in (key, value))
    dtype, outputs = tracing.autocast_dtype(query.device) or query.dtype, []

    def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor, to_global: Tensor | None) -> Tensor:
        """Return the attention (B, M, rows * W, D) of some heads and rows."""
        # (M, rows, W, H, W). The gradient is summed in float32.
        bias = table.unfold(1, height, 1).unfold(2, width, 1).to(dtype, memory_format=torch.contiguous_format)
        parts = [bias.flatten(3).flatten(1, 2)]
        if to_global is not None:
            parts.append(to_global.flip(1).to(dtype)[:, None].expand(-1, query.shape[2], -1))
        hidden = key.shape[2] - num_keys
        if hidden:
            parts.append(bias.new_full((1, 1, 1), float("-inf")).expand(*parts[0].shape[:2], hidden))
        return pytorch_attention(query, key, value, attn_mask=torch.cat(parts, dim=2)[None])

    for some_heads, rows in split_blocks((heads, height), batch * width * num_keys, _CALL_SCORES):
        table = offset_bias[some_heads, rows.start : rows.stop + height - 1]
        inputs = query[:, some_heads, rows].flatten(2, 3), key[:, some_heads], value[:, some_heads], table
        to_global = None if global_bias is None else global_bias[some_heads]
        output = checkpoint(attend, *inputs, to_global, use_reentrant=False, preserve_rng_state=False)
        if rows.start == 0:
            outputs.append([])
        outputs[-1].append(output)
    return torch.cat([torch.cat(parts, dim=2) for parts in outputs], dim=1)


def traced_keys(key: Tensor, value: Tensor, height: int, width: int, num_global: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values for a traced run, and the numbers of their rows.

    PyTorch branches on a single key, and ``torch.export`` would specialize to one branch. Therefore an export repeats a
    feature map of one row, which changes no weighted mean.

    Args:
        key: (B, M, G + height * width, D).
        value: (B, M, G + height * width, D).
        height: Rows of the feature map.
        width: Columns of the feature map.
        num_global: Number G of global tokens.

    Returns:
        Keys and values (B, M, G + S * width, D), and the numbers of the rows (S,). S is ``height``, or 2 for a height
        of 1 in an export without global tokens.
    """
    if num_global or not tracing.is_exporting():
        key, value = map(tracing.contiguous_for_export, (key, value))
        return key, value, torch.arange(height, device=key.device)
    rows = _up_to_last(torch.arange(torch.sym_max(height, 2), device=key.device), height)
    numbers = _tokens_of(rows, width)
    return key.index_select(2, numbers), value.index_select(2, numbers), rows


def _up_to_last(rows: Tensor, height: int) -> Tensor:
    """Return ``rows.clamp(max=height - 1)``. TensorRT documents Min for int64, but not Clip."""
    return rows.minimum(torch.arange(height, device=rows.device)[-1:])


def _tokens_of(rows: Tensor, width: int) -> Tensor:
    """Return the numbers (R * width,) of the tokens in these rows (R,) of a feature map."""
    return (rows[:, None] * width + torch.arange(width, device=rows.device)).flatten()


def join_tokens(tokens: Tensor, global_tokens: Tensor | None) -> Tensor:
    """Return one sequence (B, G + H * W, C), global tokens first, from (B, H, W, C) and (B, G, C) or None."""
    sequence = tokens.flatten(1, 2)
    return sequence if global_tokens is None else torch.cat([global_tokens, sequence], dim=1)


def split_globals(sequence: Tensor, num_global: int, dim: int = 1) -> tuple[Tensor | None, Tensor]:
    """Split (B, G + H * W, C) into the global tokens, (B, G, C) or None, and the local tokens, (B, H * W, C)."""
    if not num_global:
        return None, tracing.contiguous_for_export(sequence)
    parts = sequence.split([num_global, sequence.shape[dim] - num_global], dim=dim)
    return tuple(map(tracing.contiguous_for_export, parts))
