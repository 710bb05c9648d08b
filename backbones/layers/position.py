"""Position tables: absolute 2-D positions, relative bias for windows and whole feature maps, and their resizing."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from backbones.errors import ConfigError
from backbones.layers.tracing import at_least_float32, contiguous_for_export, is_tracing, take_first

# How a table is used for a feature map of another size. "once" (ViL): it is resized to the largest feature map when a
# checkpoint is loaded, and smaller feature maps use a part of it. "per_feature_map" (LIT): it is resized to each one.
RESIZING = ("once", "per_feature_map")


def init_trunc_normal_(tensor: Tensor) -> Tensor:
    """Fill ``tensor`` from a normal distribution with a standard deviation of 0.02, truncated at 2, and return it.

    All three papers use it. Tensors on the meta device are returned at once, which saves most of the build time.
    """
    return tensor if tensor.is_meta else trunc_normal_(tensor, std=0.02)


def position_parameter(*shape: int) -> nn.Parameter:
    """Return a parameter for positions, biases or tokens, initialized as in ViL."""
    return nn.Parameter(init_trunc_normal_(torch.empty(shape)))


def resize_table(table: Tensor, size: tuple[int, ...], *, mode: str = "linear") -> Tensor:
    """Resize a position table. ViL does it once before training (section 4.3), LIT for each feature map.

    Args:
        table: (L, C) or (H, W, C).
        size: The new (L,) or (H, W).
        mode: ``"linear"``, which is bilinear for a table of two axes, or ``"cubic"``.

    Returns:
        (*size, C), in the dtype of ``table``. Pixel centers are as with ``align_corners=False``.
    """
    # A traced size is a tensor. The graph would keep the result of its comparison.
    if not is_tracing() and tuple(table.shape[:-1]) == tuple(size):
        return table
    mode = mode if len(size) == 1 else f"bi{mode}"
    channels_first = at_least_float32(table.movedim(-1, 0)[None])
    return F.interpolate(channels_first, size=size, mode=mode, align_corners=False)[0].movedim(0, -1).to(table.dtype)


class AbsolutePositions(nn.Module):
    """The 2-D positions of ViL (section 3.1): a table for rows and one for columns, concatenated over channels.

    Args:
        size: Height and width, in tokens, of the feature map that the tables are made for.
        dim: Channels of a token, an even number.
        num_global_tokens: Number G of global tokens. Each has a position of its own.
        resizing: One of ``RESIZING``. With ``"once"``, a smaller feature map uses the top-left part, and a larger one
            raises an error.
    """

    no_weight_decay_names = ("rows", "cols", "global_tokens")

    def __init__(self, size: tuple[int, int], dim: int, *, num_global_tokens: int, resizing: str = "once") -> None:
        super().__init__()
        self.resizing = resizing
        self.rows = position_parameter(size[0], dim // 2)
        self.cols = position_parameter(size[1], dim // 2)
        self.global_tokens = position_parameter(1, num_global_tokens, dim) if num_global_tokens else None

    def forward(self, height: int, width: int) -> Tensor:
        """Return the positions (height, width, C) of a feature map."""
        if self.resizing == "per_feature_map":
            rows, cols = resize_table(self.rows, (height,)), resize_table(self.cols, (width,))
        else:
            _check_size((height, width), (self.rows.shape[0], self.cols.shape[0]))
            rows, cols = take_first(self.rows, 0, height), take_first(self.cols, 0, width)
        return torch.cat([rows[:, None].expand(-1, width, -1), cols[None].expand(height, -1, -1)], dim=-1)


def _check_size(size: tuple[int, int], largest: tuple[int, int]) -> None:
    # A traced size is a tensor. The graph would keep the result of its comparison.
    if not is_tracing() and (size[0] > largest[0] or size[1] > largest[1]):
        differs = f"of {size[0]} x {size[1]} tokens does not fit the position table of {largest[0]} x {largest[1]}"
        advice = "Raise max_img_size (config key MODEL.TRANSFORMER.MAX_IMG_SIZE; img_size in create_classifier)"
        raise ConfigError(f"A feature map {differs}. {advice} to the largest image side.")


class _OffsetBias(nn.Module):
    """A learned bias for each head and each offset between a query and the keys of its window.

    Args:
        side: Side of the square of queries.
        window_side: Side of the square of keys around them.
        stride: Rows of the table from one row offset to the next.
        num_heads: Number M of heads.
    """

    no_weight_decay_names = ("table",)

    def __init__(self, side: int, window_side: int, *, stride: int, num_heads: int) -> None:
        super().__init__()
        self.window_side, self.num_offsets, self.stride = window_side, side + window_side - 1, stride
        self.table = position_parameter((self.num_offsets - 1) * (stride + 1) + 1, num_heads)

    def forward(self) -> Tensor:
        """Return the bias (M, side^2, window_side^2) of queries by keys, both row by row."""
        # The keys of a query are a square of offsets in reverse order. The backward pass of indexing would sort.
        offsets = self.table.T.unfold(1, self.num_offsets, self.stride)
        squares = F.unfold(offsets[None], self.window_side)[0].unflatten(0, (-1, self.window_side**2))
        return squares.flip(1).transpose(1, 2).contiguous()


class WindowRelativeBias(_OffsetBias):
    """A learned bias for each head and each offset between a query and the keys of its 3w x 3w neighborhood.

    The table is the same as in the official ViL code. The row of offset (dh, dw), query minus key, is
    ``(dh + 2w - 1) * (4w - 1) + dw + 2w - 1``.

    Args:
        chunk_size: Side w of a chunk.
        num_heads: Number of heads.
    """

    resize_mode = "linear"

    def __init__(self, chunk_size: int, num_heads: int) -> None:
        side = 4 * chunk_size - 1
        super().__init__(chunk_size, 3 * chunk_size, stride=side, num_heads=num_heads)
        self.offsets = (side, side)


class SegmentRelativeBias(_OffsetBias):
    """A learned bias for each head and each offset between a query and the keys of its window (Transformer-LS).

    The table and its index are the same as in the official code, where the row stride is too small. With side =
    max(w // 2, 1) tokens around the segment, the row of offset (dh, dw), query minus key, is
    ``(dh + side + w - 1) * (w + 2 * side) + dw + side + w - 1``, but dw has 2 * (w + side) - 1 values. Therefore the
    offsets ``(dh, dw)`` and ``(dh + 1, dw - w - 2 * side)`` share a bias. Official weights need this index.

    Args:
        chunk_size: Side w of a segment.
        num_heads: Number of heads.
    """

    def __init__(self, chunk_size: int, num_heads: int) -> None:
        length = chunk_size + 2 * max(chunk_size // 2, 1)
        super().__init__(chunk_size, length, stride=length, num_heads=num_heads)


class GridPositions(nn.Module):
    """The absolute positions of LIT-Ti: one table for the whole feature map.

    Args:
        size: Height and width, in tokens, of the feature map that the table is made for.
        dim: Channels of a token.
        num_global_tokens: Number G of global tokens. Each has a position of its own.
        resizing: One of ``RESIZING``. With ``"per_feature_map"``, the table is resized bilinearly to each feature map.
            With ``"once"``, a smaller feature map uses the top-left part, and a larger one raises an error.
    """

    no_weight_decay_names = ("table", "global_tokens")

    def __init__(
        self, size: tuple[int, int], dim: int, *, num_global_tokens: int = 0, resizing: str = "per_feature_map"
    ) -> None:
        super().__init__()
        self.resizing = resizing
        self.table = position_parameter(*size, dim)
        self.global_tokens = position_parameter(1, num_global_tokens, dim) if num_global_tokens else None

    def forward(self, height: int, width: int) -> Tensor:
        """Return the positions (height, width, C) of a feature map."""
        if self.resizing == "per_feature_map":
            return resize_table(self.table, (height, width))
        _check_size((height, width), self.table.shape[:2])
        return take_first(take_first(self.table, 0, height), 1, width)


class GridRelativeBias(nn.Module):
    """A learned bias for each offset between two tokens of a feature map, and for pairs with global tokens.

    Args:
        size: Height and width, in tokens, of the feature map that the table is made for.
        num_heads: Number M of heads.
        num_global_tokens: Number G of global tokens.
        global_queries: Whether the global tokens are queries too.
        resize_mode: See :func:`resize_table`.
        resizing: One of ``RESIZING``. With ``"once"``, a smaller feature map uses a part of the table, and a larger one
            raises an error.
    """

    no_weight_decay_names = ("table", "local_to_global", "global_to_local", "global_to_global")

    def __init__(
        self,
        size: tuple[int, int],
        num_heads: int,
        *,
        num_global_tokens: int = 0,
        global_queries: bool = False,
        resize_mode: str = "linear",
        resizing: str = "per_feature_map",
    ) -> None:
        super().__init__()
        self.size = size
        self.resizing = resizing
        self.global_queries = global_queries and num_global_tokens > 0
        self.resize_mode = resize_mode
        self.table = position_parameter(math.prod(self.offsets), num_heads)
        # The bias (M, G) of local queries at global keys
        self.local_to_global = position_parameter(num_heads, num_global_tokens) if num_global_tokens else None
        if self.global_queries:
            self.global_to_local = position_parameter(num_heads, num_global_tokens)
            self.global_to_global = position_parameter(num_heads, num_global_tokens, num_global_tokens)

    @property
    def offsets(self) -> tuple[int, int]:
        """The number of offsets along the height and the width of the feature map of the table."""
        return 2 * self.size[0] - 1, 2 * self.size[1] - 1

    def by_offset(self, height: int, width: int) -> Tensor:
        """Return the bias (M, 2 * height - 1, 2 * width - 1) by offset of rows and of columns, query minus key."""
        grid = self.table.unflatten(0, self.offsets)
        if self.resizing == "per_feature_map":
            grid = resize_table(grid, (2 * height - 1, 2 * width - 1), mode=self.resize_mode)
        else:
            _check_size((height, width), self.size)
            rows, cols = self.size
            grid = grid[rows - height : rows + height - 1, cols - width : cols + width - 1]
        return grid.movedim(-1, 0)

    def by_row_offset(self, height: int, width: int) -> Tensor:
        """Return the bias (M, 2 * height - 1, width, width) by row offset, query column and key column."""
        grid = self.by_offset(height, width)
        col = torch.arange(width, device=grid.device)
        offset = col[:, None] - col[None, :] + width - 1
        return grid.index_select(2, offset.flatten()).unflatten(2, (width, width))

    def row_group_biases(self, offset_bias: Tensor, rows: Tensor, key_rows: Tensor) -> Iterator[Tensor]:
        """Yield the bias of the queries in each group of rows. This makes one copy, but the backward pass is slow.

        Args:
            offset_bias: The result of :meth:`by_row_offset`.
            rows: (groups, R), the row numbers of queries.
            key_rows: (S,), the row numbers of keys.

        Yields:
            (M, R * W, G + S * W)
        """
        (heads, offsets, width), num_rows, num_key_rows = offset_bias.shape[:3], rows.shape[1], key_rows.shape[0]
        col = torch.arange(width, device=rows.device)
        # (groups, R, W, S)
        offset = rows[:, :, None, None] - key_rows + offsets // 2 + col[:, None] * offsets
        bias_by_query_col = contiguous_for_export(offset_bias.transpose(1, 2)).flatten(1, 2)
        for index in offset.flatten(1).unbind():
            bias = bias_by_query_col.index_select(1, index)
            yield self._with_globals(bias.view(heads, num_rows * width, num_key_rows * width))

    def _with_globals(self, bias: Tensor) -> Tensor:
        if self.local_to_global is None:
            return bias
        return torch.cat([self.local_to_global[:, None].expand(-1, bias.shape[1], -1), bias], dim=2)

    def global_query_bias(self, tokens: int) -> Tensor:
        """Return the bias (M, G, G + tokens) of the global queries, up to a constant of each query."""
        return global_query_bias(self.global_to_global, self.global_to_local, tokens)

    def forward(self, height: int, width: int) -> Tensor:
        """Return the bias (M, L, G + H * W) of a feature map. L is H * W, or G + H * W with global queries."""
        row = torch.arange(height, device=self.table.device)
        offset = row[:, None] - row[None, :] + height - 1
        # (M, H, H, W, W). This is a second copy, but its backward pass is faster than with row_group_biases.
        bias = self.by_row_offset(height, width).index_select(1, offset.flatten()).unflatten(1, (height, height))
        bias = self._with_globals(bias.transpose(2, 3).flatten(3, 4).flatten(1, 2))
        if self.global_queries:
            bias = torch.cat([self.global_query_bias(bias.shape[1]), bias], dim=1)
        return bias


def global_query_bias(to_global: Tensor, to_local: Tensor, tokens: int) -> Tensor:
    """Return the bias (M, G, G + tokens) of global queries.

    The bias of the local keys is subtracted from each row, which does not change the softmax. The gradient of the
    subtracted bias is a sum over the global keys only. A sum over all tokens is inexact in half precision.

    Args:
        to_global: (M, G, G), the bias by query and global key.
        to_local: (M, G), the bias by query of all local keys.
        tokens: Number of local keys.
    """
    return F.pad(to_global - to_local[:, :, None], (0, tokens))


def fit_table(tensor: Tensor, owner: nn.Module, leaf: str, *, is_square: bool = False) -> Tensor:
    """Resize a position table of another size for the module that it is loaded into.

    Args:
        tensor: The table of a checkpoint.
        owner: The module of this model.
        leaf: Name of the parameter in ``owner``.
        is_square: Whether the table of a :class:`GridRelativeBias` is made for a square feature map, as in all official
            checkpoints. A table whose size differs from the parameter is always treated as square.

    Returns:
        ``tensor`` in the size of the parameter. It is unchanged if the parameter is not a position table, or is the
        table of a :class:`SegmentRelativeBias`, which is not a grid, because offsets share its rows.
    """
    table = getattr(owner, leaf, None)
    # A bias for 2 x 14 tokens has as many rows as one for 14 x 2.
    if not isinstance(table, Tensor) or (tensor.shape == table.shape and not is_square):
        return tensor
    if tensor.ndim != table.ndim or tensor.shape[-1] != table.shape[-1] or not tensor.numel():
        return tensor
    if isinstance(owner, AbsolutePositions | GridPositions) and leaf != "global_tokens":
        return resize_table(tensor, table.shape[:-1])
    side = math.isqrt(len(tensor))
    is_grid = isinstance(owner, GridRelativeBias | WindowRelativeBias) and leaf == "table"
    if not is_grid or side**2 != len(tensor) or owner.offsets == (side, side):
        return tensor
    return resize_table(tensor.unflatten(0, (side, side)), owner.offsets, mode=owner.resize_mode).flatten(0, 1)
